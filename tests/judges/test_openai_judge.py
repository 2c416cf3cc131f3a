"""The judge behind a server: what it asks, when it asks again, and what it leaves unjudged."""

import re
import threading
import time

import pytest

from eval.judge import make_judge
from eval.judges.protocol import Comparison, Reply, judge_all
from stages.config.errors import UserError
from stages.config.judge_models import is_model
from tests.lib.chat_server import GOOD, ask, chat, llm_config, serving

pytestmark = pytest.mark.usefixtures("judge_environment")
LATER = (429, {"error": {"message": "later"}})


def questions(count: int) -> list[Comparison]:
    return [Comparison(f"p{k}", f"post {k}.", "one", "two") for k in range(count)]


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
    with serving(lambda number, body: chat(content)) as server:
        reply = ask(server)
    assert (reply.choice, reply.text) == ("B", VERDICT_B)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Comparison: One says more.\nPreferred: A\n\nWait, I mixed the two up. So B is better.",
        "Comparison: One says more.\nPreferred: B\nLess preferred: A",
        "I cannot say.",
        '{"comparison": "x", "preferred": "C"}',
    ],
)
def test_a_reply_that_is_no_verdict_is_asked_for_once_more_and_then_unjudged(text):
    with serving(lambda number, body: chat(text)) as server:
        reply = ask(server)
        assert (reply.choice, reply.text) == (None, text)
        assert len(server.requests) == 2
        assert ask(server) == reply
        assert len(server.requests) == 2  # what was paid for is kept


def test_the_second_attempt_counts():
    replies = [chat("I cannot say."), chat("Preferred: B")]
    with serving(lambda number, body: replies[number]) as server:
        assert ask(server).choice == "B"


@pytest.mark.parametrize(
    ("text", "second"),
    [
        (GOOD, 2 * 100),
        ("", 2 * (100 + 300)),  # it has reasoned, and had no room for a word
        ("Is it A? </think> Comparison:", 2 * (100 + 300)),
    ],
)
def test_a_reply_that_was_cut_off_gets_twice_the_room(text, second):
    replies = [chat(text, "length"), chat("Preferred: B")]
    with serving(lambda number, body: replies[number]) as server:
        assert ask(server, max_tokens=100, reasoning_tokens=300).choice == "B"
    assert [body["max_tokens"] for body in server.requests] == [100, second]


def test_a_reply_that_is_always_cut_off_is_unjudged_and_not_kept():
    with serving(lambda number, body: chat(GOOD, "length")) as server:
        reply = ask(server)
        assert (reply.choice, reply.finish_reason) == (None, "length")
        ask(server)
    assert len(server.requests) == 4


def test_a_verdict_of_the_second_attempt_is_found_although_the_first_was_not_kept():
    replies = [chat(GOOD, "length"), chat("Preferred: B")]
    with serving(lambda number, body: replies[number]) as server:
        assert ask(server).choice == "B"
        assert ask(server).choice == "B"
    assert len(server.requests) == 2


@pytest.mark.parametrize("ending", ["stop", "eos_token", "end_turn", "STOP", None])
def test_a_finished_reply_by_whatever_word_counts(ending):
    with serving(lambda number, body: chat(GOOD, ending)) as server:
        assert ask(server).choice == "A"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("content", [None, "", " \n"])
def test_three_answers_that_are_only_a_thought_stop_the_judge_and_name_the_cause(field, content):
    message = {"role": "assistant", "content": content, field: VERDICT_B}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    with serving(lambda number, body: chat("", choices=choices)) as server:
        judge = make_judge(llm_config(server, concurrency=8), {})
        with pytest.raises(UserError, match=r"reasoning_content.*reasoning parser.*max_tokens"):
            list(judge_all(judge, questions(20), 8))
    assert len(server.requests) == 3


def test_thoughts_without_an_answer_now_and_then_stop_nothing():
    message = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    only_thought = chat("", choices=[{"index": 0, "message": message, "finish_reason": "stop"}])
    with serving(lambda number, body: chat(GOOD) if number % 2 else only_thought) as server:
        judge = make_judge(llm_config(server, concurrency=1), {})
        replies = list(judge_all(judge, questions(6), 1))
    assert {reply.choice for reply in replies} == {"A"}


def test_a_thought_that_was_cut_off_gets_more_room_before_it_counts():
    message = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    cut_off = chat("", choices=[{"index": 0, "message": message, "finish_reason": "length"}])
    with serving(
        lambda number, body: chat(GOOD) if body["max_tokens"] > 1000 else cut_off
    ) as server:
        judge = make_judge(llm_config(server), {})
        replies = list(judge_all(judge, questions(8), 2))
    assert {reply.choice for reply in replies} == {"A"}


# -- what a server takes ---------------------------------------------------------------------------


def refusing(number, body):
    """A reasoning model behind an old server: no schema, no effort, no temperature, another name of
    the budget."""
    for name, word in (("max_tokens", "max_completion_tokens"), ("temperature", "temperature")):
        if name in body:
            return 400, {"error": {"message": f"Unsupported parameter: use {word}"}}
    for name in ("reasoning_effort", "response_format"):
        if name in body:
            return 422, {"detail": f"extra fields not permitted: {name}"}
    return chat(GOOD)


