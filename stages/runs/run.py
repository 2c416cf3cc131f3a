"""A running stage: its folder, settings, metrics, progress, and the manifest at its end.

    runs/<name>/seed<k>/<stage>/   config.json (first)  metrics.jsonl  ...  manifest.json (last)

A stage works in `<stage>.partial`, which is renamed when the stage has finished. So a folder
`<stage>` with a manifest exists exactly when the stage is done. An interrupted stage stays in its
partial folder and resumes from there, given the same settings and inputs. A replaced stage moves to
`aside/`. A stage opens its inputs with `require`, which checks hashes; it never guesses which file
is newest. Stages that depend on the judge have a folder for each judge, such as `judge/facts`.
"""

import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from stages.config import paths
from stages.config.config import Config
from stages.config.errors import UserError, first_few, first_line
from stages.config.identity import hash_of, settings_hash, settings_of
from stages.config.stages import CARD, STAGES, stage_row
from stages.runs.attempts import attempt_differences, check_resumable
from stages.runs.code import changed_files, code_record, code_version, resumed_code_record
from stages.runs.files import hash_files, read_record, sync, write_json, write_lines
from stages.runs.inputs import check_unchanged, current_inputs, outside_inputs, stage_identity
from stages.runs.locks import held
from stages.runs.machine import (
    device_name,
    environment,
    library_versions,
    peak_gpu_gib,
    peak_memory_gib,
    processor,
)
from stages.runs.manifest import ATTEMPT, RESUME, lock_of, partial_of, read_manifest, stage_folder
from stages.runs.progress import progress, say_result
from stages.runs.staleness import check_stage
from stages.runs.trackers import TRACKED, Send, tracked

T = TypeVar("T")
HELD_OUT_PAIRS = "held_out_pairs.jsonl"
HELD_OUT_CNNDM = "held_out_cnndm.jsonl"
# Outputs that say how a stage ran and how good its result is. No stage uses them as an input.
RECORDS = ("config.json", "metrics.jsonl", "samples.jsonl", HELD_OUT_PAIRS, HELD_OUT_CNNDM)
PROGRESS = "progress.json"
FAILED = "failed.json"
WHILE_WORKING = (RESUME, ATTEMPT, TRACKED, PROGRESS, f"{PROGRESS}.partial")
"""Files and folders that exist only while a stage is running. They are not outputs."""


