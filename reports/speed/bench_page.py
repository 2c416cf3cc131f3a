"""The page of `make bench`: speed and memory of ours, beside TRL and the lower bound.

    python -m reports.speed.bench_page --shapes pythia-14m:32:8 pythia-70m:16:4 --runs 2

measures (`reports/speed/speed.py`) and writes bench.json, bench.md and bench.html to runs/bench/
after each measurement, so that what was measured stays, however this ends. `--check` measures what
is published again and compares the ratios.

The lower bound is the work that an update cannot do without, counted in operations without any
padding, at the rate of a large matrix product in the same call.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import pandas as pd

from reports.needs.work import STEPS
from reports.parts import page
from reports.parts.page import Block, Heading, Note, Table, Text
from reports.parts.words import number, percent
from reports.sharing import publish
from reports.speed import speed
from reports.speed.speed import OURS, PEER, TRL, Record
from stages.driving.start import signals_handled
from stages.running.signals import Stopped
from stages.settings import config as settings
from stages.settings.checks import Parser, in_one_line
from stages.settings.command_line import add_overrides
from stages.settings.config import UserError

STEM = "bench"
BOUND = "lower bound"
RATIOS = {  # of which number, over whose, and the share by which a check lets it grow
    "time over the bound": ("seconds", BOUND, 0.15),
    "learning over the bound": ("learn", BOUND, 0.15),
    f"time over {TRL}": ("seconds", PEER, 0.15),
    f"memory over {TRL}": ("peak", PEER, 0.02),
}


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Measure and write the page, or check."""
    parser = Parser(description="speed and memory, beside TRL")
    parser.add_argument("--shapes", nargs="+", default=[], help="preset:batch:microbatch")
    parser.add_argument("--runs", type=int, default=2, help="of each measurement")
    add_overrides(parser)
    parser.add_argument("--check", action="store_true", help="compare with what is published")
    args = parser.parse_args(argv)
    if args.check:
        check(args)
    else:
        folder = settings.RUNS / STEM
        bench = _measured(args, args.shapes, folder)
        print(page.for_terminal([answer(bench)], folder / f"{STEM}.html"))


def _measured(args: argparse.Namespace, shapes: Sequence[str], folder: Path) -> Record:
    """What is measured of some shapes, written to a folder after each measurement, with its page.

    A signal ends the process with a line that says what was kept.
    """
    if args.runs < 1 or not shapes:
        raise UserError("RUNS must be at least 1, and SHAPES name at least one shape")
    cases = [speed.case_of(shape, tuple(args.overrides)) for shape in dict.fromkeys(shapes)]
    bench: Record = {}
    try:
        with signals_handled("make bench"):
            for bench in speed.measured(cases, args.runs, folder / "work"):
                write(bench, folder)
    except Stopped as stopped:
        kept = f"{folder}/{STEM}.json holds what was measured" if bench else "nothing was measured"
        print(f"stopped: {kept}; the same command begins again", file=sys.stderr)
        raise SystemExit(128 + stopped.number) from None
    finally:
        shutil.rmtree(folder / "work", ignore_errors=True)
    return bench


def write(bench: Record, folder: Path) -> Path:
    """Write the numbers and the page of them; returns the page's path."""
    about = bench["about"]
    made_from = {
        "kind": STEM,
        "names": list(bench["shapes"]),
        "judges": [],
        "code_versions": [about["code_version"]],
        "finished": about["date"],
        "devices": [f"{about['machine']}: {first_run(bench)['device']}"],
        "versions": about["versions"],
        "stages": {},
        "measured": bench,
    }
    beside = f", beside {TRL}" if about["peers"] else ""
    return page.write(folder, STEM, f"Speed and memory{beside}", blocks(bench), made_from)


# -- the check -------------------------------------------------------------------------------------


