"""TRL's own environment, below runs/peers/, with the same pinned versions as ours.

    python -m tests.bench.environment

installs it. `make bench` and the tests that compare gradients with TRL's use it.
"""

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.config import paths
from stages.config.error_messages import in_one_line
from stages.config.errors import UserError
from stages.runs.files import read_json, write_json

TRL = "TRL 1.9.2"  # the last release that has a PPOTrainer
PACKAGES = ("trl==1.9.2", "requests")  # the second is for TRL's RLOOTrainer, which a test runs
CONSTRAINTS = Path("constraints.txt")
LONGEST_LINE = 200


def trl_python() -> Path:
    """Return the path of TRL's Python, whether or not it is installed."""
    return (paths.RUNS / "peers" / "trl" / "bin" / "python").absolute()


def install_trl() -> Path:
    """Return TRL's Python; install its environment if it is missing or has other versions.

    Raises UserError with pip's last line if a package cannot be installed.
    """
    python = trl_python()
    folder = python.parents[1]
    installed = folder / "installed.json"
    wanted = [*PACKAGES, hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()]
    if read_json(installed) == wanted:
        return python

    print(f"installing {TRL} into {folder}", flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS)]
    commands = [
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*pip, "torch"],  # first, as `make install` does it: the same build as ours
        [*pip, *PACKAGES],
    ]
    for command in commands:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            raise UserError(f"{TRL} cannot be installed: {last_line(process.stderr)}")
    write_json(installed, wanted)
    return python


def run_process(words: Sequence[str], result: Path) -> Any:
    """Run a command and return the JSON that it writes. Raises UserError with its last line."""
    result.unlink(missing_ok=True)
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    written = read_json(result)
    if process.returncode or written is None:
        raise UserError(last_line(process.stderr))
    return written


def last_line(stderr: str) -> str:
    """Return the last line of what a process printed, which says what went wrong."""
    lines = stderr.strip().splitlines() or ["no message"]
    return lines[-1].removeprefix("error: ").removeprefix("ERROR: ")[:LONGEST_LINE]


@in_one_line()
def main() -> None:
    """Install the environment."""
    print(f"{TRL}: {install_trl()}")


if __name__ == "__main__":
    main()
