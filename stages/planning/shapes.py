"""Shapes of causal language models, and the number of parameters that follows from a shape.

A model whose shape is not listed here is read from the `config.json` of its folder.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.config.errors import UserError
from stages.config.sections import EMBEDDING_MULTIPLE, RANDOM, TRAIN_TOKENIZER, Base

# Families by `model_type`, and those whose blocks are built like Llama's.
NEOX = "gpt_neox"
LLAMA = "llama"
QWEN2 = "qwen2"
GEMMA = "gemma"
LLAMA_LIKE = (LLAMA, QWEN2, GEMMA)
FAMILIES = (NEOX, *LLAMA_LIKE)

GPT_NEOX_TOKENS = 50_278  # of Pythia's tokenizer, with our [PAD]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The dimensions that determine the memory and the computation of a transformer."""

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
    """Heads of keys and values. 0: as many as `heads`."""
    head_width: int = 0
    """Width of one head. 0: hidden / heads."""
    tied: bool = False
    """Whether the output layer and the embedding share their weights."""

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, the largest tensor."""
        return self.vocabulary * self.hidden

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.head_width or self.hidden // self.heads

    @property
    def attention(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head

    @property
    def key_value(self) -> int:
        """Width of all keys of one token, and of all its values."""
        return (self.kv_heads or self.heads) * self.head

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate, as in Llama."""
        return self.family in LLAMA_LIKE


# -- parameters ------------------------------------------------------------------------------------


def linear_layers(shape: Shape) -> list[tuple[int, int]]:
    """(inputs, outputs) of every weight matrix of one block."""
    hidden = shape.hidden
    if shape.gated:
        return [
            (hidden, shape.attention),  # queries
            (hidden, shape.key_value),  # keys
            (hidden, shape.key_value),  # values
            (shape.attention, hidden),
            (hidden, shape.intermediate),  # gate
            (hidden, shape.intermediate),  # up
            (shape.intermediate, hidden),  # down
        ]
    return [
        (hidden, 3 * hidden),  # queries, keys and values
        (hidden, hidden),
        (hidden, shape.intermediate),
        (shape.intermediate, hidden),
    ]


def block_weights(shape: Shape) -> int:
    """Parameters of the weight matrices of one block."""
    return sum(inputs * outputs for inputs, outputs in linear_layers(shape))


def block_parameters(shape: Shape) -> int:
    """Parameters of one block: matrices, their biases, and norms."""
    weights = block_weights(shape)
    if not shape.gated:
        # Every matrix has a bias, and so have both layer norms.
        biases = sum(outputs for _, outputs in linear_layers(shape))
        return weights + biases + 4 * shape.hidden
    # Both norms have only a scale. Qwen2's queries, keys and values have biases.
    biases = shape.attention + 2 * shape.key_value if shape.family == QWEN2 else 0
    return weights + biases + 2 * shape.hidden


def parameters(shape: Shape, is_scalar: bool = False) -> int:
    """Parameters of the language model.

    `is_scalar`: of a reward model or critic, which has one output with a bias instead of a
    vocabulary.
    """
    last_norm = shape.hidden if shape.gated else 2 * shape.hidden
    backbone = shape.embedding + last_norm + shape.layers * block_parameters(shape)
    if is_scalar:
        return backbone + shape.hidden + 1
    if shape.tied:
        return backbone
    return backbone + shape.embedding


def adapter_parameters(shape: Shape, rank: int) -> int:
    """Parameters of LoRA adapters of every weight matrix of the blocks."""
    widths = sum(inputs + outputs for inputs, outputs in linear_layers(shape))
    return shape.layers * rank * widths


# -- published models ------------------------------------------------------------------------------


def _neox(hidden: int, layers: int, heads: int, vocabulary: int = 50304) -> Shape:
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
    )


# Biderman et al. 2023, table 1, and the configurations of EleutherAI/pythia-* and
# HuggingFaceTB/SmolLM2-* on the hub.
PUBLISHED = {
    "pythia-14m": _neox(128, 6, 4),
    "pythia-31m": _neox(256, 6, 8),
    "pythia-70m": _neox(512, 6, 8),
    "pythia-160m": _neox(768, 12, 12),
    "pythia-410m": _neox(1024, 24, 16),
    "pythia-1b": _neox(2048, 16, 8),
    "pythia-1.4b": _neox(2048, 24, 16),
    "pythia-2.8b": _neox(2560, 32, 32),
    "pythia-6.9b": _neox(4096, 32, 32, vocabulary=50432),
    "pythia-12b": _neox(5120, 36, 40, vocabulary=50688),
    "smollm2-135m": _smollm2(576, 30, heads=9, kv_heads=3, intermediate=1536),
    "smollm2-360m": _smollm2(960, 32, heads=15, kv_heads=5, intermediate=2560),
    "smollm2-1.7b": _smollm2(2048, 24, heads=32, kv_heads=32, intermediate=8192),
}
# Endings of names on the hub whose models have the shape of the name without it.
SAME_SHAPE = ("-deduped", "-instruct")


def shape_of(base: Base) -> Shape:
    """The shape of the model that a run starts from.

    Raises UserError for a model that is neither published here nor a folder with a config.json.
    """
    # The GPT-NeoX that `stages/base.py` builds with new weights.
    if base.checkpoint == RANDOM:
        tokens = base.vocab_size if base.tokenizer == TRAIN_TOKENIZER else GPT_NEOX_TOKENS
        vocabulary = EMBEDDING_MULTIPLE * math.ceil(tokens / EMBEDDING_MULTIPLE)
        return _neox(base.hidden_size, base.num_layers, base.num_heads, vocabulary)

    saved = Path(base.checkpoint, "config.json")
    if saved.is_file():
        return read_shape(saved)

    # owner/Name-deduped@revision
    name = base.checkpoint.partition("@")[0].rstrip("/").split("/")[-1].lower()
    for ending in SAME_SHAPE:
        name = name.removesuffix(ending)
    if name not in PUBLISHED:
        raise UserError(
            f"base.checkpoint: the shape of {base.checkpoint} is unknown: give a folder with its "
            f"config.json, or one of {', '.join(PUBLISHED)}"
        )
    return PUBLISHED[name]


def read_shape(path: Path) -> Shape:
    """The shape that a transformers `config.json` describes.

    Raises UserError for a family without a formula here, and for a file that lacks a number.
    """
    try:
        saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        family = saved["model_type"]
        if family not in FAMILIES:
            names = ", ".join(FAMILIES)
            raise UserError(f"{path}: unknown model_type {family}: choose one of {names}")
        return Shape(
            family=family,
            hidden=saved["hidden_size"],
            layers=saved["num_hidden_layers"],
            heads=saved["num_attention_heads"],
            kv_heads=saved.get("num_key_value_heads") or 0,
            head_width=saved.get("head_dim") or 0,
            intermediate=saved["intermediate_size"],
            vocabulary=saved["vocab_size"],
            tied=saved.get("tie_word_embeddings", family == GEMMA),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a model's configuration ({error}): correct it") from None
