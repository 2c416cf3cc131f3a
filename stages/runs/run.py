"""A run's folder: settings, metrics, samples, checkpoints, manifest, lock.

    runs/<name>/seed<k>/<stage>/   config.json (first)  metrics.jsonl  ...  manifest.json (last)

A stage works in `<stage>.partial`, which is renamed when the stage has finished. So a folder
`<stage>` with a manifest exists exactly when the stage is done. An interrupted stage stays in its
partial folder and resumes from there, given the same settings and inputs. A stage that is replaced
moves to `aside/`. A stage opens its inputs by `require`, which checks hashes; it never guesses a
newest file. Stages that depend on the judge have a folder for each judge, such as `judge/facts`.
"""

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

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
)
from stages.runs.manifest import (
    ATTEMPT,
    RESUME,
    attempt_differences,
    check_resumable,
    check_stage,
    check_unchanged,
    current_inputs,
    identity,
    lock_of,
    outer_inputs,
    partial_of,
    read_manifest,
    shortened,
    stage_folder,
)
from stages.runs.progress import progress, say_result

T = TypeVar("T")
HELD_OUT_PAIRS = "held_out_pairs.jsonl"
HELD_OUT_CNNDM = "held_out_cnndm.jsonl"
# Outputs that say how a stage ran and how good its result is. No stage uses them as an input.
RECORDS = ("config.json", "metrics.jsonl", "samples.jsonl", HELD_OUT_PAIRS, HELD_OUT_CNNDM)
TRACKED = "tracked.json"
"""The id of the stage's run at wandb."""
PROGRESS = "progress.json"
FAILED = "failed.json"
WHILE_WORKING = (RESUME, ATTEMPT, TRACKED, PROGRESS, f"{PROGRESS}.partial")
"""Files and folders that exist only while a stage is under way. They are no outputs."""
LOCK_SECONDS = 1.0
"""How long a stage waits for a lock: `make status` may hold it for a moment."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)

# Shows the metrics of a step, or the results (no step), outside the stage's folder.
Show = Callable[[int | None, Mapping[str, Any]], None]
Track = Callable[[Config, str], AbstractContextManager[Show]]
# Opens a `Show` for a stage that starts; set by the code that runs stages.
tracking: ContextVar[Track] = ContextVar(
    "tracking", default=lambda *_: nullcontext(lambda *_: None)
)


class Run:
    """A stage of a run while it is under way; `open_stage` makes one.

    Only the main process writes. Every process may read and `require`.
    """

    def __init__(self, config: Config, stage: str, main: bool = True) -> None:
        self.config = config
        self.stage = stage
        self.main = main
        self.folder = stage_folder(config, stage)
        self.partial = partial_of(self.folder)
        self.resume = self.partial / RESUME
        """What an interrupted stage resumes from; removed when the stage has finished."""
        self.started = time.monotonic()
        self.inputs: dict[str, str] = {}
        self.outer: dict[str, str | None] = {}
        """The inputs that are no stages, as they were when the stage began."""
        self.code: dict[str, Any] = {}
        self.version = ""
        """The code's commit when this process began: files may change while it runs."""
        self.show: Show = lambda *_: None
        self.latest: dict[str, float] = {}
        """The last value of each metric."""

    def require(self, stage: str) -> Path:
        """The folder of an earlier stage of this run, after checking it.

        Raises UserError, with the make command to run, if the stage has not finished, if it ran
        with other settings or inputs, or if one of its files has changed.
        """
        check_stage(self.config, stage)
        self.inputs[stage] = str(identity(self.config, stage, self.stage))
        return stage_folder(self.config, stage)

    def progress(self, items: Iterable[T], label: str, total: int, done: int = 0) -> Iterator[T]:
        """Pass the items on and show the progress, to `make status` too.

        The stage's main loop, whose label is the stage's name, shows metrics next to it. Of several
        processes only the main one shows anything.
        """
        if not self.main:
            yield from items
            return

        def note(count: int, seconds_left: float) -> None:
            state = {
                "label": label,
                "done": count,
                "total": total,
                "seconds_left": round(seconds_left),
            }
            with suppress(OSError):  # On a full disk the work continues without a note.
                write_json(self.partial / PROGRESS, state)

        shows_metrics = label == self.stage
        yield from progress(
            items,
            label,
            total,
            done=done,
            note=note,
            numbers=(lambda: self.latest) if shows_metrics else dict,
        )

    def log(self, step: int, **metrics: float) -> None:
        """Append a line to metrics.jsonl (keys are TRL's), and show it."""
        self.latest |= metrics
        self.append("metrics.jsonl", {"step": step, **metrics})
        self.show(step, metrics)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Append a JSON line to a file of this stage."""
        if self.main:
            with (self.partial / name).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")

    def finish(self, results: dict[str, Any], halvings: Sequence[dict[str, Any]] = ()) -> None:
        """Write the manifest and move the stage to its place. Main process only.

        `halvings`: the memory settings that this attempt halved, as a `MemoryBudget` lists them.
        Raises UserError if an input of the stage has changed since it began.
        """
        if not self.main:
            return
        check_unchanged(self.config, self.stage, self.outer)
        hashes = hash_files(self.partial, leave_out=WHILE_WORKING)
        # A model card may be edited later.
        outputs = {name: digest for name, digest in hashes.items() if Path(name).name != CARD}
        content = {name: digest for name, digest in outputs.items() if name not in RECORDS}

        # The manifest says that all outputs are on the disk, so they are written there first.
        for name in outputs:
            sync(self.partial / name)

        seconds = round(time.monotonic() - self.started, 1)
        manifest = {
            "stage": self.stage,
            "preset": self.config.preset,
            "name": self.config.name,
            "seed": self.config.seed,
            "upstream": self.config.upstream,
            "settings_hash": settings_hash(self.config, self.stage),
            "settings": settings_of(self.config, self.stage),
            "code_version": self.version,
            "code": self.code,
            "inputs": self.inputs | self.outer,
            "outputs": outputs,
            "sizes": {name: (self.partial / name).stat().st_size for name in outputs},
            "content": hash_of(content),
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
        write_json(self.partial / "manifest.json", manifest)
        put_in_place(self.config, self.stage)

        say_result(self.stage, seconds, results)
        cost = {name: manifest[name] for name in ("seconds", "peak_memory_gib")}
        self.show(None, results | cost)


def write_rows(run: Run, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write a JSONL file of a stage, over the part that an interrupted attempt left."""
    if run.main:
        write_lines(run.partial / name, rows)


