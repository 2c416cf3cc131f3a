"""Reasoning models as judges: they get room for their thoughts, and every token is billed."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from eval.judge import make_judge
from eval.judges.openai.budget import price_of
from eval.judges.openai.replies import Completion
from eval.judges.openai.server_judge import OpenAIJudge
from eval.judges.protocol import judge_all
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.judge import JudgeSettings
from tests.lib.chat_server import GOOD, always, chat, llm_config, questions, serving

pytestmark = pytest.mark.usefixtures("judge_environment")


# -- room ------------------------------------------------------------------------------------------

REASONING_TOKENS = 400  # more than the room for a reply
REPLY_TOKENS = 100


def answer_like_a_reasoning_model(number: int, body: dict[str, Any]) -> tuple[int, Any]:
    """Refuse `max_tokens` and `temperature`, and write no word without room for all tokens."""
    if "max_tokens" in body:
        return refusal("max_tokens", "use max_completion_tokens")
    if "temperature" in body:
        return refusal("temperature", "use temperature")
    tokens = REASONING_TOKENS + REPLY_TOKENS
    usage = {
        "prompt_tokens": 1000,
        "completion_tokens": tokens,
        "completion_tokens_details": {"reasoning_tokens": REASONING_TOKENS},
    }
    if body["max_completion_tokens"] <= tokens:
        return chat("", "length", model="gpt-6-luna", usage=usage)
    return chat(GOOD, model="gpt-6-luna", usage=usage)


def refusal(parameter: str, message: str) -> tuple[int, Any]:
    return 400, {"error": {"message": message, "param": parameter}}


def luna_config(url: str, **changes: Any) -> Any:
    """The config of a run that is judged by the default model behind this address."""
    judge = JudgeSettings(base_url=url).changed(**changes)
    return make_config("tiny").changed(judge=judge)


def test_a_judge_that_is_told_to_reason_has_room_and_is_billed(capsys):
    with serving(answer_like_a_reasoning_model) as server:
        judge = make_judge(luna_config(server.url, reasoning_effort="medium"), {})
        replies = list(judge_all(judge, questions(20), 4))

    assert {reply.choice for reply in replies} == {"A"}
    assert len(server.requests) == 20 + 2  # two refusals, and no reply was cut off
    output = capsys.readouterr().out
    usd = 20 * (1000 * 0.10 + 500 * 0.50) / 1e6
    assert f"20 replies; ${usd:.4f} spent in all" in output
    assert max(len(line) for line in output.splitlines()) <= 80


def test_a_judge_that_reasons_unasked_gets_room_from_its_second_request_on():
    with serving(answer_like_a_reasoning_model) as server:
        judge = make_judge(luna_config(server.url), {})
        replies = list(judge_all(judge, questions(20), 4))

    assert {reply.choice for reply in replies} == {"A"}
    limits = [body.get("max_completion_tokens") for body in server.requests]
    refused = [None, 256]  # for max_tokens, then for temperature
    cut_off = [256]
    with_room = [2 * (256 + 4096)] + [256 + 4096] * 19
    assert limits == refused + cut_off + with_room


# -- prices ----------------------------------------------------------------------------------------

MILLION_TOKENS = Completion(
    text="x",
    finish_reason="stop",
    model="gpt-6-luna",
    has_thought=False,
    prompt_tokens=1_000_000,
    completion_tokens=1_000_000,
    cached_tokens=0,
    cache_write_tokens=0,
)


@pytest.fixture
def luna():
    """The price of the default model: 0.10 USD per million tokens read, 0.50 written."""
    price = price_of(JudgeSettings())
    assert price is not None
    return price


def test_tokens_from_the_servers_cache_cost_a_tenth(luna):
    reply = replace(MILLION_TOKENS, cached_tokens=900_000)
    assert luna.cost(reply) == pytest.approx(0.1 * 0.10 + 0.9 * 0.01 + 0.50)


def test_tokens_that_go_into_the_servers_cache_cost_a_quarter_more(luna):
    reply = replace(MILLION_TOKENS, cached_tokens=400_000, cache_write_tokens=500_000)
    assert luna.cost(reply) == pytest.approx(0.1 * 0.10 + 0.4 * 0.01 + 0.5 * 0.125 + 0.50)


def test_at_worst_every_byte_is_a_token_that_goes_into_the_cache(luna):
    maximum = luna.maximum_cost({"text": "x" * 1_000_000}, 1_000_000)
    assert maximum == pytest.approx(0.125 + 0.50, abs=1e-5)


def test_a_price_in_the_settings_is_the_same_for_cached_tokens():
    price = price_of(JudgeSettings(input_price=3, output_price=4))
    assert price is not None
    assert price.cost(replace(MILLION_TOKENS, cached_tokens=900_000)) == pytest.approx(3 + 4)


def test_a_cap_on_a_model_without_a_price_is_refused():
    with pytest.raises(UserError, match=r"max_cost needs the price of mine, which the table"):
        price_of(JudgeSettings(model="mine", max_cost=1))


# -- reasoning in the bill -------------------------------------------------------------------------


def reported(*, prompt: int, completion: int, total: int, reasoning: int) -> dict[str, Any]:
    """Token counts as a server reports them."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": total,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def server_judge(server: Any) -> OpenAIJudge:
    """A judge at 100 USD per million tokens read, and 1,000 USD per million written."""
    judge = make_judge(llm_config(server, input_price=100, output_price=1000), {})
    assert isinstance(judge, OpenAIJudge)
    return judge


