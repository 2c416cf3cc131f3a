"""A copy of this project that is changed as a document says, and `make` in it."""

import re
import shutil
import subprocess
from pathlib import Path

from tests.lib.pipeline import typed
from tests.lib.places import ROOT

PACKAGES = ("stages", "eval", "reports")
FILE = re.compile(r"[\w/]+\.(?:py|md)")


class ProjectCopy:
    """The project's packages in another folder, where a change does no harm."""

    def __init__(self, folder: Path) -> None:
        """Copy the packages, without the published pages."""
        self.folder = folder
        for package in PACKAGES:
            shutil.copytree(
                ROOT / package, folder / package, ignore=shutil.ignore_patterns("generated")
            )

    def add(self, code: str) -> None:
        """Append a block of Python to the file that its first line names, which may be new."""
        first_line, _, _ = code.partition("\n")
        path = self.folder / _file_in(first_line)
        before = f"{path.read_text(encoding='utf-8')}\n\n" if path.exists() else ""
        path.write_text(before + code, encoding="utf-8")

    def edit(self, diff: str) -> None:
        """Apply a diff: the name of the file, then lines with their context and without numbers."""
        header, *lines = diff.splitlines()
        path = self.folder / _file_in(header)
        old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{path.name} does not contain these lines once:\n{old}"
        path.write_text(text.replace(old, new), encoding="utf-8")

    def take_run(self, run: Path, *stages: str) -> None:
        """Put finished stages of a run, the folder of a seed, among the runs of this copy."""
        target = self.folder / "runs" / run.parent.name / run.name
        for stage in stages:
            shutil.copytree(run / stage, target / stage)

    def make(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `make` in this copy; the test fails, with what it printed, if the command does."""
        # Python looks in the current folder first, so this copy runs and not the original.
        done = typed(self.folder, *words, OMP_NUM_THREADS="1", **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done


def _file_in(line: str) -> str:
    """The file that a line names."""
    found = FILE.search(line)
    assert found is not None, f"no file in {line!r}"
    return found[0]
