"""The judge behind a server: what it asks, what it refuses, and what it waits for."""

import re
import time
from typing import Any

import pytest

from eval.judge import make_judge
from eval.judges.protocol import Comparison, Reply, judge_all
from stages.settings.config import UserError
from stages.settings.judge_models import is_model
from tests.chat_server import GOOD, ask, chat, llm_config, serving

pytestmark = pytest.mark.usefixtures("judge_environment")
LATER = (429, {"error": {"message": "later"}})


def test_the_llm_is_shown_post_and_summaries_and_its_answer_is_recorded():
    with serving(lambda number, body: chat(GOOD)) as server:
        reply = ask(server, temperature=0.5, structured="off")
    assert reply == Reply(
        choice="A",
        text=GOOD,
        model="judge-2024-01-01",
        finish_reason="stop",
        requested_model="judge",
        prompt_hash=reply.prompt_hash,
        prompt_tokens=1000,
        completion_tokens=100,
    )
    assert len(reply.prompt_hash) == 16
    (request,) = server.requests
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("judge", 0.5, 100)
    prompt = request["messages"][-1]["content"]
    assert prompt.index("\nthe post\n</post-") < prompt.index("\none\n<") < prompt.index("\ntwo\n<")


def refusing(number, body):
    """A reasoning model behind an old server: no schema, no effort, no temperature, another name of
    the budget, and the fields that are too many are not named."""
    for name, word in (("max_tokens", "max_completion_tokens"), ("temperature", "temperature")):
        if name in body:
            return 400, {"error": {"message": f"Unsupported parameter: use {word}"}}
    for name in ("reasoning_effort", "response_format"):
        if name in body:
            return 422, {"detail": "extra fields not permitted"}
    return chat(GOOD)


def test_what_a_server_refuses_is_left_out():
    with serving(refusing) as server:
        judge = make_judge(llm_config(server), {})
        assert judge.reply(Comparison("p", "the post", "one", "two")).choice == "A"
        assert len(server.requests) == 5
        assert set(server.requests[-1]) == {"model", "messages", "max_completion_tokens"}
        assert "its own temperature" in judge.about.note
        assert "no reasoning effort said, replies in plain text" in judge.about.note
        again = make_judge(llm_config(server), {})
        again.reply(Comparison("p", "the post", "one", "two"))
        assert len(server.requests) == 5  # a new process finds the reply
        assert again.about.note.endswith("all replies kept from before")


@pytest.mark.parametrize("first", [(GOOD, "length"), ("I cannot say.", "stop"), ("", "stop")])
def test_a_truncated_or_unusable_reply_is_asked_for_again_with_twice_the_budget(first):
    replies = [chat(*first), chat("Preferred: B")]
    with serving(lambda number, body: replies[number]) as server:
        assert ask(server).choice == "B"
    assert [request["max_tokens"] for request in server.requests] == [100, 200]
    with serving(lambda number, body: chat(*first)) as server:
        reply = ask(server, asks=3)
    assert (reply.choice, reply.text) == (None, first[0])
    assert [request["max_tokens"] for request in server.requests] == [100, 200, 400]


def test_a_dated_snapshot_is_the_model_and_a_smaller_sister_is_not():
    snapshots = ("gpt-4o", "gpt-4o-2024-08-06", "gpt-4o@main")
    sisters = ("gpt-4o-mini", "gpt-4o-mini-2024-07-18", "gpt-4", "")
    assert [name for name in (*snapshots, *sisters) if is_model("gpt-4o", name)] == [*snapshots]


def google(*spans: str) -> list[Any]:
    """Google's words for a used up quota by the minute or the day: the ids alone say which."""
    ids = [{"quotaId": f"GenerateRequestsPer{span}PerProjectPerModel"} for span in spans]
    message = "You exceeded your current quota, please check your plan. Please retry in 23.4s."
    return [{"error": {"code": 429, "message": message, "details": [{"violations": ids}]}}]


@pytest.mark.parametrize(
    "passing", [*((status, LATER[1]) for status in (408, 429, 500, 503)), (429, google("Minute"))]
)
def test_rate_limits_and_server_errors_are_tried_again(passing):
    replies = [passing] * 3 + [chat(GOOD)]
    with serving(lambda number, body: replies[number]) as server:
        assert ask(server).choice == "A"
    assert [request["max_tokens"] for request in server.requests] == [100] * 4


