"""Peers that ours is measured beside: their environments, and the task that each is given.

An environment is made once, below `runs/peers/`, from the same pinned versions as ours. It does not
load torch.
"""

import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.running.files import read_json, write_json, write_text
from stages.settings import config as settings
from stages.settings.config import Config, UserError

CONSTRAINTS = Path("constraints.txt")
QUERIES, IDS = "queries.json", "base/ids.json"
LAST_LINE = 200


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another implementation of PPO."""

    name: str
    label: str
    packages: tuple[str, ...]
    """What pip installs beside torch."""
    module: str
    """Our script that drives it; called with the files of the task and of what was found."""


# The last release of TRL that has a PPOTrainer.
TRL = Peer(
    name="trl",
    label="TRL 1.9.2",
    packages=("trl==1.9.2",),
    module="reports.speed.peer_trl",
)
PEERS = {one.name: one for one in (TRL,)}


def interpreter_of(peer: Peer) -> Path:
    """The peer's Python, after its environment was made if it was not there.

    Raises UserError with pip's last line if a package cannot be had.
    """
    folder = (settings.RUNS / "peers" / peer.name).absolute()
    python, mark = folder / "bin" / "python", folder / "installed"
    pins = hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()
    asked = " ".join((*peer.packages, pins))
    if mark.is_file() and mark.read_text(encoding="utf-8") == asked:
        return python
    print(f"making the environment of {peer.label} in {folder}", flush=True)
    _call(peer, [sys.executable, "-m", "venv", "--clear", str(folder)])
    # torch first and alone, as `make install` does it: the same build as ours.
    for packages in (("torch",), peer.packages):
        install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS)]
        _call(peer, [*install, *packages])
    write_text(mark, asked)
    return python


def _call(peer: Peer, words: list[str]) -> None:
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    if made.returncode:
        raise UserError(f"{peer.label} cannot be installed: {last_line(made.stderr)}")


def last_line(text: str) -> str:
    """The last line of what a process said, which is the one that tells what went wrong."""
    lines = text.strip().splitlines() or ["no message"]
    return lines[-1].removeprefix("error: ").removeprefix("ERROR: ")[:LAST_LINE]


def run_peer(peer: Peer, python: Path, folder: Path, config: Config) -> dict[str, Any]:
    """One measurement of the peer in a process of its own; what went wrong stands in `failed`."""
    task, found = (folder / f"{peer.name}-{one}.json" for one in ("task", "found"))
    write_json(task, task_of(folder, config))
    found.unlink(missing_ok=True)
    words = [str(python), "-m", peer.module, str(task), str(found)]
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    measured: dict[str, Any] | None = read_json(found)
    if made.returncode or measured is None:
        return {"failed": last_line(made.stderr)}
    return measured


def cut_queries(folder: Path, config: Config) -> list[list[int]]:
    """Token ids of the batch's queries, as many and as long as the settings say; a longer one loses
    its start.
    """
    rows: list[list[int]] = read_json(folder / QUERIES)
    return [row[-config.data.max_query_tokens :] for row in rows[: config.ppo.batch_size]]


def task_of(folder: Path, config: Config) -> dict[str, Any]:
    """The update that ours makes too, as plain numbers and names."""
    ids = read_json(folder / IDS)
    return {
        "weights": str(folder / "sft" / "model"),
        "queries": cut_queries(folder, config),
        "eos_id": ids["eos"],
        "pad_id": ids["pad"],
        "response_length": config.data.max_summary_tokens,
        "microbatch_size": config.memory.microbatch_size,
        "forward_batch_size": config.memory.forward_batch_size,
        "num_ppo_epochs": config.ppo.num_ppo_epochs,
        "temperature": config.ppo.temperature,
        "learning_rate": config.ppo.learning_rate,
        "kl_coef": config.ppo.kl_coef,
        "seed": config.seed,
        "threads": config.memory.cpu_threads,
        "bf16": config.memory.mixed_precision == "bf16",
    }
