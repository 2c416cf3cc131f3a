"""The prompt is a setting: refused if it cannot be read back, used from tokens to the judge."""

import json
from dataclasses import replace
from typing import Any

from eval.control_texts import control_rows
from eval.judges.prompt import LINES, make_question
from reports.sharing.cards import POST, card
from stages.base import make_base
from stages.data.ragged import load_split
from stages.finished import stage_folder
from stages.running.files import read_lines
from stages.settings.command_line import make_config
from stages.settings.config import Data
from stages.settings.sections import PROMPT, format_post, parse_post

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
