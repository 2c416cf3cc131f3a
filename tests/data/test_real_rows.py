"""All of the published human comparisons load, through the stage that reads them."""

from pathlib import Path

import pytest

from stages import base
from stages.data.ragged import load_split
from stages.runs.files import read_json
from tests.lib.make_stages import run_module

ROWS = {  # as ../shared/README.md counts them
    "sft_train": 2557,
    "sft_validation": 510,
    "comparisons_train": 3294,
    "comparisons_validation": 813,
    "ppo_train": 10000,
}
EMPTY_ROW = 1232  # line 1233 of comparisons_train: OpenAI's own row, a policy wrote nothing


@pytest.fixture(scope="module")
def base_folder(shared, tmp_path_factory):
    """The folder of stage base with all of the published rows and the real tokenizer."""
    arguments = ["--preset", "posts", "--name", "real"]
    arguments += ["--data", str(shared / "tldr-human")]
    arguments += ["--tokenizer", str(shared / "tokenizer")]
    arguments += ["--set", "base.hidden_size=32", "base.num_layers=2", "memory.cpu_threads=1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("real"))
        run_module(base, arguments)
        yield Path("runs/real/seed44413/base").absolute()


@pytest.fixture(scope="module")
def counts(base_folder):
    """Split -> the counts of its rows."""
    return (read_json(base_folder / "manifest.json") or {})["results"]["rows"]


def test_every_published_row_loads(counts):
    assert {name: split["rows"] for name, split in counts.items()} == ROWS
    for split in counts.values():
        assert split["skipped"] == 0
        assert split["over_limit"] == 0


def test_odd_published_comparisons_are_counted(counts):
    train = counts["comparisons_train"]
    assert train["empty_summaries"] == 6
    assert train["equal_summaries"] == 0
    assert train["against_choice"] == 0
    assert train["without_confidence"] == 2282
    assert counts["comparisons_validation"]["without_confidence"] == 158


def test_the_empty_summary_that_openai_published_becomes_eos_alone(base_folder):
    split = load_split(base_folder / "data", "comparisons_train")
    assert split.columns["rejected"][EMPTY_ROW].tolist() == [0]
    assert len(split.columns["chosen"][EMPTY_ROW]) > 20
