"""Bytes on one device, stage by stage. Standard library only.

Every number follows from what the code does: master weights, gradients and Adam's two moments in
float32; autocast to bf16 that keeps its copies of the weights; activations that autograd saves;
logits and the copies of them that a loss makes. Every device holds all of it; under ENGINE=fsdp2
its share of weights, gradients and moments, and what is gathered while it is used.

Letters: B sequences, L tokens of a sequence, T tokens that have logits, V vocabulary, H hidden
width. The longest sequences decide, because rows of similar length share a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from reports.needs.lengths import Lengths
from reports.needs.shapes import FULL, HALF, Network, Shape, block_weights
from stages.settings.config import Config
from stages.settings.families import CHUNK, PLAIN_HEAD

MOMENTS = 8  # bytes of Adam's two moments of one parameter

# Bytes per logit where all are held at once, in a family whose logits cannot be read in chunks
# (stages/learning/vocabulary.py). `token_logprobs` divides the logits by the temperature (a copy),
# takes the exponential of that copy in `logsumexp` (one more), and in the backward pass needs
# (x - lse), its exponential and the product with the gradient beside the copy.
LOSS_FORWARD = 3 * FULL
# A network that the accelerator has not wrapped gives bf16 logits: 2 bytes in place of 4.
PLAIN_FORWARD = LOSS_FORWARD - FULL + HALF
LOSS_BACKWARD = 4 * FULL
# PPO's statistics beside the loss: logits, scaled logits, logits / temperature, its softmax, and
# the product of the last two in `entropy`.
ENTROPY = 5 * FULL
# Bytes per logit of a chunk: the scaled logits and their exponential. The first chunk's stay.
CHUNK_WORK, CHUNK_KEPT = 2 * FULL, FULL
# `draw` inverts the cumulative distribution in float64: scaled, softmax, cumulative.
DRAWING = 3 * 8


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """What one device holds at the worst moment of a part of a stage, in bytes."""

    moment: str
    """Which moment that is."""
    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    copies: float = 0
    """bf16 copies of weights that autocast keeps; sharded: weights and gradients that are whole for
    a moment, too."""
    activations: float = 0
    logits: float = 0
    cache: float = 0
    """Keys and values of the sampler."""
    other: float = 0
    """What a step needs for a moment: the gradients' temporary tensors."""

    @property
    def total(self) -> float:
        """All of it, bytes."""
        held = self.weights + self.gradients + self.optimizer + self.copies
        return held + self.activations + self.logits + self.cache + self.other


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all parts of a run's plan share."""

    config: Config
    shape: Shape
    lengths: Lengths
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
    def whole_logits(self) -> bool:
        """Whether logits of all positions of a pass are held at once."""
        papers = self.config.ppo.logprob_dtype == "bf16"
        return self.shape.family not in PLAIN_HEAD or papers

    @property
    def recomputed(self) -> bool:
        """Whether activations are computed again in the backward pass."""
        return self.config.memory.gradient_checkpointing

    def rank(self, stage: str) -> int:
        """Rank of a stage's adapters; 0 if it learns all weights."""
        return self.config.lora.rank if stage in self.config.lora.adapted_stages else 0

    @property
    def frozen_bytes(self) -> int:
        """Bytes of a weight of PPO's reference policy and reward model."""
        return HALF if self.config.memory.frozen_dtype == "bf16" else FULL


# -- activations -----------------------------------------------------------------------------------


