"""The prompt is a setting: refused if it cannot be read back, used from tokens to the judge."""

import json
from dataclasses import replace
from typing import Any

import pytest

from eval.judges.prompt import LINES, make_question
from eval.questions import control_rows
from reports.sharing.cards import POST, card
from stages.base import make_base
from stages.finished import stage_folder
from stages.posts.ragged import load_split
from stages.running.files import read_lines
from stages.settings.checks import UserError
from stages.settings.command_line import make_config
from stages.settings.config import Data
from stages.settings.prompt import PROMPT, format_post, parse_post

OTHER = "Forum {subreddit}:\n{post}\n\nTITLE: {title}\n\nIn one sentence:"
ROW = {"subreddit": "tifu", "title": "A: {post}", "post": "One.\n\nTITLE: b\n\nTL;DR:"}


def test_the_default_prompt_is_the_papers_and_every_post_is_read_back():
    assert Data().prompt == PROMPT
    paper = "SUBREDDIT: r/tifu\n\nTITLE: A: {post}\n\nPOST: One.\n\nTITLE: b\n\nTL;DR:\n\nTL;DR:"
    assert format_post(ROW) == paper
    for template in (PROMPT, OTHER):
        assert parse_post(format_post(ROW, template), template) == ROW
    assert parse_post(paper, OTHER) is None
    assert parse_post("Article:\nnews\n\nTL;DR:\n") is None


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{title}: {post}", "must hold {subreddit}, {title} and {post}, each once"),
        ("{subreddit} {title}: {post} {post}", "each once"),
        ("{subreddit}\n{title}\n{post} by {author}:", "nothing else in braces"),
        ("{subreddit}\n{title!r}\n{post}:", "nothing else in braces"),
        ("{subreddit}\n{title\n{post}:", "nothing else in braces"),
        (PROMPT + "\n", "must not begin or end with white space"),
        ("{subreddit}{title}\n{post}:", "have words or line breaks between its places"),
        ("{subreddit}\n{title} {post}:", "have words or line breaks between its places"),
    ],
)
def test_a_prompt_that_cannot_be_read_back_is_refused_in_one_line(template, problem):
    with pytest.raises(UserError) as refused:
        Data(prompt=template)
    assert str(refused.value).startswith("data.prompt must ")
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


def test_another_prompt_goes_through_base_and_into_a_judges_question(runs):
    tiny = make_config("tiny", name="other")
    sizes: dict[str, Any] = {"train_posts": 40, "validation_posts": 10}
    sizes |= {"train_comparisons": 8, "validation_comparisons": 8}
    config = replace(
        tiny,
        world=replace(tiny.world, **sizes),
        base=replace(tiny.base, hidden_size=16, num_layers=1),
        data=replace(tiny.data, prompt=OTHER, max_query_tokens=60),
    )
    make_base(config)
    folder = stage_folder(config, "base")
    split = load_split(folder / "data", "sft_validation")
    assert int(split.columns["queries"].lengths().max()) <= 60
    posts = [row | (parse_post(row["query"], OTHER) or {}) for row in split.rows]
    assert all(row["title"] == known["title"] for row, known in zip(posts, split.rows, strict=True))
    assert all(row["query"].startswith("Forum ") for row in posts)
    pairs = read_lines(folder / "data" / "comparisons_train.jsonl")
    assert len(pairs) == 8
    question = make_question(posts[0]["query"], "A short one.", "Another one.", LINES)
    assert posts[0]["query"] in question.prompt
    controls = control_rows(posts, OTHER)
    assert [row["summary"] for row in controls["title"]] == [row["title"] for row in posts]
    made: dict[str, Any] = {"results": {}, "inputs": {}}
    assert json.dumps(format_post(POST, OTHER)) in card(config, "sft", "model", made)
