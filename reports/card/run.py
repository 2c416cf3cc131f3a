"""All parts of what only a card can show, in nine minutes, and their page: `make card`.

    python -m reports.card.run

A part ends when its seconds, and what the parts before it have left of theirs, are over. What is
known is written to runs/bench/ after each: a part that fails or is late is a line of the page, and
the rest goes on.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from reports.parts import page
from reports.parts.blocks import Block, Heading, Table, Text
from reports.parts.sentences import lead
from reports.speed import speed
from stages.driving.start import signals_handled
from stages.running.files import read_json
from stages.running.machine import code_version, library_versions
from stages.running.progress import Stopped
from stages.settings import config as settings
from stages.settings.config import UserError
from stages.settings.faults import in_one_line

STEM = "card"
SECONDS = {"placement": 40, "stages": 335, "bench": 70, "profile": 45, "precision": 30}
GRACE = 15  # seconds in which a part that is late may write what it has
Record = dict[str, Any]


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Run all parts, with the words that each of them takes, and write their page."""
    words = sys.argv[1:] if argv is None else argv
    card, folder, ends = speed.card_name(), settings.RUNS / "bench", time.monotonic()
    if not card:
        raise UserError("make card needs a card, and torch sees none here")
    about = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "code_version": code_version(),
        "card": card,
        "versions": library_versions(),
        "words": words,
    }
    record: Record = {"about": about, "parts": {}}
    work = folder / "card-work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        with signals_handled("make card"):
            for name, seconds in SECONDS.items():
                ends += seconds
                left = ends - time.monotonic()
                print(f"{name}: at most {left:.0f} s", flush=True)
                record["parts"][name] = run_part(name, left, work / f"{name}.json", words)
                html = write(record, folder)
    except Stopped as stopped:
        print(f"stopped: {folder}/{STEM}.json holds the parts that are done", file=sys.stderr)
        raise SystemExit(128 + stopped.number) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(page.for_terminal(failures(record), html))


def run_part(name: str, seconds: float, result: Path, words: list[str]) -> Record:
    """The rows that a part wrote, its seconds, and why it failed; empty if it did not."""
    command = [sys.executable, "-m", "reports.card.parts", name, str(result), *words]
    started, failed, errors = time.monotonic(), "", ""
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        try:
            _, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            failed = f"stopped after {seconds:.3g} s"
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:  # also where this process is stopped: nothing stays on the card
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode and not failed:
        failed = speed.last_line(errors)
    spent = round(time.monotonic() - started, 1)
    return {"seconds": spent, "failed": failed, "rows": read_json(result) or []}


# -- the page --------------------------------------------------------------------------------------


def failures(record: Record) -> list[str]:
    """A line for each part that failed."""
    parts = record["parts"].items()
    return [f"{name}: {part['failed']}" for name, part in parts if part["failed"]]


def write(record: Record, folder: Path) -> Path:
    """Write what is known; returns the page's path."""
    about = record["about"]
    made_from = {
        "kind": "bench",
        "names": [STEM],
        "judges": [],
        "code_versions": [about["code_version"]],
        "finished": about["date"],
        "devices": [about["card"]],
        "versions": about["versions"],
        "stages": {},
        "measured": record,
    }
    return page.write(folder, STEM, f"Measured on one {about['card']}", blocks(record), made_from)


def blocks(record: Record) -> list[Block]:
    """Which parts are done, and a table of each."""
    about, parts = record["about"], record["parts"]
    ends = [[name, cell(part["seconds"]), part["failed"] or "done"] for name, part in parts.items()]
    tables: list[Block] = []
    for name, part in parts.items():
        header = list(dict.fromkeys(column for row in part["rows"] for column in row))
        rows = [[cell(row.get(column, "")) for column in header] for row in part["rows"]]
        tables += [Heading(name.capitalize()), Table(header, rows, name=name)] if rows else []
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return [
        lead(f"Of {len(SECONDS)} parts {len(parts) - len(failures(record))} are done."),
        Table(["part", "seconds", "came to"], ends, strong=True, name="parts"),
        *tables,
        Heading("How it was measured"),
        Text(
            "Weights are random, of the published shapes. Plan and peak: GiB. Share: of the card's"
            " peak in bf16, by counting the matrix products. Precision: differences of bf16 from"
            " float32, beside the mean size in float32."
        ),
        Text(f"Measured on {about['date']} with code {about['code_version']}; {versions}."),
    ]


def cell(value: Any) -> str:
    """A text as it stands, a number with three digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
