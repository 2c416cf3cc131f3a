"""A run's folder: settings, metrics, samples, checkpoints, manifest, lock. Standard library only.

    runs/<name>/seed<k>/<stage>/   config.json (first)  metrics.jsonl  ...  manifest.json (last)

A stage works in `<stage>.partial` and is renamed when it has finished, so that a folder `<stage>`
with its manifest exists exactly when the stage is done. A half-done stage stays in its partial
folder; with the same settings and inputs it goes on from there. A replaced stage moves to `aside/`.
A stage opens its inputs by `require`, which checks hashes; it never guesses a newest file. Stages
that depend on the judge have one folder per judge: `judge/facts`, `report/facts`.
"""

import fcntl
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from stages.config import config as settings
from stages.config.checks import UserError, first_line
from stages.config.config import Config, hash_of, settings_hash, settings_of
from stages.config.stages import CARD, STAGES, row_of
from stages.runs.files import hash_files, read_record, sync, write_json, write_lines
from stages.runs.machine import (
    changed_files,
    code_record,
    code_version,
    device_name,
    environment,
    first_of,
    library_versions,
    peak_gpu_gib,
    peak_memory_gib,
    processor,
    start_of,
)
from stages.runs.manifest import (
    ATTEMPT,
    check_stage,
    check_unchanged,
    current_inputs,
    identity,
    lock_of,
    outer_inputs,
    partial_of,
    read_manifest,
    seal_of,
    stage_folder,
)
from stages.runs.progress import progress, say_result

T = TypeVar("T")
HELD_OUT_PAIRS, HELD_OUT_CNNDM = "held_out_pairs.jsonl", "held_out_cnndm.jsonl"
# How it was made, and how good it is; no stage's input.
RECORDS = ("config.json", "metrics.jsonl", "samples.jsonl", HELD_OUT_PAIRS, HELD_OUT_CNNDM)
RESUME = "resume"
TRACKED = "tracked.json"  # the id of the stage's run at wandb
WHILE_WORKING = (RESUME, ATTEMPT, TRACKED, "progress.json", "progress.json.partial")  # no outputs

# What shows metrics of a step, or results (no step), beside a stage's folder.
Show = Callable[[int | None, Mapping[str, Any]], None]
Track = Callable[[Config, str], AbstractContextManager[Show]]
# Opens it for a stage under way; set by what drives stages.
tracking: ContextVar[Track] = ContextVar(
    "tracking", default=lambda *_: nullcontext(lambda *_: None)
)


