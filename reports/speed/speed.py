"""Measures ours and its peer in turn on the same work, for `make bench`. It does not load torch.

Each measurement is a process of its own, so that its peak memory is its own. A shape is measured
several times, ours and the peer interleaved, so that a machine that slows down slows all of them.
The peer's environment is made once, below `runs/peers/`, from the same pinned versions as ours.
"""

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from reports.needs.shapes import shape_of
from stages.running.files import read_json, write_json, write_text
from stages.running.machine import code_version, cpu_model, library_versions
from stages.settings import config as settings
from stages.settings.checks import unknown
from stages.settings.command_line import Request, config_of
from stages.settings.config import Config, UserError
from stages.settings.presets import PRESETS

NAME = "bench"
OURS, PEER = "ours", "trl"
TRL = "TRL 1.9.2"  # the last release that has a PPOTrainer
PACKAGES = ("trl==1.9.2", "requests")  # beside torch; its RLOOTrainer imports the second, unasked
CONSTRAINTS = Path("constraints.txt")
QUERIES, EOS_ID = "queries.json", 0  # [PAD] is the id after the vocabulary's last
LAST_LINE = 200
PPO = "ppo"
# Policy-gradient stage -> what the page calls it.
LABELS = {PPO: "PPO", "rloo": "RLOO", "grpo": "Dr.GRPO"}
SHAPE = ("preset", "batch", "microbatch")
NO_POSTS = "."  # queries are drawn, so no file of the folder is read
GROUP, RIVAL_EPOCHS = 4, 2  # RLOO and Dr.GRPO: samples of a query, passes over a batch


@dataclass(frozen=True, kw_only=True)
class Case:
    """An update of a policy-gradient stage at one shape."""

    preset: str
    batch: int
    microbatch: int
    stage: str = PPO

    @property
    def text(self) -> str:
        """As the command line takes it."""
        stage = "" if self.stage == PPO else f":{self.stage}"
        return f"{self.preset}:{self.batch}:{self.microbatch}{stage}"

    @property
    def settings(self) -> tuple[str, ...]:
        """The overrides that make the update: one of all networks of the stage."""
        batch = (f"ppo.batch_size={self.batch}", "ppo.samples_per_query=1", "ppo.critic_updates=0")
        if self.stage == PPO:
            return batch
        own = (f"{self.stage}.batch_size={self.batch}", f"{self.stage}.samples_per_query={GROUP}")
        return (*batch, *own, f"{self.stage}.num_ppo_epochs={RIVAL_EPOCHS}")


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What is to be measured."""

    cases: tuple[Case, ...]
    runs: int
    overrides: tuple[str, ...] = ()

    def request(self, case: Case) -> Request:
        """The settings of a case."""
        fixed = (
            *case.settings,
            f"memory.microbatch_size={case.microbatch}",
            f"memory.forward_batch_size={case.batch}",
            "memory.mixed_precision=no",
            "lora.rank=0",  # a peer learns all weights
        )
        known = PRESETS.get(case.preset)
        return Request(
            preset=case.preset,
            name="speed",  # its folder is no run's
            data="" if known is None or known().data.source else NO_POSTS,
            overrides=(*fixed, *self.overrides),
        )


def case_of(text: str) -> Case:
    """A case as it is typed: `pythia-14m:32:8`, or `pythia-14m:32:8:rloo`.

    Raises UserError for anything else.
    """
    preset, *numbers = text.split(":")
    stage = numbers.pop() if len(numbers) == len(SHAPE) else PPO
    if len(numbers) != 2 or not all(number.isdigit() and int(number) for number in numbers):
        typed = "preset:batch:microbatch, as in pythia-14m:32:8, and :rloo or :grpo behind it"
        raise UserError(f"SHAPES takes {typed}, not {text}")
    if stage not in LABELS:
        raise unknown("stage to measure", stage, LABELS)
    batch, microbatch = map(int, numbers)
    group = 1 if stage == PPO else GROUP
    if batch % microbatch or microbatch % group:
        by = "" if group == 1 else f", and that by the {group} samples of a query"
        raise UserError(f"SHAPES={text}: the batch must divide by the microbatch{by}")
    return Case(preset=preset, batch=batch, microbatch=microbatch, stage=stage)


def measure_in(order: BenchRequest, folder: Path) -> dict[str, Any]:
    """Everything that is measured; working files are removed whenever this ends."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)  # of a call that was killed
    work.mkdir(parents=True)
    try:
        return measure(order, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def measure(order: BenchRequest, work: Path) -> dict[str, Any]:
    """Everything that is measured. A shape that fails is left out and named, a peer says so itself.

    Raises UserError if ours fails at every shape.
    """
    for case in order.cases:
        config_of(order.request(case))  # refuses a bad setting before anything is measured
    python, left_out = None, []
    try:
        python = peer_interpreter()
    except UserError as error:
        left_out.append(str(error))
    shapes: dict[str, dict[str, Any]] = {}
    for case in order.cases:
        try:
            shapes[case.text] = _measure_shape(order, case, work, python)
        except UserError as error:  # what was measured before it took minutes
            left_out.append(f"{case.text}: {error}")
    if not shapes:
        raise UserError("; ".join(left_out))
    updates = [run for shape in shapes.values() for run in shape["measured"][OURS]]
    return {
        "about": {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "code_version": code_version(),
            "machine": cpu_model(),
            "device": updates[0]["device"],
            "threads": updates[0]["threads"],
            "versions": library_versions(),
            "peers": {PEER: TRL} if python else {},
            "left_out": left_out,
            "runs": order.runs,
            "overrides": list(order.overrides),
            "matrix_rate": max(run["matrix_rate"] for run in updates),
        },
        "shapes": shapes,
    }


def _measure_shape(
    order: BenchRequest, case: Case, work: Path, python: Path | None
) -> dict[str, Any]:
    folder, request = work / case.text.replace(":", "-"), order.request(case)
    folder.mkdir(parents=True)
    prepared, config = run_part("prepare", request, folder), config_of(request)
    task = task_of(folder, config, case.stage)
    measured: dict[str, list[dict[str, Any]]] = {OURS: [], **({PEER: []} if python else {})}
    for run in range(1, order.runs + 1):
        print(f"{case.text}: {OURS}, run {run} of {order.runs}", flush=True)
        measured[OURS].append(run_part(case.stage, request, folder))
        if python:
            print(f"{case.text}: {TRL}, run {run} of {order.runs}", flush=True)
            measured[PEER].append(run_peer(python, folder, task))
    section = getattr(config, case.stage)
    about = {
        "preset": case.preset,
        "stage": case.stage,
        "batch": case.batch,
        "microbatch": case.microbatch,
        "response": config.data.max_summary_tokens,
        "epochs": section.num_ppo_epochs,
        "samples_per_query": section.samples_per_query,
    }
    return about | prepared | {"measured": measured}


def run_part(part: str, request: Request, folder: Path) -> dict[str, Any]:
    """Make a measurement of ours in a process of its own. Raises UserError with what went wrong."""
    words = [sys.executable, "-m", "reports.speed.measure", part, "--folder", str(folder)]
    made = subprocess.run(
        [*words, *request.arguments], stderr=subprocess.PIPE, text=True, check=False
    )
    if made.returncode:
        raise UserError(f"bench: {part} of {request.preset}: {last_line(made.stderr)}")
    measured: dict[str, Any] = read_json(folder / f"{part}.json")
    return measured


# -- the peer --------------------------------------------------------------------------------------


def peer_interpreter() -> Path:
    """TRL's Python, after its environment was made if it was not there.

    Raises UserError with pip's last line if a package cannot be had.
    """
    folder = (settings.RUNS / "peers" / PEER).absolute()
    python, mark = folder / "bin" / "python", folder / "installed"
    pins = hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()
    wanted = " ".join((*PACKAGES, pins))
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
        return python
    print(f"making the environment of {TRL} in {folder}", flush=True)
    _call([sys.executable, "-m", "venv", "--clear", str(folder)])
    # torch first and alone, as `make install` does it: the same build as ours.
    for packages in (("torch",), PACKAGES):
        install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS)]
        _call([*install, *packages])
    write_text(mark, wanted)
    return python


