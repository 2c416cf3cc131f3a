"""The user's own files that a stage reads: posts and summaries. Content decides here too."""

from collections.abc import Sequence
from pathlib import Path

from stages.running.files import file_hash
from stages.settings import config as settings
from stages.settings.config import Config, hash_of
from stages.settings.sections import COMPARISONS, POSTS, PPO_TRAIN
from stages.settings.stages import OUTPUTS, STAGES

DATA = "data"  # as an input of the stages that read it
DATA_FILES = ("*.jsonl", "*.parquet")
OUTPUT_FILES = (".jsonl", ".csv", ".parquet")


def data_inputs(config: Config, stage: str) -> dict[str, str]:
    """A hash, as `data`, of the files that a stage reads from the user's own folder."""
    if config.kind == OUTPUTS and stage == "summaries":
        return {DATA: _hash_of(output_files(config.outputs.file))}
    if not _reads_folder(config, stage):
        return {}
    folder = Path(config.data.source)
    both = [
        [folder / f"{split}{ending}" for ending in (".jsonl", ".parquet")]
        for split in (*POSTS, *COMPARISONS, PPO_TRAIN)
    ]
    there = [[path for path in paths if path.is_file()] for paths in both]
    return {DATA: _hash_of([paths[0] for paths in there if paths])}


def _reads_folder(config: Config, stage: str) -> bool:
    return STAGES[stage].reads_data and config.data.source not in settings.NO_FOLDERS


def older_hash(config: Config, stage: str, name: str) -> str | None:
    """The hash of an input as manifests once recorded it: of all tables in the folder of posts."""
    if name != DATA or not _reads_folder(config, stage):
        return None
    return _hash_of([path for kind in DATA_FILES for path in Path(config.data.source).glob(kind)])


def output_files(source: str) -> list[Path]:
    """The files of summaries that `outputs.file` names: itself, or those of a folder or a run."""
    path = Path(source)
    if not path.is_dir():
        return [path] if path.is_file() else []
    folder = path / "summaries" if (path / "summaries").is_dir() else path
    return sorted(file for file in folder.iterdir() if file.suffix in OUTPUT_FILES)


def _hash_of(paths: Sequence[Path]) -> str:
    return hash_of({path.name: file_hash(path) for path in paths})
