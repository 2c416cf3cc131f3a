"""Seconds and peak memory of a piece of work, on a GPU or on a CPU.

On a GPU torch counts its own tensors. On a CPU it is the resident memory of the process, above what
the process held before it loaded any weights. The kernel keeps the highest value, so no peak is
missed between two readings.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from stages.runs.machine import keep_freed_memory

T = TypeVar("T")
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what to write to clear_refs so that the highest resident memory starts again
# Before the measurement every freed block from this size on leaves the process, so that resident
# memory is memory in use. That costs time.
SMALL_BLOCK = 2**17
MATRIX_WIDTH = 1024
MATRIX_TRIES = 20


@dataclass(frozen=True, kw_only=True)
class Update:
    """One measured update, ours or TRL's."""

    seconds: float
    peak: int
    """Bytes above what the process held before it loaded weights."""
    tokens: int
    """Tokens of queries and sampled responses."""
    threads: int


class Meter:
    """Measures work on one device. Create it before any weights are loaded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_on_gpu = device.type == "cuda"
        keep_freed_memory(largest_kept_block=SMALL_BLOCK, trim=SMALL_BLOCK)
        load_kernels(device)
        if self.is_on_gpu:
            self.held_before = torch.cuda.memory_allocated(device)
        else:
            self.held_before = resident_memory("VmRSS")

    def measure(self, work: Callable[[], T]) -> tuple[T, float, int]:
        """Return the result of some work, its seconds, and its peak memory in bytes.

        The process keeps freed memory meanwhile, as a run of the pipeline does: it is faster.
        """
        keep_freed_memory()
        if self.is_on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")

        self.wait()
        started = time.perf_counter()
        result = work()
        self.wait()
        seconds = time.perf_counter() - started

        if self.is_on_gpu:
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = resident_memory("VmHWM")
        return result, seconds, peak - self.held_before

    def wait(self) -> None:
        """Wait until the device has finished all its work."""
        if self.is_on_gpu:
            torch.cuda.synchronize(self.device)


def resident_memory(field: str) -> int:
    """Return resident memory of this process in bytes: `VmRSS` now, `VmHWM` at its peak."""
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {field}")


def load_kernels(device: torch.device) -> None:
    """Take a small training step, so that what libraries load is not counted as tensors."""
    layer = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()).to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    for is_half in (False, True):
        x = torch.randn(2, 4, 16, 64, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_half):
            mask = torch.ones(2, 1, 16, 16, dtype=torch.bool, device=device)
            y = layer(x)
            y = scaled_dot_product_attention(y, y, y, attn_mask=mask)
        torch.autograd.backward(y.float().logsumexp(-1).sum())
        optimizer.step()


def read_weights(model: nn.Module) -> None:
    """Read every weight: on a CPU the pages of a mapped file count only once they are read."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.sum().item()


def matrix_rate(meter: Meter, is_half: bool) -> float:
    """Return operations per second of a large matrix product, the best of some tries."""
    width = 4 * MATRIX_WIDTH if meter.is_on_gpu else MATRIX_WIDTH
    dtype = torch.bfloat16 if is_half else torch.float32
    x = torch.randn(width, width, device=meter.device, dtype=dtype)

    seconds = []
    for _ in range(MATRIX_TRIES):
        meter.wait()
        started = time.perf_counter()
        torch.mm(x, x)
        meter.wait()
        seconds.append(time.perf_counter() - started)
    return 2 * width**3 / min(seconds)
