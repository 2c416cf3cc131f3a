"""The judges: what they prefer, what they refuse, and what they never pay for twice."""

import json
import time
from itertools import pairwise
from typing import Any

import pytest

from eval import judge as judge_stage
from eval.judge import Task, judge_summaries, judgement, kept_judgements
from eval.judges.offline import FactsJudge, RewardModelJudge
from eval.judges.protocol import Choice, Comparison, Judge, Reply, judge_pair
from stages.config.command_line import make_config
from stages.data.builtin import OPTIONAL, facts_of
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest, stage_folder
from tests.lib.chat_server import GOOD, chat, llm_config, serving
from tests.lib.fabricated_runs import finish_summaries
from tests.lib.make_stages import run_module
from tests.lib.told import NTH, told

POST = "toy1-validation-7"
COMPLETE = told(POST, "event", *NTH)


pytestmark = pytest.mark.usefixtures("judge_environment")


def row(post_id: str, summary: str, reference: str) -> dict[str, Any]:
    return {"id": post_id, "query": f"POST: {post_id}", "summary": summary, "reference": reference}


def judge_one(judge: Judge, policy: str, one: dict[str, Any], order: str) -> dict[str, Any]:
    """What the stage does with one summary in one order."""
    task = Task(policy=policy, row=one, order=order)
    return judgement(judge.about, task, judge_pair(judge, task.comparison))


class Fixed(Judge):
    """A judge that always says the same, and keeps what it was shown."""

    about = FactsJudge.about

    def __init__(self, choice: Choice | None) -> None:
        self.choice = choice
        self.shown: list[tuple[str, str]] = []

    def reply(self, comparison):
        self.shown.append((comparison.first, comparison.second))
        return Reply(choice=self.choice, text="so it is")


def test_a_verdict_names_the_author_whichever_was_shown_first_even_of_an_empty_text():
    judges = [Fixed("A"), Fixed("B"), Fixed("tie"), Fixed(None)]
    one = row("p", "", "theirs")
    for order, expected in (
        ("policy_first", ["policy", "reference", "tie", "unjudged"]),
        ("reference_first", ["reference", "policy", "tie", "unjudged"]),
    ):
        assert [judge_one(judge, "ppo", one, order)["verdict"] for judge in judges] == expected
    assert judges[0].shown == [("", "theirs"), ("theirs", "")]


def test_identical_texts_tie_without_a_question():
    judge = Fixed("A")
    one = row("p", "the  same\ntext", "the same text ")
    judged = judge_one(judge, "ppo", one, "policy_first")
    assert judged["verdict"] == "tie"
    assert judge.shown == []
    assert "identical" in judged["reply"]


def test_the_facts_judge_says_in_one_sentence_what_it_does():
    assert FactsJudge.about.note == (
        "a fixed rule that counts facts, not an LLM; a summary gains 1 point for each correct fact"
        " that readers of the post's subreddit want, and loses 1 for each wrong fact, 0.5 for each"
        " correct fact that they do not want, and 0.25 for each word beyond 11; the summary with"
        " more points wins"
    )


def test_the_facts_judge_prefers_what_is_wanted_to_what_is_not_wrong_or_too_long():
    judge = FactsJudge()
    facts = facts_of(POST)
    liar = "uncle" if facts.words["who"] != "uncle" else "aunt"
    event = told(POST, "event")
    lie = told(POST, "event", *NTH, who=liar)
    unwanted = told(POST, "event", next(slot for slot in OPTIONAL if slot not in facts.wanted))
    better_to_worse = [COMPLETE, lie, event, unwanted, "Nothing happened.", "word " * 30]
    for better, worse in pairwise(better_to_worse):
        assert judge.reply(Comparison(POST, "", better, worse)).choice == "A"
        assert judge.reply(Comparison(POST, "", worse, better)).choice == "B"
    assert judge.reply(Comparison(POST, "", event, event + " Well.")).choice == "tie"
    reply = judge.reply(Comparison(POST, "", COMPLETE, lie))  # 6 right; 5 right, 1 wrong
    assert reply.text == "[facts judge, not an LLM] A 6.0, B 4.0"


def test_the_reward_model_judge_follows_the_recorded_scores():
    low = {**row("p", "ours", "theirs"), "score": -1.0, "reference_score": 0.5}
    high = {**row("p", "better", "theirs"), "score": 2.0, "reference_score": 0.5}
    broken = {**row("q", "ours", "theirs"), "score": float("nan"), "reference_score": 0.5}
    judge = RewardModelJudge([low, high, broken])
    assert judge.reply(Comparison("p", "", "ours", "theirs")).choice == "B"
    assert judge.reply(Comparison("p", "", "theirs", "ours")).choice == "A"
    assert judge.reply(Comparison("p", "", "better", "theirs")).choice == "A"
    assert judge.reply(Comparison("q", "", "ours", "theirs")).choice is None


