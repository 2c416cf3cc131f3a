"""What a page says about the style of summaries: closing questions, special tokens."""

import pytest

from reports.parts.sentences import unshown
from reports.sections.scores import asks


@pytest.mark.parametrize(
    ("text", "is_question"),
    [("Why?", 1), ('He said "why?" ', 1), ("Why? So.", 0), ("", 0), ("Why?)", 1)],
)
def test_a_question_counts_at_the_end_of_a_summary(text, is_question):
    assert asks(text) == is_question


def test_a_page_warns_about_special_tokens_that_no_summary_shows():
    [line] = unshown({"policies": ["sft", "ppo"], "ppo/special_tokens": 1 / 3})
    assert line.startswith("33.3% of PPO's summaries hold special tokens beside the EOS")
