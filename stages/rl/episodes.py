"""Episodes of one update as tensors, and what is reported of them.

Episodes are what was sampled and measured; a Rollout adds what the update learns from them.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages import functional
from stages.learning.batches import gather_rows, global_sum
from stages.posts.text_metrics import copied_title_words, distinct
from stages.runs import Run
from stages.settings.ppo import Ppo

SAMPLES_LOGGED = 8
DIGITS = 4  # of a token's numbers in samples.jsonl
LONGEST_PIECE = 4  # bytes of a character, so at most as many tokens spell one
WHOLE_EPISODE = ("queries", "scores")  # the other tensors have one column per response token
E = TypeVar("E", bound="Episodes")


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """What was sampled and measured, on one device.

    Shapes: queries [B, Q] left-padded; responses (postprocessed), logprobs, ref_logprobs and
    values [B, T]; scores [B]. Log-probabilities in nats, values and scores in reward units.
    `values` is None if the stage has no critic.
    """

    queries: Tensor
    responses: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor | None
    scores: Tensor

    def map(self: E, change: Callable[[str, Tensor], Tensor]) -> E:
        """The same with every tensor changed; `change` gets the name and the tensor."""
        columns: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        changed: dict[str, Any] = {
            name: x if x is None else change(name, x) for name, x in columns.items()
        }
        return type(self)(**changed)

    def rows(self: E, index: Tensor) -> E:
        """The episodes at these positions."""
        return self.map(lambda _, x: x[index])

    def trimmed(self: E, query: int, width: int) -> E:
        """With the last `query` columns of the queries, and with `width` response tokens."""
        queries = self.queries[:, self.queries.shape[1] - query :]
        kept = self.map(lambda name, x: x if name in WHOLE_EPISODE else x[:, :width])
        return kept.map(lambda name, x: queries if name == "queries" else x)


@dataclass(frozen=True, kw_only=True)
class Rollout(Episodes):
    """Everything that `ppo.optimize` needs. Shapes: all [B, T]; masks are True where it counts."""

    values: Tensor
    response_mask: Tensor
    value_mask: Tensor
    rewards: Tensor
    """What GAE summed up, in reward units; the update itself reads advantages and returns."""
    advantages: Tensor
    returns: Tensor


def trim_left(queries: Tensor, pad_id: int) -> Tensor:
    """Left-padded queries [B, Q] without the columns that are padding in every row."""
    longest = int((queries != pad_id).sum(dim=1).max())
    return queries[:, queries.shape[1] - longest :]


def concatenate(parts: list[Episodes], queries: Tensor) -> Episodes:
    """The parts as one, with the queries padded alike."""
    columns: dict[str, Any] = {}
    for name in (one.name for one in fields(Episodes) if one.name != "queries"):
        column = [getattr(part, name) for part in parts]
        columns[name] = None if column[0] is None else torch.cat(column)
    return Episodes(queries=queries, **columns)


@torch.no_grad()
def describe(
    accelerator: Accelerator, rollout: Rollout, ppo: Ppo, eos_id: int, kl_coef: float
) -> dict[str, float]:
    """What the rollout looked like: means over all episodes of the batch; names as in TRL.

    KL and entropy are in nats per episode; only real tokens enter a sum. `objective/kl` is the
    estimate that is trained on (ppo.kl_estimator); kl_coef is this update's, reward units per nat.
    """

    def per_episode(x: Tensor) -> Tensor:
        return torch.where(rollout.response_mask, x, 0.0).sum(dim=1)

    def kl(kind: str) -> Tensor:
        return per_episode(functional.kl_estimate(rollout.logprobs, rollout.ref_logprobs, kind))

    trained_on = kl(ppo.kl_estimator)
    penalty = -kl_coef * trained_on if ppo.kl_in == "reward" else torch.zeros_like(trained_on)
    columns = {
        "objective/kl": trained_on,
        "objective/kl_k1": kl("k1"),
        "objective/kl_k3": kl("k3"),
        "objective/entropy": per_episode(-rollout.logprobs),
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": rollout.scores + penalty,
        "objective/scores": rollout.scores,
        "policy/eos_rate": (rollout.responses == eos_id).any(dim=1),
        "policy/response_length": rollout.response_mask.sum(dim=1),
    }
    sums = global_sum(accelerator, *(column.sum() for column in columns.values()))
    means = {key: value / ppo.batch_size for key, value in zip(columns, sums, strict=True)}
    everything = (rollout.values, rollout.returns, rollout.value_mask)
    explained = functional.explained_variance(*(accelerator.gather(one) for one in everything))
    return means | {
        "val/num_eos_tokens": means["policy/eos_rate"] * ppo.batch_size,
        "val/explained_variance": explained.item(),
        "objective/kl_coef": kl_coef,
    }


def describe_texts(
    accelerator: Accelerator, rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """What the batch's texts look like: words copied from titles, and how varied they are."""
    decode = partial(tokenizer.batch_decode, skip_special_tokens=True)
    pairs = list(zip(decode(rollout.queries), decode(rollout.responses), strict=True))
    everything = gather_rows(accelerator, pairs)
    texts = [response for _, response in everything]
    copied = [copied_title_words(*pair) for pair in everything]
    return {
        "text/copied_title_words": sum(copied) / len(copied),
        "text/distinct_1": distinct(texts, 1),
        "text/distinct_2": distinct(texts, 2),
    }


def log_samples(
    run: Run, rollout: Rollout, tokenizer: PreTrainedTokenizerBase, update: int
) -> None:
    """Append a few episodes, spread over the query lengths, to samples.jsonl."""
    count = min(SAMPLES_LOGGED, len(rollout.queries))
    kl = functional.kl_estimate(rollout.logprobs, rollout.ref_logprobs)
    episode_kl = torch.where(rollout.response_mask, kl, 0.0).sum(dim=1)
    for row in torch.linspace(0, len(rollout.queries) - 1, count).long().tolist():
        response = rollout.responses[row][rollout.response_mask[row]]
        run.append(
            "samples.jsonl",
            {
                "step": update,
                "query": tokenizer.decode(rollout.queries[row], skip_special_tokens=True),
                "response": tokenizer.decode(response),
                "score": rollout.scores[row].item(),
                "kl": episode_kl[row].item(),
                "tokens": token_texts(tokenizer, response.tolist()),
                **token_numbers(rollout, row),
            },
        )


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """The text of each token; a character that several tokens spell stands with the last."""
    texts, start = [], 0
    for end in range(1, len(tokens) + 1):
        piece: str = tokenizer.decode(tokens[start:end])
        if "\ufffd" in piece and end - start < LONGEST_PIECE and end < len(tokens):
            texts.append("")
        else:
            texts.append(piece)
            start = end
    return texts


def token_numbers(rollout: Rollout, row: int) -> dict[str, list[float]]:
    """An episode's numbers by token, rounded.

    `log_ratios` (nats, policy less ref_policy) and `advantages` have one number a token. `values`
    (the critic on the text before the token) and `rewards`, in reward units, have one more where
    the response ends before the limit: there the score stands after EOS.
    """
    counted, valued = rollout.response_mask[row], rollout.value_mask[row]
    numbers = {
        "log_ratios": (rollout.logprobs - rollout.ref_logprobs)[row][counted],
        "values": rollout.values[row][valued],
        "advantages": rollout.advantages[row][counted],
        "rewards": rollout.rewards[row][valued],
    }
    return {
        name: [float(f"{value:.{DIGITS}g}") for value in column.tolist()]
        for name, column in numbers.items()
    }
