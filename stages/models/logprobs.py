"""Log-probabilities and entropies over the whole vocabulary, a chunk of positions at a time.

Logits of all positions would be the largest tensor of a step: 50,000 numbers a token, several times
over. Here a chunk's logits are made, read and dropped, and made again in the backward pass; only
the first chunk's are kept for it. Logits exist only at positions that somebody asks for.
The formulas are `token_logprobs` and `entropy` in stages/functional.py, which tests compare.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from stages.functional import paper_token_logprobs, token_logprobs
from stages.settings.sections import CHUNK

# Families, by `model_type`, whose logits are the output layer's product and nothing else, so they
# can be read in chunks.
PLAIN_HEAD = frozenset({"gpt_neox", "gpt2", "llama", "qwen2", "gemma"})
# Those with rotary or learned positions, and attention that takes any mask: a row may hold several
# summaries of one post (`passes.py`). tests/models/test_shared_query.py shows it for each.
SHARING = frozenset({"gpt_neox", "gpt2", "llama", "qwen2", "gemma", "gemma3_text"})
# Logits that a processor reads several times over before it goes on: 2 MB of float32.
CACHED = 2**19

LogprobFormula = Callable[[Tensor, Tensor, float], Tensor]


def logprob_formula(dtype: str) -> LogprobFormula:
    """The formula of log-probabilities whose log-softmax is in `float32` or `bf16`."""
    return paper_token_logprobs if dtype == "bf16" else token_logprobs


@dataclass(frozen=True, kw_only=True)
class LogitStatistics:
    """What is read of the logits of a pass, and statistics."""

    temperature: float = 1.0
    formula: LogprobFormula = token_logprobs
    """Of log-probabilities. Logits can be read in chunks by the usual formula only."""
    entropy: bool = False
    """Whether the entropy is measured too, without a gradient; otherwise it is given as 0."""


class ReadingHead(nn.Linear):
    """A causal LM's output layer that can give what is read of its logits in their place."""

    reading: tuple[Tensor, LogitStatistics] | None = None
    keeps: bool = False
    """Whether it keeps the copy of its weight in which it computes (`weights_cast_once`)."""
    copy: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [B, T, H] -> logits [B, T, V]; while `reading`, [B, T, 2]: each target's
        log-probability and the entropy, nats, in float32 or wider.
        """
        if self.reading is None:
            return F.linear(hidden, self.weight, self.bias)
        kind, weight = hidden.device.type, self.weight
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            hidden, weight = hidden.to(dtype), weight.to(dtype) if self.copy is None else self.copy
            self.copy = weight if self.keeps and weight is not self.weight else None
        with torch.autocast(kind, enabled=False):
            return _read(hidden, weight.to(hidden.dtype), *self.reading)


def _read(hidden: Tensor, weight: Tensor, targets: Tensor, statistics: LogitStatistics) -> Tensor:
    """Shapes: hidden [B, T, H], weight [V, H], targets [B, T] -> [B, T, 2]."""
    flat = (hidden.flatten(0, 1), weight, targets.flatten())
    apply: Any = TokenStatistics.apply
    logprobs, entropies = apply(*flat, statistics.temperature, statistics.entropy)
    return torch.stack((logprobs, entropies), dim=-1).view(*targets.shape, 2)


def give_reading_head(model: Any) -> None:
    """Let a causal LM's output layer be a ReadingHead, if its family does nothing to logits."""
    head = model.get_output_embeddings()
    if model.config.model_type in PLAIN_HEAD and type(head) is nn.Linear and head.bias is None:
        head.__class__ = ReadingHead


@contextmanager
def weights_cast_once(network: nn.Module) -> Iterator[None]:
    """While this lasts, autocast makes one copy of each weight of a network, not one a pass.

    No weight may change in it. Without gradients, networks that never learn are passed, too.
    """
    heads = [layer for layer in network.modules() if isinstance(layer, ReadingHead)]
    frozen = [] if torch.is_grad_enabled() else [*network.parameters()]
    frozen = [weight for weight in frozen if not weight.requires_grad]
    for weight in frozen:  # autocast keeps copies of weights that may learn alone
        weight.requires_grad_(True)
    for head in heads:
        head.keeps = True
    try:
        # Where the outermost context ends, which is this one, autocast's copies end.
        with torch.autocast("cpu", enabled=False):
            yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
        for head in heads:
            head.keeps, head.copy = False, None