def saved_per_token(shape: Shape, half: bool) -> float:
    """Bytes that autograd saves for one token in one block.

    GPT-NeoX: the block's input in float32; in the precision of the products the outputs of both
    norms, qkv (its values are a view of it), rotated queries and keys, attention's output twice (as
    the kernel and as the next layer lays it out), and the MLP before and after its activation.
    Llama: the inputs of both norms, and these normed, in float32; one cast a linear layer; queries,
    keys and values for all heads; attention's output; four tensors of the MLP.
    Both are tested against autograd. GPT-2 and Gemma are taken for the one that they resemble.
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
    [B, 1, L, L]. With gradient checkpointing only the inputs of the blocks are held.
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


def passing_activations(setting: Setting, sequences: int, tokens: int) -> float:
    """Bytes of a forward pass without gradients, inside its widest part, the MLP: the residual
    stream, attention's output, the norm's output, and two or three tensors of the MLP.
    """
    shape, count = setting.shape, sequences * tokens
    inner = (3 if shape.gated else 2) * shape.intermediate * setting.wide
    outer = shape.hidden * (2 * FULL + setting.wide)
    mask = sequences * tokens**2 * (1 + setting.wide)
    return count * (inner + outer) + mask


def beside_adapter(setting: Setting, network: Network, tokens: int) -> float:
    """Bytes of what LoRA adds to the widest layer of a pass: its input in float32, and its own
    product before and after it is scaled.
    """
    wide = FULL + 2 * setting.wide
    return tokens * setting.shape.intermediate * wide if network.adapter else 0.0


def cache_per_token(shape: Shape, half: bool) -> int:
    """Bytes of one token's keys and values in all layers.

    Under autocast the keys are float32, because rotating them multiplies by float32 numbers, and
    the values are bf16. GPT-2 does not rotate.
    """
    rotated = shape.family != "gpt2"
    keys = FULL if rotated or not half else HALF
    return shape.layers * shape.key_value * (keys + (HALF if half else FULL))


# -- moments ---------------------------------------------------------------------------------------


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


def gathered_layers(setting: Setting, network: Network) -> float:
    """Bytes of a sharded network's weights that are whole while it computes: two blocks, of which
    the second is fetched ahead, and embedding, output layer and last norm.
    """
    if setting.shards == 1:
        return 0.0
    blocks = setting.shape.layers * block_weights(setting.shape)
    return network.each * (network.parameters - blocks + 2 * block_weights(setting.shape))


def gathered_whole(setting: Setting, network: Network) -> float:
    """Bytes of a sharded network that every device runs alone, as for sampling and validation."""
    return network.weight_bytes if setting.shards > 1 else 0.0


def embedding_gradient(networks: Sequence[Network]) -> float:
    """Bytes of a gradient of the embedding that is added to the one there is."""
    return max(
        (FULL * network.largest for network in networks if network.trained and not network.adapter),
        default=0,
    )


def logit_bytes(setting: Setting, count: float, whole: float) -> float:
    """Bytes of `count` logits while they are read; `whole` is what each costs held at once."""
    if setting.whole_logits:
        return whole * count
    chunk = min(count, CHUNK["cuda" if setting.on_gpu else "cpu"])
    return chunk * (CHUNK_WORK + HALF * setting.half + CHUNK_KEPT * (chunk < count))


def training(
    setting: Setting,
    networks: Sequence[Network],
    batch: tuple[int, int, int],
    per_logit: float = LOSS_FORWARD,
) -> Bytes:
    """The worst moment of an optimizer step.

    `batch` is sequences and tokens of a microbatch, and the positions with logits; `per_logit` is
    what the loss holds per logit before the backward pass.
    """
    sequences, tokens, positions = batch
    base = held(setting, networks, gradients=True)
    learned = [network for network in networks if network.trained]
    count = sequences * positions * setting.shape.vocabulary
    # PPO's networks learn one after the other, so one's activations and casts are alive.
    saved = saved_activations(setting, sequences, tokens)
    casts = setting.half * max(network.cast_bytes(setting.recomputed) for network in learned)
    whole = max(
        gathered_layers(setting, network) * (1 + (not network.adapter)) for network in learned
    )
    held_casts = whole + (0 if setting.recomputed else casts)
    extra = backward_extra(setting, sequences, tokens)
    step = partial(replace, base, copies=held_casts, activations=saved)
    moments = [
        step(moment="loss", logits=logit_bytes(setting, count, per_logit)),
        step(moment="backward", logits=logit_bytes(setting, count, LOSS_BACKWARD)),
        step(moment="layers", activations=saved + extra),
        replace(base, moment="embedding", copies=whole, other=embedding_gradient(networks)),
    ]
    if positions:
        weight = _head_gradient(setting, learned)
        grads = logit_bytes(setting, count, FULL + (HALF if setting.half else FULL))
        moments.append(step(moment="head", logits=grads, other=weight))
    return max(moments, key=lambda moment: moment.total)


def _head_gradient(setting: Setting, learned: Sequence[Network]) -> float:
    """Bytes of the output layer's new gradient, before it is added to the one there is."""
    own = [network for network in learned if not network.adapter and not network.scalar]
    each = FULL + (HALF if setting.half else 0)
    if not setting.whole_logits:
        each = FULL + (HALF if setting.half else FULL)  # the sum over chunks, and one chunk's
    return max((each * network.largest for network in own), default=0)


def passing(
    setting: Setting,
    networks: Sequence[Network],
    batch: tuple[int, int, int],
    per_logit: float = LOSS_FORWARD,
    together: bool = False,
) -> Bytes:
    """The worst moment of a pass without gradients through the first network; the others and the
    optimizer's moments are held beside it.

    `together`: whether all devices make the pass at once, so that a sharded network is whole layer
    by layer only.
    """
    sequences, tokens, positions = batch
    base = held(setting, networks, gradients=False)
    casts: float = setting.half * networks[0].cast_bytes(recomputed=True)
    casts += (gathered_layers if together else gathered_whole)(setting, networks[0])
    count = sequences * positions * setting.shape.vocabulary
    layers = passing_activations(setting, sequences, tokens)
    layers += beside_adapter(setting, networks[0], sequences * tokens)
    last = 2 * FULL * sequences * tokens * setting.shape.hidden
    moments = [
        replace(base, moment="layers", copies=casts, activations=layers),
        replace(
            base,
            moment="logits",
            copies=casts,
            activations=last,
            logits=logit_bytes(setting, count, per_logit),
        ),
    ]
    return max(moments, key=lambda moment: moment.total)


def sampling(setting: Setting, networks: Sequence[Network], batch: tuple[int, int, int]) -> Bytes:
    """The worst moment of sampling from the first network; `batch` is sequences, tokens of a query,
    tokens of a response.
    """
    sequences, query, response = batch
    base = held(setting, networks, gradients=False)
    casts: float = setting.half * networks[0].cast_bytes(recomputed=True)
    casts += gathered_whole(setting, networks[0])
    token = cache_per_token(setting.shape, setting.half) * sequences
    draws = DRAWING * sequences * setting.shape.vocabulary
    growing = token * (query + response) / setting.shape.layers
    moments = [
        replace(
            base,
            moment="prompt",
            copies=casts,
            cache=token * query,
            activations=passing_activations(setting, sequences, query)
            + beside_adapter(setting, networks[0], sequences * query),
        ),
        replace(
            base,
            moment="last token",
            copies=casts,
            cache=token * (query + response) + growing,
            logits=draws,
        ),
    ]
    return max(moments, key=lambda moment: moment.total)
