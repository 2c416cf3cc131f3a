"""The runner runs, refuses or leaves alone each stage by the content of inputs and settings."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.stages import STAGES
from stages.pipeline import launch
from stages.pipeline.end import end_lines
from stages.pipeline.launch import StageFailedError
from stages.pipeline.plan import check_can_run, check_rows, wanted_stages
from stages.runs.files import write_json
from stages.runs.manifest import stage_folder
from stages.runs.staleness import find_problem
from tests.lib.pipeline import (
    EVALUATED,
    FAILED,
    RESULTS,
    TINY,
    Recorder,
    finish,
    make,
    named,
    planned,
)

# -- what runs -------------------------------------------------------------------------------------


def test_everything_that_is_missing_runs_in_order_and_nothing_twice(runs):
    assert make() == EVALUATED
    assert make() == []
    assert make(TINY, "sft", "rm") == []


def test_a_target_runs_what_it_needs_and_no_more(runs):
    assert make(TINY, "rm") == ["base", "sft", "rm", "normalize"]
    assert make(TINY, "ppo") == ["ppo"]
    assert wanted_stages(TINY, ["dpo"]) == ["base", "sft", "dpo"]


def test_a_stage_that_reran_with_equal_outputs_leaves_its_followers_alone(runs):
    make()
    finish(TINY, "sft")
    assert set(make()) <= {"report"}  # which shows when each stage ran


def test_a_stage_that_reran_with_other_outputs_makes_its_followers_stale(runs):
    make()
    finish(TINY, "sft", "other")
    assert make() == ["rm", "ppo", "summaries", "report"]


def test_a_command_runs_exactly_the_steps_of_its_plan(runs):
    recorder = Recorder()
    plan = recorder.plan(planned())
    recorder.run(planned())
    assert recorder.stages == list(plan.reasons) == EVALUATED


def test_a_step_is_looked_at_again_only_if_one_of_its_inputs_was_rerun(runs):
    """The deleted stage comes out as before, so what follows from it is right again."""
    make(TINY, "ppo")
    shutil.rmtree(stage_folder(TINY, "sft"))
    assert Recorder().plan(planned(TINY, "ppo")).reasons == {
        "sft": "not run yet",
        "rm": "ran with sft, which is missing now",
        "normalize": "if the result of rm changes",
        "ppo": "ran with sft, which is missing now",
    }
    assert make(TINY, "ppo") == ["sft"]


def test_dpo_joins_the_summaries_once_it_has_been_trained(runs):
    make()
    assert make(TINY, "dpo", "eval") == ["dpo", "summaries", "report"]
    assert make(TINY, "eval") == []


def test_two_judges_of_one_run_have_folders_next_to_each_other(runs):
    make()
    other = TINY.changed(judge=TINY.judge.changed(kind="reward_model"))
    missing = [stage for stage in EVALUATED if find_problem(other, stage)]
    assert missing == ["judge", "controls", "win_rate", "report"]
    for stage in missing:
        finish(other, stage)
    assert make() == []
    judges = {path.name for path in (runs / "tiny/seed44413/judge").iterdir()}
    assert judges == {"facts", "reward_model"}


def test_a_stage_that_fails_ends_the_run_with_its_status(runs):
    recorder = Recorder(fails="rm")
    with pytest.raises(StageFailedError) as failure:
        recorder.run(planned(TINY, "ppo"))
    assert failure.value.status == FAILED
    assert recorder.stages == ["base", "sft"]


def test_other_data_in_the_users_folder_are_noticed(runs, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "sft_train.jsonl").write_text("1\n")
    config = make_config("tiny", name="mine", data=str(data))
    finish(config, "base")
    os.utime(data / "sft_train.jsonl", (1, 1))
    assert find_problem(config, "base") is None
    (data / "sft_train.jsonl").write_text("2\n")
    assert str(find_problem(config, "base")) == "ran with other data"


def test_only_stages_that_run_a_model_are_launched(runs, monkeypatch):
    launched_stages = []
    commands = []

    def run_launcher(words):
        stage = words[words.index("--stage") + 1]
        launched_stages.append(stage)
        commands.append(words)
        finish(TINY, stage)
        return 0

    monkeypatch.setattr(launch, "run_launcher", run_launcher)
    recorder = Recorder(launcher=["srun", "accelerate"], resume_command="make eval GPUS=2")
    recorder.run(planned())

    assert launched_stages == [stage for stage in EVALUATED if STAGES[stage].computes]
    assert recorder.stages == [stage for stage in EVALUATED if not STAGES[stage].computes]
    assert commands[0][:5] == ["srun", "accelerate", "-m", "stages", "--stage"]
    assert "--resume-command=make eval GPUS=2" in commands[0]


def test_only_the_command_limits_what_a_judge_may_cost(runs):
    costs = {}

    def note(config, stage):
        costs[stage] = config.judge.max_cost

    make(TINY, max_cost=5.0, on_finished=note)
    assert costs["judge"] == 5
    assert costs["base"] == costs["summaries"] == 0  # records that later commands read
    assert make(TINY) == []  # another limit is the same judge


def test_a_launched_stage_that_fails_ends_the_run_with_its_status(runs, monkeypatch):
    monkeypatch.setattr(launch, "run_launcher", lambda words: 9)
    with pytest.raises(StageFailedError) as failure:
        Recorder(launcher=["accelerate"]).run(planned())
    assert failure.value.status == 9


def test_a_launched_stage_that_was_killed_is_named(runs, monkeypatch):
    monkeypatch.setattr(launch, "run_launcher", lambda words: 137)
    with pytest.raises(UserError, match="stage sft was killed"):
        Recorder(launcher=["accelerate"]).run(planned())


def test_a_launched_stage_that_a_signal_ended_says_how_to_resume_it(runs, monkeypatch, capsys):
    """A cluster may stop only the launched processes; srun ends alike if one of its tasks fails."""
    monkeypatch.setattr(launch, "run_launcher", lambda words: 143)
    with pytest.raises(StageFailedError) as failure:
        Recorder(launcher=["srun"], resume_command="make sft LAUNCH=srun").run(planned())
    assert failure.value.status == 143
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("stage sft was ended by SIGTERM: if one of its processes failed, its")
    assert line.endswith("otherwise `make sft LAUNCH=srun` resumes it")


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "processes", "complaint"),
    [
        (["ppo.batch_size=100"], 8, "ppo.batch_size is 100: it must be divisible by 8"),
        (["rm.batch_size=4"], 8, "rm.batch_size is 4: it must be divisible by 8"),
        (["judge.kind=reward_model", "judge.model=gold"], 1, "there is no reward model in"),
        (["data.source=hub"], 1, "judge.kind=facts knows only the built-in posts"),
    ],
    ids=["ppo batches", "rm batches", "no gold model", "judge of other posts"],
)
def test_what_the_last_stages_would_refuse_is_refused_before_the_first(
    runs, overrides, processes, complaint
):
    with pytest.raises(UserError, match=re.escape(complaint)):
        make(named(*overrides), processes=processes)
    assert not runs.exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ("released.reward_model=theirs",),
        ("reward.function=mine:score", "ppo.critic_init=sft"),
    ],
    ids=["reward model", "reward function"],
)
def test_a_reward_from_elsewhere_needs_no_batches_of_comparisons(
    runs, place, monkeypatch, overrides
):
    """Of 40 comparisons, and in 3 processes, no batch of 64 could be trained on."""
    (place / "mine.py").write_text("def score(posts, summaries): ...\n")
    config = named(*overrides, "rm.batch_size=64")
    monkeypatch.setitem(RESULTS, "base", {"rows": {"comparisons_train": {"rows": 40}}})
    finish(config, "base")

    check_can_run(config, ["rm"], processes=3)
    check_rows(config, ["rm"])


def test_an_upstream_without_a_stage_is_refused_with_its_command(runs):
    finish(TINY, "base")
    with pytest.raises(UserError, match="`make sft PRESET=tiny SEED=44413`"):
        make(named("ppo.lam=0.5", upstream="tiny"), "ppo")


def test_an_unknown_target_is_refused_with_the_nearest(runs):
    with pytest.raises(UserError, match="'evall': did you mean eval"):
        wanted_stages(TINY, ["evall"])


# -- the end of a command, and status --------------------------------------------------------------


def test_the_end_tells_the_result_the_time_and_the_next_command(runs):
    make(TINY, "eval")
    posts = stage_folder(TINY, "base") / "data/sft_validation.jsonl"
    posts.parent.mkdir()
    posts.write_text('{"id": "a b"}\n')
    path = stage_folder(TINY, "ppo") / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["seconds"] = 130
    write_json(path, manifest)

    assert end_lines(TINY, ["eval"], ["ppo"]) == [
        "",
        "report of tiny",
        "",
        "time: 2:10 for 1 stage",
        "",
        "next: make summarize NAME=tiny SEED=44413 ID='a b'",
    ]


def test_a_log_has_a_heading_for_each_stage(runs, capsys):
    make(TINY, "sft")
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("[1/2] base: posts, tokenizer and the model to start from (")
    assert out[3].startswith("[2/2] sft: supervised fine-tuning on the reference summaries (")


def test_each_stage_is_reported_when_it_has_finished(runs):
    finished: list[tuple[str, str]] = []

    def note(config, stage):
        assert Path(stage_folder(config, stage) / "manifest.json").exists()
        finished.append((config.name, stage))

    make(TINY, "sft", on_finished=note)
    assert finished == [("tiny", "base"), ("tiny", "sft")]
