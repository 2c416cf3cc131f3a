"""The judges' rules, the verdicts that the stage writes, and the judgements that it keeps."""

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
from tests.lib.built_in_summaries import WANTED_FACTS, summary_with
from tests.lib.chat_server import GOOD, chat, llm_config, prompt_of, serving
from tests.lib.fabricated_runs import finish_summaries
from tests.lib.make_stages import run_module

pytestmark = pytest.mark.usefixtures("judge_environment")

ORDERS = ("policy_first", "reference_first")


def row(post_id: str, summary: str, reference: str) -> dict[str, Any]:
    return {"id": post_id, "query": f"POST: {post_id}", "summary": summary, "reference": reference}


# -- one judgement ---------------------------------------------------------------------------------


class Fixed(Judge):
    """A judge that always says the same, and records the texts that it was shown."""

    about = FactsJudge.about

    def __init__(self, choice: Choice | None) -> None:
        self.choice = choice
        self.shown: list[tuple[str, str]] = []

    def reply(self, comparison):
        self.shown.append((comparison.first, comparison.second))
        return Reply(choice=self.choice, text="so it is")


def judge_row(judge: Judge, summary_row: dict[str, Any], order: str) -> dict[str, Any]:
    """What the stage writes about one summary in one order."""
    task = Task(policy="ppo", row=summary_row, order=order)
    return judgement(judge.about, task, judge_pair(judge, task.comparison))


@pytest.mark.parametrize(
    ("choice", "order", "verdict"),
    [
        ("A", "policy_first", "policy"),
        ("B", "policy_first", "reference"),
        ("tie", "policy_first", "tie"),
        (None, "policy_first", "unjudged"),
        ("A", "reference_first", "reference"),
        ("B", "reference_first", "policy"),
        ("tie", "reference_first", "tie"),
        (None, "reference_first", "unjudged"),
    ],
)
def test_a_verdict_names_the_author_whichever_text_was_shown_first(choice, order, verdict):
    judged = judge_row(Fixed(choice), row("p", "ours", "theirs"), order)
    assert judged["verdict"] == verdict


def test_an_empty_summary_is_shown_to_the_judge():
    judge = Fixed("A")

    for order in ORDERS:
        judge_row(judge, row("p", "", "theirs"), order)

    assert judge.shown == [("", "theirs"), ("theirs", "")]


def test_identical_texts_tie_without_a_question():
    judge = Fixed("A")

    judged = judge_row(judge, row("p", "the  same\ntext", "the same text "), "policy_first")

    assert judged["verdict"] == "tie"
    assert "identical" in judged["reply"]
    assert judge.shown == []


# -- the facts judge -------------------------------------------------------------------------------

POST = "toy1-validation-7"
COMPLETE = summary_with(POST, "event", *WANTED_FACTS)
WRONG_PERSON = "aunt" if facts_of(POST).words["who"] == "uncle" else "uncle"
WITH_ERROR = summary_with(POST, "event", *WANTED_FACTS, who=WRONG_PERSON)
ONLY_EVENT = summary_with(POST, "event")


def choice_between(first: str, second: str) -> Choice | None:
    """The choice of the facts judge."""
    return FactsJudge().reply(Comparison(POST, "", first, second)).choice


def test_the_facts_judge_says_in_one_sentence_what_it_does():
    assert FactsJudge.about.note == (
        "a fixed rule that counts facts, not an LLM; a summary gains 1 point for each correct fact"
        " that readers of the post's subreddit want, and loses 1 for each wrong fact, 0.5 for each"
        " correct fact that they do not want, and 0.25 for each word beyond 11; the summary with"
        " more points wins"
    )


def test_the_facts_judge_prefers_the_summary_with_more_points():
    unwanted_facts = [fact for fact in OPTIONAL if fact not in facts_of(POST).wanted]
    with_unwanted_fact = summary_with(POST, "event", unwanted_facts[0])
    too_long = "word " * 30
    best_to_worst = [
        COMPLETE,
        WITH_ERROR,
        ONLY_EVENT,
        with_unwanted_fact,
        "Nothing happened.",
        too_long,
    ]
    for better, worse in pairwise(best_to_worst):
        assert choice_between(better, worse) == "A"
        assert choice_between(worse, better) == "B"


