"""The prompt is a setting that reaches the tokens, the judge, its controls and the model cards."""

import json

import pytest

from eval.control_texts import control_rows
from eval.judges.prompt import make_question
from stages.base import make_base
from stages.config import paths
from stages.config.command_line import make_config
from stages.config.judge_prompt import read_prompt
from stages.config.sections import PROMPT, Data, format_post, parse_post
from stages.data.ragged import load_split
from stages.pipeline.model_cards import POST, card
from stages.runs.files import read_lines
from stages.runs.manifest import stage_folder

CUSTOM = "Forum {subreddit}:\n{post}\n\nTITLE: {title}\n\nIn one sentence:"
# A post whose texts contain what could be taken for a part of the prompt.
ROW = {"subreddit": "tifu", "title": "A: {post}", "post": "One.\n\nTITLE: b\n\nTL;DR:"}
FILLED = "SUBREDDIT: r/tifu\n\nTITLE: A: {post}\n\nPOST: One.\n\nTITLE: b\n\nTL;DR:\n\nTL;DR:"


def test_the_default_prompt_is_the_papers():
    assert Data().prompt == PROMPT
    assert format_post(ROW) == FILLED


@pytest.mark.parametrize("template", [PROMPT, CUSTOM])
def test_a_post_is_read_back_from_its_prompt(template):
    assert parse_post(format_post(ROW, template), template) == ROW


def test_another_text_is_no_prompt():
    assert parse_post(FILLED, CUSTOM) is None
    assert parse_post("Article:\nnews\n\nTL;DR:\n") is None


# -- a base with a prompt of the user --------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The config of a run whose base has the custom prompt."""
    tiny = make_config("tiny", name="other")
    config = tiny.changed(
        world=tiny.world.changed(
            train_posts=40,
            validation_posts=10,
            train_comparisons=8,
            validation_comparisons=8,
        ),
        base=tiny.base.changed(hidden_size=16, num_layers=1),
        data=tiny.data.changed(prompt=CUSTOM, max_query_tokens=60),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RUNS", tmp_path_factory.mktemp("custom") / "runs")
        make_base(config)
        yield config


def held_out_posts(config):
    """The rows of the held-out posts, with the fields that were read back from the prompt."""
    split = load_split(stage_folder(config, "base") / "data", "sft_validation")
    return [row | (parse_post(row["query"], CUSTOM) or {}) for row in split.rows]


def test_the_tokens_have_the_custom_prompt(config):
    folder = stage_folder(config, "base") / "data"
    split = load_split(folder, "sft_validation")

    assert int(split.columns["queries"].lengths().max()) <= 60
    for row in split.rows:
        assert row["query"].startswith("Forum ")
    assert len(read_lines(folder / "comparisons_train.jsonl")) == 8


def test_titles_are_read_back_from_the_custom_prompt(config):
    split = load_split(stage_folder(config, "base") / "data", "sft_validation")
    for row in split.rows:
        post = parse_post(row["query"], CUSTOM)
        assert post is not None
        assert post["title"] == row["title"]


def test_the_judge_is_shown_the_custom_prompt(config):
    query = held_out_posts(config)[0]["query"]
    question = make_question(
        read_prompt("", "overall"),
        query=query,
        first="A short one.",
        second="Another one.",
        as_json=False,
    )
    assert query in question.prompt


def test_controls_are_built_from_the_custom_prompt(config):
    posts = held_out_posts(config)
    controls = control_rows(posts, CUSTOM)
    assert [row["summary"] for row in controls["title"]] == [post["title"] for post in posts]


def test_model_cards_show_the_custom_prompt(config):
    text = card(config, "sft", "model", {"results": {}, "inputs": {}})
    assert json.dumps(format_post(POST, CUSTOM)) in text
