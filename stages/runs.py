"""A run's folder: settings, metrics, samples, manifest, lock.

    runs/<name>/seed<k>/<stage>/   config.json (first)  metrics.jsonl  ...  manifest.json (last)

A stage works in `<stage>.partial` and is renamed when it has finished, so that a folder `<stage>`
with its manifest exists exactly when the stage is done and an interrupted one replaces nothing.
A stage opens what it needs by `require`, which checks hashes; it never guesses a newest file.
"""

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from stages import config as settings
from stages.config import UPSTREAM_STAGES, Config, UserError, settings_hash

T = TypeVar("T")
GOALS = {"base": "sft", "normalize": "rm", "calibration": "judge-calibration"} | dict.fromkeys(
    ("summaries", "judge", "controls", "win_rate"), "eval"
)
LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy", "peft")
SECONDS_BETWEEN_LINES = 15.0
LOG_WIDTH = 80


class Run:
    """One stage of one run while it is under way; made by `open_stage`.

    Only the main process writes (`main`); every process may read and `require`.
    """

    def __init__(self, config: Config, stage: str, main: bool = True) -> None:
        self.config, self.stage, self.main = config, stage, main
        self.folder = stage_folder(config, stage)
        self.partial = self.folder.with_name(f"{stage}.partial")
        self.started = time.time()
        self.inputs: dict[str, str] = {}
        self.wandb: Any = None

    def require(self, stage: str) -> Path:
        """The folder of an earlier stage of this run, after checking it.

        Raises UserError, with the make command to run, where the stage has not finished, was made
        with other settings or from other inputs, or where one of its files has changed.
        """
        folder = stage_folder(self.config, stage)
        manifest = read_manifest(folder)
        if manifest is None:
            raise UserError(f"stage {stage} is missing: run `{make_command(self.config, stage)}`")
        if manifest["settings_hash"] != settings_hash(self.config, stage):
            self._refuse(stage, "was made with other settings")
        for name, recorded in manifest["inputs"].items():
            path = stage_folder(self.config, name) / "manifest.json"
            if not path.exists() or recorded != file_hash(path):
                self._refuse(stage, f"was made from an earlier {name}")
        for name, recorded in manifest["outputs"].items():
            if not (folder / name).exists() or file_hash(folder / name) != recorded:
                self._refuse(stage, f"has changed on disk ({name})")
        self.inputs[stage] = file_hash(folder / "manifest.json")
        return folder

    def _refuse(self, stage: str, why: str) -> None:
        command = make_command(self.config, stage)
        folder = stage_folder(self.config, stage)
        raise UserError(f"stage {stage} {why}: remove {folder} and run `{command}`")

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
        manifest = {
            "stage": self.stage,
            "preset": self.config.preset,
            "name": self.config.name,
            "seed": self.config.seed,
            "upstream": self.config.upstream,
            "settings_hash": settings_hash(self.config, self.stage),
            "code_version": code_version(),
            "inputs": self.inputs,
            "outputs": hash_files(self.partial),
            "results": results,
            "seconds": round(time.time() - self.started, 1),
            "peak_memory_gib": peak_memory_gib(),
            "device": device_name(),
            "versions": library_versions(),
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        write_json(self.partial / "manifest.json", manifest)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.partial.rename(self.folder)
        if self.wandb is not None:
            self.wandb.finish()


@contextmanager
def open_stage(config: Config, stage: str, main: bool = True) -> Iterator[Run]:
    """A fresh `Run` for a stage, locked against a second process; a UserError leaves no trace.

    Raises UserError where the stage is under way elsewhere, or is another run's to make.
    """
    if config.upstream and stage in UPSTREAM_STAGES:
        raise UserError(f"stage {stage} belongs to {config.upstream}: leave out --upstream")
    run = Run(config, stage, main)
    if not main:
        yield run
        return
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(run.folder.with_name(f".{stage}.lock"), stage):
        shutil.rmtree(run.partial, ignore_errors=True)
        run.partial.mkdir()
        write_json(run.partial / "config.json", dataclasses.asdict(config))
        try:
            run.wandb = _start_wandb(config, stage)
            yield run
        except UserError:
            shutil.rmtree(run.partial, ignore_errors=True)
            raise


@contextmanager
def _lock(path: Path, stage: str) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"stage {stage} is already under way: {path} is locked") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _start_wandb(config: Config, stage: str) -> Any:
    """A wandb run where the user asked for one by wandb's own variable WANDB_PROJECT."""
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


def stage_folder(config: Config, stage: str) -> Path:
    """Where a stage of this run lies; the first stages lie with `upstream` where that is given."""
    name = config.upstream if config.upstream and stage in UPSTREAM_STAGES else config.name
    return settings.RUNS / name / f"seed{config.seed}" / stage


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished stage, or None."""
    path = folder / "manifest.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file that a stage wrote."""
    with path.open(encoding="utf-8") as lines:  # str.splitlines would also split at U+2028
        return [json.loads(line) for line in lines]


def make_command(config: Config, stage: str) -> str:
    """What to type so that a stage of this run exists."""
    words = ["make", GOALS.get(stage, stage), f"PRESET={config.preset}", f"SEED={config.seed}"]
    elsewhere = config.upstream and stage in UPSTREAM_STAGES
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


def progress(items: Iterable[T], label: str, total: int) -> Iterator[T]:
    """Pass the items on, showing how far and how long: a bar on a terminal, lines in a log."""
    if sys.stderr.isatty():
        yield from tqdm(items, desc=label, total=total, ncols=LOG_WIDTH)
        return
    started = last = time.time()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.time()
        if now - last >= SECONDS_BETWEEN_LINES and done < total:
            left = (now - started) / done * (total - done)
            print(f"{label}: {done}/{total}, {left:.0f} s left", file=sys.stderr, flush=True)
            last = now
    print(f"{label}: {total} done in {time.time() - started:.0f} s", file=sys.stderr, flush=True)


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()


def hash_files(folder: Path) -> dict[str, str]:
    """Hash of every file below a folder, by its relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): file_hash(path) for path in files}


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is either whole or absent."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.rename(path)


def code_version() -> str:
    """The commit that runs, `-dirty` where files differ from it; `unknown` outside git.

    Generated reports, some of which are committed, are what runs write and not what runs them.
    """
    describe = ["git", "describe", "--always", "--abbrev=10"]
    found = subprocess.run(describe, capture_output=True, text=True, check=False)
    if found.returncode:
        return "unknown"
    differ = ["git", "diff", "--quiet", "HEAD", "--", ".", ":(exclude)reports/generated"]
    changed = subprocess.run(differ, capture_output=True, check=False).returncode
    return found.stdout.strip() + ("-dirty" if changed else "")


def library_versions() -> dict[str, str]:
    """Python and the libraries whose version can change a number."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def device_name() -> str:
    """The GPU's name, or `CPU` with its number of cores and torch's of threads."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    threads = f", threads: {torch.get_num_threads()}" if torch is not None else ""
    return f"CPU, {os.cpu_count()} cores{threads}"


def peak_memory_gib() -> float:
    """The most memory this process has held: resident on the host, plus allocated on a GPU."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    torch = sys.modules.get("torch")
    gpu = torch.cuda.max_memory_allocated() / 2**30 if torch and torch.cuda.is_available() else 0
    return round(host + gpu, 2)
