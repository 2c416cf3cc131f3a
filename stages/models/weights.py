"""Weights in a model's folder, read as data and checked. No code in the folder is run.

Each tensor is taken from the shard to which the index assigns it. transformers reads all shards
instead, and keeps the copy that it reads last.
"""

import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from stages.config.errors import UserError, first_line
from stages.config.out_of_memory import is_out_of_memory
from stages.runs.files import read_record

SAFETENSORS = "model.safetensors"
PYTORCH_BIN = "pytorch_model.bin"
# In the order in which transformers looks for them.
WEIGHT_FILES = (
    SAFETENSORS,
    f"{SAFETENSORS}.index.json",
    PYTORCH_BIN,
    f"{PYTORCH_BIN}.index.json",
)
ADAPTER = "adapter_config.json"
FLOAT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NAMES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class FolderWeights:
    """All weights of a folder."""

    tensors: dict[str, Tensor]
    """By name. Files are mapped, so a tensor is read when it is used."""
    has_copies: bool
    """Whether a shard contains a copy of a tensor that the index assigns to another shard."""


def read_weights(folder: Path) -> FolderWeights:
    """Return all weights of a folder.

    Raises UserError if there are none, if a shard lacks what the index assigns to it, and for
    quantized weights.
    """
    shards = _shards(folder)
    indexed_names = {name for names in shards.values() for name in names}

    tensors: dict[str, Tensor] = {}
    has_copies = False
    for file_name, assigned_names in shards.items():
        in_file = _read_file(folder / file_name)
        missing = sorted(assigned_names - in_file.keys())
        if missing:
            raise UserError(
                f"{folder / file_name} lacks {missing[0]}, which the index assigns to it: "
                "download it again"
            )
        for name, tensor in in_file.items():
            if name in assigned_names or not assigned_names:
                tensors[name] = tensor
            elif name in indexed_names:
                has_copies = True

    for name, tensor in tensors.items():
        # Only weights: old files also contain masks and positions, which are integers.
        if name.endswith("weight") and tensor.dtype not in FLOAT_TYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"model {folder} has quantized weights of type {dtype} ({name}): use the weights "
                "before quantization"
            )
    return FolderWeights(tensors=tensors, has_copies=has_copies)


def _shards(folder: Path) -> dict[str, set[str]]:
    """The files to read, each with the names that the index assigns to it.

    Without an index there is one file, whose set of names is empty: all of it counts.
    """
    present = [name for name in WEIGHT_FILES if (folder / name).exists()]
    if not present:
        raise UserError(f"model {folder} has no weights: add {SAFETENSORS} or {PYTORCH_BIN}")

    first = present[0]
    ignored = present[1:]
    if ignored:
        print(f"note: model {folder}: {first} is read, not {', '.join(ignored)}", file=sys.stderr)
    if not first.endswith(".json"):
        return {first: set()}

    index = read_record(folder / first) or {}
    weight_map: Any = index.get("weight_map")
    is_map = isinstance(weight_map, dict) and len(weight_map) > 0
    if not is_map or not all(isinstance(file_name, str) for file_name in weight_map.values()):
        raise UserError(f"{folder / first} names no shards in weight_map: download it again")

    shards: dict[str, set[str]] = {}
    for name, file_name in weight_map.items():
        shards.setdefault(file_name, set()).add(name)
    return shards


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # Only the zip format of torch.save, the usual one since 1.6, can be mapped.
        can_map = zipfile.is_zipfile(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=can_map)
    except Exception as error:  # a library may raise anything for a file that the user supplied
        if is_out_of_memory(error):
            raise
        raise UserError(f"{path} does not load: {first_line(error)}") from None

    is_weights = isinstance(content, dict) and all(
        isinstance(value, Tensor) for value in content.values()
    )
    if not is_weights:
        raise UserError(f"{path} does not load: it is not a dict of weights: download it again")
    return content


def check_no_adapter(folder: Path) -> None:
    """Raise UserError for a folder that is an adapter, or that has one next to its weights.

    transformers would add an adapter to weights that may contain it already, and would then save
    the adapter without the weights.
    """
    if not (folder / ADAPTER).exists():
        return

    has_weights = any((folder / name).exists() for name in WEIGHT_FILES)
    if has_weights:
        raise UserError(
            f"model {folder} has {ADAPTER} next to its weights, which may contain it already: "
            "give a folder with only the merged model"
        )

    settings = read_record(folder / ADAPTER) or {}
    base_model = settings.get("base_model_name_or_path") or "its base model"
    raise UserError(
        f"model {folder} is only an adapter: merge it into {base_model} (peft's merge_and_unload), "
        "save that with its tokenizer, and give that folder"
    )


def check_weight_names(source: str | Path, missing: set[str], unexpected: set[str]) -> None:
    """Raise UserError if a model's folder lacks weights, or has weights that the model does not."""
    for problem, names in (("lacks", missing), ("has unexpected", unexpected)):
        if names:
            shown = ", ".join(sorted(names)[:NAMES_SHOWN])
            raise UserError(
                f"model {source} {problem} {len(names)} weights ({shown}): is it the wrong folder?"
            )


def check_weight_values(source: str | Path, model: PreTrainedModel) -> None:
    """Raise UserError for NaN, infinity, matrices of zeros, and two output layers.

    A single NaN makes every output NaN, a broken download leaves matrices of zeros, and a separate
    output layer contradicts a configuration that ties it to the embedding.
    """
    for name, tensor in model.state_dict().items():
        problem = _problem_of_values(tensor)
        if problem:
            raise UserError(
                f"model {source} has weights that are {problem} ({name}): train or download it "
                "again"
            )

    output_layer = model.get_output_embeddings()
    is_tied = model.config.get_text_config().tie_word_embeddings
    if not is_tied or output_layer is None:
        return
    if output_layer.weight is not model.get_input_embeddings().weight:
        raise UserError(
            f"model {source} has an output layer that differs from its embedding, but its "
            "config.json says that they are the same: set tie_word_embeddings=false there, or "
            "remove the output layer"
        )


def _problem_of_values(tensor: Tensor) -> str:
    """`not finite`, `all zero`, or an empty string."""
    # A sum is quick and finite if all its terms are. If it is not, it may also have overflowed, and
    # only then is each element looked at.
    total = tensor.sum()
    if not total.isfinite():
        return "" if tensor.isfinite().all() else "not finite"
    if total == 0 and tensor.ndim > 1 and not tensor.any():
        return "all zero"
    return ""
