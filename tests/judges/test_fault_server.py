"""500 pairs in both orders are judged through faults and kills, and no reply is paid for twice.

The server fails on 30% of the requests, and the judge is killed five times. A reply is lost
although it was paid for if the kill falls between the server's last byte and the commit of the
reply; nobody can prevent that. It can only happen to requests that were under way at the kill,
and the cache lists these as requests without an outcome. Every other reply is paid for exactly
once.
"""

import hashlib
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from eval.judges.openai.cache import UNDER_WAY, cache_file
from stages.config.command_line import make_config
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest
from tests.lib.chat_server import serving
from tests.lib.fabricated_runs import finish_summaries
from tests.lib.fault_server import FAULTS, NO_FAULT, SLOW_SECONDS, FaultServer

pytestmark = pytest.mark.walk

ROOT = Path(__file__).parents[2]
PAIRS = 500
CONCURRENCY = 32
KILLS = 5
SETTINGS = {
    "kind": "openai",
    "model": "judge",
    "concurrency": CONCURRENCY,
    "request_seconds": SLOW_SECONDS - 0.5,
    "max_retries": 12,
}


def write_summaries(seed: int) -> list[str]:
    """Write 500 summaries and references of which one is good; returns which, for each post."""
    generator = random.Random(seed)
    better = [generator.choice(("policy", "reference")) for _ in range(PAIRS)]
    rows = []
    for number, winner in enumerate(better):
        row = {"id": f"p{number}", "query": f"POST: {number}"}
        if winner == "policy":
            row["summary"] = f"good summary {number}"
            row["reference"] = f"bad summary {number}"
        else:
            row["summary"] = f"bad summary {number}"
            row["reference"] = f"good summary {number}"
        rows.append(row)
    finish_summaries(make_config("tiny"), ppo=rows)
    return better


def start_judge(folder: Path, url: str) -> subprocess.Popen:
    """Start the stage as the pipeline does."""
    settings = SETTINGS | {"base_url": url}
    command = [
        sys.executable,
        "-m",
        "stages",
        "--stage",
        "judge",
        "--resume-command=make eval",
        "--preset=tiny",
        "--set",
    ]
    command += [f"judge.{name}={value}" for name, value in settings.items()]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "none"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def kill_judge_after(
    requests: int, fault_server: FaultServer, *, folder: Path, url: str, delay: float
) -> None:
    """Run the judge, and kill it some seconds after the server has received so many requests."""
    process = start_judge(folder, url)
    while fault_server.requests < requests and process.poll() is None:
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    process.communicate()


# -- what the cache records ------------------------------------------------------------------------


def recorded_replies(folder: Path) -> dict[int, tuple]:
    """Number of a request -> its key and its finished reply."""
    query = "SELECT id, key, reply FROM requests WHERE reply IS NOT NULL"
    with sqlite3.connect(cache_file(folder / "runs")) as file:
        return {number: (key, reply) for number, key, reply in file.execute(query)}


def recorded_requests(folder: Path, outcome: str) -> Counter:
    """Hash of a prompt -> the number of its requests with this outcome."""
    query = "SELECT prompt_hash FROM requests WHERE outcome = ?"
    with sqlite3.connect(cache_file(folder / "runs")) as file:
        return Counter(prompt_hash for (prompt_hash,) in file.execute(query, (outcome,)))


def by_hash(counts: Counter[str]) -> Counter[str]:
    """The counts of prompts, by the hash that the cache and the judgements have."""
    return Counter({prompt_hash(prompt): count for prompt, count in counts.items()})


def prompt_hash(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


# -- the test --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("judge_environment")
def test_500_pairs_are_judged_rightly_and_paid_for_once_through_faults_and_kills(tmp_path):
    seed = int(os.environ.get("FAULT_SEED", "3"))
    better = write_summaries(seed)
    fault_server = FaultServer(seed)
    generator = random.Random(seed)
    kills = sorted(generator.sample(range(20, 1200), KILLS))

    with serving(fault_server.answer) as http:
        replies: dict[int, tuple] = {}
        for requests in kills:
            kill_judge_after(
                requests,
                fault_server,
                folder=tmp_path,
                url=http.url,
                delay=generator.uniform(0, 0.05),
            )
            replies_after_kill = recorded_replies(tmp_path)
            assert replies.items() <= replies_after_kill.items(), "a kill lost a recorded reply"
            replies = replies_after_kill
        time.sleep(SLOW_SECONDS)  # until the last answers to killed processes have been sent
        process = start_judge(tmp_path, http.url)
        _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    assert replies.items() <= recorded_replies(tmp_path).items()

    [folder] = (tmp_path / "runs" / "tiny" / "seed44413" / "judge").iterdir()
    judgements = read_lines(folder / "judgements.jsonl")
    assert len(judgements) == 2 * PAIRS
    check_verdicts(judgements, better)
    unjudged = {row["prompt_hash"] for row in judgements if row["verdict"] == "unjudged"}
    check_unjudged(unjudged, fault_server)
    results = (read_manifest(folder) or {})["results"]
    assert results["unjudged"] == len(unjudged) / len(judgements)
    check_payments(tmp_path, unjudged, fault_server)
    assert set(fault_server.faults) == {NO_FAULT, *FAULTS}
    assert 0.25 < fault_server.fault_share < 0.35
    print(f"killed after {kills} requests; {dict(fault_server.faults)}")


def check_verdicts(judgements: list[dict], better: list[str]) -> None:
    """Each post has a judgement in either order, in the posts' order, and none is wrong."""
    for number, judgement in enumerate(judgements):
        post = number // 2
        assert judgement["id"] == f"p{post}"
        assert judgement["verdict"] in (better[post], "unjudged")


def check_unjudged(unjudged: set[str], fault_server: FaultServer) -> None:
    """A question is left unjudged after two replies without a verdict: about 1% of them."""
    unusable = by_hash(fault_server.unusable)
    for question in unjudged:
        assert unusable[question] >= 2
    assert len(unjudged) < 0.03 * 2 * PAIRS


def check_payments(folder: Path, unjudged: set[str], fault_server: FaultServer) -> None:
    """Each other question is paid for once, except for replies that could not be recorded.

    These are requests under way at a kill, and those that a busy machine answers too late.
    """
    paid = by_hash(fault_server.paid)
    killed = recorded_requests(folder, UNDER_WAY)
    late = recorded_requests(folder, "lost")

    assert len(paid.keys() | unjudged) == 2 * PAIRS
    for question, count in paid.items():
        assert 1 <= count <= 1 + killed[question] + late[question]
    paid_again = paid.total() - len(paid)
    assert paid_again <= killed.total() + late.total()
    assert killed.total() <= KILLS * CONCURRENCY
    print(f"{killed.total()} requests were under way at the kills; {paid_again} were paid again")
