"""The judges: what they prefer, what they refuse, and what they never pay for twice."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from eval.judge import comparison_of, judge_summaries, judgement, main, make_judge
from eval.offline_judges import FactsJudge, RewardModelJudge
from eval.reply_parser import parse_choice
from eval.verdicts import Choice, Judge, Reply, judge_pair
from stages import config as settings
from stages.config import UserError
from stages.presets import make_config
from stages.runs import open_stage, read_lines, read_manifest
from stages.toy import CLAUSES, facts_of, make_post

POST = "toy1-validation-7"
GOOD = "Comparison: the first one is accurate.\nPreferred: A"


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "RUNS", tmp_path / "runs")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    for name in ("OPENAI_BASE_URL", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return settings.RUNS


def told(**wrong: str) -> str:
    """A complete summary of POST, with the given facts told wrongly."""
    words = {**vars(facts_of(POST)), **wrong}
    event = CLAUSES["event"] + CLAUSES["when"]
    return ". ".join([event, CLAUSES["feeling"], CLAUSES["ask"] + "?"]).format(**words)


def row(post_id: str, summary: str, reference: str) -> dict[str, Any]:
    return {"id": post_id, "query": f"POST: {post_id}", "summary": summary, "reference": reference}


def judge_one(judge: Judge, policy: str, one: dict[str, Any], order: str) -> dict[str, Any]:
    """What the stage does with one summary in one order."""
    reply = judge_pair(judge, *comparison_of(one, order))
    return judgement(judge.about, policy, one, order, reply)


def finish_summaries(config, **policies) -> None:
    with open_stage(config, "summaries") as run:
        for policy, rows in policies.items():
            for one in rows:
                run.append(f"{policy}.jsonl", one)
        run.finish({})


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


class Fixed:
    """A judge that always says the same, and keeps what it was shown."""

    about = FactsJudge.about

    def __init__(self, choice: Choice | None) -> None:
        self.choice = choice
        self.shown: list[tuple[str, str]] = []

    def compare(self, post_id, query, first, second):
        self.shown.append((first, second))
        return Reply(choice=self.choice, text="so it is")


def test_a_verdict_names_the_author_whichever_was_shown_first_even_of_an_empty_text():
    judges, one = [Fixed("A"), Fixed("B"), Fixed("tie"), Fixed(None)], row("p", "", "theirs")
    for order, expected in (
        ("policy_first", ["policy", "reference", "tie", "unjudged"]),
        ("reference_first", ["reference", "policy", "tie", "unjudged"]),
    ):
        assert [judge_one(judge, "ppo", one, order)["verdict"] for judge in judges] == expected
    assert judges[0].shown == [("", "theirs"), ("theirs", "")]


def test_identical_texts_tie_without_a_question():
    judge, one = Fixed("A"), row("p", "the  same\ntext", "the same text ")
    judged = judge_one(judge, "ppo", one, "policy_first")
    assert judged["verdict"] == "tie"
    assert judge.shown == []
    assert "identical" in judged["reply"]


def test_the_facts_judge_prefers_more_right_facts_fewer_wrong_ones_and_no_rambling():
    judge, facts = FactsJudge(), facts_of(POST)
    liar = "uncle" if facts.who != "uncle" else "aunt"
    event = CLAUSES["event"].format(**vars(facts))
    better_to_worse = [told(), told(who=liar), event, "Nothing happened.", "word " * 30]
    for better, worse in pairwise(better_to_worse):
        assert judge.compare(POST, "", better, worse).choice == "A"
        assert judge.compare(POST, "", worse, better).choice == "B"
    assert judge.compare(POST, "", event, event + " Well.").choice == "tie"
    reply = judge.compare(POST, "", told(), told(who=liar))  # six right; five right, one wrong
    assert reply.text == "[facts judge, not an LLM] A 6.0, B 4.0"


def test_swapping_the_texts_swaps_the_facts_judges_verdict_on_real_posts():
    mirror: dict[Choice | None, Choice] = {"A": "B", "B": "A", "tie": "tie"}
    posts = [make_post(f"toy1-validation-{k}") for k in range(40)]
    choices = set()
    for post, other in zip(posts, posts[1:] + posts[:1], strict=True):
        for text in (other["summary"], post["title"], post["post"]):
            there = FactsJudge().compare(post["id"], "", post["summary"], text)
            back = FactsJudge().compare(post["id"], "", text, post["summary"])
            assert back.choice == mirror[there.choice]
            choices.add(there.choice)
    assert "A" in choices


def test_the_facts_judge_refuses_a_post_that_it_does_not_know():
    with pytest.raises(UserError, match="t3_abc"):
        FactsJudge().compare("t3_abc", "", "one", "two")


def test_the_reward_model_judge_follows_the_recorded_scores():
    low = {**row("p", "ours", "theirs"), "score": -1.0, "reference_score": 0.5}
    high = {**row("p", "better", "theirs"), "score": 2.0, "reference_score": 0.5}
    broken = {**row("q", "ours", "theirs"), "score": float("nan"), "reference_score": 0.5}
    judge = RewardModelJudge([low, high, broken])
    assert judge.compare("p", "", "ours", "theirs").choice == "B"
    assert judge.compare("p", "", "theirs", "ours").choice == "A"
    assert judge.compare("p", "", "better", "theirs").choice == "A"
    assert judge.compare("q", "", "ours", "theirs").choice is None


def test_judges_that_are_no_llm_say_so_in_every_row():
    one = {**row(POST, told(), "Nothing."), "score": 1.0, "reference_score": 0.0}
    for judge in (FactsJudge(), RewardModelJudge([one])):
        assert not judge.about.is_llm
        for summary in (told(), "Nothing."):
            judged = judge_one(judge, "ppo", {**one, "summary": summary}, "policy_first")
            assert "not an LLM" in judged["judge"]
            assert "not an LLM" in judged["reply"]
            assert judged["model"] == ""
        assert "not an LLM" in judge.about.note
    assert "optimistic proxy" in RewardModelJudge.about.note


@contextmanager
def serving(answer: Callable[[int, Any], tuple[int, Any]]) -> Iterator[SimpleNamespace]:
    """A chat server's `url` and `requests`; `answer(number, request)` gives status and body."""
    server, lock = SimpleNamespace(requests=[]), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(server.requests)
                server.requests.append(body)
            known = self.path == "/v1/chat/completions"
            status, reply = answer(number, body) if known else (404, {})
            content = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
            kind = "text/html" if isinstance(reply, str) else "application/json"
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_port}/v1"
        threading.Thread(target=http.serve_forever, args=(0.01,)).start()
        try:
            yield server
        finally:
            http.shutdown()