def test_requests_per_minute_is_a_limit_for_all_threads_and_tries_together():
    questions = [Comparison("p", f"post {k}.", "one", "two") for k in range(5)]
    with serving(lambda number, body: LATER if number == 0 else chat(GOOD)) as server:
        start = time.monotonic()
        judge = make_judge(llm_config(server, requests_per_minute=600), {})
        assert len(list(judge_all(judge, questions, 2))) == 5
    assert time.monotonic() - start >= 0.5  # five gaps of 0.1 s
    assert len(server.requests) == 6


REFUSALS = {400: "temperature", 401: "API_KEY", 402: "credit", 403: "access", 404: "judge.model"}
PLAIN = {"structured": "off", "reasoning_effort": "default"}
NO_SCHEMA = (400, {"error": {"message": "response_format is not supported"}})
ENDS: list[tuple[Any, dict[str, Any], str, int]] = [
    *(
        ((status, {"error": {"message": "no\nway"}}), PLAIN, f"{status}.*{hint}", 1)
        for status, hint in REFUSALS.items()
    ),
    (NO_SCHEMA, PLAIN | {"structured": "on"}, "400", 1),  # it was insisted on
    ((*LATER, {"Retry-After": "7200"}), {}, "7200 s", 1),
    ((500, {"error": {"message": "down"}}), {"max_retries": 2}, "replies are kept.*again", 3),
    ((200, "<html>hello</html>"), {"max_retries": 1}, "base_url", 2),
    (chat([{"type": "text", "text": "A"}]), {"max_retries": 1}, "no chat completion", 2),
]


@pytest.mark.parametrize(("answer", "changes", "said", "requests"), ENDS)
def test_what_no_try_mends_stops_with_one_line_and_is_never_unjudged(
    answer, changes, said, requests
):
    with serving(lambda number, body: answer) as server, pytest.raises(UserError) as stop:
        ask(server, **changes)
    assert len(server.requests) == requests
    assert re.search(said, str(stop.value))
    assert "\n" not in str(stop.value)


@pytest.mark.parametrize(
    ("said", "mend"),
    [
        ({"error": {"message": "You exceeded", "code": "insufficient_quota"}}, "no credit"),
        *((google(*spans), "is used up") for spans in (["Day"], ["Minute", "Day"], [])),
        ("Rate limit reached on requests per day (RPD): Limit 200. Try again in 7m.", "is used up"),
        ("Rate limit exceeded: free-models-per-day", "is used up"),
        ("Rate limit of 50 per 86400s exceeded for UserByModelByDay", "is used up"),
    ],
)
def test_a_quota_that_no_minutes_mend_stops_at_once_and_the_next_run_goes_on(said, mend):
    """It was nine tries of each question, for minutes."""
    replies = [chat(GOOD), (429, said), chat(GOOD)]
    one, two = (Comparison("p", f"post {k}.", "one", "two") for k in range(2))
    with serving(lambda number, body: replies[number]) as server:
        with pytest.raises(UserError, match=f"{mend}.*replies are kept") as stop:
            list(judge_all(make_judge(llm_config(server), {}), [one, two], 1))
        assert "\n" not in str(stop.value)
        assert len(list(judge_all(make_judge(llm_config(server), {}), [one, two], 1))) == 2
    assert len(server.requests) == 3


def test_a_refusal_stops_threads_that_wait_for_their_turn():
    """The first request is refused while the second waits a minute for the server."""

    def answer(number, body):
        if "post 0." in body["messages"][0]["content"]:
            time.sleep(0.3)
            return 401, {"error": {"message": "no"}}
        return (*LATER, {"Retry-After": "60"})

    comparisons = [Comparison("p", f"post {k}.", "one", "two") for k in range(8)]
    start = time.monotonic()
    with serving(answer) as server, pytest.raises(UserError, match="401"):
        list(judge_all(make_judge(llm_config(server), {}), comparisons, 2))
    assert time.monotonic() - start < 30
    assert len(server.requests) <= 2
