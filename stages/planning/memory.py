"""Bytes on one device, moment by moment. Standard library only.

Every number follows from what the code does: master weights, gradients and Adam's two moments in
float32; autocast to bf16 that keeps its copies of the weights; activations that autograd saves;
logits and the copies of them that a loss makes. Every device holds all of it; under ENGINE=fsdp2
its share of weights, gradients and moments, and what is gathered while it is used.

Letters: B sequences, L tokens of a sequence, T tokens that have logits, V vocabulary, H hidden
width. The longest sequences decide, because rows of similar length share a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stages.config.config import Config, UserError
from stages.config.sections import CHUNK
from stages.planning.shapes import Shape, adapter_parameters, block_weights, parameters, shape_of

GIB = 2**30
FULL, HALF = 4, 2  # bytes of a float32 and of a bf16 number
MOMENTS = 8  # bytes of Adam's two moments of one parameter

# Bytes per logit of a chunk: the scaled logits and their exponential. The first chunk's stay.
CHUNK_WORK, CHUNK_KEPT = 2 * FULL, FULL
# `draw` inverts the cumulative distribution in float64: scaled, softmax, cumulative.
DRAWING = 3 * 8


@dataclass(frozen=True, kw_only=True)
class Network:
    """One network on the device."""

    shape: Shape
    scalar: bool = False
    """A reward model or critic, which has one output."""
    adapter: int = 0
    """Rank of its LoRA adapter; 0: none."""
    trained: bool = False
    """Whether an optimizer learns it."""
    frozen: bool = False
    """Whether its weights are marked as not to be learned: autocast keeps no copies of them."""
    each: int = FULL
    """Bytes of one of its weights."""

    @property
    def parameters(self) -> int:
        """Its own parameters, without an adapter."""
        return parameters(self.shape, self.scalar)

    @property
    def learned(self) -> int:
        """Parameters that learn."""
        head = (self.shape.hidden + 1) * self.scalar
        adapted = adapter_parameters(self.shape, self.adapter) + head
        return (adapted if self.adapter else self.parameters) * self.trained

    @property
    def matrices(self) -> int:
        """Weights that a matrix product reads for every token."""
        head = self.shape.embedding * (not self.scalar)
        return self.shape.layers * block_weights(self.shape) + head

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights; an adapter is held in float32."""
        return self.parameters * self.each + adapter_parameters(self.shape, self.adapter) * FULL

    def cast_bytes(self, kept: bool = False) -> int:
        """bf16 copies of its weights that live while a pass without gradients is under way.

        All are `kept` where weights are cast once a step. Elsewhere autocast keeps those of weights
        that may learn until a pass ends; frozen weights are cast again for each product.
        """
        if self.each == HALF:
            return 0
        if kept or not (self.adapter or self.frozen):
            return HALF * self.matrices
        output = self.shape.embedding * (not self.scalar)
        return HALF * max(output, self.shape.hidden * self.shape.intermediate)


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """What one device holds at the worst moment of a part of a stage, in bytes."""

    moment: str
    """Which moment that is."""
    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    copies: float = 0
    """bf16 copies of weights; sharded: weights and gradients that are whole for a moment, too."""
    activations: float = 0
    logits: float = 0
    cache: float = 0
    """Keys and values of the sampler."""
    other: float = 0
    """What a step needs for a moment: the gradients' temporary tensors."""

    @property
    def total(self) -> float:
        """All of it, bytes."""
        return sum(size for name, size in vars(self).items() if name != "moment")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all parts of a run's plan share."""

    config: Config
    shape: Shape
    devices: int = 1
    on_gpu: bool = True
    sharded: bool = False
    """Whether the devices share weights, gradients and moments: ENGINE=fsdp2."""

    @property
    def shards(self) -> int:
        """Parts that each weight is cut into."""
        return self.devices if self.sharded else 1

    @property
    def wide(self) -> int:
        """Bytes of an activation."""
        return HALF if self.half else FULL

    @property
    def half(self) -> bool:
        """Whether autocast computes in bf16."""
        return self.config.memory.mixed_precision == "bf16"

    @property
    def recomputed(self) -> bool:
        """Whether activations are computed again in the backward pass."""
        return self.config.memory.gradient_checkpointing

    @property
    def keeps(self) -> bool:
        """Whether copies of weights outlast a pass (`casting_once` in stages/training)."""
        return self.half and not self.recomputed and self.shards == 1

    def rank(self, stage: str) -> int:
        """Rank of a stage's adapters; 0 if it learns all weights."""
        return self.config.lora.rank if stage in self.config.lora.adapted_stages else 0


