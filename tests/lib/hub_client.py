"""The real clients as processes of their own, against a hub with small repositories.

They read HF_ENDPOINT when they are imported, so what asks the hub is another process.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from stages.data import builtin
from tests.lib import hub_repositories as layouts
from tests.lib.hub_server import Files, Hub, serving

ROOT = Path(__file__).parents[2]
TRAIN = [builtin.make_post(f"toy1-train-{n}") for n in range(24)]
HELD_OUT = [builtin.make_post(f"toy1-validation-{n}") for n in range(6)]
PAIRS = [builtin.make_comparison(row, "1", "train") for row in TRAIN]
HELD_OUT_PAIRS = [builtin.make_comparison(row, "1", "valid1") for row in HELD_OUT]


@cache
def small_tokenizer() -> Files:
    """A tokenizer's files, made once."""
    with tempfile.TemporaryDirectory() as folder:
        return layouts.small_tokenizer(TRAIN, Path(folder))


@cache
def small_model(seed: int = 1) -> Files:
    """A model's files, made once for a seed."""
    return layouts.pythia_files(seed)


@contextmanager
def small_hub() -> Iterator[Hub]:
    """A hub with small repositories of the real layouts."""
    with serving() as hub:
        layouts.add_posts(hub, TRAIN, HELD_OUT, HELD_OUT[:2])
        layouts.add_comparisons(hub, PAIRS, HELD_OUT_PAIRS)
        layouts.add_pythia(hub, small_tokenizer(), small_model())
        yield hub


@dataclass(frozen=True)
class Client:
    """Runs Python code, or a module if it is given as words, in a folder with a cache below it."""

    hub: Hub
    folder: Path

    def __call__(self, code: str | list[str], **environment: str) -> SimpleNamespace:
        words = ["-c", code] if isinstance(code, str) else ["-m", *code]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        own = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.folder / "home")}
        self.hub.requests.clear()
        done = subprocess.run(
            [sys.executable, *words],
            env=inherited | own | {"PYTHONPATH": str(ROOT)} | environment,
            cwd=self.folder,
            text=True,
            capture_output=True,
            check=False,
        )
        return SimpleNamespace(code=done.returncode, out=done.stdout, errors=done.stderr)


def commit_of(hub: Hub, name: str, branch: str = "main") -> str:
    return hub.repositories[name].branches[branch]


FETCH = """
import sys
from stages.config.errors import UserError
from stages.runs.hub import fetch_model
from stages.runs.hub import model_source
try:
    print(fetch_model(model_source("base.checkpoint", {source!r})).folder)
except UserError as error:
    print("error:", error)
assert "torch" not in sys.modules
"""


def fetched(client, source: str = layouts.PYTHIA, **environment: str) -> str:
    """The folder of a fetched model, or the error; one line in any case."""
    found = client(FETCH.format(source=source), **environment)
    assert found.code == 0, found.errors
    assert found.out.count("\n") == 1
    return found.out.strip()
