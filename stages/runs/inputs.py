"""What a stage reads from outside: the user's own files, and what names models and data sets.

Content decides here too. A manifest records one hash for each setting that names such files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stages.config import config as settings
from stages.config.checks import UserError
from stages.config.config import Config, hash_of
from stages.config.sections import COMPARISONS, POSTS, PPO_TRAIN
from stages.config.stages import OUTPUTS, STAGES
from stages.runs.files import known_hash

DATA = "data"  # as an input of the stages that read it
MAIN = "main"
WEIGHTS = ("*.safetensors",)
OLD_WEIGHTS = ("*.bin",)  # loaded only where there are no others
BESIDE_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja")
# The endings of files of rows, in any case.
ROW_FILES = (".jsonl", ".json", ".csv", ".parquet")
OF_A_MODEL = (*BESIDE_WEIGHTS, *WEIGHTS, *OLD_WEIGHTS)
# Settings that may name a folder of this machine -> which of its files are read.
FOLDERS = {
    "base.checkpoint": OF_A_MODEL,
    "base.tokenizer": BESIDE_WEIGHTS,
    "released.reward_model": OF_A_MODEL,
    "data.sft_dataset": ("**/*",),
    "data.comparisons_dataset": ("**/*",),
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A folder, or a repository of the hub at a revision, as one setting names it."""

    setting: str
    kind: str
    """`model` or `dataset`."""
    name: str
    """Folder or hub id."""
    configuration: str = ""
    """Of a data set; empty: it has one only."""
    revision: str = MAIN

    @property
    def is_folder(self) -> bool:
        """Whether it lies on this machine."""
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
    name, _, revision = text.partition("@")
    if Path(text).is_dir():
        name, revision = text, ""
    return Source(setting=setting, kind="model", name=name, revision=revision or MAIN)


def dataset_source(setting: str, text: str) -> Source:
    """The source that `id[:configuration][@revision]` names; a folder may stand for the id."""
    source = replace(model_source(setting, text), kind="dataset")
    if source.is_folder:
        return source
    name, _, configuration = source.name.partition(":")
    return replace(source, name=name, configuration=configuration)


def own_inputs(config: Config, stage: str) -> dict[str, str]:
    """A hash of the user's own files that a stage reads, by what names them."""
    own = data_inputs(config, stage) | folder_inputs(config, stage)
    if stage == "rm" and config.reward.module:
        own["reward.function"] = _hash_of([config.reward.module])
    return own


def data_inputs(config: Config, stage: str) -> dict[str, str]:
    """A hash, as `data`, of the files that a stage reads from the user's own folder."""
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
    if not path.is_dir():
        return [path] if path.is_file() else []
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
    loaded = {"base": ["base.checkpoint", "base.tokenizer"]}.get(stage, [])
    loaded += ["released.reward_model"] if stage in ("rm", "released") else []
    if STAGES[stage].reads_data and config.data.source == settings.HUB:
        loaded += ["data.sft_dataset", "data.comparisons_dataset"]
    hashes = {}
    for name in loaded:
        section, _, key = name.partition(".")
        text = getattr(getattr(config, section), key)
        source = dataset_source(name, text) if section == "data" else model_source(name, text)
        if text not in settings.NO_FOLDERS and source.is_folder:
            folder = Path(source.name)
            paths = {path for pattern in FOLDERS[name] for path in folder.glob(pattern)}
            hashes[name] = _hash_of([path for path in paths if path.is_file()], folder)
    return hashes


def _hash_of(paths: Sequence[Path], folder: Path | None = None) -> str:
    """One hash of files and their names, which begin below `folder`; else the last part alone."""
    named = {str(path.relative_to(folder)) if folder else path.name: path for path in paths}
    return hash_of({name: known_hash(path) for name, path in named.items()})
