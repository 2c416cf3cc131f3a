"""An LLM judge behind a server: what it asks, when it asks again, and what it leaves unjudged."""

import re
import threading
import time
from typing import Any

import pytest

from eval.judge import make_judge
from eval.judges.protocol import Comparison, Reply, judge_all
from stages.config.errors import UserError
from stages.config.judge_models import is_model
from tests.lib.chat_server import (
    GOOD,
    always,
    ask,
    chat,
    in_turn,
    llm_config,
    prompt_of,
    questions,
    serving,
)

pytestmark = pytest.mark.usefixtures("judge_environment")

RATE_LIMIT = (429, {"error": {"message": "later"}})


def test_a_request_has_the_settings_and_shows_post_and_summaries():
    with serving(always(chat(GOOD))) as server:
        ask(server, temperature=0.5, structured="off")

    [request] = server.requests
    assert request["model"] == "judge"
    assert request["temperature"] == 0.5
    assert request["max_tokens"] == 100
    prompt = prompt_of(request)
    assert prompt.index("\nthe post\n</post-") < prompt.index("\none\n<") < prompt.index("\ntwo\n<")


def test_a_reply_records_the_answer_and_its_origin():
    with serving(always(chat(GOOD))) as server:
        reply = ask(server, structured="off")

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


# -- what a reply means ----------------------------------------------------------------------------

VERDICT_B = '{"comparison": "x", "preferred": "B"}'


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": VERDICT_B}],
        [{"type": "text", "text": VERDICT_B[:9]}, {"type": "text", "text": VERDICT_B[9:]}],
        [{"type": "output_text", "text": VERDICT_B}],
        # Mistral, Anthropic
        [
            {"type": "thinking", "thinking": [{"type": "text", "text": "Preferred: A"}]},
            {"type": "text", "text": VERDICT_B},
        ],
        [{"type": "reasoning", "text": "Preferred: A"}, {"type": "text", "text": VERDICT_B}],
    ],
)
def test_the_parts_of_a_text_are_joined_without_its_thoughts(content):
    with serving(always(chat(content))) as server:
        reply = ask(server)

    assert reply.choice == "B"
    assert reply.text == VERDICT_B
    assert len(server.requests) == 1


NO_VERDICTS = [
    "Comparison: One says more.\nPreferred: A\n\nWait, I mixed the two up. So B is better.",
    "Comparison: One says more.\nPreferred: B\nLess preferred: A",
    "I cannot say.",
    '{"comparison": "x", "preferred": "C"}',
]


@pytest.mark.parametrize("text", NO_VERDICTS)
def test_a_reply_without_a_verdict_is_requested_once_more_and_then_unjudged(text):
    with serving(always(chat(text))) as server:
        reply = ask(server)

    assert reply.choice is None
    assert reply.text == text
    assert len(server.requests) == 2


@pytest.mark.parametrize("text", NO_VERDICTS)
def test_two_replies_without_a_verdict_are_not_paid_for_again(text):
    with serving(always(chat(text))) as server:
        reply = ask(server)
        assert ask(server) == reply
    assert len(server.requests) == 2


def test_a_verdict_of_the_second_reply_counts():
    with serving(in_turn(chat("I cannot say."), chat("Preferred: B"))) as server:
        assert ask(server).choice == "B"


# -- replies that are cut off ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "second_limit"),
    [
        (GOOD, 2 * 100),
        ("", 2 * (100 + 300)),  # the model has reasoned, and had no room for a word
        ("Is it A? </think> Comparison:", 2 * (100 + 300)),
    ],
    ids=["a reply", "nothing", "a thought"],
)
def test_a_reply_that_was_cut_off_gets_twice_the_room(text, second_limit):
    with serving(in_turn(chat(text, "length"), chat("Preferred: B"))) as server:
        reply = ask(server, max_tokens=100, reasoning_tokens=300)

    assert reply.choice == "B"
    assert [body["max_tokens"] for body in server.requests] == [100, second_limit]


def test_a_reply_that_is_always_cut_off_is_unjudged_and_not_kept():
    with serving(always(chat(GOOD, "length"))) as server:
        reply = ask(server)
        ask(server)

    assert reply.choice is None
    assert reply.finish_reason == "length"
    assert len(server.requests) == 4


