"""The code of a stage: the hash of each file that its module reaches by import statements.

The statements are read from the source, anywhere in a file; only modules of this project count.
Changed code does not make a stage stale. The records are used to warn that it has changed.
"""

import ast
import hashlib
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("stages", "eval", "reports")
CODE_FORMAT = "sha256 of files"
"""The kind of hashes in a code record. Records without it are from an earlier version and contain
hashes of syntax trees, which cannot be compared with hashes of files."""
Record = dict[str, Any]


def code_version() -> str:
    """Return the current git commit, or `unknown`; it ends with `-dirty` if files differ from it.

    Published pages and Markdown files may differ, because no run reads them.
    """
    describe_command = ["git", "describe", "--always", "--abbrev=10"]
    try:
        described = subprocess.run(describe_command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    if described.returncode != 0:
        return "unknown"

    ignored = [":(exclude)reports/generated", ":(exclude)*.md"]
    diff_command = ["git", "diff", "--quiet", "HEAD", "--", ".", *ignored]
    diff = subprocess.run(diff_command, capture_output=True, check=False)
    suffix = "-dirty" if diff.returncode != 0 else ""
    return described.stdout.strip() + suffix


def code_record(module: str) -> Record:
    """Return what a manifest says about a stage's code: its module, and the hash of each file."""
    return {"format": CODE_FORMAT, "module": module, "files": code_of(module), "earlier": []}


def resumed_code_record(module: str, before: Record, version_before: str) -> Record:
    """Return the code record of a stage that resumes an attempt with the record `before`.

    Each version trained a part of the stage. So `earlier` lists, for each attempt with different
    code, its commit and the hashes of its files at that time.
    """
    record = code_record(module)
    record["earlier"] += before.get("earlier", [])
    if not is_comparable(before):
        record["earlier"].append({"code_version": "unknown", "files": {}})
        return record

    names = differing_keys(before["files"], record["files"])
    if names:
        hashes_before = {name: before["files"].get(name) for name in names}
        record["earlier"].append({"code_version": version_before, "files": hashes_before})
    return record


def changed_files(record: Record) -> list[str]:
    """Return the files whose code now differs from a record, or from a part of its stage.

    Empty for a record of an earlier version of this project, whose hashes are of another kind.
    """
    if not is_comparable(record):
        return []
    names = set(differing_keys(record["files"], code_of(record["module"])))
    for attempt in record["earlier"]:
        names.update(attempt["files"])
    return sorted(names)


def is_comparable(record: Mapping[str, Any]) -> bool:
    """Return whether a code record contains hashes that can be compared with today's files."""
    return record.get("format") == CODE_FORMAT


def differing_keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the keys that only one of two mappings has, or whose values differ."""
    return sorted(key for key in {*first, *second} if first.get(key) != second.get(key))


def code_of(module: str) -> dict[str, str]:
    """Return file -> hash, for a module and all modules of this project that it imports."""
    hashes: dict[str, str] = {}
    remaining = [module]
    while remaining:
        name = f"{remaining.pop().replace('.', '/')}.py"
        if name in hashes or not (ROOT / name).is_file():
            continue
        hashes[name], imported = _hash_and_imports(ROOT / name)
        remaining += imported
    return dict(sorted(hashes.items()))


@cache  # If a file is edited while this process runs, its old version has been loaded.
def _hash_and_imports(path: Path) -> tuple[str, list[str]]:
    """Return the hash of a file, and the modules of this project that it imports."""
    source = path.read_bytes()
    names = [name for name in imported_names(source) if name.split(".")[0] in PACKAGES]
    return hashlib.sha256(source).hexdigest()[:12], names


def imported_names(source: bytes) -> list[str]:
    """Return the modules that a Python file imports; `from a import b` counts as `a` and `a.b`.

    Raises SyntaxError for a file that is not Python.
    """
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names
