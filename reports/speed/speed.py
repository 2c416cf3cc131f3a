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
from stages.settings.checks import unknown
from stages.settings.command_line import Request, config_of
from stages.settings.config import Config, UserError
from stages.settings.presets import PRESETS

OURS, PEER = "ours", "trl"
TRL = "TRL 1.9.2"  # the last release that has a PPOTrainer
PACKAGES = ("trl==1.9.2", "requests")  # beside torch; its RLOOTrainer imports the second, unasked
CONSTRAINTS = Path("constraints.txt")
QUERIES, EOS_ID = "queries.json", 0  # [PAD] is the id after the vocabulary's last
LAST_LINE = 200
PPO = "ppo"
# Policy-gradient stage -> what the page calls it.
LABELS = {PPO: "PPO", "rloo": "RLOO", "grpo": "Dr.GRPO"}
NO_POSTS = "."  # queries are drawn, so no file of the folder is read
GROUP, RIVAL_EPOCHS = 4, 2  # RLOO and Dr.GRPO: samples of a query, passes over a batch
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An update of a policy-gradient stage at one shape."""

    preset: str
    batch: int
    microbatch: int
    stage: str = PPO
    overrides: tuple[str, ...] = ()
    """More settings, as SET takes them."""

    @property
    def text(self) -> str:
        """As the command line takes it."""
        stage = "" if self.stage == PPO else f":{self.stage}"
        return f"{self.preset}:{self.batch}:{self.microbatch}{stage}"

    @property
    def request(self) -> Request:
        """The settings of one update of all networks of the stage."""
        fixed = {
            "ppo.batch_size": self.batch,
            "ppo.samples_per_query": 1,
            "ppo.critic_updates": 0,
            "memory.microbatch_size": self.microbatch,
            "memory.forward_batch_size": self.batch,
            "memory.mixed_precision": "no",
            "lora.rank": 0,  # TRL learns all weights
        }
        if self.stage != PPO:
            fixed[f"{self.stage}.batch_size"] = self.batch
            fixed[f"{self.stage}.samples_per_query"] = GROUP
            fixed[f"{self.stage}.num_ppo_epochs"] = RIVAL_EPOCHS
        known = PRESETS.get(self.preset)
        return Request(
            preset=self.preset,
            name="speed",  # its folder is no run's
            data="" if known is None or known().data.source else NO_POSTS,
            overrides=(*(f"{key}={value}" for key, value in fixed.items()), *self.overrides),
        )


def case_of(text: str, overrides: tuple[str, ...] = ()) -> Case:
    """A case as it is typed: `pythia-14m:32:8`, or `pythia-14m:32:8:rloo`.

    Raises UserError for anything else.
    """
    preset, *numbers = text.split(":")
    stage = numbers.pop() if len(numbers) == 3 else PPO
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
    return Case(preset=preset, batch=batch, microbatch=microbatch, stage=stage, overrides=overrides)


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

    prepared, section = of_ours("prepare"), getattr(config, case.stage)
    task, result = work / "task.json", work / "trl.json"
    write_json(task, task_of(work, config, case.stage))
    runs_of: dict[str, list[Record]] = {OURS: [], **({PEER: []} if python else {})}
    shape: Record = {
        "preset": case.preset,
        "stage": case.stage,
        "batch": case.batch,
        "microbatch": case.microbatch,
        "response": config.data.max_summary_tokens,
        "epochs": section.num_ppo_epochs,
        "samples_per_query": section.samples_per_query,
        **prepared,
        "measured": runs_of,
    }
    for run in range(1, runs + 1):
        print(f"{case.text}: {OURS}, run {run} of {runs}", flush=True)
        runs_of[OURS].append(of_ours(case.stage))
        yield shape
        if python:
            print(f"{case.text}: {TRL}, run {run} of {runs}", flush=True)
            runs_of[PEER].append(run_peer(python, task, result))
            yield shape


def run_process(words: Sequence[str], result: Path) -> Record:
    """What a process of its own writes to a file. Raises UserError with what went wrong."""
    result.unlink(missing_ok=True)
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    written: Record | None = read_json(result)
    if made.returncode or written is None:
        raise UserError(last_line(made.stderr))
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
        made = subprocess.run(words, capture_output=True, text=True, check=False)
        if made.returncode:
            raise UserError(f"{TRL} cannot be installed: {last_line(made.stderr)}")
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


def task_of(folder: Path, config: Config, stage: str = PPO) -> Record:
    """The update of a stage that ours makes too, as plain numbers and names."""
    section, vocabulary = getattr(config, stage), shape_of(config.base).vocabulary
    queries = read_json(folder / QUERIES)
    return {
        **asdict(config.memory),
        **asdict(section),
        "stage": stage,
        "weights": str(folder / "model"),
        "queries": queries[: section.batch_size // section.samples_per_query],
        "vocabulary": vocabulary,
        "eos_id": EOS_ID,
        "pad_id": vocabulary,
        "response_length": config.data.max_summary_tokens,
        "seed": config.seed,
        "bf16": config.memory.mixed_precision == "bf16",
    }
