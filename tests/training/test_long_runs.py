"""Over hundreds of updates memory and open files stay flat: nothing is held that need not be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.walk

ROOT = Path(__file__).parents[2]
UPDATES = 300
FROM = 100
SETTINGS = f"""
    base.hidden_size=32 base.num_layers=1 world.train_posts=64 world.validation_posts=10
    world.train_comparisons=32 world.validation_comparisons=10
    ppo.total_episodes={2 * UPDATES} ppo.batch_size=2 ppo.num_ppo_epochs=1 ppo.samples_every=50
    memory.cpu_threads=1 memory.save_minutes=0.02
""".split()
SCRIPT = """
import json, os, sys
from stages import base, normalize, ppo, rm, sft
from tests.lib.make_stages import run_module
from stages.runs.run import Run
modules = base, sft, rm, normalize, ppo
for module in modules[:-1]:
    run_module(module, {arguments!r})
curve = []
log = Run.log
def measure(run, step, **metrics):
    log(run, step, **metrics)
    pages = int(open("/proc/self/statm").read().split()[1])
    files = len(os.listdir("/proc/self/fd"))
    curve.append((step, pages * os.sysconf("SC_PAGE_SIZE"), files))
Run.log = measure
run_module(ppo, {arguments!r})
json.dump(curve, open("curve.json", "w"))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_three_hundred_updates_of_ppo_hold_no_more_memory_and_files_than_one_hundred(tmp_path):
    arguments = ["--preset", "tiny", "--name", "long", "--set", *SETTINGS]
    code = SCRIPT.format(arguments=arguments)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert [step for step, _, _ in curve] == list(range(1, UPDATES + 1))
    later = curve[FROM:]
    memory = [held for _, held, _ in later]
    files = [count for _, _, count in later]
    early, late = (sum(some) / len(some) for some in (memory[:20], memory[-20:]))
    assert late <= 1.02 * early
    assert max(memory) <= 1.02 * early
    assert max(files) <= min(files) + 2
