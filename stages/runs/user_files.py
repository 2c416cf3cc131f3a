"""The user's files that stages read: posts, comparisons, summaries, and a reward function."""

from pathlib import Path

from stages.config.errors import UserError
from stages.config.sections import COMPARISONS, POSTS, PPO_TRAIN
from stages.runs.code import PACKAGES, imported_names

# The extensions of files of rows, in lower or upper case.
ROW_FILES = (".jsonl", ".json", ".csv", ".parquet")
SPLITS = (*POSTS, *COMPARISONS, PPO_TRAIN)


def row_files(folder: Path) -> list[Path]:
    """Return the files of rows in a folder, by name; none if there is no such folder."""
    if not folder.is_dir():
        return []
    paths = (path for path in folder.iterdir() if path.is_file())
    return sorted(path for path in paths if path.suffix.lower() in ROW_FILES)


def split_file(source: str, split: str) -> Path | None:
    """Return the file of a split, or None. A source that is one file contains every split.

    Raises UserError if a folder has two files of the split, because one would be ignored.
    """
    if Path(source).is_file():
        return Path(source)
    files = [path for path in row_files(Path(source)) if path.stem == split]
    if len(files) > 1:
        names = " and ".join(path.name for path in files)
        raise UserError(f"{source}: {names} are both the split {split}: keep one of them")
    return files[0] if files else None


def split_files(source: str) -> list[Path]:
    """Return the files of all splits of a source, a file or a folder."""
    if Path(source).is_file():
        return [Path(source)]
    files = (split_file(source, split) for split in SPLITS)
    return [path for path in files if path is not None]


def output_files(source: str) -> list[Path]:
    """Return the files of summaries that `outputs.file` names: itself, or those of a folder or run.

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


def unread_files(source: str) -> list[str]:
    """Return the names of files in a folder of splits that are not a split."""
    return _other_names(Path(source), [p for p in row_files(Path(source)) if p.stem in SPLITS])


def unread_outputs(source: str) -> list[str]:
    """Return the names of files in a folder of summaries that are not read; none of a run."""
    if (Path(source) / "summaries").is_dir():
        return []
    return _other_names(Path(source), output_files(source))


def _other_names(folder: Path, files_read: list[Path]) -> list[str]:
    """Return the names of the other files in a folder, without hidden ones."""
    if not folder.is_dir():
        return []
    others = [path.name for path in folder.iterdir() if path not in files_read]
    return sorted(name for name in others if not name.startswith("."))


def module_files(module: Path) -> list[Path]:
    """Return a Python file of the working folder, and the files of that folder that it imports."""
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
