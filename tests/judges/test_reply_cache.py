"""A reply is paid for once, whatever the process that asks, and a cap on the cost is kept."""

import json
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eval.calibration import calibrate
from eval.controls import judge_controls
from eval.judge import judge_summaries, make_judge
from eval.judges.openai.cache import ReplyCache, cache_file
from eval.judges.openai.server_judge import OpenAIJudge
from eval.judges.protocol import Comparison, judge_all
from stages.config.errors import UserError
from stages.config.judge import Checks
from stages.runs.manifest import stage_folder
from stages.runs.run import open_stage
from tests.lib.chat_server import GOOD, always, ask, chat, in_turn, llm_config, questions, serving

pytestmark = pytest.mark.usefixtures("judge_environment")

ROOT = Path(__file__).parents[2]
# USD per million tokens. A reply costs 0.10 USD for 1,000 tokens read and 0.10 for 100 written. A
# request has 1,400 bytes, each a token at worst, so its maximum cost is 0.14 + 0.10 USD.
PRICES = {"input_price": 100, "output_price": 1000}


# -- replies that are found again ------------------------------------------------------------------


def test_an_answered_question_is_not_paid_for_again():
    with serving(always(chat(GOOD))) as server:
        first = ask(server)
        second = ask(server)

    assert second == first
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "judge-2024-01-01"},
        {"temperature": 1.0},
        {"max_tokens": 999},
        {"reasoning_effort": "low"},
        {"structured": "off"},
        {"axis": "accuracy"},
    ],
)
def test_another_setting_is_another_question(changes):
    with serving(always(chat(GOOD))) as server:
        ask(server)
        ask(server, **changes)
    assert len(server.requests) == 2


def test_another_server_is_another_question():
    with serving(always(chat(GOOD))) as first, serving(always(chat(GOOD))) as second:
        ask(first)
        ask(second)
    assert len(first.requests) == 1
    assert len(second.requests) == 1


def test_the_other_order_is_another_question():
    with serving(always(chat(GOOD))) as server:
        judge = make_judge(llm_config(server), {})
        judge.reply(Comparison(post_id="p", query="the post", first="one", second="two"))
        judge.reply(Comparison(post_id="p", query="the post", first="two", second="one"))
    assert len(server.requests) == 2


# -- the file --------------------------------------------------------------------------------------


def test_only_a_finished_reply_is_recorded(runs):
    answers = [
        (500, {}),
        (200, "oops"),  # not JSON
        chat(GOOD, "error"),
        chat(GOOD, "length"),
        chat("B"),
    ]
    [question] = questions(1)
    with serving(in_turn(*answers)) as server:
        make_judge(llm_config(server), {}).reply(question)

    with sqlite3.connect(cache_file(runs)) as file:
        requests = file.execute("SELECT outcome, reply FROM requests ORDER BY id").fetchall()
    outcomes = [outcome for outcome, _ in requests]
    assert "500" in outcomes[0]
    assert outcomes[1:] == ["lost", "lost", "reply", "reply"]
    has_reply = [reply is not None for _, reply in requests]
    assert has_reply == [False, False, False, False, True]


def test_a_cache_of_another_version_is_left_alone(runs):
    old_cache = runs / "judge_cache" / "replies.sqlite"
    old_cache.parent.mkdir(parents=True)
    with sqlite3.connect(old_cache) as file:
        file.execute("CREATE TABLE replies (key TEXT, raw TEXT)")
    content = old_cache.read_bytes()

    with serving(always(chat(GOOD))) as server:
        reply = ask(server)

    assert reply.choice == "A"
    assert old_cache.read_bytes() == content


@pytest.mark.parametrize("reply", ["x", "{}", "7"])
def test_a_damaged_cache_is_named_in_one_line(runs, reply):
    with serving(always(chat(GOOD))) as server:
        ask(server)
        with sqlite3.connect(cache_file(runs)) as file:
            file.execute("UPDATE requests SET reply = ?", (reply,))

        with pytest.raises(UserError, match=r"replies-2\.sqlite: the cache of replies fails"):
            ask(server)


def test_a_missing_table_is_created_again(runs):
    with serving(always(chat(GOOD))) as server:
        ask(server)
        with sqlite3.connect(cache_file(runs)) as file:
            file.execute("ALTER TABLE requests RENAME TO other")

        assert ask(server).choice == "A"


