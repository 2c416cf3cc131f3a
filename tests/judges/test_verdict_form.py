"""What a reply means."""

import pytest

from eval.judges.prompt import parse_choice
from eval.judges.protocol import Choice

REPLIES: dict[Choice | None, str] = {
    "A": r"""A | "A" | "A". | **A** | Summary A | Preferred: A | Preferred: <A> | Preferred:\nA
    | Preferred: A (it is accurate) | Preferred: A, because B is wrong | Preferred: A. B is wrong.
    | Preferred: Summary A is better | Comparison: the first is accurate.\nPreferred: A""",
    "B": r"""Comparison: x\nPreferred: B | **Preferred:** **B** | Preferred: “Summary B”.
    | preferred: b | Preferred: summary_B | {"comparison": "x", "preferred": "B"}""",
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
    ('"Preferred: B"', "B"),
    ('Comparison: x\n"Preferred": "B"', "B"),
    ("C", None),
    ("Preferred: C", None),
]


@pytest.mark.parametrize(("text", "choice"), OBJECTS)
def test_an_object_means_its_own_word_and_one_that_is_cut_off_means_nothing(text, choice):
    assert parse_choice(text) == choice


MARKS = """
    <think> </think>, <Thinking depth="2"> </thinking>, [THINK] [/THINK], <reasoning> </reasoning>,
    <seed:think> </seed:think>, ◁think▷ ◁/think▷, <|START_THINKING|> <|END_THINKING|>,
    <|begin_of_thought|> <|end_of_thought|>, <|inner_prefix|> <|inner_suffix|>,
    <|channel>thought <channel|>, <draft> </draft>, ＜think＞ ＜/think＞,
    <|channel|>analysis<|message|> <|end|><|start|>assistant<|channel|>final<|message|>,
    analysisWe assistantfinal
""".split(",")  # of DeepSeek, Mistral, Seed, Kimi, Cohere, OpenThinker, Apertus, Gemma, gpt-oss


@pytest.mark.parametrize("marks", MARKS, ids=range(len(MARKS)))
def test_a_thought_in_whatever_marks_is_no_verdict_and_what_follows_it_is(marks):
    *start, end = marks.split()
    thought = f'{" ".join(start)} "preferred": "A"\nPreferred: A\n'
    assert parse_choice(thought) is None
    assert parse_choice(f"{thought}{end}\n") is None
    for said in ("**B**", 'Well.\n{"comparison": "x", "preferred": "B"}'):
        assert parse_choice(f"{thought}{end}\n{said}") == "B"
        assert parse_choice(f"{thought}{end}\n<think>A</think>\n{said}") == "B"


def test_a_thought_whose_start_the_template_wrote_is_no_verdict():
    for end in ("</think>", "[/THINK]", "<|END_THINKING|>", "◁/think▷"):
        assert parse_choice(f"Preferred: A\n{end}") is None
        assert parse_choice(f"Preferred: A\n{end}\nPreferred: B") == "B"


@pytest.mark.parametrize(
    "text",
    [
        *("[B]", "<B>", "<s>Preferred: B", "<bos>Preferred: B", "<|assistant|>\nPreferred: B"),
        "<answer>\nPreferred: B\n</answer>",
        "[Reasoning] It says more.\nPreferred: B",
        "[Summary B] is better than [Summary A].\nPreferred: B",
    ],
)
def test_other_marks_hide_no_verdict(text):
    assert parse_choice(text) == "B"


@pytest.mark.parametrize("choice", REPLIES)
def test_a_reply_means_what_a_reader_would_say(choice):
    replies = [text.strip().replace(r"\n", "\n") for text in REPLIES[choice].split("|")]
    assert {text: parse_choice(text) for text in replies} == dict.fromkeys(replies, choice)
    assert parse_choice("") is None