def check(args: argparse.Namespace) -> None:
    """Measure the published shapes again. Raises UserError if a ratio is worse than allowed."""
    if not (publish.GENERATED / f"{STEM}.json").exists():
        raise UserError("no bench is published: run `make bench`, then `make publish PAGES=bench`")
    published = page.record_of(publish.GENERATED, STEM)["made_from"]["measured"]
    args.overrides = args.overrides or published["about"]["overrides"]
    now = _measured(args, list(published["shapes"]), settings.RUNS / f"{STEM}-check")
    lines, worse = compare(published, now)
    print("\n".join([*lines, *failures(now)]))
    if worse:
        raise UserError(f"{len(worse)} of {len(lines)} ratios are worse than published allows")


def compare(published: Record, now: Record) -> tuple[list[str], list[str]]:
    """A line on every published ratio, and those lines again that are worse than allowed."""
    before, after = ratios(published), ratios(now)
    lines, worse = [], []
    for (shape, name), old in before.items():
        line, change, allowed = f"{shape}: {name}: {old:.2f} published, ", inf, RATIOS[name][-1]
        if (shape, name) in after:
            change = after[shape, name] / old - 1
            line += f"{after[shape, name]:.2f} now ({change:+.0%}, allowed {allowed:+.0%})"
        else:
            line += "not measured now"
        lines.append(line)
        worse += [line] if change > allowed else []
    return lines, worse


# -- figures ---------------------------------------------------------------------------------------


def figures(bench: Record) -> pd.DataFrame:
    """A row for each shape and who was measured at it, the lower bound too: numbers of the fastest
    run, `spread`, the slowest run above it, `peak`, the most that any run held, and `RATIOS`.
    """
    rows = []
    for shape, about in bench["shapes"].items():
        first = about["measured"][OURS][0]
        least = {step: flops / matrix_rate(bench) for step, flops in first["flops"].items()}
        bound = {"seconds": sum(least.values()), "peak": first["floor"], **least}
        for who, runs in [*about["measured"].items(), (BOUND, [bound])]:
            rows += [{"shape": shape, "who": who, "batch": about["batch"], **run} for run in runs]
    every = pd.DataFrame(rows).dropna(subset="seconds")  # what failed has none
    groups = every.groupby(["shape", "who"], sort=False)
    table = every.loc[groups["seconds"].idxmin()].set_index(["shape", "who"])
    table["peak"] = groups["peak"].max()
    spread = groups["seconds"].max() / groups["seconds"].min() - 1
    table["spread"] = spread.where(groups.size() > 1)
    table["episodes"] = table["batch"] / table["seconds"]  # a second

    for name, (column, whose, _) in RATIOS.items():
        theirs = table[table.index.isin([whose], level="who")][column].droplevel("who")
        table[name] = table[column].div(theirs.reindex(list(bench["shapes"])), level="shape")
    return table


def ratios(bench: Record) -> dict[tuple[str, str], float]:
    """By shape and name, numbers of ours that should not depend on the machine; larger is worse."""
    ours = figures(bench).loc[(slice(None), OURS), list(RATIOS)].droplevel("who")
    by_shape: dict[Any, float] = ours.stack().dropna().to_dict()
    return by_shape


def matrix_rate(bench: Record) -> float:
    """Operations per second of a large matrix product, the best that ours saw."""
    ours = (run for shape in bench["shapes"].values() for run in shape["measured"][OURS])
    return max(run["matrix_rate"] for run in ours)


def failures(bench: Record) -> list[str]:
    """What could not be installed or measured, each with its reason."""
    lines = list(bench["about"]["left_out"])
    for name, shape in bench["shapes"].items():
        failed = [run["failed"] for run in shape["measured"].get(PEER, []) if "failed" in run]
        lines += [f"{TRL} at {name}: {reason}" for reason in failed[:1]]
    return lines


# -- the page --------------------------------------------------------------------------------------