def setting_of(config: Config, **more: Any) -> Setting:
    """The setting of a run. Raises UserError as `shape_of` does, and where logits are not read in
    chunks.
    """
    if config.ppo.logprob_dtype == "bf16":
        raise UserError("ppo.logprob_dtype=bf16 has no plan: leave it at float32 here")
    return Setting(config=config, shape=shape_of(config.base), **more)


# -- activations -----------------------------------------------------------------------------------


def saved_per_token(shape: Shape, half: bool) -> float:
    """Bytes that autograd saves for one token in one block.

    GPT-NeoX: the block's input in float32; in the precision of the products the outputs of both
    norms, qkv (its values are a view of it), rotated queries and keys, attention's output twice (as
    the kernel and as the next layer lays it out), and the MLP before and after its activation.
    Llama: the inputs of both norms, and these normed, in float32; one cast a linear layer; queries,
    keys and values for all heads; attention's output; four tensors of the MLP.
    Both are tested against autograd. Other families are taken for Llama.
    """
    hidden, heads, wide = shape.hidden, shape.attention, shape.intermediate
    statistics = 16 + FULL * shape.heads
    if shape.gated:
        casts = 5 if half else 2
        narrow = casts * hidden + 4 * heads + 4 * wide
        return 4 * hidden * FULL + narrow * (HALF if half else FULL) + statistics
    narrow = 2 * hidden + 7 * heads + 2 * wide
    return hidden * FULL + narrow * (HALF if half else FULL) + statistics


def saved_activations(setting: Setting, sequences: int, tokens: int) -> float:
    """Bytes that autograd holds when a network's forward pass ends, without logits.

    Beside what each token costs, every layer holds its own float form of the attention mask
    [B, 1, L, L]; rows of one text have none, so for these it is some percent too much. With
    gradient checkpointing only the inputs of the blocks are held.
    """
    shape = setting.shape
    count = sequences * tokens
    norm = 2 * FULL if shape.gated else FULL  # the last one's input; Llama's keeps it normed, too
    ends = count * shape.hidden * (norm + setting.wide)
    if setting.recomputed:
        return shape.layers * count * shape.hidden * FULL + ends
    return shape.layers * _one_layer(setting, sequences, tokens) + ends


def _one_layer(setting: Setting, sequences: int, tokens: int) -> float:
    mask = sequences * tokens**2 * setting.wide
    return sequences * tokens * saved_per_token(setting.shape, setting.half) + mask


def backward_extra(setting: Setting, sequences: int, tokens: int) -> float:
    """Bytes of one block's gradients while the backward pass is in it; with gradient checkpointing
    also of the block's own activations.
    """
    shape, count = setting.shape, sequences * tokens
    gradients = count * (3 * shape.hidden * FULL + 2 * shape.intermediate * setting.wide)
    again = _one_layer(setting, sequences, tokens) if setting.recomputed else 0
    return gradients + again


def passing_activations(setting: Setting, network: Network, sequences: int, tokens: int) -> float:
    """Bytes of a forward pass without gradients, inside its widest part, the MLP: the residual
    stream, attention's output, the norm's output, and two or three tensors of the MLP. LoRA adds to
    the widest layer its input in float32, and its own product before and after it is scaled.
    """
    shape, count, wide = setting.shape, sequences * tokens, setting.wide
    inner = (3 if shape.gated else 2) * shape.intermediate * wide
    inner += shape.intermediate * (FULL + 2 * wide) * bool(network.adapter)
    mask = sequences * tokens**2 * (1 + wide)
    return count * (inner + shape.hidden * (2 * FULL + wide)) + mask


def cache_per_token(shape: Shape, half: bool) -> int:
    """Bytes of one token's keys and values in all layers, in autocast's type."""
    return 2 * shape.layers * shape.key_value * (HALF if half else FULL)


def held(setting: Setting, networks: Sequence[Network], gradients: bool) -> Bytes:
    """What stays on the device between two moments of a stage, after its first update.

    Several devices hold every gradient twice, as DistributedDataParallel keeps buckets of its own,
    or share weights, gradients and moments.
    """
    learned, shards = sum(network.learned for network in networks), setting.shards
    copies = 2 if setting.devices > shards else 1
    return Bytes(
        moment="",
        weights=sum(network.weight_bytes for network in networks) / shards,
        gradients=learned * FULL * copies * gradients / shards,
        optimizer=learned * MOMENTS / shards,
    )