def test_what_a_server_refuses_is_left_out():
    with serving(refusing) as server:
        judge = make_judge(llm_config(server), {})
        assert judge.reply(Comparison("p", "the post", "one", "two")).choice == "A"
        assert len(server.requests) == 5
        assert set(server.requests[-1]) == {"model", "messages", "max_completion_tokens"}
        assert "its own temperature" in judge.about.note
        assert "no reasoning effort given, replies in plain text" in judge.about.note

        again = make_judge(llm_config(server), {})
        again.reply(Comparison("p", "the post", "one", "two"))
        assert len(server.requests) == 5  # a new process finds the reply
        assert again.about.note.endswith("all replies from the cache")


def test_a_schema_that_was_insisted_on_is_not_left_out():
    no_schema = (400, {"error": {"message": "response_format is not supported"}})
    with (
        serving(lambda number, body: no_schema) as server,
        pytest.raises(UserError, match=r"400.*response_format"),
    ):
        ask(server, structured="on", reasoning_effort="default")
    assert len(server.requests) == 1


def test_what_a_server_has_taken_is_not_blamed_later():
    refusal = (400, {"error": {"message": "temperature"}})
    first, second = questions(2)
    with serving(lambda number, body: refusal if number else chat(GOOD)) as server:
        judge = make_judge(llm_config(server), {})
        judge.reply(first)
        with pytest.raises(UserError, match=r"check judge\.model"):
            judge.reply(second)
    assert len(server.requests) == 2


def test_a_dated_snapshot_is_the_model_and_a_smaller_sister_is_not():
    snapshots = ("gpt-4o", "gpt-4o-2024-08-06", "gpt-4o@main")
    sisters = ("gpt-4o-mini", "gpt-4o-mini-2024-07-18", "gpt-4", "")
    assert [name for name in (*snapshots, *sisters) if is_model("gpt-4o", name)] == [*snapshots]


# -- waiting and stopping --------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 529])
def test_rate_limits_and_server_errors_are_tried_again(status):
    replies = [(status, LATER[1])] * 3 + [chat(GOOD)]
    with serving(lambda number, body: replies[number]) as server:
        assert ask(server).choice == "A"
    assert len(server.requests) == 4


def test_requests_per_minute_is_a_limit_for_all_threads_and_tries_together():
    with serving(lambda number, body: LATER if number == 0 else chat(GOOD)) as server:
        judge = make_judge(llm_config(server, requests_per_minute=600), {})
        start = time.monotonic()
        assert len(list(judge_all(judge, questions(5), 2))) == 5
    assert time.monotonic() - start >= 0.5  # five gaps of 0.1 s
    assert len(server.requests) == 6


def test_concurrency_is_the_number_of_requests_under_way():
    lock = threading.Lock()
    under_way, most = 0, 0

    def answer(number, body):
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.1)
        with lock:
            under_way -= 1
        return chat(GOOD)

    with serving(answer) as server:
        judge = make_judge(llm_config(server), {})
        list(judge_all(judge, questions(13), 4))
    assert most == 4


def test_two_policies_with_one_summary_are_one_question():
    same = [Comparison(f"p{k}", "the post", "one", "two") for k in range(8)]
    with serving(lambda number, body: chat(GOOD)) as server:
        judge = make_judge(llm_config(server), {})
        assert {reply.choice for reply in judge_all(judge, same, 8)} == {"A"}
    assert len(server.requests) == 1


def test_a_refusal_ends_the_waits_of_other_questions():
    """The first request is refused while the second waits a minute for the server."""

    def answer(number, body):
        if "post 0." in body["messages"][0]["content"]:
            time.sleep(0.3)
            return 401, {"error": {"message": "no"}}
        return (*LATER, {"Retry-After": "60"})

    start = time.monotonic()
    with serving(answer) as server:
        judge = make_judge(llm_config(server), {})
        with pytest.raises(UserError, match="401"):
            list(judge_all(judge, questions(8), 2))
    assert time.monotonic() - start < 30
    assert len(server.requests) <= 2


def test_replies_that_are_under_way_at_a_stop_are_kept():
    def answer(number, body):
        prompt = body["messages"][0]["content"]
        if "post 1." in prompt:
            time.sleep(0.2)
            return 401, {"error": {"message": "no"}}
        time.sleep(0.6 if "post 2." in prompt else 0)
        return chat(GOOD)

    first, second, third = questions(3)
    with serving(answer) as server:
        judge = make_judge(llm_config(server), {})
        with pytest.raises(UserError, match="401"):
            list(judge_all(judge, [first, second, third], 2))
        again = make_judge(llm_config(server), {})
        assert again.reply(third).choice == "A"
    assert len(server.requests) == 3


def test_a_lasting_error_is_one_line_that_says_what_to_do():
    down = (500, {"error": {"message": "down\nagain"}})
    with serving(lambda number, body: down) as server, pytest.raises(UserError) as stop:
        ask(server, max_retries=2)
    assert re.fullmatch(
        r"judge judge: error 500: .*down.*; finished replies are kept: run the same command again"
        " later",
        str(stop.value),
    )
