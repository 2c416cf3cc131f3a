"""Memory that is refused halves a pass, whose numbers stay the same up to rounding."""

import copy
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from stages import base, sft
from stages.driving.maker import Maker
from stages.driving.start import run_module
from stages.finished import read_manifest
from stages.models import loading
from stages.models.policy import PolicyModel
from stages.settings.command_line import make_config
from stages.settings.config import UserError
from stages.training.learner import (
    FORWARD,
    MICROBATCH,
    Size,
    StepTimes,
    fitting,
    optimizer_step,
    room_of,
)
from stages.training.loop import make_optimizer
from tests.conftest import flat, make_stages, state_of
from tests.training.test_microbatches import SPLITS

ROOT = Path(__file__).parents[2]
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
from stages.driving.start import run_module
from tests.training.test_memory import ARGUMENTS, refuse_more_than
load = sft.load_policy
def load_policy(*given):
    policy = load(*given)
    if os.environ["RANK"] == "1":
        refuse_more_than(policy, sequences=4)
    return policy
sft.load_policy = load_policy
run_module(sft, ARGUMENTS)
"""


def refuse_more_than(network: torch.nn.Module, sequences: int = 10**6, tokens: int = 10**6) -> None:
    """A forward pass that learns fails as it would on a device of that size."""

    def refuse(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        ids = args[0] if args else inputs["input_ids"]
        if torch.is_grad_enabled() and (len(ids) > sequences or ids.numel() > tokens):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model: Any = network.model if isinstance(network, PolicyModel) else network
    model.base_model.register_forward_pre_hook(refuse, with_kwargs=True)


def state(network: Any, optimizer: Any = None, stage: str = "sft", **settings: Any) -> Any:
    changes = {"memory.microbatch_size": 8} | settings
    config = make_config("tiny", name="x", overrides=tuple(f"{k}={v}" for k, v in changes.items()))
    noted: list[Any] = []
    run = SimpleNamespace(config=config, stage=stage, note_halving=noted.append, noted=noted)
    return state_of(config, network, optimizer, run=run)


def adam(network: Any) -> torch.optim.AdamW:
    return make_optimizer(network.parameters(), 1e-3, make_config("tiny").optimizer)


@pytest.mark.parametrize("stage", SPLITS, ids=lambda one: one.__name__)
def test_a_step_that_ran_out_of_memory_gives_the_weights_of_one_that_fitted(
    stage, policy, reward_model, capsys
):
    weights = []
    for tokens in (10**6, 60):
        network = copy.deepcopy(PolicyModel(policy) if stage is sft else reward_model)
        start = flat(network)
        refuse_more_than(network, tokens=tokens)
        loop = state(network, adam(network))
        for rows in (list(range(8)), list(range(8, 16))):
            stage.take_step(loop, SPLITS[stage], rows)
        weights.append(flat(network))
    assert (weights[0] - start).abs().max() > 1e-4
    assert (weights[0] - weights[1]).abs().max() < 1e-5
    first = {"update": 1, "setting": MICROBATCH, "from": 8, "to": 4}
    assert loop.run.noted[0] == first
    assert capsys.readouterr().err.splitlines()[:2] == [
        "out of memory (memory.microbatch_size): trying once more",
        "out of memory: memory.microbatch_size=4, not 8, from here on",
    ]


def test_what_was_added_before_the_failure_does_not_count(policy):
    """The loss is one and the same for any size, so its gradient is, too."""
    loop, weight = state(policy, adam(policy)), next(policy.parameters())
    seen: list[torch.Tensor] = []

    def losses(size: int) -> Any:
        yield weight.sum() * 3, {"size": torch.tensor(size)}
        if size > 2:
            raise torch.OutOfMemoryError

    def keep() -> dict[str, float]:
        seen.append(weight.grad.clone())
        return {}

    optimizer_step(loop.learner, lambda size: [size], losses, clip=keep)
    assert torch.equal(seen[0], torch.full_like(weight, 3.0))
    assert [noted["to"] for noted in loop.run.noted] == [4, 2]


def refused(error: Exception, above: int, sizes: list[int]) -> Any:
    def run(size: int) -> int:
        sizes.append(size)
        if size > above:
            raise error
        return size

    return run


def test_a_pass_is_tried_once_more_and_halved_and_others_of_its_setting_begin_there():
    accelerator = Accelerator(cpu=True)
    sizes: list[int] = []
    assert fitting(accelerator, Size(rows=32), refused(torch.OutOfMemoryError(), 8, sizes)) == 8
    assert sizes == [32, 32, 16, 8]
    assert fitting(accelerator, Size(rows=6), int) == 1
    assert fitting(accelerator, Size(rows=6, setting=MICROBATCH), int) == 6
    other = Accelerator(cpu=True)
    assert fitting(other, Size(rows=32), int) == 32
    room_of(other).settings = {FORWARD: 20}
    assert fitting(other, Size(rows=32), int) == 20


def test_what_cannot_be_halved_is_an_error_with_a_mend():
    by = "ppo.loss_mean=microbatches"
    fewest = r"a pass of {}, the fewest \(memory\.microbatch_size\): free some, or try memory\."
    fixed = rf"of 8: set memory\.microbatch_size=4 \(it is not halved, because with {by}"
    for rows, least, fixed_by, said in (
        (8, 1, "", fewest.format(1)),
        (8, 2, "", fewest.format(2)),
        (8, 1, by, fixed),
        (1, 1, by, fewest.format(1)),
        (2, 4, by, fewest.format(4)),  # four samples of a query stand in one pass
    ):
        size = Size(rows=rows, least=least, setting=MICROBATCH, fixed_by=fixed_by)
        with pytest.raises(UserError, match=said):
            fitting(Accelerator(cpu=True), size, refused(MemoryError(), 0, []))


def test_a_process_halves_what_it_runs_alone_and_leaves_what_all_run_together():
    process: Any = SimpleNamespace(num_processes=2)
    alone, together = Size(rows=8), Size(rows=8, together=True)
    assert fitting(process, alone, refused(MemoryError(), 4, [])) == 4
    assert fitting(process, together, int) == 8
    sizes: list[int] = []
    with pytest.raises(UserError, match=r"=4, not 8, .* all processes start again"):
        fitting(process, together, refused(MemoryError(), 4, sizes))
    assert sizes == [8]


def test_moments_that_get_no_memory_are_made_before_the_step(policy, monkeypatch):
    """The third of a step's tensors is refused, once: weights and moments are those of AdamW."""
    states, weights = [], []
    for refusals in (0, 1):
        network = PolicyModel(copy.deepcopy(policy))
        optimizer, made = adam(network), itertools.count(1)

        def zeros_like(*args: Any, **kwargs: Any) -> torch.Tensor:
            if refusals and next(made) == 3:  # noqa: B023
                raise torch.OutOfMemoryError
            return torch.zeros(args[0].shape)

        loop = state(network, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr("stages.training.learner.torch.zeros_like", zeros_like)
            if not refusals:
                patch.setattr("stages.training.learner.make_moments", lambda _: None)
            sft.take_step(loop, SPLITS[sft], list(range(8)))
        states.append(optimizer.state_dict()["state"])
        weights.append(flat(network))
        assert not loop.run.noted
    assert torch.equal(*weights)
    for key, moments in states[0].items():
        assert moments.keys() == states[1][key].keys()
        assert all(torch.equal(moments[name], states[1][key][name]) for name in moments)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A base stage, and the SFT weights that one process makes of it with enough memory."""
    root = tmp_path_factory.mktemp("alone")
    make_stages(root, (base, sft), ARGUMENTS)
    return root / "runs/small/seed44413"


@pytest.fixture
def seed(alone, place):
    """A folder in which only the base stage is done."""
    folder = place / "runs/small/seed44413"
    folder.mkdir(parents=True)
    (folder / "base").symlink_to(alone / "base")
    return folder


def difference(one: Path, two: Path) -> float:
    first, second = (load_file(x / "sft/model/model.safetensors") for x in (one, two))
    return max((first[name] - second[name]).abs().max().item() for name in first)


def test_a_stage_that_ran_out_of_memory_says_so_in_its_manifest(alone, seed, monkeypatch):
    def load_policy(*given: Any) -> Any:
        policy = loading.load_policy(*given)
        refuse_more_than(policy, sequences=4)
        return policy

    monkeypatch.setattr(sft, "load_policy", load_policy)
    run_module(sft, ARGUMENTS)
    manifests = [read_manifest(folder / "sft") or {} for folder in (alone, seed)]
    assert manifests[0]["halvings"] == []
    assert manifests[1]["halvings"] == [{"update": 1, "setting": MICROBATCH, "from": 8, "to": 4}]
    assert difference(alone, seed) < 1e-5


@pytest.mark.walk
def test_of_two_processes_one_runs_out_of_memory_and_both_start_again(alone, seed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    Path("script.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "stages.running.launch", "ddp", "2", "1", "script.py"]
    assert Maker(processes=2).call_until_it_fits(SMALL, "sft", words) == 0
    manifest = read_manifest(seed / "sft") or {}
    assert manifest["halvings"] == [{"update": 1, "setting": MICROBATCH, "from": 8, "to": 4}]
    assert difference(alone, seed) < 1e-5


def test_a_step_that_waits_for_memory_says_so_once(capsys):
    times = StepTimes()
    for seconds, retries in ((1.0, 0), (1.0, 3), (1.0, 0), (9.0, 0), (4.9, 1), (5.1, 1), (50.0, 9)):
        times.add(seconds, retries)
    assert capsys.readouterr().err.startswith("a step took 5.1 s (median 1.0) and waited")
