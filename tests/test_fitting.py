"""Out of memory halves the microbatch and repeats the step, with the same numbers."""

import copy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages import base, sft
from stages.driving.grid import Execution
from stages.finished import partial_of, read_manifest, stage_folder
from stages.learning import models
from stages.learning.learner import in_memory
from stages.learning.loop import make_optimizer
from stages.pipeline import Maker
from stages.running.files import read_json, write_json
from stages.runs import HALVED, RESUME
from stages.settings.command_line import make_config
from stages.settings.config import UserError
from tests.conftest import state_of
from tests.test_microbatches import SPLITS

ROOT = Path(__file__).parents[1]
LIMIT = 120  # seconds for each test
ARGUMENTS = """
    --preset tiny --name small --set base.hidden_size=32 base.num_layers=2 sft.epochs=1
    memory.cpu_threads=1
    world.train_posts=64 world.validation_posts=4 world.train_comparisons=8
    world.validation_comparisons=4 sft.batch_size=32 memory.save_minutes=0 memory.microbatch_size=8
""".split()
SMALL = make_config("tiny", name="small", overrides=tuple(ARGUMENTS[5:]))
# On one of two processes nothing larger than 4 sequences fits into memory.
SCRIPT = """
import os
from stages import sft
from tests.test_fitting import ARGUMENTS, refuse_more_than
load = sft.load_policy
def load_policy(*given):
    policy = load(*given)
    if os.environ["RANK"] == "1":
        refuse_more_than(policy, sequences=4)
    return policy
sft.load_policy = load_policy
sft.main(ARGUMENTS)
"""


@pytest.fixture(autouse=True)
def limited():
    """Microbatches that are never halved would be tried again without end: a test has a LIMIT."""

    def end(number: int, frame: Any) -> None:
        raise TimeoutError("the test took longer than its limit")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refuse_more_than(network: torch.nn.Module, sequences: int = 10**6, tokens: int = 10**6) -> None:
    """A forward pass that learns fails as it would on a device of that size."""

    def refuse(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        ids = inputs["input_ids"]
        if torch.is_grad_enabled() and (len(ids) > sequences or ids.numel() > tokens):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    network.register_forward_pre_hook(refuse, with_kwargs=True)


def state(network: Any, optimizer: Any = None, stage: str = "sft", **settings: Any) -> Any:
    changes = {"memory.microbatch_size": 8} | settings
    config = make_config("tiny", name="x", overrides=tuple(f"{k}={v}" for k, v in changes.items()))
    noted: list[Any] = []
    run = SimpleNamespace(config=config, stage=stage, note_halving=noted.append, noted=noted)
    return state_of(config, network, optimizer, run=run)


@pytest.mark.parametrize("stage", SPLITS, ids=lambda one: one.__name__)
def test_a_step_that_ran_out_of_memory_gives_the_weights_of_one_that_fitted(
    stage, policy, reward_model, capsys
):
    weights = []
    for tokens in (10**6, 60):
        network = copy.deepcopy(policy if stage is sft else reward_model)
        start = torch.cat([one.detach().flatten() for one in network.parameters()])
        refuse_more_than(network, tokens=tokens)
        config = make_config("tiny")
        optimizer = make_optimizer(network.parameters(), 1e-3, config.optimizer)
        loop = state(network, optimizer)
        for rows in (list(range(8)), list(range(8, 16))):
            stage.take_step(loop, SPLITS[stage], rows)
        weights.append(torch.cat([one.detach().flatten() for one in network.parameters()]))
    assert (weights[0] - start).abs().max() > 1e-4
    assert (weights[0] - weights[1]).abs().max() < 1e-5
    assert loop.run.noted[0] == {"update": 1, "from": 8, "to": 4}
    assert loop.learner.microbatch_size == loop.run.noted[-1]["to"]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "out of memory in update 1: microbatches of 4, not 8, from here on"
    assert len(said) == len(loop.run.noted)


def test_what_was_added_before_the_failure_does_not_count(policy):
    optimizer = make_optimizer(policy.parameters(), 1e-3, make_config("tiny").optimizer)
    loop = state(policy, optimizer)
    weight = next(policy.parameters())

    def gradients(size: int) -> int:
        (weight.sum() * 3).backward()
        if size > 2:
            raise torch.OutOfMemoryError
        return size

    assert in_memory(loop.learner, gradients) == 2
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))
    assert [one["to"] for one in loop.run.noted] == [4, 2]


