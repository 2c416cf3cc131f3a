"""The gold reward model that `judge.model` names: another run's, or a folder."""

import re
from pathlib import Path

from stages.config import paths
from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.identity import hash_of
from stages.config.stages import STAGES
from stages.runs.files import hash_files, known_hash
from stages.runs.manifest import read_manifest, stage_folder

GOLD = "gold reward model"
"""Its name as an input of a stage."""


def gold_folder(config: Config) -> Path:
    """Return the folder of the gold reward model, whether it exists or not.

    It is the `normalize` stage of a run (`name` means the same seed, `name/seed1` that seed). If no
    such run exists, it is the folder of that name.
    """
    run = paths.RUNS / config.judge.gold
    names_seed = re.fullmatch(r".+/seed\d+", config.judge.gold) is not None
    seed = run if names_seed else run / f"seed{config.seed}"
    folder = Path(config.judge.gold)
    if read_manifest(seed / "normalize") is None and folder.is_dir():
        return folder
    return seed / "normalize"


def gold_inputs(config: Config, stage: str) -> dict[str, str | None]:
    """Return a hash of the gold reward model if a stage uses one; None if the model is missing."""
    if "judge" not in STAGES[stage].sections or not config.judge.gold:
        return {}
    folder = gold_folder(config)
    manifest = read_manifest(folder)
    if manifest is not None:
        return {GOLD: str(manifest["content"])}
    if not (folder / "config.json").exists():
        return {GOLD: None}
    return {GOLD: hash_of(hash_files(folder, hash_of_file=known_hash))}


def check_gold(config: Config) -> None:
    """Raise UserError if the gold reward model does not exist, or if it is the run's own.

    A model is recognized by its weights, wherever its folder is.
    """
    if not config.judge.gold:
        return
    folder = gold_folder(config)
    setting = f"judge.model={config.judge.gold}"
    gold = read_manifest(folder)
    if gold is None and not (folder / "config.json").exists():
        raise UserError(
            f"{setting}: there is no reward model in {folder}: name a run whose `make rm` has "
            "finished (name or name/seed1), or a model's folder"
        )

    weights = {known_hash(path) for path in folder.glob("*.safetensors")}
    for stage in ("rm", "normalize"):
        manifest = read_manifest(stage_folder(config, stage))
        if manifest is None:
            continue
        is_equal = gold is not None and gold["content"] == manifest["content"]
        has_equal_weights = not weights.isdisjoint(manifest["outputs"].values())
        if is_equal or has_equal_weights:
            raise UserError(
                f"{setting} is this run's own reward model: name another run's, or leave "
                "judge.model out"
            )
