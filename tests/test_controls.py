"""Controls: what is made of a post, when a judge passes, and a judge who fails is flagged."""

import pytest

from eval import controls
from eval.control_texts import (
    CONTROLS,
    LONGER,
    content,
    control_rows,
    control_texts,
    negated,
    swapped,
)
from eval.controls import describe, judge_controls, outcome
from eval.judge import Task, judgement
from eval.judges import protocol
from eval.judges.protocol import VERDICTS, About, Reply, judge_pair
from stages.config.command_line import make_config
from stages.config.config import Checks
from stages.config.sections import format_post
from stages.data.builtin import UNWANTED_COST, facts_of, make_post, read_summary, score_summary
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest, stage_folder
from tests.lib.fabricated_runs import finish_summaries

QUERY = "SUBREDDIT: r/x\n\nTITLE: A title\n\nPOST: First. Then\nmore.\n\nTL;DR:"
SHORT_OR_OFF_TOPIC = ("truncated", "first_sentence", "title", "other_post")
LONG_AND_ON_TOPIC = ("repeated", "padded", "contradicted", "swapped", "wrong_emphasis")
NOT_THE_REFERENCE = (*SHORT_OR_OFF_TOPIC, *LONG_AND_ON_TOPIC)


def words(text):
    return len(text.split())


def post(name, reference, query=QUERY):
    return {"id": name, "query": query, "reference": reference}


def test_each_control_is_what_it_says():
    me, other = post("a", "some words of a reference"), post("b", "another")
    same = post("c", "some  words of a reference")
    texts = control_texts(me, [same, other])
    assert list(texts) == list(CONTROLS) == ["reference", *NOT_THE_REFERENCE]
    padded = texts.pop("padded")
    assert padded.startswith("some words of a reference. ")
    assert len(padded.split()) > 15
    assert texts == {
        "reference": "some words of a reference",
        "truncated": "some words",
        "first_sentence": "First.",
        "title": "A title",
        "other_post": "another",
        "repeated": "some words of a reference. some words of a reference",
        "contradicted": "",  # no sentence of the post is about the matter
        "swapped": "",  # no person, day or number
        "wrong_emphasis": "",  # no sentence of four words
    }


def test_a_post_without_such_a_text_has_no_control_of_it_and_is_counted():
    rows = control_rows([post("a", "one", "")])
    assert {name for name in rows if rows[name]} == {"reference", "repeated", "padded"}
    found = outcome([], rows)
    assert (found["posts"], found["controls"]["swapped"]["posts"]) == (1, 0)
    assert found["controls"]["swapped"]["why"] == "the posts have no such text"


STORY = (
    "My wife was angry with me on Monday. We have 2 dogs and a cat of 12. I like long walks in the"
    " park near our house. Is she right?"
)
ABOUT = "My wife (23F) is angry on Monday, 2 weeks after Anna left. My wife's dogs too."


def test_a_contradiction_is_a_sentence_of_the_post_with_not_at_its_verb():
    query = QUERY.replace("First. Then\nmore.", STORY)
    texts = control_texts(post("a", ABOUT, query), [])
    assert texts["contradicted"] == f"{ABOUT} My wife was not angry with me on Monday."
    assert negated("I'm 23 and tired.") == "I'm not 23 and tired."
    for text in ("I was not there.", "I'm just tired.", "Was she right?", "It is so.", "We met."):
        assert negated(text) == "", text


def test_swapped_facts_are_ones_that_the_post_does_not_name():
    """By hand: wife -> daughter, because a sister is named; 23 -> 34, 2 -> 6, because 5 is named.

    Monday -> Wednesday, because a Tuesday is named. The same word is swapped alike.
    """
    known = f"{STORY} {ABOUT} my sister came on tuesday with 5 men"
    found = swapped("My wife (23F) is angry on Monday, 2 weeks. My wife's two dogs.", known)
    assert found == "My daughter (34F) is angry on Wednesday, 6 weeks. My daughter's six dogs."
    assert swapped("Anna and John came in May, the 1st.", "Emily") == (
        "Jessica and Mike came in May, the 1st."
    )
    assert swapped("nobody did it", known) == "nobody did it"
    long = "9" * 5000  # more digits than Python reads as a number
    assert swapped(f"{long} and 2 dogs", f"5 men, {long}") == f"{long} and 6 dogs"