def test_a_second_reply_is_found_again_although_the_first_was_cut_off():
    with serving(in_turn(chat(GOOD, "length"), chat("Preferred: B"))) as server:
        assert ask(server).choice == "B"
        assert ask(server).choice == "B"
    assert len(server.requests) == 2


@pytest.mark.parametrize("finish_reason", ["stop", "eos_token", "end_turn", "STOP", None])
def test_a_finished_reply_counts_whatever_its_finish_reason_is_called(finish_reason):
    with serving(always(chat(GOOD, finish_reason))) as server:
        assert ask(server).choice == "A"


# -- replies that are only a thought ---------------------------------------------------------------


def thought(
    text: str,
    *,
    content: str | None = "",
    field: str = "reasoning_content",
    finish_reason: str = "stop",
) -> tuple[int, Any]:
    """A completion without an answer: all of its text is in the field for reasoning."""
    message = {"role": "assistant", "content": content, field: text}
    return chat("", choices=[{"index": 0, "message": message, "finish_reason": finish_reason}])


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("content", [None, "", " \n"], ids=["null", "empty", "blank"])
def test_three_thoughts_without_an_answer_stop_the_judge_and_name_the_cause(field, content):
    with serving(always(thought(VERDICT_B, content=content, field=field))) as server:
        judge = make_judge(llm_config(server, concurrency=8), {})
        with pytest.raises(UserError, match=r"reasoning_content.*reasoning parser.*max_tokens"):
            list(judge_all(judge, questions(20), 8))
    assert len(server.requests) == 3


def test_a_thought_without_an_answer_now_and_then_does_not_stop_the_judge():
    with serving(lambda number, body: thought("Hm.") if number % 2 == 0 else chat(GOOD)) as server:
        judge = make_judge(llm_config(server, concurrency=1), {})
        replies = list(judge_all(judge, questions(6), 1))
    assert {reply.choice for reply in replies} == {"A"}


def test_a_thought_that_was_cut_off_gets_more_room():
    def answer_with_room(number, body):
        if body["max_tokens"] > 1000:
            return chat(GOOD)
        return thought("Hm.", finish_reason="length")

    with serving(answer_with_room) as server:
        judge = make_judge(llm_config(server), {})
        replies = list(judge_all(judge, questions(8), 2))
    assert {reply.choice for reply in replies} == {"A"}


# -- parameters that a server refuses --------------------------------------------------------------


def refuse_most_parameters(number, body):
    """A reasoning model behind an old server.

    It takes no schema, no effort and no temperature, and the budget under another name.
    """
    if "max_tokens" in body:
        return 400, {"error": {"message": "Unsupported parameter: use max_completion_tokens"}}
    if "temperature" in body:
        return 400, {"error": {"message": "Unsupported parameter: use temperature"}}
    for name in ("reasoning_effort", "response_format"):
        if name in body:
            return 422, {"detail": f"extra fields not permitted: {name}"}
    return chat(GOOD)


def test_refused_parameters_are_left_out_and_the_judge_says_so():
    with serving(refuse_most_parameters) as server:
        judge = make_judge(llm_config(server), {})
        [question] = questions(1)
        reply = judge.reply(question)

    assert reply.choice == "A"
    assert len(server.requests) == 5
    assert set(server.requests[-1]) == {"model", "messages", "max_completion_tokens"}
    assert "its own temperature" in judge.about.note
    assert "no reasoning effort given, replies in plain text" in judge.about.note


def test_a_new_judge_finds_the_reply_to_a_request_with_parameters_left_out():
    [question] = questions(1)
    with serving(refuse_most_parameters) as server:
        make_judge(llm_config(server), {}).reply(question)
        new_judge = make_judge(llm_config(server), {})
        new_judge.reply(question)

    assert len(server.requests) == 5
    assert new_judge.about.note.endswith("all replies from the cache")


def test_a_required_schema_is_not_left_out():
    refusal = (400, {"error": {"message": "response_format is not supported"}})
    with (
        serving(always(refusal)) as server,
        pytest.raises(UserError, match=r"400.*response_format"),
    ):
        ask(server, structured="on", reasoning_effort="default")
    assert len(server.requests) == 1


