"""Peak memory and time of a piece of work, on a GPU or on a CPU.

On a GPU torch counts its own tensors. On a CPU it is the process's resident memory, above what the
process held before it loaded weights. The operating system keeps the highest value, so that no peak
is missed between two looks.
"""

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from stages.runs.machine import keep_freed_memory

T = TypeVar("T")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Every freed block from this size on leaves the process, so that resident memory is what is in use.
# That costs time.
AT_ONCE = 2**17
MATRIX, TRIES = 1024, 20


class Meter:
    """Measures on one device; made before any weight is loaded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        keep_freed_memory(AT_ONCE, AT_ONCE)
        warm_up(device)
        self.before = torch.cuda.memory_allocated(device) if self.on_gpu else _status("VmRSS")

    def whole(self, work: Callable[[], T]) -> tuple[T, dict[str, float]]:
        """What some work returns; its `seconds`, and its `peak`, the most that was held, bytes.

        The process keeps freed memory, as a real run does: it is faster.
        """
        keep_freed_memory()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        elif CLEAR.exists():
            CLEAR.write_text("5", encoding="ascii")  # the highest value starts again from here
        self.wait()
        started = time.perf_counter()
        result = work()
        self.wait()
        seconds = time.perf_counter() - started
        most = torch.cuda.max_memory_allocated(self.device) if self.on_gpu else _status("VmHWM")
        return result, {"seconds": seconds, "peak": most - self.before}

    def wait(self) -> None:
        """Until the device has done all that was asked of it."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def _status(name: str) -> int:
    """A number of this process's status, bytes; elsewhere than on Linux the highest there was."""
    if not STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def warm_up(device: torch.device) -> None:
    """Have libraries load what a training step needs, so that it is not counted as tensors."""
    layer = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()).to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 4, 16, 64, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
            mask = torch.ones(2, 1, 16, 16, dtype=torch.bool, device=device)
            y = layer(x)
            y = scaled_dot_product_attention(y, y, y, attn_mask=mask)
        torch.autograd.backward(y.float().logsumexp(-1).sum())
        optimizer.step()


def hold(model: nn.Module) -> None:
    """Have every weight in memory: on a CPU a file's pages count only once they are read."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.sum().item()


def matrix_rate(meter: Meter, half: bool) -> float:
    """Operations per second of a large matrix product on this device, the best of some tries."""
    width, seconds = MATRIX * (4 if meter.on_gpu else 1), []
    dtype = torch.bfloat16 if half else torch.float32
    x = torch.randn(width, width, device=meter.device, dtype=dtype)
    for _ in range(TRIES):
        meter.wait()
        started = time.perf_counter()
        torch.mm(x, x)
        meter.wait()
        seconds.append(time.perf_counter() - started)
    return 2 * width**3 / min(seconds)