class Run:
    """A stage of a run while it is running. `open_stage` creates it.

    Only the main process writes. Every process may read and `require`.
    """

    def __init__(self, config: Config, stage: str, is_main: bool = True) -> None:
        self.config = config
        self.stage = stage
        self.is_main = is_main
        """Whether this is the process that writes: the only one, or the first of several."""
        self.folder = stage_folder(config, stage)
        self.partial = partial_of(self.folder)
        self.resume = self.partial / RESUME
        """What an interrupted stage resumes from; removed when the stage has finished."""
        self.started = time.monotonic()
        self.inputs: dict[str, str] = {}
        self.outside_inputs: dict[str, str | None] = {}
        """The inputs that are not stages, as they were when the stage began."""
        self.code: dict[str, Any] = {}
        self.code_version = ""
        """The code's commit when this process began: files may change while it runs."""
        self.latest_metrics: dict[str, float] = {}
        self.send: Send | None = None
        """Sends the metrics of a step, or the results (no step), to wandb and TensorBoard."""

    def require(self, stage: str) -> Path:
        """Return the folder of an earlier stage of this run, after checking it.

        Raises UserError, with the make command to run, if the stage has not finished, if it ran
        with different settings or inputs, or if one of its files has changed.
        """
        check_stage(self.config, stage)
        self.inputs[stage] = str(stage_identity(self.config, stage, reader=self.stage))
        return stage_folder(self.config, stage)

    def progress(self, items: Iterable[T], label: str, total: int, done: int = 0) -> Iterator[T]:
        """Yield the items and show the progress, also in `make status`.

        The stage's main loop, whose label is the stage's name, also shows metrics. With several
        processes, only the main one shows anything.
        """
        if not self.is_main:
            yield from items
            return

        def note(count: int, seconds_left: float) -> None:
            state = {
                "label": label,
                "done": count,
                "total": total,
                "seconds_left": round(seconds_left),
            }
            with suppress(OSError):  # On a full disk the work continues without progress notes.
                write_json(self.partial / PROGRESS, state)

        def metrics() -> Mapping[str, float]:
            return self.latest_metrics if label == self.stage else {}

        yield from progress(items, label, total, done=done, note=note, numbers=metrics)

    def log(self, step: int, **metrics: float) -> None:
        """Append a line to metrics.jsonl (keys are TRL's), and show it."""
        self.latest_metrics |= metrics
        self.append("metrics.jsonl", {"step": step, **metrics})
        if self.send is not None:
            self.send(step, metrics)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Append a JSON line to a file of this stage."""
        if self.is_main:
            with (self.partial / name).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")

    def finish(self, results: dict[str, Any], halvings: Sequence[dict[str, Any]] = ()) -> None:
        """Write the manifest and move the stage to its place. Main process only.

        `halvings`: the memory settings that this attempt halved, as listed by `MemoryBudget`.
        Raises UserError if an input of the stage has changed since it began.
        """
        if not self.is_main:
            return
        check_unchanged(self.config, self.stage, self.outside_inputs)

        hashes = hash_files(self.partial, leave_out=WHILE_WORKING)
        # A model card may be edited later.
        outputs = {name: digest for name, digest in hashes.items() if Path(name).name != CARD}
        content = {name: digest for name, digest in outputs.items() if name not in RECORDS}

        # A manifest means that all outputs are on disk, so they are flushed first.
        for name in outputs:
            sync(self.partial / name)

        seconds = round(time.monotonic() - self.started, 1)
        memory_gib = peak_memory_gib()
        manifest = {
            "stage": self.stage,
            "preset": self.config.preset,
            "name": self.config.name,
            "seed": self.config.seed,
            "upstream": self.config.upstream,
            "settings_hash": settings_hash(self.config, self.stage),
            "settings": settings_of(self.config, self.stage),
            "code_version": self.code_version,
            "code": self.code,
            "inputs": self.inputs | self.outside_inputs,
            "outputs": outputs,
            "sizes": {name: (self.partial / name).stat().st_size for name in outputs},
            "content": hash_of(content),
            "results": results,
            "halvings": list(halvings),
            "seconds": seconds,
            "peak_memory_gib": memory_gib,
            "peak_gpu_gib": peak_gpu_gib(),
            "device": device_name(),
            "processor": processor(),
            "environment": environment(),
            "versions": library_versions(),
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        write_json(self.partial / "manifest.json", manifest)
        put_in_place(self.config, self.stage)

        say_result(self.stage, seconds, results)
        if self.send is not None:
            self.send(None, results | {"seconds": seconds, "peak_memory_gib": memory_gib})


def write_rows(run: Run, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write a JSONL file of a stage, replacing any part that an interrupted attempt left."""
    if run.is_main:
        write_lines(run.partial / name, rows)


@contextmanager
def open_stage(config: Config, stage: str, is_main: bool = True) -> Iterator[Run]:
    """Yield a `Run` for a stage, locked against a second process. An interrupted stage resumes.

    An error is recorded in the partial folder. A UserError before there is anything to resume from
    leaves no trace. Raises UserError if the stage is running elsewhere, belongs to the upstream, or
    has a checkpoint with different settings or inputs.
    """
    if config.is_from_upstream(stage):
        raise UserError(f"stage {stage} comes from run {config.upstream}: leave out UPSTREAM=")
    run = Run(config, stage, is_main)
    if not is_main:
        yield run
        return

    run.folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with held(lock_of(run.folder), stage):
            put_in_place(config, stage)
            _resume_or_start(run)
            try:
                with tracked(config, stage) as run.send:
                    yield run
            except Exception as error:
                _record_error(run, error)
                raise
    finally:
        remove_empty_folders(run.folder.parent)


