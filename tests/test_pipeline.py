"""What the pipeline makes, refuses and leaves alone: by content, and looking writes nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reports.parts.watch import end_lines, time_left
from stages import __main__ as door
from stages.config import config as settings
from stages.config.command_line import Request, config_of, make_config, request_of
from stages.config.config import Config, UserError
from stages.config.presets import PRESETS
from stages.config.stages import STAGES
from stages.pipeline import main as pipeline
from stages.pipeline.goals import GOALS, VARIABLES, help_lines
from stages.pipeline.maker import Cell, Maker
from stages.pipeline.wanted import wanted_stages
from stages.runs.files import write_json
from stages.runs.manifest import stage_folder, why_not
from stages.runs.run import open_stage

ROOT = Path(__file__).parents[1]
TINY = make_config("tiny")
EVALUATED = [name for name in STAGES if not STAGES[name].optional]


RESULTS: dict[str, dict[str, Any]] = {}  # of a stage; of others none


def finish(config: Config, stage: str, text: str = "made") -> Path:
    """A finished stage with the inputs of the table and one output file."""
    with open_stage(config, stage) as run:
        for name in (*STAGES[stage].inputs, *STAGES[stage].joined_by):
            if stage_folder(config, name).exists() or name in STAGES[stage].inputs:
                run.require(name)
        (run.partial / "out.txt").write_text(text)
        (run.partial / "headline.txt").write_text(f"{stage} of {config.name}\n")
        run.finish(RESULTS.get(stage, {}))
    return run.folder


class Recorder(Maker):
    """A maker whose stages are one file each, and that remembers what it was told to run."""

    def __init__(self, fails: str = "", text: str = "made", **execution: Any) -> None:
        super().__init__(**execution)
        self.commands: list[list[str]] = []
        self.made: list[tuple[str, str]] = []
        self.fails, self.text = fails, text

    def command(self, cell: Cell, stage: str) -> list[str]:
        self.commands.append(super().command(cell, stage))
        return [cell.config.name, str(cell.config.seed), stage, *cell.request.arguments]

    def call(self, words) -> int:
        name, _, stage, *arguments = words
        if stage == self.fails:
            return 3
        if stage in STAGES:
            config = config_of(request_of(pipeline.parse([stage, *arguments])))
            finish(config, stage, self.text)
        self.made.append((name, stage))
        return 0


def make(
    config: Config = TINY, *goals: str, maker: Recorder | None = None, **execution: Any
) -> list[str]:
    """Make the goals of a config (`eval` without any); the stages that ran."""
    maker = maker or Recorder(**execution)
    request = Request(
        preset=config.preset,
        seed=config.seed,
        name="" if config.name == config.preset else config.name,
        upstream=config.upstream,
        overrides=config.overrides,
    )
    assert maker.make(Cell(request=request, config=config, goals=goals or ("eval",))) == 0
    return [stage for _, stage in maker.made]


def named(*overrides: str, **changes: Any) -> Config:
    return make_config("tiny", name="mine", overrides=overrides, **changes)


def everything(folder: Path) -> dict[str, tuple[bytes, int]]:
    """All files below a folder with their bytes and times."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def typed(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """What `make` says in a folder, with this interpreter as it is."""
    command = ["make", "-f", str(ROOT / "Makefile"), "VENV=", f"PYTHON={sys.executable}", *words]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    environment |= more
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


# -- what is made ----------------------------------------------------------------------------------


def test_everything_that_is_missing_is_made_in_order_and_nothing_twice(runs):
    assert make() == EVALUATED
    assert make() == []
    assert make(TINY, "sft", "rm") == []


def test_a_goal_makes_what_it_needs_and_no_more(runs):
    assert make(TINY, "rm") == ["base", "sft", "rm", "normalize"]
    assert make(TINY, "ppo") == ["ppo"]
    assert wanted_stages(TINY, ["dpo"]) == ["base", "sft", "dpo"]
    with pytest.raises(UserError, match="unknown goal 'evall': did you mean eval"):
        wanted_stages(TINY, ["evall"])


def test_a_stage_made_again_with_equal_outputs_leaves_its_followers_alone(runs):
    make()
    finish(TINY, "sft")
    assert set(make()) <= {"report"}  # which shows when each stage was made
    finish(TINY, "sft", "other")
    assert make() == ["rm", "ppo", "summaries", "report"]


def test_dpo_joins_the_summaries_once_it_is_made(runs):
    make()
    assert make(TINY, "dpo", "eval") == ["dpo", "summaries", "report"]
    assert make(TINY, "eval") == []
    assert "dpo" in wanted_stages(TINY, ["eval"])


def test_two_judges_of_one_run_stand_side_by_side(runs):
    make()
    other = TINY.changed(judge=TINY.judge.changed(kind="reward_model"))
    found = ["judge", "controls", "win_rate", "report"]
    assert [one for one in EVALUATED if why_not(other, one)] == found
    for stage in found:
        finish(other, stage)
    assert make() == []
    assert sorted(path.name for path in (runs / "tiny/seed44413/judge").iterdir()) == [
        "facts",
        "reward_model",
    ]


def test_a_stage_that_fails_ends_it_and_its_status_is_passed_on(runs):
    maker = Recorder(fails="rm")
    assert maker.make(Cell(request=Request(), config=TINY, goals=("ppo",))) == 3
    assert [stage for _, stage in maker.made] == ["base", "sft"]


def test_other_data_in_the_users_folder_are_found(runs, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "sft_train.jsonl").write_text("1\n")
    config = make_config("tiny", name="mine", data=str(data))
    finish(config, "base")
    assert why_not(config, "base") is None
    os.utime(data / "sft_train.jsonl", (1, 1))
    assert why_not(config, "base") is None
    (data / "sft_train.jsonl").write_text("2\n")
    assert str(why_not(config, "base")) == "ran with other data"


def test_training_is_started_by_the_launcher_and_only_judges_get_the_cap(runs):
    maker = Recorder(launch=("accelerate", "launch", "--num_processes", "2"), max_cost="5")
    make(TINY, maker=maker)
    by_stage = dict(zip(EVALUATED, maker.commands, strict=True))
    for stage, words in by_stage.items():
        assert (Path(words[0]).name == "accelerate") == STAGES[stage].computes, stage
        assert ("--max-cost" in words) == (stage in ("judge", "controls")), stage
        assert f"{STAGES[stage].module}:{stage}" in words


def test_headings_say_how_long_the_rest_takes_where_a_run_tells_and_the_end_what_it_took(runs):
    other = make_config("tiny", seed=7)
    make(TINY, "rm")
    for stage, seconds in (("sft", 200), ("rm", 100.4)):
        path = stage_folder(TINY, stage) / "manifest.json"
        write_json(path, json.loads(path.read_text()) | {"seconds": seconds})
    (runs / "tiny/seed1/ppo").mkdir(parents=True)
    (runs / "tiny/seed1/ppo/manifest.json").write_text("[")  # damaged: it tells nothing
    assert time_left(other, ["sft", "rm"]) == "; about 5 min left in all"
    assert time_left(other, ["sft", "ppo"]) == time_left(named("sft.epochs=3"), ["sft"]) == ""
    make(other, "sft")
    posts = stage_folder(other, "base") / "data/sft_validation.jsonl"
    posts.parent.mkdir()
    posts.write_text('{"id": "a b"}\n')
    table = ["", "minutes", f"{'  sft':23}0.0", f"{'  in all':23}0.0"]
    last = ["", "next: make summarize NAME=tiny SEED=7 ID='a b'"]
    assert end_lines(Cell(request=Request(), config=other, goals=("sft",)), ["sft"]) == table + last


def test_the_command_that_goes_on_has_all_goals_and_variables_but_replace(monkeypatch):
    hooks: dict[str, Any] = {}
    monkeypatch.setattr(pipeline, "main", lambda _, **more: hooks.update(more))
    monkeypatch.setenv("MAKEFLAGS", "")
    door.main(["ppo", "judge", "NAME=x", "SET=ppo.lam=0.5 sft.epochs=2", "REPLACE=1"])
    assert hooks["goes_on_with"] == "make ppo judge NAME=x SET='ppo.lam=0.5 sft.epochs=2'"


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "processes", "complaint"),
    [
        (["ppo.batch_size=100"], 8, "ppo.batch_size is 100: it must be divisible by 8 (processes)"),
        (["rm.batch_size=4"], 8, "rm.batch_size is 4: it must be divisible by 8 (processes)"),
        (["judge.kind=reward_model", "judge.model=gold"], 1, "there is no reward model in"),
        (["data.source=hub"], 1, "judge.kind=facts knows only the built-in world"),
    ],
)
def test_what_the_last_stages_would_refuse_is_refused_before_the_first(
    runs, overrides, processes, complaint
):
    with pytest.raises(UserError, match=re.escape(complaint)):
        make(named(*overrides), processes=processes)
    assert not runs.exists()
    make(named(*overrides), "sft", processes=processes)


def test_an_upstream_without_a_stage_is_refused_with_its_command(runs):
    finish(TINY, "base")
    with pytest.raises(UserError, match="`make sft PRESET=tiny SEED=44413`"):
        make(named("ppo.lam=0.5", upstream="tiny"), "ppo")


# -- looking ---------------------------------------------------------------------------------------


def test_looking_writes_nothing_whatever_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "RUNS", tmp_path / "runs")
    make(named("sft.epochs=3"))
    before = everything(tmp_path)
    mine = ("NAME=mine", "SET=sft.epochs=3")
    refused = typed(tmp_path, "-n", "ppo", "eval", "NAME=mine", "SET=sft.epochs=3 ppo.lam=0.5")
    assert refused.returncode == 2
    assert "ppo.lam: ran with 0.95, now 0.5" in refused.stderr
    alone = typed(tmp_path, "sft", "rm", "ppo", "eval", "NAME=mine")  # as it was made
    assert "nothing to do, 10 stages are done" in alone.stdout, alone.stderr
    planned = typed(tmp_path, "-n", "dpo", "eval", *mine).stdout.splitlines()
    later = "comes out differently than before)"
    assert planned.pop(0) == "Looking: nothing is made."
    assert [line.removeprefix("mine seed 44413: ") for line in planned] == [
        "would make dpo (not run yet)",
        f"would make summaries (if dpo {later}",
        f"would make judge (if summaries {later}",
        f"would make controls (if summaries {later}",
        f"would make win_rate (if judge {later}",
        f"would make report (if win_rate {later}",
    ]
    assert "mine, seed 44413" in typed(tmp_path, "status").stdout
    again = typed(tmp_path, "sft", "rm", "ppo", "eval", *mine)
    assert "nothing to do, 10 stages are done" in again.stdout, again.stderr
    assert everything(tmp_path) == before


def test_help_names_every_goal_variable_and_preset_in_80_columns():
    text = "\n".join(help_lines())
    assert all(len(line) <= 80 for line in help_lines())
    for goal in {*GOALS, *(stage.goal for stage in STAGES.values())}:
        assert f"\n  {goal} " in text, goal
    for name in PRESETS:
        assert name in text.split("presets (")[1].split()
    for variable in VARIABLES:
        assert f"\n  {variable} " in text, variable
    assert typed(ROOT, "help").stdout == text + "\n"
    assert typed(ROOT).stdout == text + "\n"


@pytest.mark.parametrize(("running", "expected"), [(1, None), (1 + 4, "PASSIVE")])
def test_threads_sleep_while_they_wait_where_others_use_the_cores(
    tmp_path, monkeypatch, running, expected
):
    load = tmp_path / "loadavg"
    load.write_text(f"0.5 0.5 0.5 {running}/300 4711\n")
    monkeypatch.setattr(door, "LOAD", load)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that it is put back
    monkeypatch.delenv("OMP_WAIT_POLICY")
    door.spare_the_cores()
    assert os.environ.get("OMP_WAIT_POLICY") == expected
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")  # what is set already stays
    door.spare_the_cores()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
