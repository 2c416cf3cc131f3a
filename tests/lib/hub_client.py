"""The unmodified clients of the hub as separate processes, and a hub with small repositories.

The clients read HF_ENDPOINT when they are imported, so another process has to ask the hub.
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

from stages.data import builtin
from tests.lib import hub_repositories as layouts
from tests.lib.hub_server import Files, Hub, serving

ROOT = Path(__file__).parents[2]
TRAIN = [builtin.make_post(f"toy1-train-{number}") for number in range(24)]
HELD_OUT = [builtin.make_post(f"toy1-validation-{number}") for number in range(6)]
PAIRS = [builtin.make_comparison(post, "1", "train") for post in TRAIN]
HELD_OUT_PAIRS = [builtin.make_comparison(post, "1", "valid1") for post in HELD_OUT]


# -- a small hub -----------------------------------------------------------------------------------


@cache
def small_tokenizer() -> Files:
    """The files of a tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        return layouts.small_tokenizer(TRAIN, Path(folder))


@cache
def small_model(seed: int = 1) -> Files:
    """The files of a model with random weights."""
    return layouts.pythia_files(seed)


@contextmanager
def small_hub() -> Iterator[Hub]:
    """A hub with small repositories that have the layouts of the real ones."""
    with serving() as hub:
        layouts.add_posts(hub, train=TRAIN, validation=HELD_OUT, test=HELD_OUT[:2])
        layouts.add_comparisons(hub, train=PAIRS, validation=HELD_OUT_PAIRS)
        layouts.add_pythia(hub, small_tokenizer(), small_model())
        yield hub


def commit_of(hub: Hub, name: str, branch: str = "main") -> str:
    """The commit of a branch, for example of `models/EleutherAI/pythia-14m`."""
    return hub.repositories[name].branches[branch]


# -- its clients -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a process ended, and what it printed."""

    status: int
    output: str
    errors: str


@dataclass(frozen=True)
class Client:
    """Runs Python in a working folder, with its own cache of the hub below this folder."""

    hub: Hub
    folder: Path

    def run_code(self, code: str, **environment: str) -> Finished:
        """Run Python code; the hub lists the requests of this process only."""
        return self._run(["-c", code], environment)

    def run_module(self, words: list[str], **environment: str) -> Finished:
        """Run a module, the first word, with arguments."""
        return self._run(["-m", *words], environment)

    def _run(self, arguments: list[str], environment: dict[str, str]) -> Finished:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        hub_variables = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.folder / "home")}
        self.hub.requests.clear()
        process = subprocess.run(
            [sys.executable, *arguments],
            env={**inherited, **hub_variables, "PYTHONPATH": str(ROOT), **environment},
            cwd=self.folder,
            text=True,
            capture_output=True,
            check=False,
        )
        return Finished(status=process.returncode, output=process.stdout, errors=process.stderr)


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


def fetch(client: Client, source: str = layouts.PYTHIA, **environment: str) -> str:
    """Fetch a model; returns its folder, or the error in one line."""
    finished = client.run_code(FETCH.format(source=source), **environment)
    assert finished.status == 0, finished.errors
    assert finished.output.count("\n") == 1
    return finished.output.strip()