def _resume_or_start(run: Run) -> None:
    """Resume in the partial folder of an interrupted attempt if that is possible, or start over."""
    run.outside_inputs = outside_inputs(run.config, run.stage)
    run.code_version = code_version()
    module = stage_row(run.stage, run.config.kind).module
    if run.resume.is_dir():
        check_resumable(run.config, run.stage)
        differences = attempt_differences(run.config, run.stage)
        if not differences:
            _resume(run, module)
            return
        aside = move_aside(run.partial)
        print(
            f"{run.stage} starts over, its unfinished attempt moved to {aside}: "
            f"{first_few(differences, '; ')}",
            file=sys.stderr,
        )

    shutil.rmtree(run.partial, ignore_errors=True)
    run.partial.mkdir()
    write_json(run.partial / "config.json", run.config.model_dump())
    run.code = code_record(module)
    _write_attempt(run, seconds=0)


def _resume(run: Run, module: str) -> None:
    """Continue an interrupted attempt; print a line if its code has changed since it began."""
    attempt = read_record(run.partial / ATTEMPT)

    # The time of an attempt counts toward the stage's. It ended when a file last changed: a kill
    # leaves no other trace.
    attempt_started = (run.partial / ATTEMPT).stat().st_mtime
    last_change = max(path.stat().st_mtime for path in run.partial.rglob("*"))
    seconds = attempt["seconds"] + last_change - attempt_started
    run.started -= seconds

    # A full disk or a kill leaves half-written files.
    for name in (FAILED, PROGRESS, "*.partial"):
        for path in run.partial.glob(name):
            path.unlink()

    files = changed_files(attempt["code"])
    if files:
        print(
            f"{run.stage} resumes with different code than it began with: {first_few(files)}. "
            f"REPLACE={run.stage} starts it over.",
            file=sys.stderr,
        )
    run.code = resumed_code_record(
        module,
        before=attempt["code"],
        version_before=attempt.get("code_version", "unknown"),
    )
    _write_attempt(run, seconds=seconds)


def _write_attempt(run: Run, seconds: float) -> None:
    """Record what this attempt begins with; `seconds`: the time of earlier attempts."""
    attempt = {
        "settings": settings_of(run.config, run.stage),
        "inputs": current_inputs(run.config, run.stage),
        "code_version": run.code_version,
        "code": run.code,
        "seconds": seconds,
    }
    write_json(run.partial / ATTEMPT, attempt)


def _record_error(run: Run, error: Exception) -> None:
    """Record an error, or remove the partial folder if there is nothing in it to resume from."""
    if isinstance(error, UserError) and not run.resume.is_dir():
        shutil.rmtree(run.partial, ignore_errors=True)
        return
    with suppress(OSError):  # A full disk is one of the errors.
        write_json(run.partial / FAILED, {"error": first_line(error)})


# -- moving folders --------------------------------------------------------------------------------


def put_in_place(config: Config, stage: str) -> None:
    """Rename the partial folder of a stage that has finished; do nothing if it has not.

    A stage that was killed just before the rename is renamed by the next command. An older result
    moves aside unless it is equal.
    """
    folder = stage_folder(config, stage)
    partial = partial_of(folder)
    manifest = read_manifest(partial)
    if manifest is None:
        return

    # Removed before the rename: a kill after it would leave them in the finished folder.
    for name in WHILE_WORKING:
        path = partial / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    if folder.exists():
        before = read_manifest(folder)
        is_equal = before is not None and before["content"] == manifest["content"]
        is_page = STAGES[stage].reads_records
        if (is_equal or is_page) and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            move_aside(folder)
    partial.rename(folder)
    sync(folder.parent)


def move_aside(folder: Path) -> Path:
    """Move a stage's folder to a free name in `aside/` of its seed; return the new path."""
    seed = next(parent for parent in folder.parents if parent.name.startswith("seed"))
    name = "-".join(folder.relative_to(seed).parts)
    aside = seed / "aside"
    aside.mkdir(exist_ok=True)
    number = 1
    while (aside / f"{name}-{number}").exists():
        number += 1
    return folder.rename(aside / f"{name}-{number}")


def remove_empty_folders(folder: Path) -> None:
    """Remove a folder below `runs/`, and those above it, as long as they are empty."""
    with suppress(OSError):
        while folder != paths.RUNS.parent:
            folder.rmdir()
            folder = folder.parent
