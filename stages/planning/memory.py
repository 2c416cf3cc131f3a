"""Bytes on one device at the worst moment of a training step, of a pass, or of sampling.

Every number follows from what the code does. Master weights, gradients and Adam's two moments are
float32. Autocast to bf16 keeps copies of the weights. Autograd saves activations, and a loss copies
the logits. Each device holds all of that; under ENGINE=fsdp2 it holds its share of weights,
gradients and moments, and what is gathered while it is used.

Letters: B sequences, L tokens of a sequence, V vocabulary, H hidden width. The longest sequences
decide, because rows of similar length share a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.sections import CHUNK
from stages.planning.shapes import Shape, adapter_parameters, block_weights, parameters, shape_of

GIB = 2**30
# Bytes of one number, and of Adam's two moments of one parameter.
FLOAT32 = 4
BF16 = 2
FLOAT64 = 8
MOMENTS = 2 * FLOAT32

# Bytes per logit of a chunk: the scaled logits and their exponential. The first chunk's stay while
# the next one is computed.
CHUNK_WORK = 2 * FLOAT32
CHUNK_KEPT = FLOAT32
# Sampling inverts the cumulative distribution in float64: scaled logits, softmax, cumulative sum.
SAMPLING_WORK = 3 * FLOAT64


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run on some devices: what all parts of its plan share."""

    config: Config
    shape: Shape
    devices: int = 1
    on_gpu: bool = True
    sharded: bool = False
    """Whether the devices share weights, gradients and moments: ENGINE=fsdp2."""

    @property
    def shards(self) -> int:
        """Number of parts that each weight is cut into."""
        return self.devices if self.sharded else 1

    @property
    def half(self) -> bool:
        """Whether autocast computes in bf16."""
        return self.config.memory.mixed_precision == "bf16"

    @property
    def activation_size(self) -> int:
        """Bytes of one number of an activation."""
        return BF16 if self.half else FLOAT32

    @property
    def recomputed(self) -> bool:
        """Whether activations are computed again in the backward pass."""
        return self.config.memory.gradient_checkpointing

    @property
    def keeps_casts(self) -> bool:
        """Whether bf16 copies of weights outlast a pass (`casting_once` in stages/training)."""
        return self.half and not self.recomputed and self.shards == 1

    def lora_rank(self, stage: str) -> int:
        """Rank of a stage's adapters; 0 if it trains all weights."""
        return self.config.lora.rank if stage in self.config.lora.adapted_stages else 0


def setting_of(
    config: Config, devices: int = 1, on_gpu: bool = True, sharded: bool = False
) -> Setting:
    """A run on some devices.

    Raises UserError as `shape_of` does, and for a run that does not compute its logits in chunks.
    """
    if config.ppo.logprob_dtype == "bf16":
        raise UserError("there is no memory plan for ppo.logprob_dtype=bf16: set float32")
    return Setting(
        config=config,
        shape=shape_of(config.base),
        devices=devices,
        on_gpu=on_gpu,
        sharded=sharded,
    )


