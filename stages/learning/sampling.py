"""Sampling: responses drawn from a policy, with noise that belongs to the place in the batch.

transformers' DynamicCache lays out all keys and values anew for every token. Here a layer reserves
room for the whole response with the prompt, and a token is written into it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer

from stages.functional import token_logprobs, truncate_after
from stages.learning.learner import stream
from stages.learning.loop import over_share
from stages.learning.passes import model_inputs
from stages.learning.vocabulary import LogprobFormula
from stages.posts.ragged import Ragged, pad_left


def sampling_noise(seed: int, purpose: str, step: int, rows: int, length: int) -> Tensor:
    """Uniform numbers [rows, length] in float64, one for each token of a global batch."""
    return torch.rand(rows, length, generator=stream(seed, purpose, step), dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Which uniform numbers responses are drawn with, and how many tokens they may have."""

    seed: int
    purpose: str
    """Names the noise, together with the step."""
    step: int = 0
    length: int
    """Most tokens of a response."""

    def uniforms(self, rows: int) -> Tensor:
        """Uniform numbers [rows, length] in float64, one for each token of a global batch."""
        return sampling_noise(self.seed, self.purpose, self.step, rows, self.length)


@dataclass(frozen=True, kw_only=True)
class Sampling(Noise):
    """How responses are drawn: which noise, how hot, how many at once."""

    temperature: float
    forward_batch_size: int
    """Sequences per forward pass: a memory knob."""
    samples: int = 1
    """Responses to each query."""


@torch.no_grad()
def respond(
    accelerator: Accelerator,
    policy: nn.Module,
    queries: Ragged,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    keep: Path | None = None,
) -> list[list[int]]:
    """One response to each query of this process's share, cut after its EOS.

    Row order as `local_share`; `keep` as in `over_share`.
    """
    each = respond_often(accelerator, policy, queries, tokenizer, sampling, keep)
    return [response for (response,) in each]


