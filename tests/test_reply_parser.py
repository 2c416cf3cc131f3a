"""What a reply means."""

import pytest

from eval.reply_parser import parse_choice
from eval.verdicts import Choice

REPLIES: dict[Choice | None, str] = {
    "A": r"""A | "A" | "A". | **A** | Summary A | Preferred: A | Preferred: <A> | Preferred:\nA
    | Preferred: A (it is accurate) | Preferred: A, because B is wrong | Preferred: A. B is wrong.
    | Preferred: Summary A is better | Comparison: the first is accurate.\nPreferred: A""",
    "B": r"""Comparison: x\nPreferred: B | **Preferred:** **B** | Preferred: “Summary B”.
    | preferred: b | Preferred: summary_B | {"comparison": "x", "preferred": "B"}
    | <think>Preferred: A?</think>\nPreferred: B""",
    "tie": r"""Tie | Comparison: x\nPreferred: tie | Preferred: A tie | Preferred: It's a tie.
    | Preferred: neither""",
    None: r"""Preferred: | Preferred: A or B | Preferred: A/B | Preferred: A, B | Preferred: A = B
    | Preferred: A and B are equally good | Preferred: <A, B or tie> | Preferred: both
    | Preferred: Absolutely | A summary of the post would help. | Comparison: A is better than B.
    | I think that summary A is the one that says more about B""",
}


@pytest.mark.parametrize("choice", REPLIES)
def test_a_reply_means_what_a_reader_would_say(choice):
    replies = [text.strip().replace(r"\n", "\n") for text in REPLIES[choice].split("|")]
    assert {text: parse_choice(text) for text in replies} == dict.fromkeys(replies, choice)
    assert parse_choice("") is None
