"""How a process starts: seeds, threads, memory; layers that torch compiles."""

import ctypes
import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from stages.models.loading import load_policy
from stages.rl.metrics import compilations
from stages.running.machine import cpu_model
from stages.settings.command_line import make_config
from stages.settings.config import Memory, UserError
from stages.training import compiling
from stages.training.accelerator import make_accelerator
from stages.training.memory import use_gradient_checkpointing
from stages.training.supervised import check_batch
from tests.conftest import ROOT, close
from tests.lib.processes import Process


def test_the_accelerator_sets_every_global_seed():
    def drawn(seed: int) -> tuple[float, float, float]:
        make_accelerator(make_config("tiny", seed=seed))
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    first = drawn(1)
    assert drawn(1) == first
    assert all(one != two for one, two in zip(drawn(2), first, strict=True))


def test_a_batch_that_cannot_be_filled_or_divided_is_refused():
    check_batch("sft", 8, 8, Process(count=4))
    with pytest.raises(
        UserError, match=r"sft\.batch_size is 9 but there are only 8 rows: lower it"
    ):
        check_batch("sft", 9, 8, Process())
    with pytest.raises(UserError, match=r"rm\.batch_size is 8: it must be divisible by 3"):
        check_batch("rm", 8, 100, Process(count=3))


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


def refuse(*args) -> None:
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize("backend", ["aot_eager", refuse])
def test_compiled_layers_give_the_same_with_one_graph_or_run_uncompiled(
    policy_folder, monkeypatch, capsys, backend
):
    monkeypatch.setattr(compiling, "is_triton_available", lambda: True)
    for name, value in {"devices": ("cpu",), "backend": backend, "is_on": False}.items():
        monkeypatch.setattr(compiling.COMPILER, name, value)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, policy = (load_policy(policy_folder).double() for _ in range(2))
    compiling.compile_layers(policy, make_accelerator(make_config("tiny")).device)
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
from stages.training.accelerator import make_accelerator
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
