"""Files that are whole or absent, and the hashes that name them. Standard library only."""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from stages.config.checks import RESTORE, UserError, visible

HASHES = "hashes.json"  # of the other files of a cached folder


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()


def known_hash(path: Path) -> str:
    """`file_hash` of a file of others, read again only where its size or time is another."""
    status = path.stat()
    return _hash_at(path.absolute(), status.st_size, status.st_mtime_ns)


@cache
def _hash_at(path: Path, size: int, changed: int) -> str:
    return file_hash(path)


def hash_files(
    folder: Path, leave_out: Sequence[str] = (), hash_of_file: Callable[[Path], str] = file_hash
) -> dict[str, str]:
    """Relative path -> hash of every file below a folder, without the subfolders left out."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path: path.relative_to(folder) for path in paths}
    kept = [path for path in paths if names[path].parts[0] not in leave_out]
    return {str(names[path]): hash_of_file(path) for path in kept}


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is whole or absent, whenever the machine stops."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON a line."""
    with path.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_text(path: Path, text: str) -> None:
    """Write a text that people look at, as `visible` makes it; else as `write_whole`."""
    write_whole(path, visible(text))


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it is whole or unchanged, whenever the machine stops."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    partial.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file's bytes, or the names in a folder, on the disk before this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link_or_copy(source: Path, target: Path) -> None:
    """The same file under another name, without a second copy where the disk allows it."""
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy(source, target)


def cached_folder(folder: Path, make: Callable[[Path], None]) -> Path:
    """A folder that `make` filled once. Where it is not what its hashes say, it is made anew."""
    if folder.exists():
        if read_json(folder / HASHES) == hash_files(folder, [HASHES]):
            return folder
        print(f"note: {folder} is damaged or of an older version: it is made anew", file=sys.stderr)
        shutil.rmtree(folder)
    own = folder.with_name(f"{folder.name}.partial{os.getpid()}")
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    try:
        make(own)
        write_json(own / HASHES, hash_files(own))
    except BaseException:
        shutil.rmtree(own)
        with suppress(OSError):  # others lie beside it
            own.parent.rmdir()
        raise
    try:
        own.rename(folder)
    except OSError:  # another run was faster with the same content
        shutil.rmtree(own)
    return folder


def read_json(path: Path) -> Any:
    """The value in a JSON file, or None without one. Raises UserError where it is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:  # also where the bytes are no UTF-8
        raise UserError(f"{path} is no JSON: {RESTORE}") from None


def read_record(path: Path) -> Any:
    """The object in a JSON file, or None without one. Raises UserError where it is none."""
    value = read_json(path)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{path} is no JSON object: {RESTORE}")
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file that a stage wrote. Raises UserError for a line that is no row."""
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as lines:  # str.splitlines would also split at U+2028
        try:
            for line in lines:
                rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            raise UserError(f"{path}:{len(rows) + 1} is no row of JSON: {RESTORE}") from None
    return rows


def whole_lines(path: Path) -> tuple[list[Any], int]:
    """The rows of a JSONL file before the first damaged line, and how many bytes they take.

    A missing file has none.
    """
    rows: list[Any] = []
    size = 0
    # A ValueError also where the bytes are no UTF-8.
    with suppress(FileNotFoundError, ValueError), path.open("rb") as lines:
        for line in lines:
            row = json.loads(line)
            if not line.endswith(b"\n"):
                break
            rows.append(row)
            size += len(line)
    return rows, size


def cut_file(path: Path, size: int) -> None:
    """Keep the first `size` bytes of a file, if there is one."""
    if path.exists() and path.stat().st_size != size:
        os.truncate(path, size)


class KeptRows:
    """Measurements of rows, in one JSONL file per process; floats keep every digit."""

    def __init__(self, folder: Path, label: str, process: int) -> None:
        """`label` names the measurement; each measurement of a stage has its own."""
        stem = re.sub(r"\W+", "-", label)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{stem}.{process}.jsonl"
        cut_file(self.path, whole_lines(self.path)[1])
        self.known: dict[int, Any] = {}
        for path in sorted(folder.glob(f"{stem}.*.jsonl")):
            for kept in whole_lines(path)[0]:
                try:
                    self.known |= dict(zip(kept["rows"], kept["measured"], strict=True))
                except (TypeError, LookupError, ValueError):
                    mend = "remove it: what it holds is then measured again"
                    raise UserError(f"{path} holds a line that no stage wrote: {mend}") from None

    def add(self, rows: Sequence[int], measured: Sequence[Any]) -> None:
        """Append one finished part."""
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"rows": list(rows), "measured": list(measured)}) + "\n")
        self.known |= dict(zip(rows, measured, strict=True))