@contextmanager
def open_stage(config: Config, stage: str, main: bool = True) -> Iterator[Run]:
    """A `Run` for a stage, locked against a second process. An interrupted stage resumes.

    An error is recorded in the partial folder. A UserError before there is anything to resume from
    leaves no trace. Raises UserError if the stage is under way elsewhere, belongs to the upstream,
    or has a checkpoint of other settings or inputs.
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
    """Keep the partial folder of an interrupted attempt that can be resumed, or make a new one."""
    run.outer = outer_inputs(run.config, run.stage)
    run.version = code_version()
    module = row_of(run.stage, run.config.kind).module
    if run.resume.is_dir():
        check_resumable(run.config, run.stage)
        differences = attempt_differences(run.config, run.stage)
        if not differences:
            _resume(run, module)
            return
        aside = move_aside(run.partial)
        print(
            f"{run.stage} starts over, its unfinished attempt moved to {aside}: "
            f"{shortened(differences)}",
            file=sys.stderr,
        )

    shutil.rmtree(run.partial, ignore_errors=True)
    run.partial.mkdir()
    write_json(run.partial / "config.json", run.config.model_dump())
    run.code = code_record(module)
    _write_attempt(run, seconds=0)


def _resume(run: Run, module: str) -> None:
    """Continue an interrupted attempt; say so if the code differs from that which began it.

    The time of earlier attempts, each to its last sign of life, counts as the stage's.
    """
    attempt = read_record(run.partial / ATTEMPT)
    modified = [path.stat().st_mtime for path in run.partial.rglob("*")]
    last_sign = max(modified)
    seconds = attempt["seconds"] + last_sign - (run.partial / ATTEMPT).stat().st_mtime
    run.started -= seconds

    # A full disk or a kill leaves half-written files.
    for name in (FAILED, PROGRESS, "*.partial"):
        for path in run.partial.glob(name):
            path.unlink()

    files = changed_files(attempt["code"])
    if files:
        print(
            f"{run.stage} resumes with other code than it began with: {first_of(files)}. "
            f"REPLACE={run.stage} starts it over.",
            file=sys.stderr,
        )
    run.code = code_record(
        module,
        resumed=attempt["code"],
        resumed_version=attempt.get("code_version", "unknown"),
    )
    _write_attempt(run, seconds=seconds)


def _write_attempt(run: Run, seconds: float) -> None:
    attempt = {
        "settings": settings_of(run.config, run.stage),
        "inputs": current_inputs(run.config, run.stage),
        "code_version": run.version,
        "code": run.code,
        "seconds": seconds,
    }
    write_json(run.partial / ATTEMPT, attempt)


def _keep_or_remove(run: Run, error: Exception) -> None:
    """Record an error, or remove the partial folder if it holds nothing to resume from."""
    if isinstance(error, UserError) and not run.resume.is_dir():
        shutil.rmtree(run.partial, ignore_errors=True)
        return
    with suppress(OSError):  # A full disk is one of the errors.
        write_json(run.partial / FAILED, {"error": first_line(error)})


def put_in_place(config: Config, stage: str) -> None:
    """Give a finished partial folder its name; an older one moves aside unless it is equal."""
    folder = stage_folder(config, stage)
    partial = partial_of(folder)
    manifest = read_manifest(partial)
    if manifest is None:
        return

    # Removed before the rename: a kill after it would leave them in the finished folder.
    shutil.rmtree(partial / RESUME, ignore_errors=True)
    for name in WHILE_WORKING:
        if name != RESUME:
            (partial / name).unlink(missing_ok=True)

    if folder.exists():
        before = read_manifest(folder)
        is_equal = before is None or before["content"] == manifest["content"]
        is_page = STAGES[stage].reads_records
        if (is_equal or is_page) and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            move_aside(folder)
    partial.rename(folder)
    sync(folder.parent)


def move_aside(folder: Path) -> Path:
    """Move a stage's folder to a free name in `aside/` of its seed, which is returned."""
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


# -- locks -----------------------------------------------------------------------------------------


@contextmanager
def held(path: Path, stage: str) -> Iterator[None]:
    """Hold a stage's lock, which the kernel releases if this process dies.

    Raises UserError if another process holds it, or if the disk cannot lock files.
    """
    lock = FileLock(path, timeout=LOCK_SECONDS, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"stage {stage} is already under way in another process ({path.parent}): "
            "wait for it or stop it"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise UserError(
            f"{path}: {os.strerror(error.errno)}: put runs/ on a disk that can lock files"
        ) from None
    try:
        yield
    finally:
        # Before the release: a process that waits sees that its file is gone, and opens a new one.
        path.unlink(missing_ok=True)
        lock.release()


def is_under_way(folder: Path) -> bool:
    """Whether a process holds the lock of a stage's folder."""
    path = lock_of(folder)
    if not path.exists():
        return False
    lock = FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        return True
    except OSError:  # Another user's run, or a disk that cannot lock files.
        return False
    lock.release()
    return False
