"""Models of today: one that reasons, its bill beside the estimate, and ends that are warned of."""

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from eval.judge import judge_summaries, make_judge
from eval.judges.openai.budget import ASSUMED_REASONING_TOKENS, USUAL_REPLY_TOKENS, price_of
from eval.judges.openai.server_judge import OpenAIJudge
from eval.judges.protocol import Comparison, judge_all
from reports.parts.sentences import judge_note
from stages.runs import open_stage
from stages.settings.command_line import make_config
from stages.settings.config import JudgeSettings, UserError
from stages.settings.judge import OPENAI_MODEL
from stages.settings.judge_models import AS_OF, MODELS, family_of_model, known_model, warning_of
from tests.chat_server import GOOD, ask, chat, llm_config, serving
from tests.luna_server import Luna

pytestmark = pytest.mark.usefixtures("judge_environment")
PAIRS = 500
LINE = re.compile(r"replies cost \$([\d.]+), estimated \$([\d.]+)")


@contextmanager
def luna_at(luna: Luna) -> Iterator[str]:
    """The URL of a server that answers by `luna`."""
    with serving(lambda number, body: luna.answer(body)) as server:
        yield server.url


def luna_config(url: str, **changes: Any) -> Any:
    judge = JudgeSettings(**{"base_url": url, "concurrency": 4, **changes})
    return replace(make_config("tiny"), judge=judge)


