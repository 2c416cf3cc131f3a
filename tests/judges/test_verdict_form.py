"""A verdict is what the form says, or none."""

import pytest

from eval.judges.prompt import parse_choice


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
        # A comparison that names both is no second verdict.
        ("Comparison: A is preferred to B by length.\nPreferred: B", "B"),
    ],
)
def test_the_last_line_says_it(reply, choice):
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
        # More follows.
        "Comparison: x\nPreferred: A\n\nWait, I mixed the two up: Summary B says more.",
        "Comparison: x\nPreferred: A\nI hope this helps.",
        "Comparison: x\nPreferred: A\nOn reflection, B is better.",
        # Two of them.
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
def test_anything_else_is_no_verdict(reply):
    assert parse_choice(reply) is None


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
def test_an_object_says_it(reply, choice):
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
def test_another_object_says_nothing(reply):
    assert parse_choice(reply) is None


THOUGHTS = [
    ("<think>", "</think>"),  # DeepSeek, Qwen
    ('<thinking depth="2">', "</thinking>"),
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
]


@pytest.mark.parametrize(("start", "end"), THOUGHTS)
@pytest.mark.parametrize(
    "answer", ["Comparison: x\nPreferred: B", '{"comparison": "x", "preferred": "B"}']
)
def test_what_comes_after_a_thought_is_the_answer(start, end, answer):
    thought = "Is it A?\nPreferred: A\nHm."
    assert parse_choice(f"{start}{thought}{end}\n\n{answer}") == "B"
    assert parse_choice(f"{thought}{end}{answer}") == "B"  # the chat template wrote the start


@pytest.mark.parametrize(("start", "end"), THOUGHTS)
def test_a_thought_is_no_answer(start, end):
    assert parse_choice(f"{start}\nPreferred: A\n{end}") is None
    assert parse_choice(f"{start}\nPreferred: A") is None
    assert parse_choice(f"Well.\n{end}\n{start}\nPreferred: A") is None


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
