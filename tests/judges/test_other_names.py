"""A server that answers under another model's name is noticed, and accepted only if you say so."""

import pytest

from eval.judge import make_judge
from eval.judges.protocol import judge_all
from stages.config.errors import UserError
from tests.lib.chat_server import GOOD, always, ask, chat, in_turn, llm_config, questions, serving

pytestmark = pytest.mark.usefixtures("judge_environment")


def test_the_first_reply_under_another_name_stops_the_judge():
    """It took 62 replies: eight requests were under way, and each was sent eight times."""
    with serving(always(chat(GOOD, model="openai/judge"))) as server:
        judge = make_judge(llm_config(server, concurrency=8, max_retries=8), {})
        with pytest.raises(UserError) as stop:
            list(judge_all(judge, questions(20), 8))

    assert len(server.requests) == 1
    line = str(stop.value)
    assert "\n" not in line
    assert "the reply is openai/judge's" in line
    assert "set judge.model=openai/judge, or judge.accept_model=openai/judge" in line


@pytest.mark.parametrize(
    ("requested", "accepted", "answering"),
    [
        pytest.param("judge", "judge-2", "judge-2", id="a name"),
        pytest.param("judge-latest", "judge-2-*", "judge-2-20260101", id="an alias"),
        pytest.param("openai/judge", "judge", "judge", id="a proxy without provider"),
        pytest.param("judge", "openai/judge, azure/*", "azure/judge", id="a proxy with provider"),
        pytest.param("judge", "*", "", id="a server without a name"),
    ],
)
def test_replies_under_an_accepted_name_count(requested, accepted, answering):
    with serving(always(chat(GOOD, model=answering))) as server:
        judge = make_judge(llm_config(server, model=requested, accept_model=accepted), {})
        replies = list(judge_all(judge, questions(3), 2))

    assert len(replies) == 3
    assert len(server.requests) == 3
    for reply in replies:
        assert reply.choice == "A"
        assert reply.requested_model == requested
        assert reply.model == answering


def test_a_reply_is_found_again_under_every_setting_that_accepts_its_name():
    with serving(lambda number, body: chat(GOOD, model=f"other-{number}")) as server:
        ask(server, accept_model="other-0")
        ask(server, accept_model="other-0,other-9")
    assert len(server.requests) == 1


def test_a_reply_is_not_used_for_another_accepted_name():
    with serving(lambda number, body: chat(GOOD, model=f"other-{number}")) as server:
        ask(server, accept_model="other-0")
        ask(server, accept_model="other-1")
        ask(server, accept_model="other-1")
    assert len(server.requests) == 2


RIGHT = chat(GOOD)
OTHER = chat("Preferred: B", model="other")


def test_a_single_reply_under_another_name_is_requested_again():
    first, second = questions(2)
    with serving(in_turn(RIGHT, OTHER, RIGHT)) as server:
        judge = make_judge(llm_config(server, max_retries=2), {})
        assert judge.reply(first).choice == "A"
        assert judge.reply(second).choice == "A"
    assert len(server.requests) == 3


def test_a_server_that_changes_to_another_model_stops_the_judge():
    first, second = questions(2)
    with serving(lambda number, body: RIGHT if number == 0 else OTHER) as server:
        judge = make_judge(llm_config(server, max_retries=2), {})
        judge.reply(first)
        with pytest.raises(UserError, match=r"the reply is other's.*judge.accept_model=other"):
            judge.reply(second)
    assert len(server.requests) == 1 + 3
