"""Everything runs where the tensors of a model must not meet those of the CPU. No GPU is needed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reports.parts import page
from stages.runs.files import read_json
from tests.lib import pretend_card

pytestmark = [
    pytest.mark.walk,
    pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler (g++)"),
]

ROOT = Path(__file__).parents[1]
SETTINGS = """
    base.hidden_size=32 base.num_layers=2 world.train_posts=96 world.validation_posts=9
    world.train_comparisons=64 world.validation_comparisons=20 eval.best_of=2
    ppo.total_episodes=32 ppo.batch_size=16 ppo.critic_updates=1 ppo.samples_per_query=2
    rloo.total_episodes=32 rloo.batch_size=16 grpo.total_episodes=32 grpo.batch_size=16
    memory.microbatch_size=8
""".split()
ADAPTERS = ["lora.rank=4", "memory.gradient_checkpointing=true", "memory.frozen_dtype=bf16"]
MIXED = """
import sys, torch
sys.setswitchinterval(5)  # other threads wait: one of backward's would outlive the interpreter
there = torch.ones(2, device="cuda", requires_grad=True)
(there * 2).sum().backward()
print(there.grad.device, there.grad.tolist(), torch.tensor([1], device="cuda").device)
for mistake in (lambda: there + torch.ones(2), lambda: there.detach().numpy()):
    try:
        print("taken:", mistake())
    except (RuntimeError, TypeError) as error:
        print(error)
"""


@pytest.fixture(scope="module")
def on_card(tmp_path_factory):
    """The environment of a process that has the card."""
    folder = tmp_path_factory.mktemp("card")
    pretend_card.prepare(folder)
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def make(folder: Path, goals: str, environment: dict[str, str], *settings: str) -> Path:
    """Make the goals in `folder`; returns the run's folder. What was said is in `log`."""
    variables = ["PRESET=tiny", "NAME=card", f"SET={' '.join([*SETTINGS, *settings])}"]
    command = [sys.executable, "-m", "stages", *goals.split(), *variables]
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    (folder / "log").write_text(found.stderr)
    assert found.returncode == 0, (found.stdout + found.stderr)[-3000:]
    return folder / "runs/card/seed44413"


def test_the_card_refuses_what_a_real_one_refuses(on_card):
    words = [sys.executable, "-c", MIXED]
    found = subprocess.run(words, env=on_card, capture_output=True, text=True, check=True)
    worked, mixed, numpy = found.stdout.splitlines()
    assert worked == "cuda:0 [2.0, 2.0] cuda:0"
    assert mixed == "pretended card: aten::add has tensors of two devices: cuda (2,), cpu (2,)"
    assert numpy == "pretended card: a tensor of the card has no numpy"


def test_the_card_learns_the_weights_that_the_cpu_learns(on_card, tmp_path):
    folders = tmp_path / "card", tmp_path / "cpu"
    for folder in folders:
        folder.mkdir()
    card = make(folders[0], "rm", on_card)
    cpu = make(folders[1], "rm", os.environ | {"PYTHONPATH": str(ROOT)})
    assert read_json(card / "sft/manifest.json")["device"] == f"1 x {pretend_card.NAME}"
    for stage in ("sft", "rm"):
        one, other = (load_file(run / stage / "model/model.safetensors") for run in (card, cpu))
        assert one.keys() == other.keys()
        for name, weights in one.items():
            torch.testing.assert_close(weights, other[name], atol=1e-3, rtol=0)


def test_every_stage_and_the_judge_run_in_bf16_where_four_rows_fit(on_card, tmp_path):
    """The settings ask for 8 that learn and for 128 that do not; a query has up to four samples."""
    little = on_card | {"PRETENDED_ROWS": "4"}
    run = make(tmp_path, "sft rm ppo rloo grpo dpo eval", little, "memory.mixed_precision=bf16")
    assert list(run.glob("report/facts/*.html"))
    held = "GPU memory: this process 0.0 GiB, others 30.0 GiB, total 80.0 GiB"
    line = f"out of memory: memory.forward_batch_size=4, not 8, from here on; {held}"
    assert line in (tmp_path / "log").read_text()
    fitted = [halving["to"] for halving in read_json(run / "ppo/manifest.json")["halvings"]]
    assert fitted == [64, 32, 16, 8, 4]


def test_adapters_and_what_saves_memory_run_where_devices_do_not_mix(on_card, tmp_path):
    run = make(tmp_path, "rm ppo", on_card, "memory.mixed_precision=bf16", *ADAPTERS)
    assert (run / "ppo/manifest.json").exists()


def test_make_card_measures_every_part_and_writes_one_page(on_card, tmp_path):
    (tmp_path / "constraints.txt").write_text("")
    words = "--shape tiny-xs:4:2 --slower 9 --set data.max_summary_tokens=4"
    command = [
        sys.executable,
        "-m",
        "reports.sections.card",
        *words.split(),
        "ppo.num_ppo_epochs=1",
    ]
    subprocess.run(command, cwd=tmp_path, env=on_card, check=True)
    parts = page.record_of(tmp_path / "runs/bench", "card")["made_from"]["measured"]["parts"]
    assert {name: part["failed"] for name, part in parts.items()} == dict.fromkeys(parts, "")
    assert " passed" in parts["placement"]["last"]
    assert parts["bench"]["result"]["made_from"]["measured"]["shapes"].keys() == {"tiny-xs:4:2"}
    assert [len(parts[name]["result"]["rows"]) for name in ("profile", "precision")] == [10, 3]
