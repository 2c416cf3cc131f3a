"""What was paid for: it is never paid for again, and the cap on it holds."""

import json
import shutil
import sqlite3
import subprocess
import sys
import time
from itertools import product
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
from tests.lib.chat_server import GOOD, ask, chat, llm_config, serving

pytestmark = pytest.mark.usefixtures("judge_environment")
ROOT = Path(__file__).parents[2]
# 1,000 tokens read and 100 written cost 0.1 + 0.1 USD; at the most, a token for each of the 1,400
# bytes of a request, 0.24.
PRICES = {"input_price": 100, "output_price": 1000}


def questions(count: int) -> list[Comparison]:
    return [Comparison("p", f"post {k}.", "one", "two") for k in range(count)]


def rows(runs: Path, query: str) -> list[tuple]:
    with sqlite3.connect(cache_file(runs)) as file:
        return file.execute(query).fetchall()


def test_what_was_answered_is_not_paid_for_again():
    with serving(lambda number, body: chat(GOOD)) as server:
        first = ask(server)
        assert ask(server) == first
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
    with serving(lambda number, body: chat(GOOD)) as server:
        ask(server)
        ask(server, **changes)
    assert len(server.requests) == 2


def test_another_server_and_the_other_order_are_other_questions():
    with serving(lambda number, body: chat(GOOD)) as server, serving(lambda *_: chat(GOOD)) as two:
        ask(server)
        ask(two)
        make_judge(llm_config(server), {}).reply(Comparison("p", "the post", "two", "one"))
    assert (len(server.requests), len(two.requests)) == (2, 1)


def test_only_a_finished_reply_is_kept(runs):
    answers = [(500, {}), (200, "oops"), chat(GOOD, "error"), chat(GOOD, "length"), chat("B")]
    with serving(lambda number, body: answers[number]) as server:
        make_judge(llm_config(server), {}).reply(questions(1)[0])
    outcomes = rows(runs, "SELECT outcome, reply IS NOT NULL FROM requests ORDER BY id")
    assert [kept for _, kept in outcomes] == [0, 0, 0, 0, 1]
    assert "500" in outcomes[0][0]
    assert [outcome for outcome, _ in outcomes[1:]] == ["lost", "lost", "reply", "reply"]


def test_a_cache_of_another_version_is_left_alone(runs):
    old = runs / "judge_cache" / "replies.sqlite"
    old.parent.mkdir(parents=True)
    with sqlite3.connect(old) as file:
        file.execute("CREATE TABLE replies (key TEXT, raw TEXT)")
    before = old.read_bytes()
    with serving(lambda number, body: chat(GOOD)) as server:
        assert ask(server).choice == "A"
    assert old.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE requests SET reply = 'x'",
        "UPDATE requests SET reply = '{}'",
        "UPDATE requests SET reply = '7'",
        "ALTER TABLE requests RENAME TO other",
    ],
)
def test_a_damaged_cache_is_one_line_that_names_the_file(runs, change):
    with serving(lambda number, body: chat(GOOD)) as server:
        ask(server)
        with sqlite3.connect(cache_file(runs)) as file:
            file.execute(change)
        if "RENAME" in change:
            assert ask(server).choice == "A"  # the table is new
            return
        with pytest.raises(UserError, match=r"replies-2\.sqlite: the cache of replies fails"):
            ask(server)


WRITER = """
import sys, time
from pathlib import Path
from eval.judges.openai.cache import ReplyCache
from eval.judges.openai.replies import Completion
folder, who = Path(sys.argv[1]), sys.argv[2]
time.sleep(max(0.0, float(sys.argv[3]) - time.time()))
for k in range(200):
    cache = ReplyCache(folder / f"{k}.sqlite")
cache = ReplyCache(folder / "0.sqlite")
reply = Completion(
    text="x", finish_reason="stop", model="x", has_thought=False, prompt_tokens=1,
    completion_tokens=1, cached_tokens=0, cache_write_tokens=0,
)
for k in range(100):
    for key in (f"{who}{k}", "both"):
        number = cache.begin(key, "x", 1.0)
        cache.settle(number, usd=0.5, outcome="reply", reply=reply)
"""


@pytest.mark.walk
def test_two_processes_may_make_a_file_and_write_to_it_at_once(tmp_path):
    """SQLite refuses to wait while it changes the journal's mode: one of two came to grief."""
    start = str(time.time() + 1)
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, who, start], cwd=ROOT) for who in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    cache = ReplyCache(tmp_path / "0.sqlite")
    assert cache.spent([f"{who}{k}" for who in "ab" for k in range(100)]) == 100.0
    assert len(cache.replies("both")) == 200


# -- money -----------------------------------------------------------------------------------------