def test_a_summary_of_the_wrong_emphasis_is_longer_true_and_misses_the_reference():
    query = QUERY.replace("First. Then\nmore.", STORY)
    text = control_texts(post("a", "My wife is angry on Monday", query), [])["wrong_emphasis"]
    assert text == "I like long walks in the park near our house."
    assert control_texts(post("a", STORY, query), [])["wrong_emphasis"] == ""


def test_in_the_built_in_world_no_new_control_beats_a_right_reference():
    """The facts are the generator's, so the truth does not come from the texts' own module.

    A right reference tells nothing wrong, and with the event at least as much as two wanted facts
    and two others; else even a bad text may tell more.
    """
    rows = [make_post(f"toy3-validation-{k}") for k in range(200)]
    posts = [post(row["id"], row["summary"], format_post(row)) for row in rows]
    better, fair = dict.fromkeys(LONG_AND_ON_TOPIC, 0), 0
    for at, one in enumerate(posts):
        facts = facts_of(one["id"])
        texts = control_texts(one, posts[at + 1 :] + posts[:at])
        worth = score_summary(one["reference"], facts)
        if not read_summary(one["reference"], facts)[1] and worth >= 3 + 2 - 2 * UNWANTED_COST:
            fair += 1
            for name in LONG_AND_ON_TOPIC:
                better[name] += score_summary(texts[name], facts) >= worth
        right, wrong = read_summary(texts["swapped"], facts)
        assert "who" not in right
        assert "who" in {slot for slot, _ in wrong}
    assert fair > 0.3 * len(posts)
    assert set(better.values()) == {0}


class TopicThenLength(protocol.Judge):
    """The text with a third of its content words in the post, then the longer one."""

    about = About(kind="topic", name="topic, then length", is_llm=False, note="for tests")

    def reply(self, comparison):
        query, first, second = comparison[1:4]

        def on_topic(text):
            words = content(text)
            return 3 * len(words & content(query)) >= len(words)

        a, b = ((on_topic(text), len(text.split())) for text in (first, second))
        return Reply(choice="A" if a > b else "B" if b > a else "tie", text="")


def outcome_of(judge, posts):
    rows = control_rows(posts)
    judgements = []
    for name, of_name in rows.items():
        for row in of_name:
            for order in VERDICTS:
                task = Task(policy=name, row=row, order=order)
                judgements.append(judgement(judge.about, task, judge_pair(judge, task.comparison)))
    return outcome(judgements, rows)


def test_a_judge_of_topic_and_length_passed_all_of_the_old_controls_and_fails_the_new(shared):
    lines = read_lines(shared / "tldr" / "sft_validation.jsonl")[:60]
    posts = [post(row["id"], row["summary"].strip(), format_post(row)) for row in lines]
    found = outcome_of(TopicThenLength(), posts)
    assert all(found["controls"][name]["passed"] for name in ("reference", *SHORT_OR_OFF_TOPIC))
    assert found["failed"] == list(LONG_AND_ON_TOPIC)
    for name in ("repeated", "padded", "contradicted"):
        assert found["controls"][name]["preferred"] > 0.8, name
    # Real posts have such texts often enough to judge by.
    shares = {name: one["posts"] / 60 for name, one in found["controls"].items()}
    assert min(shares.values()) > 0.5
    assert min(shares["contradicted"], shares["wrong_emphasis"]) > 0.7
    for row in control_rows(posts)["wrong_emphasis"]:
        assert len(row["summary"].split()) >= LONGER * len(row["reference"].split())


