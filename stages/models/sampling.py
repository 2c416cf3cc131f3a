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

from stages.data.ragged import Ragged, pad_left
from stages.functional import token_logprobs, truncate_after
from stages.models.forward import model_inputs, shares_query
from stages.models.logprobs import LogprobFormula
from stages.settings.checks import first_line, is_out_of_memory, say_error
from stages.training.memory import MemoryBudget, PassSize
from stages.training.random_streams import stream
from stages.training.row_by_row import measure_share
from stages.training.sharding import is_sharded


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
def respond_often(
    accelerator: Accelerator,
    budget: MemoryBudget,
    policy: nn.Module,
    queries: Ragged,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    keep: Path | None,
) -> list[list[list[int]]]:
    """`sampling.samples` responses to each query of this process's share, cut after their EOS.

    Row order as `local_share`; `keep` as in `measure_share`. A query is read once for all of them.
    """
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

    return measure_share(
        accelerator,
        budget,
        label=purpose,
        sort_keys=queries.lengths().tolist(),
        size=PassSize(rows=max(1, sampling.forward_batch_size // each)),
        measure=answer,
        keep=keep,
    )


# Rows that have ended leave the batch when they are this share of it: leaving copies the cache.
ENDED_SHARE = 0.25
# After how many tokens each the rows that have ended are counted: counting waits for a card.
COUNTED_EVERY = {"cuda": 8}
# Devices on which all steps have one shape, so that a CUDA graph can repeat them.
FIXED_SHAPE = ("cuda",)
FEWEST_REPLAYS = 4  # recording a step takes as long as the step


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
    responses = torch.full_like(uniforms, pad_id, dtype=torch.long)
    logprobs = torch.zeros_like(uniforms, dtype=torch.float32)
    rows = torch.arange(len(uniforms), device=queries.device)  # those that the cache holds
    going = torch.ones_like(rows, dtype=torch.bool)
    group, length = len(uniforms) // len(queries), uniforms.shape[1]
    decoding = Decoding(policy, queries, queries != pad_id, group, length)
    for step in range(length):
        tokens = draw(decoding.logits[:, -1, :pad_id], uniforms[rows, step], temperature)
        read = formula(decoding.logits, tokens.unsqueeze(1), temperature).squeeze(1)
        responses[rows, step] = torch.where(going, tokens, pad_id)
        logprobs[rows, step] = torch.where(going, read, 0.0).float()
        going &= tokens != eos_id
        if step + 1 == length:
            break
        if (step + 1) % COUNTED_EVERY.get(queries.device.type, 1) == 0:
            count = int(going.sum())
            if count == 0:
                break
            if count <= len(rows) * (1 - ENDED_SHARE):
                decoding.keep(going.nonzero().squeeze(1))
                rows, tokens, going = rows[going], tokens[going], going[going]
        decoding.read(tokens)
    return responses, logprobs


class Decoding:
    """A policy that reads its rows token by token; `logits` [B, 1, V] are those after the last one.

    On a device of FIXED_SHAPE a step writes into a cache that has room for all tokens, and sees all
    of its columns through a mask: tensors keep shape and place until rows leave.
    """

    records = True  # until recording a step fails

    def __init__(
        self, policy: nn.Module, queries: Tensor, real: Tensor, group: int, room: int
    ) -> None:
        """Read the queries [R, Q], each for a `group` of rows, with `room` for more tokens."""
        self.policy, self.cache = policy, sampler_cache(policy.config, room)
        self.logits = self._pass(**model_inputs(queries, real)).repeat_interleave(group, dim=0)
        if group > 1:
            self.cache.batch_repeat_interleave(group)
        real = real.repeat_interleave(group, dim=0)
        self.columns, self.mask = queries.shape[1], F.pad(real, (0, room))
        self.positions = real.sum(dim=1, keepdim=True) - 1
        self.tokens, self.column = torch.zeros_like(self.positions), self.positions.new_zeros(1)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.steps = 0  # in the shapes of now
        fixed = queries.device.type in FIXED_SHAPE and shares_query(policy, torch.inf)
        self.fixed = fixed and not is_sharded(policy)
        for layer in self.cache.layers if self.fixed else ():
            layer.fix(self.column)

    def read(self, tokens: Tensor) -> None:
        """Read one more token of each row, [B]."""
        self.tokens.copy_(tokens.unsqueeze(1))
        self.positions += 1
        self.mask[:, self.columns] = True
        self.column.fill_(self.columns)
        self.columns += 1
        left = self.mask.shape[1] - self.columns
        if self.fixed and self.records and self.steps == 1 and left >= FEWEST_REPLAYS:
            self._record()
        if self.graph is None:
            self.logits = self._step()
        else:
            self.graph.replay()
        self.steps += 1

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows of the batch."""
        self.cache.batch_select_indices(rows)
        held = self.tokens, self.positions, self.mask
        self.tokens, self.positions, self.mask = (x[rows] for x in held)
        self.graph, self.steps = None, 0

    def _record(self) -> None:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.logits = self._step()
            self.graph = graph
        except RuntimeError as error:
            first = error.__context__ or error  # where recording ended with it, in an error too
            if is_out_of_memory(first):
                raise first from None
            Decoding.records = False
            say_error(f"sampling goes on without CUDA graphs: {first_line(error)}")

    def _step(self) -> Tensor:
        mask = self.mask[:, None, None] if self.fixed else self.mask[:, : self.columns].long()
        return self._pass(input_ids=self.tokens, attention_mask=mask, position_ids=self.positions)

    def _pass(self, **inputs: Any) -> Any:
        inputs |= {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        return self.policy(**inputs).logits


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """Tokens at the given quantiles of softmax(logits / temperature), by inverting the cumulative
    distribution in float64. Shapes: logits [B, V], uniforms [B] in [0, 1) -> [B] int64.
    """
    cumulative = (logits.double() / temperature).softmax(dim=-1).cumsum(dim=-1)
    targets = uniforms.double().unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    return tokens.clamp(max=logits.shape[1] - 1)


class ReservedLayer(DynamicLayer):
    """A layer's keys and values, each [B, heads, tokens so far, width], views of a larger tensor.

    It stands in for a DynamicLayer, whose other methods read `keys` and `values` too.
    """

    room: int
    """Tokens after the prompt."""
    column: Tensor | None = None
    """Where the next token is written, if all columns are shown."""
    _whole: list[Tensor]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens, and return all there are. Raises IndexError where the room is used up."""
        new, kind = [key_states, value_states], key_states.device.type
        if torch.is_autocast_enabled(kind):
            new = [x.to(torch.get_autocast_dtype(kind)) for x in new]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._whole = [F.pad(x, (0, 0, 0, self.room)) for x in new]
        if self.column is not None:
            for whole, tokens in zip(self._whole, new, strict=True):
                whole.index_copy_(2, self.column, tokens)
            return self.keys, self.values
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

    def fix(self, column: Tensor) -> None:
        """Show all columns from now on, and write to the one that `column`, [1], says."""
        self.column = column
        self._show(self._whole[0].shape[2])

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
