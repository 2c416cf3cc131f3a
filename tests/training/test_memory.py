"""Running out of memory: free the cache, repeat, halve. Numbers stay the same up to rounding."""

import copy
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages import base, rm, sft
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.sections import Memory
from stages.models import loading
from stages.models.policy import PolicyModel
from stages.runs.manifest import read_manifest
from stages.training.memory import (
    FORWARD,
    MICROBATCH,
    MemoryBudget,
    PassSize,
    use_gradient_checkpointing,
)
from stages.training.optimizer import make_optimizer
from stages.training.step import StepTimes, optimizer_step
from tests.lib.learners import flat, state_of
from tests.lib.make_stages import make_stages, run_module
from tests.lib.processes import launch
from tests.lib.short_memory import ARGUMENTS, limit_training_pass
from tests.lib.small_splits import PAIRS, POSTS

STAGES = pytest.mark.parametrize(("stage", "split"), [(sft, POSTS), (rm, PAIRS)], ids=["sft", "rm"])


# -- a budget --------------------------------------------------------------------------------------


def budget(forward: int = 32, microbatch: int = 8) -> MemoryBudget:
    return MemoryBudget(forward_batch_size=forward, microbatch_size=microbatch)


class Device:
    """Runs passes, and runs out of memory in those of more than `limit` rows."""

    def __init__(self, limit: int, error: type[Exception] = torch.OutOfMemoryError) -> None:
        self.limit = limit
        self.error = error
        self.tried: list[int] = []

    def run(self, rows: int) -> int:
        self.tried.append(rows)
        if rows > self.limit:
            raise self.error
        return rows


def test_a_pass_is_repeated_once_and_then_halved_until_it_fits(capsys):
    device = Device(limit=8)
    assert budget().fit(PassSize(rows=32), device.run) == 8
    assert device.tried == [32, 32, 16, 8]
    assert capsys.readouterr().err.splitlines() == [
        "out of memory (memory.forward_batch_size): trying once more",
        "out of memory: memory.forward_batch_size=16 instead of 32 from here on",
        "out of memory: memory.forward_batch_size=8 instead of 16 from here on",
    ]


def test_a_pass_that_fits_the_second_time_is_not_halved():
    short = budget()
    tries = 0

    def run(rows: int) -> int:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise torch.OutOfMemoryError
        return rows

    assert short.fit(PassSize(rows=32), run) == 32
    assert short.halvings == []


def test_later_passes_of_a_halved_setting_start_small_and_others_do_not():
    short = budget(forward=32, microbatch=8)
    short.fit(PassSize(rows=32), Device(limit=8).run)
    assert short.rows(PassSize(rows=32)) == 8
    assert short.rows(PassSize(rows=16)) == 4  # two sequences in a row
    assert short.rows(PassSize(rows=6)) == 1
    assert short.rows(PassSize(rows=8, setting=MICROBATCH)) == 8


def test_sizes_only_fall_in_a_stage():
    short = budget(forward=32)
    sizes = []
    for limit in (16, 32, 4, 8):
        short.fit(PassSize(rows=32), Device(limit).run)
        sizes.append(short.rows(PassSize(rows=32)))
    assert sizes == [16, 16, 4, 4]


def test_a_pass_holds_no_more_rows_than_its_setting():
    assert budget(forward=20).rows(PassSize(rows=32)) == 20


def test_halvings_are_listed_for_the_manifest():
    short = budget()
    short.fit(PassSize(rows=8, setting=MICROBATCH), Device(limit=2).run)
    assert short.halvings == [
        {"setting": MICROBATCH, "from": 8, "to": 4},
        {"setting": MICROBATCH, "from": 4, "to": 2},
    ]


def test_copies_of_weights_are_kept_until_memory_is_short():
    short = budget()
    assert short.keeps_copies
    short.fit(PassSize(rows=32), Device(limit=16).run)
    assert not short.keeps_copies


def test_no_copies_of_weights_are_kept_with_gradient_checkpointing():
    config = make_config("tiny", overrides=("memory.gradient_checkpointing=true",))
    assert not MemoryBudget.from_settings(config.memory).keeps_copies


def test_another_error_is_raised_at_once():
    device = Device(limit=0, error=RuntimeError)
    with pytest.raises(RuntimeError):
        budget().fit(PassSize(rows=32), device.run)
    assert device.tried == [32]


