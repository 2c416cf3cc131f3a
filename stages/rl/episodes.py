"""Episodes of one update as tensors; each step of an update adds its columns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

WHOLE_EPISODE = ("queries", "scores", "sampler_gaps")  # others: a column per response token
CPU_COLUMNS = 1024  # of a pass; a large matrix product on a CPU is as fast from some hundred on
E = TypeVar("E", bound="Sampled")


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What was sampled, on one device.

    Shapes: queries [B, Q] left-padded; responses [B, T], cut after their first EOS and padded;
    sampled_logprobs [B, T], the sampler's own, nats; uniforms [B, T] in [0, 1), the numbers that
    the tokens were drawn with, None where nothing was drawn.
    """

    queries: Tensor
    responses: Tensor
    sampled_logprobs: Tensor
    uniforms: Tensor | None = None

    def map(self: E, change: Callable[[str, Tensor], Tensor]) -> E:
        """The same with every tensor changed; `change` gets the name and the tensor."""
        changed: dict[str, Any] = {name: change(name, x) for name, x in self.tensors().items()}
        return type(self)(**vars(self) | changed)

    def tensors(self) -> dict[str, Tensor]:
        """Every column that there is, by name."""
        return {name: x for name, x in vars(self).items() if x is not None}

    def rows(self: E, index: Tensor) -> E:
        """The episodes at these positions."""
        return self.map(lambda _, x: x[index])

    def passes(self: E, size: int, pad_id: int, group: int = 0) -> Iterator[E]:
        """The episodes of each forward pass, at most `size`, without columns of padding only. With
        a `group`, a CPU gets fewer at once: neighbours are of similar length, so less is padding.
        """
        if group and self.queries.device.type == "cpu":
            columns = group * (self.queries.shape[1] + self.responses.shape[1])
            size = min(size, group * max(1, CPU_COLUMNS // columns))
        everything = torch.arange(len(self.queries), device=self.queries.device)
        for part in map(self.rows, torch.split(everything, size)):
            yield replace(part, queries=trim_left(part.queries, pad_id))

    def trimmed(self: E, query: int, width: int) -> E:
        """With the last `query` columns of the queries, and with `width` response tokens."""
        queries = self.queries[:, self.queries.shape[1] - query :]
        kept = self.map(lambda name, x: x if name in WHOLE_EPISODE else x[:, :width])
        return kept.map(lambda name, x: queries if name == "queries" else x)


@dataclass(frozen=True, kw_only=True)
class Measured(Sampled):
    """Shapes: logprobs, ref_logprobs [B, T] nats; values [B, T] reward units, None without critic;
    sampler_gaps [B], nats between the sampler's log-probabilities and the training pass's.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor | None
    sampler_gaps: Tensor


@dataclass(frozen=True, kw_only=True)
class Episodes(Measured):
    """Shapes: scores [B], reward units, with what a missing EOS costs."""

    scores: Tensor


@dataclass(frozen=True, kw_only=True)
class Shaped(Episodes):
    """Shapes: rewards [B, T], reward units; masks [B, T] bool, True where it counts."""

    response_mask: Tensor
    value_mask: Tensor
    rewards: Tensor


@dataclass(frozen=True, kw_only=True)
class Rollout(Shaped):
    """All that an update learns from. Shapes: advantages, returns [B, T]; returns are the critic's
    targets, None without a critic.
    """

    advantages: Tensor
    returns: Tensor | None


def trim_left(queries: Tensor, pad_id: int) -> Tensor:
    """Left-padded queries [B, Q] without the columns that are padding in every row."""
    longest = int((queries != pad_id).sum(dim=1).max())
    return queries[:, queries.shape[1] - longest :]


def concatenate(parts: Sequence[E], queries: Tensor) -> E:
    """The parts as one, with the queries padded alike."""
    columns: dict[str, Any] = {"queries": queries}
    for name in (column.name for column in fields(parts[0]) if column.name != "queries"):
        tensors = [getattr(part, name) for part in parts]
        columns[name] = None if tensors[0] is None else torch.cat(tensors)
    return type(parts[0])(**columns)
