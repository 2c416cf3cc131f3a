"""Measures of generated text, by hand."""

from stages.config.sections import PROMPT
from stages.data.text_metrics import identical


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
