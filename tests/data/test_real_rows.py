"""The published human comparisons load whole, through the stage that reads them."""

from pathlib import Path

import pytest

from stages import base
from stages.data.ragged import load_split
from stages.driving.start import run_module
from stages.running.files import read_json

ROWS = {  # as ../shared/README.md counts them
    "sft_train": 2557,
    "sft_validation": 510,
    "comparisons_train": 3294,
    "comparisons_validation": 813,
    "ppo_train": 10000,
}
EMPTY_ROW = 1232  # line 1233 of comparisons_train: OpenAI's own row, a policy wrote nothing


@pytest.fixture(scope="module")
def made(shared, tmp_path_factory):
    """The folder of stage base, made from all of the published rows with the real tokenizer."""
    arguments = ["--preset", "posts", "--data", str(shared / "tldr-human"), "--name", "real"]
    arguments += ["--tokenizer", str(shared / "tokenizer"), "--set", "base.hidden_size=32"]
    arguments += ["memory.cpu_threads=1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("real"))
        run_module(base, [*arguments, "base.num_layers=2"])
        yield Path("runs/real/seed44413/base").absolute()


def test_the_published_human_comparisons_load_whole(made):
    found = (read_json(made / "manifest.json") or {})["results"]["rows"]
    assert {name: split["rows"] for name, split in found.items()} == ROWS
    assert all(split["skipped"] == split["over_limit"] == 0 for split in found.values())
    pairs = found["comparisons_train"]
    assert pairs["empty_summaries"] == 6
    assert pairs["against_choice"] == pairs["equal_summaries"] == 0
    assert pairs["without_confidence"] == 2282
    assert found["comparisons_validation"]["without_confidence"] == 158


def test_the_empty_summary_that_openai_published_is_kept_as_eos_alone(made):
    split = load_split(made / "data", "comparisons_train")
    assert split.columns["rejected"][EMPTY_ROW].tolist() == [0]
    assert len(split.columns["chosen"][EMPTY_ROW]) > 20
