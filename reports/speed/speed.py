"""Measures ours and TRL on the same work, interleaved, for `make bench`. It does not load torch.

Each measurement is a process of its own, so that its peak memory is its own. A shape is measured
several times, ours and TRL one after the other, so that a machine that slows down slows both.
TRL's environment is made once, below `runs/peers/`, from the same pinned versions as ours.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from reports.needs.shapes import shape_of
from stages.running.files import read_json, write_json
from stages.running.machine import code_version, cpu_model, library_versions
from stages.settings import config as settings
from stages.settings.command_line import Request, config_of
from stages.settings.config import Config, UserError
from stages.settings.presets import PRESETS

OURS, PEER = "ours", "trl"
TRL = "TRL 1.9.2"  # the last release that has a PPOTrainer
PACKAGES = ("trl==1.9.2", "requests")  # the second: for TRL's RLOOTrainer, which a test drives
CONSTRAINTS = Path("constraints.txt")
QUERIES, EOS_ID = "queries.json", 0  # [PAD] is the id after the vocabulary's last
LAST_LINE = 200
NO_POSTS = "."  # queries are drawn, so no file of the folder is read
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An update of PPO at one shape."""

    preset: str
    batch: int
    microbatch: int
    overrides: tuple[str, ...] = ()
    """More settings, as SET takes them."""

    @property
    def text(self) -> str:
        """As the command line takes it."""
        return f"{self.preset}:{self.batch}:{self.microbatch}"

    @property
    def request(self) -> Request:
        """The settings of one update of all networks."""
        fixed = {
            "ppo.batch_size": self.batch,
            "ppo.samples_per_query": 1,
            "ppo.critic_updates": 0,
            "memory.microbatch_size": self.microbatch,
            "memory.forward_batch_size": self.batch,
            "memory.mixed_precision": "no",
            "lora.rank": 0,  # TRL learns all weights
        }
        known = PRESETS.get(self.preset)
        return Request(
            preset=self.preset,
            name="speed",  # its folder is no run's
            data="" if known is None or known().data.source else NO_POSTS,
            overrides=(*(f"{key}={value}" for key, value in fixed.items()), *self.overrides),
        )


def case_of(text: str, overrides: tuple[str, ...] = ()) -> Case:
    """A case as it is typed: `pythia-14m:32:8`. Raises UserError for anything else."""
    preset, *numbers = text.split(":")
    if len(numbers) != 2 or not all(number.isdigit() and int(number) for number in numbers):
        typed = "preset:batch:microbatch, as in pythia-14m:32:8"
        raise UserError(f"SHAPES takes {typed}, not {text}")
    batch, microbatch = map(int, numbers)
    if batch % microbatch:
        raise UserError(f"SHAPES={text}: the batch must divide by the microbatch")
    return Case(preset=preset, batch=batch, microbatch=microbatch, overrides=overrides)


def measured(cases: Sequence[Case], runs: int, work: Path) -> Iterator[Record]:
    """The whole record, after each measurement. What fails says so in it, and the rest goes on.

    `work` is a folder for weights. Raises UserError for a bad setting before anything is measured.
    """
    for case in cases:
        config_of(case.request)
    about: Record = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "code_version": code_version(),
        "machine": cpu_model(),
        "versions": library_versions(),
        "peers": {PEER: TRL},
        "left_out": [],
        "runs": runs,
        "overrides": list(cases[0].overrides),
    }
    python = None
    try:
        python = peer_interpreter()
    except UserError as error:
        about |= {"peers": {}, "left_out": [str(error)]}
    shapes: Record = {}
    for case in cases:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            for shape in _of_shape(case, runs, work, python):
                shapes[case.text] = shape
                yield {"about": about, "shapes": shapes}
        except UserError as error:  # what was measured before it took minutes
            about["left_out"].append(f"{case.text}: {error}")
    if not shapes:
        raise UserError("; ".join(about["left_out"]))
    yield {"about": about, "shapes": shapes}


def _of_shape(case: Case, runs: int, work: Path, python: Path | None) -> Iterator[Record]:
    """What is known of one shape, after each measurement. Raises UserError where ours fails."""
    config, module = config_of(case.request), [sys.executable, "-m", "reports.speed.measure"]

    def of_ours(part: str) -> Record:
        result = work / f"{part}.json"
        return run_process([*module, part, str(result), *case.request.arguments], result)

    prepared, task, result = of_ours("prepare"), work / "task.json", work / "trl.json"
    write_json(task, task_of(work, config))
    runs_of: dict[str, list[Record]] = {OURS: [], **({PEER: []} if python else {})}
    shape: Record = {
        "preset": case.preset,
        "batch": case.batch,
        "microbatch": case.microbatch,
        "response": config.data.max_summary_tokens,
        "epochs": config.ppo.num_ppo_epochs,
        **prepared,
        "measured": runs_of,
    }
    for run in range(1, runs + 1):
        print(f"{case.text}: {OURS}, run {run} of {runs}", flush=True)
        runs_of[OURS].append(of_ours("update"))
        yield shape
        if python:
            print(f"{case.text}: {TRL}, run {run} of {runs}", flush=True)
            runs_of[PEER].append(run_peer(python, task, result))
            yield shape


def run_process(words: Sequence[str], result: Path) -> Record:
    """What a process of its own writes to a file. Raises UserError with what went wrong."""
    result.unlink(missing_ok=True)
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    written: Record | None = read_json(result)
    if process.returncode or written is None:
        raise UserError(last_line(process.stderr))
    return written


# -- TRL -------------------------------------------------------------------------------------------


def peer_interpreter() -> Path:
    """TRL's Python, after its environment was made if it was not there.

    Raises UserError with pip's last line if a package cannot be had.
    """
    folder = (settings.RUNS / "peers" / PEER).absolute()
    python, mark = folder / "bin" / "python", folder / "installed.json"
    pins = hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()
    if read_json(mark) == [*PACKAGES, pins]:
        return python
    print(f"making the environment of {TRL} in {folder}", flush=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS)]
    # torch first and alone, as `make install` does it: the same build as ours.
    for words in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*install, "torch"],
        [*install, *PACKAGES],
    ):
        process = subprocess.run(words, capture_output=True, text=True, check=False)
        if process.returncode:
            raise UserError(f"{TRL} cannot be installed: {last_line(process.stderr)}")
    write_json(mark, [*PACKAGES, pins])
    return python


def last_line(text: str) -> str:
    """The last line of what a process said, which is the one that tells what went wrong."""
    lines = text.strip().splitlines() or ["no message"]
    return lines[-1].removeprefix("error: ").removeprefix("ERROR: ")[:LAST_LINE]


def run_peer(python: Path, task: Path, result: Path) -> Record:
    """One measurement of TRL; what went wrong stands in `failed`."""
    words = [str(python), "-m", "reports.speed.peer_trl", str(task), str(result)]
    try:
        return run_process(words, result)
    except UserError as error:
        return {"failed": str(error)}


def task_of(folder: Path, config: Config) -> Record:
    """The update that ours makes too, as plain numbers and names."""
    vocabulary = shape_of(config.base).vocabulary
    return {
        **asdict(config.memory),
        **asdict(config.ppo),
        "weights": str(folder / "model"),
        "queries": read_json(folder / QUERIES)[: config.ppo.batch_size],
        "eos_id": EOS_ID,
        "pad_id": vocabulary,
        "response_length": config.data.max_summary_tokens,
        "seed": config.seed,
        "bf16": config.memory.mixed_precision == "bf16",
    }
