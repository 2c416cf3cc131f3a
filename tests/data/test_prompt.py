"""The prompt is a setting: posts can be read back from it, from the tokens to the judge."""

import json

import pytest

from eval.control_texts import control_rows
from eval.judges.prompt import make_question
from stages.base import make_base
from stages.config.command_line import make_config
from stages.config.judge_prompt import read_prompt
from stages.config.sections import PROMPT, Data, format_post, parse_post
from stages.data.ragged import load_split
from stages.pipeline.model_cards import POST, card
from stages.runs.files import read_lines
from stages.runs.manifest import stage_folder

CUSTOM = "Forum {subreddit}:\n{post}\n\nTITLE: {title}\n\nIn one sentence:"
# Its texts contain what could be taken for a part of the prompt.
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


def test_a_custom_prompt_reaches_the_tokens_and_the_judge(runs):
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
    make_base(config)

    # The tokens.
    folder = stage_folder(config, "base")
    split = load_split(folder / "data", "sft_validation")
    assert int(split.columns["queries"].lengths().max()) <= 60
    posts = [row | (parse_post(row["query"], CUSTOM) or {}) for row in split.rows]
    for post, row in zip(posts, split.rows, strict=True):
        assert post["query"].startswith("Forum ")
        assert post["title"] == row["title"]
    assert len(read_lines(folder / "data" / "comparisons_train.jsonl")) == 8

    # The judge's questions, its control texts and the model's card.
    question = make_question(
        read_prompt("", "overall"),
        query=posts[0]["query"],
        first="A short one.",
        second="Another one.",
        as_json=False,
    )
    assert posts[0]["query"] in question.prompt
    controls = control_rows(posts, CUSTOM)
    assert [row["summary"] for row in controls["title"]] == [row["title"] for row in posts]
    text = card(config, "sft", "model", {"results": {}, "inputs": {}})
    assert json.dumps(format_post(POST, CUSTOM)) in text