def _call(words: list[str]) -> None:
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    if made.returncode:
        raise UserError(f"{TRL} cannot be installed: {last_line(made.stderr)}")


def last_line(text: str) -> str:
    """The last line of what a process said, which is the one that tells what went wrong."""
    lines = text.strip().splitlines() or ["no message"]
    return lines[-1].removeprefix("error: ").removeprefix("ERROR: ")[:LAST_LINE]


def run_peer(python: Path, folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    """One measurement of TRL in a process of its own; what went wrong stands in `failed`."""
    written, result = (folder / f"{PEER}-{kind}.json" for kind in ("task", "result"))
    write_json(written, task)
    result.unlink(missing_ok=True)
    words = [str(python), "-m", "reports.speed.peer_trl", str(written), str(result)]
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    measured: dict[str, Any] | None = read_json(result)
    if made.returncode or measured is None:
        return {"failed": last_line(made.stderr)}
    return measured


def task_of(folder: Path, config: Config, stage: str = PPO) -> dict[str, Any]:
    """The update of a stage that ours makes too, as plain numbers and names."""
    section, vocabulary = getattr(config, stage), shape_of(config.base).vocabulary
    group = section.samples_per_query
    return {
        "stage": stage,
        "weights": str(folder / "model"),
        "queries": read_json(folder / QUERIES)[: section.batch_size // group],
        "samples_per_query": group,
        "vocabulary": vocabulary,
        "eos_id": EOS_ID,
        "pad_id": vocabulary,
        "response_length": config.data.max_summary_tokens,
        "microbatch_size": config.memory.microbatch_size,
        "forward_batch_size": config.memory.forward_batch_size,
        "num_ppo_epochs": section.num_ppo_epochs,
        "temperature": section.temperature,
        "learning_rate": section.learning_rate,
        "kl_coef": section.kl_coef,
        "seed": config.seed,
        "threads": config.memory.cpu_threads,
        "bf16": config.memory.mixed_precision == "bf16",
    }
