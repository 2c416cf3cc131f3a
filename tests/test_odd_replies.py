"""Replies that no other server sends: Google's, OpenRouter's, Mistral's, and empty ones."""

from typing import Any

import pytest

from eval.judge import make_judge
from eval.judges.openai.server_judge import OpenAIJudge
from eval.judges.protocol import Comparison, judge_all
from stages.settings.config import UserError
from tests.chat_server import GOOD, chat, llm_config, serving

pytestmark = pytest.mark.usefixtures("judge_environment")
QUESTIONS = [Comparison(f"p{k}", f"post {k}.", "one", "two") for k in range(4)]


def answer_to(odd: Any) -> Any:
    """A server that answers oddly to post 2 alone."""

    def answer(number: int, body: dict[str, Any]) -> Any:
        return odd if "post 2." in body["messages"][0]["content"] else chat(GOOD)

    return answer


@pytest.mark.parametrize(
    "reason", ["content_filter: PROHIBITED_CONTENT", "SAFETY", "RECITATION", "PROHIBITED_CONTENT"]
)
def test_a_prompt_that_googles_filter_refuses_is_unjudged_and_named(capsys, reason):
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
    assert "1 post is unjudged (p2): filtered: " in capsys.readouterr().out
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