@pytest.mark.parametrize(
    ("rows", "smallest", "fixed_by", "message"),
    [
        (8, 1, "", r"a pass of 1, the smallest possible \(memory\.microbatch_size\): free some"),
        (8, 2, "", "a pass of 2, the smallest possible"),
        # The four samples of a query share a pass.
        (2, 4, "", "a pass of 4, the smallest possible"),
        (1, 1, "ppo.loss_mean=microbatches", "a pass of 1, the smallest possible"),
        (
            8,
            1,
            "ppo.loss_mean=microbatches",
            r"in passes of 8: set memory\.microbatch_size=4 \(it is not halved automatically,"
            " because with ppo.loss_mean=microbatches",
        ),
    ],
)
def test_what_cannot_be_halved_is_an_error_that_says_how_to_fix_it(
    rows, smallest, fixed_by, message
):
    size = PassSize(rows=rows, smallest=smallest, setting=MICROBATCH, fixed_by=fixed_by)
    with pytest.raises(UserError, match=message):
        budget().fit(size, Device(limit=0, error=MemoryError).run)


def test_a_pass_in_which_processes_wait_is_neither_repeated_nor_halved():
    short = budget()
    device = Device(limit=4)
    with pytest.raises(UserError, match=r"passes of 8: set memory\.microbatch_size=4 and run"):
        short.fit(PassSize(rows=8, setting=MICROBATCH, is_collective=True), device.run)
    assert device.tried == [8]
    assert short.halvings == []


def test_what_a_process_has_halved_on_its_own_leaves_passes_of_all_processes_as_they_are():
    short = budget(forward=8)
    short.fit(PassSize(rows=8), Device(limit=4).run)
    assert short.rows(PassSize(rows=8, setting=FORWARD, is_collective=True)) == 8


# -- an optimizer step -----------------------------------------------------------------------------


def small_state(network: Any) -> Any:
    config = make_config("tiny", name="x", overrides=("memory.microbatch_size=8",))
    optimizer = make_optimizer(network.parameters(), 1e-3, config.optimizer)
    return state_of(config, network, optimizer, run=SimpleNamespace(config=config))


@STAGES
def test_a_step_that_ran_out_of_memory_gives_the_weights_of_one_that_did_not(
    stage, split, policy, reward_model
):
    weights = []
    for tokens in (10**6, 60):
        network = copy.deepcopy(PolicyModel(policy) if stage is sft else reward_model)
        start = flat(network)
        limit_training_pass(network, tokens=tokens)
        state = small_state(network)
        for rows in (list(range(8)), list(range(8, 16))):
            stage.take_step(state, split, rows)
        weights.append(flat(network))
    assert (weights[0] - start).abs().max() > 1e-4
    assert (weights[0] - weights[1]).abs().max() < 1e-5
    assert state.learner.budget.halvings[0] == {"setting": MICROBATCH, "from": 8, "to": 4}


def test_gradients_of_an_attempt_that_failed_do_not_count(policy):
    """The loss is the same at any size, so its gradient is too."""
    state = small_state(policy)
    weight = next(policy.parameters())
    gradients: list[torch.Tensor] = []

    def losses(size: int) -> Any:
        yield weight.sum() * 3, {"size": torch.tensor(size)}
        if size > 2:
            raise torch.OutOfMemoryError

    def clip() -> dict[str, float]:
        gradients.append(weight.grad.clone())
        return {}

    statistics = optimizer_step(state.learner, lambda size: [size], losses, clip=clip)
    assert torch.equal(gradients[0], torch.full_like(weight, 3.0))
    assert statistics == {"size": 2.0}


