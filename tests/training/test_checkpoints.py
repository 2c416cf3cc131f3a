"""Checkpoints: complete or not used, compared after loading, saved by time, kept on a full disk."""

import copy
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.runs.files import read_lines
from stages.runs.run import Run
from stages.training.checkpoints import list_checkpoints
from stages.training.optimizer import make_optimizer
from stages.training.state import Order, State
from tests.lib.learners import flat, state_of
from tests.lib.resuming import Killed

UPDATES = 6
ORDER = Order(rows=9, batch_size=2, seed=1, purpose="x")


def make_state(folder: Path, network: Any = None, order: Order = ORDER) -> State:
    """A training loop of a network, a tiny linear layer by default, whose run is in `folder`."""
    torch.manual_seed(1)
    network = network or torch.nn.Linear(4, 2)
    config = make_config("tiny", name="mine", overrides=("memory.save_minutes=0",))
    accelerator = Accelerator(cpu=True)
    optimizer = make_optimizer(network.parameters(), 0.1, config.optimizer)
    trained, prepared_optimizer = accelerator.prepare(network, optimizer)

    run = Run(config, "sft")
    run.folder = folder / "sft"
    run.partial = folder / "sft.partial"
    run.resume = run.partial / "resume"
    run.partial.mkdir(exist_ok=True, parents=True)
    state: State = state_of(
        config,
        trained,
        prepared_optimizer,
        run=run,
        accelerator=accelerator,
        updates=UPDATES,
        order=order,
    )
    return state


def linear_loss(network: Any, update: int) -> torch.Tensor:
    output: torch.Tensor = network(torch.full((1, 4), update + 1.0))
    return output.square().sum()


def train(
    state: State,
    kill_after: int | None = None,
    loss_of: Callable[[Any, int], torch.Tensor] = linear_loss,
) -> None:
    """Take the remaining updates; the process may be killed in one, before it counts."""
    for update in state.remaining("test"):
        loss = loss_of(state.learner.trained, update)
        state.accelerator.backward(loss)
        state.learner.optimizer.step()
        state.learner.optimizer.zero_grad()
        state.run.log(update + 1, loss=loss.item())
        if update + 1 == kill_after:
            raise Killed


def train_until_killed(folder: Path, update: int) -> Path:
    """Return the folder of checkpoints after a kill in this update, counted from 1."""
    with pytest.raises(Killed):
        train(make_state(folder), kill_after=update)
    return folder / "sft.partial/resume"


# -- resuming --------------------------------------------------------------------------------------


