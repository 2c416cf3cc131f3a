"""Measures ours and TRL's update of each case, each in a process of its own, in turns."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.config.errors import UserError
from tests.bench.case import Case
from tests.bench.environment import TRL, install_trl, run_process
from tests.bench.meter import Update
from tests.bench.page import write_page
from tests.bench.results import Bench, Comparison, OurUpdate


def measure_cases(bench: Bench, cases: Sequence[Case], folder: Path) -> Path:
    """Measure all cases, write the page after each, and return the page's path.

    What fails becomes a note, and the other cases are measured. Raises UserError if all fail.
    """
    trl_python = None
    try:
        trl_python = install_trl()
    except UserError as error:
        bench.notes.append(str(error))

    page = folder / "bench.html"
    work = folder / "work"
    try:
        for case in cases:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            try:
                bench.comparisons.append(measure_case(bench, case, work, trl_python))
            except UserError as error:
                bench.notes.append(f"{case.name}: {error}")
            if bench.comparisons:
                page = write_page(bench, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not bench.comparisons:
        raise UserError("; ".join(bench.notes))
    return page


def measure_case(bench: Bench, case: Case, work: Path, trl_python: Path | None) -> Comparison:
    """Measure all runs of a case. Raises UserError if our update fails."""
    if case.algorithm != "ppo":  # TRL's RLOOTrainer takes texts, so it cannot have the same work
        trl_python = None
    comparison = Comparison(case=case, ours=[], trl=[])
    run_ours("prepare", case, work, result=work / "task.json")

    for run in range(1, bench.runs + 1):
        print(f"{case.name}: ours, run {run} of {bench.runs}", flush=True)
        measured = run_ours("update", case, work, result=work / "update.json")
        comparison.ours.append(OurUpdate(**measured))

        if trl_python is not None:
            print(f"{case.name}: {TRL}, run {run} of {bench.runs}", flush=True)
            try:
                comparison.trl.append(measure_trl(trl_python, work))
            except UserError as error:
                bench.notes.append(f"{TRL} at {case.name}: {error}")
                trl_python = None
    return comparison


def run_ours(part: str, case: Case, work: Path, result: Path) -> dict[str, Any]:
    """Run a part of `tests.bench.ours`, and return the JSON that it writes."""
    words = [sys.executable, "-m", "tests.bench.ours", part, str(work), case.name]
    return run_process([*words, *case.overrides], result)


def measure_trl(trl_python: Path, work: Path) -> Update:
    """Measure TRL's update of the task in a folder. Raises UserError if it fails."""
    result = work / "trl.json"
    words = [str(trl_python), "-m", "tests.bench.trl_update", str(work / "task.json"), str(result)]
    return Update(**run_process(words, result))