def test_moments_are_allocated_before_the_step_so_that_it_is_never_half_done(policy, monkeypatch):
    """The third tensor's allocation fails once: weights and moments are those of AdamW."""
    states = []
    weights = []
    for failures in (0, 1):
        network = PolicyModel(copy.deepcopy(policy))
        state = small_state(network)
        allocations = itertools.count(1)

        def zeros_like(*args: Any, **kwargs: Any) -> torch.Tensor:
            if failures and next(allocations) == 3:  # noqa: B023
                raise torch.OutOfMemoryError
            return torch.zeros(args[0].shape)

        with monkeypatch.context() as patch:
            patch.setattr("stages.training.optimizer.torch.zeros_like", zeros_like)
            if not failures:
                patch.setattr("stages.training.step.make_moments", lambda _: None)
            sft.take_step(state, POSTS, list(range(8)))
        states.append(state.learner.optimizer.state_dict()["state"])
        weights.append(flat(network))
        assert state.learner.budget.halvings == []
    assert torch.equal(*weights)
    for key, moments in states[0].items():
        assert moments.keys() == states[1][key].keys()
        assert all(torch.equal(moments[name], states[1][key][name]) for name in moments)


def test_a_step_that_is_slow_because_memory_is_short_is_reported_once(capsys):
    times = StepTimes()
    for seconds, retries in ((1.0, 0), (1.0, 3), (1.0, 0), (9.0, 0), (4.9, 1), (5.1, 1), (50.0, 9)):
        times.add(seconds, retries)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("a step took 5.1 s (median 1.0) because GPU memory was short")


@pytest.mark.filterwarnings("error")
def test_gradient_checkpointing_has_the_same_gradients_and_no_old_name(policy_folder):
    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        model = loading.load_policy(policy_folder).train()
        use_gradient_checkpointing(model, Memory(gradient_checkpointing=checkpointing))
        is_on = [getattr(module, "gradient_checkpointing", False) for module in model.modules()]
        assert any(is_on) == checkpointing
        tokens = torch.arange(12).view(2, 6)
        model(input_ids=tokens, labels=tokens).loss.backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    for one, other in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(one, other)


# -- a stage ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def enough_memory(tmp_path_factory):
    """The run of one process with enough memory: base and SFT."""
    root = tmp_path_factory.mktemp("enough")
    make_stages(root, (base, sft), ARGUMENTS)
    return root / "runs/small/seed44413"


@pytest.fixture
def only_base(enough_memory, place):
    """A run of which only the base stage has finished."""
    folder = place / "runs/small/seed44413"
    folder.mkdir(parents=True)
    (folder / "base").symlink_to(enough_memory / "base")
    return folder


def largest_difference(one: Path, two: Path) -> float:
    first, second = (load_file(run / "sft/model/model.safetensors") for run in (one, two))
    return max((first[name] - second[name]).abs().max().item() for name in first)


def manifest_of(run: Path) -> dict[str, Any]:
    manifest = read_manifest(run / "sft")
    assert manifest is not None
    return manifest


def test_a_stage_that_ran_out_of_memory_records_it_in_its_manifest(
    enough_memory, only_base, monkeypatch
):
    def load_policy(*args: Any) -> Any:
        policy = loading.load_policy(*args)
        limit_training_pass(policy, sequences=4)
        return policy

    monkeypatch.setattr(sft, "load_policy", load_policy)
    run_module(sft, ARGUMENTS)
    assert manifest_of(enough_memory)["halvings"] == []
    assert manifest_of(only_base)["halvings"] == [{"setting": MICROBATCH, "from": 8, "to": 4}]
    assert largest_difference(enough_memory, only_base) < 1e-5


# In one of two processes nothing larger than 4 sequences fits into memory.
TWO_PROCESSES = """
import os
from stages import sft
from stages.pipeline.start import end_process
from tests.lib.make_stages import run_module
from tests.lib.short_memory import ARGUMENTS, limit_training_pass
load = sft.load_policy
def load_policy(*args):
    policy = load(*args)
    if os.environ["RANK"] == "1":
        limit_training_pass(policy, sequences=4)
    return policy
sft.load_policy = load_policy
run_module(sft, [*ARGUMENTS, "memory.microbatch_size={}"])
end_process()
"""


@pytest.mark.walk
def test_if_one_of_two_processes_runs_out_of_memory_the_stage_stops_with_a_value_that_fits(
    enough_memory, only_base, place
):
    stopped = launch(place, "ddp", TWO_PROCESSES.format(8))
    assert stopped.returncode != 0
    (line,) = [line for line in stopped.stderr.splitlines() if "out of memory" in line]
    assert line.startswith("error: out of memory in passes of 8: set memory.microbatch_size=4")

    finished = launch(place, "ddp", TWO_PROCESSES.format(4))
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert largest_difference(enough_memory, only_base) < 1e-5
