"""An algorithm from outside the package: trained, judged and shown like those of the table."""

import os
import subprocess
import sys

import pytest

from stages.runs.files import read_json, read_lines
from tests.lib.places import ROOT

# What somebody writes to add an algorithm: settings, a formula, and an entry.
ALGORITHM = '''
from stages.rl.algorithms import ALGORITHMS, Algorithm
from stages.config.ppo import PolicyGradient

class Best(PolicyGradient):
    """The best response to each query is reinforced, the others are not (RAFT)."""
    samples_per_query: int = 4

def best_of_query(batch, settings):
    scores = batch.rewards.sum(dim=1).view(-1, batch.samples_per_query)
    is_best = scores == scores.max(dim=1, keepdim=True).values
    return is_best.float().view(-1, 1).expand_as(batch.rewards), None

ALGORITHMS["best"] = Algorithm(
    title="Best of four", summary="the best response", settings=Best, advantages=best_of_query
)
'''
HELP = f"""{ALGORITHM}
from stages.pipeline.targets import help_lines
print(*help_lines(), sep="\\n")
"""
RUN = f"""{ALGORITHM}
import sys
from stages.__main__ import main
main(sys.argv[1:])
"""
SETTINGS = """
    base.hidden_size=32 base.num_layers=1 eval.posts=8 checks.control_posts=4
    world.train_posts=96 world.validation_posts=8 memory.cpu_threads=1
    world.train_comparisons=64 world.validation_comparisons=32
    ppo.total_episodes=32 ppo.batch_size=32 ppo.critic_updates=0
    best.total_episodes=64 best.batch_size=32 best.learning_rate=1e-3
""".split()


def run_python(code, folder, *arguments):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_make_help_lists_it_next_to_the_others(tmp_path):
    done = run_python(HELP, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "best the best response" in lines


@pytest.mark.walk
def test_it_is_trained_judged_and_shown_on_the_page(tmp_path):
    goals = ["sft", "rm", "ppo", "best", "eval"]
    done = run_python(RUN, tmp_path, *goals, "NAME=mine", f"SET={' '.join(SETTINGS)}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning" not in done.stderr

    folder = tmp_path / "runs/mine/seed44413"
    metrics = read_lines(folder / "best/metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    assert metrics[1]["objective/kl"] != 0
    assert not (folder / "best/critic").exists()

    results = read_json(folder / "win_rate/facts/manifest.json")["results"]
    assert results["policies"]["best"]["posts"] == 8

    (page,) = (folder / "report/facts").glob("mine-*.md")
    assert "Best of four" in page.read_text(encoding="utf-8")
