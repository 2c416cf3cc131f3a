"""A reply counts as a verdict only if it has exactly the form that the prompt asks for."""

from dataclasses import dataclass

import pytest

from eval.judges.prompt import parse_choice

# -- lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        ("Comparison: the first is accurate.\nPreferred: A", "A"),
        ("Comparison: the first is accurate.\nPreferred: B\n", "B"),
        ("Comparison: both leave out the boss.\n\nPreferred: tie", "tie"),
        ("Preferred: A", "A"),
        ("Comparison: x\r\n**Preferred:** **B**", "B"),
        ("Comparison: x\n**Preferred: B**\n\n", "B"),
        ("*Comparison:* x\n_Preferred:_ `A`", "A"),
        # A comparison that names both is not a second verdict.
        ("Comparison: A is preferred to B by length.\nPreferred: B", "B"),
    ],
)
def test_the_last_line_is_the_verdict(reply, choice):
    assert parse_choice(reply) == choice


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "A",
        "Preferred:",
        "Preferred: C",
        "Preferred: <A, B or tie>",
        "Preferred: A or B",
        "Preferred: A/B",
        "Preferred: A.",
        "Preferred: A (it is accurate)",
        "Preferred: Summary A",
        "Preferred: not A",
        "Not Preferred: A",
        "Winner: A",
        "Comparison: I would say Preferred: A",
        # Text follows the verdict.
        "Comparison: x\nPreferred: A\n\nWait, I mixed the two up: Summary B says more.",
        "Comparison: x\nPreferred: A\nI hope this helps.",
        "Comparison: x\nPreferred: A\nOn reflection, B is better.",
        # There are two verdicts.
        "Comparison: x\nPreferred: B\nLess preferred: A",
        "Preferred: A\nPreferred: B",
        "**Preferred:** A\nNo, wait.\n**Preferred:** B",
        "- Preferred: A\n- Not the other one.\nPreferred: B",
        "> preferred: A\nPreferred: B",
        "Preferred: A\u2028Preferred: B",
        "Ｐｒｅｆｅｒｒｅｄ： Ａ",
        "Рreferred: А",  # Cyrillic R and A
    ],
)
def test_any_other_text_is_no_verdict(reply):
    assert parse_choice(reply) is None


# -- objects ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        ('{"comparison": "x", "preferred": "A"}', "A"),
        ('{"preferred": "tie", "comparison": ""}', "tie"),
        ('```json\n{\n  "comparison": "x",\n  "preferred": "B"\n}\n```', "B"),
        ('{"comparison": "it says {\\"preferred\\": \\"A\\"}", "preferred": "B"}', "B"),
        ('{"comparison": "Preferred: A", "preferred": "B"}', "B"),
    ],
)
def test_an_object_is_a_verdict(reply, choice):
    assert parse_choice(reply) == choice


@pytest.mark.parametrize(
    "reply",
    [
        '{"comparison": "x", "preferred": "A',
        '{"comparison": "x", "preferred": "C"}',
        '{"comparison": "x", "preferred": "A or B"}',
        '{"comparison": "x", "preferred": "a"}',
        '{"comparison": "x", "preferred": 1}',
        '{"comparison": "x", "preferred": null}',
        '{"comparison": "x", "preferred": ["A"]}',
        '{"comparison": "x"}',
        '{"comparison": "x", "preferred": "A", "preferred": "B"}',
        '{"comparison": "x", "preferred": "A", "less_preferred": "B"}',
        '{"comparison": "x", "preferred": "A"}\nNo, wait:\n{"comparison": "x", "preferred": "B"}',
        '{"comparison": "x", "preferred": "A"}\nPreferred: B',
        '[{"comparison": "x", "preferred": "A"}]',
        "{" * 100_000,
    ],
)
def test_any_other_object_is_no_verdict(reply):
    assert parse_choice(reply) is None


# -- thoughts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marks:
    """How a model marks the start and the end of its thoughts."""

    start: str
    end: str


MARKS = {
    "DeepSeek, Qwen": Marks("<think>", "</think>"),
    "thinking": Marks('<thinking depth="2">', "</thinking>"),
    "Mistral": Marks("[THINK]", "[/THINK]"),
    "reasoning": Marks("<reasoning>", "</reasoning>"),
    "Seed": Marks("<seed:think>", "</seed:think>"),
}
with_each_mark = pytest.mark.parametrize("marks", MARKS.values(), ids=MARKS)
with_each_answer = pytest.mark.parametrize(
    "answer",
    ["Comparison: x\nPreferred: B", '{"comparison": "x", "preferred": "B"}'],
    ids=["lines", "object"],
)
THOUGHT = "Is it A?\nPreferred: A\nHm."


@with_each_mark
@with_each_answer
def test_what_follows_a_thought_is_the_answer(marks, answer):
    assert parse_choice(f"{marks.start}{THOUGHT}{marks.end}\n\n{answer}") == "B"


@with_each_mark
@with_each_answer
def test_a_thought_may_lack_its_start_which_the_chat_template_wrote(marks, answer):
    assert parse_choice(f"{THOUGHT}{marks.end}{answer}") == "B"


@with_each_mark
def test_a_thought_is_no_answer(marks):
    assert parse_choice(f"{marks.start}\nPreferred: A\n{marks.end}") is None


@with_each_mark
def test_an_unfinished_thought_is_no_answer(marks):
    assert parse_choice(f"{marks.start}\nPreferred: A") is None
    assert parse_choice(f"Well.\n{marks.end}\n{marks.start}\nPreferred: A") is None


@pytest.mark.parametrize(
    "reply",
    [
        "<|START_THINKING|>Hm.<|END_THINKING|>\nPreferred: A",
        "<|channel|>analysis<|message|>Hm.<|end|><|channel|>final<|message|>\nPreferred: A",
        "<|channel>thought\nPreferred: A",
    ],
)
def test_a_reply_with_a_control_token_is_no_verdict(reply):
    assert parse_choice(reply) is None
