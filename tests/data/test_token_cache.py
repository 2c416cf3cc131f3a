"""The cache of tokenized posts: found again if nothing differs, and never damaged by a run."""

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
    whole = data_files(runs, "first")
    for path in (runs / "first/seed44413/base/data").iterdir():
        path.write_bytes(b"x" + path.read_bytes()[1:])

    run_base("second")

    assert data_files(runs, "second") == whole
    assert "damaged" not in capsys.readouterr().err


def test_a_damaged_cache_is_named_and_built_again(runs, capsys):
    run_base("first")
    whole = data_files(runs, "first")
    for cache in sorted((runs / "cache").iterdir()):
        path = max(cache.iterdir(), key=lambda path: path.stat().st_size)
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        path.write_bytes(content)

        run_base(f"after-{cache.name}")

        assert data_files(runs, f"after-{cache.name}") == whole
        said = capsys.readouterr().err
        assert f"{cache} is damaged or of an older version: rebuilding it" in said


@pytest.mark.parametrize(
    ("edited_file", "caches"),
    [
        (None, 1),
        ("stages/config/stages.py", 1),
        ("stages/data/tokens.py", 2),
        ("stages/data/prompt.py", 2),
        ("stages/config/sections.py", 2),
    ],
)
def test_only_edited_tokenizing_code_misses_the_cache(
    runs, tokenizer, rows, tmp_path, monkeypatch, edited_file, caches
):
    base.copy_tokens(tokenizer, rows, {"sft_train": LIMITS}, tmp_path / "data")
    edited_code = code_of("stages.data.tokens")
    if edited_file:
        edited_code |= {edited_file: "edited"}
    monkeypatch.setattr(base, "code_of", lambda module: edited_code)
    base.copy_tokens(tokenizer, rows, {"sft_train": LIMITS}, tmp_path / "data")
    assert len(list((runs / "cache").iterdir())) == caches


def test_a_tokenizer_with_another_eos_misses_the_cache(runs, tokenizer, rows, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    chat_tokenizer = load_tokenizer(tmp_path)
    chat_tokenizer.eos_token = chat_tokenizer.convert_ids_to_tokens(1)
    assert chat_tokenizer.eos_token_id != tokenizer.eos_token_id

    for each in (tokenizer, chat_tokenizer):
        base.copy_tokens(each, rows, {"sft_train": LIMITS}, tmp_path / "data")
        summary = load_split(tmp_path / "data", "sft_train").columns["summaries"][0]
        assert summary[-1] == each.eos_token_id


def test_another_length_of_summaries_is_another_input_though_all_tokens_are_equal(runs):
    contents = set()
    for name, length in (("short", 20), ("long", 30)):
        run_base(name, f"data.max_summary_tokens={length}")
        contents.add(read_record(runs / name / "seed44413/base/manifest.json")["content"])
    assert len(contents) == 2