class Run:
    """One stage of a run while it is under way (`open_stage`). Only the main process writes; every
    process may read and `require`.
    """

    def __init__(self, config: Config, stage: str, main: bool = True) -> None:
        self.config, self.stage, self.main = config, stage, main
        self.folder = stage_folder(config, stage)
        self.partial = partial_of(self.folder)
        self.resume = self.partial / RESUME
        """What an interrupted stage goes on from; removed when the stage has finished."""
        self.started = time.monotonic()
        self.inputs: dict[str, str] = {}
        self.outer: dict[str, str | None] = {}  # beside other stages, as they were at its begin
        self.code: dict[str, Any] = {}
        self.version = ""  # of the code, when this process began: files may change while it runs
        self.show: Show = lambda *_: None
        self.latest: dict[str, float] = {}
        """The last value of each metric."""

    def require(self, stage: str) -> Path:
        """The folder of an earlier stage of this run, after checking it.

        Raises UserError, with the make command to run, if the stage has not finished, was made
        with other settings or from other inputs, or if one of its files has changed.
        """
        check_stage(self.config, stage)
        self.inputs[stage] = str(identity(self.config, stage, self.stage))
        return stage_folder(self.config, stage)

    def progress(self, items: Iterable[T], label: str, total: int, done: int = 0) -> Iterator[T]:
        """Pass the items on and show the progress, to `make status` too.

        The stage's own loop, which has its name, shows metrics beside it.
        """

        def note(count: int, left: float) -> None:
            state = {"label": label, "done": count, "total": total, "seconds_left": round(left)}
            with suppress(OSError):  # on a full disk the work goes on without a note
                write_json(self.partial / "progress.json", state)

        numbers = (lambda: self.latest) if label == self.stage else dict
        return progress(items, label, total, done, note if self.main else None, numbers)

    def log(self, step: int, **metrics: float) -> None:
        """Append one line to metrics.jsonl (keys are TRL's), and show it."""
        self.latest |= metrics
        self.append("metrics.jsonl", {"step": step, **metrics})
        self.show(step, metrics)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Append one JSON line to a file of this stage."""
        if self.main:
            with (self.partial / name).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")

    def finish(self, results: dict[str, Any], halvings: Sequence[dict[str, Any]] = ()) -> None:
        """Write the manifest and put the stage in its place. Main process only.

        `halvings`: the settings of memory that this attempt halved, as a `MemoryBudget` lists them.
        Raises UserError if what the stage was made from has changed since it began.
        """
        if not self.main:
            return
        check_unchanged(self.config, self.stage, self.outer)
        hashes = hash_files(self.partial, leave_out=WHILE_WORKING)
        outputs = {name: digest for name, digest in hashes.items() if Path(name).name != CARD}
        for name in outputs:  # a manifest on the disk says that all of this is
            sync(self.partial / name)
        seconds = round(time.monotonic() - self.started, 1)
        manifest = {
            "stage": self.stage,
            **{key: getattr(self.config, key) for key in ("preset", "name", "seed", "upstream")},
            "settings_hash": settings_hash(self.config, self.stage),
            "settings": settings_of(self.config, self.stage),
            "code_version": self.version,
            "code": self.code,
            "inputs": self.inputs | self.outer,
            "outputs": outputs,
            "sizes": {name: (self.partial / name).stat().st_size for name in outputs},
            "content": hash_of({k: v for k, v in outputs.items() if k not in RECORDS}),
            "results": results,
            "halvings": list(halvings),
            "seconds": seconds,
            "peak_memory_gib": peak_memory_gib(),
            "peak_gpu_gib": peak_gpu_gib(),
            "device": device_name(),
            "processor": processor(),
            "environment": environment(),
            "versions": library_versions(),
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        whole = json.loads(json.dumps(manifest))  # as it is read
        write_json(self.partial / "manifest.json", {**manifest, "seal": seal_of(whole)})
        put_in_place(self.config, self.stage)
        say_result(self.stage, seconds, results)
        cost = {key: manifest[key] for key in ("seconds", "peak_memory_gib")}
        self.show(None, results | cost)


def write_rows(run: Run, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write a whole JSONL file of a stage, over the part that an interrupted attempt left."""
    if run.main:
        write_lines(run.partial / name, rows)


@contextmanager
def open_stage(config: Config, stage: str, main: bool = True) -> Iterator[Run]:
    """A `Run` for a stage, locked against a second process; an interrupted stage goes on.

    An error is recorded beside what is half done. A UserError before that leaves no trace.
    Raises UserError if the stage is under way elsewhere, or belongs to the upstream.
    """
    if config.is_upstreams(stage):
        raise UserError(f"stage {stage} belongs to {config.upstream}: leave out --upstream")
    run = Run(config, stage, main)
    if not main:
        yield run
        return
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with held(lock_of(run.folder), stage):
            put_in_place(config, stage)
            _prepare(run)
            try:
                with tracking.get()(config, stage) as run.show:
                    yield run
            except Exception as error:
                _keep_or_remove(run, error)
                raise
    finally:
        remove_empty_folders(run.folder.parent)


