"""Controls: what is made of a post, when a judge passes, and a judge who fails is flagged."""

from dataclasses import replace

import pytest

from eval import controls
from eval.controls import control_rows, control_texts, describe, judge_controls
from eval.judges.protocol import About, Reply
from stages.finished import read_manifest, stage_folder
from stages.posts.toy import make_post
from stages.runs import open_stage
from stages.settings.command_line import make_config
from stages.settings.config import Checks, Judge
from stages.system.files import read_lines

QUERY = "SUBREDDIT: r/x\n\nTITLE: A title\n\nPOST: First. Then\nmore.\n\nTL;DR:"
NOT_THE_REFERENCE = ("truncated", "first_sentence", "title", "other_post")


def post(name, reference, query=QUERY):
    return {"id": name, "query": query, "reference": reference}


def test_each_control_is_what_it_says():
    me, other = post("a", "one two three four five"), post("b", "six seven")
    same = post("c", "one  two three four five")
    assert control_texts(me, [same, other]) == {
        "reference": "one two three four five",
        "truncated": "one two",
        "first_sentence": "First.",
        "title": "A title",
        "other_post": "six seven",
    }


def test_a_post_without_such_a_text_has_no_control_of_it():
    rows = control_rows([post("a", "one", "Article: no title")])
    assert {name for name in rows if rows[name]} == {"reference"}


class Rule:
    """A judge that chooses by a rule of its own."""

    about = About(kind="rule", name="a rule", is_llm=False, note="for tests")

    def __init__(self, rule):
        self.rule = rule
        self.asked = 0

    def compare(self, post_id, query, first, second):
        self.asked += 1
        return Reply(choice=self.rule(first, second), text="")


def finish_summaries(config, posts=40):
    with open_stage(config, "summaries") as run:
        for number in range(posts):
            row = make_post(f"toy1-validation-{number}")
            query = f"SUBREDDIT: r/x\n\nTITLE: {row['title']}\n\nPOST: {row['post']}\n\nTL;DR:"
            scores = {"summary": "x", "score": 0.0, "reference_score": 0.0}
            line = {"id": row["id"], "query": query, "reference": row["summary"]}
            run.append("sft.jsonl", line | scores)
        run.finish({})


def judged_by(monkeypatch, rule, **checks):
    config = replace(make_config("tiny"), checks=Checks(**checks))
    finish_summaries(config)
    judge = Rule(rule)
    monkeypatch.setattr(controls, "make_judge", lambda config, policies: judge)
    return judge, judge_controls(config)


def test_the_built_in_judge_passes_every_control(runs):
    config = make_config("tiny")
    finish_summaries(config)
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
        (lambda first, second: "A" if len(first) < len(second) else "B", ["truncated", "title"]),
        (lambda first, second: None, NOT_THE_REFERENCE),  # never a usable reply
    ],
)
def test_a_judge_who_sees_no_quality_fails(runs, monkeypatch, rule, failed):
    _, found = judged_by(monkeypatch, rule)
    assert set(failed) <= set(found["failed"])
    assert "reference" not in found["failed"]  # the protocol ties without asking


def test_only_so_many_posts_are_asked_about(runs, monkeypatch):
    judge, found = judged_by(monkeypatch, lambda first, second: "B", control_posts=5)
    assert found["posts"] == 5
    assert judge.asked <= 5 * 2 * len(NOT_THE_REFERENCE)


def test_the_reward_model_knows_no_new_texts_and_the_page_says_so(runs):
    config = replace(make_config("tiny"), judge=Judge(kind="reward_model"))
    finish_summaries(config, posts=3)
    found = judge_controls(config)
    assert found["controls"]["reference"]["passed"] is True
    for name in NOT_THE_REFERENCE:
        assert found["controls"][name]["passed"] is None
        assert found["controls"][name]["why"] == "this judge knows no new texts"
    assert found["failed"] == []


def test_too_few_posts_to_be_sure_are_no_pass():
    rows = {"title": [post(f"p{k}", "one two") | {"summary": "three"} for k in range(3)]}
    judgements = [
        {"policy": "title", "id": f"p{k}", "order": order, "verdict": "reference"}
        for k in range(3)
        for order in ("policy_first", "reference_first")
    ]
    found = describe("title", judgements, rows)
    assert found["preferred"] == 0.0
    assert found["high"] > 0.5  # Wilson for 0 of 3
    assert found["passed"] is False