@dataclass(frozen=True, kw_only=True)
class Bill:
    usage: dict[str, Any]
    written_tokens: int
    is_reasoning: bool
    usd: float


BILLS = {
    # Google and xAI: 300 tokens of reasoning are only in the total.
    "reasoning only in the total": Bill(
        usage=reported(prompt=1000, completion=100, total=1400, reasoning=0),
        written_tokens=400,
        is_reasoning=True,
        usd=0.5,
    ),
    # OpenAI: they are part of the completion.
    "reasoning in the completion": Bill(
        usage=reported(prompt=1000, completion=400, total=1400, reasoning=300),
        written_tokens=400,
        is_reasoning=True,
        usd=0.5,
    ),
    "no reasoning": Bill(
        usage=reported(prompt=1000, completion=100, total=1100, reasoning=0),
        written_tokens=100,
        is_reasoning=False,
        usd=0.2,
    ),
}


@pytest.mark.parametrize("bill", BILLS.values(), ids=BILLS)
def test_reasoning_is_billed_wherever_the_server_reports_it(bill):
    [question] = questions(1)
    with serving(always(chat(GOOD, usage=bill.usage))) as server:
        judge = server_judge(server)
        reply = judge.reply(question)

    assert reply.completion_tokens == bill.written_tokens
    assert judge.chat.is_reasoning == bill.is_reasoning
    assert judge.chat.budget.spent == pytest.approx(bill.usd)


def test_a_text_without_written_tokens_is_billed_at_its_maximum():
    usage = reported(prompt=1000, completion=0, total=1400, reasoning=0)
    [question] = questions(1)
    with serving(always(chat(GOOD, usage=usage))) as server:
        judge = server_judge(server)
        maximum = judge.chat.maximum_cost(judge.chat.request(question, 1))
        reply = judge.reply(question)

    assert reply.completion_tokens == 0
    assert not judge.chat.is_reasoning
    assert judge.chat.budget.spent == pytest.approx(maximum)


def test_the_maximum_cost_includes_the_room_for_reasoning():
    judge = make_judge(luna_config("http://127.0.0.1:9/v1", reasoning_effort="high"), {})
    assert isinstance(judge, OpenAIJudge)
    [question] = questions(1)

    first = judge.chat.request(question, attempt=1)
    second = judge.chat.request(question, attempt=2)

    assert first.limit == 256 + 4096
    assert second.limit == 2 * (256 + 4096)
    size = len(json.dumps(first.body).encode())
    expected = (0.125 * (size + 16) + 0.50 * (256 + 4096)) / 1e6
    assert judge.chat.maximum_cost(first) == pytest.approx(expected)
