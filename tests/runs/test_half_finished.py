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


# PPO begins with the settings of `INTERRUPTED`; then `kl_coef` is mistyped.
INTERRUPTED = config_of("ppo.kl_coef=0.05", "ppo.lam=0.9")
MISTYPED = config_of("ppo.kl_coef=0.1", "ppo.lam=0.9")


@pytest.fixture
def partial_folder(runs):
    """PPO's partial folder with a checkpoint after update 12."""
    run_stages(INTERRUPTED, "rm")
    return interrupt(INTERRUPTED, "ppo", update=12)


def start_ppo(config):
    """Start PPO with settings or inputs with which it must be refused."""
    with open_stage(config, "ppo"):
        raise AssertionError("ppo has started")


# -- the same settings -----------------------------------------------------------------------------


def test_the_same_command_resumes_from_the_checkpoint(partial_folder):
    assert make_plan(INTERRUPTED, ["ppo"]).reasons == {"ppo": "resumes after update 12"}

    with open_stage(INTERRUPTED, "ppo") as run:
        assert (run.resume / "checkpoint-0000012").is_dir()


def test_memory_settings_may_change(partial_folder):
    other_batches = config_of("ppo.kl_coef=0.05", "ppo.lam=0.9", "memory.microbatch_size=1")
    assert make_plan(other_batches, ["ppo"]).reasons == {"ppo": "resumes after update 12"}


# -- a stage that was killed after its manifest was written ----------------------------------------


@pytest.fixture
def runner_without_training():
    """A runner that fails if a stage runs."""

    def run_stage(config, stage) -> None:
        raise AssertionError(f"{stage} ran again")

    return Runner(run_stage=run_stage)


@pytest.fixture
def sft_without_its_name(runs):
    """A plan for SFT, which has finished, but is still in its partial folder."""
    run_stages(INTERRUPTED, "sft")
    folder = stage_folder(INTERRUPTED, "sft")
    folder.rename(partial_of(folder))
    return PlannedRun(request=Request(), config=INTERRUPTED, targets=("sft",))


def test_dry_says_that_a_finished_stage_is_only_renamed(
    runner_without_training, sft_without_its_name, capsys
):
    capsys.readouterr()
    runner_without_training.show(sft_without_its_name)
    assert capsys.readouterr().out.splitlines() == [
        "mine seed 44413: would only rename the folder of sft, which has finished"
    ]
    assert not stage_folder(INTERRUPTED, "sft").exists()


def test_a_finished_stage_is_only_renamed(runner_without_training, sft_without_its_name):
    assert runner_without_training.run(sft_without_its_name) == []
    assert stage_folder(INTERRUPTED, "sft").exists()


# -- other settings and inputs ---------------------------------------------------------------------


def test_other_settings_are_refused_with_the_difference_and_three_ways_out(partial_folder):
    line = (
        "stage ppo has a checkpoint after update 12, with other settings or inputs "
        "(ppo.kl_coef: began with 0.05, now 0.1): resume it with `make ppo PRESET=tiny "
        "SEED=44413 NAME=mine SET='ppo.kl_coef=0.05 ppo.lam=0.9'`, choose another NAME, "
        "or start over with REPLACE=ppo"
    )
    assert refusal_of(make_plan, MISTYPED, ["ppo"]) == line  # before any stage runs
    assert refusal_of(start_ppo, MISTYPED) == line

    # Nothing is lost.
    assert (partial_folder / "resume/checkpoint-0000012").is_dir()
    assert read_json(partial_folder / "config.json")["ppo"]["kl_coef"] == 0.05


def test_another_input_is_refused_too(partial_folder):
    finish(INTERRUPTED, "sft", text="other")
    run_stages(INTERRUPTED, "rm")

    assert refusal_of(start_ppo, INTERRUPTED) == (
        "stage ppo has a checkpoint after update 12, with other settings or inputs (it began with "
        "an earlier sft): restore them to resume it, choose another NAME, or start over with "
        "REPLACE=ppo"
    )
    assert (partial_folder / "resume/checkpoint-0000012").is_dir()


def test_another_name_leaves_the_checkpoint_alone(partial_folder):
    other = config_of("ppo.kl_coef=0.1", "ppo.lam=0.9", name="other")

    assert "ppo" in make_plan(other, ["ppo"]).reasons
    assert partial_folder.is_dir()


def test_replace_moves_the_checkpoint_aside_and_starts_over(partial_folder):
    assert run_stages(MISTYPED, "ppo", replace="ppo") == ["ppo"]
    assert (partial_folder.parent / "aside/ppo.partial-1/resume/checkpoint-0000012").is_dir()


def test_without_a_checkpoint_other_settings_start_over_and_say_so(runs, capsys):
    run_stages(INTERRUPTED, "rm")
    partial = interrupt(INTERRUPTED, "ppo")

    finish(MISTYPED, "ppo")

    aside = partial.parent / "aside/ppo.partial-1"
    assert (
        f"ppo starts over, its unfinished attempt moved to {aside}: "
        "ppo.kl_coef: began with 0.05, now 0.1\n"
    ) in capsys.readouterr().err
    assert aside.is_dir()


def test_an_optional_input_that_finished_meanwhile_is_named(runs, capsys):
    run_stages(INTERRUPTED, "ppo")
    interrupt(INTERRUPTED, "summaries")

    run_stages(INTERRUPTED, "dpo")
    finish(INTERRUPTED, "summaries")
    assert "summaries.partial-1: it began without dpo\n" in capsys.readouterr().err


# -- attempts that an earlier version began --------------------------------------------------------


def rewrite_as_earlier_version(partial: Path, config) -> None:
    """Rewrite what an attempt recorded, as an earlier version did it."""
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


def test_an_attempt_of_an_earlier_version_resumes_without_a_word_about_code(partial_folder, capsys):
    rewrite_as_earlier_version(partial_folder, INTERRUPTED)
    assert make_plan(INTERRUPTED, ["ppo"]).reasons == {"ppo": "resumes after update 12"}

    finish(INTERRUPTED, "ppo")

    assert "code" not in capsys.readouterr().err
    code = read_json(partial_folder.with_name("ppo") / "manifest.json")["code"]
    assert code["earlier"] == [{"code_version": "unknown", "files": {}}]


def test_an_attempt_of_an_earlier_version_with_other_settings_is_refused(partial_folder):
    rewrite_as_earlier_version(partial_folder, INTERRUPTED)
    with pytest.raises(UserError, match=r"ppo\.kl_coef: began with 0\.05, now 0\.1"):
        start_ppo(MISTYPED)
