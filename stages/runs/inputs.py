"""What a stage reads: earlier stages, the user's files and folders, a gold reward model.

Each input has an identity, a hash of its content. A manifest records the identities, and a stage is
stale when they have changed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.identity import hash_of
from stages.config.paths import NO_FOLDERS
from stages.config.sections import HUB
from stages.config.stages import OUTPUTS, STAGES, is_part, stage_row
from stages.config.values import section_of, value_of
from stages.runs.code import differing_keys
from stages.runs.files import file_hash, known_hash
from stages.runs.gold import gold_inputs
from stages.runs.hub import CONFIG_AND_TOKENIZER, MODEL_FILES, dataset_source, model_source
from stages.runs.manifest import read_manifest, stage_folder
from stages.runs.user_files import module_files, output_files, split_files

DATA = "data"
REWARD_FUNCTION = "reward.function"
# Settings that may name a folder of this machine -> which of its files are read.
FOLDERS = {
    "base.checkpoint": MODEL_FILES,
    "base.tokenizer": CONFIG_AND_TOKENIZER,
    "released.reward_model": MODEL_FILES,
    "data.sft_dataset": ("**/*",),
    "data.comparisons_dataset": ("**/*",),
}
# The stages that call the reward function, in addition to those that train a policy with it.
CALL_REWARD_FUNCTION = ("rm", "normalize", "summaries")


def current_inputs(config: Config, stage: str) -> dict[str, str | None]:
    """Return the identity of each input that a stage would use now; None for a missing one."""
    row = stage_row(stage, config.kind)
    inputs = {name: stage_identity(config, name, stage) for name in row.inputs}
    for name in row.joined_by:
        identity = stage_identity(config, name, stage) if is_part(name, config.kind) else None
        if identity is not None:
            inputs[name] = identity
    return inputs | outside_inputs(config, stage)


def inputs_now(config: Config, stage: str) -> dict[str, str]:
    """Return `current_inputs` of a stage whose inputs all exist."""
    return {name: str(identity) for name, identity in current_inputs(config, stage).items()}


def stage_identity(config: Config, stage: str, reader: str) -> str | None:
    """Return the identity of a finished stage as an input of another one; None if it is missing.

    For a page it is the hash of the manifest, because a page shows what a stage recorded. For any
    other `reader` it is the hash of the stage's outputs.
    """
    folder = stage_folder(config, stage)
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    if STAGES[reader].reads_records:
        return file_hash(folder / "manifest.json")
    return str(manifest["content"])


def outside_inputs(config: Config, stage: str) -> dict[str, str | None]:
    """Return what a stage reads in addition to stages: the user's files, a gold reward model."""
    return user_inputs(config, stage) | gold_inputs(config, stage)


def check_unchanged(config: Config, stage: str, before: Mapping[str, str | None]) -> None:
    """Raise UserError if an outside input has changed since the stage began.

    Otherwise the manifest would list files that the stage has not read. A reward function may
    change, because the stage imported it at its start.
    """
    changed = differing_keys(before, outside_inputs(config, stage))
    changed = [name for name in changed if name != REWARD_FUNCTION]
    if changed:
        names = ", ".join(changed)
        raise UserError(f"stage {stage}: {names} changed while the stage was running: run it again")


# -- the user's files ------------------------------------------------------------------------------


def user_inputs(config: Config, stage: str) -> dict[str, str]:
    """Return a hash of the user's files that a stage reads, by the setting that names them."""
    inputs = _data_inputs(config, stage) | _folder_inputs(config, stage)
    if config.reward.module is not None and calls_reward_function(config, stage):
        files = module_files(config.reward.module)
        inputs[REWARD_FUNCTION] = hash_of({str(path): known_hash(path) for path in files})
    return inputs


def calls_reward_function(config: Config, stage: str) -> bool:
    """Return whether a stage calls the user's reward function, if there is one."""
    return stage in CALL_REWARD_FUNCTION or stage_row(stage, config.kind).policy_gradient


def _data_inputs(config: Config, stage: str) -> dict[str, str]:
    """Return a hash of the files of posts or summaries that a stage reads, under the name `data`.

    Empty if it reads none.
    """
    if config.kind == OUTPUTS and stage == "summaries":
        return {DATA: _hash_by_name(output_files(config.outputs.file))}
    if not STAGES[stage].reads_data or config.data.source in NO_FOLDERS:
        return {}
    return {DATA: _hash_by_name(split_files(config.data.source))}


def _hash_by_name(paths: Sequence[Path]) -> str:
    """Return one hash of the names and contents of files."""
    return hash_of({path.name: known_hash(path) for path in paths})


def _folder_inputs(config: Config, stage: str) -> dict[str, str]:
    """Return a hash of each folder from which a stage loads a model, a tokenizer or a data set."""
    names: list[str] = []
    if stage == "base":
        names += ["base.checkpoint", "base.tokenizer"]
    if stage in ("rm", "released"):
        names.append("released.reward_model")
    if STAGES[stage].reads_data and config.data.source == HUB:
        names += ["data.sft_dataset", "data.comparisons_dataset"]

    hashes = {}
    for name in names:
        text = value_of(config, name)
        if text in NO_FOLDERS:
            continue
        is_data_set = section_of(name) == "data"
        source = dataset_source(name, text) if is_data_set else model_source(name, text)
        if not source.is_folder:
            continue
        folder = Path(source.name)
        paths = {path for pattern in FOLDERS[name] for path in folder.glob(pattern)}
        files = [path for path in paths if path.is_file()]
        hashes[name] = hash_of({str(path.relative_to(folder)): known_hash(path) for path in files})
    return hashes
