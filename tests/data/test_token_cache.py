"""Tokenized posts are cached: they are reused if nothing differs, and no run can damage them."""

import pytest

from stages import base
from stages.data.bad_rows import BadRows
from stages.data.lengths import Limits
from stages.data.ragged import load_split
from stages.models.tokenizers import load_tokenizer
from stages.runs.code import code_of
from stages.runs.files import read_record
from tests.lib.make_stages import run_module

LIMITS = Limits(query=400, response=100, query_response=450)
POST = {
    "id": "a1",
    "subreddit": "tifu",
    "title": "my bike",
    "post": "First part.\nMy boss sold my bike.",
    "summary": "My boss sold my bike.",
}
SMALL = [
    "world.train_posts=8",
    "world.validation_posts=4",
    "world.train_comparisons=8",
    "world.validation_comparisons=4",
]


def run_base(name, *settings):
    run_module(base, ["--preset", "tiny", "--name", name, "--set", *SMALL, *settings])


def data_files(runs, name):
    folder = runs / name / "seed44413/base/data"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def rows():
    return base.SourceRows(
        splits={"sft_train": [("f:1", POST)]}, bad_rows=BadRows("stop"), published={}
    )


def test_a_run_whose_files_are_overwritten_leaves_the_cache_as_it_is(runs, capsys):
    run_base("first")
    intact = data_files(runs, "first")
    for path in (runs / "first/seed44413/base/data").iterdir():
        path.write_bytes(b"x" + path.read_bytes()[1:])

    run_base("second")

    assert data_files(runs, "second") == intact
    assert "damaged" not in capsys.readouterr().err


def test_a_damaged_cache_is_named_and_built_again(runs, capsys):
    run_base("first")
    intact = data_files(runs, "first")
    for cache in sorted((runs / "cache").iterdir()):
        largest_file = max(cache.iterdir(), key=lambda path: path.stat().st_size)
        content = bytearray(largest_file.read_bytes())
        content[-9] ^= 1
        largest_file.write_bytes(content)

        run_base(f"after-{cache.name}")

        assert data_files(runs, f"after-{cache.name}") == intact
        warning = f"{cache} is damaged or of an older version: rebuilding it"
        assert warning in capsys.readouterr().err


@pytest.mark.parametrize(
    ("edits", "caches"),
    [
        ({}, 1),
        ({"stages/config/stages.py": "edited"}, 1),
        ({"stages/data/tokens.py": "edited"}, 2),
        ({"stages/data/prompt.py": "edited"}, 2),
        ({"stages/config/sections.py": "edited"}, 2),
    ],
    ids=["nothing", "the table of stages", "tokens", "prompt", "sections"],
)
def test_only_edited_tokenizing_code_misses_the_cache(
    runs, tokenizer, rows, tmp_path, monkeypatch, edits, caches
):
    base.copy_tokens(tokenizer, rows, {"sft_train": LIMITS}, tmp_path / "data")

    edited_code = code_of("stages.data.tokens") | edits
    monkeypatch.setattr(base, "code_of", lambda module: edited_code)
    base.copy_tokens(tokenizer, rows, {"sft_train": LIMITS}, tmp_path / "data")

    assert len(list((runs / "cache").iterdir())) == caches


def test_a_tokenizer_with_another_eos_misses_the_cache(runs, tokenizer, rows, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    chat_tokenizer = load_tokenizer(tmp_path)
    chat_tokenizer.eos_token = chat_tokenizer.convert_ids_to_tokens(1)
    assert chat_tokenizer.eos_token_id != tokenizer.eos_token_id

    base.copy_tokens(tokenizer, rows, {"sft_train": LIMITS}, tmp_path / "data")
    base.copy_tokens(chat_tokenizer, rows, {"sft_train": LIMITS}, tmp_path / "chat-data")

    split = load_split(tmp_path / "data", "sft_train")
    chat_split = load_split(tmp_path / "chat-data", "sft_train")
    assert split.columns["summaries"][0][-1] == tokenizer.eos_token_id
    assert chat_split.columns["summaries"][0][-1] == chat_tokenizer.eos_token_id


def content_hash(runs, name):
    """The hash by which later stages recognize a base."""
    return read_record(runs / name / "seed44413/base/manifest.json")["content"]


def test_another_limit_of_summaries_is_another_input_though_all_tokens_are_equal(runs):
    run_base("short", "data.max_summary_tokens=20")
    run_base("long", "data.max_summary_tokens=30")
    assert content_hash(runs, "short") != content_hash(runs, "long")