def chat(text: str | None, finish_reason: str = "stop") -> tuple[int, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    completion = {"id": "1", "object": "chat.completion", "created": 0, "choices": [choice]}
    return 200, {**completion, "model": "judge-2024-01-01"}


def llm_config(server: SimpleNamespace, **changes):
    judge = settings.Judge(model="judge", base_url=server.url, max_tokens=100, concurrency=2)
    return replace(make_config("tiny"), judge=replace(judge, **changes))


def ask(server: SimpleNamespace, **changes) -> Reply:
    return make_judge(llm_config(server, **changes), {}).compare("p", "the post", "one", "two")


def test_the_llm_is_shown_post_and_summaries_and_its_answer_is_recorded():
    with serving(lambda number, body: chat(GOOD)) as server:
        reply = ask(server, temperature=0.5)
    assert reply == Reply(choice="A", text=GOOD, model="judge-2024-01-01", finish_reason="stop")
    (request,) = server.requests
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("judge", 0.5, 100)
    prompt = request["messages"][-1]["content"]
    assert prompt.index("the post\n</post>") < prompt.index(">\none\n<") < prompt.index(">\ntwo\n<")


@pytest.mark.parametrize("first", [(GOOD, "length"), ("I cannot say.", "stop"), (None, "length")])
def test_a_truncated_or_unusable_reply_is_asked_once_more_with_twice_the_budget(first):
    replies = [chat(*first), chat("Preferred: B")]
    with serving(lambda number, body: replies[number]) as server:
        assert ask(server).choice == "B"
    assert [request["max_tokens"] for request in server.requests] == [100, 200]


def test_a_reply_that_stays_unusable_is_unjudged():
    with serving(lambda number, body: chat("Both have merit.")) as server:
        judge = make_judge(llm_config(server), {})
        judged = judge_one(judge, "ppo", row("p", "ours", "theirs"), "policy_first")
    assert judged["verdict"] == "unjudged"
    assert judged["reply"] == "Both have merit."
    assert len(server.requests) == 2


def test_what_was_answered_is_not_paid_for_again():
    with serving(lambda number, body: chat(GOOD)) as server:
        first = ask(server)
        assert ask(server) == first
        assert len(server.requests) == 1
        ask(server, temperature=1.0)
        ask(server, model="other")
        make_judge(llm_config(server), {}).compare("p", "the post", "two", "one")
        assert len(server.requests) == 4


def test_an_unusable_answer_is_paid_for_again_only_with_a_larger_budget():
    with serving(lambda number, body: chat("Hm.", "length")) as server:
        # Asked with 100 and 200; nothing; 400 (200 is known); 800 (400 is known).
        for budget, requests in ((100, 2), (100, 2), (200, 3), (400, 4)):
            assert ask(server, max_tokens=budget).choice is None
            assert len(server.requests) == requests


def test_a_line_cut_off_by_a_kill_costs_only_that_reply(runs):
    log = runs / "judge_cache" / "judge.jsonl"
    with serving(lambda number, body: chat(GOOD)) as server:
        ask(server)
        whole = log.read_bytes()
        log.write_bytes(whole + whole[:40])
        for _ in range(2):
            judge = make_judge(llm_config(server), {})
            judge.compare("p", "another post", "one", "two")
            judge.compare("p", "the post", "one", "two")
            assert len(server.requests) == 2


def test_the_log_of_a_model_with_a_slash_stays_in_its_folder(runs):
    with serving(lambda number, body: chat(GOOD)) as server:
        ask(server, model="../org/model")
    assert [path.name for path in (runs / "judge_cache").iterdir()] == [".._org_model.jsonl"]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_rate_limits_and_server_errors_are_tried_again(status):
    replies = [(status, {"error": {"message": "later"}})] * 3 + [chat(GOOD)]
    with serving(lambda number, body: replies[number]) as server:
        assert ask(server).choice == "A"
    assert len(server.requests) == 4


REFUSALS = {400: "temperature", 401: "API_KEY", 402: "credit", 403: "access", 404: "judge.model"}


@pytest.mark.parametrize(("status", "hint"), REFUSALS.items())
def test_a_refusal_stops_at_once_with_one_line(status, hint):
    refusal = (status, {"error": {"message": "no\nway"}})
    with serving(lambda number, body: refusal) as server, pytest.raises(UserError) as stop:
        ask(server)
    assert len(server.requests) == 1
    assert hint in str(stop.value)
    assert str(status) in str(stop.value)
    assert "\n" not in str(stop.value)


def test_an_outage_stops_the_evaluation_instead_of_counting_as_unjudged(monkeypatch):
    monkeypatch.setattr("eval.openai_judge.MAX_RETRIES", 2)
    outage = (500, {"error": {"message": "down"}})
    with serving(lambda number, body: outage) as server, pytest.raises(UserError, match="again"):
        ask(server)
    assert len(server.requests) == 3


def test_a_web_page_is_not_taken_for_a_reply():
    page = (200, "<html>hello</html>")
    with serving(lambda number, body: page) as server, pytest.raises(UserError, match="base_url"):
        ask(server)


def test_a_missing_key_is_named_with_the_way_round_it(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(UserError, match=r"OPENAI_API_KEY.*judge.kind=reward_model"):
        make_judge(make_config("pythia-1b"), {})


def test_the_stage_judges_every_policy_post_and_order_and_says_who_judged(runs, capsys):
    config = make_config("tiny")
    finish_summaries(
        config,
        ppo=[row(POST, told(), "Nothing."), row("toy1-validation-8", "", "On monday.")],
        sft=[row(POST, "Nothing.", "Nothing."), row("toy1-validation-8", "Hm.", "Hm what.")],
    )
    main(["--preset", "tiny"])
    folder = runs / "tiny" / "seed44413" / "judge"
    rows = read_lines(folder / "judgements.jsonl")
    posts, orders = (POST, "toy1-validation-8"), ("policy_first", "reference_first")
    assert [(one["policy"], one["id"], one["order"]) for one in rows] == [
        (policy, post, order) for policy in ("sft", "ppo") for post in posts for order in orders
    ]
    assert [one["verdict"] for one in rows[:6]] == ["tie"] * 4 + ["policy"] * 2
    assert all("not an LLM" in one["judge"] for one in rows)
    results = (read_manifest(folder) or {})["results"]
    assert (results["judge"]["kind"], results["judge"]["is_llm"]) == ("facts", False)
    assert (results["judgements"], results["unjudged"], results["share_first"]) == (8, 0.0, 0.5)
    assert "not an LLM" in capsys.readouterr().out


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
    found = read_lines(runs / "tiny" / "seed44413" / "judge" / "judgements.jsonl")
    assert [one["id"] for one in found] == [f"p{k}" for k in range(4) for _ in range(2)]
    verdicts = ["policy", "reference"] + ["reference", "policy"] + ["policy", "reference"] * 2
    assert [one["verdict"] for one in found] == verdicts
    assert results["models"] == ["judge-2024-01-01"]
    assert (results["judge"]["name"], results["judge"]["is_llm"]) == ("judge", True)
    assert results["share_first"] == 0.75  # of eight decisions, two were for B


def test_a_stopped_evaluation_goes_on_where_it_stopped(runs):
    """20 posts in both orders; the server's credit ends after 7 replies, then is renewed."""
    rows = [row(f"p{k}", f"ours {k}", "theirs") for k in range(20)]
    credit = 7

    def answer(number, body):
        return chat(GOOD) if number < credit else (402, {"error": {"message": "pay"}})

    with serving(answer) as server:
        config = llm_config(server)
        finish_summaries(config, ppo=rows)
        with pytest.raises(UserError, match="402"):
            judge_summaries(config)
        stopped = len(server.requests)
        assert stopped < 20  # 7 replies and a few under way, not 40
        assert not (runs / "tiny" / "seed44413" / "judge").exists()
        credit = 1000
        assert judge_summaries(config)["unjudged"] == 0
        assert len(server.requests) - stopped == 40 - 7


def test_the_command_ends_with_one_line_where_summaries_are_missing(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--preset", "tiny"])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "summaries is missing" in line
