"""Summaries of one post by a finished run: a held-out post, and one that is typed."""

import pytest

from eval import summarize
from eval.summarize import FinishedRun, finished_policies
from stages import base
from stages.config import paths
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
    monkeypatch.setattr(paths, "RUNS", whole.parents[1])
    return FinishedRun(finished_policies("tiny", "resumed", 44413))


def printed(capsys, *options):
    """The lines that the command prints about the small run."""
    summarize.main(["--name", "resumed", *options])
    return capsys.readouterr().out.splitlines()


def refused(capsys, *options):
    """The error in one line with which the command ends."""
    line = refused_by(capsys, summarize.main, *options)
    assert line.startswith("error: ")
    return line


# -- held-out posts --------------------------------------------------------------------------------


@pytest.fixture
def first_rows(finished, whole):
    """The rows of the evaluation about the first post, by policy.

    The evaluation draws the same random numbers for the first post as this command.
    """
    return {
        policy: read_lines(whole / f"summaries/{policy}.jsonl")[0] for policy in finished.policies
    }


def test_a_held_out_post_gets_the_summaries_of_the_evaluation(finished, first_rows):
    assert list(first_rows) == ["sft", "ppo", "dpo", "ppo-3"]
    post = finished.post_of_id(first_rows["ppo"]["id"])
    assert post.query == first_rows["ppo"]["query"]
    for policy, row in first_rows.items():
        tokens = finished.summary(policy, post, finished.config.eval.temperature)
        assert finished.text(tokens) == row["summary"], policy
        assert len(tokens) == row["tokens"], policy


def test_a_held_out_post_gets_the_scores_of_the_evaluation(finished, first_rows):
    post = finished.post_of_id(first_rows["ppo"]["id"])
    temperature = finished.config.eval.temperature
    summaries = [finished.summary(policy, post, temperature) for policy in first_rows]

    scores = finished.scores(post, summaries)

    expected = [row["score"] for row in first_rows.values()]
    assert scores == pytest.approx(expected, abs=1e-5)


def test_the_command_prints_the_reference_and_each_policy(finished, capsys):
    lines = printed(capsys, "--id", "toy1-validation-3")

    assert max(len(line) for line in lines) <= 80
    headings = [line.split(":")[0] for line in lines if ", score " in line]
    assert headings == ["reference", "sft", "ppo", "dpo", "ppo-3"]


# -- typed posts -----------------------------------------------------------------------------------


def test_a_filled_prompt_stays_as_it_is(finished):
    query = format_post(make_post("toy1-validation-3"))
    assert finished.post_of_text(f"  {query}\n").query == query


@pytest.mark.parametrize(
    ("text", "title", "post"),
    [
        ("My boss sold it.", "", "My boss sold it."),
        ("My bike\n\nSold.\nSad.", "My bike", "Sold.\nSad."),
    ],
)
def test_a_plain_text_is_filled_into_the_prompt(finished, text, title, post):
    subreddit = finished.held_out.rows[0]["query"].split("\n")[0]
    expected = f"{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
    assert finished.post_of_text(text).query == expected


def test_a_long_post_is_cut_as_in_training(finished):
    post = finished.post_of_text("My boss sold it.\n" * 60)
    assert len(post.tokens) <= finished.config.data.max_query_tokens


def test_control_characters_are_not_printed(finished, capsys):
    lines = printed(capsys, "--post", "My boss sold it.\n" * 60 + "\x1b[31mred")
    assert max(len(line) for line in lines) <= 80
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(("text", "length"), [("And you?", 7), ("one " * 300 + "TL;DR:", 160)])
def test_where_rows_contain_whole_prompts_a_typed_one_keeps_its_end(finished, text, length):
    finished.held_out.rows[0]["query"] = "What is new?"

    post = finished.post_of_text(text)

    assert post.query == text
    assert len(post.tokens) == length
    assert text.endswith(finished.text(post.tokens))


# -- other runs ------------------------------------------------------------------------------------


def test_a_released_policy_writes_without_sft_or_scores(whole, place, monkeypatch, capsys):
    monkeypatch.setattr(paths, "RUNS", place / "runs")
    world = [setting for setting in SETTINGS if setting.startswith(("world.", "memory."))]
    overrides = [f"released.policy={whole / 'sft/model'}", *world]
    run_module(base, ["--preset", "tiny", "--name", "other", "--set", *overrides])
    take_released(make_config("tiny", name="other", overrides=tuple(overrides)))
    capsys.readouterr()

    summarize.main(["--name", "other", "--post", "My boss sold my bike."])

    output = capsys.readouterr().out
    assert "released: 2" in output  # the number of tokens
    assert "score" not in output


def test_policies_of_an_upstream_are_found_there(runs):
    config = make_config("tiny")
    for stage in ("base", "sft", "rm", "normalize"):
        finish(config, stage)
    assert list(finished_policies("tiny", "tiny", 44413)) == ["sft"]

    finish(make_config("tiny", name="mine", overrides=("ppo.lam=0.5",), upstream="tiny"), "ppo")
    assert list(finished_policies("tiny", "mine", 44413)) == ["sft", "ppo"]


# -- errors ----------------------------------------------------------------------------------------


def test_a_run_without_a_policy_names_the_command_that_trains_one(runs, capsys):
    expected = "run `make sft rm ppo PRESET=tiny SEED=44413` first"
    assert expected in refused(capsys, "--post", "x")
    finish(make_config("tiny"), "base")
    assert expected in refused(capsys, "--post", "x")


def test_a_named_run_without_a_policy_may_have_any_preset(runs, capsys):
    finish(make_config("tiny-xs", name="mine"), "base")
    message = refused(capsys, "--name=mine", "--post=x")
    assert "first run the command that trains it" in message
    assert "PRESET" not in message


def test_an_unknown_run_gets_the_nearest_name(runs, capsys):
    finish(make_config("tiny"), "base")
    assert "unknown run 'tinny': did you mean tiny" in refused(capsys, "--name=tinny", "--post=x")


@pytest.mark.parametrize("options", [["--post", " "], ["--post", "x", "--id", "y"]])
def test_one_post_is_needed(runs, capsys, options):
    assert "there is no post to summarize: give POST='...', or ID=" in refused(capsys, *options)


def test_an_unknown_id_is_refused_with_an_example(finished, capsys):
    line = refused(capsys, "--name", "resumed", "--id", "toy1-validation-999")
    assert "is not a held-out post of resumed: try ID=toy1-validation-0" in line


def test_a_title_that_is_too_long_is_refused(finished, capsys):
    line = refused(capsys, "--name", "resumed", "--post", f"{'x ' * 300}\ny")
    assert "the limit is 160 (data.max_query_tokens): shorten the title" in line
