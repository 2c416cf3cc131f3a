"""Controls: when a judge passes them, and that a judge which sees no quality fails."""

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import normal_sample_size_one_tail

from eval import controls
from eval.control_texts import LONGER, content, control_rows
from eval.controls import POSTS_NEEDED, describe, judge_controls, outcome
from eval.judge import Task, judgement
from eval.judges.protocol import VERDICTS, About, Judge, Reply, judge_pair
from stages.config.command_line import make_config
from stages.config.judge import Checks
from stages.config.sections import format_post
from stages.data.builtin import make_post
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest, stage_folder
from tests.lib.control_posts import LONG_AND_ON_TOPIC, NEGATIVE_CONTROLS, SHORT_OR_OFF_TOPIC, post
from tests.lib.fabricated_runs import finish_summaries

# -- one control -----------------------------------------------------------------------------------


def described(posts, verdicts):
    """The result of a control on this many posts, with two verdicts on each."""
    rows = []
    judgements = []
    remaining_verdicts = list(verdicts)
    for number in range(posts):
        row = post(f"p{number}", "one two", f"p{number}") | {"summary": "three"}
        rows.append(row)
        for order in VERDICTS:
            verdict = remaining_verdicts.pop(0)
            judgements.append(
                {"policy": "title", "id": row["id"], "order": order, "verdict": verdict}
            )
    assert not remaining_verdicts
    return describe("title", judgements, {"title": rows})


@pytest.mark.parametrize(
    ("verdict", "posts", "passed"),
    [
        ("reference", 4, True),  # Wilson's upper bound for 0 of 4 is 49%
        ("reference", 3, None),  # and for 0 of 3 it is 56%
        ("tie", 19, None),
        ("tie", 20, False),
        ("policy", 3, None),
        ("policy", 9, False),
    ],
)
def test_a_control_with_too_few_posts_is_neither_passed_nor_failed(verdict, posts, passed):
    result = described(posts, [verdict] * 2 * posts)

    assert result["passed"] is passed
    if passed is None:
        assert result["why"] == f"too few posts ({posts} of 20 needed)"
    else:
        assert "why" not in result


@pytest.mark.parametrize(("unjudged", "passed"), [(0, True), (2, True), (15, False)])
def test_a_control_passes_only_if_the_unjudged_could_not_have_failed_it(unjudged, passed):
    """With 15 of 40 unjudged, the other 25 pass it, but with these 15 lost they would not."""
    result = described(20, ["unjudged"] * unjudged + ["reference"] * (40 - unjudged))

    assert result["preferred"] == 0.0
    assert result["unjudged"] == unjudged / 40
    assert result["passed"] is passed


def test_a_control_without_texts_says_so():
    result = outcome([], control_rows([post("a", "one", query="")]))
    assert result["posts"] == 1
    assert result["controls"]["swapped"]["posts"] == 0
    assert result["controls"]["swapped"]["why"] == "the posts have no such text"


def test_the_posts_needed_are_those_of_a_test_with_80_percent_power():
    posts = normal_sample_size_one_tail(
        diff=0.3, power=0.8, alpha=0.025, std_null=0.5, std_alternative=0.4
    )
    assert np.ceil(posts) == POSTS_NEEDED
    # By hand: ((1.95996 * 0.5 + 0.84162 * 0.4) / 0.3)^2 = 19.3.
    z_power = stats.norm.ppf(0.8)
    assert posts == pytest.approx(((1.959964 * 0.5 + z_power * 0.4) / 0.3) ** 2)


# -- judges that see no quality --------------------------------------------------------------------


class TopicThenLength(Judge):
    """Prefers a text with a third of its content words in the post, then the longer one."""

    about = About(kind="topic", name="topic, then length", is_llm=False, note="for tests")

    def reply(self, comparison):
        def rank(text):
            words = content(text)
            is_on_topic = 3 * len(words & content(comparison.query)) >= len(words)
            return is_on_topic, len(text.split())

        first = rank(comparison.first)
        second = rank(comparison.second)
        if first == second:
            return Reply(choice="tie", text="")
        return Reply(choice="A" if first > second else "B", text="")


@pytest.fixture(scope="module")
def real_posts(shared):
    rows = read_lines(shared / "tldr" / "sft_validation.jsonl")[:60]
    return [post(row["id"], row["summary"].strip(), format_post(row)) for row in rows]


