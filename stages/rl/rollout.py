"""Steps 1 to 3 of an update, for any stage that learns from its own episodes.

1. sample   responses of a fixed length for a batch of queries, cut after their first EOS
2. measure  their log-probabilities under policy and frozen ref_policy, the critic's values if any
3. score    each whole response with the reward model, read at EOS
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from stages import functional
from stages.data.ragged import Ragged, load_split, pad_left
from stages.models.forward import response_statistics, response_values, score_responses
from stages.models.logprobs import LogitStatistics, logprob_formula
from stages.models.reward_function import TextReward
from stages.models.sampling import Noise, sample
from stages.rl.advantages import eos_trick
from stages.rl.episodes import Episodes, Measured, Sampled, concatenate, trim_left
from stages.rl.networks import PolicyLearner
from stages.settings.ppo import PolicyGradient
from stages.settings.sections import PPO_TRAIN
from stages.training.memory import PassSize
from stages.training.processes import local_share
from stages.training.sharding import gathered, is_sharded

T = TypeVar("T")


def load_queries(data: Path) -> tuple[str, Ragged]:
    """The split that queries are drawn from, and its queries: `ppo_train` where there is one.

    Stiennon et al. 2020 had other posts for PPO; Huang et al. 2024 reuse those of SFT (detail 21).
    """
    name = PPO_TRAIN if (data / f"{PPO_TRAIN}.jsonl").exists() else "sft_train"
    return name, load_split(data, name).columns["queries"]


@torch.no_grad()
def sample_responses(
    learner: PolicyLearner, queries: Sequence[Tensor], noise: Noise, settings: PolicyGradient
) -> Sampled:
    """Step 1: this process's share of responses to a global batch of queries, shortest query first.

    The responses to one query are neighbours. Neighbours in length share a forward pass, so that
    little of it is padding.
    """
    learner.trained.eval()
    networks, accelerator, group = learner.networks, learner.accelerator, settings.samples_per_query
    eos_id, pad_id = networks.eos_id, networks.pad_id
    places = share_of_batch(accelerator, queries, group)
    rows = [place // group for place in places]
    batch = pad_left([queries[row] for row in rows], pad_id).to(accelerator.device)
    numbers = noise.uniforms(len(queries) * group)[places].to(accelerator.device)
    formula = logprob_formula(settings.logprob_dtype)

    def run(size: int) -> Sampled:
        parts = []
        passes = zip(torch.split(batch, size), torch.split(numbers, size), strict=True)
        for rows_of_pass, uniform in passes:
            some = trim_left(rows_of_pass, pad_id)
            # Processes stop at different steps, so the network is gathered first.
            with gathered(networks.policy), accelerator.autocast():
                row = some[::group], uniform, settings.temperature, eos_id, pad_id, formula
                responses, logprobs = sample(networks.policy, *row)
            responses = functional.truncate_after(responses, eos_id, pad_id)
            drawn = {"responses": responses, "sampled_logprobs": logprobs, "uniforms": uniform}
            parts.append(Sampled(queries=some, **drawn))
        return concatenate(parts, batch)

    return in_passes(learner, settings, run)


def share_of_batch(accelerator: Accelerator, queries: Sequence[Tensor], group: int) -> list[int]:
    """This process's places in a global batch of responses, those of the shortest queries first.

    The noise belongs to the place: neither order nor process changes it.
    """
    rows = local_share(range(len(queries)), accelerator)
    rows.sort(key=lambda row: len(queries[row]))
    return [row * group + sample for row in rows for sample in range(group)]


def in_passes(learner: PolicyLearner, settings: PolicyGradient, run: Callable[[int], T]) -> T:
    """Run a whole step in passes that fit into memory; `run` gets the sequences of a forward pass:
    the samples of a query are in one. Weights are cast once a step.
    """
    group, together = settings.samples_per_query, is_sharded(learner.trained)
    size = PassSize(rows=learner.budget.forward_batch_size, smallest=group, is_collective=together)
    parts = vars(learner.networks).values()
    networks = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))

    def cast_once(rows: int) -> T:
        with learner.budget.weights_cast_once(networks):
            return run(rows // group * group)

    return learner.budget.fit(size, cast_once)


@torch.no_grad()
def measure(learner: PolicyLearner, sampled: Sampled, settings: PolicyGradient) -> Measured:
    """Step 2. The policy's log-probabilities are recomputed by the training forward pass, so that
    the first ratio is 1.

    differs: Huang et al. 2024 keeps the sampler's (`logprobs=sampled`).
    """
    networks, group = learner.networks, settings.samples_per_query
    formula, pad_id = logprob_formula(settings.logprob_dtype), networks.pad_id
    statistics = LogitStatistics(temperature=settings.temperature, formula=formula)

    def measured(part: Sampled) -> Measured:
        tokens = torch.cat([part.queries, part.responses], dim=1)
        mask, length = tokens != pad_id, part.responses.shape[1]
        with learner.accelerator.autocast():
            (logprobs, _), (ref_logprobs, _) = (
                response_statistics(policy, tokens, mask, length, statistics, group)
                for policy in (networks.policy, networks.ref_policy)
            )
            values = None
            if networks.critic is not None:
                values = response_values(networks.critic, tokens, mask, length, group)
        gaps = torch.where(part.responses != pad_id, (logprobs - part.sampled_logprobs).abs(), 0.0)
        return Measured(
            **vars(part),
            logprobs=part.sampled_logprobs if settings.logprobs == "sampled" else logprobs,
            ref_logprobs=ref_logprobs,
            values=values,
            sampler_gaps=gaps.sum(dim=1),
        )

    # Processes that share weights take as many passes each.
    alike = 0 if is_sharded(learner.trained) else group

    def run(size: int) -> Measured:
        parts = [measured(part) for part in sampled.passes(size, pad_id, alike)]
        return concatenate(parts, sampled.queries)

    return in_passes(learner, settings, run)


@torch.no_grad()
def score(learner: PolicyLearner, measured: Measured, settings: PolicyGradient) -> Episodes:
    """Step 3: the reward model's number for each whole response, and the EOS trick."""
    networks, group = learner.networks, settings.samples_per_query
    whole = is_sharded(learner.trained) or isinstance(networks.reward_model, TextReward)

    def run(size: int) -> Tensor:
        parts = []
        for part in measured.passes(size, networks.pad_id, 0 if whole else group):
            texts = part.queries, part.responses, networks.pad_id, group
            with learner.accelerator.autocast():
                parts.append(score_responses(networks.reward_model, *texts))
        return torch.cat(parts)

    scored = in_passes(learner, settings, run)
    scores = eos_trick(scored, measured.responses, networks.eos_id, settings)
    return Episodes(**vars(measured), scores=scores)
