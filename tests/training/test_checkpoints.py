"""Checkpoints: whole or not used, compared after loading, saved by time, kept on a full disk."""

import copy
import os
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator

from stages.running.files import read_lines
from stages.runs import Run
from stages.settings.command_line import make_config
from stages.settings.config import UserError
from stages.training import loop as learning_loop
from stages.training import state
from stages.training.checkpoints import checkpoints
from stages.training.loop import make_optimizer
from tests.lib.learners import flat, state_of
from tests.lib.resuming import Killed


def linear_state(tmp_path: Path, network: Any = None, **others: Any) -> state.State:
    """A state about a tiny network, its run below tmp_path."""
    torch.manual_seed(1)
    config = make_config("tiny", name="mine", overrides=("memory.save_minutes=0",))
    accelerator = Accelerator(cpu=True)
    network = network or torch.nn.Linear(4, 2)
    optimizer = make_optimizer(network.parameters(), 0.1, config.optimizer)
    trained, optimizer = accelerator.prepare(network, optimizer)
    run = Run(config, "sft")
    run.folder = tmp_path / "sft"
    run.partial = tmp_path / "sft.partial"
    run.resume = run.partial / "resume"
    run.partial.mkdir(exist_ok=True)
    order = state.Order(rows=9, batch_size=2, seed=1, purpose="x")
    given = {"run": run, "accelerator": accelerator, "updates": 6, "order": order}
    return state_of(config, trained, optimizer, **given | others)


def train(loop: state.State, stop: int = 99) -> None:
    for update in loop.remaining("test"):
        loss = loop.learner.trained(torch.full((1, 4), update + 1.0)).square().sum()
        loop.accelerator.backward(loss)
        loop.learner.optimizer.step()
        loop.learner.optimizer.zero_grad()
        loop.run.log(update + 1, loss=loss.item())
        if update + 1 == stop:
            raise Killed


def killed_at(tmp_path: Path, stop: int) -> Path:
    with pytest.raises(Killed):
        train(linear_state(tmp_path), stop)
    return tmp_path / "sft.partial/resume"


def damage_truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def damage_flipped(folder: Path) -> None:
    path = folder / "optimizer.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [damage_truncated, damage_flipped])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, capsys, damage):
    (tmp_path / "whole").mkdir()
    oracle = linear_state(tmp_path / "whole")
    train(oracle)
    resume = killed_at(tmp_path, 5)
    newest, before = checkpoints(resume)
    assert (newest.name, before.name) == ("checkpoint-0000004", "checkpoint-0000003")
    damage(newest)
    (resume / "checkpoint-0000005.tmp").mkdir()
    again = linear_state(tmp_path)
    again.load()
    said = capsys.readouterr().err
    assert f"checkpoint {newest} is damaged: " in said
    assert again.update == 3
    assert not (resume / "checkpoint-0000005.tmp").exists()
    train(again)
    assert torch.equal(flat(again.learner.trained), flat(oracle.learner.trained))
    lines = [read_lines(one.run.partial / "metrics.jsonl") for one in (again, oracle)]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 6


class LaterRowsDiffer(state.Order):
    """The first batch is an Order's, and each later one that of the update after."""

    def batch(self, update: int) -> list[int]:
        return super().batch(update + (update > 0))


def test_a_checkpoint_goes_on_with_no_other_rows_than_it_was_made_for(tmp_path):
    resume = killed_at(tmp_path, 4)
    other = LaterRowsDiffer(rows=9, batch_size=2, seed=1, purpose="x")
    with pytest.raises(UserError, match="with other rows than it was made for") as refusal:
        linear_state(tmp_path, order=other).load()
    assert str(resume) in str(refusal.value)
    linear_state(tmp_path).load()


