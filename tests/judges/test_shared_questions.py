"""Replies are reused whatever a judge has learned about its server, and survive a signal."""

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
from tests.lib.chat_server import (
    GOOD,
    always,
    ask,
    chat,
    llm_config,
    prompt_of,
    questions,
    serving,
)
from tests.lib.fabricated_runs import finish_summaries

pytestmark = pytest.mark.usefixtures("judge_environment")

ROOT = Path(__file__).parents[2]


# -- what a judge has learned ----------------------------------------------------------------------


def judge_ten_questions(server: Any, structured: str) -> int:
    """Judge with a form of the replies; returns the number of requests so far."""
    judge = make_judge(llm_config(server, structured=structured), {})
    list(judge_all(judge, questions(10), 2))
    return len(server.requests)


def test_replies_of_either_form_are_found_again():
    """All were paid for again, because a plain run had taught the cache to ask for no schema."""
    with serving(always(chat(GOOD))) as server:
        assert judge_ten_questions(server, structured="auto") == 10
        assert judge_ten_questions(server, structured="off") == 20
        assert judge_ten_questions(server, structured="auto") == 20
        assert judge_ten_questions(server, structured="on") == 20
        assert judge_ten_questions(server, structured="auto") == 20


def test_a_new_question_has_a_schema_after_a_run_without_one():
    with serving(always(chat(GOOD))) as server:
        judge_ten_questions(server, structured="off")
        judge = make_judge(llm_config(server), {})
        judge.reply(Comparison(post_id="p", query="a new post", first="one", second="two"))
    assert "response_format" in server.requests[-1]


def test_a_reply_is_found_again_when_the_server_takes_more_parameters_than_it_did():
    """The first reply is in plain text, because the server refused everything else."""

    def refuse_parameters_at_first(number: int, body: dict[str, Any]) -> Any:
        if number < 10:
            for name in ("temperature", "response_format", "reasoning_effort"):
                if name in body:
                    return 400, {"error": {"message": f"no {name}", "param": name}}
        return chat(GOOD)

    with serving(refuse_parameters_at_first) as server:
        ask(server)
        requests_of_first = len(server.requests)
        ask(server)
    assert len(server.requests) == requests_of_first


# -- signals ---------------------------------------------------------------------------------------

JUDGE = """
import sys
from eval import judge
from tests.lib.make_stages import run_module
run_module(judge, sys.argv[1:])
"""
REPLIES_BEFORE_TROUBLE = 6


def write_summaries(count: int) -> None:
    """Finish the stage `summaries` with this many posts."""
    rows = [
        {
            "id": f"p{number}",
            "query": f"post {number}.",
            "summary": "one",
            "reference": "two",
        }
        for number in range(count)
    ]
    finish_summaries(make_config("tiny"), ppo=rows)


def start_judge(folder: Path, url: str) -> subprocess.Popen[str]:
    """Start the stage as `make eval` does."""
    settings = [
        "judge.kind=openai",
        "judge.model=judge",
        f"judge.base_url={url}",
        "judge.concurrency=4",
    ]
    return subprocess.Popen(
        [sys.executable, "-c", JUDGE, "--preset", "tiny", "--set", *settings],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "none"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class TroubledServer:
    """Answers six requests; then it is slow or busy, until `is_healthy` is set."""

    def __init__(self, trouble: str) -> None:
        self.trouble = trouble
        self.is_healthy = False
        self.paid: Counter[str] = Counter()
        """The number of replies to a prompt."""

    def answer(self, number: int, body: dict[str, Any]) -> Any:
        if number < REPLIES_BEFORE_TROUBLE or self.is_healthy:
            self.paid[prompt_of(body)] += 1
            return chat(GOOD)
        if self.trouble == "slow":
            time.sleep(20)
        return 429, {"error": {"message": "later"}}, {"Retry-After": "60"}


@pytest.mark.walk
@pytest.mark.parametrize("trouble", ["slow", "rate limit"])
def test_a_signal_stops_the_judge_within_5_seconds_and_no_reply_is_paid_for_again(
    tmp_path, trouble
):
    write_summaries(20)
    troubled_server = TroubledServer(trouble)

    with serving(troubled_server.answer) as http:
        # Stop the judge while it waits for the server.
        process = start_judge(tmp_path, http.url)
        while len(http.requests) < REPLIES_BEFORE_TROUBLE + 2 and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.3)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        seconds_to_stop = time.monotonic() - start

        # Run it again to its end.
        troubled_server.is_healthy = True
        assert start_judge(tmp_path, http.url).wait(300) == 0

    assert seconds_to_stop < 5
    assert process.returncode == 130
    [line] = [line for line in errors.splitlines() if "done in" not in line]
    assert line.startswith("stopped by SIGINT: `make eval PRESET=tiny")
    assert len(troubled_server.paid) == 40
    assert set(troubled_server.paid.values()) == {1}
    [folder] = (tmp_path / "runs" / "tiny" / "seed44413" / "judge").iterdir()
    assert (read_manifest(folder) or {})["results"]["unjudged"] == 0
