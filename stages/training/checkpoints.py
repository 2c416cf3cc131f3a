"""Checkpoints on disk: a folder is used only if it is complete and unchanged.

    checkpoint-<update>/   model.safetensors  optimizer.bin  state.json  ...  checkpoint.json (last)

A checkpoint is written into `checkpoint-<update>.tmp`, flushed to disk and renamed. So the previous
one survives a kill or a power cut at any moment. `checkpoint.json` has the hashes of all other
files.
"""

import json
import shutil
import sys
from pathlib import Path

from stages.runs.files import hash_files, sync, write_json

HASHES = "checkpoint.json"
KEPT = 2
RECORDS = ("metrics.jsonl", "samples.jsonl")


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first, whether good or damaged."""
    complete = [path for path in folder.glob("checkpoint-*") if path.suffix != ".tmp"]
    return sorted(complete, reverse=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the remains of interrupted saves."""
    for path in folder.glob("checkpoint-*.tmp"):
        shutil.rmtree(path)


def complete(partial: Path) -> Path:
    """Turn `<name>.tmp` into a checkpoint, and remove all but the newest `KEPT` ones."""
    write_json(partial / HASHES, hash_files(partial))
    for path in [*partial.rglob("*"), partial]:
        sync(path)

    checkpoint = partial.with_suffix("")
    if checkpoint.exists():  # a damaged checkpoint of the same update
        shutil.rmtree(checkpoint)
    partial.rename(checkpoint)
    sync(checkpoint.parent)

    for path in list_checkpoints(checkpoint.parent)[KEPT:]:
        shutil.rmtree(path)
    return checkpoint


def find_damage(checkpoint: Path, run_folder: Path) -> str | None:
    """Return what is missing from a checkpoint or has changed; None if it is good.

    The run's records must be at least as long as when it was saved. Raises OSError if the disk
    cannot be read: that may be temporary, whereas a damaged checkpoint is removed.
    """
    try:
        recorded = json.loads((checkpoint / HASHES).read_text(encoding="utf-8"))
        hashes = hash_files(checkpoint)
        for name, recorded_hash in recorded.items():
            if name not in hashes:
                return f"{name} is missing"
            if hashes[name] != recorded_hash:
                return f"{name} has changed"
        lengths = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))["lengths"]
    except (FileNotFoundError, ValueError) as error:
        return f"{HASHES} cannot be read ({error})".replace("\n", " ")

    for name, length in lengths.items():
        if length_of(run_folder / name) < length:
            return f"{name} of the run is shorter than when it was saved"
    return None


def newest_good(folder: Path, run_folder: Path) -> Path | None:
    """Return the newest good checkpoint; name each damaged one on stderr, and remove it."""
    remove_leftovers(folder)
    has_damaged = False
    for path in list_checkpoints(folder):
        damage = find_damage(path, run_folder)
        if damage is None:
            return path
        has_damaged = True
        print(f"checkpoint {path} is damaged: {damage}; using the previous one", file=sys.stderr)
        shutil.rmtree(path)
    if has_damaged:
        print(f"no good checkpoint is left in {folder}: starting over", file=sys.stderr)
    return None


def length_of(path: Path) -> int:
    """Return the bytes of a file; 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0


def record_lengths(run_folder: Path) -> dict[str, int]:
    """Flush the run's records to disk, and return the bytes of each."""
    lengths = {}
    for name in RECORDS:
        path = run_folder / name
        if path.exists():
            sync(path)
        lengths[name] = length_of(path)
    return lengths
