"""The page of `make bench`: speed and memory of ours, beside TRL and the lower bound.

    python -m reports.speed.bench_page --shapes pythia-14m:32:8 pythia-70m:16:4 --runs 2

measures (`reports/speed/speed.py`) and writes bench.json, bench.md and bench.html to runs/bench/
after each measurement, so that what was measured stays, however this ends; the next call goes on
from it. On a card the page has the card's name, and networks compute in bf16.

The lower bound is the work that an update cannot do without, counted in operations without any
padding, at the rate of a large matrix product in the same call.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from reports.parts import page, updates
from reports.parts.blocks import Block, Heading, Note, Table, Text, slug
from reports.parts.sentences import lead
from reports.parts.words import OURS, PEER, TRL, number, percent, whole
from reports.speed import speed
from reports.speed.speed import Record
from stages.config import config as settings
from stages.config.command_line import add_overrides
from stages.config.config import UserError
from stages.config.faults import Parser, in_one_line
from stages.runs.files import read_record
from stages.runs.signals import Stopped, signals_handled

STEM = "bench"
HALF = "memory.mixed_precision=bf16"


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Measure and write the page."""
    parser = Parser(description="speed and memory, beside TRL")
    parser.add_argument("--shapes", nargs="+", default=[], help="preset:batch:microbatch[:rloo]")
    parser.add_argument("--runs", type=int, default=2, help="of each measurement")
    add_overrides(parser)
    folder = settings.RUNS / STEM
    bench = measured(parser.parse_args(argv), folder)
    html = folder / f"{stem_of(bench['about']['card'])}.html"
    print(page.for_terminal([f"{title(bench)}.", answer(bench)], html))


def measured(args: argparse.Namespace, folder: Path) -> Record:
    """What is measured, written to a folder after each measurement, with its page.

    A signal ends the process with a line that says what was kept.
    """
    if args.runs < 1:
        raise UserError("RUNS must be at least 1")
    card = speed.card_name()
    record, overrides = folder / f"{stem_of(card)}.json", (*[HALF] * bool(card), *args.overrides)
    shapes = args.shapes or (speed.ON_CARD if card else speed.ON_CPU)
    cases = [speed.case_of(shape, overrides) for shape in dict.fromkeys(shapes)]
    before = (read_record(record) or {}).get("made_from", {}).get("measured", {})
    bench: Record = {}
    try:
        with signals_handled("make bench"):
            for bench in speed.measured(cases, args.runs, folder / "work", before):
                write(bench, folder)
    except Stopped as stopped:
        kept = f"{record} holds what was measured" if bench else "nothing was measured"
        print(f"stopped: {kept}; the same command continues from there", file=sys.stderr)
        raise SystemExit(128 + stopped.number) from None
    finally:
        shutil.rmtree(folder / "work", ignore_errors=True)
    return bench


def stem_of(card: str) -> str:
    """The name of the page, which on a card is the card's."""
    return f"{STEM}-{slug(card.lower())}" if card else STEM


def write(bench: Record, folder: Path) -> Path:
    """Write the numbers and the page of them; returns the page's path."""
    about = bench["about"]
    device = f"{about['machine']}: {first_run(bench)['device']}"
    made_from = page.measured_here(list(bench["shapes"]), device, bench)
    return page.write(folder, stem_of(about["card"]), title(bench), blocks(bench), made_from)


# -- figures ---------------------------------------------------------------------------------------


def figures(bench: Record) -> pd.DataFrame:
    """A row for each shape and who was measured at it: numbers of the fastest run; `spread`, the
    slowest run above it; `peak`, the most that any run held; `bound`, seconds over those of the
    necessary matrix products; `share`, these products at the card's peak over the seconds;
    `speedup` and `memory`, over TRL's.
    """
    rows = [
        {"shape": shape, "who": who, "needed": about["measured"][OURS][0]["flops"], **run}
        for shape, about in bench["shapes"].items()
        for who, runs in about["measured"].items()
        for run in runs
        if "failed" not in run
    ]
    every = pd.DataFrame(rows)
    groups = every.groupby(["shape", "who"], sort=False)
    table = every.loc[groups["seconds"].idxmin()].set_index(["shape", "who"])
    table["peak"] = groups["peak"].max()
    spread = groups["seconds"].max() / groups["seconds"].min() - 1
    table["spread"] = spread.where(groups.size() > 1)
    table["bound"] = table["seconds"] * matrix_rate(bench) / table["needed"]
    peak = speed.peak_of(bench["about"]["card"])
    table["share"] = table["needed"] / table["seconds"] / peak
    trl = table[table.index.isin([PEER], level="who")].droplevel("who")
    trl = trl.reindex(list(bench["shapes"]))
    table["speedup"] = 1 / table["seconds"].div(trl["seconds"], level="shape")
    table["memory"] = table["peak"].div(trl["peak"], level="shape")
    return table


