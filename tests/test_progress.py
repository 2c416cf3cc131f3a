"""What a terminal and a log show while a stage learns, and when it ends."""

import io
import re
import sys
import time
from pathlib import Path

import pytest

from stages.config.command_line import make_config
from stages.runs import progress as progress_module
from stages.runs.progress import SHOWN, progress, say_result, with_numbers
from stages.runs.run import open_stage

ROOT = Path(__file__).parents[1]
PPO = {
    "objective/kl": 3.14,
    "objective/scores": 1.53,
    "policy/eos_rate": 1.0,
    "policy/response_length": 16.02,
    "val/explained_variance": 0.714,
    "lr": 3e-6,
}
LINE = "score 1.53, KL 3.1, length 16.0, end 100%, EV 0.71"


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(progress_module, "SECONDS_BEFORE_BAR", 0.0)
    monkeypatch.delenv("COLUMNS", raising=False)


def test_a_log_shows_the_last_value_of_each_metric_that_one_watches(runs, capsys, often):
    with open_stage(make_config("tiny"), "sft") as run:
        run.log(0, **{"loss/validation": 6.1})
        for step in run.progress([1, 2, 3], "sft", 3):
            run.log(step, **{"loss/train": 2.0 / step, "lr": 1.0})
        list(run.progress([1, 2], "sft validation", 2))
        run.finish({"loss/validation": 1.25, "rougeL": 0.4321, "rouge1": 0.5})
    lines = re.sub(r"\d+ s", "0 s", capsys.readouterr().err).splitlines()
    assert lines == [
        "sft: 1/3, 0 s left: loss 2.000, held-out loss 6.100",
        "sft: 2/3, 0 s left: loss 1.000, held-out loss 6.100",
        "sft validation: 1/2, 0 s left",
        "sft: done in 0 s: held-out loss 1.250, ROUGE-L 0.432",
    ]


def test_the_time_left_is_estimated_from_the_work_of_this_process(monkeypatch, capsys, often):
    """Of 100 updates, 90 were done before a resume. Each takes 2 seconds, so after the first one of
    this process the other 9 will take 18.
    """
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_NOTES", 0.0)
    notes: list[tuple[int, float]] = []

    def note(done: int, seconds_left: float) -> None:
        notes.append((done, seconds_left))

    for _ in progress(range(90, 100), "ppo", total=100, done=90, note=note):
        now[0] += 2.0
    assert notes[:2] == [(91, 18.0), (92, 16.0)]
    assert notes[-1] == (100, 0.0)
    assert capsys.readouterr().err.startswith("ppo: 91/100, 18 s left\n")


def test_numbers_fall_off_on_the_right_where_a_line_is_full(capsys, often):
    label = "ppo of a run with a long name: 50 characters of it"
    list(progress([1, 2], label, 2, 0, None, lambda: PPO))
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{label}: 1/2, 0 s left: {LINE}".startswith(line)
    assert len(line) <= 80
    assert "EV" not in line


def test_a_line_says_so_while_the_critic_learns_alone():
    alone = PPO | {"loss/value_avg": 0.2}
    assert with_numbers("ppo", alone, 80).startswith("ppo: the critic learns alone, score 1.53, KL")
    assert "critic" not in with_numbers("ppo", alone | {"loss/policy_avg": 0.1}, 80)


def test_a_bar_has_the_numbers_too_and_fits(monkeypatch, often):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    list(progress(range(3), "ppo", 3, 0, None, lambda: PPO))
    drawn = terminal.getvalue().replace("\n", "").split("\r")
    assert max(map(len, drawn)) <= 80
    assert "score 1.53, KL 3.1, length 16.0, end 100%" in drawn[-1]
    assert "ppo: 3/3 |" in drawn[-1]


@pytest.mark.parametrize(
    ("stage", "results", "line"),
    [
        ("ppo", PPO, "ppo: done in 95 s: score 1.53, KL 3.1, length 16.0, end 100%, EV 0.71"),
        ("judge", {"judgements": 3, "judge": {}}, ""),
        ("sft", {"rougeL": None, "loss/validation": float("nan")}, "sft: done in 95 s: held-out"),
    ],
)
def test_a_stage_ends_with_its_result(capsys, often, stage, results, line):
    say_result(stage, 95.2, results)
    printed = capsys.readouterr().err.rstrip("\n")
    assert printed.startswith(line)
    assert bool(printed) == bool(line)
    assert len(printed) <= 80


def test_what_is_shown_of_a_stage_is_what_it_logs_and_ends_with(whole):
    from stages.runs.files import read_lines
    from stages.runs.manifest import read_manifest

    watched = {
        "sft": ["loss/train", "loss/validation"],
        "rm": ["loss/train", "accuracy/train"],
        "dpo": ["loss/train", "rewards/accuracies"],
        "ppo": [name for name in SHOWN if name in PPO],
    }
    for stage, names in watched.items():
        latest = {
            k: v for row in read_lines(whole / stage / "metrics.jsonl") for k, v in row.items()
        }
        assert [name for name in SHOWN if name in latest] == names
        results = (read_manifest(whole / stage) or {})["results"]
        assert len(SHOWN.keys() & results.keys()) > 1, stage