def pairs(count: int, words: int = 300) -> list[Comparison]:
    post = "we talked about the trip and then my brother sold the car " * (words // 12)
    tail = "things about the trip, " * 7
    return [
        Comparison(f"p{k}", f"{post} {k}.", f"good {tail}", f"bad {tail}") for k in range(count)
    ]


def test_500_pairs_cost_what_was_estimated_and_are_asked_with_temperature_and_no_effort(capsys):
    luna = Luna()
    with open_stage(make_config("tiny"), "summaries") as run:
        for one in pairs(PAIRS):
            texts = {"query": one.query, "summary": one.first, "reference": one.second}
            run.append("ppo.jsonl", {"id": one.post_id, **texts})
        run.finish({})
    with luna_at(luna) as url:
        results = judge_summaries(luna_config(url))
    assert results["unjudged"] == 0
    assert results["models"] == [OPENAI_MODEL]
    assert "temperature 0, reasoning effort none, replies by a JSON" in results["judge"]["note"]
    assert luna.refusals == ["max_tokens"]
    assert len(luna.replies) == luna.replies.total() == 2 * PAIRS
    assert luna.written["thought"] == 0
    out = capsys.readouterr().out
    found = LINE.search(out)
    assert found
    bill, estimate = map(float, found.groups())
    assert bill == pytest.approx(luna.usd, abs=1e-4)
    assert bill == pytest.approx(estimate, rel=0.15)
    assert f"about ${estimate:.4f}" in out
    with capsys.disabled():
        print(out)


def test_a_judge_that_reasons_has_room_for_it_and_an_estimate(capsys):
    luna = Luna()
    with luna_at(luna) as url:
        judge = make_judge(luna_config(url, reasoning_effort="medium"), {})
        replies = list(judge_all(judge, pairs(100), 4))
    assert {reply.choice for reply in replies} == {"A"}
    assert luna.refusals == ["max_tokens", "temperature"]
    assert luna.replies.total() == 100
    assert luna.written["thought"] > 100 * 256  # more than the budget of the replies alone
    assert luna.written["lost"] == 0
    out = capsys.readouterr().out
    assumed = USUAL_REPLY_TOKENS + ASSUMED_REASONING_TOKENS
    assert f"it reasons: {assumed} tokens a reply are assumed" in out
    found = LINE.search(out)
    assert found
    bill, estimate = map(float, found.groups())
    assert bill == pytest.approx(luna.usd, abs=1e-4)
    assert bill < 1.5 * estimate
    assert f"{luna.written['thought']:,} reasoning, 0 in replies cut off" in out
    said = [line for line in out.splitlines() if line.startswith("judge gpt-6-luna: ")]
    assert max(map(len, said)) <= 80
    assert [line for line in said if "replies cost" in line]


def test_a_reply_that_was_cut_off_is_asked_for_again_with_more_room_for_reasoning(runs):
    """The cache kept the 100 tokens of the reply alone, so more room changed nothing."""
    with serving(lambda number, body: chat("", "length")) as server:
        # 100 and the room that is set; 100 + 200 is less than was tried.
        for room, limits in ((300, [400]), (300, [400]), (700, [400, 800]), (200, [400, 800])):
            changes = {"reasoning_effort": "low", "reasoning_tokens": room, "asks": 1}
            assert ask(server, **changes).choice is None
            assert [request["max_tokens"] for request in server.requests] == limits
    with sqlite3.connect(runs / "judge_cache" / "replies.sqlite") as file:
        assert file.execute("SELECT max_tokens FROM replies").fetchall() == [(400,), (800,)]


def test_the_reply_that_shows_that_its_judge_reasons_is_asked_for_again_with_room():
    with serving(lambda number, body: chat(*[("", "length"), (GOOD,)][number])) as server:
        assert ask(server, reasoning_tokens=300).choice == "A"
        assert [request["max_tokens"] for request in server.requests] == [100, 400]


def test_a_server_that_refuses_an_effort_is_asked_without_it():
    def answer(number: int, body: dict[str, Any]) -> Any:
        if "reasoning_effort" in body:
            words = "Unrecognized request argument supplied: reasoning_effort"
            return 400, {"error": {"message": words, "type": "invalid_request_error"}}
        return chat(GOOD)

    with serving(answer) as server:
        judge = make_judge(llm_config(server), {})
        assert judge.reply(Comparison("p", "the post", "one", "two")).choice == "A"
        assert [("response_format" in one, "temperature" in one) for one in server.requests] == [
            (True, True),
            (True, True),
        ]
        assert "no reasoning effort said" in judge.about.note
        ask(server, reasoning_effort="default")
        assert "reasoning_effort" not in server.requests[-1]


def test_tokens_that_were_read_from_the_servers_cache_cost_a_tenth():
    luna = price_of(JudgeSettings())
    assert luna is not None
    tokens = {"prompt_tokens": 1_000_000, "completion_tokens": 1_000_000}
    row = tokens | {"cached_tokens": 900_000, "cache_write_tokens": 0}
    assert luna.of_row(row) == pytest.approx(0.1 * 0.10 + 0.9 * 0.01 + 0.50)
    kept = tokens | {"cached_tokens": 400_000, "cache_write_tokens": 500_000}  # a quarter dearer
    assert luna.of_row(kept) == pytest.approx(0.1 * 0.10 + 0.4 * 0.01 + 0.5 * 0.125 + 0.50)
    # At worst every byte is a token that goes into the cache.
    assert luna.at_worst({"text": "x" * 1_000_000}, 1_000_000) == pytest.approx(0.625, abs=1e-5)
    own = price_of(JudgeSettings(input_price=3, output_price=4))
    assert own is not None
    assert own.of_row(row) == pytest.approx(3 + 4)


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
        (question,) = pairs(1)
        reply = judge.reply(question)
        bill, worst = judge.chat.bill, judge.chat.worst(judge.chat.request(question), 100)
    assert (reply.completion_tokens, bill.written, bill.reasoning) == (written, written, reasoning)
    assert bill.usd == judge.chat.budget.spent == pytest.approx(worst if usd is None else usd)
    assert judge.chat.reasons == (reasoning > 0)


def test_the_cap_counts_the_room_for_reasoning():
    with luna_at(Luna()) as url:
        judge = make_judge(luna_config(url, reasoning_effort="high"), {})
        assert isinstance(judge, OpenAIJudge)
        request = judge.chat.request(pairs(1)[0])
        limit = judge.chat.limit(request, 256)
        assert limit == 256 + 4096
        assert judge.chat.limit(request, 512) == 2 * (256 + 4096)
        size = len(json.dumps(request.body(limit)).encode())
        expected = (0.125 * (size + 16) + 0.50 * (256 + 4096)) / 1e6
        assert judge.chat.worst(request, limit) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("model", "today", "said"),
    [
        ("gpt-6-luna", date(2030, 1, 1), ""),  # no end of it is known
        ("gpt-4o-mini-2024-07-18", date(2026, 9, 1), ""),
        ("gpt-4o-mini-2024-07-18", date(2026, 11, 22), "ends on 2027-01-14, in 53 days"),
        ("gpt-5-mini", date(2026, 12, 10), "ends on 2026-12-11, in 1 days"),
        ("gpt-5-mini", date(2026, 12, 11), "ended on 2026-12-11, and the table of prices, of"),
        ("gpt-3.5-turbo-0125", date(2026, 11, 22), "ended on 2026-10-23: choose another"),
        ("my-own-model", date(2030, 1, 1), ""),
    ],
)
def test_a_model_that_ends_is_warned_of(model, today, said):
    warning = warning_of(model, today)
    assert said in warning
    assert bool(warning) == bool(said)
    assert "\n" not in warning


