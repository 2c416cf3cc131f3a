"""Replies found again whatever was learned since, shared between processes, and kept at a stop."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eval.judge import make_judge
from eval.judges.protocol import Comparison, judge_all
from stages.config.command_line import make_config
from stages.runs.manifest import read_manifest
from tests.lib.chat_server import GOOD, ask, chat, llm_config, serving
from tests.lib.fabricated_runs import finish_summaries

pytestmark = pytest.mark.usefixtures("judge_environment")
ROOT = Path(__file__).parents[2]
QUESTIONS = [Comparison(f"p{k}", f"post {k}.", "one", "two") for k in range(10)]


def test_posts_answered_by_a_schema_are_not_paid_for_again_after_a_plain_run():
    """It was 10 of 10: the plain run had taught the cache that no schema is taken."""
    with serving(lambda number, body: chat(GOOD)) as server:
        for form, requests in (("auto", 10), ("off", 20), ("auto", 20), ("on", 20), ("auto", 20)):
            judge = make_judge(llm_config(server, structured=form), {})
            list(judge_all(judge, QUESTIONS, 2))
            assert len(server.requests) == requests, form
        new = make_judge(llm_config(server), {})
        new.reply(Comparison("p", "a new post", "one", "two"))
        assert "response_format" in server.requests[-1]


def test_a_reply_is_found_again_when_the_server_takes_more_than_it_did():
    """Asked in plain text and at its own temperature, because the server refused the rest."""

    def refusing(number: int, body: dict[str, Any]) -> Any:
        for name in ("temperature", "response_format", "reasoning_effort"):
            if name in body and number < 10:
                return 400, {"error": {"message": f"no {name}", "param": name}}
        return chat(GOOD)

    with serving(refusing) as server:
        ask(server)
        paid = len(server.requests)
        ask(server)
        assert len(server.requests) == paid


def write_posts(count: int) -> None:
    texts = {"summary": "one", "reference": "two"}
    rows = [{"id": f"p{k}", "query": f"post {k}.", **texts} for k in range(count)]
    finish_summaries(make_config("tiny"), ppo=rows)


JUDGE = """
import sys
from eval import judge
from tests.lib.make_stages import run_module
run_module(judge, sys.argv[1:])
"""


def judging(folder: Path, url: str) -> subprocess.Popen[str]:
    """The stage as `make eval` starts it."""
    words = ["judge.kind=openai", "judge.model=judge", f"judge.base_url={url}"]
    arguments = ["--preset", "tiny", "--set", *words, "judge.concurrency=4"]
    return subprocess.Popen(
        [sys.executable, "-c", JUDGE, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "none"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.walk
@pytest.mark.parametrize("trouble", ["slow", "rate limit"])
def test_a_signal_ends_it_within_5_seconds_with_one_line_and_nothing_is_paid_for_again(
    tmp_path, trouble
):
    """Replies that take 20 s, and a server that asks to wait a minute."""
    write_posts(20)
    paid: Counter[str] = Counter()
    state = {"healthy": 6}

    def answer(number: int, body: dict[str, Any]) -> Any:
        if number >= state["healthy"]:
            if trouble == "slow":
                time.sleep(20)
            return 429, {"error": {"message": "later"}}, {"Retry-After": "60"}
        paid[body["messages"][0]["content"]] += 1
        return chat(GOOD)

    with serving(answer) as server:
        process = judging(tmp_path, server.url)
        while len(server.requests) < 8 and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.3)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert time.monotonic() - start < 5
        assert process.returncode == 130
        lines = [line for line in said.splitlines() if "done in" not in line]
        assert len(lines) == 1
        assert lines[0].startswith("stopped by SIGINT: `make eval PRESET=tiny")
        state["healthy"] = 10**9
        assert judging(tmp_path, server.url).wait(60) == 0
    assert len(paid) == paid.total() == 40
    (folder,) = (tmp_path / "runs" / "tiny" / "seed44413" / "judge").iterdir()
    assert (read_manifest(folder) or {})["results"]["unjudged"] == 0
