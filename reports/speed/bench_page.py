"""The page of `make bench`: speed and memory of ours, beside its peers and the lower bound.

    python -m reports.speed.bench_page --shapes pythia-14m:32:8 pythia-70m:16:4 --runs 2

measures (`reports/speed/speed.py`) and writes bench.json, bench.md and bench.html to
runs/bench/. `--check` measures what is published again and compares the ratios; `--publish` copies
what was measured last to reports/generated.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

from reports.needs.work import STEPS
from reports.parts import page
from reports.parts.page import Block, Heading, Note, Table, Text
from reports.parts.words import MISSING, number, whole
from reports.sharing import publish
from reports.speed import speed
from reports.speed.figures import (
    Figures,
    Record,
    best,
    compare,
    failures,
    figures,
    least,
    over_bound,
)
from stages.running.files import file_hash, read_json, write_json
from stages.settings import config as settings
from stages.settings.checks import in_one_line
from stages.settings.config import UserError

STEM = speed.NAME


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Measure and write the page; or check; or publish what was measured last."""
    args = _arguments(argv)
    try:
        if args.publish:
            print(page.for_terminal(["published:"], publish_last()))
        elif args.check:
            check(args)
        else:
            folder = settings.RUNS / STEM
            order = _order(args, speed.cases_of(args.shapes))
            path = write(speed.measure_in(order, folder), folder)
            print(page.for_terminal(conclusions(read_json(folder / "bench.json")), path))
    except KeyboardInterrupt:
        print("stopped: nothing was written; the same command begins again")
        raise SystemExit(130) from None


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="speed and memory, beside other implementations")
    parser.add_argument("--shapes", nargs="+", default=[], help="preset:batch:microbatch")
    parser.add_argument("--runs", type=int, default=2, help="of each measurement")
    parser.add_argument("--data", default="", help="folder of posts; else synthetic tokens")
    parser.add_argument("--tokenizer", default="", help="tokenizer folder or hub id")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--check", action="store_true", help="compare with what is published")
    parser.add_argument("--publish", action="store_true", help="publish what was measured last")
    return parser.parse_args(argv)


def _order(args: argparse.Namespace, cases: tuple[speed.Case, ...]) -> speed.BenchRequest:
    if args.runs < 1 or not cases:
        raise UserError("RUNS must be at least 1, and SHAPES name at least one shape")
    return speed.BenchRequest(
        cases=cases,
        runs=args.runs,
        data=args.data,
        tokenizer=args.tokenizer,
        overrides=tuple(args.overrides),
    )