def matrix_rate(bench: Record) -> float:
    """Operations per second of a large matrix product, the best that ours saw."""
    runs = (run for shape in bench["shapes"].values() for run in shape["measured"][OURS])
    return max(run["matrix_rate"] for run in runs)


def failures(bench: Record) -> list[str]:
    """What could not be installed or measured, each with its reason."""
    lines = list(bench["about"]["left_out"])
    for name, shape in bench["shapes"].items():
        failed = [run["failed"] for run in shape["measured"].get(PEER, []) if "failed" in run]
        lines += [f"{TRL} at {name}: {reason}" for reason in failed[:1]]
    return lines


def title(bench: Record) -> str:
    """How fast an update of ours is at every shape."""
    table = figures(bench).xs(OURS, level="who")
    if table.speedup.isna().all():
        return f"An update takes {_each(bench, table.bound)} times its lower bound"
    return f"An update is {_each(bench, table.speedup)} times as fast as that of {TRL}"


def answer(bench: Record) -> str:
    """What an update of ours holds beside TRL's, and how far it is from the lower bound."""
    table = figures(bench).xs(OURS, level="who")
    counted = f"{_range(table.bound)} times the seconds of the matrix products that it needs"
    memory = f"It holds {_range(table.memory)} of the memory of {TRL}."
    if table.speedup.isna().all():
        memory = "Nothing stands beside it."
    share = f" It uses {_each(bench, table.share, percent)} of the card's peak in bf16."
    used = share * bool(table.share.notna().all())
    return f"{memory} It takes {counted}.{used} Measured on: {first_run(bench)['device']}."


def first_run(bench: Record) -> Record:
    """The first measurement of ours, which says what it was made on."""
    run: Record = next(iter(bench["shapes"].values()))["measured"][OURS][0]
    return run


def _each(bench: Record, values: pd.Series, form: Any = number) -> str:
    """The number of every shape, with the shape's name."""
    names = (updates.label(bench["shapes"][name]).removeprefix("PPO, ") for name in values.index)
    return ", ".join(f"{form(x)} ({name})" for name, x in zip(names, values, strict=True))


def _range(values: pd.Series) -> str:
    low, high = number(values.min()), number(values.max())
    return str(low) if str(low) == str(high) else f"{low} to {high}"


def blocks(bench: Record) -> list[Block]:
    """The page: the answer, ours beside TRL; folded, every update, how it was measured."""
    return [
        lead(answer(bench)),
        updates.shapes_table(bench, figures(bench)),
        updates.picture(bench, figures(bench)),
        *(Note(failure) for failure in failures(bench)),
        Heading("Every update"),
        updates_table(bench),
        Heading("How it was measured"),
        *(Text(sentence) for sentence in method(bench)),
    ]


def updates_table(bench: Record) -> Table:
    """A row for everybody at every shape: ours beside TRL."""
    rows = [
        [
            updates.label(bench["shapes"][row["shape"]]),
            bench["about"]["peers"].get(row["who"], row["who"]),
            number(row["seconds"]),
            whole(row["tokens"] / row["seconds"]),
            *(number(row[name]) for name in ("speedup", "memory", "bound")),
            number(row["peak"] / 1e9),
            percent(row["spread"]),
        ]
        for row in figures(bench).reset_index().to_dict("records")
    ]
    header = f"update||seconds|tokens/s|speed over {TRL}|memory over {TRL}|seconds over bound|GB"
    caption = (
        "Of the fastest run. GB: the most that any run held above what its process held before the"
        " weights. Spread: the slowest run above the fastest. Episodes, microbatches, epochs and"
        " lengths of queries stand in the page's JSON."
    )
    return Table([*header.split("|"), "spread"], rows, caption, name="updates")


def method(bench: Record) -> list[str]:
    """What the numbers mean, what they leave out, and what they were measured with."""
    about = bench["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    changed = " ".join(about["overrides"]) or "the preset's"
    return [
        "Texts: synthetic token ids with the lengths of real posts. Both implementations get the"
        " same ids in one batch and new weights of the published shape. Every measurement is a"
        " process of its own, ours and TRL's interleaved. Before it comes the smallest update,"
        " which is not counted.",
        f"Lower bound: the operations of all matrix products that an update needs, without"
        f" padding, at {matrix_rate(bench) / 1e9:,.0f} Gflop/s, the rate of a large"
        " matrix product in the same call. See reports/speed/measure.py.",
        f"Measured on {about['date']} with code {about['code_version']},"
        f" {about['runs']} run{'s' * (about['runs'] > 1)} of each, on {about['machine']};"
        f" {versions}; settings: {changed}.",
    ]


if __name__ == "__main__":
    main()
