"""Log-probabilities and entropies over the whole vocabulary, a chunk of positions at a time.

The logits of all positions would be the largest tensor of a training step: about 50,000 floats per
token, in several copies. Here the logits of one chunk are computed, used and dropped, and computed
again in the backward pass. Only the first chunk's are kept for it: a small pass has a single chunk,
and then nothing is computed twice.

The formulas are `token_logprobs` and `entropy` in stages/functional.py, against which tests check
this code.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.config.sections import CHUNK

# On a CPU, the number of logits in a block, which is read several times in a row: 2 MB of float32
# stay in the processor's cache.
LOGITS_PER_CPU_BLOCK = 2**19


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy of the distribution that it is drawn from.

    With z = hidden @ weight.T / temperature: z[target] - logsumexp(z), and -sum(p log p) for
    p = softmax(z). The entropy is 0, without a gradient, unless `with_entropy` is set.

    Shapes: hidden [R, C, H] and weight [V, H] of the same dtype, in which the product is computed;
    targets [R, C] -> both [R, C], nats, in float32 or wider.
    """
    # Annotated because torch does not annotate `apply`.
    apply: Any = ChunkedLogprobs.apply
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropies = apply(
            hidden.flatten(0, 1), weight, targets.flatten(), temperature, with_entropy
        )
    return logprobs.view_as(targets), entropies.view_as(targets)


class ChunkedLogprobs(torch.autograd.Function):
    """`chunked_logprobs` of N positions: hidden [N, H], weight [V, H], targets [N] -> both [N].

    The gradients are d log p[target] / dz = onehot(target) - p, and for the entropy E
    dE / dz = -p * (log p + E).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute both; the backward pass gets the logsumexps and the first chunk's log-softmax."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        entropies = torch.zeros_like(logprobs)
        logsumexps = torch.empty_like(logprobs)
        first_chunk = logprobs.new_empty(0)  # stays empty if there are no positions

        for chunk in _chunks(hidden, weight):
            z = _logits(hidden[chunk], weight)  # [positions of the chunk, V]
            if chunk.start == 0:
                first_chunk = z  # the blocks below turn it into the log-softmax, in place
            for block in _blocks(chunk, weight):
                positions = block.positions
                # In place: this part of z is scaled, then becomes the log-softmax.
                log_softmax = z[block.in_chunk].div_(temperature)
                logsumexps[positions] = log_softmax.logsumexp(dim=-1)
                log_softmax -= logsumexps[positions].unsqueeze(-1)
                chosen = log_softmax.gather(-1, targets[positions].unsqueeze(-1))
                logprobs[positions] = chosen.squeeze(-1)
                if with_entropy:
                    # An impossible token has p = 0 and log p = -inf, whose product would be NaN.
                    # Clamping log p makes the product 0 and changes nothing else.
                    log_softmax.clamp_(min=torch.finfo(dtype).min)
                    weighted = log_softmax.exp().mul_(log_softmax)
                    entropies[positions] = -weighted.sum(dim=-1)

        ctx.save_for_backward(hidden, weight, targets, logsumexps, entropies, first_chunk)
        ctx.temperature = temperature
        if not with_entropy:
            ctx.mark_non_differentiable(entropies)
        # An output that no loss depends on has the gradient None, so that its term costs nothing.
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of hidden and weight, from those of the log-probabilities and entropies."""
        hidden, weight, targets, logsumexps, entropies, first_chunk = ctx.saved_tensors
        logprob_gradients, entropy_gradients = gradients  # [N]; None where no loss depends on it
        if logprob_gradients is None:
            logprob_gradients = torch.zeros_like(logsumexps)
        hidden_gradient = None
        if ctx.needs_input_grad[0]:
            hidden_gradient = torch.empty_like(hidden)
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            # Summed over chunks in float32, also where the weight is in bf16.
            weight_gradient = torch.zeros(
                weight.shape, dtype=logsumexps.dtype, device=weight.device
            )

        for chunk in _chunks(hidden, weight):
            is_kept = chunk.start == 0
            if is_kept:
                # A second backward pass may need it again, so it is not overwritten.
                z = first_chunk
                z_gradient = torch.empty_like(z)
            else:
                z = _logits(hidden[chunk], weight)
                z_gradient = z
            for block in _blocks(chunk, weight):
                positions = block.positions
                log_softmax = z[block.in_chunk]
                if not is_kept:
                    log_softmax.div_(ctx.temperature)
                    log_softmax.sub_(logsumexps[positions].unsqueeze(-1))
                # (onehot * logprob_grad - p * factor) / temperature, with
                # factor = logprob_grad + entropy_grad * (log p + E).
                logprob_grad = logprob_gradients[positions].unsqueeze(-1)
                factor = logprob_grad
                if entropy_gradients is not None:
                    entropy_grad = entropy_gradients[positions].unsqueeze(-1)
                    # log p = -inf would make 0 * inf, as in the forward pass.
                    finite = log_softmax.clamp(min=torch.finfo(log_softmax.dtype).min)
                    log_p_plus_entropy = finite + entropies[positions].unsqueeze(-1)
                    factor = logprob_grad + entropy_grad * log_p_plus_entropy
                # Starts as p. Unless the chunk is kept, it overwrites log_softmax.
                block_gradient = torch.exp(log_softmax, out=z_gradient[block.in_chunk])
                block_gradient.mul_(-factor)
                block_gradient.scatter_add_(-1, targets[positions].unsqueeze(-1), logprob_grad)
                block_gradient.div_(ctx.temperature)
            z_gradient = z_gradient.to(hidden.dtype)
            if hidden_gradient is not None:
                hidden_gradient[chunk] = z_gradient @ weight
            if weight_gradient is not None:
                weight_gradient += z_gradient.T @ hidden[chunk]

        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient, None, None, None


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """The positions of each chunk: at most CHUNK logits on this device, at least one position."""
    logits_at_once = CHUNK.get(hidden.device.type, CHUNK["cuda"])
    size = max(1, logits_at_once // len(weight))
    for start in range(0, len(hidden), size):
        yield slice(start, min(start + size, len(hidden)))


@dataclass(frozen=True)
class _Block:
    """A part of a chunk that fits into a CPU's cache: its place in the chunk and in the batch."""

    in_chunk: slice
    positions: slice


def _blocks(chunk: slice, weight: Tensor) -> Iterator[_Block]:
    """The blocks of a chunk. On any device but a CPU, a chunk is a single block."""
    size = chunk.stop - chunk.start
    if weight.device.type == "cpu":
        size = max(1, LOGITS_PER_CPU_BLOCK // len(weight))
    for start in range(chunk.start, chunk.stop, size):
        stop = min(start + size, chunk.stop)
        yield _Block(
            in_chunk=slice(start - chunk.start, stop - chunk.start),
            positions=slice(start, stop),
        )


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """The product, computed in the inputs' dtype, then converted to float32 or wider.

    It is a new tensor that may be changed in place.
    """
    logits = hidden @ weight.T
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
