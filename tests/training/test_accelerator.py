"""How a process starts: seeds, threads, memory."""

import ctypes
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from stages.config.command_line import make_config
from stages.runs.machine import cpu_model
from stages.training.accelerator import make_accelerator
from tests.lib.hub_client import ROOT


def test_the_accelerator_sets_every_global_seed():
    def drawn(seed: int) -> tuple[float, float, float]:
        make_accelerator(make_config("tiny", seed=seed))
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    first = drawn(1)
    assert drawn(1) == first
    assert all(one != two for one, two in zip(drawn(2), first, strict=True))


@pytest.mark.parametrize(("before_start", "setting", "expected"), [(2, 0, 2), (2, 1, 1), (1, 2, 2)])
def test_a_process_computes_on_as_many_threads_as_the_settings_say(before_start, setting, expected):
    before = torch.get_num_threads()
    torch.set_num_threads(before_start)
    try:
        memory = make_config("tiny").memory.changed(cpu_threads=setting)
        make_accelerator(make_config("tiny").changed(memory=memory))
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_a_processor_is_recorded_with_the_instructions_that_torch_may_use():
    code = """
import json
from stages.runs.machine import processor
before = processor()
import torch
print(json.dumps([before, processor()]))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-c", code]
    before, after = json.loads(subprocess.check_output(command, env=environment, text=True))
    assert after == before | {"instructions": "DEFAULT"}
    assert before == {"model": cpu_model()}


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_a_stage_keeps_freed_blocks_and_the_largest_go_back():
    """Resident memory after a block is freed: gone at first, kept once a stage has begun."""
    code = """
import ctypes
import torch
from stages.training.accelerator import make_accelerator
from stages.config.command_line import make_config
from stages.runs.machine import keep_freed_memory

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