@contextmanager
def reading(
    model: nn.Module, columns: Tensor, targets: Tensor, statistics: LogitStatistics
) -> Iterator[bool]:
    """While this lasts, a causal LM, whatever wraps it, makes logits at `columns` alone, [B, T]. If
    this is True, it gives in their place what is read of them at the `targets`, [B, T].
    """
    causal_lm: Any = next(x for x in model.modules() if isinstance(x, PreTrainedModel))
    head = causal_lm.get_output_embeddings()
    rows = torch.arange(len(columns), device=columns.device).unsqueeze(1)
    hook = head.register_forward_pre_hook(lambda _, hidden: hidden[0][rows, columns])
    reads = isinstance(head, ReadingHead) and statistics.formula is token_logprobs
    if reads:
        head.reading = targets, statistics
    try:
        yield reads
    finally:
        hook.remove()
        if reads:
            head.reading = None


class TokenStatistics(torch.autograd.Function):
    """Log-probability of each target and entropy of each position, both [N] nats.

    Shapes: hidden [N, H], weight [V, H] of the same dtype, targets [N]. With p = softmax(z) and
    z = hidden @ weight.T / temperature: dlogp/dz = onehot - p. The entropy has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """`entropy`: whether it is computed; it is 0 otherwise."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        entropies = torch.zeros_like(logprobs)
        lse = torch.empty_like(logprobs)
        first = logprobs.new_empty(0)
        for rows in _chunks(len(hidden), len(weight), hidden.device.type):
            z = _logits(hidden[rows], weight)
            first = z if rows.start == 0 else first
            for part, place in _blocks(rows, len(weight), hidden.device.type):
                some = z[part].div_(temperature)
                lse[place] = some.logsumexp(dim=-1)
                some -= lse[place].unsqueeze(-1)
                logprobs[place] = some.gather(-1, targets[place].unsqueeze(-1)).squeeze(-1)
                if entropy:
                    entropies[place] = -some.exp().mul_(some).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, targets, lse, first)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of hidden and weight, from those of the log-probabilities."""
        hidden, weight, targets, lse, first = ctx.saved_tensors
        by_logprob, _ = gradients
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for_weight = None
        if ctx.needs_input_grad[1]:
            for_weight = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device)
        for rows in _chunks(len(hidden), len(weight), hidden.device.type):
            again = rows.start > 0
            z = _logits(hidden[rows], weight) if again else first
            change = z if again else torch.empty_like(z)
            for part, place in _blocks(rows, len(weight), hidden.device.type):
                some, by_token = z[part], by_logprob[place].unsqueeze(-1)
                if again:
                    some.div_(ctx.temperature).sub_(lse[place].unsqueeze(-1))
                own = torch.exp(some, out=change[part]).mul_(-by_token)
                own.scatter_add_(-1, targets[place].unsqueeze(-1), by_token)
                own.div_(ctx.temperature)
            narrow = change.to(hidden.dtype)
            if for_hidden is not None:
                for_hidden[rows] = narrow @ weight
            if for_weight is not None:
                for_weight += narrow.T @ hidden[rows]
        if for_weight is not None:
            for_weight = for_weight.to(weight.dtype)
        return for_hidden, for_weight, None, None, None


def _chunks(positions: int, vocabulary: int, device: str) -> Iterator[slice]:
    size = max(1, CHUNK.get(device, CHUNK["cuda"]) // vocabulary)
    return (slice(start, min(start + size, positions)) for start in range(0, positions, size))


def _blocks(rows: slice, vocabulary: int, device: str) -> Iterator[tuple[slice, slice]]:
    """Parts of a chunk, which are small enough for a processor's cache: where each stands in the
    chunk, and among all positions. On any other device a chunk is one part.
    """
    size = max(1, CACHED // vocabulary) if device == "cpu" else rows.stop - rows.start
    for start in range(rows.start, rows.stop, size):
        place = slice(start, min(start + size, rows.stop))
        yield slice(place.start - rows.start, place.stop - rows.start), place


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """In float32 or wider: a tensor that may be changed in place."""
    logits = hidden @ weight.T
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
