"""What the training loops share: rows, rates, noise and sharing out, none of it by chance."""

import ctypes
import json
import math
import os
import random
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

from stages import base, sft
from stages.data.ragged import Ragged, make_ragged
from stages.finished import read_manifest, stage_folder
from stages.models.loading import load_policy
from stages.models.lora import keep_model
from stages.models.policy import PolicyModel
from stages.models.sampling import Sampling, respond_often, sampling_noise
from stages.rl.metrics import compilations
from stages.rl.update import linear_rate
from stages.running.files import read_lines
from stages.running.machine import cpu_model
from stages.settings.command_line import make_config
from stages.settings.config import Memory, Optimizer, UserError
from stages.training import loop, sharding
from stages.training.learner import (
    batch_rows,
    global_sum,
    local_share,
    stream,
    stream_seed,
    synchronized_last,
)
from stages.training.loop import (
    gather_rows,
    make_accelerator,
    make_optimizer,
    set_learning_rate,
    use_gradient_checkpointing,
)
from stages.training.supervised import check_batch, cosine_rate
from tests.lib.asserts import close
from tests.lib.places import ROOT


class Process(SimpleNamespace):
    """Stands for accelerate's Accelerator in one of several processes."""

    device = torch.device("cpu")

    def __init__(self, index: int = 0, count: int = 1) -> None:
        super().__init__(process_index=index, num_processes=count, skipped=0)

    @contextmanager
    def no_sync(self, model):
        self.skipped += 1
        yield

    @contextmanager
    def autocast(self):
        yield


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "batch_size"), [(12, 4), (10, 4), (3, 7), (5, 5), (1, 2)])
def test_every_row_comes_once_in_every_epoch(rows, batch_size):
    drawn: list[int] = []
    while len(drawn) < 4 * rows:
        drawn += batch_rows(rows, batch_size, len(drawn) // batch_size, seed=1, purpose="sft")
    epochs = [drawn[start : start + rows] for start in range(0, 4 * rows, rows)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)


def test_a_batch_is_a_function_of_seed_purpose_and_update():
    def rows(update: int = 5, seed: int = 1, purpose: str = "sft") -> list[int]:
        return batch_rows(100, 8, update, seed, purpose)

    first = rows()
    torch.manual_seed(9)
    torch.rand(3)
    rows(update=30)
    assert rows() == first
    assert len({tuple(other) for other in (first, rows(6), rows(seed=2), rows(purpose="rm"))}) == 4


def test_epochs_are_shuffled_anew():
    epochs = [batch_rows(50, 50, epoch, 1, "sft") for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != list(range(50))


def test_a_batch_that_cannot_be_filled_or_divided_is_refused():
    check_batch("sft", 8, 8, Process(count=4))
    with pytest.raises(
        UserError, match=r"sft\.batch_size is 9 but there are only 8 rows: lower it"
    ):
        check_batch("sft", 9, 8, Process())
    with pytest.raises(UserError, match=r"rm\.batch_size is 8: it must be divisible by 3"):
        check_batch("rm", 8, 100, Process(count=3))


# -- sharing out and gathering ---------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 6, 7, 8])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_is_shared_out_is_gathered_in_its_order(monkeypatch, rows, count):
    processes = [Process(index, count) for index in range(count)]
    shares = [local_share(range(rows), process) for process in processes]
    assert sorted(chain(*shares)) == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    monkeypatch.setattr(loop, "gather_object", lambda mine: list(shares))
    for process, share in zip(processes, shares, strict=True):
        assert gather_rows(process, share) == list(range(rows))


def test_gradients_travel_with_the_last_microbatch_only():
    process, seen = Process(), []
    for microbatch in synchronized_last(process, torch.nn.Identity(), ["a", "b", "c"]):
        seen.append((microbatch, process.skipped))
    assert seen == [("a", 1), ("b", 2), ("c", 2)]


def test_the_sum_over_one_process_is_exact():
    assert global_sum(Process(), 2**24 + 1, torch.tensor(0.5)) == [16777217.0, 0.5]


# -- rates -----------------------------------------------------------------------------------------


def test_the_linear_rate_falls_from_1_and_the_last_update_still_has_its_share():
    assert [linear_rate(update, 4) for update in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert linear_rate(1952, 1953) == pytest.approx(1 / 1953)


def test_the_cosine_rate_at_hand_computed_points():
    points = {0: 1.0, 25: 0.5 + math.sqrt(2) / 4, 50: 0.5, 75: 0.5 - math.sqrt(2) / 4}
    for update, expected in points.items():
        assert cosine_rate(update, 100, 0.0) == pytest.approx(expected)
    assert 0 < cosine_rate(99, 100, 0.0) < 0.001


def test_the_warm_up_rises_in_even_steps_to_1_and_is_followed_by_the_cosine():
    rates = [cosine_rate(update, 10, 0.4) for update in range(10)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[7] == pytest.approx(0.5)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert cosine_rate(0, 1, 0.0) == 1.0


def test_the_optimizer_is_adamw_with_the_papers_settings():
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]
    groups = [{"params": weights[:1]}, {"params": weights[1:]}]
    optimizer = make_optimizer(groups, 3e-6, Optimizer())
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (group["lr"], group["eps"], group["weight_decay"]) == (3e-6, 1e-5, 0.01)
        assert group["betas"] == (0.9, 0.999)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


# -- randomness ------------------------------------------------------------------------------------


def test_sampling_noise_depends_on_nothing_but_its_key():
    first = sampling_noise(1, "ppo", 3, rows=4, length=5)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    sampling_noise(1, "ppo", 4, 4, 5)
    assert torch.equal(sampling_noise(1, "ppo", 3, 4, 5), first)
    assert torch.equal(torch.get_rng_state(), before)
    for other in ((2, "ppo", 3), (1, "sft", 3), (1, "ppo", 4)):
        assert not torch.equal(sampling_noise(*other, 4, 5), first)


def test_seeds_of_different_uses_differ_and_fit_a_generator():
    keys = [(seed, purpose, step) for seed in (1, 11) for purpose in "ab" for step in (1, 11)]
    seeds = [stream_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert torch.rand(1, generator=stream(1, "a")) == torch.rand(1, generator=stream(1, "a", 0))


def test_the_accelerator_sets_every_global_seed():
    def drawn(seed: int) -> tuple[float, float, float]:
        make_accelerator(make_config("tiny", seed=seed))
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    first = drawn(1)
    assert drawn(1) == first
    assert all(one != two for one, two in zip(drawn(2), first, strict=True))


@pytest.mark.filterwarnings("error")
def test_gradient_checkpointing_has_the_same_gradients_and_no_old_name(policy_folder):
    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        model = load_policy(policy_folder).train()
        use_gradient_checkpointing(model, Memory(gradient_checkpointing=checkpointing))
        on = [getattr(each, "gradient_checkpointing", False) for each in model.modules()]
        assert any(on) == checkpointing
        tokens = torch.arange(12).view(2, 6)
        model(input_ids=tokens, labels=tokens).loss.backward()
        return [weights.grad for weights in model.parameters() if weights.grad is not None]

    for one, other in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(one, other)


# -- responses -------------------------------------------------------------------------------------


def refuse(*args) -> None:
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize("backend", ["aot_eager", refuse])
def test_compiled_layers_give_the_same_with_one_graph_or_run_uncompiled(
    policy_folder, monkeypatch, capsys, backend
):
    monkeypatch.setattr(sharding, "is_triton_available", lambda: True)
    for name, value in {"devices": ("cpu",), "backend": backend, "is_on": False}.items():
        monkeypatch.setattr(sharding.Compiling, name, value)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, policy = (load_policy(policy_folder).double() for _ in range(2))
    sharding.compile_layers(loop.make_accelerator(make_config("tiny")), policy)
    for length in (5, 9, 12):
        tokens = torch.arange(3 * length).view(3, length)
        logits = [network(input_ids=tokens, use_cache=False).logits for network in (plain, policy)]
        for of_network in logits:
            of_network.square().mean().backward()
        close(logits[1], logits[0], 1e-10)
    for weight, of_plain in zip(policy.parameters(), plain.parameters(), strict=True):
        close(weight.grad, of_plain.grad, 1e-10)
    assert policy.state_dict().keys() == plain.state_dict().keys()
    if backend == "aot_eager":
        policy(input_ids=tokens, use_cache=True)
        assert compilations() == {"compilations": 1}
    else:
        assert compilations() == {}
        assert capsys.readouterr().err.count("torch.compile failed") == 1


@pytest.fixture
def queries() -> Ragged:
    return make_ragged([[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15], [16, 17, 18], [19]])


def answer(
    policy: Any, tokenizer: Any, queries: Ragged, process: Process, forward: int = 2
) -> list[list[int]]:
    hot = 1.0  # so that the noise matters
    sampling = Sampling(
        seed=44413, purpose="test", length=6, temperature=hot, forward_batch_size=forward
    )
    share = respond_often(process, PolicyModel(policy), queries, tokenizer, sampling, None)
    return [response for (response,) in share]


def test_responses_depend_on_neither_batches_nor_processes(policy, tokenizer, queries):
    alone = answer(policy, tokenizer, queries, Process())
    assert len({tuple(response) for response in alone}) == len(queries)
    assert all(1 <= len(response) <= 6 for response in alone)
    for forward in (1, 4, 100):
        assert answer(policy, tokenizer, queries, Process(), forward) == alone
    for index in (0, 1):
        assert answer(policy, tokenizer, queries, Process(index, 2)) == alone[index::2]


def test_responses_are_cut_after_their_eos_and_hold_no_padding(policy, tokenizer, queries):
    whole = answer(policy, tokenizer, queries, Process())
    stop = whole[0][2]  # a token that does occur now becomes the end
    tokens = SimpleNamespace(eos_token_id=stop, pad_token_id=tokenizer.pad_token_id)
    found = answer(policy, tokens, queries, Process())
    for before, response in zip(whole, found, strict=True):
        if stop in before:
            assert response == before[: before.index(stop) + 1]
        assert tokens.pad_token_id not in response
    assert found[0][-1] == stop


@pytest.mark.parametrize(("there", "asked", "given"), [(2, 0, 2), (2, 1, 1), (1, 2, 2)])
def test_a_process_computes_on_as_many_threads_as_the_settings_say(there, asked, given):
    before = torch.get_num_threads()
    torch.set_num_threads(there)
    try:
        memory = replace(make_config("tiny").memory, cpu_threads=asked)
        make_accelerator(replace(make_config("tiny"), memory=memory))
        assert torch.get_num_threads() == given
    finally:
        torch.set_num_threads(before)


def test_a_processor_is_told_with_the_instructions_that_torch_may_take():
    code = """
import json
from stages.running.machine import processor
before = processor()
import torch
print(json.dumps([before, processor()]))
"""
    words, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    environment["ATEN_CPU_CAPABILITY"] = "default"
    before, after = json.loads(subprocess.check_output(words, env=environment, text=True))
    assert after == before | {"instructions": "DEFAULT"}
    assert before == {"model": cpu_model()}


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_a_stage_keeps_freed_blocks_and_the_largest_go_back():
    """Resident memory after a block is freed: gone at first, kept once a stage has begun."""
    code = """
import ctypes
import torch
from stages.training.loop import make_accelerator
from stages.settings.command_line import make_config
from stages.running.machine import keep_freed_memory

def held():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

def kept(mib):
    before = held()
    block = torch.ones(mib * 2**18)
    assert held() - before > 0.9 * mib
    del block
    return held() - before

keep_freed_memory(2**17, 2**17)
assert kept(64) < 8
make_accelerator(make_config("tiny"))
assert kept(64) > 56
assert kept(300) < 8
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
before, blocks = held(), [libc.malloc(200 * 2**20) for _ in range(3)]
for block in blocks:
    libc.memset(block, 1, 200 * 2**20)
full = held()
assert full - before > 500  # the first may take up what was freed above
for block in reversed(blocks):
    libc.free(block)
assert full - held() < 8  # together they are larger than what the heap gives back at its top
"""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


def test_sft_ends_with_the_loss_of_its_last_update_in_the_precision_of_the_others(
    runs, monkeypatch
):
    """A sharded model is read again where it was saved, and computes without autocast."""

    def keep_as_sharded(accelerator, network, tokenizer, folder):
        keep_model(accelerator, network, tokenizer, folder)
        return load_policy(folder)

    monkeypatch.setattr(sft, "keep_model", keep_as_sharded)
    small = """base.hidden_size=32 base.num_layers=1 world.train_posts=32 world.validation_posts=4
        world.train_comparisons=16 world.validation_comparisons=4 sft.epochs=1
        memory.mixed_precision=bf16""".split()
    config = make_config("tiny", name="half", overrides=tuple(small))
    base.make_base(config)
    AcceleratorState._reset_state(reset_partial_state=True)  # as a process of its own would
    sft.train_sft(config)
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = stage_folder(config, "sft")
    last = read_lines(folder / "metrics.jsonl")[-1]
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest["results"]["loss/validation"] == last["loss/validation"]