@dataclass(frozen=True, kw_only=True)
class Network:
    """One network on the device."""

    shape: Shape
    is_scalar: bool = False
    """Whether it has one output instead of a vocabulary: a reward model or a critic."""
    lora_rank: int = 0
    """Rank of its LoRA adapter. 0: none."""
    is_trained: bool = False
    """Whether an optimizer trains it."""
    is_frozen: bool = False
    """Whether its weights need no gradient, so that autocast keeps no copies of them."""
    weight_size: int = FLOAT32
    """Bytes of one weight."""

    @property
    def parameters(self) -> int:
        """Its parameters, without an adapter."""
        return parameters(self.shape, self.is_scalar)

    @property
    def trained_parameters(self) -> int:
        """Parameters that the optimizer trains."""
        if not self.is_trained:
            return 0
        if not self.lora_rank:
            return self.parameters
        head = self.shape.hidden + 1 if self.is_scalar else 0
        return adapter_parameters(self.shape, self.lora_rank) + head

    @property
    def matrix_weights(self) -> int:
        """Weights that a matrix product reads for every token."""
        blocks = self.shape.layers * block_weights(self.shape)
        return blocks if self.is_scalar else blocks + self.shape.embedding

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights. An adapter is float32."""
        adapter = adapter_parameters(self.shape, self.lora_rank)
        return self.parameters * self.weight_size + adapter * FLOAT32

    def cast_bytes(self, is_kept: bool = False) -> int:
        """Bytes of the bf16 copies of its weights during a pass without gradients.

        All of them live if they are kept, where weights are cast once a step. Otherwise autocast
        keeps the copies of trainable weights until the pass ends, and casts a frozen weight again
        for each product, so that only the largest copy counts.
        """
        if self.weight_size == BF16:
            return 0
        has_frozen_weights = self.is_frozen or self.lora_rank > 0
        if is_kept or not has_frozen_weights:
            return BF16 * self.matrix_weights
        largest = self.shape.hidden * self.shape.intermediate
        if not self.is_scalar:
            largest = max(largest, self.shape.embedding)
        return BF16 * largest


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The sequences of one pass."""

    sequences: int
    tokens: int
    """Tokens of each sequence."""
    logits: int = 0
    """Positions of each sequence whose logits are read. 0: the network is scalar."""


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """What one device holds at one moment, in bytes."""

    moment: str
    """Which moment that is."""
    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    copies: float = 0
    """bf16 copies of weights. With sharding also weights and gradients that are whole for a
    moment."""
    activations: float = 0
    logits: float = 0
    cache: float = 0
    """Keys and values of the sampler."""
    other: float = 0
    """Temporary tensors of the gradients."""

    @property
    def total(self) -> float:
        """The sum."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.copies
            + self.activations
            + self.logits
            + self.cache
            + self.other
        )


def worst(moments: Sequence[Bytes]) -> Bytes:
    """The moment with the most bytes."""
    return max(moments, key=lambda moment: moment.total)


# -- activations -----------------------------------------------------------------------------------


def saved_per_token(shape: Shape, half: bool) -> float:
    """Bytes that autograd saves for one token in one block.

    GPT-NeoX: the block's input in float32. In the precision of the products: the outputs of both
    norms, qkv (its values are a view of it), rotated queries and keys, attention's output twice (as
    the kernel and as the next layer lays it out), and the MLP before and after its activation.
    Llama: the inputs of both norms, and these normed, in float32. One cast for each linear layer;
    queries, keys and values for all heads; attention's output; four tensors of the MLP.

    Tests compare both with autograd. Other families are assumed to be like Llama.
    """
    size = BF16 if half else FLOAT32
    statistics = 16 + FLOAT32 * shape.heads
    if shape.gated:
        casts = 5 if half else 2
        numbers = casts * shape.hidden + 4 * shape.attention + 4 * shape.intermediate
        return 4 * shape.hidden * FLOAT32 + numbers * size + statistics
    numbers = 2 * shape.hidden + 7 * shape.attention + 2 * shape.intermediate
    return shape.hidden * FLOAT32 + numbers * size + statistics


def saved_activations(setting: Setting, sequences: int, tokens: int) -> float:
    """Bytes that autograd holds at the end of a network's forward pass, without logits.

    Every layer also holds its own float form of the attention mask [B, 1, L, L]. Rows of one text
    have no mask, so for them this is some percent too much. With gradient checkpointing only the
    inputs of the blocks are held.
    """
    shape = setting.shape
    count = sequences * tokens

    # The last norm's input; Llama's also keeps it normed. The last norm's output.
    norm_size = 2 * FLOAT32 if shape.gated else FLOAT32
    ends = count * shape.hidden * (norm_size + setting.activation_size)
    if setting.recomputed:
        return shape.layers * count * shape.hidden * FLOAT32 + ends
    return shape.layers * block_activations(setting, sequences, tokens) + ends


def block_activations(setting: Setting, sequences: int, tokens: int) -> float:
    """Bytes that autograd saves for one block."""
    mask = sequences * tokens**2 * setting.activation_size
    return sequences * tokens * saved_per_token(setting.shape, setting.half) + mask


def backward_extra(setting: Setting, sequences: int, tokens: int) -> float:
    """Bytes of one block's gradients while the backward pass is in it.

    With gradient checkpointing the block's own activations are computed again at this moment.
    """
    shape = setting.shape
    per_token = 3 * shape.hidden * FLOAT32 + 2 * shape.intermediate * setting.activation_size
    gradients = sequences * tokens * per_token
    if not setting.recomputed:
        return gradients
    return gradients + block_activations(setting, sequences, tokens)


def passing_activations(setting: Setting, network: Network, sequences: int, tokens: int) -> float:
    """Bytes of a forward pass without gradients in its widest part, the MLP.

    The residual stream, attention's output, the norm's output, and two or three tensors of the MLP.
    LoRA adds to the widest layer its input in float32, and its product before and after scaling.
    """
    shape = setting.shape
    size = setting.activation_size
    mlp = (3 if shape.gated else 2) * shape.intermediate * size
    if network.lora_rank:
        mlp += shape.intermediate * (FLOAT32 + 2 * size)
    stream = shape.hidden * (2 * FLOAT32 + size)
    mask = sequences * tokens**2 * (1 + size)
    return sequences * tokens * (mlp + stream) + mask


def cache_per_token(shape: Shape, half: bool) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * shape.layers * shape.key_value * (BF16 if half else FLOAT32)


def logit_bytes(setting: Setting, count: float) -> float:
    """Bytes of `count` logits while they are read in chunks (stages/models/logprobs.py)."""
    chunk = min(count, CHUNK["cuda" if setting.on_gpu else "cpu"])
    per_logit = CHUNK_WORK
    if setting.half:
        per_logit += BF16
    if chunk < count:
        per_logit += CHUNK_KEPT
    return chunk * per_logit


# -- moments ---------------------------------------------------------------------------------------


def held(setting: Setting, networks: Sequence[Network], has_gradients: bool) -> Bytes:
    """What stays on the device between two moments of a stage, after its first update.

    Several devices share weights, gradients and moments; or each holds every gradient twice,
    because DistributedDataParallel has buckets of its own.
    """
    shards = setting.shards
    trained = sum(network.trained_parameters for network in networks)
    gradients = 0
    if has_gradients:
        copies = 2 if setting.devices > shards else 1
        gradients = trained * FLOAT32 * copies
    return Bytes(
        moment="",
        weights=sum(network.weight_bytes for network in networks) / shards,
        gradients=gradients / shards,
        optimizer=trained * MOMENTS / shards,
    )


def gathered_bytes(setting: Setting, network: Network, by_layer: bool) -> float:
    """Bytes of a sharded network's weights that are whole while it computes.

    `by_layer`: two blocks, of which the second is fetched ahead, and embedding, output layer and
    last norm. Otherwise all weights, because every device runs the network alone, as for sampling
    and validation.
    """
    if setting.shards == 1:
        return 0
    if not by_layer:
        return network.weight_bytes
    waiting = (setting.shape.layers - 2) * block_weights(setting.shape)
    return network.weight_size * (network.parameters - waiting)


def training(setting: Setting, networks: Sequence[Network], batch: Batch) -> Bytes:
    """The worst moment of an optimizer step on a microbatch."""
    shape = setting.shape
    trained = [network for network in networks if network.is_trained]
    fully_trained = [network for network in trained if not network.lora_rank]
    keeps_casts = setting.keeps_casts and bool(fully_trained)

    # PPO's networks are trained one after the other, so only one has activations, with the bf16
    # copies of weights that autograd holds. Where casts are kept, those of all networks stay.
    cast_sizes = [BF16 * network.matrix_weights for network in trained]
    casts = sum(cast_sizes) if keeps_casts else max(cast_sizes)
    if not setting.half or setting.recomputed:
        casts = 0
    gathered = max(
        # A whole weight has a whole gradient, but for the frozen ones below an adapter.
        gathered_bytes(setting, network, by_layer=True) * (1 if network.lora_rank else 2)
        for network in trained
    )
    activations = saved_activations(setting, batch.sequences, batch.tokens)
    logits = logit_bytes(setting, batch.sequences * batch.logits * shape.vocabulary)

    base = held(setting, networks, has_gradients=True)
    step = replace(base, copies=gathered + casts, activations=activations)
    in_block = activations + backward_extra(setting, batch.sequences, batch.tokens)
    moments = [
        replace(step, moment="loss", logits=logits),
        replace(step, moment="layers", activations=in_block),
    ]

    # A new gradient of the embedding exists next to the one that it is added to. Where casts are
    # kept, autograd reaches them last, and all bf16 gradients are there.
    embedding = replace(base, moment="embedding", copies=gathered)
    if fully_trained:
        embedding = replace(embedding, other=FLOAT32 * shape.embedding)
    if keeps_casts:
        embedding = replace(embedding, copies=gathered + (casts + max(cast_sizes)))
    moments.append(embedding)

    # So does the output layer's: a sum over chunks, and one chunk's.
    if batch.logits:
        head = 0
        if any(not network.is_scalar for network in fully_trained):
            head = (FLOAT32 + setting.activation_size) * shape.embedding
        moments.append(replace(step, moment="head", logits=logits, other=head))
    return worst(moments)


def passing(
    setting: Setting, networks: Sequence[Network], batch: Batch, in_rollout: bool = False
) -> Bytes:
    """The worst moment of a pass without gradients through the first network.

    The other networks and the optimizer's moments are held at the same time. `in_rollout`: all
    devices make the pass at once, so that a sharded network is whole only layer by layer, and bf16
    copies of weights are kept.
    """
    network = networks[0]
    copies = gathered_bytes(setting, network, by_layer=in_rollout)
    if setting.half:
        copies += network.cast_bytes(is_kept=in_rollout and setting.keeps_casts)
    base = replace(held(setting, networks, has_gradients=False), copies=copies)

    layers = passing_activations(setting, network, batch.sequences, batch.tokens)
    last_hidden = 2 * FLOAT32 * batch.sequences * batch.tokens * setting.shape.hidden
    logits = logit_bytes(setting, batch.sequences * batch.logits * setting.shape.vocabulary)
    return worst(
        [
            replace(base, moment="layers", activations=layers),
            replace(base, moment="logits", activations=last_hidden, logits=logits),
        ]
    )


def sampling(
    setting: Setting, networks: Sequence[Network], *, sequences: int, query: int, response: int
) -> Bytes:
    """The worst moment of sampling from the first network.

    `query` and `response`: tokens of each. The other networks are held at the same time.
    """
    network = networks[0]
    shape = setting.shape
    copies = gathered_bytes(setting, network, by_layer=False)
    if setting.half:
        copies += network.cast_bytes(is_kept=setting.keeps_casts)
    base = replace(held(setting, networks, has_gradients=False), copies=copies)

    prompt = passing_activations(setting, network, sequences, query)
    cache = cache_per_token(shape, setting.half) * sequences
    # A layer's cache exists twice while it grows by a token.
    grown_cache = cache * (query + response) * (1 + 1 / shape.layers)
    probabilities = SAMPLING_WORK * sequences * shape.vocabulary
    return worst(
        [
            replace(base, moment="prompt", cache=cache * query, activations=prompt),
            replace(base, moment="last token", cache=grown_cache, logits=probabilities),
        ]
    )
