"""Shapes of causal language models, how many parameters follow from a shape, and rows of the data.

A model that is not published here is read from the `config.json` of its folder. Rows of the
published data sets are known counts; rows of a folder are counted. Standard library only.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.config.config import HUB, RANDOM, TOY, TRAIN_TOKENIZER, Base, Config, UserError
from stages.config.sections import ALL_PAIRS, EMBEDDING_MULTIPLE

# Families by `model_type`, and those whose blocks are built as Llama's. Logits of all are read in
# chunks, and samples of a query share a row (stages/models/logprobs.py).
NEOX, LLAMA, QWEN2, GEMMA = "gpt_neox", "llama", "qwen2", "gemma"
LLAMA_LIKE = (LLAMA, QWEN2, GEMMA)
GPT_NEOX_TOKENS = 50_278  # the tokenizer that Pythia uses, with our [PAD]


@dataclass(frozen=True)
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
        """Width of all keys of one token, and of all values."""
        return (self.kv_heads or self.heads) * self.head

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
    hidden, weights = shape.hidden, block_weights(shape)
    if not shape.gated:
        # Every matrix has a bias, and both layer norms have one too.
        return weights + sum(outputs for _, outputs in linear_layers(shape)) + 4 * hidden
    biases = (shape.attention + 2 * shape.key_value) * (shape.family == QWEN2)
    return weights + 2 * hidden + biases


def parameters(shape: Shape, scalar: bool = False) -> int:
    """Parameters of the causal language model; or of a reward model or critic, which has one output
    with a bias in place of the vocabulary.
    """
    norm = 1 if shape.gated else 2
    backbone = (shape.vocabulary + norm) * shape.hidden + shape.layers * block_parameters(shape)
    return backbone + (shape.hidden + 1 if scalar else shape.embedding * (not shape.tied))


def adapter_parameters(shape: Shape, rank: int) -> int:
    """Parameters of LoRA adapters beside every weight matrix of the blocks."""
    return shape.layers * sum(rank * (a + b) for a, b in linear_layers(shape))


# -- the published ones ----------------------------------------------------------------------------


def _neox(hidden: int, layers: int, heads: int, vocabulary: int = 50304) -> Shape:
    return Shape(NEOX, hidden, layers, heads, 4 * hidden, vocabulary)


def _smollm2(hidden: int, layers: int, heads: int, kv_heads: int, wide: int) -> Shape:
    return Shape(LLAMA, hidden, layers, heads, wide, 49152, kv_heads, tied=True)


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
    "pythia-6.9b": _neox(4096, 32, 32, 50432),
    "pythia-12b": _neox(5120, 36, 40, 50688),
    "smollm2-135m": _smollm2(576, 30, 9, 3, 1536),
    "smollm2-360m": _smollm2(960, 32, 15, 5, 2560),
    "smollm2-1.7b": _smollm2(2048, 24, 32, 32, 8192),
}


def shape_of(base: Base) -> Shape:
    """The shape of the model that a run starts from.

    Raises UserError for a model that is neither published here nor a folder with a config.json.
    """
    if base.checkpoint == RANDOM:  # the GPT-NeoX that `stages/base.py` makes with new weights
        tokens = base.vocab_size if base.tokenizer == TRAIN_TOKENIZER else GPT_NEOX_TOKENS
        vocabulary = -(-tokens // EMBEDDING_MULTIPLE) * EMBEDDING_MULTIPLE
        return _neox(base.hidden_size, base.num_layers, base.num_heads, vocabulary)
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


def read_shape(path: Path) -> Shape:
    """The shape that a transformers `config.json` describes. Raises UserError for another family
    than those known here, or a file that lacks a number.
    """
    try:
        saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        family = saved["model_type"]
        if family not in (NEOX, *LLAMA_LIKE):
            known = ", ".join((NEOX, *LLAMA_LIKE))
            raise UserError(f"{path}: no formula for model_type {family}: known are {known}")
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
        raise UserError(f"{path}: not the configuration of a model ({error})") from None


# -- rows of the data ------------------------------------------------------------------------------

# Rows of the published data: TL;DR posts, and comparisons of them (Huang et al. 2024).
HUB_ROWS = {
    "sft_train": 116_722,
    "sft_validation": 6_447,
    "comparisons_train": 92_858,
    "comparisons_validation": 83_802,
}


def rows_of(config: Config) -> dict[str, int]:
    """Rows of every split that a run reads. A missing file has 0: the run says what is wrong."""
    source, world = config.data.source, config.world
    if source == HUB:
        rows = HUB_ROWS
    elif source == TOY:
        posts, pairs = world.train_posts, world.train_comparisons
        counts = (posts, world.validation_posts, pairs, world.validation_comparisons)
        rows = dict(zip(HUB_ROWS, counts, strict=True))
    else:
        rows = {name: _lines_of(Path(source), name) for name in HUB_ROWS}
    used = {name: min(count, config.data.rows.get(name) or count) for name, count in rows.items()}
    if config.rm.pairs != ALL_PAIRS:
        used["comparisons_train"] //= 2
    return used


def _lines_of(folder: Path, split: str) -> int:
    """Rows of one split of a folder; a Parquet file is read where pyarrow is installed."""
    if (folder / f"{split}.jsonl").is_file():
        with (folder / f"{split}.jsonl").open("rb") as lines:
            return sum(1 for _ in lines)
    try:
        import pyarrow.parquet

        return int(pyarrow.parquet.ParquetFile(folder / f"{split}.parquet").metadata.num_rows)
    except (ImportError, OSError):
        return 0