def test_the_facts_judge_ties_summaries_with_equal_points():
    assert choice_between(ONLY_EVENT, f"{ONLY_EVENT} Well.") == "tie"


def test_the_facts_judge_shows_its_points():
    reply = FactsJudge().reply(Comparison(POST, "", COMPLETE, WITH_ERROR))
    # 6 facts are right; 5 are right and 1 is wrong.
    assert reply.text == "[facts judge, not an LLM] A 6.0, B 4.0"


# -- the run's own reward model --------------------------------------------------------------------


def scored_row(post_id: str, summary: str, score: float) -> dict[str, Any]:
    return row(post_id, summary, "theirs") | {"score": score, "reference_score": 0.5}


@pytest.fixture
def reward_model_judge():
    return RewardModelJudge(
        [
            scored_row("p", "worse", -1.0),
            scored_row("p", "better", 2.0),
            scored_row("q", "unscored", float("nan")),
        ]
    )


@pytest.mark.parametrize(
    ("post_id", "first", "second", "choice"),
    [
        ("p", "worse", "theirs", "B"),
        ("p", "theirs", "worse", "A"),
        ("p", "better", "theirs", "A"),
        ("q", "unscored", "theirs", None),
    ],
)
def test_the_reward_model_judge_prefers_the_higher_recorded_score(
    reward_model_judge, post_id, first, second, choice
):
    question = Comparison(post_id=post_id, query="", first=first, second=second)
    assert reward_model_judge.reply(question).choice == choice


def test_a_reward_function_that_judges_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    settings = ("judge.kind=reward_model", "reward.function=mine:asks", "ppo.critic_init=zero")
    judge = judge_stage.make_judge(make_config("tiny", name="mine", overrides=settings), {})
    assert judge.about.name == "reward function mine:asks of this run, not an LLM"


# -- the stage -------------------------------------------------------------------------------------


@pytest.fixture
def facts_folder(runs):
    """The folder of the stage after it has judged two posts of two policies.

    On the first post, sft has the text of the reference and ppo has all facts; on the second one,
    no text says a fact of the post.
    """
    other_post = "toy1-validation-8"
    config = make_config("tiny")
    finish_summaries(
        config,
        ppo=[row(POST, COMPLETE, "Nothing."), row(other_post, "", "On monday.")],
        sft=[row(POST, "Nothing.", "Nothing."), row(other_post, "Hm.", "Hm what.")],
    )
    run_module(judge_stage, ["--preset", "tiny"])
    return stage_folder(config, "judge")


def test_the_stage_judges_every_post_of_every_policy_in_both_orders(facts_folder):
    rows = read_lines(facts_folder / "judgements.jsonl")

    assert [(row["policy"], row["id"], row["order"]) for row in rows] == [
        ("sft", "toy1-validation-7", "policy_first"),
        ("sft", "toy1-validation-7", "reference_first"),
        ("sft", "toy1-validation-8", "policy_first"),
        ("sft", "toy1-validation-8", "reference_first"),
        ("ppo", "toy1-validation-7", "policy_first"),
        ("ppo", "toy1-validation-7", "reference_first"),
        ("ppo", "toy1-validation-8", "policy_first"),
        ("ppo", "toy1-validation-8", "reference_first"),
    ]
    verdicts = [row["verdict"] for row in rows]
    assert verdicts[:4] == ["tie", "tie", "tie", "tie"]
    assert verdicts[4:6] == ["policy", "policy"]


def test_the_stage_says_who_judged(facts_folder):
    for judged in read_lines(facts_folder / "judgements.jsonl"):
        assert "not an LLM" in judged["judge"]
    results = (read_manifest(facts_folder) or {})["results"]
    assert results["judge"]["kind"] == "facts"
    assert results["judge"]["is_llm"] is False


