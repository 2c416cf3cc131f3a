"""What a reply means."""

import pytest

from eval.judges.prompt import parse_choice
from eval.judges.protocol import Choice

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


OBJECTS: list[tuple[str, Choice | None]] = [
    ('{"comparison": "x", "preferred": "A"}', "A"),
    ('```json\n{\n  "comparison": "x",\n  "preferred": "tie"\n}\n```', "tie"),
    ('Here it is:\n{"Preferred": "Summary B"}\nI hope this helps.', "B"),
    ('{"comparison": "it says {\\"preferred\\": \\"A\\"}", "preferred": "B"}', "B"),
    ('{"preferred": "A"}\nNo, wait:\n{"preferred": "B"}', "B"),
    ('The post says {"preferred": "A"}, but\nPreferred: B', "B"),
    ('The post says {"preferred": "A\n**Preferred:** B', "B"),
    ("The set {a, b} is missing.\nPreferred: A", "A"),
    ('{"comparison": "x", "preferred": "A', None),
    ('```json\n{"comparison": "x",\n  "preferred": "A', None),
    ('Sure: {"comparison": "A is better because', None),
    ('{"preferred": "A", "preferred": "B"}', None),
    ('{"preferred": "A or B"}', None),
    ('{"preferred": 1}', None),
    ('{"preferred": null}', None),
    ('{"comparison": "Preferred: A"}', None),
    ("<think>Is it A? Preferred: A", None),
    ('"Preferred: B"', "B"),
    ('Comparison: x\n"Preferred": "B"', "B"),
    ("C", None),
    ("Preferred: C", None),
]


@pytest.mark.parametrize(("text", "choice"), OBJECTS)
def test_an_object_means_its_own_word_and_one_that_is_cut_off_means_nothing(text, choice):
    assert parse_choice(text) == choice


@pytest.mark.parametrize("choice", REPLIES)
def test_a_reply_means_what_a_reader_would_say(choice):
    replies = [text.strip().replace(r"\n", "\n") for text in REPLIES[choice].split("|")]
    assert {text: parse_choice(text) for text in replies} == dict.fromkeys(replies, choice)
    assert parse_choice("") is None