def _prepare(run: Run) -> None:
    """Keep the partial folder of an interrupted try with these settings and inputs, or make one.

    It goes on with the code of now, and says so if that differs from the code that began it. The
    time that earlier attempts took, each to its last sign of life, counts as the stage's.
    """
    run.outer = outer_inputs(run.config, run.stage)
    inputs = current_inputs(run.config, run.stage)
    attempt = {"settings_hash": settings_hash(run.config, run.stage), "inputs": inputs}
    before = read_record(run.partial / ATTEMPT) or {}
    code, seconds = before.pop("code", None), before.pop("seconds", 0.0)
    if run.resume.is_dir() and before == attempt:
        signs = [path.stat().st_mtime for path in run.partial.rglob("*")]
        seconds += max(signs) - (run.partial / ATTEMPT).stat().st_mtime
        for name in ("failed.json", "progress.json", "*.partial"):  # halves: by a full disk, a kill
            for path in run.partial.glob(name):
                path.unlink()
        if files := changed_files(code):
            text = f"goes on with other code than it began with ({first_of(files)})"
            print(f"{run.stage} {text}: REPLACE={run.stage} begins it anew", file=sys.stderr)
    else:
        if run.resume.is_dir():
            move_aside(run.partial)
        shutil.rmtree(run.partial, ignore_errors=True)
        run.partial.mkdir()
        write_json(run.partial / "config.json", run.config.model_dump())
        code, seconds = None, 0.0
    run.started -= seconds
    run.version = code_version()
    run.code = code_record(row_of(run.stage, run.config.kind).module, code)
    write_json(run.partial / ATTEMPT, {**attempt, "code": run.code, "seconds": seconds})


def _keep_or_remove(run: Run, error: Exception) -> None:
    if isinstance(error, UserError) and not run.resume.is_dir():
        shutil.rmtree(run.partial, ignore_errors=True)
        return
    with suppress(OSError):  # a full disk is one of the errors
        write_json(run.partial / "failed.json", {"error": first_line(error)})


def put_in_place(config: Config, stage: str) -> None:
    """Give a finished partial folder its name; an older one moves aside unless it is equal."""
    folder = stage_folder(config, stage)
    partial = partial_of(folder)
    manifest = read_manifest(partial)
    if manifest is None:
        return
    shutil.rmtree(partial / RESUME, ignore_errors=True)  # a kill after the name would leave it
    for name in WHILE_WORKING[1:]:
        (partial / name).unlink(missing_ok=True)
    before = read_manifest(folder)
    equal = before is None or before.get("content") == manifest["content"]
    if folder.exists() and (equal or STAGES[stage].reads_records) and not folder.is_symlink():
        shutil.rmtree(folder)
    elif folder.exists():
        move_aside(folder)
    partial.rename(folder)


def move_aside(folder: Path) -> Path:
    """Move a stage's folder to `aside/` of its seed, under a name that is free; returns it."""
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
        while folder != settings.RUNS.parent:
            folder.rmdir()
            folder = folder.parent


@contextmanager
def held(path: Path, stage: str) -> Iterator[None]:
    """Hold a stage's lock. The lock of a dead process is free, even if its file still names it.

    Raises UserError if a living process holds the lock, and names that process.
    """
    while True:
        handle = path.open("a+")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = holder_of(path)
            who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
            handle.close()
            raise UserError(
                f"stage {stage} is already under way: {who} holds {path}: wait for it or stop it"
            ) from None
        with suppress(FileNotFoundError):
            if os.fstat(handle.fileno()).st_ino == path.stat().st_ino:
                break
        handle.close()  # whoever held it has just removed it
    try:
        handle.truncate(0)
        here = {"pid": os.getpid(), "started": start_of(os.getpid()), "host": platform.node()}
        handle.write(json.dumps(here))
        handle.flush()
        yield
    finally:
        path.unlink(missing_ok=True)
        handle.close()


def holder_of(path: Path) -> dict[str, Any] | None:
    """The living process that a lock names, or None; one on another machine counts as living."""
    try:
        holder = json.loads(path.read_text())
        host, number, started = holder["host"], int(holder["pid"]), holder["started"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if host == platform.node() and start_of(number) != started:
        return None  # it has ended, and another process may have got its number
    return dict(holder)
