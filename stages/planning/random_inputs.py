"""The inputs of a rehearsal: random weights of the run's shape, and the longest possible rows.

Memory and speed depend on shapes, not on what a model has learned, and the longest rows need the
most. Nothing is downloaded.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from stages.config.sections import COMPARISONS, EOS_TOKEN, Data
from stages.models.loading import quiet_loading, with_dropout
from stages.planning.shapes import NEOX, Shape
from stages.runs.files import write_lines

POSITIONS = 8192
# Texts consist of these words. Each is one token, so lengths are counted without a tokenizer.
WORDS = ("the", "of")


def draw_weights(shape: Shape, seed: int, folder: Path) -> None:
    """Save a language model of this shape, with random weights drawn from the seed."""
    quiet_loading()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(model_config(shape), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def model_config(shape: Shape) -> PretrainedConfig:
    """transformers' configuration of a shape, without dropout. EOS is token 0."""
    values = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.02,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if shape.family != NEOX:
        values["num_key_value_heads"] = shape.kv_heads or shape.heads
    if shape.head_width:
        values["head_dim"] = shape.head_width
    return with_dropout(AutoConfig.for_model(shape.family, **values), 0.0)


def write_tokenizer(vocabulary: int, folder: Path) -> None:
    """Save a tokenizer of whole words. It leaves the last id of the embedding for [PAD]."""
    words = [EOS_TOKEN, *WORDS]
    words += [f"word{number}" for number in range(len(words), vocabulary - 1)]
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN).save_pretrained(folder)


def write_rows(folder: Path, data: Data, counts: Mapping[str, int]) -> None:
    """Write rows of each split, with queries and summaries as long as the limits allow.

    `counts`: split -> the number of its rows.
    """
    folder.mkdir(parents=True)
    first = 0  # No two splits share a prompt.
    for split, count in counts.items():
        numbers = range(first, first + count)
        pairs_or_posts = longest_pairs if split in COMPARISONS else longest_posts
        write_lines(folder / f"{split}.jsonl", pairs_or_posts(data, numbers))
        first += count


def longest_posts(data: Data, numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield a prompt with a completion for each number, as `stages/data/formats.py` reads them."""
    room = data.max_query_summary_tokens - data.max_summary_tokens
    for number in numbers:
        yield {
            "prompt": words(min(data.max_query_tokens, room), number),
            "completion": words(data.max_summary_tokens - 1),  # EOS is the last token
        }


def longest_pairs(data: Data, numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield a prompt with two answers for each number, as `stages/data/formats.py` reads them."""
    room = data.max_query_comparison_tokens - data.max_comparison_tokens
    for number in numbers:
        yield {
            "prompt": words(min(data.max_query_tokens, room), number),
            "chosen": words(data.max_comparison_tokens - 1),
            "rejected": words(data.max_comparison_tokens - 2),
        }


def words(count: int, number: int = 0) -> str:
    """A text of `count` words that spells the binary digits of a number.

    So the texts of different numbers differ: a model would read equal queries only once.
    """
    digits = [number >> place & 1 for place in range(max(1, count))]
    return " ".join(WORDS[digit] for digit in digits)
