"""What a stage reads besides other stages: the user's files, models and data sets.

Content decides here too: a manifest records a hash for each setting that names files of the user.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stages.config import config as settings
from stages.config.checks import UserError
from stages.config.config import Config, hash_of
from stages.config.sections import COMPARISONS, POSTS, PPO_TRAIN
from stages.config.stages import OUTPUTS, STAGES, row_of
from stages.runs.files import known_hash
from stages.runs.machine import PACKAGES, imported_names

DATA = "data"
REWARD_FUNCTION = "reward.function"
MAIN = "main"
WEIGHTS = ("*.safetensors",)
# Loaded only if there are no others.
OLD_WEIGHTS = ("*.bin",)
BESIDE_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja")
MODEL_FILES = (*BESIDE_WEIGHTS, *WEIGHTS, *OLD_WEIGHTS)
# The endings of files of rows, in any case.
ROW_FILES = (".jsonl", ".json", ".csv", ".parquet")
# Settings that may name a folder of this machine -> which of its files are read.
FOLDERS = {
    "base.checkpoint": MODEL_FILES,
    "base.tokenizer": BESIDE_WEIGHTS,
    "released.reward_model": MODEL_FILES,
    "data.sft_dataset": ("**/*",),
    "data.comparisons_dataset": ("**/*",),
}
# The stages that call the reward function, besides those that train a policy with it.
CALL_REWARD_FUNCTION = ("rm", "normalize", "summaries")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A folder, or a repository of the hub at a revision, as a setting names it."""

    setting: str
    kind: str
    """`model` or `dataset`."""
    name: str
    """Folder or hub id."""
    configuration: str = ""
    """Of a data set; empty if it has only one."""
    revision: str = MAIN

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of this machine."""
        return Path(self.name).is_dir()

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.setting}: {self.kind} {self.name}"

    @property
    def key(self) -> str:
        """Its name in `runs/hub.json`."""
        return f"{self.kind}s/{self.name}@{self.revision}"


def model_source(setting: str, text: str) -> Source:
    """The source that `folder` or `id[@revision]` names."""
    if Path(text).is_dir():
        return Source(setting=setting, kind="model", name=text)
    name, _, revision = text.partition("@")
    return Source(setting=setting, kind="model", name=name, revision=revision or MAIN)


def dataset_source(setting: str, text: str) -> Source:
    """The source that `folder` or `id[:configuration][@revision]` names."""
    source = replace(model_source(setting, text), kind="dataset")
    if source.is_folder:
        return source
    name, _, configuration = source.name.partition(":")
    return replace(source, name=name, configuration=configuration)


def own_inputs(config: Config, stage: str) -> dict[str, str]:
    """A hash of the user's files that a stage reads, by the setting that names them."""
    inputs = data_inputs(config, stage) | folder_inputs(config, stage)
    if config.reward.module is not None and calls_reward_function(config, stage):
        inputs[REWARD_FUNCTION] = _hash_of(module_files(config.reward.module), Path())
    return inputs


def calls_reward_function(config: Config, stage: str) -> bool:
    """Whether a stage calls the user's reward function, if there is one."""
    return stage in CALL_REWARD_FUNCTION or row_of(stage, config.kind).policy_gradient


def module_files(module: Path) -> list[Path]:
    """A Python file of the working folder, and the files of that folder that it imports."""
    files: list[Path] = []
    remaining = [module]
    while remaining:
        path = remaining.pop()
        if path in files or not path.is_file():
            continue
        files.append(path)
        try:
            names = imported_names(path.read_bytes())
        except (SyntaxError, ValueError):  # The stage that imports it will say so.
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] not in PACKAGES:
                remaining.append(Path(*parts).with_suffix(".py"))
                remaining.append(Path(*parts, "__init__.py"))
    return files


