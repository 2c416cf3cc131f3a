"""The built-in world as files, and folders that are either whole or not there. No torch."""

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from stages.posts import kinds, toy
from stages.settings import config as settings
from stages.settings.config import Config
from stages.system.files import file_hash
from stages.system.progress import progress


def world_folder(config: Config) -> Path:
    """The built-in world as files in the real schemas, written once for each set of settings."""
    # Another generator writes another world: its source is part of the name.
    sources = "".join(file_hash(Path(str(one.__file__))) for one in (toy, kinds))
    key = json.dumps(asdict(config.world), sort_keys=True) + sources
    folder = settings.RUNS / "cache" / f"toy-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not folder.exists():
        partial = fresh_folder(folder)
        toy.write_world(partial, config.world, show=progress)
        put_folder(partial, folder)
    return folder


def fresh_folder(folder: Path) -> Path:
    """An empty folder of this process's own, beside the one that it shall become."""
    partial = folder.with_name(f"{folder.name}.partial{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def put_folder(partial: Path, folder: Path) -> None:
    """Give a finished folder its name, unless another run was faster."""
    try:
        partial.rename(folder)
    except OSError:  # another run was faster with the same content
        shutil.rmtree(partial)
