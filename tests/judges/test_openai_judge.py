"""The judge behind a server: what it asks, what it refuses, and what it waits for."""

import json
import re
import socket
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from eval.judge import make_judge
from eval.judges.openai.server_judge import OpenAIJudge
from eval.judges.protocol import Comparison, Reply, judge_all
from stages.config.config import UserError
from stages.config.judge_models import is_model
from tests.lib.chat_server import GOOD, ask, chat, llm_config, serving

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


@pytest.mark.parametrize("passing", [(status, LATER[1]) for status in (408, 429, 500, 503)])
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


NO_CREDIT = {"error": {"message": "You exceeded", "code": "insufficient_quota"}}
SPENT = {
    "error": {"message": "You exceeded your current quota. Retry in 9s.", "id": "RequestsPerDay"}
}


@pytest.mark.parametrize(
    ("refusal", "said"), [(NO_CREDIT, "no credit.*kept"), (SPENT, "quota is used up: .*kept")]
)
def test_a_spent_account_or_quota_stops_at_once_and_the_next_run_goes_on(refusal, said):
    replies = [chat(GOOD), (429, refusal), chat(GOOD)]
    one, two = (Comparison("p", f"post {k}.", "one", "two") for k in range(2))
    with serving(lambda number, body: replies[number]) as server:
        with pytest.raises(UserError, match=said) as stop:
            list(judge_all(make_judge(llm_config(server), {}), [one, two], 1))
        assert "\n" not in str(stop.value)
        assert len(list(judge_all(make_judge(llm_config(server), {}), [one, two], 1))) == 2
    assert len(server.requests) == 3


def test_a_reply_that_comes_byte_by_byte_is_left_in_time():
    """Each part began the wait anew, for ever."""
    body = json.dumps(chat(GOOD)[1])
    text = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()

    def dribble(connection: socket.socket) -> None:
        connection.recv(65536)
        with suppress(OSError):  # the client hangs up
            for at in range(0, len(text), 10):
                connection.sendall(text[at : at + 10])
                time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        threading.Thread(target=lambda: dribble(listener.accept()[0]), daemon=True).start()
        config = llm_config(SimpleNamespace(url=url), request_seconds=1, max_retries=0)
        begin = time.monotonic()
        with pytest.raises(UserError, match=r"no reply within 1 s: raise judge\.request_seconds"):
            make_judge(config, {}).reply(Comparison("p", "post", "one", "two"))
    assert time.monotonic() - begin < 3  # of the 4 s that the whole reply takes


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


# -- replies that no other server sends ------------------------------------------------------------

QUESTIONS = [Comparison(f"p{k}", f"post {k}.", "one", "two") for k in range(4)]


def answer_to(odd: Any) -> Any:
    """A server that answers oddly to post 2 alone."""

    def answer(number: int, body: dict[str, Any]) -> Any:
        return odd if "post 2." in body["messages"][0]["content"] else chat(GOOD)

    return answer


@pytest.mark.parametrize(
    "reason", ["content_filter: PROHIBITED_CONTENT", "SAFETY", "RECITATION", "PROHIBITED_CONTENT"]
)
def test_a_prompt_that_googles_filter_refuses_is_unjudged(reason):
    """It has no message. It was nine broken replies, and then a stop for ever."""
    choices = [{"index": 0, "finish_reason": reason}]
    usage = {"prompt_tokens": 1000, "completion_tokens": 0, "total_tokens": 1000}
    with serving(answer_to(chat("", choices=choices, usage=usage))) as server:
        judge = make_judge(llm_config(server, input_price=10, output_price=10), {})
        assert isinstance(judge, OpenAIJudge)
        replies = list(judge_all(judge, QUESTIONS, 2))
    assert [one.choice for one in replies] == [*"AA", None, "A"]
    assert replies[2].finish_reason == "content_filter"
    assert len(server.requests) == 4
    assert judge.chat.budget.spent == pytest.approx((3 * 1100 + 1000) * 10 / 1e6)


@pytest.mark.parametrize(
    "content", ["Is it A?\n</think>\nPreferred: B", '[THINK]"preferred": "A"[/THINK]\n**B**']
)
def test_a_thought_is_no_verdict_and_shows_that_the_judge_reasons(content):
    with serving(lambda number, body: chat(content)) as server:
        judge = make_judge(llm_config(server), {})
        assert isinstance(judge, OpenAIJudge)
        reply = judge.reply(QUESTIONS[0])
    assert (reply.choice, reply.text) == ("B", content)
    assert judge.chat.reasons


def test_what_a_server_has_taken_in_this_process_is_not_blamed_later():
    refusal = (400, {"error": {"message": "temperature"}})
    with serving(lambda number, body: refusal if number else chat(GOOD)) as server:
        judge = make_judge(llm_config(server), {})
        judge.reply(QUESTIONS[0])
        with pytest.raises(UserError, match=r"check judge\.model"):
            judge.reply(QUESTIONS[1])
        assert len(server.requests) == 2