def data_inputs(config: Config, stage: str) -> dict[str, str]:
    """A hash, under the name `data`, of the user's files of posts or summaries that a stage reads.

    Empty if it reads none.
    """
    if config.kind == OUTPUTS and stage == "summaries":
        return {DATA: _hash_of(output_files(config.outputs.file))}
    if not STAGES[stage].reads_data or config.data.source in settings.NO_FOLDERS:
        return {}
    source = config.data.source
    if Path(source).is_file():
        return {DATA: _hash_of([Path(source)])}
    paths = []
    for split in (*POSTS, *COMPARISONS, PPO_TRAIN):
        path = split_file(source, split)
        if path is not None:
            paths.append(path)
    return {DATA: _hash_of(paths)}


def split_file(source: str, split: str) -> Path | None:
    """The file of a split, or None. A source that is one file holds any split.

    Raises UserError if a folder has two files of the split, because one would be passed over.
    """
    if Path(source).is_file():
        return Path(source)
    files = [path for path in row_files(Path(source)) if path.stem == split]
    if len(files) > 1:
        names = " and ".join(path.name for path in files)
        raise UserError(f"{source}: {names} are both the split {split}: keep one of them")
    return files[0] if files else None


def row_files(folder: Path) -> list[Path]:
    """The files of rows in a folder, by name; none if there is no such folder."""
    if not folder.is_dir():
        return []
    paths = (path for path in folder.iterdir() if path.is_file())
    return sorted(path for path in paths if path.suffix.lower() in ROW_FILES)


def unread_files(source: str) -> list[str]:
    """The names of files in a folder of splits that are no split, hidden ones left out."""
    if not Path(source).is_dir():
        return []
    splits = (*POSTS, *COMPARISONS, PPO_TRAIN)
    split_files = [path for path in row_files(Path(source)) if path.stem in splits]
    others = (path for path in Path(source).iterdir() if path not in split_files)
    return sorted(path.name for path in others if not path.name.startswith("."))


def output_files(source: str) -> list[Path]:
    """The files of summaries that `outputs.file` names: itself, or those of a folder or a run.

    Of a run they are the JSON Lines that its stage `summaries` wrote.
    """
    path = Path(source)
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    if (path / "summaries").is_dir():
        path = path / "summaries"
    if (path / "manifest.json").is_file():
        return [file for file in row_files(path) if file.suffix == ".jsonl"]
    return row_files(path)


def unread_outputs(source: str) -> list[str]:
    """The names of files in a folder of summaries that are not read, hidden ones left out."""
    if not Path(source).is_dir() or (Path(source) / "summaries").is_dir():
        return []
    read = output_files(source)
    others = (path for path in Path(source).iterdir() if path not in read)
    return sorted(path.name for path in others if not path.name.startswith("."))


def folder_inputs(config: Config, stage: str) -> dict[str, str]:
    """A hash of each folder from which a stage loads a model, a tokenizer or a data set."""
    names: list[str] = []
    if stage == "base":
        names += ["base.checkpoint", "base.tokenizer"]
    if stage in ("rm", "released"):
        names.append("released.reward_model")
    if STAGES[stage].reads_data and config.data.source == settings.HUB:
        names += ["data.sft_dataset", "data.comparisons_dataset"]

    hashes = {}
    for name in names:
        section, _, key = name.partition(".")
        text = getattr(getattr(config, section), key)
        if text in settings.NO_FOLDERS:
            continue
        source = dataset_source(name, text) if section == "data" else model_source(name, text)
        if source.is_folder:
            folder = Path(source.name)
            paths = {path for pattern in FOLDERS[name] for path in folder.glob(pattern)}
            hashes[name] = _hash_of([path for path in paths if path.is_file()], folder)
    return hashes


def _hash_of(paths: Sequence[Path], folder: Path | None = None) -> str:
    """One hash of some files' contents and names.

    A file's name is its path below `folder`, or only its last part if no folder is given.
    """
    hashes = {}
    for path in paths:
        name = path.name if folder is None else str(path.relative_to(folder))
        hashes[name] = known_hash(path)
    return hash_of(hashes)
