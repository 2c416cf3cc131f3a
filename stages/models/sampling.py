"""Sampling responses from a policy, with noise that depends on the place in the batch.

transformers' DynamicCache copies all keys and values for every token. Here a layer reserves room
for the prompt and the whole response, and each token is written into it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer

from stages.config.errors import first_line, say_error
from stages.config.out_of_memory import is_out_of_memory
from stages.data.ragged import Ragged, pad_left
from stages.functional import paper_token_logprobs, token_logprobs, truncate_after
from stages.models.forward import model_inputs, shares_query
from stages.models.policy import PolicyModel
from stages.training.memory import MemoryBudget, PassSize, chunks
from stages.training.random_streams import stream
from stages.training.row_by_row import measure_share
from stages.training.sharding import is_sharded

ENDED_SHARE = 0.25
"""Finished rows leave the batch once they are this share of it: leaving copies the cache."""
COUNTED_EVERY = {"cuda": 8}
"""Number of tokens between two counts of the finished rows, by device: counting waits for a GPU."""
FIXED_SHAPE = ("cuda",)
"""Devices on which all steps have the same shape, so that a CUDA graph can repeat them."""
FEWEST_REPLAYS = 4
"""A graph is recorded only for at least this many steps, because recording takes a step's time."""


def sampling_noise(seed: int, purpose: str, step: int, rows: int, length: int) -> Tensor:
    """Uniform numbers [rows, length] in float64, one for each token of a global batch."""
    return torch.rand(rows, length, generator=stream(seed, purpose, step), dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The uniform numbers with which responses are drawn, and their maximum length."""

    seed: int
    purpose: str
    """Names the noise, together with the step."""
    step: int = 0
    length: int
    """Maximum number of tokens of a response."""

    def uniforms(self, rows: int) -> Tensor:
        """Uniform numbers [rows, length] in float64, one for each token of a global batch."""
        return sampling_noise(self.seed, self.purpose, self.step, rows, self.length)


@dataclass(frozen=True, kw_only=True)
class Sampling(Noise):
    """How all responses to a set of queries are drawn."""

    temperature: float
    forward_batch_size: int
    """Sequences per forward pass: a memory setting."""
    samples_per_query: int = 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn from logits, and which ids end and pad a response."""

    temperature: float
    eos_id: int
    pad_id: int
    logprob_dtype: str = "float32"
    """float32, or bf16 for the formula of the paper's code, as in `PolicyModel.forward`."""


@torch.no_grad()
def respond_often(
    accelerator: Accelerator,
    budget: MemoryBudget,
    policy: PolicyModel,
    queries: Ragged,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    keep: Path | None,
) -> list[list[list[int]]]:
    """All responses to each query of this process's share, cut after their EOS.

    Row order as `local_share`; `keep` as in `measure_share`. A query is computed once for all its
    responses.
    """
    pad_id = tokenizer.pad_token_id
    samples = sampling.samples_per_query
    params = SamplingParams(
        temperature=sampling.temperature, eos_id=tokenizer.eos_token_id, pad_id=pad_id
    )
    noise = sampling.uniforms(len(queries) * samples).view(len(queries), samples, -1)

    def respond(rows: list[int]) -> list[list[list[int]]]:
        padded_queries = pad_left([queries[row] for row in rows], pad_id).to(accelerator.device)
        uniforms = noise[rows].flatten(0, 1).to(accelerator.device)
        with accelerator.autocast():
            sampled, _ = sample(policy, padded_queries, uniforms=uniforms, params=params)
        responses = truncate_after(sampled, params.eos_id, pad_id).tolist()
        without_padding = [
            [token for token in response if token != pad_id] for response in responses
        ]
        return [list(of_query) for of_query in chunks(without_padding, samples)]

    queries_per_pass = max(1, sampling.forward_batch_size // samples)
    return measure_share(
        accelerator,
        budget,
        label=sampling.purpose,
        sort_keys=queries.lengths().tolist(),
        size=PassSize(rows=queries_per_pass),
        measure=respond,
        keep=keep,
    )


@torch.no_grad()
def sample(
    policy: PolicyModel, queries: Tensor, *, uniforms: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Responses drawn from softmax(logits / temperature), one given uniform number per token.

    Token t of row b is the one at which the cumulative distribution passes uniforms[b, t]. So a row
    does not depend on the other rows of the batch, and sampling of a row can stop at EOS: the
    tokens up to EOS are the same as without stopping. Ids from [PAD] up are not tokens and are
    never drawn. The keys and values of a query are computed once for its K responses.

    Shapes: queries [R, Q] left-padded, uniforms [B, T] in [0, 1), B = K R, those of a query are
    neighbors -> responses [B, T] and their log-probabilities in nats; [PAD] and 0 after EOS.
    Source: Huang et al. 2024, detail 23 (fixed length, no stopping).
    """
    logprob_formula = token_logprobs
    if params.logprob_dtype == "bf16":
        logprob_formula = paper_token_logprobs
    device = queries.device
    length = uniforms.shape[1]
    responses = torch.full_like(uniforms, params.pad_id, dtype=torch.long)
    logprobs = torch.zeros_like(uniforms, dtype=torch.float32)
    rows = torch.arange(len(uniforms), device=device)  # of the batch, those in the cache
    is_unfinished = torch.ones_like(rows, dtype=torch.bool)

    decoding = Decoding(
        policy,
        queries,
        is_real=queries != params.pad_id,
        samples_per_query=len(uniforms) // len(queries),
        room=length,
    )
    for step in range(length):
        # Draw a token for every row in the cache, and record it for those without an EOS.
        logits = decoding.logits  # [rows, 1, V]
        tokens = draw(logits[:, -1, : params.pad_id], uniforms[rows, step], params.temperature)
        drawn = logprob_formula(logits, tokens.unsqueeze(1), params.temperature).squeeze(1)
        responses[rows, step] = torch.where(is_unfinished, tokens, params.pad_id)
        logprobs[rows, step] = torch.where(is_unfinished, drawn, 0.0).float()
        is_unfinished &= tokens != params.eos_id

        if step + 1 == length:
            break

        # Drop finished rows from the cache, if there are enough of them.
        if (step + 1) % COUNTED_EVERY.get(device.type, 1) == 0:
            unfinished = int(is_unfinished.sum())
            if unfinished == 0:
                break
            if unfinished <= len(rows) * (1 - ENDED_SHARE):
                decoding.keep(is_unfinished.nonzero().squeeze(1))
                rows = rows[is_unfinished]
                tokens = tokens[is_unfinished]
                is_unfinished = is_unfinished[is_unfinished]

        decoding.read(tokens)
    return responses, logprobs


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """Tokens at the given quantiles of softmax(logits / temperature), by inverting the cumulative
    distribution in float64.

    Shapes: logits [B, V], uniforms [B] in [0, 1) -> [B] int64.
    """
    cumulative = (logits.double() / temperature).softmax(dim=-1).cumsum(dim=-1)
    # The last sum is 1 up to rounding.
    targets = uniforms.double().unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    return tokens.clamp(max=logits.shape[1] - 1)


class Decoding:
    """A policy that reads its rows token by token; `logits` [B, 1, V] predict the next token.

    On a FIXED_SHAPE device, a step writes into a cache that has room for all tokens, and sees all
    of its columns through a mask: tensors keep their shape and address until rows leave.
    """

    records = True
    """Whether steps are recorded as CUDA graphs; off in this process once recording has failed."""

    def __init__(
        self,
        policy: PolicyModel,
        queries: Tensor,
        *,
        is_real: Tensor,
        samples_per_query: int,
        room: int,
    ) -> None:
        """Read the queries [R, Q], and repeat them for their samples, with `room` for more tokens.

        is_real: [R, Q], False where the queries are padded.
        """
        self.policy = policy
        self.cache = sampler_cache(policy.config, room)

        # Each query is read once; what was read is repeated for its samples.
        query_logits = self._next_logits(model_inputs(queries, is_real))
        self.logits = query_logits.repeat_interleave(samples_per_query, dim=0)
        if samples_per_query > 1:
            self.cache.batch_repeat_interleave(samples_per_query)

        is_real = is_real.repeat_interleave(samples_per_query, dim=0)  # [B, Q]
        self.mask = F.pad(is_real, (0, room))  # [B, Q + room], True where a column holds a token
        self.columns = queries.shape[1]  # that are read
        self.column = torch.zeros(1, dtype=torch.long, device=queries.device)  # being read
        self.positions = is_real.sum(dim=1, keepdim=True) - 1  # [B, 1], of the last token
        self.tokens = torch.zeros_like(self.positions)  # [B, 1], being read

        self.graph: torch.cuda.CUDAGraph | None = None
        self.steps = 0  # since the batch has had its present size
        is_suitable = queries.device.type in FIXED_SHAPE and shares_query(policy, torch.inf)
        self.is_fixed = is_suitable and not is_sharded(policy)
        if self.is_fixed:
            for layer in self.cache.layers:
                layer.fix(self.column)

    def read(self, tokens: Tensor) -> None:
        """Read one more token of each row, [B]."""
        # In place, because a recorded graph reads these tensors.
        self.tokens.copy_(tokens.unsqueeze(1))
        self.positions += 1
        self.mask[:, self.columns] = True
        self.column.fill_(self.columns)
        self.columns += 1

        # The first step in a shape runs unrecorded, so that everything it needs is loaded.
        steps_left = self.mask.shape[1] - self.columns
        is_worthwhile = self.steps == 1 and steps_left >= FEWEST_REPLAYS
        if self.is_fixed and self.records and is_worthwhile:
            self._record()
        if self.graph is None:
            self.logits = self._step()
        else:
            self.graph.replay()
        self.steps += 1

    def keep(self, rows: Tensor) -> None:
        """Continue with these rows of the batch only."""
        self.cache.batch_select_indices(rows)
        self.tokens = self.tokens[rows]
        self.positions = self.positions[rows]
        self.mask = self.mask[rows]
        self.graph = None
        self.steps = 0

    def _record(self) -> None:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.logits = self._step()
            self.graph = graph
        except RuntimeError as error:
            # Leaving the recording after an error raises a second error.
            first_error = error.__context__ or error
            if is_out_of_memory(first_error):
                raise first_error from None
            Decoding.records = False
            say_error(f"sampling continues without CUDA graphs: {first_line(error)}")

    def _step(self) -> Tensor:
        mask = self.mask[:, : self.columns].long()
        if self.is_fixed:
            mask = self.mask[:, None, None]
        return self._next_logits(
            {"input_ids": self.tokens, "attention_mask": mask, "position_ids": self.positions}
        )

    def _next_logits(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.policy.next_logits(inputs, self.cache)


class ReservedLayer(DynamicLayer):
    """A layer's keys and values, [B, heads, tokens so far, width], views of larger tensors.

    It replaces a DynamicLayer, whose other methods read `keys` and `values` too.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        """Tokens after the prompt."""
        self.column: Tensor | None = None
        """Where the next token is written, if all columns are shown."""
        self.reserved_keys = torch.empty(0)
        self.reserved_values = torch.empty(0)
        """[B, heads, prompt + room, width]"""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens, and return all there are. Raises IndexError if the room is used up."""
        device = key_states.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            key_states = key_states.to(dtype)
            value_states = value_states.to(dtype)

        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.reserved_keys = F.pad(key_states, (0, 0, 0, self.room))
            self.reserved_values = F.pad(value_states, (0, 0, 0, self.room))

        if self.column is not None:
            self.reserved_keys.index_copy_(2, self.column, key_states)
            self.reserved_values.index_copy_(2, self.column, value_states)
            return self.keys, self.values

        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if end > self.reserved_keys.shape[2]:
            raise IndexError(f"a cache with room for {self.room} tokens was given more")
        self.reserved_keys[:, :, start:end] = key_states
        self.reserved_values[:, :, start:end] = value_states
        self._show(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        tokens = self.get_seq_length()
        self.reserved_keys = self.reserved_keys[indices]
        self.reserved_values = self.reserved_values[indices]
        self._show(tokens)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch, the copies next to each other."""
        tokens = self.get_seq_length()
        self.reserved_keys = self.reserved_keys.repeat_interleave(repeats, dim=0)
        self.reserved_values = self.reserved_values.repeat_interleave(repeats, dim=0)
        self._show(tokens)

    def fix(self, column: Tensor) -> None:
        """Show all columns from now on, and write into the one that `column` [1] holds."""
        self.column = column
        self._show(self.reserved_keys.shape[2])

    def _show(self, tokens: int) -> None:
        self.keys = self.reserved_keys[:, :, :tokens]
        self.values = self.reserved_values[:, :, :tokens]


def sampler_cache(config: PretrainedConfig, room: int) -> DynamicCache:
    """An empty cache for prompts that `room` tokens will follow.

    Other kinds of layers, such as those with a sliding window, stay as transformers created them.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        ReservedLayer(room) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache
