"""The page of `make bench`: speed and memory of ours, beside its peers and the lower bound.

    python -m reports.speed.bench_page --shapes pythia-14m:32:8 pythia-70m:16:4 --runs 2

measures (`reports/speed/speed.py`) and writes bench.json, bench.md and bench.html to
runs/bench/. `--check` measures what is published again and compares the ratios.

The lower bound is the work that an update cannot do without, counted in operations without any
padding, at the rate of a large matrix product in the same call.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.needs.work import STEPS
from reports.parts import page
from reports.parts.page import Block, Heading, Note, Table, Text
from reports.parts.words import MISSING, number, whole
from reports.sharing import publish
from reports.speed import speed
from reports.speed.speed import OURS
from stages.settings import config as settings
from stages.settings.checks import Parser, in_one_line
from stages.settings.command_line import add_overrides
from stages.settings.config import UserError

STEM = speed.NAME
Record = dict[str, Any]
SLOWER, LARGER = 0.15, 0.02  # what a check allows in time and in memory, as shares


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Measure and write the page, or check."""
    parser = Parser(description="speed and memory, beside other implementations")
    parser.add_argument("--shapes", nargs="+", default=[], help="preset:batch:microbatch")
    parser.add_argument("--runs", type=int, default=2, help="of each measurement")
    add_overrides(parser)
    parser.add_argument("--check", action="store_true", help="compare with what is published")
    args = parser.parse_args(argv)
    try:
        if args.check:
            check(args)
        else:
            folder = settings.RUNS / STEM
            bench = _measured(args, args.shapes, folder)
            print(page.for_terminal([answer(bench)], folder / f"{STEM}.html"))
    except KeyboardInterrupt:
        print("stopped: nothing was written; the same command begins again")
        raise SystemExit(130) from None


def _measured(args: argparse.Namespace, shapes: Sequence[str], folder: Path) -> Record:
    """What is measured of some shapes; its page is written to a folder."""
    if args.runs < 1 or not shapes:
        raise UserError("RUNS must be at least 1, and SHAPES name at least one shape")
    order = speed.BenchRequest(
        cases=tuple(speed.case_of(shape) for shape in dict.fromkeys(shapes)),
        runs=args.runs,
        overrides=tuple(args.overrides),
    )
    bench = speed.measure_in(order, folder)
    write(bench, folder)
    return bench


def write(bench: Record, folder: Path) -> Path:
    """Write the numbers and the page of them; returns the page's path."""
    about = bench["about"]
    peers = " and ".join(about["peers"].values())
    title = f"Speed and memory, beside {peers}" if peers else "Speed and memory"
    made_from = {
        "kind": STEM,
        "names": list(bench["shapes"]),
        "judges": [],
        "code_versions": [about["code_version"]],
        "finished": about["date"],
        "devices": [f"{about['machine']}: {about['device']}"],
        "versions": about["versions"],
        "stages": {},
        "measured": bench,
    }
    return page.write(folder, STEM, title, blocks(bench), made_from)


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


def ratios(bench: Record) -> dict[str, tuple[float, float]]:
    """Every ratio that a check compares, by its name, and the share by which it may grow: numbers
    that should not depend on the machine, of which larger is worse.
    """
    made: dict[str, tuple[float, float]] = {}
    for name in bench["shapes"]:
        ours, *peers = figures(bench, name)
        made[f"{name}: time over the bound"] = ours.above, SLOWER
        made[f"{name}: learning over the bound"] = ours.learning_above, SLOWER
        for peer in peers:
            made[f"{name}: time over {peer.label}"] = ours.seconds / peer.seconds, SLOWER
            made[f"{name}: memory over {peer.label}"] = ours.peak / peer.peak, LARGER
    return made


def compare(published: Record, now: Record) -> tuple[list[str], list[str]]:
    """A line on every published ratio, and those lines again that are worse than allowed."""
    after = ratios(now)
    lines, worse = [], []
    for name, (before, allowed) in ratios(published).items():
        line, change = f"{name}: {before:.2f} published, ", math.inf
        if name in after:
            change = after[name][0] / before - 1
            line += f"{after[name][0]:.2f} now ({change:+.0%}, allowed {allowed:+.0%})"
        else:
            line += "not measured now"
        lines.append(line)
        worse += [line] if change > allowed else []
    return lines, worse


# -- figures ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One implementation at one shape; times of its fastest run."""

    label: str
    seconds: float
    spread: float
    """The slowest run above the fastest, as a share of it."""
    steps: dict[str, float]
    """Seconds."""
    episodes: float
    """A second."""
    tokens: float
    """A second, of queries and responses; each token counts once."""
    peak: float
    """The most that any run held, bytes."""
    above: float
    """Times the lower bound."""
    learning_above: float
    """Learning alone, times the lower bound of learning."""


def best(runs: Sequence[Record]) -> tuple[Record, float]:
    """The fastest run, and the spread of all of them."""
    fastest = min(runs, key=lambda run: run["seconds"])
    slowest = max(run["seconds"] for run in runs)
    return fastest, slowest / fastest["seconds"] - 1


def least(shape: Record, rate: float) -> dict[str, float]:
    """The lower bound of a shape's update: seconds of the counted work, by steps, and `all`."""
    flops = shape["measured"][OURS][0]["flops"]
    seconds = {step: flops[step] / rate for step in STEPS}
    return seconds | {"all": sum(seconds.values())}


def figures(bench: Record, name: str) -> list[Figures]:
    """Ours and every peer that was measured at a shape, ours first."""
    shape, about = bench["shapes"][name], bench["about"]
    bounds = least(shape, about["matrix_rate"])
    made = []
    for key, label in {OURS: OURS, **about["peers"]}.items():
        runs = [run for run in shape["measured"].get(key, []) if "failed" not in run]
        if not runs:
            continue
        fastest, spread = best(runs)
        made.append(
            Figures(
                label=label,
                seconds=fastest["seconds"],
                spread=spread,
                steps={step: fastest[step] for step in STEPS},
                episodes=shape["batch"] / fastest["seconds"],
                tokens=fastest["tokens"] / fastest["seconds"],
                peak=max(run["peak"] for run in runs),
                above=fastest["seconds"] / bounds["all"],
                learning_above=fastest["learn"] / bounds["learn"],
            )
        )
    return made


def failures(bench: Record) -> list[str]:
    """Peers that could not be installed, and measurements of peers that failed."""
    lines, labels = list(bench["about"]["left_out"]), bench["about"]["peers"]
    for name, shape in bench["shapes"].items():
        for key, runs in shape["measured"].items():
            failed = [run["failed"] for run in runs if "failed" in run]
            lines += [f"{labels[key]} at {name}: {reason}" for reason in failed[:1]]
    return lines


# -- the page --------------------------------------------------------------------------------------


def answer(bench: Record) -> str:
    """How ours did in all updates together."""
    everybody = [figures(bench, name) for name in bench["shapes"]]
    above = _range([ours.above for ours, *_ in everybody])
    counted = f"Ours takes {above} times the seconds of the matrix products that an update needs"
    pairs = [(ours, peer) for ours, *peers in everybody for peer in peers]
    if not pairs:
        return f"{counted}; nothing stands beside it."
    faster = _range([peer.seconds / ours.seconds for ours, peer in pairs])
    smaller = _range([ours.peak / peer.peak for ours, peer in pairs])
    return (
        f"Ours makes {faster} times the episodes a second of {pairs[0][1].label}, in {smaller} of"
        f" its memory. {counted}. Measured on: {bench['about']['device']}."
    )


def _range(values: Sequence[float]) -> str:
    low, high = number(min(values), 2), number(max(values), 2)
    return low if low == high else f"{low} to {high}"


def overview(bench: Record) -> Table:
    """A row a shape: ours beside each peer, and beside the lower bound."""
    labels, rows = list(bench["about"]["peers"].values()), []
    for name, shape in bench["shapes"].items():
        ours, *others = figures(bench, name)
        peers = {peer.label: peer for peer in others}
        beside = [cell for label in labels for cell in _peer_cells(ours, peers.get(label))]
        bounds = [number(ours.above, 2), number(ours.learning_above, 2)]
        what = f"{_stage(shape)}, {shape['preset']}"
        rows.append([what, number(ours.episodes, 2), *beside, *bounds])
    header = ["update", "ours, episodes/s"]
    for label in labels:
        header += [f"{label}, episodes/s", "times", "of its memory"]
    header += ["over the bound", "learning alone"]
    caption = (
        "Of the fastest run of each. Times: episodes a second, ours over theirs; of its memory: the"
        " most that ours held over the most that theirs held. Over the bound: seconds over those of"
        " the matrix products that an update needs; learning alone: the same of that part."
    )
    return Table(header, rows, caption, strong=True, name="updates")


def _peer_cells(ours: Figures, peer: Figures | None) -> list[str]:
    if peer is None:
        return [MISSING] * 3
    faster, smaller = peer.seconds / ours.seconds, ours.peak / peer.peak
    return [number(x, 2) for x in (peer.episodes, faster, smaller)]


