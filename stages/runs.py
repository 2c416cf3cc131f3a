"""A run's folder: settings, metrics, samples, checkpoints, manifest, lock. Standard library only.

    runs/<name>/seed<k>/<stage>/   config.json (first)  metrics.jsonl  ...  manifest.json (last)

A stage works in `<stage>.partial` and is renamed when it has finished, so that a folder `<stage>`
with its manifest exists exactly when the stage is done. A half-done stage stays in its partial
folder; with the same settings and inputs it goes on from there. A replaced stage moves to `aside/`.
A stage opens its inputs by `require`, which checks hashes; it never guesses a newest file. Stages
that depend on the judge have one folder per judge: `judge/facts`, `report/facts`.
"""

import dataclasses
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from stages.settings import config as settings
from stages.settings.config import Config, UserError, hash_of, settings_hash, settings_of
from stages.settings.stages import STAGES
from stages.system.files import file_hash, hash_files, read_json, write_json
from stages.system.locks import held
from stages.system.machine import code_version, device_name, library_versions, peak_memory_gib
from stages.system.progress import progress

T = TypeVar("T")
RECORDS = ("config.json", "metrics.jsonl", "samples.jsonl")  # how it was made; no stage's input
RESUME = "resume"
WHILE_WORKING = (RESUME, "attempt.json", "progress.json")  # not part of a stage's outputs
MOST_SHOWN = 4  # differences that one line names
DATA_FILES = ("*.jsonl", "*.parquet")


class Run:
    """One stage of one run while it is under way; made by `open_stage`.

    Only the main process writes (`main`); every process may read and `require`.
    """

    def __init__(self, config: Config, stage: str, main: bool = True) -> None:
        self.config, self.stage, self.main = config, stage, main
        self.folder = stage_folder(config, stage)
        self.partial = partial_of(self.folder)
        self.resume = self.partial / RESUME
        """What an interrupted stage goes on from; removed when the stage has finished."""
        self.started = time.monotonic()
        self.inputs: dict[str, str] = {}
        self.wandb: Any = None

    def require(self, stage: str) -> Path:
        """The folder of an earlier stage of this run, after checking it.

        Raises UserError, with the make command to run, if the stage has not finished, was made
        with other settings or from other inputs, or if one of its files has changed.
        """
        folder = stage_folder(self.config, stage)
        problem = why_not(self.config, stage) or changed_file(folder)
        if problem:
            raise UserError(f"stage {stage} {problem}: {mend(self.config, stage, problem)}")
        self.inputs[stage] = str(identity(self.config, stage, self.stage))
        return folder

    def progress(self, items: Iterable[T], label: str, total: int, done: int = 0) -> Iterator[T]:
        """Pass the items on and show the progress, to `make status` too."""

        def note(count: int, left: float) -> None:
            found = {"label": label, "done": count, "total": total, "seconds_left": round(left)}
            write_json(self.partial / "progress.json", found)

        return progress(items, label, total, done, note if self.main else None)

    def log(self, step: int, **metrics: float) -> None:
        """Append one line to metrics.jsonl (keys are TRL's), and mirror it to wandb if asked."""
        if self.main:
            self.append("metrics.jsonl", {"step": step, **metrics})
            if self.wandb is not None:
                self.wandb.log({f"{self.stage}/{key}": value for key, value in metrics.items()})

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Append one JSON line to a file of this stage."""
        if self.main:
            with (self.partial / name).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")

    def finish(self, results: dict[str, Any]) -> None:
        """Write the manifest and put the stage in its place. Main process only."""
        if not self.main:
            return
        outputs = hash_files(self.partial, leave_out=WHILE_WORKING)
        manifest = {
            "stage": self.stage,
            "preset": self.config.preset,
            "name": self.config.name,
            "seed": self.config.seed,
            "upstream": self.config.upstream,
            "settings_hash": settings_hash(self.config, self.stage),
            "settings": settings_of(self.config, self.stage),
            "code_version": code_version(),
            "inputs": self.inputs | data_inputs(self.config, self.stage),
            "outputs": outputs,
            "sizes": {name: (self.partial / name).stat().st_size for name in outputs},
            "content": hash_of({k: v for k, v in outputs.items() if k not in RECORDS}),
            "results": results,
            "seconds": round(time.monotonic() - self.started, 1),
            "peak_memory_gib": peak_memory_gib(),
            "device": device_name(),
            "versions": library_versions(),
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        write_json(self.partial / "manifest.json", manifest)
        put_in_place(self.config, self.stage)
        if self.wandb is not None:
            self.wandb.finish()


@contextmanager
def open_stage(config: Config, stage: str, main: bool = True) -> Iterator[Run]:
    """A `Run` for a stage, locked against a second process; an interrupted stage goes on.

    An error is recorded beside what is half done. A UserError before that leaves no trace.
    Raises UserError if the stage is under way elsewhere, or belongs to the upstream.
    """
    if config.upstream and STAGES[stage].shared:
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
                run.wandb = _start_wandb(config, stage)
                yield run
            except Exception as error:
                _keep_or_remove(run, error)
                raise
    finally:
        remove_empty_folders(run.folder.parent)


def _prepare(run: Run) -> None:
    """Keep the partial folder of an interrupted try with these settings and inputs, or make one."""
    config, stage = run.config, run.stage
    attempt = {
        "settings_hash": settings_hash(config, stage),
        "inputs": current_inputs(config, stage),
    }
    if run.resume.is_dir() and read_json(run.partial / "attempt.json") == attempt:
        for name in ("failed.json", "progress.json"):
            (run.partial / name).unlink(missing_ok=True)
        return
    if run.resume.is_dir():
        move_aside(run.partial)
    shutil.rmtree(run.partial, ignore_errors=True)
    run.partial.mkdir()
    write_json(run.partial / "config.json", dataclasses.asdict(config))
    write_json(run.partial / "attempt.json", attempt)


def _keep_or_remove(run: Run, error: Exception) -> None:
    if isinstance(error, UserError) and not run.resume.is_dir():
        shutil.rmtree(run.partial, ignore_errors=True)
        return
    said = (str(error).splitlines() or [""])[0] or type(error).__name__
    with suppress(OSError):  # a full disk is one of the errors
        write_json(run.partial / "failed.json", {"error": said})


def put_in_place(config: Config, stage: str) -> None:
    """Give a finished partial folder its name; an older one moves aside unless it is equal."""
    folder = stage_folder(config, stage)
    partial = partial_of(folder)
    manifest = read_manifest(partial)
    if manifest is None:
        return
    before = read_manifest(folder)
    equal = before is None or before.get("content") == manifest["content"]
    if folder.exists() and (equal or STAGES[stage].reads_records):
        shutil.rmtree(folder)
    elif folder.exists():
        move_aside(folder)
    partial.rename(folder)
    shutil.rmtree(folder / RESUME, ignore_errors=True)
    for name in WHILE_WORKING[1:]:
        (folder / name).unlink(missing_ok=True)


def move_aside(folder: Path) -> Path:
    """Move a stage's folder to `aside/` of its seed, under a name that is free; returns it."""
    seed = next(one for one in folder.parents if one.name.startswith("seed"))
    name = "-".join(folder.relative_to(seed).parts)
    aside = seed / "aside"
    aside.mkdir(exist_ok=True)
    number = 1 + sum(1 for one in aside.iterdir() if one.name.rpartition("-")[0] == name)
    while (aside / f"{name}-{number}").exists():
        number += 1
    target = aside / f"{name}-{number}"
    folder.rename(target)
    return target