def test_a_parameter_that_a_server_has_taken_is_not_blamed_later():
    refusal = (400, {"error": {"message": "temperature"}})
    first, second = questions(2)
    with serving(in_turn(chat(GOOD), refusal)) as server:
        judge = make_judge(llm_config(server), {})
        judge.reply(first)
        with pytest.raises(UserError, match=r"check judge\.model"):
            judge.reply(second)
    assert len(server.requests) == 2


@pytest.mark.parametrize("name", ["gpt-4o", "gpt-4o-2024-08-06", "gpt-4o@main"])
def test_a_dated_snapshot_is_the_model(name):
    assert is_model("gpt-4o", name)


@pytest.mark.parametrize("name", ["gpt-4o-mini", "gpt-4o-mini-2024-07-18", "gpt-4", ""])
def test_a_smaller_sister_is_another_model(name):
    assert not is_model("gpt-4o", name)


# -- waiting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 529])
def test_rate_limits_and_server_errors_are_tried_again(status):
    error = (status, {"error": {"message": "later"}})
    with serving(in_turn(error, error, error, chat(GOOD))) as server:
        assert ask(server).choice == "A"
    assert len(server.requests) == 4


def test_requests_per_minute_limits_all_threads_and_retries_together():
    with serving(lambda number, body: RATE_LIMIT if number == 0 else chat(GOOD)) as server:
        judge = make_judge(llm_config(server, requests_per_minute=600), {})
        start = time.monotonic()
        replies = list(judge_all(judge, questions(5), 2))
        seconds = time.monotonic() - start

    assert len(replies) == 5
    assert len(server.requests) == 6
    assert seconds >= 0.5  # five gaps of 0.1 s


def test_concurrency_is_the_number_of_requests_under_way():
    lock = threading.Lock()
    under_way = 0
    most_under_way = 0

    def answer(number, body):
        nonlocal under_way, most_under_way
        with lock:
            under_way += 1
            most_under_way = max(most_under_way, under_way)
        time.sleep(0.1)
        with lock:
            under_way -= 1
        return chat(GOOD)

    with serving(answer) as server:
        judge = make_judge(llm_config(server), {})
        list(judge_all(judge, questions(13), 4))
    assert most_under_way == 4


def test_two_policies_with_one_summary_are_one_question():
    same_texts = [
        Comparison(post_id=f"p{number}", query="the post", first="one", second="two")
        for number in range(8)
    ]
    with serving(always(chat(GOOD))) as server:
        judge = make_judge(llm_config(server), {})
        replies = list(judge_all(judge, same_texts, 8))

    assert {reply.choice for reply in replies} == {"A"}
    assert len(server.requests) == 1


# -- stopping --------------------------------------------------------------------------------------

WRONG_KEY = (401, {"error": {"message": "no"}})


def test_an_error_ends_the_waits_of_other_questions():
    """The first request is refused while the second waits a minute for the server."""

    def answer(number, body):
        if "post 0." in prompt_of(body):
            time.sleep(0.3)
            return WRONG_KEY
        return (*RATE_LIMIT, {"Retry-After": "60"})

    start = time.monotonic()
    with serving(answer) as server:
        judge = make_judge(llm_config(server), {})
        with pytest.raises(UserError, match="401"):
            list(judge_all(judge, questions(8), 2))

    assert time.monotonic() - start < 30
    assert len(server.requests) <= 2


def test_replies_that_are_under_way_at_a_stop_are_kept():
    def answer(number, body):
        prompt = prompt_of(body)
        if "post 1." in prompt:
            time.sleep(0.2)
            return WRONG_KEY
        if "post 2." in prompt:
            time.sleep(0.6)
        return chat(GOOD)

    with serving(answer) as server:
        judge = make_judge(llm_config(server), {})
        with pytest.raises(UserError, match="401"):
            list(judge_all(judge, questions(3), 2))
        last_question = questions(3)[2]
        reply = make_judge(llm_config(server), {}).reply(last_question)

    assert reply.choice == "A"
    assert len(server.requests) == 3


def test_a_lasting_error_is_one_line_that_says_what_to_do():
    error = (500, {"error": {"message": "down\nagain"}})
    with serving(always(error)) as server, pytest.raises(UserError) as stop:
        ask(server, max_retries=2)
    assert re.fullmatch(
        r"judge judge: error 500: .*down.*; finished replies are kept: run the same command again"
        " later",
        str(stop.value),
    )
