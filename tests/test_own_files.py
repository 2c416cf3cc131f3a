"""The user's own files: a change makes stale what was made from them, and nothing else does."""

import json

import pytest

from stages import finished
from stages.finished import differing_settings, seal_of, stage_folder, why_not
from stages.running import files
from stages.running.inputs import data_inputs
from stages.runs import open_stage
from stages.settings.command_line import make_config
from stages.settings.config import UserError
from tests.test_posts import write_folder


@pytest.fixture
def folders(runs, tmp_path, monkeypatch):
    """A working directory with folders of posts, of a model and of a tokenizer."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "data")
    for name in ("model", "tokenizer", "reward"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text(name)
    return tmp_path


def made(config, stage="base"):
    """A stage that has finished with these settings."""
    folder = stage_folder(config, stage)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open_stage(config, stage) as run:
        (run.partial / "out.txt").write_text("made")
        run.finish({})
    assert why_not(config, stage) is None
    return folder / "manifest.json"


def asked(*overrides, **more):
    return make_config("tiny", name="own", overrides=overrides, **more)


def test_other_tables_in_the_folder_of_posts_are_not_read_and_make_nothing_stale(folders):
    config = asked(data="data")
    only_read = data_inputs(config, "base")
    manifest = made(config)
    (folders / "data/notes.jsonl").write_text("{}\n")
    (folders / "data/sft_train.parquet").write_text("beside the JSON lines, which are read")
    assert data_inputs(config, "base") == only_read
    assert why_not(config, "base") is None
    tables = sorted((folders / "data").glob("*.*"))
    record = json.loads(manifest.read_text())
    record["inputs"] = {
        "data": finished.hash_of({path.name: files.file_hash(path) for path in tables})
    }
    del record["seal"]
    manifest.write_text(json.dumps(record | {"seal": seal_of(record)}))
    assert record["inputs"] != only_read  # as it was recorded once
    assert why_not(config, "base") is None
    (folders / "data/sft_train.jsonl").write_text("{}\n")
    assert str(why_not(config, "base")) == "was made from other data"


def test_a_folder_that_is_written_in_another_way_is_the_same(folders):
    made(asked(data="data", tokenizer="tokenizer"))
    for data in ("data/", "./data", str(folders / "data"), "tokenizer/../data"):
        config = asked(data=data, tokenizer=str(folders / "tokenizer/"))
        assert why_not(config, "base") is None, data
    write_folder(folders / "toy")
    other = asked(data=str(folders / "toy"), tokenizer="tokenizer")
    assert "data.source: made with data, asked" in str(why_not(other, "base"))
    made(make_config("tiny", name="built-in", overrides=("base.vocab_size=600",)))
    own = make_config(
        "tiny", name="built-in", data=str(folders / "toy"), overrides=("base.vocab_size=600",)
    )
    assert "data.source: made with toy" in "; ".join(differing_settings(own, "base"))


def test_a_run_from_an_upstream_may_write_its_folder_in_another_way(folders):
    made(asked(data="data"))
    more = {"name": "from", "upstream": "own", "overrides": ("ppo.kl_coef=0.1",)}
    assert make_config("tiny", data="data/", **more).own_from == ""
    write_folder(folders / "other")
    with pytest.raises(UserError, match="no stage can be taken from a run with another base"):
        make_config("tiny", data="other", **more)
