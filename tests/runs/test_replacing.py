"""REPLACE=1 reruns the stages of the targets; REPLACE=ppo reruns PPO and what follows from it."""

import json

import pytest

from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.stages import STAGES
from stages.pipeline.plan import make_plan
from stages.pipeline.runner import move_all_aside
from stages.runs.locks import held
from stages.runs.manifest import lock_of, partial_of, stage_folder
from tests.lib.asserts import refusal_of
from tests.lib.fake_stages import finish, interrupt, run_stages

TINY = make_config("tiny")
TARGETS = ("sft", "rm", "ppo", "eval")
REQUIRED = [name for name, row in STAGES.items() if not row.optional]
PPO_AND_LATER = REQUIRED[REQUIRED.index("ppo") :]


def mine(*overrides, **changes):
    """The config of the run `mine`."""
    return make_config("tiny", name="mine", overrides=overrides, **changes)


def test_replace_1_reruns_all_stages_of_the_targets(runs):
    run_stages(TINY, *TARGETS)

    replaced = run_stages(TINY, *TARGETS, replace="1")

    assert replaced == [name for name in REQUIRED if name != "base"]


def test_replace_moves_finished_stages_aside(runs):
    run_stages(TINY, *TARGETS)
    run_stages(TINY, *TARGETS, replace="1")
    aside = {path.name for path in (runs / "tiny/seed44413/aside").iterdir()}
    assert {"sft-1", "ppo-1", "judge-facts-1"} <= aside


def test_replace_1_leaves_the_stages_below_the_targets(runs):
    run_stages(TINY, *TARGETS)
    assert run_stages(TINY, "ppo", replace="1") == ["ppo"]


def test_replace_1_refuses_other_settings_of_a_stage_below_the_targets(runs):
    run_stages(mine("sft.epochs=3"), *TARGETS)
    with pytest.raises(UserError, match="stage sft has finished with other settings"):
        run_stages(mine("sft.epochs=4"), "ppo", replace="1")


def test_replace_reruns_the_named_stages_and_what_follows_from_any(runs):
    run_stages(TINY, *TARGETS, "rloo")

    replaced = run_stages(TINY, *TARGETS, "rloo", replace="rloo ppo")

    assert replaced == ["ppo", "rloo", *PPO_AND_LATER[1:]]


@pytest.mark.parametrize(
    ("targets", "replace", "line"),
    [
        (TARGETS, "ppo poo", "unknown stage 'poo': did you mean ppo or dpo?"),
        (("sft",), "ppo", "REPLACE=ppo: no target of this command runs it: add ppo"),
    ],
)
def test_replace_of_a_stage_that_the_command_does_not_run_is_refused(runs, targets, replace, line):
    assert refusal_of(make_plan, TINY, targets, replace) == line


def test_other_settings_are_replaced_and_nothing_is_lost(runs):
    run_stages(mine("ppo.lam=0.9"), *TARGETS)

    replaced = run_stages(mine("ppo.lam=0.5"), "ppo", replace="1")

    assert replaced == ["ppo"]
    record = runs / "mine/seed44413/aside/ppo-1/config.json"
    assert json.loads(record.read_text())["ppo"]["lam"] == 0.9


def test_replace_of_a_later_stage_does_not_replace_other_settings_of_an_earlier_one(runs):
    run_stages(mine("ppo.lam=0.5"), *TARGETS)
    with pytest.raises(UserError, match="stage sft has finished with other settings"):
        run_stages(mine("ppo.lam=0.5", "sft.epochs=3"), *TARGETS, replace="ppo")


def test_replace_leaves_the_stages_of_an_upstream_alone(runs):
    run_stages(TINY, *TARGETS)
    ablation = mine("ppo.lam=0.5", upstream="tiny")
    run_stages(ablation, *TARGETS)

    assert run_stages(ablation, *TARGETS, replace="1") == PPO_AND_LATER
    assert not (runs / "tiny/seed44413/aside").exists()


def test_replace_of_a_stage_of_the_upstream_is_refused(runs):
    run_stages(TINY, *TARGETS)
    ablation = mine("ppo.lam=0.5", upstream="tiny")
    line = refusal_of(make_plan, ablation, TARGETS, "sft")
    assert line == "REPLACE=sft: no target of this command runs it: leave out UPSTREAM="


def test_replace_of_an_ablations_own_reward_model_leaves_its_upstreams_stages(runs):
    run_stages(TINY, *TARGETS)
    ablation = mine("rm.epochs=3", upstream="tiny")
    run_stages(ablation, *TARGETS)

    replaced = run_stages(ablation, *TARGETS, replace="rm")

    assert replaced[:3] == ["rm", "normalize", "ppo"]


def test_an_interrupted_replace_resumes_without_it(runs):
    run_stages(TINY, *TARGETS)
    # REPLACE=sft, interrupted during PPO.
    move_all_aside(TINY, make_plan(TINY, TARGETS, replace="sft").replaced)
    finish(TINY, "sft")
    finish(TINY, "rm")
    finish(TINY, "normalize")
    interrupt(TINY, "ppo", update=3)

    assert make_plan(TINY, TARGETS).reasons["ppo"] == "resumes after update 3"
    assert run_stages(TINY, *TARGETS) == PPO_AND_LATER
    assert not partial_of(stage_folder(TINY, "ppo")).exists()


def test_a_replace_moves_nothing_while_another_process_runs_one_of_its_stages(runs):
    run_stages(TINY, *TARGETS)
    summaries = stage_folder(TINY, "summaries")

    with (
        held(lock_of(summaries), "summaries"),
        pytest.raises(UserError, match="stage summaries is already running"),
    ):
        move_all_aside(TINY, PPO_AND_LATER)

    assert not (runs / "tiny/seed44413/aside").exists()
    assert run_stages(TINY, *TARGETS) == []