def test_the_stage_counts_its_judgements(facts_folder):
    results = (read_manifest(facts_folder) or {})["results"]
    assert results["judgements"] == 8
    assert results["unjudged"] == 0.0
    assert results["share_first"] == 0.5


def test_the_stage_says_how_long_it_took(capsys, facts_folder):
    # The first argument is set up first, so it captures what the stage prints.
    assert "judge: done in" in capsys.readouterr().err


@pytest.fixture
def config_after_slow_replies(runs):
    """The config of a run whose LLM judge gets the reply about the first of four posts last.

    The server prefers the second text for post 1, and the first text for all other posts.
    """

    def answer(number, body):
        prompt = prompt_of(body)
        if "post 0." in prompt:
            time.sleep(0.2)
        if "post 1." in prompt:
            return chat("Preferred: B")
        return chat(GOOD)

    rows = [row(f"p{k}", f"ours {k}", "theirs") | {"query": f"post {k}."} for k in range(4)]
    with serving(answer) as server:
        config = llm_config(server, concurrency=4)
        finish_summaries(config, ppo=rows)
        judge_summaries(config)
    return config


def test_judgements_have_the_order_of_the_rows_whichever_reply_comes_first(
    config_after_slow_replies,
):
    folder = stage_folder(config_after_slow_replies, "judge")
    rows = read_lines(folder / "judgements.jsonl")
    assert [(row["id"], row["verdict"]) for row in rows] == [
        ("p0", "policy"),
        ("p0", "reference"),
        ("p1", "reference"),
        ("p1", "policy"),
        ("p2", "policy"),
        ("p2", "reference"),
        ("p3", "policy"),
        ("p3", "reference"),
    ]


def test_the_results_of_an_llm_judge_name_its_models(config_after_slow_replies):
    manifest = read_manifest(stage_folder(config_after_slow_replies, "judge")) or {}
    results = manifest["results"]
    assert results["models"] == ["judge-2024-01-01"]
    assert results["judge"]["name"] == "judge"
    assert results["judge"]["is_llm"] is True
    assert results["share_first"] == 0.75  # of eight decisions, two were for the second text


# -- judgements of an interrupted stage ------------------------------------------------------------


def task(post_id: str, order: str) -> Task:
    return Task(policy="ppo", row=row(post_id, "ours", "theirs"), order=order)


def tie(post_id: str, order: str) -> dict[str, Any]:
    return {"policy": "ppo", "id": post_id, "order": order, "verdict": "tie"}


TASKS = [
    task("p", "policy_first"),
    task("p", "reference_first"),
    task("q", "policy_first"),
    task("q", "reference_first"),
]
JUDGEMENTS = [
    tie("p", "policy_first"),
    tie("p", "reference_first"),
    tie("q", "policy_first"),
    tie("q", "reference_first"),
]


def write_rows(path, rows) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_the_judgements_of_an_interrupted_stage_are_kept(tmp_path):
    path = tmp_path / "judgements.jsonl"
    write_rows(path, JUDGEMENTS[:3])
    assert kept_judgements(path, TASKS) == JUDGEMENTS[:3]


def test_without_a_file_no_judgement_is_kept(tmp_path):
    assert kept_judgements(tmp_path / "none.jsonl", TASKS) == []


@pytest.mark.parametrize(
    "change",
    [
        {"order": "policy_first"},  # the other order
        {"order": "reference-first"},
        {"id": "q"},
        {"policy": "sft"},
        {"verdict": "A"},
        {"verdict": None},
    ],
)
def test_a_judgement_of_another_question_and_all_after_it_are_cut_off(tmp_path, change):
    first, second, third, fourth = JUDGEMENTS
    path = tmp_path / "judgements.jsonl"
    write_rows(path, [first, second | change, third, fourth])

    assert kept_judgements(path, TASKS) == [first]
    assert path.read_text() == f"{json.dumps(first)}\n"


def test_judgements_in_another_order_are_cut_off(tmp_path):
    first, second, third, fourth = JUDGEMENTS
    path = tmp_path / "judgements.jsonl"
    write_rows(path, [second, first, third, fourth])

    assert kept_judgements(path, TASKS) == []