def write(bench: Record, folder: Path) -> Path:
    """Write the numbers and the page of them; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{STEM}.json", bench)
    peers = " and ".join(bench["about"]["peers"].values())
    title = f"Speed and memory, beside {peers}" if peers else "Speed and memory"
    return page.write(folder, STEM, title, blocks(bench))


# -- the check, and publishing ---------------------------------------------------------------------


def check(args: argparse.Namespace) -> None:
    """Measure the published shapes again. Raises UserError if a ratio is worse than allowed."""
    published = read_json(publish.GENERATED / f"{STEM}.json")
    if published is None:
        raise UserError("no bench is published: run `make bench`, then `make publish NAME=bench`")
    args.overrides = args.overrides or published["about"]["overrides"]
    order = _order(args, speed.cases_of(list(published["shapes"])))
    folder = settings.RUNS / f"{STEM}-check"
    now = speed.measure_in(order, folder)
    write(now, folder)
    if now["about"]["texts"] != published["about"]["texts"]:
        raise UserError(f"published was measured on {published['about']['texts']}: change DATA=")
    lines, worse = compare(published, now)
    print("\n".join([*lines, *failures(now)]))
    if worse:
        raise UserError(f"{len(worse)} of {len(lines)} ratios are worse than published allows")


def publish_last() -> Path:
    """Copy the last page and its numbers to reports/generated, and record them.

    Raises UserError if there is none, or if the code was not committed.
    """
    folder = settings.RUNS / STEM
    bench = read_json(folder / f"{STEM}.json")
    if bench is None:
        raise UserError("nothing was measured yet: run `make bench`")
    about = bench["about"]
    if about["code_version"].endswith(publish.DIRTY):
        raise UserError("the bench was measured with code that was not committed: run it again")
    publish.GENERATED.mkdir(parents=True, exist_ok=True)
    written = page.files_of(folder, STEM)
    names = [*(str(path.relative_to(folder)) for path in written), f"{STEM}.json"]
    for name in names:
        (publish.GENERATED / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / name, publish.GENERATED / name)
    record = read_json(publish.GENERATED / publish.RECORD) or {"pages": {}}
    entry = {
        "kind": STEM,
        "about": list(bench["shapes"]),
        "code_versions": [about["code_version"]],
        "finished": about["date"],
        "devices": [f"{about['machine']}: {about['device']}"],
        "versions": about["versions"],
        "files": {name: file_hash(publish.GENERATED / name) for name in names},
        "manifests": {},
        "numbers": {},
        "headline": "",
    }
    publish.write_record(record | {"pages": {**record["pages"], STEM: entry}})
    return publish.GENERATED / f"{STEM}.html"


# -- the page --------------------------------------------------------------------------------------


def conclusions(bench: Record) -> list[str]:
    """How ours did at each shape, in plain words."""
    sentences = []
    for name, shape in bench["shapes"].items():
        ours, *peers = figures(bench, name)
        beside = "".join(
            f" {number(peer.seconds / ours.seconds, 2)} times the episodes a second of"
            f" {peer.label}, in {number(ours.peak / peer.peak, 2)} of its memory;"
            for peer in peers
        )
        sentences.append(
            f"{_stage(shape)} at the shape of {shape['preset']}: ours makes"
            f" {number(ours.episodes, 2)} episodes a second:{beside} {number(ours.above, 2)} times"
            f" the seconds that counting gives (learning alone {number(ours.learning_above, 2)})."
        )
    return sentences


def blocks(bench: Record) -> list[Block]:
    """The page: conclusions, each shape, the other stages, how it was measured."""
    first, *others = conclusions(bench)
    tables = [part for name in bench["shapes"] for part in shape_blocks(bench, name)]
    return [
        Text(first, lead=True),
        *(Text(sentence) for sentence in others),
        *(Note(failure) for failure in failures(bench)),
        *tables,
        Heading("SFT, reward model and DPO"),
        *stages_tables(bench),
        Heading("How it was measured"),
        *(Text(sentence) for sentence in method(bench)),
        machine_table(bench["about"]),
    ]


def shape_blocks(bench: Record, name: str) -> list[Block]:
    """One shape: everybody's seconds, steps and memory, and the lower bound."""
    shape, rate = bench["shapes"][name], bench["about"]["matrix_rate"]
    everybody = figures(bench, name)
    ours, bounds = everybody[0], least(shape, rate)
    queries = shape["measured"][speed.OURS][0]["queries"]
    floor = shape["measured"][speed.OURS][0]["floor"]
    caption = (
        f"One update: {shape['batch']} episodes{_samples(shape)} in microbatches of"
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
    rows.append(["lower bound", *by_counting, MISSING, *cells, _gb(floor), "1.00"])
    table = Table(header.split("|"), rows, caption, strong=True)
    return [Heading(f"One update of {_stage(shape)}, {shape['preset']}"), table]


def _samples(shape: Record) -> str:
    group = shape.get("samples_per_query", 1)
    return f", {group} samples of a query," if group > 1 else ""


def _stage(shape: Record) -> str:
    return speed.LABELS[shape.get("stage", speed.PPO)]


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


def stages_tables(bench: Record) -> list[Block]:
    """An optimizer step of each of the other stages."""
    tables: list[Block] = []
    for name, steps in bench["stages"].items():
        rows = []
        for step, runs in steps.items():
            fastest, spread = best(runs)
            speed_cells = [whole(fastest["tokens"]), number(fastest["seconds"], 2)]
            rate = whole(fastest["tokens"] / fastest["seconds"])
            over = number(over_bound(fastest, bench["about"]["matrix_rate"]), 2)
            peak = _gb(max(run["peak"] for run in runs))
            rows.append([step, *speed_cells, f"{100 * spread:.1f}%", rate, peak, over])
        preset = bench["shapes"][name]["preset"]
        caption = (
            f"{preset}: three microbatches of typical rows; the peak is of a step on the longest."
        )
        header = ("", "tokens", "seconds", "spread", "tokens/s", "GB", "over the bound")
        tables.append(Table(header, rows, caption))
    return tables


def method(bench: Record) -> list[str]:
    """What the numbers mean, and what they leave out."""
    about = bench["about"]
    return [
        f"Texts: {about['texts']}; all implementations get the same token ids in one batch and new"
        " weights of the published shape. Every measurement is a process of its own, ours and the"
        " others interleaved. Before it comes the smallest update, which is not counted.",
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
