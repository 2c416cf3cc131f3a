"""What the variables of a command mean: typed, from the environment, blank, or twice."""

import pytest

from stages.__main__ import main
from stages.config.command_line import make_config
from stages.pipeline.variables import read_command, resume_command
from tests.lib.pipeline import make


@pytest.fixture
def typed_line(capsys):
    """Return the line with which a command that is refused ends."""

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*words])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return str(line)

    return run


def test_a_variable_of_the_environment_counts_if_a_target_reads_it(monkeypatch):
    monkeypatch.setenv("GPUS", "2")
    assert read_command(["sft"]) == (["sft"], {"GPUS": "2"})


def test_a_variable_of_the_environment_for_other_targets_is_ignored(monkeypatch):
    monkeypatch.setenv("GPU", "h100-80gb")
    targets, values = read_command(["sft", "SEED=1"])
    assert resume_command(targets, values) == "make sft SEED=1"


def test_rehearse_in_the_environment_rehearses_no_evaluation(runs, monkeypatch, capsys):
    monkeypatch.setenv("REHEARSE", "1")
    main(["eval", "DRY=1"])
    assert "tiny seed 44413: would run judge" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "would_run"),
    [
        (["algorithms", "SEEDS= "], "tiny seed 44413: would run sft"),
        (["algorithms", "PENALTIES= "], "tiny-kl0.02 seed 44413: would follow"),
        (["ablations", "SEEDS= "], "tiny-dropout seed 44413: would follow"),
        (["ablations", "ABLATIONS= ", "SEEDS=1"], "tiny-dropout seed 1: would follow"),
        (["study", "PRESETS= ", "SEEDS=1"], "tiny-xl seed 1: would run sft"),
        (["study", "JOB= ", "SEEDS=1"], "tiny-xl seed 1: would run ppo"),
    ],
)
def test_a_blank_list_is_the_default_of_a_grid(runs, capsys, words, would_run):
    main([*words, "DRY=1"])
    assert would_run in capsys.readouterr().out


def test_a_seed_that_is_no_number_is_refused_by_its_variable(typed_line):
    assert typed_line("sft", "SEED=abc") == "error: SEED=abc is not a whole number: correct it"


def test_a_setting_that_is_set_by_a_variable_and_in_set_is_refused(typed_line):
    line = typed_line("eval", "POLICY=a", "SET=released.policy=b")
    assert line == "error: released.policy is set twice: leave one out"


@pytest.mark.parametrize("grid", ["ablations", "algorithms"])
def test_a_grid_with_variants_does_not_replace_single_stages(typed_line, grid):
    line = typed_line(grid, "REPLACE=ppo rloo")
    assert line == (
        f"error: REPLACE=ppo rloo is for one run, not for {grid}: run `make ppo rloo NAME=..."
        " REPLACE='ppo rloo'`, then this command without REPLACE"
    )


@pytest.mark.parametrize("grid", ["study", "ablations", "algorithms"])
def test_a_grid_refuses_a_cost_cap_that_would_apply_to_each_run(typed_line, grid):
    line = typed_line(grid, "MAX_COST=20")
    assert line == (
        "error: MAX_COST caps the cost of one run, not of a grid: cap each run by"
        " SET=judge.max_cost=20"
    )


def test_a_rehearsal_in_several_processes_takes_gpus_only(typed_line):
    line = typed_line("sft", "REHEARSE=1", "LAUNCH=srun", "GPUS=2")
    assert line == "error: REHEARSE=1 starts its own processes: give GPUS= in place of LAUNCH="


def test_judge_refuses_a_run_without_existing_summaries(typed_line, runs):
    make(make_config("tiny", name="mine"), "sft")
    line = typed_line("judge", "NAME=mine")
    assert line == (
        "error: judge is for existing summaries, and mine has none: add INPUT=, or run"
        " `make eval NAME=mine` for a run of this project"
    )