def test_only_models_that_have_not_ended_have_a_price():
    for name, line in MODELS.items():
        has_ended = line.end is not None and line.end <= AS_OF
        assert (line.read is None) == (line.written is None) == has_ended, name


def test_a_price_that_was_announced_holds_from_its_first_day():
    last, first = (
        known_model("gemini-3.8-flash", day) for day in (date(2026, 12, 31), date(2027, 1, 1))
    )
    assert last is not None
    assert first is not None
    assert (last.read, last.written, first.read, first.written) == (0.75, 3.75, 1.50, 7.50)


def test_every_price_has_the_day_on_which_its_source_was_read():
    for name, line in MODELS.items():
        assert date(2025, 11, 1) <= line.priced <= AS_OF, name
    makers = {
        family_of_model(name) for name in ("gpt-6.1-sol", "claude-haiku-5-5", "gemini-3.8-flash")
    }
    assert makers == {"OpenAI", "Anthropic", "Google"}  # a panel of three makers has a bill


def test_a_cap_on_a_model_without_a_price_is_refused():
    with pytest.raises(UserError, match=r"max_cost needs the price of mine, which the table"):
        price_of(JudgeSettings(model="mine", max_cost=1))


def test_a_judge_of_the_policys_own_maker_is_warned_of_and_another_is_not():
    row = {
        "is_llm": True,
        "judge": "Qwen3-32B",
        "checkpoint": "Qwen/Qwen3-0.6B",
        "policies": ["sft"],
    }
    assert "both by Qwen" in str(judge_note(row))
    for other in ({"judge": "gpt-6-luna"}, {"checkpoint": "random"}, {"judge": "my-own"}):
        assert judge_note(row | other) is None
    assert "both by Google" in str(
        judge_note(row | {"judge": "gemini-x", "policies": ["gemma-2b"]})
    )
    released = row | {"checkpoint": None, "released_policy": "org/qwen2-sft"}
    assert "both by Qwen" in str(judge_note(released))


def test_another_effort_room_for_reasoning_or_name_is_another_judge():
    judge = JudgeSettings(model="gpt-4o-mini-2024-07-18")
    changed: dict[str, Any] = {
        "reasoning_effort": "low",
        "reasoning_tokens": 9,
        "accept_model": "x",
    }
    folders = {replace(judge, **{name: value}).folder for name, value in changed.items()}
    assert len(folders | {judge.folder}) == 4
    assert JudgeSettings(kind="reward_model", model=OPENAI_MODEL).gold == ""