def test_tied_weights_are_saved_and_loaded_as_one(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(3)
    start = LlamaForCausalLM(settings)

    def learn(loop: state.State, updates: int) -> torch.Tensor:
        tokens = torch.arange(12).view(2, 6)
        for update in loop.remaining("test"):
            loop.accelerator.backward(loop.learner.trained(input_ids=tokens, labels=tokens).loss)
            loop.learner.optimizer.step()
            loop.learner.optimizer.zero_grad()
            if update + 1 == updates:
                break
        return flat(loop.learner.trained)

    (tmp_path / "whole").mkdir()
    expected = learn(linear_state(tmp_path / "whole", copy.deepcopy(start)), 6)
    learn(linear_state(tmp_path, copy.deepcopy(start)), 4)
    again = linear_state(tmp_path, LlamaForCausalLM(settings))
    again.load()
    assert again.update == 3
    model = again.accelerator.unwrap_model(again.learner.trained)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(learn(again, 6), expected)


def test_saving_is_by_a_clock_that_never_jumps_and_costs_at_most_a_twentieth(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: 1e9 - now[0] * 1e6)  # it runs backwards
    loop = linear_state(tmp_path)
    minutes = make_config("tiny", name="m", overrides=("memory.save_minutes=2",))
    loop.run.config = minutes
    loop._last = 100.0, 0.0
    for passed, due in ((119.9, False), (120.0, True)):
        now[0] = 100.0 + passed
        assert loop.is_due() == due
    loop._last = 100.0, 10.0  # the last save took ten seconds
    for passed, due in ((199.9, False), (200.0, True)):
        now[0] = 100.0 + passed
        assert loop.is_due() == due
    loop.run.config = make_config("tiny", name="m", overrides=("memory.save_minutes=0",))
    now[0] = 100.0
    assert loop.is_due()
    with pytest.raises(UserError, match=r"memory\.save_minutes must be at least 0"):
        make_config("tiny", name="m", overrides=("memory.save_minutes=-1",))


def test_rows_measured_by_two_processes_are_known_to_one(tmp_path):
    lengths = [3, 1, 2, 5, 4, 1, 9]
    calls: list[list[int]] = []

    def measure(rows: list[int]) -> list[float]:
        calls.append(rows)
        return [row / 3 for row in rows]

    def process(index: int, count: int) -> Any:
        return SimpleNamespace(
            process_index=index, num_processes=count, wait_for_everyone=lambda: None
        )

    for index in (0, 1):
        share = learning_loop.over_share(process(index, 2), lengths, 2, "a b", measure, tmp_path)
        assert share == [row / 3 for row in range(index, 7, 2)]
    calls.clear()
    together = learning_loop.over_rows(process(0, 1), lengths, 2, "a b", measure, tmp_path)
    assert together == [row / 3 for row in range(7)]
    assert calls == []
    assert (
        learning_loop.over_rows(process(0, 1), lengths, 2, "other", measure, tmp_path) == together
    )
    assert calls == [[1, 5], [2, 0], [4, 3], [6]]


def train_until_full(loop: state.State, disk: Path) -> None:
    """Train; the disk is full from the third update to the fifth."""
    log = loop.run.log
    other = disk / "other"

    def log_and_fill(step: int, **metrics: float) -> None:
        log(step, **metrics)
        if step == 3:
            with suppress(OSError), other.open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 512)
        if step == 6:
            other.unlink()

    with mock.patch.object(loop.run, "log", log_and_fill):
        train(loop)


def test_records_that_have_lost_lines_do_not_fit_a_checkpoint(tmp_path, capsys):
    killed_at(tmp_path, 5)
    metrics = tmp_path / "sft.partial/metrics.jsonl"
    os.truncate(metrics, metrics.read_bytes().index(b"\n", 100) + 1)
    again = linear_state(tmp_path)
    again.load()
    assert "metrics.jsonl of the run has lost lines" in capsys.readouterr().err


def test_a_full_disk_stops_no_training_and_keeps_the_last_good_checkpoint(
    tmp_path, small_disk, capsys
):
    disk = small_disk()
    loop = linear_state(tmp_path)
    loop.run.resume = disk
    train_until_full(loop, disk)
    said = capsys.readouterr().err
    assert "No space left" in said or "failed" in said
    assert "checkpoint-0000002 is kept" in said
    names = sorted(path.name for path in disk.iterdir())
    assert names == ["checkpoint-0000002", "checkpoint-0000006"]
    assert len(read_lines(loop.run.partial / "metrics.jsonl")) == 6


def test_every_update_deals_its_episodes_into_other_minibatches(tmp_path):
    loop, seeds = linear_state(tmp_path), set()
    for loop.learner.update in range(5):
        seeds.add(loop.minibatch_seed)
    assert len(seeds) == 5
