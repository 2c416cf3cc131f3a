"""One post, summarised by a finished run: as in its evaluation, and whatever is typed."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eval import summarize
from eval.summarize import Finished, facts_lines, finished_policies, typed_fields, typed_posts
from stages.posts.toy import facts_of, make_post
from stages.released import take_released
from stages.running.files import read_lines
from stages.settings import config as settings
from stages.settings.command_line import make_config
from stages.settings.prompt import format_post
from tests.resuming import SETTINGS
from tests.test_pipeline import finish

ROOT = Path(__file__).parents[1]
# Whatever a shell or make would read in it: none of it may be lost or run.
NASTY = 'It\'s "mine": `touch pwned` $(touch pwned) $(shell touch pwned) $HOME $5 \\ #'


@pytest.fixture
def finished(whole, monkeypatch):
    """The small run that nothing interrupted, as this command opens it."""
    monkeypatch.setattr(settings, "RUNS", whole.parents[1])
    return Finished(finished_policies("tiny", "resumed", 44413))


def answered(capsys, *words: str) -> str:
    """What the command prints of the small run."""
    summarize.main(["--name", "resumed", *words])
    return capsys.readouterr().out


def refused(capsys, *words: str) -> str:
    """The one line with which the command ends."""
    with pytest.raises(SystemExit) as stop:
        summarize.main([*words])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


# -- what is written -------------------------------------------------------------------------------


def test_a_held_out_post_gets_the_summaries_and_scores_of_the_evaluation(finished, whole):
    run = finished
    assert list(run.configs) == ["sft", "ppo", "dpo"]
    by_stage = {stage: read_lines(whole / f"summaries/{stage}.jsonl") for stage in run.configs}
    for at in (0, 7):
        rows = {stage: by_stage[stage][at] for stage in by_stage}
        post = run.post_of_id(rows["ppo"]["id"])
        assert post.query == rows["ppo"]["query"]
        written = [run.summary(stage, post, run.config.eval.temperature) for stage in rows]
        assert [text.text for text in written] == [row["summary"] for row in rows.values()]
        assert [len(text.tokens) for text in written] == [row["tokens"] for row in rows.values()]
        scores = run.scores(post, written)
        assert scores == pytest.approx([row["score"] for row in rows.values()], abs=1e-5)


def test_a_typed_post_of_the_run_is_known_again_and_its_facts_are_counted(finished, capsys):
    row = make_post("toy1-validation-3")
    text = format_post(row)
    lines = finished.lines(finished.post_of_text(f"  {text}\n"), 0.01)
    assert max(map(len, lines)) <= 80
    assert "(toy1-validation-3: a held-out post of this run)" in lines
    assert [line.split(":")[0] for line in lines if ": score" in line] == [
        "reference",
        "SFT",
        "PPO",
        "DPO",
    ]
    assert sum("by the rule" in line for line in lines) == 4
    assert "    4 of 6 by the rule; right: who sister" in "\n".join(lines)
    assert answered(capsys, "--id", "toy1-validation-3").splitlines() == lines


def test_facts_are_right_wrong_wanted_or_not():
    post_id = "toy1-validation-3"
    facts = facts_of(post_id)
    told = facts.told
    assert facts.subreddit == "tifu"
    text = f"My {told['who']} {told['deed']} my piano, feel {told['feeling']}, on {told['when']}."
    said = " ".join(" ".join(facts_lines(post_id, text)).split())
    assert said == (
        "1.5 of 6 by the rule; right: who sister, deed painted, when wednesday; right but not"
        " wanted: feeling happy; wrong: thing piano, not couch; wanted and left out: place college,"
        " witness maria"
    )


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("My boss sold my bike.", ("", "", "My boss sold my bike.")),
        ("My bike\n\nMy boss sold it.\nSad.", ("", "My bike", "My boss sold it.\nSad.")),
        ("TITLE: My bike", ("", "My bike", "")),
        ("TITLE: My bike\nPOST: Sold.", ("", "My bike", "Sold.")),
        ("r/tifu My boss sold it.", ("tifu", "", "My boss sold it.")),
        ("SUBREDDIT: r/tifu\n\nPOST: a\nb\n\nTL;DR:", ("tifu", "", "a\nb")),
        ("\n", ("", "", "")),
    ],
)
def test_a_post_is_read_however_much_of_it_is_given(text, fields):
    assert tuple(typed_fields(text).values()) == fields


def test_a_title_alone_and_a_post_that_is_too_long_are_summarised(finished, capsys):
    run = finished
    post = run.post_of_text("TITLE: My bike")
    assert post.query == f"SUBREDDIT: r/{run.usual_subreddit}\n\nTITLE: My bike\n\nPOST: \n\nTL;DR:"
    assert run.known_post("query", post.query) is None
    said = answered(capsys, "--post", "My boss sold it.\n" * 60 + "\x1b[31mred", "--temperature=1")
    assert max(map(len, said.splitlines())) <= 80
    assert f"(no subreddit given: r/{run.usual_subreddit}, the most frequent here)" in said
    assert "(cut to 160 tokens, as in training)" in said
    assert "temperature 1\n" in said
    assert "by the rule" not in said
    assert "\x1b" not in answered(capsys, "--post", "\x1b[31mred")


def test_posts_come_one_after_another(whole, monkeypatch, capsys):
    monkeypatch.setattr(settings, "RUNS", whole.parents[1])
    text = f"One.\n\nMore.\n\n\n{format_post(make_post('toy1-train-1'))}\n\nTITLE: {'x ' * 300}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    summarize.main(["--name", "resumed", "--interactive"])
    printed = capsys.readouterr()
    assert printed.out.count("PPO: score") == 2
    assert "(toy1-train-1: a training post of this run)" in printed.out
    (error,) = printed.err.splitlines()
    assert "the limit is 160 (data.max_query_tokens): shorten the title" in error
    assert list(typed_posts(["a", "", "b", "", "", "", "c TL;DR:", "d"])) == [
        "a\n\nb",
        "c TL;DR:",
        "d",
    ]


def test_a_released_policy_is_asked_without_sft_or_scores(whole, tmp_path, monkeypatch, capsys):
    from stages import base

    monkeypatch.setattr(settings, "RUNS", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    policy = f"released.policy={whole / 'sft/model'}"
    world = [setting for setting in SETTINGS if setting.startswith(("world.", "memory."))]
    base.main(["--preset", "tiny", "--name", "other", "--set", policy, *world])
    take_released(make_config("tiny", name="other", overrides=(policy, *world)))
    capsys.readouterr()
    summarize.main(["--name", "other", "--post", "My boss sold my bike."])
    said = capsys.readouterr().out
    assert "temperature 0.01; no reward model, so no scores" in said
    assert "RELEASED: 2" in said


# -- which run -------------------------------------------------------------------------------------


def test_policies_of_an_upstream_are_found_there(runs):
    config = make_config("tiny")
    for stage in ("base", "sft", "rm", "normalize"):
        finish(config, stage)
    assert list(finished_policies("tiny", "tiny", 44413)) == ["sft"]
    finish(make_config("tiny", name="own", overrides=("ppo.lam=0.5",), upstream="tiny"), "ppo")
    assert list(finished_policies("tiny", "own", 44413)) == ["sft", "ppo"]


def test_what_is_missing_is_one_line_with_its_mend(runs, capsys, monkeypatch):
    line = refused(capsys, "--post", "x")
    assert "run `make sft rm ppo PRESET=tiny SEED=44413` first" in line
    finish(make_config("tiny"), "base")
    assert "SEED=44413 NAME=" not in refused(capsys, "--post", "x")
    assert "unknown run 'tinny': did you mean tiny" in refused(capsys, "--name=tinny", "--post=x")
    finish(make_config("tiny"), "sft")
    assert "TEMPERATURE=0: give a number above 0" in refused(capsys, "--temperature", "0")
    assert "FILE=gone: No such file" in refused(capsys, "--file", "gone")
    assert "POST and FILE are given together" in refused(capsys, "--file=gone", "--post=x")
    assert "ID and INTERACTIVE are given" in refused(capsys, "--id=a", "--interactive")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "no post: add POST='...', FILE=, ID=" in refused(capsys)


def test_an_id_that_the_run_has_not_is_refused_and_says_how_ids_look(finished, capsys):
    line = refused(capsys, "--name", "resumed", "--id", "toy1-validation-999")
    assert "is no post of run resumed: ids are such as toy1-validation-0" in line


@pytest.mark.walk
def test_make_passes_a_post_on_as_it_was_typed(whole, tmp_path):
    (tmp_path / "runs").symlink_to(whole.parents[1])
    command = ["make", "-f", str(ROOT / "Makefile"), "VENV=", f"PYTHON={sys.executable}"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}

    def typed(*words: str, text: str = "") -> str:
        ended = subprocess.run(
            [*command, "summarize", "NAME=resumed", *words],
            cwd=tmp_path,
            input=text,
            capture_output=True,
            text=True,
            env=environment,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    printed = typed(f"POST={NASTY}\nsecond line", "TEMPERATURE=0.5")
    assert f"TITLE: {NASTY}" in " ".join(printed.split("\n\nPOST")[0].split("\n"))
    assert "POST: second line" in printed
    assert "temperature 0.5" in printed
    assert "PPO: score" in typed(text=NASTY)
    (tmp_path / "a post.txt").write_text(json.dumps("r/tifu My bike."))
    assert '"r/tifu My bike."' in typed("FILE=a post.txt")
    assert not (tmp_path / "pwned").exists()