def test_cublas_that_gets_no_memory_halves_too_and_any_other_error_does_not(policy):
    optimizer = make_optimizer(policy.parameters(), 1e-3, make_config("tiny").optimizer)
    loop = state(policy, optimizer)

    def gradients(size: int) -> int:
        if size > 4:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
        if size > 2:
            raise RuntimeError("shapes cannot be multiplied")
        return size

    with pytest.raises(RuntimeError, match="shapes"):
        in_memory(loop.learner, gradients)
    assert [one["to"] for one in loop.run.noted] == [4]


def out_of_memory(size: int) -> None:
    raise torch.OutOfMemoryError


def test_the_smallest_microbatch_that_does_not_fit_is_an_error_with_a_mend(policy):
    optimizer = make_optimizer(policy.parameters(), 1e-3, make_config("tiny").optimizer)
    for least in (1, 2):
        loop = state(policy, optimizer)
        with pytest.raises(UserError, match=rf"the smallest microbatches, of {least}: try"):
            in_memory(loop.learner, out_of_memory, least)


def test_where_the_result_depends_on_the_microbatch_it_is_not_halved(policy):
    optimizer = make_optimizer(policy.parameters(), 1e-3, make_config("tiny").optimizer)
    loop = state(policy, optimizer)
    loop.learner.fixed_by = "ppo.loss_mean=microbatches"
    with pytest.raises(UserError, match=r"of 8: set memory\.microbatch_size=4 \(they are not"):
        in_memory(loop.learner, out_of_memory)
    assert not loop.run.noted
    # No smaller size is left, so the line names none. Four samples of a query stand in one pass.
    for loop.learner.microbatch_size, least, held in ((1, 1, 1), (2, 4, 4)):
        with pytest.raises(UserError, match=rf"the smallest microbatches, of {held}: try"):
            in_memory(loop.learner, out_of_memory, least)
    loop.learner.microbatch_size = 8
    loop.learner.fixed_by = ""
    assert in_memory(loop.learner, lambda size: size if size < 8 else out_of_memory(size)) == 4


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A base stage, and the SFT weights that one process makes of it with enough memory."""
    root = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        base.main(ARGUMENTS)
        sft.main(ARGUMENTS)
    return root / "runs/small/seed44413"


@pytest.fixture
def seed(alone, tmp_path, monkeypatch):
    """A folder in which only the base stage is done."""
    folder = tmp_path / "runs/small/seed44413"
    folder.mkdir(parents=True)
    (folder / "base").symlink_to(alone / "base")
    monkeypatch.chdir(tmp_path)
    return folder


def difference(one: Path, two: Path) -> float:
    first, second = (load_file(x / "sft/model/model.safetensors") for x in (one, two))
    return max((first[name] - second[name]).abs().max().item() for name in first)


def test_a_stage_that_ran_out_of_memory_says_so_in_its_manifest(alone, seed, monkeypatch):
    def load_policy(*given: Any) -> Any:
        policy = models.load_policy(*given)
        refuse_more_than(policy, sequences=4)
        return policy

    monkeypatch.setattr(sft, "load_policy", load_policy)
    sft.main(ARGUMENTS)
    manifests = [read_manifest(folder / "sft") or {} for folder in (alone, seed)]
    assert manifests[0]["halvings"] == []
    assert manifests[1]["halvings"] == [{"update": 1, "from": 8, "to": 4}]
    assert difference(alone, seed) < 1e-5


@pytest.mark.walk
def test_of_two_processes_one_runs_out_of_memory_and_both_start_again(alone, seed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    Path("script.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "stages.running.launch", "ddp", "2", "1", "script.py"]
    assert Maker(Execution()).call_until_it_fits(SMALL, "sft", words) == 0
    manifest = read_manifest(seed / "sft") or {}
    assert manifest["halvings"] == [{"update": 1, "from": 8, "to": 4}]
    assert difference(alone, seed) < 1e-5


def test_a_stage_is_called_again_only_after_a_new_halving(runs):
    resume = partial_of(stage_folder(SMALL, "sft")) / RESUME
    resume.mkdir(parents=True)
    write_json(resume / HALVED, [{"update": 1, "from": 8, "to": 4}])  # an earlier one
    code = f"""
import json, pathlib
path = pathlib.Path({str(resume / HALVED)!r})
there = json.loads(path.read_text())
if len(there) < 3:
    path.write_text(json.dumps([*there, there[-1]]))
raise SystemExit(2)
"""
    assert Maker(Execution()).call_until_it_fits(SMALL, "sft", [sys.executable, "-c", code]) == 2
    assert len(read_json(resume / HALVED)) == 3