WRITE_REPLIES = """
import sys
import time
from pathlib import Path
from eval.judges.openai.cache import ReplyCache
from eval.judges.openai.replies import Completion

folder = Path(sys.argv[1])
process = sys.argv[2]
start = float(sys.argv[3])
reply = Completion(
    text="x",
    finish_reason="stop",
    model="x",
    has_thought=False,
    prompt_tokens=1,
    completion_tokens=1,
    cached_tokens=0,
    cache_write_tokens=0,
)
time.sleep(max(0.0, start - time.time()))
for number in range(200):
    ReplyCache(folder / f"{number}.sqlite")
cache = ReplyCache(folder / "0.sqlite")
for number in range(100):
    for key in (f"{process}{number}", "both"):
        request = cache.begin(key, "x", 1.0)
        cache.settle(request, usd=0.5, outcome="reply", reply=reply)
"""


@pytest.mark.walk
def test_two_processes_can_create_a_file_and_write_to_it_at_once(tmp_path):
    """SQLite does not wait while it changes the journal's mode, so one of two processes failed."""
    start = str(time.time() + 1)
    command = [sys.executable, "-c", WRITE_REPLIES, str(tmp_path)]
    first = subprocess.Popen([*command, "a", start], cwd=ROOT)
    second = subprocess.Popen([*command, "b", start], cwd=ROOT)

    assert first.wait(60) == 0
    assert second.wait(60) == 0
    cache = ReplyCache(tmp_path / "0.sqlite")
    keys_of_first = [f"a{number}" for number in range(100)]
    keys_of_second = [f"b{number}" for number in range(100)]
    assert cache.spent(keys_of_first + keys_of_second) == 100.0
    assert len(cache.replies("both")) == 200


# -- what is printed about the cost ----------------------------------------------------------------


def test_the_estimate_is_printed_before_the_first_request(capsys):
    printed_before_request = []

    def answer(number, body):
        printed_before_request.append(capsys.readouterr().out)
        return chat(GOOD)

    with serving(answer) as server:
        judge = make_judge(llm_config(server, **PRICES), {})
        assert isinstance(judge, OpenAIJudge)
        judge.prepare(questions(3))

    assert len(server.requests) == 1  # to find out what the server supports
    [line] = printed_before_request
    assert "3 of 3 replies to ask for" in line
    body = judge.chat.request(questions(1)[0], 1).body
    size = len(json.dumps(body))
    usual = 3 * (100 * (size / 4 + 16) + 1000 * 60) / 1e6
    maximum = 3 * (100 * (size + 16) + 1000 * 100) / 1e6
    assert f"about ${usual:.4f}, at most ${maximum:.4f}" in line


def test_the_estimate_leaves_out_replies_that_are_in_the_cache(capsys):
    with serving(always(chat(GOOD))) as server:
        judge = make_judge(llm_config(server, **PRICES), {})
        list(judge_all(judge, questions(2), 1))
        judge.prepare(questions(3))

    line, _ = capsys.readouterr().out.splitlines()[-2:]
    assert "1 of 3 replies to ask for" in line
    assert "$0.4000 spent before" in line


def test_the_bill_is_printed_after_the_last_reply(capsys):
    with serving(always(chat(GOOD))) as server:
        judge = make_judge(llm_config(server, **PRICES), {})
        list(judge_all(judge, questions(3), 2))
    assert "judge judge: 3 replies; $0.6000 spent in all" in capsys.readouterr().out


# -- the cap on the cost ---------------------------------------------------------------------------


def judge_20_questions(config, concurrency):
    """A new judge asks for 20 replies, which cost 4 USD."""
    judge = make_judge(config, {})
    return list(judge_all(judge, questions(20), concurrency))


def test_the_cap_holds_with_many_requests_under_way():
    """For 1 USD there are 4 replies at 0.20 USD; a fifth one could cost 0.24 USD."""

    def answer(number, body):
        time.sleep(0.05)
        return chat(GOOD)

    with serving(answer) as server:
        config = llm_config(server, max_cost=1.0, **PRICES)
        with pytest.raises(UserError, match=r"judge.max_cost=1.*raise it"):
            judge_20_questions(config, concurrency=8)
    assert len(server.requests) == 4