def answer(bench: Record) -> str:
    """How ours did in all updates together."""
    above, _, seconds, peak = (
        [value for (_, key), value in ratios(bench).items() if key == name] for name in RATIOS
    )
    counted = f"takes {_range(above)} times the seconds of the matrix products that it needs"
    if not seconds:
        return f"An update of ours {counted}; nothing stands beside it."
    faster = _range([1 / value for value in seconds])
    return (
        f"Ours makes {faster} times the episodes a second of {TRL}, in {_range(peak)} of its"
        f" memory. An update of ours {counted}. Measured on: {first_run(bench)['device']}."
    )


def first_run(bench: Record) -> Record:
    """The first measurement of ours, which says what it was made on."""
    run: Record = next(iter(bench["shapes"].values()))["measured"][OURS][0]
    return run


def _range(values: Sequence[float]) -> str:
    low, high = number(min(values), 2), number(max(values), 2)
    return low if low == high else f"{low} to {high}"


def blocks(bench: Record) -> list[Block]:
    """The page: the answer, every update and step, how it was measured."""
    return [
        Text(answer(bench), lead=True),
        updates_table(bench),
        *(Note(failure) for failure in failures(bench)),
        Heading("How it was measured"),
        *(Text(sentence) for sentence in method(bench)),
        machine_table(bench),
    ]


def updates_table(bench: Record) -> Table:
    """A row for everybody at every shape: ours beside TRL, the lower bound, and every step."""
    rows = []
    for row in figures(bench).reset_index().to_dict("records"):
        who, shape = row["who"], bench["shapes"][row["shape"]]
        above, learning, seconds, peak = (row[name] for name in RATIOS)
        cells = [row["episodes"], 1 / seconds, peak, above, learning, row["seconds"]]
        cells += [*(row[step] for step in STEPS), row["peak"] / 1e9]
        update = f"{speed.LABELS[shape['stage']]}, {shape['preset']}, {shape['batch']} episodes"
        name = bench["about"]["peers"].get(who, who)
        rows.append([update, name, *(number(cell, 2) for cell in cells), percent(row["spread"])])
    header = "update||episodes/s|times|of its memory|over the bound|learning alone|seconds"
    caption = (
        f"Of the fastest run. Times: episodes a second over those of {TRL}; of its memory: the same"
        " of the most that any run held, GB, above what its process held before the weights. Over"
        " the bound: seconds over those of the matrix products that an update needs; learning"
        " alone: the same of that part. Spread: the slowest run above the fastest. Microbatches,"
        " samples of a query, epochs and lengths of queries stand in bench.json."
    )
    return Table([*header.split("|"), *STEPS, "GB", "spread"], rows, caption, strong=True)


def method(bench: Record) -> list[str]:
    """What the numbers mean, and what they leave out."""
    return [
        "Texts: synthetic token ids with the lengths of real posts. Both implementations get the"
        " same ids in one batch and new weights of the published shape. Every measurement is a"
        " process of its own, ours and TRL's interleaved. Before it comes the smallest update,"
        " which is not counted.",
        "sample: drawing the responses. measure: log-probabilities (TRL takes the policy's from"
        " sampling and measures the reference policy alone). score: reward model and critic."
        " learn: what follows, with all epochs of all networks.",
        f"Lower bound: the operations of all matrix products that an update needs, without"
        f" padding, at {matrix_rate(bench) / 1e9:,.0f} Gflop/s, the rate of a large"
        " matrix product in the same call. Its memory: weights, gradients, the optimizer's moments,"
        " and one network's activations of one microbatch. See reports/needs/work.py.",
    ]


def machine_table(bench: Record) -> Table:
    """Machine, versions and date."""
    about = bench["about"]
    rows = {
        "date": about["date"],
        "code": about["code_version"],
        "machine": about["machine"],
        "device": first_run(bench)["device"],
        "runs of each": about["runs"],
        "settings": " ".join(about["overrides"]) or "the preset's",
        **about["versions"],
    }
    return Table(("", "measured with"), [[key, str(value)] for key, value in rows.items()])


if __name__ == "__main__":
    main()
