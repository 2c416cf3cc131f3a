"""The pretraining term of InstructGPT (PPO-ptx): the SFT loss on reference summaries, mixed in.

It keeps the policy close to human text while PPO raises the score: each optimizer step also lowers
the negative log-likelihood of as many references as it has episodes, times `ppo.ptx_coef`.
Source: Ouyang et al. 2022, section 3.5 (their mix is pretraining data; off in Huang et al. 2024).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stages.config.config import Config
from stages.config.ppo import PolicyGradient, Ppo
from stages.data.ragged import TokenizedSplit, load_split, pad_left, pad_right
from stages.functional import sequence_logprobs
from stages.models.forward import EMPTY, ResponseBatch
from stages.rl.networks import PolicyLearner
from stages.training.processes import local_share
from stages.training.random_streams import batch_rows


@dataclass(frozen=True, kw_only=True)
class PretrainingMix:
    """References whose SFT loss is added to the policy's."""

    split: TokenizedSplit
    coef: float
    """Weight of the mean loss per token."""
    loss_on_query: bool
    """Whether the query's tokens count too, as in the SFT stage."""
    batch_size: int
    """Sequences per optimizer step, over all devices."""
    steps_per_update: int
    seed: int

    def rows(self, update: int, step: int) -> list[int]:
        """The rows of an optimizer step of an update, both counted from 0."""
        index = update * self.steps_per_update + step
        return batch_rows(len(self.split), self.batch_size, index, self.seed, "ptx")

    def batch(self, rows: Sequence[int], device: torch.device) -> ResponseBatch:
        """These rows as a batch whose responses are the tokens that count."""
        queries = []
        responses = []
        for row in rows:
            query = self.split.columns["queries"][row]
            tokens = torch.cat([query, self.split.columns["summaries"][row]])
            start = 1 if self.loss_on_query else len(query)  # the first token is not predicted
            queries.append(tokens[:start])
            responses.append(tokens[start:])
        return ResponseBatch(
            queries=pad_left(queries, EMPTY).to(device),
            responses=pad_right(responses, EMPTY).to(device),
            pad_id=EMPTY,
        )

    def count_tokens(self, rows: Sequence[int]) -> int:
        """The number of tokens of these rows that count."""
        count = 0
        for row in rows:
            count += len(self.split.columns["summaries"][row])
            if self.loss_on_query:
                count += len(self.split.columns["queries"][row]) - 1
        return count

    def share(self, learner: PolicyLearner, step: int) -> list[int]:
        """This process's rows of an optimizer step, those of similar length together."""
        rows = local_share(self.rows(learner.update, step), learner.accelerator)
        return sorted(rows, key=lambda row: self.count_tokens([row]))


def load_pretraining_mix(
    config: Config, settings: PolicyGradient, data: Path
) -> PretrainingMix | None:
    """The mix that the settings ask for, from the base stage's data; None without one."""
    if not isinstance(settings, Ppo) or not settings.ptx_coef:
        return None
    return PretrainingMix(
        split=load_split(data, "sft_train"),
        coef=settings.ptx_coef,
        loss_on_query=config.sft.loss_on_query,
        batch_size=settings.batch_size // settings.num_minibatches,
        steps_per_update=settings.num_ppo_epochs * settings.num_minibatches,
        seed=config.seed,
    )


def pretraining_losses(
    learner: PolicyLearner, mix: PretrainingMix, rows: Sequence[int], tokens: float
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """A microbatch's part of ptx_coef times the mean SFT loss, with its statistic.

    `tokens`: those that count in the whole step, over all devices.
    """
    batch = mix.batch(rows, learner.accelerator.device)
    logprobs, _ = learner.trained("policy", batch, temperature=1.0)
    loss = -sequence_logprobs(logprobs, batch.responses != EMPTY).sum() / tokens
    yield mix.coef * loss, {"loss/ptx_avg": loss}
