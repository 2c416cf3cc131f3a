"""A half-finished stage resumes with the same settings and inputs, and is never lost by a typo."""

from pathlib import Path

import pytest

from stages.config.command_line import Request, make_config
from stages.config.errors import UserError
from stages.config.identity import settings_hash
from stages.pipeline.plan import make_plan
from stages.pipeline.runner import PlannedRun, Runner
from stages.runs.files import read_json, write_json
from stages.runs.inputs import current_inputs
from stages.runs.manifest import ATTEMPT, partial_of, stage_folder
from stages.runs.run import open_stage
from tests.lib.asserts import refusal_of
from tests.lib.fake_stages import finish, interrupt, run_stages


def config_of(*overrides, name="mine"):
    return make_config("tiny", name=name, overrides=overrides)


BEGUN = config_of("ppo.kl_coef=0.05", "ppo.lam=0.9")
TYPO = config_of("ppo.kl_coef=0.1", "ppo.lam=0.9")


@pytest.fixture
def half(runs):
    """PPO's partial folder with a checkpoint after update 12."""
    run_stages(BEGUN, "rm")
    return interrupt(BEGUN, "ppo", update=12)


def start(config):
    with open_stage(config, "ppo"):
        raise AssertionError("it has started")


def test_the_same_command_resumes_from_the_checkpoint(half):
    assert make_plan(BEGUN, ["ppo"]).reasons == {"ppo": "resumes after update 12"}
    with open_stage(BEGUN, "ppo") as run:
        assert (run.resume / "checkpoint-0000012").is_dir()


def test_dry_says_that_a_stage_killed_after_its_manifest_is_only_renamed(runs, capsys):
    run_stages(BEGUN, "sft")
    folder = stage_folder(BEGUN, "sft")
    folder.rename(partial_of(folder))

    def run_stage(config, stage) -> None:
        raise AssertionError(f"{stage} ran again")

    runner = Runner(run_stage=run_stage)
    planned = PlannedRun(request=Request(), config=BEGUN, targets=("sft",))
    capsys.readouterr()

    runner.show(planned)
    assert capsys.readouterr().out.splitlines() == [
        "mine seed 44413: would only rename the folder of sft, which has finished"
    ]
    assert runner.run(planned) == []


def test_other_settings_are_refused_with_the_difference_and_three_ways_out(half):
    line = (
        "stage ppo has a checkpoint after update 12, with other settings or inputs "
        "(ppo.kl_coef: began with 0.05, now 0.1): resume it with `make ppo PRESET=tiny "
        "SEED=44413 NAME=mine SET='ppo.kl_coef=0.05 ppo.lam=0.9'`, choose another NAME, "
        "or start over with REPLACE=ppo"
    )
    assert refusal_of(make_plan, TYPO, ["ppo"]) == line  # Before any stage runs.
    assert refusal_of(start, TYPO) == line
    assert (half / "resume/checkpoint-0000012").is_dir()
    assert read_json(half / "config.json")["ppo"]["kl_coef"] == 0.05


def test_another_input_is_refused_too(half):
    finish(BEGUN, "sft", text="other")
    run_stages(BEGUN, "rm")
    assert refusal_of(start, BEGUN) == (
        "stage ppo has a checkpoint after update 12, with other settings or inputs (it began with "
        "an earlier sft): restore them to resume it, choose another NAME, or start over with "
        "REPLACE=ppo"
    )
    assert (half / "resume/checkpoint-0000012").is_dir()


def test_another_name_leaves_it_alone(half):
    other = config_of("ppo.kl_coef=0.1", "ppo.lam=0.9", name="other")
    assert "ppo" in make_plan(other, ["ppo"]).reasons
    assert half.is_dir()


def test_replace_moves_it_aside_and_starts_over(half):
    assert run_stages(TYPO, "ppo", replace="ppo") == ["ppo"]
    assert (half.parent / "aside/ppo.partial-1/resume/checkpoint-0000012").is_dir()


def test_without_a_checkpoint_it_starts_over_and_says_so(runs, capsys):
    run_stages(BEGUN, "rm")
    partial = interrupt(BEGUN, "ppo")
    finish(TYPO, "ppo")
    aside = partial.parent / "aside/ppo.partial-1"
    assert (
        f"ppo starts over, its unfinished attempt moved to {aside}: "
        "ppo.kl_coef: began with 0.05, now 0.1\n"
    ) in capsys.readouterr().err
    assert aside.is_dir()


def test_an_optional_input_that_joins_is_named(runs, capsys):
    run_stages(BEGUN, "ppo")
    interrupt(BEGUN, "summaries")
    run_stages(BEGUN, "dpo")
    finish(BEGUN, "summaries")
    assert "summaries.partial-1: it began without dpo\n" in capsys.readouterr().err


def test_memory_settings_may_change(half):
    frugal = config_of("ppo.kl_coef=0.05", "ppo.lam=0.9", "memory.microbatch_size=1")
    assert make_plan(frugal, ["ppo"]).reasons == {"ppo": "resumes after update 12"}


# -- attempts that an earlier version began --------------------------------------------------------


def as_earlier_version(partial: Path, config) -> None:
    """Rewrite what an attempt recorded as an earlier version did."""
    attempt = {
        "settings_hash": settings_hash(config, "ppo"),
        "inputs": current_inputs(config, "ppo"),
        "code": {"module": "stages.ppo", "files": {"stages/ppo.py": "0123456789ab"}},
        "seconds": 5.0,
    }
    write_json(partial / ATTEMPT, attempt)
    # Sections and settings that were added later.
    config_record = read_json(partial / "config.json")
    del config_record["ppo"]["kl_target"]
    del config_record["lora"]
    write_json(partial / "config.json", config_record)


def test_an_attempt_of_an_earlier_version_resumes_without_a_word_about_code(half, capsys):
    as_earlier_version(half, BEGUN)
    assert make_plan(BEGUN, ["ppo"]).reasons == {"ppo": "resumes after update 12"}
    finish(BEGUN, "ppo")
    assert "code" not in capsys.readouterr().err
    code = read_json(half.with_name("ppo") / "manifest.json")["code"]
    assert code["earlier"] == [{"code_version": "unknown", "files": {}}]


def test_an_attempt_of_an_earlier_version_with_other_settings_is_refused(half):
    as_earlier_version(half, BEGUN)
    with pytest.raises(UserError, match=r"ppo\.kl_coef: began with 0\.05, now 0\.1"):
        start(TYPO)
