"""500 pairs in both orders at a server of which 30 % of the replies are faults, killed five times.

A kill between the server's last byte and our commit loses a reply that was paid for: nobody can
prevent that. It can hit only requests under way at the kill, and the ledger knows these: they are
the tries without an outcome. Everything else is paid for exactly once.
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
from tests.lib.fault_server import FAULTS, SLOW_SECONDS, FaultServer

pytestmark = pytest.mark.walk

ROOT = Path(__file__).parents[2]
PAIRS = 500
CONCURRENCY = 32
KILLS = 5


def write_summaries(seed: int) -> list[str]:
    """500 posts, on each of which one of the two is good; returns who."""
    draw = random.Random(seed)
    better = [draw.choice(("policy", "reference")) for _ in range(PAIRS)]
    rows = []
    for number, who in enumerate(better):
        words = ("good", "bad") if who == "policy" else ("bad", "good")
        ours, theirs = (f"{word} summary {number}" for word in words)
        row = {"id": f"p{number}", "query": f"POST: {number}", "summary": ours}
        rows.append({**row, "reference": theirs})
    finish_summaries(make_config("tiny"), ppo=rows)
    return better


def judge(folder: Path, url: str) -> subprocess.Popen:
    """The stage as a user starts it."""
    settings = {
        **{"kind": "openai", "model": "judge", "base_url": url, "concurrency": CONCURRENCY},
        **{"request_seconds": SLOW_SECONDS - 0.5, "max_retries": 12},
    }
    words = [f"judge.{name}={value}" for name, value in settings.items()]
    stage = ["--stage", "judge", "--resume-command=make eval"]
    command = [sys.executable, "-m", "stages", *stage, "--preset", "tiny", "--set", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "none"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def kept(folder: Path) -> dict[int, tuple]:
    """All replies in the cache file."""
    with sqlite3.connect(cache_file(folder / "runs")) as file:
        rows = file.execute("SELECT id, key, reply FROM requests WHERE reply IS NOT NULL")
        return {row[0]: row[1:] for row in rows}


def requests_by_prompt(folder: Path, outcome: str) -> Counter:
    """The number of requests that ended so, by the hash of their prompt."""
    query = "SELECT prompt_hash FROM requests WHERE outcome = ?"
    with sqlite3.connect(cache_file(folder / "runs")) as file:
        return Counter(prompt for (prompt,) in file.execute(query, (outcome,)))


@pytest.mark.usefixtures("judge_environment")
def test_500_pairs_are_judged_rightly_and_paid_for_once_through_faults_and_kills(tmp_path):
    seed = int(os.environ.get("FAULT_SEED", "3"))
    better, draw, books = write_summaries(seed), random.Random(seed), FaultServer(seed)
    moments = sorted(draw.sample(range(20, 1200), KILLS))
    before: dict[int, tuple] = {}
    with serving(books.answer) as server:
        for moment in moments:
            process = judge(tmp_path, server.url)
            while sum(books.kinds.values()) < moment and process.poll() is None:
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.05))
            process.kill()
            process.communicate()
            now = kept(tmp_path)
            assert before.items() <= now.items(), "a kill lost a reply that was kept"
            before = now
        time.sleep(SLOW_SECONDS)  # the server's answers to the dead have gone out
        done = judge(tmp_path, server.url)
        errors = done.communicate()[1]
        assert done.returncode == 0, errors.decode()

    (folder,) = (tmp_path / "runs" / "tiny" / "seed44413" / "judge").iterdir()
    rows = read_lines(folder / "judgements.jsonl")
    expected = [(f"p{k}", who) for k, who in enumerate(better) for _ in range(2)]
    assert [row["id"] for row in rows] == [post_id for post_id, _ in expected]
    wrong = [
        row
        for row, (_, who) in zip(rows, expected, strict=True)
        if row["verdict"] not in (who, "unjudged")
    ]
    assert wrong == []
    assert before.items() <= kept(tmp_path).items()

    # Two replies without a verdict leave a question unjudged: about 1% of them.
    unjudged = [row["prompt_hash"] for row in rows if row["verdict"] == "unjudged"]
    unusable = Counter({digest(prompt): count for prompt, count in books.unusable.items()})
    assert all(unusable[prompt] >= 2 for prompt in unjudged)
    assert len(unjudged) < 0.03 * len(rows)
    results = (read_manifest(folder) or {})["results"]
    assert results["unjudged"] == len(unjudged) / len(rows)

    # Each other question is paid for once, apart from requests under way at a kill, and from those
    # that a busy machine answers too late.
    killed = requests_by_prompt(tmp_path, UNDER_WAY)
    late = requests_by_prompt(tmp_path, "lost")
    paid = Counter({digest(prompt): count for prompt, count in books.paid.items()})
    assert len(paid.keys() | {*unjudged}) == 2 * PAIRS
    assert all(1 <= count <= 1 + killed[one] + late[one] for one, count in paid.items())
    twice = paid.total() - len(paid)
    assert twice <= killed.total() + late.total()
    assert killed.total() <= KILLS * CONCURRENCY
    assert set(books.kinds) == {"good", *FAULTS}
    share = 1 - books.kinds["good"] / books.kinds.total()
    assert 0.25 < share < 0.35
    print(f"kills after {moments} requests; {dict(books.kinds)}; faults {share:.1%}")
    print(f"{killed.total()} under way at the kills, of which {twice} had been paid for")


def digest(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]