def test_a_reward_function_that_judges_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    settings = ("judge.kind=reward_model", "reward.function=mine:asks", "ppo.critic_init=zero")
    judge = judge_stage.make_judge(make_config("tiny", name="mine", overrides=settings), {})
    assert judge.about.name == "reward function mine:asks of this run, not an LLM"


def test_the_stage_judges_every_policy_post_and_order_and_says_who_judged(runs, capsys):
    config = make_config("tiny")
    finish_summaries(
        config,
        ppo=[row(POST, COMPLETE, "Nothing."), row("toy1-validation-8", "", "On monday.")],
        sft=[row(POST, "Nothing.", "Nothing."), row("toy1-validation-8", "Hm.", "Hm what.")],
    )
    run_module(judge_stage, ["--preset", "tiny"])
    folder = stage_folder(config, "judge")
    rows = read_lines(folder / "judgements.jsonl")
    posts = (POST, "toy1-validation-8")
    orders = ("policy_first", "reference_first")
    assert [(one["policy"], one["id"], one["order"]) for one in rows] == [
        (policy, post, order) for policy in ("sft", "ppo") for post in posts for order in orders
    ]
    assert [one["verdict"] for one in rows[:6]] == ["tie"] * 4 + ["policy"] * 2
    assert all("not an LLM" in one["judge"] for one in rows)
    results = (read_manifest(folder) or {})["results"]
    assert (results["judge"]["kind"], results["judge"]["is_llm"]) == ("facts", False)
    assert (results["judgements"], results["unjudged"], results["share_first"]) == (8, 0.0, 0.5)
    assert "judge: done in" in capsys.readouterr().err


ORDERS = ("policy_first", "reference_first")
TASKS = [
    Task(policy="ppo", row=row(post_id, "ours", "theirs"), order=order)
    for post_id in ("p", "q")
    for order in ORDERS
]
KEPT = [
    {"policy": "ppo", "id": post_id, "order": order, "verdict": "tie"}
    for post_id in ("p", "q")
    for order in ORDERS
]


def write_rows(path, rows) -> None:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in rows))


def test_the_judgements_of_an_interrupted_stage_are_kept(tmp_path):
    path = tmp_path / "judgements.jsonl"
    write_rows(path, KEPT[:3])
    assert kept_judgements(path, TASKS) == KEPT[:3]
    assert kept_judgements(tmp_path / "none.jsonl", TASKS) == []


@pytest.mark.parametrize(
    "change",
    [
        {"order": "policy_first"},  # of the other order
        {"order": "reference-first"},
        {"id": "q"},
        {"policy": "sft"},
        {"verdict": "A"},
        {"verdict": None},
    ],
)
def test_a_judgement_of_another_question_and_all_after_it_are_cut_off(tmp_path, change):
    path = tmp_path / "judgements.jsonl"
    write_rows(path, [KEPT[0], KEPT[1] | change, *KEPT[2:]])
    assert kept_judgements(path, TASKS) == KEPT[:1]
    assert path.read_text() == f"{json.dumps(KEPT[0])}\n"


def test_judgements_in_another_order_are_cut_off(tmp_path):
    path = tmp_path / "judgements.jsonl"
    write_rows(path, [KEPT[1], KEPT[0], *KEPT[2:]])
    assert kept_judgements(path, TASKS) == []


def test_the_stage_keeps_the_order_of_rows_whichever_reply_comes_first(runs):
    def answer(number, body):
        prompt = body["messages"][-1]["content"]
        time.sleep(0.2 * ("post 0." in prompt))
        return chat("Preferred: B" if "post 1." in prompt else GOOD)

    with serving(answer) as server:
        config = llm_config(server, concurrency=4)
        rows = [{**row(f"p{k}", f"ours {k}", "theirs"), "query": f"post {k}."} for k in range(4)]
        finish_summaries(config, ppo=rows)
        results = judge_summaries(config)
    found = read_lines(stage_folder(config, "judge") / "judgements.jsonl")
    assert [one["id"] for one in found] == [f"p{k}" for k in range(4) for _ in range(2)]
    verdicts = ["policy", "reference"] + ["reference", "policy"] + ["policy", "reference"] * 2
    assert [one["verdict"] for one in found] == verdicts
    assert results["models"] == ["judge-2024-01-01"]
    assert (results["judge"]["name"], results["judge"]["is_llm"]) == ("judge", True)
    assert results["share_first"] == 0.75  # of eight decisions, two were for B
