"""One post, summarised by a finished run: as in its evaluation, and whatever is typed."""

import pytest

from eval import summarize
from eval.summarize import Finished, finished_policies
from stages.config import config as settings
from stages.config.command_line import make_config
from stages.config.sections import format_post
from stages.data.builtin import make_post
from stages.released import take_released
from stages.runs.files import read_lines
from tests.lib.asserts import refused_by
from tests.lib.make_stages import run_module
from tests.lib.pipeline import finish
from tests.lib.resuming import SETTINGS


@pytest.fixture
def finished(whole, monkeypatch):
    """The small run that nothing interrupted, as this command opens it."""
    monkeypatch.setattr(settings, "RUNS", whole.parents[1])
    return Finished(finished_policies("tiny", "resumed", 44413))


def answered(capsys, *words: str) -> list[str]:
    """What the command prints of the small run."""
    summarize.main(["--name", "resumed", *words])
    return capsys.readouterr().out.splitlines()


def refused(capsys, *words: str) -> str:
    """The one line with which the command ends."""
    line = refused_by(capsys, summarize.main, *words)
    assert line.startswith("error: ")
    return line


def test_a_held_out_post_gets_the_summaries_and_scores_of_the_evaluation(finished, whole, capsys):
    """The first, for which an evaluation draws the same random numbers."""
    rows = {stage: read_lines(whole / f"summaries/{stage}.jsonl")[0] for stage in finished.policies}
    assert list(rows) == ["sft", "ppo", "dpo", "ppo-3"]
    post = finished.post_of_id(rows["ppo"]["id"])
    assert post.query == rows["ppo"]["query"]
    written = [finished.summary(stage, post, finished.config.eval.temperature) for stage in rows]
    texts = [finished.text(tokens) for tokens in written]
    assert texts == [row["summary"] for row in rows.values()]
    assert [len(tokens) for tokens in written] == [row["tokens"] for row in rows.values()]
    scores = finished.scores(post, written)
    assert scores == pytest.approx([row["score"] for row in rows.values()], abs=1e-5)
    lines = answered(capsys, "--id", "toy1-validation-3")
    assert max(map(len, lines)) <= 80
    heads = [line for line in lines if ", score " in line]
    assert [line.split(":")[0] for line in heads] == ["reference", *rows]


def test_a_typed_post_is_read_as_a_prompt_or_as_title_and_text_and_cut(finished, capsys):
    row = make_post("toy1-validation-3")
    assert finished.post_of_text(f"  {format_post(row)}\n").query == format_post(row)
    first = finished.held_out.rows[0]["query"].split("\n")[0]
    start = f"{first}\n\nTITLE: "
    for text, expected in (
        ("My boss sold it.", "\n\nPOST: My boss sold it.\n\nTL;DR:"),
        ("My bike\n\nSold.\nSad.", "My bike\n\nPOST: Sold.\nSad.\n\nTL;DR:"),
    ):
        assert finished.post_of_text(text).query == start + expected
    lines = answered(capsys, "--post", "My boss sold it.\n" * 60 + "\x1b[31mred")
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in "".join(answered(capsys, "--post", "\x1b[31mred"))


def test_where_rows_hold_whole_prompts_a_typed_one_is_whole_and_keeps_its_end(finished):
    finished.held_out.rows[0]["query"] = "What is new?"
    for text, length in (("And you?", 7), ("one " * 300 + "TL;DR:", 160)):
        post = finished.post_of_text(text)
        assert post.query == text
        assert len(post.tokens) == length
        assert text.endswith(finished.text(post.tokens))


def test_a_released_policy_is_asked_without_sft_or_scores(whole, place, monkeypatch, capsys):
    from stages import base

    monkeypatch.setattr(settings, "RUNS", place / "runs")
    policy = f"released.policy={whole / 'sft/model'}"
    world = [setting for setting in SETTINGS if setting.startswith(("world.", "memory."))]
    run_module(base, ["--preset", "tiny", "--name", "other", "--set", policy, *world])
    take_released(make_config("tiny", name="other", overrides=(policy, *world)))
    capsys.readouterr()
    summarize.main(["--name", "other", "--post", "My boss sold my bike."])
    assert "released: 2" in capsys.readouterr().out  # tokens; no score stands before them


def test_policies_of_an_upstream_are_found_there(runs):
    config = make_config("tiny")
    for stage in ("base", "sft", "rm", "normalize"):
        finish(config, stage)
    assert list(finished_policies("tiny", "tiny", 44413)) == ["sft"]
    finish(make_config("tiny", name="mine", overrides=("ppo.lam=0.5",), upstream="tiny"), "ppo")
    assert list(finished_policies("tiny", "mine", 44413)) == ["sft", "ppo"]


def test_what_is_missing_is_one_line_with_its_mend(runs, capsys):
    line = refused(capsys, "--post", "x")
    assert "run `make sft rm ppo PRESET=tiny SEED=44413` first" in line
    finish(make_config("tiny"), "base")
    assert "SEED=44413 NAME=" not in refused(capsys, "--post", "x")
    assert "unknown run 'tinny': did you mean tiny" in refused(capsys, "--name=tinny", "--post=x")
    assert "give one post: POST='...', or ID=" in refused(capsys, "--post", " ")
    assert "give one post: POST='...', or ID=" in refused(capsys, "--post", "x", "--id", "y")


def test_an_id_that_the_run_has_not_is_refused_and_says_how_ids_look(finished, capsys):
    line = refused(capsys, "--name", "resumed", "--id", "toy1-validation-999")
    assert "is no held-out post of resumed: ids are such as toy1-validation-0" in line
    line = refused(capsys, "--name", "resumed", "--post", f"{'x ' * 300}\ny")
    assert "the limit is 160 (data.max_query_tokens): shorten the title" in line
