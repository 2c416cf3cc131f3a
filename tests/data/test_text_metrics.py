"""Measures of generated text, by hand."""

import pytest

from stages.config.sections import PROMPT
from stages.data.text_metrics import copied_title_words, distinct, identical


def row(post_id: str, query: str, summary: str) -> dict[str, str]:
    return {"id": post_id, "query": query, "summary": summary, "reference": "another text"}


def test_the_most_frequent_summary_is_counted_over_posts_and_not_over_ids():
    rows = [
        row("a", "the first post", "the same summary"),
        row("b", "the  first post\n", "the same summary"),  # the first post under another id
        row("c", "the second post", "one summary"),
        row("d", "the third post", "two summaries"),
    ]
    # Three posts with three summaries: each is the summary of one post.
    assert identical(rows, PROMPT)["summary"] == 1 / 3


def test_one_summary_of_two_posts_is_a_share_of_the_posts():
    rows = [
        row("a", "the first post", "the same summary"),
        row("b", "the second post", "the same  summary"),
        row("c", "the third post", "one summary"),
    ]
    assert identical(rows, PROMPT)["summary"] == 2 / 3


def test_copied_words_are_those_of_the_title():
    query = "SUBREDDIT: r/x\n\nTITLE: My dog, my CAT\n\nPOST: the dog ran\n\nTL;DR:"
    assert copied_title_words(query, "a dog and my hamster ran") == pytest.approx(2 / 3)
    assert copied_title_words("no title here", "title") is None


def test_distinct_n_grams_are_counted_over_all_texts():
    assert distinct(["a b a", "b a"], 1) == pytest.approx(2 / 5)
    assert distinct(["a b a", "b a"], 2) == pytest.approx(2 / 3)
    assert distinct([""], 2) == 0