def truncate(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(checkpoint: Path) -> None:
    path = checkpoint / "optimizer.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(tmp_path, capsys, damage):
    uninterrupted = make_state(tmp_path / "uninterrupted")
    train(uninterrupted)

    resume = train_until_killed(tmp_path, update=5)
    newest, previous = list_checkpoints(resume)
    assert (newest.name, previous.name) == ("checkpoint-0000004", "checkpoint-0000003")
    damage(newest)
    unfinished = resume / "checkpoint-0000005.tmp"
    unfinished.mkdir()

    resumed = make_state(tmp_path)
    resumed.load()
    assert f"checkpoint {newest} is damaged: " in capsys.readouterr().err
    assert resumed.update == 3
    assert not unfinished.exists()

    train(resumed)
    assert torch.equal(flat(resumed.learner.trained), flat(uninterrupted.learner.trained))
    metrics = read_lines(resumed.run.partial / "metrics.jsonl")
    assert metrics == read_lines(uninterrupted.run.partial / "metrics.jsonl")
    assert len(metrics) == UPDATES


def test_records_that_have_lost_lines_do_not_fit_a_checkpoint(tmp_path, capsys):
    train_until_killed(tmp_path, update=5)
    metrics = tmp_path / "sft.partial/metrics.jsonl"
    os.truncate(metrics, metrics.read_bytes().index(b"\n", 100) + 1)
    make_state(tmp_path).load()
    assert "metrics.jsonl of the run is shorter than when it was saved" in capsys.readouterr().err


class OtherLaterRows(Order):
    """The first batch is that of `ORDER`, and each later one that of the update after."""

    def batch(self, update: int) -> list[int]:
        return super().batch(update + 1 if update > 0 else 0)


def test_a_checkpoint_resumes_only_with_the_rows_that_came_next(tmp_path):
    resume = train_until_killed(tmp_path, update=4)
    other = OtherLaterRows(rows=9, batch_size=2, seed=1, purpose="x")
    with pytest.raises(UserError, match="belongs to other data") as refusal:
        make_state(tmp_path, order=other).load()
    assert f"remove {resume}" in str(refusal.value)
    make_state(tmp_path).load()


def test_a_checkpoint_with_weights_of_other_names_is_refused_in_one_line(tmp_path):
    resume = train_until_killed(tmp_path, update=4)
    same_weights_in_a_wrapper = torch.nn.Sequential(torch.nn.Linear(4, 2))
    with pytest.raises(UserError, match="has other weights than this stage trains") as refusal:
        make_state(tmp_path, same_weights_in_a_wrapper).load()
    assert str(refusal.value).endswith(f"remove {resume} to start the stage over")


def test_tied_weights_are_saved_and_loaded_as_one(tmp_path):
    llama = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(3)
    start = LlamaForCausalLM(llama)

    def loss_of(network: Any, update: int) -> torch.Tensor:
        tokens = torch.arange(12).view(2, 6)
        loss: torch.Tensor = network(input_ids=tokens, labels=tokens).loss
        return loss

    uninterrupted = make_state(tmp_path / "uninterrupted", copy.deepcopy(start))
    train(uninterrupted, loss_of=loss_of)

    with pytest.raises(Killed):
        train(make_state(tmp_path, copy.deepcopy(start)), kill_after=4, loss_of=loss_of)
    resumed = make_state(tmp_path, LlamaForCausalLM(llama))
    resumed.load()
    assert resumed.update == 3
    model = resumed.accelerator.unwrap_model(resumed.learner.trained)
    assert model.lm_head.weight is model.model.embed_tokens.weight

    train(resumed, loss_of=loss_of)
    assert torch.equal(flat(resumed.learner.trained), flat(uninterrupted.learner.trained))


# -- saving ----------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock at 100 seconds, next to a time of day that jumps back all the time."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: 1e9 - now[0] * 1e6)
    return now


def with_save_minutes(state: State, minutes: str) -> State:
    overrides = (f"memory.save_minutes={minutes}",)
    state.run.config = make_config("tiny", name="mine", overrides=overrides)
    return state


@pytest.mark.parametrize(
    ("save_minutes", "last_save_seconds", "seconds_since", "is_due"),
    [
        ("2", 0.0, 119.9, False),
        ("2", 0.0, 120.0, True),
        # The last save took 10 seconds, so the next waits 20 times as long.
        ("2", 10.0, 199.9, False),
        ("2", 10.0, 200.0, True),
        ("0", 10.0, 0.0, True),
    ],
)
def test_a_save_is_due_by_the_settings_but_takes_at_most_a_twentieth_of_the_time(
    tmp_path, clock, save_minutes, last_save_seconds, seconds_since, is_due
):
    state = with_save_minutes(make_state(tmp_path), save_minutes)
    state.last_save_ended = clock[0]
    state.last_save_seconds = last_save_seconds
    clock[0] += seconds_since
    assert state.is_save_due() == is_due


def test_save_minutes_below_0_are_refused():
    with pytest.raises(UserError, match=r"memory\.save_minutes must be at least 0"):
        make_config("tiny", name="m", overrides=("memory.save_minutes=-1",))


def test_a_full_disk_does_not_stop_training_and_keeps_the_last_good_checkpoint(
    tmp_path, small_disk, capsys
):
    """The disk is full from the third update to the fifth."""
    disk = small_disk()
    state = make_state(tmp_path)
    state.run.resume = disk
    log = state.run.log
    filler = disk / "filler"

    def log_and_fill(step: int, **metrics: float) -> None:
        log(step, **metrics)
        if step == 3:
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 512)
        if step == 6:
            filler.unlink()

    with mock.patch.object(state.run, "log", log_and_fill):
        train(state)

    errors = capsys.readouterr().err
    assert "No space left" in errors or "failed" in errors
    assert "checkpoint-0000002 is kept" in errors
    names = sorted(path.name for path in disk.iterdir())
    assert names == ["checkpoint-0000002", "checkpoint-0000006"]
    assert len(read_lines(state.run.partial / "metrics.jsonl")) == UPDATES


def test_every_update_shuffles_its_episodes_in_its_own_way(tmp_path):
    state = make_state(tmp_path)
    seeds = set()
    for update in range(5):
        state.learner.update = update
        seeds.add(state.minibatch_seed)
    assert len(seeds) == 5
