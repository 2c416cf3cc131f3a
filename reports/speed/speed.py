"""Measures ours and TRL on the same work, interleaved, for `make bench`. It does not load torch.

Each measurement is a process of its own, so that its peak memory is its own. A shape is measured
several times, ours and TRL one after the other, so that a machine that slows down slows both.
TRL's environment is made once, below `runs/peers/`, from the same pinned versions as ours.
"""

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from reports.needs.shapes import shape_of
from reports.parts.words import OURS, PEER, TRL
from stages.config import config as settings
from stages.config.command_line import Request, config_of
from stages.config.config import Config, UserError
from stages.config.presets import PRESETS
from stages.runs.code import code_of, code_version
from stages.runs.files import read_json, write_json
from stages.runs.machine import cpu_model, library_versions

PACKAGES = ("trl==1.9.2", "requests")  # the second: for TRL's RLOOTrainer, which a test drives
CONSTRAINTS = Path("constraints.txt")
QUERIES, EOS_ID = "queries.json", 0  # [PAD] is the id after the vocabulary's last
MEASURE = "reports.speed.measure"
ON_CPU = ("pythia-14m:32:8", "pythia-70m:16:4")
ON_CARD = ("pythia-1b:64:16", "pythia-1b:64:16:rloo", "pythia-410m:128:32", "smollm2-full:256:32")
CARD = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
# Operations per second in bf16, without sparsity, by the datasheets; the first name that fits.
PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}
SAME = ("code", "machine", "card", "versions", "overrides")
"""What two calls have in common, if one goes on with what the other measured."""
LAST_LINE = 200
NO_POSTS = "."  # queries are drawn, so no file of the folder is read
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An update of PPO or RLOO at one shape."""

    preset: str
    batch: int
    microbatch: int
    stage: str
    text: str
    """As it was typed."""
    overrides: tuple[str, ...] = ()
    """More settings, as SET takes them."""

    @property
    def request(self) -> Request:
        """The settings of one update of all networks."""
        fixed = {
            f"{self.stage}.batch_size": self.batch,
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
    """A case as it is typed: `pythia-14m:32:8`, or `pythia-14m:32:8:rloo`. Raises UserError for
    anything else.
    """
    parts = re.fullmatch(r"([^:]+):([1-9]\d*):([1-9]\d*)(?::(rloo))?", text)
    if parts is None:
        typed = "preset:batch:microbatch, as in pythia-14m:32:8, and :rloo for RLOO"
        raise UserError(f"SHAPES takes {typed}, not {text}")
    batch, microbatch = int(parts[2]), int(parts[3])
    if batch % microbatch:
        raise UserError(f"SHAPES={text}: the batch must divide by the microbatch")
    numbers = {"batch": batch, "microbatch": microbatch}
    stage = parts[4] or "ppo"
    return Case(preset=parts[1], stage=stage, text=text, overrides=overrides, **numbers)


@cache
def card_name() -> str:
    """The name of this machine's card; empty without one. This process does not load torch."""
    return subprocess.check_output([sys.executable, "-c", CARD], text=True).strip()


def peak_of(card: str) -> float:
    """Operations per second that a card can do in bf16; nan where that is not known here."""
    return next((peak for name, peak in PEAKS.items() if name in card), float("nan"))


def measured(cases: Sequence[Case], runs: int, work: Path, before: Record) -> Iterator[Record]:
    """The whole record, after each measurement. What fails says so in it, and the rest goes on.

    `work` is a folder for weights; `before`, the record of an earlier call, of which this one goes
    on if that was stopped and `SAME` are the same. Raises UserError for a bad setting before
    anything is measured.
    """
    for case in cases:
        config_of(case.request)
    about: Record = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "code_version": code_version(),
        "code": hashlib.sha256(repr(code_of(MEASURE)).encode()).hexdigest()[:12],
        "machine": cpu_model(),
        "card": card_name(),
        "versions": library_versions(),
        "peers": {PEER: TRL},
        "left_out": [],
        "runs": runs,
        "overrides": list(cases[0].overrides),
        "finished": False,
    }
    python = None
    try:
        python = peer_interpreter()
    except UserError as error:
        about |= {"peers": {}, "left_out": [str(error)]}
    earlier: Record = before.get("about", {})
    same = all(earlier.get(key) == about[key] for key in SAME)
    known = before["shapes"] if same and not earlier["finished"] else {}
    shapes: Record = {case.text: known[case.text] for case in cases if case.text in known}
    for case in cases:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        before_it = shapes.get(case.text, {}).get("measured", {})
        try:
            for shape in _of_shape(case, runs, work, python, before_it):
                shapes[case.text] = shape
                yield {"about": about, "shapes": shapes}
        except UserError as error:  # what was measured before it took minutes
            about["left_out"].append(f"{case.text}: {error}")
    if not shapes:
        raise UserError("; ".join(about["left_out"]))
    yield {"about": about | {"finished": True}, "shapes": shapes}


def _of_shape(
    case: Case, runs: int, work: Path, python: Path | None, before: dict[str, list[Record]]
) -> Iterator[Record]:
    """What is known of one shape, after each measurement that was not made before. Raises UserError
    where ours fails.
    """
    config, module = config_of(case.request), [sys.executable, "-m", MEASURE]

    def of_ours(part: str) -> Record:
        result, stage = work / f"{part}.json", f"--stage={case.stage}"
        return run_process([*module, part, str(result), stage, *case.request.arguments], result)

    everybody = [OURS, PEER] if python and case.stage == "ppo" else [OURS]
    runs_of = {who: [*before.get(who, [])] for who in everybody}
    order = [(run, who) for run in range(1, runs + 1) for who in everybody]
    todo = [(run, who) for run, who in order if len(runs_of[who]) < run]
    if not todo:
        return
    prepared, task, result = of_ours("prepare"), work / "task.json", work / "trl.json"
    write_json(task, task_of(work, config))
    shape: Record = {
        "preset": case.preset,
        "stage": case.stage,
        "batch": case.batch,
        "microbatch": case.microbatch,
        "response": config.data.max_summary_tokens,
        "epochs": getattr(config, case.stage).num_ppo_epochs,
        **prepared,
        "measured": runs_of,
    }
    for run, who in todo:
        print(f"{case.text}: {TRL if who == PEER else who}, run {run} of {runs}", flush=True)
        if python is not None and who == PEER:
            runs_of[who].append(run_peer(python, task, result))
        else:
            runs_of[who].append(of_ours("update"))
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
        **config.memory.model_dump(),
        **config.ppo.model_dump(),
        "weights": str(folder / "model"),
        "queries": read_json(folder / QUERIES)[: config.ppo.batch_size],
        "eos_id": EOS_ID,
        "pad_id": vocabulary,
        "response_length": config.data.max_summary_tokens,
        "seed": config.seed,
        "bf16": config.memory.mixed_precision == "bf16",
    }
