"""Several processes: stand-ins for accelerate's Accelerator, and real launches on the CPU."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


class Process(SimpleNamespace):
    """Stands for accelerate's Accelerator in one of several processes."""

    device = torch.device("cpu")

    def __init__(self, index: int = 0, count: int = 1) -> None:
        super().__init__(process_index=index, num_processes=count)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Cast nothing."""
        yield

    def wait_for_everyone(self) -> None:
        """Return at once: nobody else is there."""


def launch(
    folder: Path, engine: str, code: str, processes: int = 2
) -> subprocess.CompletedProcess[str]:
    """Run code in several processes on the CPU (gloo), as `GPUS=2` starts two on GPUs."""
    script = folder / "script.py"
    script.write_text(code)
    command: list[Any] = [sys.executable, "-m", "stages.pipeline.launch"]
    command += [engine, str(processes), str(script)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