def test_the_estimate_is_printed_before_the_first_request(capsys):
    lines = []

    def answer(number, body):
        lines.append(capsys.readouterr().out)
        return chat(GOOD)

    with serving(answer) as server:
        judge = make_judge(llm_config(server, **PRICES), {})
        assert isinstance(judge, OpenAIJudge)
        judge.prepare(questions(3))
        assert len(server.requests) == 1  # to find out what the server takes
        line = lines[0]
        assert "3 of 3 replies to ask for" in line
        size = len(json.dumps(judge.chat.request(questions(1)[0], 1).body))
        usual = 3 * (100 * (size / 4 + 16) + 1000 * 60) / 1e6
        worst = 3 * (100 * (size + 16) + 1000 * 100) / 1e6
        assert f"about ${usual:.4f}, at most ${worst:.4f}" in line
        list(judge_all(judge, questions(2), 1))
        judge.prepare(questions(3))
        line, _ = capsys.readouterr().out.splitlines()[-2:]
        assert "1 of 3 replies to ask for" in line
        assert "$0.4000 spent before" in line


def test_the_bill_is_printed_after_the_last_reply(capsys):
    with serving(lambda number, body: chat(GOOD)) as server:
        list(judge_all(make_judge(llm_config(server, **PRICES), {}), questions(3), 2))
    assert "judge judge: 3 replies; $0.6000 spent in all" in capsys.readouterr().out


def test_the_cap_holds_with_many_under_way_and_counts_what_was_paid_before():
    """20 questions at 0.20 USD, at most 0.24 each, for 1 USD: 4 replies, then no more."""

    def answer(number, body):
        time.sleep(0.05)
        return chat(GOOD)

    with serving(answer) as server:
        config = llm_config(server, max_cost=1.0, **PRICES)
        for _ in range(2):
            with pytest.raises(UserError, match=r"judge.max_cost=1.*raise it"):
                list(judge_all(make_judge(config, {}), questions(20), 8))
            assert len(server.requests) == 4
        more = llm_config(server, max_cost=2.0, **PRICES)
        with pytest.raises(UserError, match="max_cost=2"):
            list(judge_all(make_judge(more, {}), questions(20), 8))
        assert len(server.requests) == 9


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 1000}, {"prompt_tokens": -9}])
def test_a_reply_that_hides_its_tokens_counts_at_its_worst_price(usage):
    with serving(lambda number, body: chat(GOOD, usage=usage)) as server:
        config = llm_config(server, max_cost=1.0, **PRICES)
        with pytest.raises(UserError, match=r"judge.max_cost=1"):
            list(judge_all(make_judge(config, {}), questions(20), 2))
    assert len(server.requests) == 4  # at 0.24 each


def test_each_try_whose_end_nobody_saw_counts_at_its_worst_price():
    """A broken body may have been paid for. Four of them at 0.24 USD leave no room in 1 USD."""
    with serving(lambda number, body: (200, "{")) as server:
        config = llm_config(server, max_cost=1.0, max_retries=20, **PRICES)
        with pytest.raises(UserError, match=r"judge.max_cost=1"):
            make_judge(config, {}).reply(questions(1)[0])
    assert len(server.requests) == 4


def test_a_refused_try_costs_nothing():
    later = (429, {"error": {"message": "later"}})
    with serving(lambda number, body: later if number < 9 else chat(GOOD)) as server:
        config = llm_config(server, max_cost=0.3, max_retries=20, **PRICES)
        assert make_judge(config, {}).reply(questions(1)[0]).choice == "A"


def summarize(config, *policies):
    shutil.rmtree(stage_folder(config, "summaries"), ignore_errors=True)
    with open_stage(config, "summaries") as run:
        for policy, k in product(policies, range(2)):
            texts = {"query": f"post {k}.", "reference": f"two words {k}", "summary": policy}
            run.append(f"{policy}.jsonl", {"id": f"p{k}", **texts})
        run.finish({})


def test_summaries_and_controls_may_spend_what_the_other_has_left():
    """2 posts by two policies: 8 replies, then 9 controls, at 0.20 USD each and at most 0.24."""
    with serving(lambda number, body: chat(GOOD)) as server:
        config = llm_config(server, **PRICES)
        summarize(config, "ppo", "sft")
        judge_summaries(config)
        assert len(server.requests) == 8
        with pytest.raises(UserError, match=r"judge.max_cost=2.1"):
            judge_controls(llm_config(server, max_cost=2.1, **PRICES))
        assert len(server.requests) == 10
        judge_controls(config)
        asked = len(server.requests)
        summarize(config, "ppo", "sft", "rloo")
        with pytest.raises(UserError, match=r"judge.max_cost="):
            judge_summaries(llm_config(server, max_cost=0.2 * asked + 0.3, **PRICES))
    assert len(server.requests) == asked + 1


def test_a_resumed_calibration_counts_what_its_kept_judgements_have_cost():
    """10 pairs at 0.20 USD a reply for 1 USD: four replies, and no more after a restart."""
    with serving(lambda number, body: chat(GOOD)) as server:
        config = llm_config(server, max_cost=1.0, concurrency=1, **PRICES)
        world = config.world.changed(train_posts=5, train_comparisons=5)
        config = config.changed(world=world, checks=Checks(calibration_pairs=10))
        for _ in range(2):
            with pytest.raises(UserError, match=r"judge.max_cost=1"):
                calibrate(config)
            assert len(server.requests) == 4