def remove_empty_folders(folder: Path) -> None:
    """Remove a folder below `runs/`, and those above it, as long as they are empty."""
    with suppress(OSError):
        while folder != settings.RUNS.parent:
            folder.rmdir()
            folder = folder.parent


def _start_wandb(config: Config, stage: str) -> Any:
    """A wandb run, if wandb's own variable WANDB_PROJECT asks for one."""
    if not os.environ.get("WANDB_PROJECT"):
        return None
    try:
        import wandb
    except ImportError:
        raise UserError(
            "WANDB_PROJECT is set but wandb is missing: run `pip install wandb`, or unset it"
        ) from None
    group = f"{config.name}-seed{config.seed}"
    return wandb.init(name=f"{group}-{stage}", group=group, config=dataclasses.asdict(config))


# -- where things are ------------------------------------------------------------------------------


def stage_folder(config: Config, stage: str) -> Path:
    """The folder of a stage of this run; shared stages lie with the upstream, if there is one."""
    row = STAGES[stage]
    name = config.upstream if config.upstream and row.shared else config.name
    folder = settings.RUNS / name / f"seed{config.seed}" / stage
    return folder / config.judge.folder if row.per_judge else folder


def partial_of(folder: Path) -> Path:
    """Where a stage works until it has finished."""
    return folder.with_name(f"{folder.name}.partial")


