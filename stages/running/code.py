"""The code that makes a stage, as hashes of the files that its module imports. Standard library
only.

A hash leaves out comments, docstrings and layout. The imports are read from the source, anywhere in
a file; only modules of this project count. A manifest records the hashes, so that `make` can say
which finished stage was made with other code, and which files differ.
"""

import ast
import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from stages.running.files import file_hash

ROOT = Path(__file__).parents[2]
PACKAGES = ("stages", "eval", "reports")
SEVERAL = "several"  # in place of a hash: the file changed between two attempts at a stage
MOST_NAMED = 3

Record = dict[str, Any]


def code_record(module: str, begun_with: Record | None = None) -> Record:
    """What a manifest says of the code of a stage: its module, and the hash of each file.

    `begun_with` is the record of an attempt that this one goes on from. A file that has changed
    since then is marked, because a part of the stage was made with each version.
    """
    files = code_of(module)
    bytes_now = bytes_of(files)
    if begun_with is not None:
        before = begun_with["files"]
        names = sorted(before.keys() | files.keys())
        files = {name: _same(before.get(name), files.get(name)) for name in names}
    return {"module": module, "files": files, "bytes": bytes_now}


def _same(before: str | None, now: str | None) -> str:
    return now if now is not None and now == before else SEVERAL


def changed_files(record: Record) -> list[str]:
    """The files in which the code now differs from a record."""
    files = record["files"]
    # Equal bytes are equal code: nothing has to be parsed.
    if SEVERAL not in files.values() and bytes_of(files) == record["bytes"]:
        return []
    now = code_of(record["module"])
    return sorted(name for name in files.keys() | now.keys() if files.get(name) != now.get(name))


def other_code(changed: Mapping[str, Iterable[str]]) -> str:
    """`ppo was made with other code (stages/functional.py)`; empty if no stage has changed files.

    `changed` holds the changed files of each stage.
    """
    stages = [stage for stage, files in changed.items() if files]
    files = sorted({name for names in changed.values() for name in names})
    were = "was" if len(stages) == 1 else "were"
    return f"{', '.join(stages)} {were} made with other code ({first_of(files)})" if stages else ""


def first_of(files: list[str]) -> str:
    """A few file names, and how many more there are."""
    more = len(files) - MOST_NAMED
    return ", ".join(files[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def code_of(module: str) -> dict[str, str]:
    """File -> hash of its code, for a module and all modules that it leads to by imports."""
    hashes: dict[str, str] = {}
    todo = [module]
    while todo:
        name = f"{todo.pop().replace('.', '/')}.py"
        if name not in hashes and (ROOT / name).is_file():
            hashes[name], imported = _parsed(ROOT / name)
            todo += imported
    return dict(sorted(hashes.items()))


def bytes_of(files: Iterable[str]) -> str:
    """One hash of the bytes of several files; a missing one counts too."""
    hashes = [f"{name} {_bytes_hash(ROOT / name)}" for name in sorted(files)]
    return _short_hash("\n".join(hashes))


@cache
def _bytes_hash(path: Path) -> str:
    return file_hash(path) if path.is_file() else ""


@cache
def _parsed(path: Path) -> tuple[str, list[str]]:
    """The hash of a file's code, and the names in our packages that it imports."""
    tree = ast.parse(path.read_bytes())
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    ours = [name for name in names if name.split(".")[0] in PACKAGES]
    return _short_hash(repr(_plain(tree))), ours


def _plain(node: Any) -> Any:
    """A syntax tree as lists, without bare texts and empty fields: Python's versions differ there.

    A bare text is a statement that is nothing but a string, as docstrings are.
    """
    if isinstance(node, list):
        return [_plain(part) for part in node if not _is_bare_text(part)]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, _plain(value)) for name, value in ast.iter_fields(node)]
    return [
        type(node).__name__,
        *((name, value) for name, value in fields if value not in (None, [])),
    ]


def _is_bare_text(node: Any) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]
