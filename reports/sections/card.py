"""What one card shows, in nine minutes, part by part, and the page of it: `make card`.

    python -m reports.sections.card

Each part is a process of its own. It ends when its seconds, and what the parts before it have left
of theirs, are over. What is known is written to runs/bench/ after each: a part that fails or is
late is a line of the page, and the rest goes on. Weights are random, and nothing is fetched.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from reports.parts import page
from reports.parts.blocks import Block, Heading, Table, Text
from reports.parts.sentences import lead
from stages.config import config as settings
from stages.config.command_line import add_overrides
from stages.config.config import UserError
from stages.config.faults import Parser, in_one_line
from stages.config.presets import PRESETS
from stages.runs.code import ROOT, code_version
from stages.runs.files import read_json
from stages.runs.machine import library_versions

MEASURE, TESTS = "reports.speed.measure", "tests/test_on_card.py"
CARD = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
LATE = (124, 137)  # the status of `timeout`, and after it had to kill
Record = dict[str, Any]


def parts_of(args: Any, work: Path) -> dict[str, tuple[int, str, Path]]:
    """Name -> its seconds, what Python is told to run, and the file that it writes."""

    def words_of(preset: str, more: str = "") -> str:
        data = "" if PRESETS[preset]().data.source else "--data=."
        run = f"--preset={preset} --name=card-{preset} {data}"
        return f"{run} --set {more} {' '.join(args.overrides)}"

    preset, batch, rows = args.shape.split(":")
    plain = f"lora.rank=0 ppo.samples_per_query=1 ppo.critic_updates=0 ppo.batch_size={batch}"
    sizes = f"memory.microbatch_size={rows} memory.forward_batch_size={batch}"
    shape = words_of(preset, f"{plain} {sizes}")
    bench = f"--shapes {args.shape} --runs 1 --set {' '.join(args.overrides)}"
    parts = {"placement": (35, f"pytest -q -m card {ROOT / TESTS}", work / "none.json")}
    for name, seconds in zip(args.presets, (70, 250), strict=False):
        result = settings.RUNS / f"card-{name}" / "rehearsal" / "rehearsal.json"
        data = "" if PRESETS[name]().data.source else "DATA=."
        changes = shlex.quote(f"SET={' '.join(args.overrides)}")
        words = f"stages rehearse PRESET={name} NAME=card-{name} {data} {changes}"
        parts[f"stages of {name}"] = seconds, words, result
    parts["bench"] = 60, f"reports.speed.bench_page {bench}", work / "none.json"
    others = [("prepare", 25, shape), ("profile", 40, shape), ("precision", 25, shape)]
    others += [(f"work-{name}", 15, words_of(name)) for name in args.presets]
    for name, seconds, words in others:
        result = work / f"{name}.json"
        parts[name] = seconds, f"{MEASURE} {name.partition('-')[0]} {result} {words}", result
    return parts


def run_part(words: str, seconds: float, result: Path) -> Record:
    """What a part wrote and printed last, its seconds, and why it failed; empty if it did not."""
    started = time.monotonic()
    # At the first signal a part writes what it has; it is killed where it does not end.
    limit = ["timeout", "--foreground", "--kill-after=15", f"{max(1.0, seconds):.1f}"]
    command = [*limit, sys.executable, "-m", *shlex.split(words)]
    environment = os.environ | {"PIP_NO_INDEX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    last, error = ((text.strip().splitlines() or [""])[-1] for text in (done.stdout, done.stderr))
    spent = round(time.monotonic() - started, 1)
    failed = f"stopped after {spent} s" if done.returncode in LATE else error or last
    written = read_json(result) or read_json(Path(f"{last.removesuffix('.html')}.json"))
    return {
        "seconds": spent,
        "failed": failed if done.returncode else "",
        "last": last,
        "result": written or {},
    }


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Run all parts and write their page."""
    parser = Parser(description="what only a card can show")
    parser.add_argument("--presets", nargs="+", default=["smollm2-full", "pythia-1b"])
    parser.add_argument("--shape", default="pythia-1b:64:16", help="preset:batch:microbatch")
    parser.add_argument("--slower", type=float, default=1.0, help="times the seconds of parts")
    add_overrides(parser)
    args = parser.parse_args(argv)
    folder, ends = settings.RUNS / "bench", time.monotonic()
    card = subprocess.check_output([sys.executable, "-c", CARD], text=True).strip()
    if not card:
        raise UserError("make card needs a card, and torch sees none here")
    about = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "code_version": code_version(),
        "card": card,
        "versions": library_versions(),
    }
    record: Record = {"about": about, "parts": {}}
    work = (folder / "card-work").absolute()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        for name, (seconds, words, result) in parts_of(args, work).items():
            ends += seconds * args.slower
            print(f"{name}: at most {ends - time.monotonic():.0f} s", flush=True)
            record["parts"][name] = run_part(words, ends - time.monotonic(), result)
            html = write(record, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        for name in args.presets:
            shutil.rmtree(settings.RUNS / f"card-{name}", ignore_errors=True)
    print(page.for_terminal([answer(record)], html))


def answer(record: Record) -> str:
    """How many parts are done, and why the others are not."""
    parts = record["parts"]
    failed = [f"{name}: {part['failed']}" for name, part in parts.items() if part["failed"]]
    return " ".join([f"{len(parts) - len(failed)} parts are done, {len(failed)} failed.", *failed])


def rows_of(name: str, record: Record) -> Iterator[Record]:
    """The rows of a part's table, by the names of their columns."""
    result, preset = record["parts"][name]["result"], name.rpartition(" ")[2]
    work = record["parts"].get(f"work-{preset}", {}).get("result", {})
    for stage, row in result.get("stages", {}).items():
        known = stage in work and "update" in row
        share = {"share": work[stage] / row["update"] / work["peak"]} if known else {}
        yield {"stage": stage, **row, **share}
    yield from result.get("rows", [])


def write(record: Record, folder: Path) -> Path:
    """Write what is known, and its page; returns the page's path."""
    about, parts = record["about"], record["parts"]
    ends = [
        [name, cell(part["seconds"]), part["failed"] or part["last"]]
        for name, part in parts.items()
    ]
    blocks: list[Block] = [lead(answer(record))]
    blocks.append(Table(["part", "seconds", "came to"], ends, strong=True, name="parts"))
    for name in parts:
        rows = list(rows_of(name, record))
        header = list(dict.fromkeys(column for row in rows for column in row))
        cells = [[cell(row.get(column, "")) for column in header] for row in rows]
        blocks += [Heading(name.capitalize()), Table(header, cells, name=name)] if rows else []
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    blocks += [
        Heading("How it was measured"),
        Text(
            "Weights are random, of the published shapes. Plan and peak: GiB. Share: of the card's"
            " peak in bf16, by counting matrix products. Precision: bf16 - float32."
            f" Measured on {about['date']} with code {about['code_version']}; {versions}."
        ),
    ]
    made_from = page.measured_here(list(parts), about["card"], record)
    return page.write(folder, "card", f"Measured on one {about['card']}", blocks, made_from)


def cell(value: Any) -> str:
    """A text as it stands, a number with three digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
