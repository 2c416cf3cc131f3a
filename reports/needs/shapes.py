"""Shapes of causal language models, and how many parameters follow from a shape.

The published sizes are known here, so that a run can be planned before anything is downloaded. A
model that is not in the table is read from the `config.json` of its folder. Standard library only.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.settings.config import RANDOM, TRAIN_TOKENIZER, Base, UserError

# Families by `model_type` -> how their blocks are built.
NEOX, GPT2, LLAMA = "gpt_neox", "gpt2", "llama"
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2")
EMBEDDING_MULTIPLE = 64  # of a model with new weights, as stages/base.py makes it
GPT_NEOX_TOKENS = 50_278  # the tokenizer that Pythia uses, with our [PAD]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a transformer's memory and work follow from."""

    family: str
    """`model_type` of its configuration."""
    hidden: int
    """Width of the residual stream."""
    layers: int
    heads: int
    intermediate: int
    """Width of the MLP."""
    vocabulary: int
    """Rows of the embedding."""
    kv_heads: int = 0
    """Heads of keys and values; 0: as many as `heads`."""
    head_width: int = 0
    """Width of one head; 0: hidden / heads."""
    tied: bool = False
    """Whether the output layer is the embedding."""
    positions: int = 2048
    """Longest sequence; GPT-2 has an embedding of each position."""

    @property
    def attention(self) -> int:
        """Width of all heads together."""
        return self.heads * (self.head_width or self.hidden // self.heads)

    @property
    def key_value(self) -> int:
        """Width of all keys of one token, and of all values."""
        return (self.kv_heads or self.heads) * (self.head_width or self.hidden // self.heads)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate, as in Llama."""
        return self.family in LLAMA_LIKE


def linear_layers(shape: Shape) -> list[tuple[int, int]]:
    """(inputs, outputs) of every weight matrix of one block."""
    hidden, wide = shape.hidden, shape.intermediate
    if shape.gated:
        projections = [(hidden, shape.attention), *[(hidden, shape.key_value)] * 2]
        return [*projections, (shape.attention, hidden), *[(hidden, wide)] * 2, (wide, hidden)]
    return [(hidden, 3 * hidden), (hidden, hidden), (hidden, wide), (wide, hidden)]


def block_weights(shape: Shape) -> int:
    """Parameters of the weight matrices of one block."""
    return sum(inputs * outputs for inputs, outputs in linear_layers(shape))


def block_parameters(shape: Shape) -> int:
    """Parameters of one block: matrices, their biases, norms."""
    hidden, extra = shape.hidden, 0
    if not shape.gated:
        biases = sum(outputs for _, outputs in linear_layers(shape))
        return block_weights(shape) + biases + 4 * hidden  # two layer norms with bias
    norms = 2 * hidden
    if shape.family == "qwen2":
        extra = shape.attention + 2 * shape.key_value  # biases of queries, keys and values
    elif shape.family == "qwen3":
        extra = 2 * (shape.head_width or hidden // shape.heads)  # norms of queries and keys
    elif shape.family == "gemma2":
        extra = 2 * hidden  # a norm after each part, too
    return block_weights(shape) + norms + extra


def backbone_parameters(shape: Shape) -> int:
    """Parameters without any head: embeddings, blocks, the last norm."""
    embeddings = shape.vocabulary * shape.hidden
    if shape.family == GPT2:
        embeddings += shape.positions * shape.hidden
    last_norm = shape.hidden if shape.gated else 2 * shape.hidden
    return embeddings + shape.layers * block_parameters(shape) + last_norm


def policy_parameters(shape: Shape) -> int:
    """Parameters of the causal language model."""
    head = 0 if shape.tied else shape.vocabulary * shape.hidden
    return backbone_parameters(shape) + head


def scorer_parameters(shape: Shape) -> int:
    """Parameters of a reward model or critic: one output with a bias in place of the vocabulary."""
    return backbone_parameters(shape) + shape.hidden + 1


def adapter_parameters(shape: Shape, rank: int) -> int:
    """Parameters of LoRA adapters beside every weight matrix of the blocks."""
    return shape.layers * sum(rank * (a + b) for a, b in linear_layers(shape))


# -- the published ones ----------------------------------------------------------------------------


def _pythia(hidden: int, layers: int, heads: int, vocabulary: int = 50304) -> Shape:
    return Shape(
        family=NEOX,
        hidden=hidden,
        layers=layers,
        heads=heads,
        intermediate=4 * hidden,
        vocabulary=vocabulary,
    )


def _smollm2(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> Shape:
    return Shape(
        family=LLAMA,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        vocabulary=49152,
        tied=True,
        positions=8192,
    )


# Biderman et al. 2023, table 1, and the configurations of EleutherAI/pythia-* and
# HuggingFaceTB/SmolLM2-* on the hub.
PUBLISHED = {
    "pythia-14m": _pythia(128, 6, 4),
    "pythia-31m": _pythia(256, 6, 8),
    "pythia-70m": _pythia(512, 6, 8),
    "pythia-160m": _pythia(768, 12, 12),
    "pythia-410m": _pythia(1024, 24, 16),
    "pythia-1b": _pythia(2048, 16, 8),
    "pythia-1.4b": _pythia(2048, 24, 16),
    "pythia-2.8b": _pythia(2560, 32, 32),
    "pythia-6.9b": _pythia(4096, 32, 32, 50432),
    "pythia-12b": _pythia(5120, 36, 40, 50688),
    "smollm2-135m": _smollm2(576, 30, 9, 3, 1536),
    "smollm2-360m": _smollm2(960, 32, 15, 5, 2560),
    "smollm2-1.7b": _smollm2(2048, 24, 32, 32, 8192),
}


def shape_of(base: Base) -> Shape:
    """The shape of the model that a run starts from.

    Raises UserError for a model that is neither published here nor a folder with a config.json.
    """
    if base.checkpoint == RANDOM:
        return _random_shape(base)
    if Path(base.checkpoint, "config.json").is_file():
        return read_shape(Path(base.checkpoint, "config.json"))
    name = base.checkpoint.partition("@")[0].rstrip("/").split("/")[-1].lower()
    for ending in ("", "-deduped", "-instruct"):
        if name.removesuffix(ending) in PUBLISHED:
            return PUBLISHED[name.removesuffix(ending)]
    raise UserError(
        f"base.checkpoint: the shape of {base.checkpoint} is not known: give a folder with its "
        f"config.json, or one of {', '.join(PUBLISHED)}"
    )


def _random_shape(base: Base) -> Shape:
    """The GPT-NeoX that `stages/base.py` makes with new weights."""
    tokens = base.vocab_size if base.tokenizer == TRAIN_TOKENIZER else GPT_NEOX_TOKENS
    return Shape(
        family=NEOX,
        hidden=base.hidden_size,
        layers=base.num_layers,
        heads=base.num_heads,
        intermediate=4 * base.hidden_size,
        vocabulary=-(-tokens // EMBEDDING_MULTIPLE) * EMBEDDING_MULTIPLE,
    )


# What `config.json` calls a number where it is not the usual name.
GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}


def read_shape(path: Path) -> Shape:
    """The shape that a transformers `config.json` describes. Raises UserError for another family
    than those known here, or a file that lacks a number.
    """
    try:
        saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        family = saved["model_type"]
        if family not in (NEOX, GPT2, *LLAMA_LIKE):
            known = ", ".join((NEOX, GPT2, *LLAMA_LIKE))
            raise UserError(f"{path}: no formula for model_type {family}: known are {known}")
        if family == GPT2:
            saved |= {name: saved.get(given) for name, given in GPT2_NAMES.items()}
            saved["intermediate_size"] = saved["intermediate_size"] or 4 * saved["hidden_size"]
        return Shape(
            family=family,
            hidden=saved["hidden_size"],
            layers=saved["num_hidden_layers"],
            heads=saved["num_attention_heads"],
            kv_heads=saved.get("num_key_value_heads") or 0,
            head_width=saved.get("head_dim") or 0,
            intermediate=saved["intermediate_size"],
            vocabulary=saved["vocab_size"],
            tied=saved.get("tie_word_embeddings", family == GPT2 or family.startswith("gemma")),
            positions=saved.get("max_position_embeddings") or (1024 if family == GPT2 else 2048),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not the configuration of a model ({error})") from None


FULL, HALF = 4, 2  # bytes of a float32 and of a bf16 number


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
        return scorer_parameters(self.shape) if self.scalar else policy_parameters(self.shape)

    @property
    def learned(self) -> int:
        """Parameters that learn."""
        if not self.trained:
            return 0
        if not self.adapter:
            return self.parameters
        head = self.shape.hidden + 1 if self.scalar else 0
        return adapter_parameters(self.shape, self.adapter) + head

    @property
    def matrices(self) -> int:
        """Weights that a matrix product reads for every token."""
        head = 0 if self.scalar else self.shape.vocabulary * self.shape.hidden
        return self.shape.layers * block_weights(self.shape) + head

    @property
    def largest(self) -> int:
        """Parameters of its largest tensor, the embedding."""
        return self.shape.vocabulary * self.shape.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights; an adapter is held in float32."""
        added = adapter_parameters(self.shape, self.adapter) if self.adapter else 0
        return self.parameters * self.each + added * FULL

    def cast_bytes(self, recomputed: bool = False) -> int:
        """bf16 copies of its weights that live while a pass is under way.

        Autocast keeps a copy of every weight that may learn until it ends, and autograd keeps those
        that it needs. Frozen weights are cast again for each product.
        """
        if self.each == HALF:
            return 0
        kept = not self.adapter or (self.trained and not recomputed)
        if kept and not self.frozen:
            return HALF * self.matrices
        output = 0 if self.scalar else self.largest
        return HALF * max(output, self.shape.hidden * self.shape.intermediate)
