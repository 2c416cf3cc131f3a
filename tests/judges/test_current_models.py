"""Models of today: one that reasons, its bill, and its maker."""

import json
from dataclasses import replace
from typing import Any

import pytest

from eval.judge import make_judge
from eval.judges.openai.budget import price_of
from eval.judges.openai.replies import Completion
from eval.judges.openai.server_judge import OpenAIJudge
from eval.judges.protocol import Comparison, judge_all
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.judge import JudgeSettings
from tests.lib.chat_server import GOOD, chat, llm_config, serving

pytestmark = pytest.mark.usefixtures("judge_environment")
THOUGHT = 400  # tokens, more than the budget of a reply


def questions(count: int) -> list[Comparison]:
    return [Comparison("p", f"post {k}.", "one", "two") for k in range(count)]


def thinker(number: int, body: dict[str, Any]) -> tuple[int, Any]:
    """A reasoning model: another name of the budget, no temperature, no word without room."""
    for name, word in (("max_tokens", "max_completion_tokens"), ("temperature", "temperature")):
        if name in body:
            return 400, {"error": {"message": f"use {word}", "param": name}}
    has_room = body["max_completion_tokens"] > THOUGHT + 100
    details = {"completion_tokens_details": {"reasoning_tokens": THOUGHT}}
    usage = {"prompt_tokens": 1000, "completion_tokens": THOUGHT + 100, **details}
    text, end = (GOOD, "stop") if has_room else ("", "length")
    return chat(text, end, model="gpt-6-luna", usage=usage)


def luna_config(url: str, **changes: Any) -> Any:
    return make_config("tiny").changed(judge=JudgeSettings(**{"base_url": url, **changes}))


def test_a_judge_that_reasons_has_room_for_it_and_is_billed(capsys):
    with serving(thinker) as server:
        judge = make_judge(luna_config(server.url, reasoning_effort="medium"), {})
        replies = list(judge_all(judge, questions(20), 4))
    assert {reply.choice for reply in replies} == {"A"}
    assert len(server.requests) == 20 + 2  # two refusals, and no reply was lost
    out = capsys.readouterr().out
    assert f"20 replies; ${20 * (1000 * 0.10 + 500 * 0.50) / 1e6:.4f} spent in all" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_judge_that_reasons_unasked_gets_room_from_its_second_request_on(capsys):
    with serving(thinker) as server:
        judge = make_judge(luna_config(server.url), {})
        replies = list(judge_all(judge, questions(20), 4))
    assert {reply.choice for reply in replies} == {"A"}
    limits = [body.get("max_completion_tokens") for body in server.requests]
    assert limits == [None, 256, 256, 2 * (256 + 4096)] + [256 + 4096] * 19


def test_tokens_that_were_read_from_the_servers_cache_cost_a_tenth():
    luna = price_of(JudgeSettings())
    assert luna is not None
    read_again = Completion(
        text="x",
        finish_reason="stop",
        model="gpt-6-luna",
        has_thought=False,
        prompt_tokens=1_000_000,
        completion_tokens=1_000_000,
        cached_tokens=900_000,
        cache_write_tokens=0,
    )
    assert luna.cost(read_again) == pytest.approx(0.1 * 0.10 + 0.9 * 0.01 + 0.50)
    # What is put into the cache is a quarter dearer.
    kept = replace(read_again, cached_tokens=400_000, cache_write_tokens=500_000)
    assert luna.cost(kept) == pytest.approx(0.1 * 0.10 + 0.4 * 0.01 + 0.5 * 0.125 + 0.50)
    # At worst every byte is a token that goes into the cache.
    assert luna.maximum_cost({"text": "x" * 1_000_000}, 1_000_000) == pytest.approx(0.625, abs=1e-5)
    own = price_of(JudgeSettings(input_price=3, output_price=4))
    assert own is not None
    assert own.cost(read_again) == pytest.approx(3 + 4)


@pytest.mark.parametrize(
    ("usage", "written", "reasoning", "usd"),
    [
        ((1000, 100, 1400, 0), 400, 300, 0.5),  # Google, xAI: 300 stand in the total alone
        ((1000, 400, 1400, 300), 400, 300, 0.5),  # OpenAI: they are part of what was written
        ((1000, 100, 1100, 0), 100, 0, 0.2),
        ((1000, 0, 1400, 0), 0, 0, None),  # the text was written for some: nobody knows how many
    ],
)
def test_reasoning_that_stands_in_the_total_alone_is_billed(usage, written, reasoning, usd):
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    counted = dict(zip(names, usage[:3], strict=True))
    counted |= {"completion_tokens_details": {"reasoning_tokens": usage[3]}}
    with serving(lambda number, body: chat(GOOD, usage=counted)) as server:
        judge = make_judge(llm_config(server, input_price=100, output_price=1000), {})
        assert isinstance(judge, OpenAIJudge)
        (question,) = questions(1)
        reply = judge.reply(question)
        reasons = judge.chat.is_reasoning
        judge.chat.is_reasoning = False
        worst = judge.chat.maximum_cost(judge.chat.request(question, 1))
    assert reply.completion_tokens == written
    assert judge.chat.budget.spent == pytest.approx(worst if usd is None else usd)
    assert reasons == (reasoning > 0)


def test_the_cap_counts_the_room_for_reasoning():
    judge = make_judge(luna_config("http://127.0.0.1:9/v1", reasoning_effort="high"), {})
    assert isinstance(judge, OpenAIJudge)
    (question,) = questions(1)
    request = judge.chat.request(question, attempt=1)
    assert request.limit == 256 + 4096
    assert judge.chat.request(question, attempt=2).limit == 2 * (256 + 4096)
    size = len(json.dumps(request.body).encode())
    expected = (0.125 * (size + 16) + 0.50 * (256 + 4096)) / 1e6
    assert judge.chat.maximum_cost(request) == pytest.approx(expected)


def test_a_cap_on_a_model_without_a_price_is_refused():
    with pytest.raises(UserError, match=r"max_cost needs the price of mine, which the table"):
        price_of(JudgeSettings(model="mine", max_cost=1))