def blocks(bench: Record) -> list[Block]:
    """The page: the answer, each shape, how it was measured."""
    return [
        Text(answer(bench), lead=True),
        overview(bench),
        *(Note(failure) for failure in failures(bench)),
        *(part for name in bench["shapes"] for part in shape_blocks(bench, name)),
        Heading("How it was measured"),
        *(Text(sentence) for sentence in method(bench)),
        machine_table(bench["about"]),
    ]


def shape_blocks(bench: Record, name: str) -> list[Block]:
    """One shape: everybody's seconds, steps and memory, and the lower bound."""
    shape, rate = bench["shapes"][name], bench["about"]["matrix_rate"]
    everybody = figures(bench, name)
    ours, bounds = everybody[0], least(shape, rate)
    first, group = shape["measured"][OURS][0], shape["samples_per_query"]
    queries, samples = first["queries"], f", {group} samples of a query," if group > 1 else ""
    caption = (
        f"One update: {shape['batch']} episodes{samples} in microbatches of"
        f" {shape['microbatch']}, queries of {whole(queries['mean'])} tokens on average and"
        f" {queries['longest']} at most,"
        f" {shape['response']} sampled tokens, {shape['epochs']} epochs;"
        f" {shape['parameters'] / 1e6:.1f} million parameters. Seconds of the fastest of"
        f" {bench['about']['runs']} runs; spread: the slowest run above it. Memory: the most that"
        " any run held above what its process held before the weights."
    )
    header = "|episodes/s|tokens/s|seconds|spread|sample|measure|score|learn|GB|over the bound"
    rows = [_row(figure) for figure in everybody]
    rows += [_beside(ours, peer) for peer in everybody[1:]]
    cells = [number(bounds[step], 2) for step in STEPS]
    by_counting = [number(shape["batch"] / bounds["all"], 2), MISSING, number(bounds["all"], 2)]
    rows.append(["lower bound", *by_counting, MISSING, *cells, _gb(first["floor"]), "1.00"])
    table = Table(header.split("|"), rows, caption, strong=True)
    return [Heading(f"One update of {_stage(shape)}, {shape['preset']}"), table]


def _stage(shape: Record) -> str:
    return speed.LABELS[shape["stage"]]


def _row(figure: Figures) -> list[str]:
    steps = [number(figure.steps[step], 2) for step in STEPS]
    rates = [number(figure.episodes, 2), whole(figure.tokens), number(figure.seconds, 2)]
    last = [_gb(figure.peak), number(figure.above, 2)]
    return [figure.label, *rates, f"{100 * figure.spread:.1f}%", *steps, *last]


def _beside(ours: Figures, peer: Figures) -> list[str]:
    pairs = [(ours.episodes, peer.episodes), (ours.tokens, peer.tokens)]
    seconds = (ours.seconds, peer.seconds)
    steps = [(ours.steps[step], peer.steps[step]) for step in STEPS]
    cells = [number(a / b, 2) for a, b in (*pairs, seconds)]
    cells += [MISSING, *(number(a / b, 2) if b else MISSING for a, b in steps)]
    return [f"ours / {peer.label}", *cells, number(ours.peak / peer.peak, 2), MISSING]


def _gb(size: float) -> str:
    return number(size / 1e9, 2)


def method(bench: Record) -> list[str]:
    """What the numbers mean, and what they leave out."""
    about = bench["about"]
    return [
        "Texts: synthetic token ids with the lengths of real posts. All implementations get the"
        " same ids in one batch and new weights of the published shape. Every measurement is a"
        " process of its own, ours and the others interleaved. Before it comes the smallest update,"
        " which is not counted.",
        "sample: drawing the responses. measure: log-probabilities (TRL takes the policy's from"
        " sampling and measures the reference policy alone). score: reward model and critic."
        " learn: all epochs, both networks.",
        f"Lower bound: the operations of all matrix products that an update needs, without"
        f" padding, at {about['matrix_rate'] / 1e9:,.0f} Gflop/s, the rate of a large matrix"
        " product in the same call. Its memory: weights, gradients, the optimizer's moments, and"
        " one network's activations of one microbatch. See reports/needs/work.py.",
    ]


def machine_table(about: dict[str, Any]) -> Table:
    """Machine, versions and date."""
    settings_of = " ".join(about["overrides"]) or "the preset's"
    rows = [
        ("date", about["date"]),
        ("code", about["code_version"]),
        ("machine", about["machine"]),
        ("device", about["device"]),
        ("settings", settings_of),
        *about["versions"].items(),
        *(("beside", label) for label in about["peers"].values()),
    ]
    return Table(("", "measured with"), [list(map(str, row)) for row in rows])


if __name__ == "__main__":
    main()
