"""Files that are never half-written, and their hashes."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from stages.config.errors import RESTORE, UserError, visible

HASHES = "hashes.json"
"""The hashes of the other files in a cached folder."""


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()


def known_hash(path: Path) -> str:
    """Return `file_hash` of a user's file, read again only if its size or time has changed."""
    status = path.stat()
    return _cached_hash(path.absolute(), status.st_size, status.st_mtime_ns)


@cache
def _cached_hash(path: Path, size: int, modified_ns: int) -> str:
    return file_hash(path)


def hash_files(
    folder: Path, leave_out: Sequence[str] = (), hash_of_file: Callable[[Path], str] = file_hash
) -> dict[str, str]:
    """Return relative path -> hash, for every file below a folder.

    `leave_out`: names, directly in the folder, of files and subfolders that are not hashed.
    """
    hashes = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] not in leave_out:
            hashes[str(name)] = hash_of_file(path)
    return hashes


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that is never half-written, even if the machine stops."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a JSONL file, one row a line."""
    with path.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_text(path: Path, text: str) -> None:
    """Write a text for people, passed through `visible`, as safely as `write_whole`."""
    write_whole(path, visible(text))


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it is either complete or unchanged, even if the machine stops."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    partial.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file's bytes, or the names in a folder, to the disk before this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, without a copy if the disk allows that."""
    try:
        os.link(source, target)
    except OSError:  # Another file system.
        shutil.copy(source, target)


def cached_folder(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` fills once. It is filled again if its files have changed."""
    if folder.exists():
        if read_json(folder / HASHES) == hash_files(folder, [HASHES]):
            return folder
        print(f"note: {folder} is damaged or of an older version: rebuilding it", file=sys.stderr)
        shutil.rmtree(folder)

    partial = folder.with_name(f"{folder.name}.partial{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        make(partial)
        write_json(partial / HASHES, hash_files(partial))
    except BaseException:
        shutil.rmtree(partial)
        with suppress(OSError):  # The cache holds other folders.
            partial.parent.rmdir()
        raise

    try:
        partial.rename(folder)
    except OSError:  # Another process was faster, with the same content.
        shutil.rmtree(partial)
    return folder


def read_json(path: Path) -> Any:
    """Return the value in a JSON file; None without one. Raises UserError if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:  # Also for bytes that are not UTF-8.
        raise UserError(f"{path} is not JSON: {RESTORE}") from None


def read_record(path: Path) -> Any:
    """Return the object in a JSON file; None without one. Raises UserError for another value."""
    value = read_json(path)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object: {RESTORE}")
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file. Raises UserError for a line that is not an object."""
    rows: list[dict[str, Any]] = []
    # Not str.splitlines, which would also split at U+2028.
    with path.open(encoding="utf-8") as lines:
        try:
            for line in lines:
                rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            raise UserError(f"{path}:{len(rows) + 1} is not a JSON object: {RESTORE}") from None
    return rows


def whole_lines(path: Path) -> tuple[list[Any], int]:
    """Return the rows of a JSONL file before the first damaged line, and their size in bytes.

    A line without its newline counts as damaged: a kill came before it was complete. A missing file
    has no rows.
    """
    rows: list[Any] = []
    size = 0
    if not path.exists():
        return rows, size
    with path.open("rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # Also for bytes that are not UTF-8.
                break
            if not line.endswith(b"\n"):
                break
            rows.append(row)
            size += len(line)
    return rows, size


def cut_file(path: Path, size: int) -> None:
    """Cut a file, if there is one, to its first `size` bytes."""
    if path.exists() and path.stat().st_size != size:
        os.truncate(path, size)
