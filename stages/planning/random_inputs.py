"""What a rehearsal reads: random weights of the run's shape, and rows as long as the limits allow.

Memory and speed depend on shapes, not on what a model has learned, and the longest rows need the
most. A token is a word of the rows, so that their length is counted without a tokenizer.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from stages.config.config import Data
from stages.config.sections import COMPARISONS, EOS_TOKEN, format_post
from stages.models.loading import quiet_loading, with_dropout
from stages.planning.shapes import NEOX, Shape
from stages.runs.files import write_lines

INITIALIZER, POSITIONS = 0.02, 8192
WORDS = ("the", "of")


def draw_weights(shape: Shape, seed: int, folder: Path) -> None:
    """Write a policy of this shape with new weights, drawn from the seed."""
    quiet_loading()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(model_config(shape), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def model_config(shape: Shape) -> PretrainedConfig:
    """transformers' configuration of a shape, without dropout. EOS is token 0."""
    numbers = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": POSITIONS,
        "initializer_range": INITIALIZER,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if shape.family != NEOX:
        numbers["num_key_value_heads"] = shape.kv_heads or shape.heads
    return with_dropout(AutoConfig.for_model(shape.family, **numbers), 0.0)


def write_tokenizer(vocabulary: int, folder: Path) -> None:
    """Write a tokenizer of whole words that leaves one id of the embedding for [PAD]."""
    more = [f"word{number}" for number in range(3, vocabulary - 1)]
    words = {word: number for number, word in enumerate([EOS_TOKEN, *WORDS, *more])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN).save_pretrained(folder)


def write_rows(folder: Path, data: Data, counts: dict[str, int]) -> None:
    """Write so many rows of each split, queries and summaries as long as the limits allow."""
    folder.mkdir(parents=True)
    for split, count in counts.items():
        rows = (_pairs if split in COMPARISONS else _posts)(data, count)
        write_lines(folder / f"{split}.jsonl", rows)


def _posts(data: Data, count: int) -> Iterator[dict[str, Any]]:
    room = data.max_query_summary_tokens - data.max_summary_tokens
    summary = _words(data.max_summary_tokens - 1)  # EOS is the last token
    for row in range(count):
        yield {"id": f"p{row}", **_post(data, room, row), "summary": summary}


def _pairs(data: Data, count: int) -> Iterator[dict[str, Any]]:
    room = data.max_query_comparison_tokens - data.max_comparison_tokens
    texts = (_words(data.max_comparison_tokens - 1), _words(data.max_comparison_tokens - 2))
    summaries = [{"text": f" {text}", "policy": f"policy{k}"} for k, text in enumerate(texts)]
    groups = {"worker": "w", "batch": "generated", "split": "train", "extra": {}}
    for row in range(count):
        info = {"id": f"c{row}", **_post(data, room, row)}
        yield {"info": info, "summaries": summaries, "choice": row % 2, **groups}


def _post(data: Data, room: int, row: int) -> dict[str, str]:
    """A row's post, whose query has as many tokens as it may. The posts of rows differ: a model
    reads the query of equal ones once.
    """
    post = {"subreddit": "tldr", "title": WORDS[0], "post": ""}
    others = len(format_post(post, data.prompt).split())
    return post | {"post": _words(min(data.max_query_tokens, room) - others, row)}


def _words(count: int, number: int = 0) -> str:
    """So many words; those of two small numbers differ, because they spell its binary digits."""
    return " ".join(WORDS[number >> place & 1] for place in range(max(1, count)))