def lock_of(folder: Path) -> Path:
    """The file that a working stage locks."""
    return folder.with_name(f".{folder.name}.lock")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished stage, or None."""
    found: dict[str, Any] | None = read_json(folder / "manifest.json")
    return found


# -- whether a finished stage still holds ----------------------------------------------------------


def why_not(config: Config, stage: str) -> str:
    """Why a stage is not what this config asks for, to be read after its name; empty if it is.

    Content decides: the hash of its settings, the outputs of its inputs as they are now, and the
    presence and sizes of its files (`require` hashes them too).
    """
    folder = stage_folder(config, stage)
    manifest = read_manifest(folder)
    if manifest is None:
        return "is missing"
    if "content" not in manifest:
        return "was made by an earlier version of this code"
    differing = differing_settings(config, stage)
    if differing:
        more = f"; and {len(differing) - MOST_SHOWN} more" if len(differing) > MOST_SHOWN else ""
        return f"was made with other settings ({'; '.join(differing[:MOST_SHOWN])}{more})"
    for name, now in current_inputs(config, stage).items():
        recorded = manifest["inputs"].get(name)
        if recorded is None and now is not None:
            return f"was made without {name}"
        if recorded != now:
            return f"was made from {'other' if name == 'data' else 'an earlier'} {name}"
    for name, size in manifest["sizes"].items():
        path = folder / name
        if not path.exists() or path.stat().st_size != size:
            return f"has changed on disk ({name})"
    return ""


def differing_settings(config: Config, stage: str) -> list[str]:
    """Settings of a finished stage that are not as asked, `ppo.kl_coef: made with 0.1, asked 0.2`.

    Empty if the stage belongs to the upstream: there its record decides.
    """
    manifest = read_manifest(stage_folder(config, stage))
    if manifest is None or (config.upstream and STAGES[stage].shared):
        return []
    if manifest["settings_hash"] == settings_hash(config, stage):
        return []
    made, asked = (
        {
            f"{section}.{key}" if isinstance(values, dict) else section: value
            for section, values in found.items()
            for key, value in (values if isinstance(values, dict) else {"": values}).items()
        }
        for found in (manifest["settings"], settings_of(config, stage))
    )
    return [
        f"{key}: made with {made.get(key, 'nothing')}, asked {asked.get(key, 'nothing')}"
        for key in made | asked
        if made.get(key) != asked.get(key)
    ]


def current_inputs(config: Config, stage: str) -> dict[str, str | None]:
    """What a stage would be made from now: each input's identity, None if it is missing."""
    row = STAGES[stage]
    inputs = {name: identity(config, name, stage) for name in row.inputs}
    joined = {name: identity(config, name, stage) for name in row.joined_by}
    there = {name: found for name, found in joined.items() if found is not None}
    return inputs | there | data_inputs(config, stage)


def inputs_now(config: Config, stage: str) -> dict[str, str]:
    """`current_inputs` of a stage of which nothing is missing, as was checked before."""
    return {name: str(found) for name, found in current_inputs(config, stage).items()}


def identity(config: Config, stage: str, reader: str) -> str | None:
    """A hash of what the stage `reader` reads of a finished stage; None if it is missing."""
    folder = stage_folder(config, stage)
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    if STAGES[reader].reads_records:
        return file_hash(folder / "manifest.json")
    return str(manifest.get("content"))


def data_inputs(config: Config, stage: str) -> dict[str, str]:
    """A hash, as `data`, of the files that a stage reads from the user's own folder."""
    source = config.data.source
    if not STAGES[stage].reads_data or source in (settings.TOY, settings.HUB):
        return {}
    paths = sorted(path for kind in DATA_FILES for path in Path(source).glob(kind))
    return {"data": hash_of({path.name: file_hash(path) for path in paths})}


def changed_file(folder: Path) -> str:
    """`has changed on disk (file)` for the first output whose hash has changed; else empty."""
    manifest = read_manifest(folder) or {"outputs": {}}
    for name, recorded in manifest["outputs"].items():
        if not (folder / name).exists() or file_hash(folder / name) != recorded:
            return f"has changed on disk ({name})"
    return ""


def mend(config: Config, stage: str, problem: str) -> str:
    """What to do about a stage that is not as asked, in one line."""
    command = make_command(config, stage)
    if STAGES[stage].reads_records:  # a page is made again without being asked
        return f"run `{command}`"
    if "settings" in problem or "on disk" in problem or "version" in problem:
        return f"take another NAME, or run `{command} REPLACE=1`, which moves the old one aside"
    return f"run `{command}`"


def make_command(config: Config, stage: str) -> str:
    """The `make` command that makes a stage of this run."""
    words = ["make", STAGES[stage].goal, f"PRESET={config.preset}", f"SEED={config.seed}"]
    elsewhere = config.upstream and STAGES[stage].shared
    name = config.upstream if elsewhere else config.name
    if name != config.preset:
        words.append(f"NAME={name}")
    if config.upstream and not elsewhere:
        words.append(f"UPSTREAM={config.upstream}")
    if config.overrides and not elsewhere:
        words.append(f"SET={' '.join(config.overrides)}")
    if config.data.source not in (settings.TOY, settings.HUB):
        words.append(f"DATA={config.data.source}")
    if config.base.tokenizer not in ("", settings.TRAIN_TOKENIZER):
        words.append(f"TOKENIZER={config.base.tokenizer}")
    return " ".join(shlex.quote(word) for word in words)