def gathered(setting: Setting, network: Network, by_layer: bool) -> float:
    """Bytes of a sharded network's weights that are whole while it computes: all where every device
    runs it alone, as for sampling and validation; or, `by_layer`, two blocks, of which the
    second is fetched ahead, and embedding, output layer and last norm.
    """
    waiting = (setting.shape.layers - 2) * block_weights(setting.shape)
    size = network.each * (network.parameters - waiting) if by_layer else network.weight_bytes
    return size * (setting.shards > 1)


def logit_bytes(setting: Setting, count: float) -> float:
    """Bytes of `count` logits while they are read, in chunks (stages/models/logprobs.py)."""
    chunk = min(count, CHUNK["cuda" if setting.on_gpu else "cpu"])
    return chunk * (CHUNK_WORK + HALF * setting.half + CHUNK_KEPT * (chunk < count))


Batch = tuple[int, int, int]
"""Sequences and tokens of a pass, and positions with logits of each sequence."""


def _worst(base: Bytes, moments: dict[str, dict[str, float]]) -> Bytes:
    """The moment with the most bytes, each by what it holds beside the base."""
    each = (replace(base, moment=moment, **more) for moment, more in moments.items())
    return max(each, key=lambda moment: moment.total)


def training(setting: Setting, networks: Sequence[Network], batch: Batch) -> Bytes:
    """The worst moment of an optimizer step on a microbatch."""
    sequences, tokens, positions = batch
    learned = [network for network in networks if network.trained]
    plain = [network for network in learned if not network.adapter]
    logits = logit_bytes(setting, sequences * positions * setting.shape.vocabulary)
    # PPO's networks learn one after the other, so one's activations are alive, and the casts that
    # autograd holds. Those of all are kept, but of weights beside an adapter.
    saved = saved_activations(setting, sequences, tokens)
    narrow = [HALF * each.matrices for each in learned]
    casts = sum(narrow) if plain and setting.keeps else max(narrow)
    casts *= setting.half * (not setting.recomputed)
    whole = max(gathered(setting, each, True) * (1 + (not each.adapter)) for each in learned)
    step = {"copies": whole + casts, "activations": saved}
    # A new gradient stands beside the one that it is added to: that of the embedding, and that of
    # the output layer, over chunks a sum and one chunk's.
    # Where casts are kept, autograd goes through them last: then all bf16 gradients are there.
    embedding = setting.shape.embedding
    late = casts + max(narrow) if plain and setting.keeps else 0
    head = any(not network.scalar for network in plain) * (FULL + setting.wide) * embedding
    moments = {
        "loss": step | {"logits": logits},
        "layers": step | {"activations": saved + backward_extra(setting, sequences, tokens)},
        "embedding": {"copies": whole + late, "other": FULL * embedding * bool(plain)},
        "head": step | {"logits": logits, "other": head},
    }
    if not positions:
        del moments["head"]
    return _worst(held(setting, networks, gradients=True), moments)


def passing(
    setting: Setting, networks: Sequence[Network], batch: Batch, together: bool = False
) -> Bytes:
    """The worst moment of a pass without gradients through the first network; the others and the
    optimizer's moments are held beside it.

    `together`: whether it is one of a rollout. There all devices make the pass at once, so that a
    sharded network is whole layer by layer only, and copies of weights are kept.
    """
    sequences, tokens, positions = batch
    first, count = networks[0], sequences * positions * setting.shape.vocabulary
    casts = setting.half * first.cast_bytes(together and setting.keeps)
    copies = {"copies": casts + gathered(setting, first, together)}
    last = 2 * FULL * sequences * tokens * setting.shape.hidden
    moments = {
        "layers": {"activations": passing_activations(setting, first, sequences, tokens)},
        "logits": {"activations": last, "logits": logit_bytes(setting, count)},
    }
    copied = {moment: copies | more for moment, more in moments.items()}
    return _worst(held(setting, networks, gradients=False), copied)


def sampling(setting: Setting, networks: Sequence[Network], batch: Batch) -> Bytes:
    """The worst moment of sampling from the first network; `batch` is sequences, tokens of a query,
    tokens of a response.
    """
    sequences, query, response = batch
    casts = setting.half * networks[0].cast_bytes(setting.keeps)
    copies = {"copies": casts + gathered(setting, networks[0], False)}
    token = cache_per_token(setting.shape, setting.half) * sequences
    prompt = passing_activations(setting, networks[0], sequences, query)
    cache = token * (query + response) * (1 + 1 / setting.shape.layers)  # one layer's grows
    draws = DRAWING * sequences * setting.shape.vocabulary
    moments = {
        "prompt": copies | {"cache": token * query, "activations": prompt},
        "last token": copies | {"cache": cache, "logits": draws},
    }
    return _worst(held(setting, networks, gradients=False), moments)