def outcome_of(judge, rows):
    judgements = []
    for name, rows_of_control in rows.items():
        for row in rows_of_control:
            for order in VERDICTS:
                task = Task(policy=name, row=row, order=order)
                judgements.append(judgement(judge.about, task, judge_pair(judge, task.comparison)))
    return outcome(judgements, rows)


def test_a_judge_of_topic_and_length_passes_the_short_controls_and_fails_the_long_ones(real_posts):
    result = outcome_of(TopicThenLength(), control_rows(real_posts))

    for name in ("reference", *SHORT_OR_OFF_TOPIC):
        assert result["controls"][name]["passed"], name
    assert result["failed"] == list(LONG_AND_ON_TOPIC)
    for name in ("repeated", "padded", "contradicted"):
        assert result["controls"][name]["preferred"] > 0.8, name


def test_real_posts_have_control_texts_often_enough(real_posts):
    rows = control_rows(real_posts)
    shares = {name: len(rows_of_control) / 60 for name, rows_of_control in rows.items()}
    assert min(shares.values()) > 0.5
    assert min(shares["contradicted"], shares["wrong_emphasis"]) > 0.7


def test_texts_of_the_wrong_emphasis_are_longer_than_the_reference(real_posts):
    for row in control_rows(real_posts)["wrong_emphasis"]:
        assert len(row["summary"].split()) >= LONGER * len(row["reference"].split())


class Rule(Judge):
    """Chooses by a rule of two texts."""

    about = About(kind="rule", name="a rule", is_llm=False, note="for tests")

    def __init__(self, rule):
        self.rule = rule

    def reply(self, comparison):
        return Reply(choice=self.rule(comparison.first, comparison.second), text="")


def first_shown(first, second):
    return "A"


def always_tie(first, second):
    return "tie"


def nothing_usable(first, second):
    return None


def shorter(first, second):
    return "A" if len(first.split()) < len(second.split()) else "B"


def longer(first, second):
    return "A" if len(first.split()) > len(second.split()) else "B"


def finish_summaries_of_world(config, posts):
    rows = []
    for number in range(posts):
        row = make_post(f"toy1-validation-{number}")
        written = post(row["id"], row["summary"], format_post(row))
        rows.append(written | {"summary": "x", "score": 0.0, "reference_score": 0.0})
    finish_summaries(config, sft=rows)


@pytest.mark.parametrize(
    ("rule", "failed"),
    [
        (first_shown, NEGATIVE_CONTROLS),
        (always_tie, NEGATIVE_CONTROLS),
        (nothing_usable, NEGATIVE_CONTROLS),
        (shorter, ["truncated", "title"]),
        (longer, LONG_AND_ON_TOPIC),
    ],
)
def test_a_judge_that_sees_no_quality_fails(runs, monkeypatch, rule, failed):
    config = make_config("tiny").changed(checks=Checks(control_posts=100))
    finish_summaries_of_world(config, posts=100)
    monkeypatch.setattr(controls, "make_judge", lambda config, policies: Rule(rule))

    result = judge_controls(config)

    assert set(failed) <= set(result["failed"])
    assert "reference" not in result["failed"]  # the protocol ties without asking


# -- the built-in judge ----------------------------------------------------------------------------


def test_the_built_in_judge_passes_every_control(runs):
    config = make_config("tiny")
    finish_summaries_of_world(config, posts=40)

    result = judge_controls(config)

    assert result["failed"] == []
    for control in result["controls"].values():
        assert control["passed"]


def test_the_stage_writes_its_result_and_its_judgements(runs):
    config = make_config("tiny")
    finish_summaries_of_world(config, posts=40)

    result = judge_controls(config)

    folder = stage_folder(config, "controls")
    rows = read_lines(folder / "judgements.jsonl")
    assert (read_manifest(folder) or {})["results"] == result
    assert len(rows) == sum(control["judgements"] for control in result["controls"].values())


def test_a_reference_ties_with_itself_without_a_question(runs):
    config = make_config("tiny")
    finish_summaries_of_world(config, posts=40)

    judge_controls(config)

    rows = read_lines(stage_folder(config, "controls") / "judgements.jsonl")
    rows_of_reference = [row for row in rows if row["policy"] == "reference"]
    assert rows_of_reference
    for row in rows_of_reference:
        assert row["verdict"] == "tie"
        assert "not asked" in row["reply"]
