"""What a rehearsal reads: rows as long as the limits allow, and weights of the run's shape.

    python -m reports.needs.inputs FOLDER --preset pythia-1b

Memory and speed depend on shapes, not on what a model has learned, and the longest rows need the
most. So rows are generated. Weights are those of the checkpoint, if it is a folder or comes from
the hub, and random ones otherwise.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from reports.needs.shapes import NEOX, Shape, shape_of
from stages.learning.models import load_tokenizer, quiet_loading, with_dropout
from stages.posts.tokens import plain_encoder
from stages.running.files import write_json, write_lines
from stages.running.hub import fetch_model, model_source
from stages.settings.checks import Parser, in_one_line
from stages.settings.command_line import add_arguments, config_of, request_of
from stages.settings.config import RANDOM, Config, Data, UserError
from stages.settings.prompt import format_post
from stages.settings.sections import COMPARISONS, EOS_TOKEN

INITIALIZER = 0.02
WORDS = ("the", "of")  # each one token, after a space, of every tokenizer that was looked at


# -- weights and tokenizer -------------------------------------------------------------------------


def model_for(config: Config, folder: Path) -> tuple[Path, str]:
    """The folder of the checkpoint; or `folder`, with random weights of its published shape.

    The second value is empty, or says that the weights are random.
    """
    checkpoint = config.base.checkpoint
    if checkpoint != RANDOM:
        try:
            return fetch_model(model_source("base.checkpoint", checkpoint)).folder, ""
        except UserError:
            pass
    shape = shape_of(config.base)
    draw_weights(shape, config.seed, folder)
    write_tokenizer(shape.vocabulary, folder)
    return folder, "random, of the published shape"


def draw_weights(shape: Shape, seed: int, folder: Path) -> None:
    """Write a policy of this shape with new weights, drawn from the seed."""
    quiet_loading()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(model_config(shape), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def model_config(shape: Shape) -> PretrainedConfig:
    """transformers' configuration of a shape, without dropout. EOS is token 0."""
    given = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.positions,
        "initializer_range": INITIALIZER,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if shape.family != NEOX:
        given["num_key_value_heads"] = shape.kv_heads or shape.heads
    return with_dropout(AutoConfig.for_model(shape.family, **given), 0.0)


def write_tokenizer(vocabulary: int, folder: Path) -> None:
    """Write a tokenizer of whole words that leaves one id of the embedding for [PAD]."""
    more = [f"word{number}" for number in range(3, vocabulary - 1)]
    words = {word: number for number, word in enumerate([EOS_TOKEN, *WORDS, *more])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN).save_pretrained(folder)


# -- rows ------------------------------------------------------------------------------------------


def write_rows(folder: Path, data: Data, counts: dict[str, int], tokenizer: Any) -> None:
    """Write so many rows of each split, queries and summaries as long as the limits allow."""
    folder.mkdir(parents=True)
    encode = plain_encoder(tokenizer)

    def count(text: str) -> int:
        return len(encode([text])[0])

    for split, rows in counts.items():
        made = _pairs(data, rows, count) if split in COMPARISONS else _posts(data, rows, count)
        write_lines(folder / f"{split}.jsonl", made)


def _posts(data: Data, rows: int, count: Callable[[str], int]) -> Iterator[dict[str, Any]]:
    room = data.max_query_summary_tokens - data.max_summary_tokens
    post = _post(min(data.max_query_tokens, room), count)
    summary = _words(data.max_summary_tokens - 1)  # EOS is the last token
    for row in range(rows):
        yield {"id": f"p{row}", **post(row), "summary": summary}


def _pairs(data: Data, rows: int, count: Callable[[str], int]) -> Iterator[dict[str, Any]]:
    room = data.max_query_comparison_tokens - data.max_comparison_tokens
    post = _post(min(data.max_query_tokens, room), count)
    texts = (_words(data.max_comparison_tokens - 1), _words(data.max_comparison_tokens - 2))
    summaries = [{"text": f" {text}", "policy": f"policy{k}"} for k, text in enumerate(texts)]
    groups = {"worker": "w", "batch": "generated", "split": "train", "extra": {}}
    for row in range(rows):
        info = {"id": f"c{row}", **post(row)}
        yield {"info": info, "summaries": summaries, "choice": row % 2, **groups}


def _words(count: int, number: int = 0) -> str:
    """So many words; those of two small numbers differ, because they spell its binary digits."""
    return " ".join(WORDS[number >> place & 1] for place in range(max(1, count)))


def _post(length: int, count: Callable[[str], int]) -> Callable[[int], dict[str, str]]:
    """What gives a row's post, whose query has so many tokens, or the few less that a whole word
    takes. The posts of rows differ: a model reads the query of equal ones once.
    """

    def filled(words: int, row: int = 0) -> dict[str, str]:
        return {"subreddit": "tldr", "title": WORDS[0], "post": _words(words, row)}

    short, long = (count(format_post(filled(words))) for words in (10, 20))
    words = 10 + (length - short) * 10 // max(1, long - short)
    return partial(filled, max(1, words))


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Write what a rehearsal reads below a folder, and `inputs.json`, which says what it is."""
    parser = Parser(description="rows and weights of a rehearsal")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=json.loads, required=True, help="split -> number of rows")
    add_arguments(parser)
    args = parser.parse_args(argv)
    config = config_of(request_of(args))
    folder, random = model_for(config, args.folder / "model")
    tokenizer_source = "" if random else config.base.tokenizer
    tokenizer = load_tokenizer(tokenizer_source or folder)
    write_rows(args.folder / "data", config.data, args.rows, tokenizer)
    if Path(tokenizer_source).is_dir() and tokenizer_source:
        tokenizer_source = str(Path(tokenizer_source).absolute())
    record = {
        "settings": [f"base.checkpoint={folder.absolute()}", f"base.tokenizer={tokenizer_source}"],
        "weights": random or config.base.checkpoint,
    }
    write_json(args.folder / "inputs.json", record)


if __name__ == "__main__":
    main()