def test_the_cap_counts_what_was_spent_before():
    with serving(always(chat(GOOD))) as server:
        one_dollar = llm_config(server, max_cost=1.0, **PRICES)
        for _ in range(2):
            with pytest.raises(UserError, match=r"judge.max_cost=1.*raise it"):
                judge_20_questions(one_dollar, concurrency=8)
            assert len(server.requests) == 4

        two_dollars = llm_config(server, max_cost=2.0, **PRICES)
        with pytest.raises(UserError, match="max_cost=2"):
            judge_20_questions(two_dollars, concurrency=8)
        assert len(server.requests) == 9


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 1000}, {"prompt_tokens": -9}])
def test_a_reply_without_token_counts_is_counted_at_its_maximum_cost(usage):
    with serving(always(chat(GOOD, usage=usage))) as server:
        config = llm_config(server, max_cost=1.0, **PRICES)
        with pytest.raises(UserError, match=r"judge.max_cost=1"):
            judge_20_questions(config, concurrency=2)
    assert len(server.requests) == 4  # at 0.24 USD each


def test_a_reply_that_breaks_off_is_counted_at_its_maximum_cost():
    """It may have been paid for. Four of them at 0.24 USD leave too little of 1 USD."""
    [question] = questions(1)
    with serving(always((200, "{"))) as server:
        config = llm_config(server, max_cost=1.0, max_retries=20, **PRICES)
        with pytest.raises(UserError, match=r"judge.max_cost=1"):
            make_judge(config, {}).reply(question)
    assert len(server.requests) == 4


def test_a_request_that_the_server_refuses_costs_nothing():
    rate_limit = (429, {"error": {"message": "later"}})
    [question] = questions(1)
    replies = [rate_limit] * 9 + [chat(GOOD)]
    with serving(in_turn(*replies)) as server:
        config = llm_config(server, max_cost=0.3, max_retries=20, **PRICES)
        reply = make_judge(config, {}).reply(question)
    assert reply.choice == "A"


# -- one cap for several stages --------------------------------------------------------------------


def write_summaries(config, *policies):
    """Finish the stage `summaries` with two posts by these policies."""
    shutil.rmtree(stage_folder(config, "summaries"), ignore_errors=True)
    with open_stage(config, "summaries") as run:
        for policy in policies:
            for number in range(2):
                row = {
                    "id": f"p{number}",
                    "query": f"post {number}.",
                    "reference": f"two words {number}",
                    "summary": policy,
                }
                run.append(f"{policy}.jsonl", row)
        run.finish({})


def test_summaries_and_controls_share_one_cap():
    """Two posts by two policies need 8 replies; the controls of two posts need more than 2."""
    with serving(always(chat(GOOD))) as server:
        config = llm_config(server, **PRICES)
        write_summaries(config, "ppo", "sft")
        judge_summaries(config)
        assert len(server.requests) == 8

        # 8 replies cost 1.60 USD, so two more fit, and then 0.10 USD are left.
        with pytest.raises(UserError, match=r"judge.max_cost=2.1"):
            judge_controls(llm_config(server, max_cost=2.1, **PRICES))
        assert len(server.requests) == 10

        # The replies about controls count toward the cap of the summaries, too.
        judge_controls(config)
        requests = len(server.requests)
        write_summaries(config, "ppo", "sft", "rloo")
        with pytest.raises(UserError, match=r"judge.max_cost="):
            judge_summaries(llm_config(server, max_cost=0.2 * requests + 0.3, **PRICES))
        assert len(server.requests) == requests + 1


def test_a_resumed_calibration_counts_what_its_judgements_have_cost():
    """For 1 USD there are four replies of 10 pairs, and no more after a restart."""
    with serving(always(chat(GOOD))) as server:
        config = llm_config(server, max_cost=1.0, concurrency=1, **PRICES)
        config = config.changed(
            world=config.world.changed(train_posts=5, train_comparisons=5),
            checks=Checks(calibration_pairs=10),
        )
        for _ in range(2):
            with pytest.raises(UserError, match=r"judge.max_cost=1"):
                calibrate(config)
            assert len(server.requests) == 4