class Rule(protocol.Judge):
    """A judge that chooses by a rule of its own."""

    about = About(kind="rule", name="a rule", is_llm=False, note="for tests")

    def __init__(self, rule):
        self.rule = rule

    def reply(self, comparison):
        return Reply(choice=self.rule(comparison.first, comparison.second), text="")


def summarised(config, posts=40):
    made = [make_post(f"toy1-validation-{number}") for number in range(posts)]
    scores = {"summary": "x", "score": 0.0, "reference_score": 0.0}
    rows = [post(row["id"], row["summary"], format_post(row)) | scores for row in made]
    finish_summaries(config, sft=rows)


def judged_by(monkeypatch, rule):
    config = make_config("tiny").changed(checks=Checks(control_posts=100))
    summarised(config, posts=100)
    monkeypatch.setattr(controls, "make_judge", lambda config, policies: Rule(rule))
    return judge_controls(config)


def test_the_built_in_judge_passes_every_control(runs):
    config = make_config("tiny")
    summarised(config)
    found = judge_controls(config)
    assert found["failed"] == []
    assert all(one["passed"] for one in found["controls"].values())
    folder = stage_folder(config, "controls")
    assert (read_manifest(folder) or {})["results"] == found
    rows = read_lines(folder / "judgements.jsonl")
    assert len(rows) == sum(one["judgements"] for one in found["controls"].values())
    itself = [row for row in rows if row["policy"] == "reference"]
    assert {row["verdict"] for row in itself} == {"tie"}
    assert all("not asked" in row["reply"] for row in itself)


@pytest.mark.parametrize(
    ("rule", "failed"),
    [
        (lambda first, second: "A", NOT_THE_REFERENCE),  # the first shown
        (lambda first, second: "tie", NOT_THE_REFERENCE),
        (lambda one, two: "A" if words(one) < words(two) else "B", ["truncated", "title"]),
        (lambda one, two: "A" if words(one) > words(two) else "B", LONG_AND_ON_TOPIC),
        (lambda first, second: None, NOT_THE_REFERENCE),  # never a usable reply
    ],
)
def test_a_judge_who_sees_no_quality_fails(runs, monkeypatch, rule, failed):
    found = judged_by(monkeypatch, rule)
    assert set(failed) <= set(found["failed"])
    assert "reference" not in found["failed"]  # the protocol ties without asking


def described(posts, verdicts):
    """What is said of a control about so many posts, with two verdicts on each."""
    names = [f"p{k}" for k in range(posts)]
    rows = [post(name, "one two", name) | {"summary": "three"} for name in names]
    questions = [(name, order) for name in names for order in VERDICTS]
    judgements = [
        {"policy": "title", "id": name, "order": order, "verdict": verdict}
        for (name, order), verdict in zip(questions, verdicts, strict=True)
    ]
    return describe("title", judgements, {"title": rows})


@pytest.mark.parametrize(
    ("verdict", "posts", "passed"),
    [
        ("reference", 3, None),  # Wilson's upper bound for 0 of 3 is 56%
        ("tie", 19, None),
        ("tie", 20, False),
        ("policy", 3, None),
        ("policy", 9, False),
        ("reference", 4, True),  # and for 0 of 4 it is 49%
    ],
)
def test_posts_that_are_too_few_to_decide_neither_pass_nor_fail_a_control(verdict, posts, passed):
    found = described(posts, [verdict] * 2 * posts)
    assert found["passed"] is passed
    said = f"too few posts ({posts} of 20 needed)" if passed is None else None
    assert found.get("why") == said


@pytest.mark.parametrize(("silent", "passed"), [(0, True), (2, True), (15, False)])
def test_a_control_passes_only_if_the_unjudged_could_not_have_failed_it(silent, passed):
    """15 of 40 unjudged: by the other 25 it passes, and with these lost it need not."""
    found = described(20, ["unjudged"] * silent + ["reference"] * (40 - silent))
    assert (found["preferred"], found["unjudged"]) == (0.0, silent / 40)
    assert found["passed"] is passed
