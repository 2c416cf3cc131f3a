"""Checkpoints on disk: a folder is complete and unchanged, or it is not used.

    checkpoint-<update>/   model.safetensors  optimizer.bin  state.json  ...  checkpoint.json (last)

A checkpoint is written into `checkpoint-<update>.tmp`, flushed to disk and renamed. So a kill or a
power cut at any moment leaves the previous one. `checkpoint.json` has the hash of every other file.

The checkpoints of others are models' folders, whose weights are read as data: no code in them is
run. Each tensor is taken from the shard to which the index gives it. transformers reads all shards,
and keeps the copy that it reads last.
"""

import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from stages.running.files import hash_files, read_record, sync, write_json
from stages.settings.checks import UserError, first_line, is_out_of_memory

HASHES = "checkpoint.json"
KEPT = 2
RECORDS = ("metrics.jsonl", "samples.jsonl")
# In the order in which transformers looks for them.
FILES = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
ADAPTER = "adapter_config.json"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first, whether good or damaged."""
    complete = [path for path in folder.glob("checkpoint-*") if path.suffix != ".tmp"]
    return sorted(complete, reverse=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what interrupted saves have left."""
    for path in folder.glob("checkpoint-*.tmp"):
        shutil.rmtree(path)


def complete(partial: Path) -> Path:
    """Turn `<name>.tmp` into a checkpoint, and remove all but the newest `KEPT` ones."""
    write_json(partial / HASHES, hash_files(partial))
    for path in [*partial.rglob("*"), partial]:
        sync(path)

    checkpoint = partial.with_suffix("")
    if checkpoint.exists():  # a damaged one of the same update
        shutil.rmtree(checkpoint)
    partial.rename(checkpoint)
    sync(checkpoint.parent)

    for path in list_checkpoints(checkpoint.parent)[KEPT:]:
        shutil.rmtree(path)
    return checkpoint


def find_damage(checkpoint: Path, run_folder: Path) -> str | None:
    """Return what is missing from a checkpoint or has changed; None for a good one.

    The run's records must be at least as long as they were when it was saved. Raises OSError if the
    disk cannot be read: that may be temporary, and a damaged checkpoint is removed.
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
            return f"{name} of the run has lost lines"
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


# -- checkpoints of others -------------------------------------------------------------------------


def refuse_adapter(folder: Path) -> None:
    """Raise UserError for a folder that is an adapter, or that has one beside its weights.

    transformers adds the second kind to weights that may hold it already, and saves it alone.
    """
    if not (folder / ADAPTER).exists():
        return
    base = (read_record(folder / ADAPTER) or {}).get("base_model_name_or_path") or "its base model"
    if any((folder / name).exists() for name in FILES):
        fault = f"has {ADAPTER} beside its weights, which may hold it already"
        raise UserError(f"model {folder} {fault}: give a folder of the merged model alone")
    merged = f"merge it into {base} (peft's merge_and_unload), save that with its tokenizer"
    raise UserError(f"model {folder} is an adapter alone: {merged}, and give that folder")


def refuse_weights(source: str | Path, missing: set[str], unexpected: set[str]) -> None:
    """Raise UserError where a model's folder lacks weights, or has others."""
    for kind, names in (("lacks", missing), ("has unexpected", unexpected)):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise UserError(f"model {source} {kind} {len(names)} weights ({some}): wrong folder?")


def refuse_odd(source: str | Path, model: PreTrainedModel) -> None:
    """Raise UserError for weights that are not finite, one of which makes every token alike; for
    matrices of zeros, as a broken download leaves; for two output layers where config names one.
    """
    # A sum is finite where all its terms are; an overflow is told apart by looking at each.
    state = model.state_dict()
    for name, x in state.items():
        total, what = x.sum(), ""
        if not total.isfinite() and not x.isfinite().all():
            what = "not finite"
        elif not total and x.ndim > 1 and not x.any():
            what = "all zero"
        if what:
            again = "make or fetch it anew"
            raise UserError(f"model {source} has weights that are {what} ({name}): {again}")
    output, tied = model.get_output_embeddings(), model.config.get_text_config().tie_word_embeddings
    if tied and output is not None and output.weight is not model.get_input_embeddings().weight:
        raise UserError(
            f"model {source} has an output layer other than its embedding, and its config.json says"
            " that they are one: set tie_word_embeddings=false there, or take the layer out"
        )


def read_weights(folder: Path) -> tuple[dict[str, Tensor], bool]:
    """All weights, and whether a shard holds a copy of a tensor that the index gives to another.

    Files are mapped, so a tensor is read when it is used. Raises UserError if there are none, if a
    shard lacks what the index gives to it, and for quantised weights.
    """
    shards = _shards(folder)
    indexed = {tensor for tensors in shards.values() for tensor in tensors}
    weights: dict[str, Tensor] = {}
    copies = False
    for name, own in shards.items():
        here = _read(folder / name)
        if lost := sorted(own - here.keys()):
            raise UserError(
                f"{folder / name} lacks {lost[0]}, which the index gives to it: fetch it anew"
            )
        weights |= {tensor: x for tensor, x in here.items() if tensor in own or not own}
        copies |= bool(here.keys() & (indexed - own))
    for tensor, x in weights.items():  # of other integers, old files hold masks and positions
        if tensor.endswith("weight") and x.dtype not in FLOATS:
            kind = str(x.dtype).removeprefix("torch.")
            raise UserError(
                f"model {folder} has weights of type {kind} ({tensor}), which mean nothing without "
                "their scales: give the weights that they were made from"
            )
    return weights, copies


def _shards(folder: Path) -> dict[str, set[str]]:
    """The files that are read, and what the index gives to each: nothing where there is none."""
    names = [name for name in FILES if (folder / name).exists()]
    if not names:
        raise UserError(f"model {folder} holds no weights: neither {FILES[0]} nor {FILES[2]}")
    first, *others = names
    if others:
        print(f"note: model {folder}: {first} is read, not {', '.join(others)}", file=sys.stderr)
    if not first.endswith(".json"):
        return {first: set()}
    places = (read_record(folder / first) or {}).get("weight_map")
    if not places or not isinstance(places, dict) or {*map(type, places.values())} != {str}:
        raise UserError(f"{folder / first} names no shards in weight_map: fetch it anew")
    shards: dict[str, set[str]] = {}
    for tensor, name in places.items():
        shards.setdefault(name, set()).add(tensor)
    return shards


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        old: Any = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f"{path} does not load: {first_line(error)}") from None
    if not isinstance(old, dict) or not all(isinstance(x, Tensor) for x in old.values()):
        raise UserError(f"{path} does not load: it holds other things than weights by name")
    return old
