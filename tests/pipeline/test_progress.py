"""The progress that a terminal and a log show while a stage runs, and the line at its end."""

import io
import re
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest

from stages.config.command_line import make_config
from stages.pipeline.terminal import Terminal
from stages.runs import progress as progress_module
from stages.runs.progress import SHOWN, numbers_text, progress, say_result
from stages.runs.run import open_stage
from stages.runs.text import duration

PPO = {
    "objective/kl": 3.14,
    "objective/scores": 1.53,
    "policy/eos_rate": 1.0,
    "policy/response_length": 16.02,
    "val/explained_variance": 0.714,
    "lr": 3e-6,
}
LINE = "score 1.53, KL 3.1, length 16.0, EOS 100%, explained variance 0.71"


@pytest.fixture
def often(monkeypatch):
    """Progress is shown at every step, in 80 columns."""
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(progress_module, "SECONDS_BEFORE_DRAWING", -1.0)
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_DRAWINGS", 0.0)
    monkeypatch.delenv("COLUMNS", raising=False)


def test_a_log_shows_the_last_value_of_the_main_metrics(runs, capsys, often):
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


def test_a_log_has_the_metrics_of_each_line(capsys, often):
    list(progress([1, 2], "ppo", 2, numbers=lambda: PPO))
    assert capsys.readouterr().err == f"ppo: 1/2, 0 s left: {LINE}\n"


def test_a_log_has_at_most_a_line_every_15_seconds(monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for _ in progress(range(100), "ppo", total=100):
        now[0] += 1.0
    assert len(capsys.readouterr().err.splitlines()) == 6  # after 15, 30, ... 90 seconds


def test_a_line_says_so_while_the_critic_warms_up():
    warm_up = PPO | {"loss/value_avg": 0.2}
    assert numbers_text(warm_up).startswith("critic warm-up, score 1.53, KL")
    assert "critic" not in numbers_text(warm_up | {"loss/policy_avg": 0.1})


class TerminalStream(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@contextmanager
def on_terminal():
    """Output and errors go to a terminal, whose stream is returned."""
    with TerminalStream() as stream, redirect_stdout(stream), redirect_stderr(stream):
        yield stream


def lines_of(stream) -> list[str]:
    """Return what a terminal shows, without what steers it."""
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", stream.getvalue())
    return [line.strip() for line in re.split(r"[\r\n]", text)]


def test_a_terminal_has_a_bar_with_the_time_left_and_the_metrics_below(often):
    with on_terminal() as terminal:
        list(progress(range(3), "ppo", 3, numbers=lambda: PPO))
        lines = lines_of(terminal)

    assert max(len(line) for line in lines) <= 80
    assert LINE in lines
    (bar,) = [line for line in lines if line.startswith("ppo  2/3")]
    assert bar.endswith("0:00 left")


def test_an_inner_loop_draws_no_second_bar(often):
    with on_terminal() as terminal:
        for step in progress(range(2), "outer", 2):
            if step == 1:
                list(progress(range(2), "inner", 2))
        lines = lines_of(terminal)
    assert any(line.startswith("outer  2/2") for line in lines)
    assert not any(line.startswith("inner") for line in lines)


def test_a_terminal_has_a_table_of_stages_with_their_results(runs):
    config = make_config("tiny")
    with on_terminal() as terminal:
        table = Terminal()
        with open_stage(config, "sft") as run:
            run.finish({"loss/validation": 1.25, "rougeL": 0.4321})
        table.start("tiny seed 44413", ["sft", "rm"])
        table.finish(config, "sft")
        table.skip(config, "rm")
        lines = lines_of(terminal)

    assert max(len(line) for line in lines) <= 80
    texts = [" ".join(line.split()) for line in lines]
    assert "stage what time result" in texts
    assert "sft supervised fine-tuning on 0:00 held-out loss 1.250," in texts
    assert "the reference summaries ROUGE-L 0.432" in texts
    assert any(text.startswith("rm the reward model") for text in texts)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (130.4, "2:10"), (11100, "3h05")])
def test_a_duration_is_short(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("stage", "results", "line"),
    [
        ("ppo", PPO, f"ppo: done in 95 s: {LINE}"),
        ("judge", {"judgements": 3, "unjudged": 0.0}, "judge: done in 95 s: 3 verdicts, 0.0% un"),
        ("sft", {"rougeL": None, "loss/validation": float("nan")}, "sft: done in 95 s: held-out"),
    ],
    ids=["ppo", "judge", "sft without a loss"],
)
def test_a_stage_ends_with_its_result(capsys, often, stage, results, line):
    say_result(stage, 95.2, results)
    printed = capsys.readouterr().err.rstrip("\n")
    assert printed.startswith(line)


@pytest.mark.parametrize(
    ("stage", "shown"),
    [
        ("sft", ["loss/train", "loss/validation"]),
        ("rm", ["loss/train", "accuracy/train"]),
        ("dpo", ["loss/train", "rewards/accuracies"]),
        ("ppo", [name for name in SHOWN if name in PPO]),
    ],
    ids=["sft", "rm", "dpo", "ppo"],
)
def test_a_stage_logs_the_metrics_that_are_shown(whole, stage, shown):
    from stages.runs.files import read_lines

    logged: set[str] = set()
    for row in read_lines(whole / stage / "metrics.jsonl"):
        logged.update(row)
    assert [name for name in SHOWN if name in logged] == shown


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "ppo"])
def test_a_stage_records_several_results_that_are_shown(whole, stage):
    from stages.runs.manifest import read_manifest

    manifest = read_manifest(whole / stage)
    assert manifest is not None
    assert len(SHOWN.keys() & manifest["results"].keys()) > 1
