"""Checkpoints on disk: a folder is whole and unchanged, or it is not used.

    checkpoint-<update>/   model.safetensors  optimizer.bin  state.json  ...  checkpoint.json (last)

A checkpoint is written into `checkpoint-<update>.tmp`, flushed to the disk and renamed. So a kill
or a power cut at any moment leaves the one before. `checkpoint.json` holds the hash of every other
file.
"""

import json
import shutil
import sys
from pathlib import Path

from stages.running.files import hash_files, sync, write_json

HASHES = "checkpoint.json"
KEPT = 2
RECORDS = ("metrics.jsonl", "samples.jsonl")


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, good or not."""
    whole = [path for path in folder.glob("checkpoint-*") if path.suffix != ".tmp"]
    return sorted(whole, reverse=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what interrupted saves have left."""
    for path in folder.glob("checkpoint-*.tmp"):
        shutil.rmtree(path)


def seal(partial: Path) -> Path:
    """Turn `<name>.tmp` into a checkpoint: hash, flush, rename; then remove the oldest ones."""
    write_json(partial / HASHES, hash_files(partial))
    for path in [*partial.rglob("*"), partial]:
        sync(path)
    whole = partial.with_suffix("")
    if whole.exists():  # a damaged one of the same update
        shutil.rmtree(whole)
    partial.rename(whole)
    sync(whole.parent)
    for path in checkpoints(whole.parent)[KEPT:]:
        shutil.rmtree(path)
    return whole


def what_is_damaged(checkpoint: Path, run_folder: Path) -> str | None:
    """What a checkpoint lacks, or how it has changed; None for a good one.

    The records of the run must be at least as long as they were when it was saved. Raises OSError
    where the disk does not let it be read: that may pass, and what is damaged is removed.
    """
    try:
        recorded = json.loads((checkpoint / HASHES).read_text(encoding="utf-8"))
        files = hash_files(checkpoint)
        for name, digest in recorded.items():
            if files.get(name) != digest:
                return f"{name} has changed" if name in files else f"{name} is missing"
        lengths = json.loads((checkpoint / "state.json").read_text("utf-8"))["lengths"]
    except (FileNotFoundError, ValueError) as error:
        return f"{HASHES} cannot be read ({error})".replace("\n", " ")
    short = [name for name, size in lengths.items() if length_of(run_folder / name) < size]
    return f"{short[0]} of the run has lost lines" if short else None


def newest_good(folder: Path, run_folder: Path) -> Path | None:
    """The newest checkpoint that is whole; each damaged one is named on stderr and removed."""
    remove_leftovers(folder)
    damaged = 0
    for path in checkpoints(folder):
        fault = what_is_damaged(path, run_folder)
        if fault is None:
            return path
        damaged += 1
        print(f"checkpoint {path} is damaged: {fault}; the one before is used", file=sys.stderr)
        shutil.rmtree(path)
    if damaged:
        print(f"no good checkpoint is left in {folder}: starting over", file=sys.stderr)
    return None


def length_of(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def record_lengths(run_folder: Path) -> dict[str, int]:
    """Bytes of the run's records, which are flushed to the disk first."""
    for name in RECORDS:
        if (run_folder / name).exists():
            sync(run_folder / name)
    return {name: length_of(run_folder / name) for name in RECORDS}
