"""Configs that older versions and other branches have recorded."""

import pytest

from stages.config.command_line import make_config
from stages.config.options import config_from_arguments
from stages.config.recorded import recorded_config
from stages.rl.algorithms import ALGORITHMS
from stages.runs.files import read_json, write_json
from stages.runs.staleness import find_problem
from tests.lib.asserts import refusal_of
from tests.lib.fabricated_runs import fabricate


@pytest.fixture
def rewrite(runs):
    """A function that fabricates a run and then changes what its stages have recorded."""

    def rewrite_run(config, change) -> None:
        fabricate(config)
        for path in (runs / config.name).rglob("config.json"):
            record = read_json(path)
            change(record)
            write_json(path, record)

    return rewrite_run


def folder_of(runs, config, stage="ppo"):
    return runs / config.name / f"seed{config.seed}" / stage


def test_a_recorded_config_is_read_back(runs):
    config = make_config("tiny", name="mine", overrides=("ppo.lam=0.5", "sft.epochs=3"))

    fabricate(config)

    assert recorded_config(folder_of(runs, config)) == config


def test_a_setting_and_a_section_that_a_record_lacks_have_their_defaults(rewrite, runs, capsys):
    config = make_config("tiny", name="older")
    other_algorithms = ALGORITHMS.keys() - {"ppo"}

    def remove(record):
        del record["ppo"]["kl_target"]
        del record["checks"]
        del record["overrides"]
        del record["own_from"]
        for name in other_algorithms:
            del record[name]

    rewrite(config, remove)

    recorded = recorded_config(folder_of(runs, config))

    assert recorded is not None
    assert recorded.ppo == config.ppo
    assert recorded.checks == config.checks
    assert recorded.overrides == ()
    for name in other_algorithms:
        assert getattr(recorded, name) == ALGORITHMS[name].settings()
    assert capsys.readouterr().err == ""


def test_settings_of_another_branch_are_ignored_and_listed_once(rewrite, runs, capsys):
    config = make_config("tiny", name="branched")

    def add(record):
        record["extra"] = {"size": 3}
        record["ppo"]["shift"] = 0.5
        record["launched_by"] = "somebody"

    rewrite(config, add)

    configs = [recorded_config(folder_of(runs, config, stage)) for stage in ("base", "sft", "ppo")]

    assert configs == [config, config, config]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: run branched seed 44413 recorded settings that this version ")
    for name in ("extra", "ppo.shift", "launched_by"):
        assert name in line


def test_a_run_of_another_branch_can_be_named(rewrite, runs, capsys):
    config = make_config("tiny", name="branch-named", overrides=("ppo.lam=0.5",))

    def add(record):
        record["extra"] = {"size": 3}
        record["overrides"].append("extra.size=3")

    rewrite(config, add)

    named = config_from_arguments(["--name", "branch-named"])

    assert named == config
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_finished_stage_of_another_branch_counts_as_the_same(runs):
    config = make_config("tiny", name="mine")
    fabricate(config)
    path = folder_of(runs, config) / "manifest.json"
    manifest = read_json(path)
    manifest["settings"]["ppo"]["shift"] = 0.5
    manifest["settings_hash"] = "of the branch"

    write_json(path, manifest)

    assert find_problem(config, "ppo") is None


def test_a_run_whose_preset_is_gone_keeps_what_it_recorded(rewrite, runs, capsys):
    config = make_config("tiny-l", name="mine", overrides=("ppo.lam=0.5",))
    rewrite(config, lambda record: record.update(preset="tiny-huge"))

    recorded = recorded_config(folder_of(runs, config))
    named = config_from_arguments(["--name", "mine"])

    assert recorded == config.changed(preset="tiny-huge")
    assert named == recorded
    (line,) = capsys.readouterr().err.splitlines()
    assert "unknown preset 'tiny-huge'" in line
    assert line.startswith("warning: run mine keeps the settings that it recorded")


@pytest.mark.parametrize(
    ("section", "field", "value", "line"),
    [
        ("ppo", "kl_coef", -1.0, "ppo.kl_coef must be at least 0, not -1.0"),
        ("ppo", "kl_coef", "high", "ppo.kl_coef must be a number, not 'high'"),
        ("ppo", "score_at", "end", "ppo.score_at must be 'after_eos' or 'eos', not 'end'"),
    ],
)
def test_an_invalid_value_is_refused_with_the_file(rewrite, runs, section, field, value, line):
    config = make_config("tiny")
    rewrite(config, lambda record: record[section].update({field: value}))

    refusal = refusal_of(recorded_config, folder_of(runs, config))

    assert f"ppo/config.json: {line}" in refusal


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"seed": "one"}, "seed must be a whole number, not 'one'"),
        ({"ppo": 3}, "ppo must contain settings"),
        ({"name": "a/b"}, "NAME=a/b names no run: give the name of a folder"),
        ({"overrides": [1]}, "overrides"),
    ],
)
def test_an_invalid_record_is_refused_with_the_file(rewrite, runs, change, line):
    config = make_config("tiny")
    rewrite(config, lambda record: record.update(change))

    refusal = refusal_of(recorded_config, folder_of(runs, config))

    assert f"ppo/config.json: {line}" in refusal


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"preset": "tiny"}'])
def test_a_file_that_no_run_wrote_is_no_record(tmp_path, text):
    (tmp_path / "config.json").write_text(text)

    assert recorded_config(tmp_path) is None
