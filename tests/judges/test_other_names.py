"""Servers that answer in another name than the one that was asked."""

import pytest

from eval.judge import make_judge
from eval.judges.protocol import Comparison, judge_all
from stages.config.errors import UserError
from tests.lib.chat_server import GOOD, ask, chat, llm_config, serving

pytestmark = pytest.mark.usefixtures("judge_environment")
QUESTIONS = [Comparison(f"p{k}", f"post {k}.", "one", "two") for k in range(20)]


def test_a_server_with_another_name_is_found_out_by_its_first_reply():
    """It was 62 replies, with eight requests under way and eight tries of each."""
    with serving(lambda number, body: chat(GOOD, model="openai/judge")) as server:
        judge = make_judge(llm_config(server, concurrency=8, max_retries=8), {})
        with pytest.raises(UserError) as stop:
            list(judge_all(judge, QUESTIONS, 8))
    assert len(server.requests) == 1
    said = str(stop.value)
    assert "the reply is openai/judge's" in said
    assert "set judge.model=openai/judge, or judge.accept_model=openai/judge" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("asked", "accepted", "returned"),
    [
        ("judge", "judge-2", "judge-2"),
        ("judge-latest", "judge-2-*", "judge-2-20260101"),  # an alias
        ("openai/judge", "judge", "judge"),  # a proxy that leaves out the provider
        ("judge", "openai/judge, azure/*", "azure/judge"),  # a proxy that names it
        ("judge", "*", ""),  # a server that names nobody
    ],
)
def test_replies_in_a_name_that_is_accepted_are_the_judges(asked, accepted, returned):
    with serving(lambda number, body: chat(GOOD, model=returned)) as server:
        judge = make_judge(llm_config(server, model=asked, accept_model=accepted), {})
        replies = list(judge_all(judge, QUESTIONS[:3], 2))
    assert [(one.choice, one.requested_model, one.model) for one in replies] == [
        ("A", asked, returned)
    ] * 3
    assert len(server.requests) == 3


def test_a_name_that_was_accepted_stays_paid_for_and_is_nobody_elses():
    with serving(lambda number, body: chat(GOOD, model=f"other-{number}")) as server:
        ask(server, accept_model="other-0")
        ask(server, accept_model="other-0,other-9")
        assert len(server.requests) == 1
        ask(server, accept_model="other-1")
        assert len(server.requests) == 2
        ask(server, accept_model="other-1")
        assert len(server.requests) == 2


def test_a_slip_is_asked_for_again_and_a_change_of_the_model_stops():
    replies = {0: chat(GOOD), 1: chat("Preferred: B", model="other"), 2: chat(GOOD)}
    moved = chat("Preferred: B", model="other")
    with serving(lambda number, body: replies.get(number, moved)) as server:
        judge = make_judge(llm_config(server, max_retries=2), {})
        assert [judge.reply(one).choice for one in QUESTIONS[:2]] == ["A", "A"]
        assert len(server.requests) == 3
        with pytest.raises(UserError, match=r"the reply is other's.*judge.accept_model=other"):
            judge.reply(QUESTIONS[2])
    assert len(server.requests) == 3 + 3
