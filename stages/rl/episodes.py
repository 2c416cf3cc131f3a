"""Episodes of one update as tensors; each step of an update adds its columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from stages.functional import bound_values
from stages.models.forward import ResponseBatch

ONE_PER_EPISODE = ("scores", "shaped_scores", "reference_scores", "sampler_gaps")
"""Fields of shape [B]. All others, except the queries, have a column per response token."""
CPU_COLUMNS = 1024
"""Token columns of a pass on a CPU. Larger matrix products are not faster there."""
E = TypeVar("E", bound="Sampled")


@dataclass(frozen=True, kw_only=True)
class Sampled(ResponseBatch):
    """What was sampled, on one device.

    Shapes: queries [B, Q] left-padded; responses [B, T], cut after their first EOS and padded;
    sampled_logprobs [B, T], the sampler's own, nats; uniforms [B, T] in [0, 1), the numbers that
    the tokens were drawn with, None where nothing was drawn.
    """

    sampled_logprobs: Tensor
    uniforms: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, without those that are None."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def rows(self: E, index: Tensor) -> E:
        """The episodes at these positions."""
        changes: dict[str, Any] = {name: x[index] for name, x in self.tensors().items()}
        if self.facts:
            changes["facts"] = [self.facts[position] for position in index.tolist()]
        return replace(self, **changes)

    def trimmed(self: E, query_length: int, response_length: int) -> E:
        """With the last columns of the queries, and the first columns of the responses."""
        changes: dict[str, Any] = {}
        for name, x in self.tensors().items():
            if name == "queries":
                changes[name] = x[:, x.shape[1] - query_length :]
            elif name not in ONE_PER_EPISODE:
                changes[name] = x[:, :response_length]
        return replace(self, **changes)

    def passes(self: E, size: int, is_small_on_cpu: bool = False) -> Iterator[E]:
        """The episodes of each forward pass, at most `size`, without columns of padding only.

        If `is_small_on_cpu` is set, a pass on a CPU holds only the queries that fit into
        CPU_COLUMNS: neighbors are of similar length, so less of a small pass is padding.
        """
        device = self.queries.device
        if is_small_on_cpu and device.type == "cpu":
            query_columns = self.queries.shape[1] + self.responses.shape[1]
            columns = self.samples_per_query * query_columns
            size = min(size, self.samples_per_query * max(1, CPU_COLUMNS // columns))
        for index in torch.split(torch.arange(len(self.queries), device=device), size):
            part = self.rows(index)
            yield replace(part, queries=trim_left(part.queries, self.pad_id))


@dataclass(frozen=True, kw_only=True)
class Measured(Sampled):
    """Shapes: logprobs, ref_logprobs [B, T] nats; values [B, T] reward units, None without critic;
    sampler_gaps [B], nats between the sampler's log-probabilities and the training pass's.

    With `ppo.bound_values`, `values` are the critic's outputs until `in_range` has bounded them.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor | None
    sampler_gaps: Tensor


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """The range to which `ppo.bound_values` squashes the critic's outputs, reward units."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Episodes(Measured):
    """Shapes: scores [B], reward units, including the penalty for a missing EOS.

    With `score_shaping`, reference_scores [B] are those of the queries' references, and
    shaped_scores [B] what the policy is trained on; both are None without it.
    """

    scores: Tensor
    shaped_scores: Tensor | None = None
    reference_scores: Tensor | None = None
    value_range: ValueRange | None = None
    """The range of the values; None if they are the critic's outputs as they are."""

    @property
    def rewarded_scores(self) -> Tensor:
        """The scores that enter the rewards, [B]: the shaped ones if there are any."""
        return self.scores if self.shaped_scores is None else self.shaped_scores

    def values_of(self, outputs: Tensor) -> Tensor:
        """The critic's outputs as values: bounded if these episodes have a range."""
        if self.value_range is None:
            return outputs
        return bound_values(outputs, low=self.value_range.low, high=self.value_range.high)


@dataclass(frozen=True, kw_only=True)
class Shaped(Episodes):
    """Shapes: rewards [B, T], reward units; masks [B, T] bool, True where it counts."""

    response_mask: Tensor
    value_mask: Tensor
    rewards: Tensor


@dataclass(frozen=True, kw_only=True)
class Rollout(Shaped):
    """Everything an update learns from. Shapes: advantages, returns [B, T]; returns are the
    critic's targets, None without a critic.
    """

    advantages: Tensor
    returns: Tensor | None


def trim_left(queries: Tensor, pad_id: int) -> Tensor:
    """Left-padded queries [B, Q] without the columns that are padding in every row."""
    longest = int((queries != pad_id).sum(dim=1).max())
    return queries[:, queries.shape[1] - longest :]


def concatenate(parts: Sequence[E], queries: Tensor) -> E:
    """The parts combined, with these queries, which are padded to the same length."""
    facts = [facts_of_row for part in parts for facts_of_row in part.facts]
    changes: dict[str, Any] = {"queries": queries, "facts": facts}
    for field in fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        if field.name != "queries" and isinstance(values[0], Tensor):
            changes[field.name] = torch.cat(values)
    return replace(parts[0], **changes)