def respond_often(
    accelerator: Accelerator,
    policy: nn.Module,
    queries: Ragged,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    keep: Path | None,
) -> list[list[list[int]]]:
    """`sampling.samples` responses to each query, which is read once for all of them."""
    eos_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    purpose, each = sampling.purpose, sampling.samples
    noise = sampling.uniforms(len(queries) * each).view(len(queries), each, -1)

    def answer(rows: list[int]) -> list[list[list[int]]]:
        batch = pad_left([queries[row] for row in rows], pad_id).to(accelerator.device)
        with accelerator.autocast():
            uniforms = noise[rows].flatten(0, 1).to(accelerator.device)
            drawn, _ = sample(policy, batch, uniforms, sampling.temperature, eos_id, pad_id)
        cut = truncate_after(drawn, eos_id, pad_id).tolist()
        ended = [[token for token in response if token != pad_id] for response in cut]
        return [ended[first : first + each] for first in range(0, len(ended), each)]

    size = max(1, sampling.forward_batch_size // each)
    return over_share(accelerator, queries.lengths().tolist(), size, purpose, answer, keep)


# Rows that have ended leave the batch when they are this share of it: leaving copies the cache.
ENDED_SHARE = 0.25


@torch.no_grad()
def sample(
    policy: nn.Module,
    queries: Tensor,
    uniforms: Tensor,
    temperature: float,
    eos_id: int,
    pad_id: int,
    formula: LogprobFormula = token_logprobs,
) -> tuple[Tensor, Tensor]:
    """Responses drawn from softmax(logits / temperature), one given uniform number per token.

    Token t of row b is where the cumulative distribution passes uniforms[b, t]. So a row does not
    depend on the other rows of the batch, and a row that has its EOS need not be sampled further:
    the tokens up to EOS are the same as without stopping. Ids from [PAD] up are no tokens and are
    never drawn. The keys and values of a query are computed once for its K responses.

    Shapes: queries [R, Q] left-padded, uniforms [B, T] in [0, 1), B = K R, those of a query are
    neighbours -> responses [B, T] and their log-probabilities in nats; [PAD] and 0 after EOS.
    Source: Huang et al. 2024, detail 23 (fixed length, no stopping).
    """
    inputs = model_inputs(queries, queries != pad_id)
    group = len(uniforms) // len(queries)
    attention_mask = (queries != pad_id).repeat_interleave(group, dim=0)
    cache = sampler_cache(policy.config, uniforms.shape[1])
    responses = torch.full_like(uniforms, pad_id, dtype=torch.long)
    logprobs = torch.zeros_like(uniforms, dtype=torch.float32)
    rows = torch.arange(len(uniforms), device=queries.device)  # those that the cache holds
    going = torch.ones_like(rows, dtype=torch.bool)
    for step in range(uniforms.shape[1]):
        output = policy(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits, positions = output.logits, inputs["position_ids"][:, -1:] + 1
        if step == 0 and group > 1:
            cache.batch_repeat_interleave(group)
            logits, positions = (x.repeat_interleave(group, dim=0) for x in (logits, positions))
        tokens = draw(logits[:, -1, :pad_id], uniforms[rows, step], temperature)
        read = formula(logits, tokens.unsqueeze(1), temperature).squeeze(1)
        responses[rows, step] = torch.where(going, tokens, pad_id)
        logprobs[rows, step] = torch.where(going, read, 0.0).float()
        going &= tokens != eos_id
        count = int(going.sum())
        if count == 0:
            break
        if count <= len(rows) * (1 - ENDED_SHARE):
            cache.batch_select_indices(going.nonzero().squeeze(1))
            rows, tokens, positions, attention_mask = (
                x[going] for x in (rows, tokens, positions, attention_mask)
            )
            going = torch.ones_like(rows, dtype=torch.bool)
        attention_mask = F.pad(attention_mask, (0, 1), value=True)
        inputs = {
            "input_ids": tokens.unsqueeze(1),
            "attention_mask": attention_mask.long(),
            "position_ids": positions,
        }
    return responses, logprobs


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """Tokens at the given quantiles of softmax(logits / temperature), by inverting the cumulative
    distribution in float64. Shapes: logits [B, V], uniforms [B] in [0, 1) -> [B] int64.
    """
    cumulative = (logits.double() / temperature).softmax(dim=-1).cumsum(dim=-1)
    targets = uniforms.double().unsqueeze(1) * cumulative[:, -1:]
    return (
        torch.searchsorted(cumulative, targets, right=True)
        .squeeze(1)
        .clamp(max=logits.shape[1] - 1)
    )


class ReservedLayer(DynamicLayer):
    """A layer's keys and values, each [B, heads, tokens so far, width], views of a larger tensor.

    It stands in for a DynamicLayer, whose other methods read `keys` and `values` too.
    """

    room: int
    """Tokens after the prompt."""
    _whole: list[Tensor]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens, and return all there are. Raises IndexError where the room is used up."""
        new = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._whole = [
                x.new_empty(*x.shape[:2], x.shape[2] + self.room, x.shape[3]) for x in new
            ]
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > self._whole[0].shape[-2]:
            raise IndexError(f"a cache with room for {self.room} tokens was given more")
        for whole, tokens in zip(self._whole, new, strict=True):
            whole[:, :, start:end] = tokens
        self._show(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        tokens = self.get_seq_length()
        self._whole = [whole[indices] for whole in self._whole]
        self._show(tokens)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each row of the batch so many times, one after the other."""
        tokens = self.get_seq_length()
        self._whole = [whole.repeat_interleave(repeats, dim=0) for whole in self._whole]
        self._show(tokens)

    def _show(self, tokens: int) -> None:
        self.keys, self.values = (whole[:, :, :tokens] for whole in self._whole)


def sampler_cache(config: PretrainedConfig, room: int) -> DynamicCache:
    """An empty cache for prompts that `room` tokens will follow.

    A layer of another kind, such as one with a sliding window, stays as transformers made it.
    """
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            layer.__class__ = ReservedLayer
            layer.room = room
    return cache
