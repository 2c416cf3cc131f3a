"""A thousand pairs in both orders, from a warm cache, are analysed in seconds.

Seconds of CPU time of the whole process with its imports, so that other work does not count.
"""

import resource
import subprocess
import sys

import pytest

from stages.finished import read_manifest
from stages.runs import open_stage
from stages.settings.command_line import make_config
from tests.chat_server import GOOD, chat, serving
from tests.conftest import ROOT

pytestmark = pytest.mark.walk

POSTS = 1000
TEXTS = 100  # distinct ones, so that the first pass need not ask 2,000 times
CODE = "from eval import judge, win_rate; judge.main(); win_rate.main()"


def test_a_thousand_pairs_from_a_warm_cache_are_judged_and_analysed_in_seconds(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with open_stage(make_config("tiny"), "summaries") as run:
        for number in range(POSTS):
            text = f" word{number % TEXTS}" * (5 + number % 5)
            row = {"id": f"p{number}", "query": "POST: x", "reference": "one two three"}
            run.append("ppo.jsonl", {**row, "summary": text.strip()})
        run.finish({})
    with serving(lambda number, request: chat(GOOD)) as server:
        settings = [f"judge.base_url={server.url}", "judge.kind=openai", "judge.model=judge"]
        command = [sys.executable, "-c", CODE, "--preset", "tiny", "--set", *settings]
        measured(command, tmp_path)
        paid = len(server.requests)
        seconds, said = measured(command, tmp_path)
        assert len(server.requests) == paid >= 2 * TEXTS
    assert "1000 posts" in said
    assert seconds < 10
    (folder,) = (tmp_path / "runs/tiny/seed44413/win_rate").iterdir()
    results = (read_manifest(folder) or {})["results"]
    found = results["policies"]["ppo"]["statistics"]
    assert found["judgements"] == 2 * POSTS
    assert found["share_first"]["estimate"] == 1.0  # the server always says A
    assert found["swap_consistency"]["estimate"] == 0.0
    assert found["raw"]["estimate"] == pytest.approx(0.5)


def measured(command, folder):
    """CPU seconds of a command, and what it printed."""
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(folder), "OPENAI_API_KEY": "none"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done.stdout
