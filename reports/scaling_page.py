"""Model sizes side by side, and beside the paper: does RLHF work better with a larger model?

    python -m reports.scaling_page --names tiny-s tiny tiny-l

takes all finished seeds of these runs and writes runs/reports/scaling-<names>.md and .html.
Each seed's point and interval is shown beside the mean over seeds. The page checks, against what
the runs recorded, that the sizes differ in nothing but the base model.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pandas as pd

from eval.rates.formulas import mean_of_seeds
from reports import page, paper, plots, verdict
from reports.collect import MEMORY_KNOBS, Record, differing_settings, find_runs, note_sources, table
from reports.page import Block, Details, Figure, Heading, Note, Table, Text
from reports.sections import made_with
from reports.verdict import number, percent
from stages.settings.config import UserError, fail

# What may differ between sizes: the base model itself, and how batches are cut.
BASE = ("base.checkpoint", "base.hidden_size", "base.num_layers", "base.num_heads")
FREE = (*MEMORY_KNOBS, *BASE)
MEASURED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("accuracy", "RM accuracy", percent),
    ("sft/win_rate", "SFT win rate", percent),
    ("ppo/win_rate", "PPO win rate", percent),
    ("difference", "PPO - SFT", percent),
    ("kl", "KL", partial(number, digits=1)),
    ("ppo/tokens", "PPO tokens", partial(number, digits=1)),
    ("sft/rougeL", "SFT ROUGE-L", partial(number, digits=3)),
    ("ppo/rougeL", "PPO ROUGE-L", partial(number, digits=3)),
    ("sft/controlled", "SFT at equal length", percent),
    ("ppo/controlled", "PPO at equal length", percent),
)
# What should rise with size, most important first -> its name and its interval's columns.
CLAIMS = {
    "ppo/win_rate": ("The win rate of PPO", "ppo/low", "ppo/high"),
    "sft/win_rate": ("The win rate of SFT", "sft/low", "sft/high"),
    "accuracy": ("The reward model's accuracy", "accuracy_low", "accuracy_high"),
    "difference": ("What PPO adds to SFT", "difference_low", "difference_high"),
}


def main(argv: list[str] | None = None) -> None:
    """Write the comparison and print its verdict."""
    parser = argparse.ArgumentParser(description="compare model sizes")
    parser.add_argument("--names", nargs="+", required=True, help="runs, one a size")
    parser.add_argument("--title", default="", help="names the page; default: the runs' names")
    parser.add_argument("--judge", default="", help="where runs were judged by several")
    args = parser.parse_args(argv)
    try:
        records, left_out = collect(args.names, args.judge)
    except UserError as error:
        fail(error)
    title = args.title or "-".join(args.names)
    stem = "scaling-" + re.sub(r"[^A-Za-z0-9.-]+", "-", title.lower()).strip("-")
    heading = args.title or f"Sizes side by side: {', '.join(args.names)}"
    path = page.write(page.beside_the_runs(), stem, heading, blocks(records, left_out))
    note_sources(path, "scaling", args.names, records)
    print(page.for_terminal(conclusions(table(records)), path))


def collect(names: Sequence[str], judge: str = "") -> tuple[list[Record], list[str]]:
    """All finished seeds of the runs, and a line on each that is not."""
    found = [find_runs(name, judge) for name in dict.fromkeys(names)]
    return [one for runs, _ in found for one in runs], [line for _, out in found for line in out]


def blocks(records: list[Record], left_out: Sequence[str] = ()) -> list[Block]:
    """The page: verdict, means over seeds, plots, each seed, the paper, what differs."""
    frame = table(records)
    first, *others = conclusions(frame)
    return [
        Text(first, lead=True),
        *(Text(one) for one in others),
        *(Note(note) for note in (*caveats(frame), *alike(records, frame), *left_out)),
        Heading("Means over seeds"),
        means_table(frame),
        spreads_table(frame),
        plot(frame),
        Heading("Each seed"),
        seeds_table(frame),
        *_beside_the_paper(frame),
        Heading("What differs between the sizes"),
        Text(_checked(records)),
    ]


def sizes(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The runs and their seeds, from the smallest model to the largest."""
    groups = [(str(name), seeds) for name, seeds in frame.groupby("name", sort=False)]
    return sorted(groups, key=lambda group: group[1]["parameters"].iloc[0])


def means(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Run -> mean over its seeds of every number that is compared."""
    columns = {"parameters", *(key for key, _, _ in MEASURED), *(k for _, k, _ in paper.COMPARED)}
    return {name: dict(seeds[sorted(columns)].mean()) for name, seeds in sizes(frame)}


def conclusions(frame: pd.DataFrame) -> list[str]:
    """What the sizes say, in plain words."""
    if len(sizes(frame)) < 2:
        return ["There is one size only, which says nothing about growing with size."]
    return [conclusion(frame, key) for key in CLAIMS]


def conclusion(frame: pd.DataFrame, key: str) -> str:
    """Whether one number rises with size, and whether the intervals can tell.

    The range of a size reaches from the lowest to the highest end of its seeds' 95% intervals, so
    that it holds both the posts' and the seeds' spread.
    """
    what, low, high = CLAIMS[key]
    without = [name for name, seeds in sizes(frame) if seeds[key].isna().any()]
    if without:
        names = ", ".join(without)
        return f"{what} is not compared: a seed of {names} has too many posts without a verdict."
    values = [seeds[key].mean() for _, seeds in sizes(frame)]
    ranges = [(seeds[low].min(), seeds[high].max()) for _, seeds in sizes(frame)]
    path = " to ".join(percent(value) for value in values)
    shown = [round(value, 3) for value in values]
    apart = ranges[-1][0] > ranges[0][1] or ranges[-1][1] < ranges[0][0]
    doubt = "do not overlap" if apart else "overlap, so the rise is not established"
    if all(later > earlier for earlier, later in pairwise(shown)):
        trend = "rises with every step in size"
    elif shown[-1] > shown[0]:
        trend = "is higher for the largest size than for the smallest, but not at every step"
    else:
        trend, doubt = "does NOT rise with size", "do not overlap" if apart else "overlap"
    ends = f"{verdict.interval(*ranges[0])} and {verdict.interval(*ranges[-1])}"
    return f"{what} {trend} ({path}); the ranges of the smallest and the largest, {ends}, {doubt}."


def caveats(frame: pd.DataFrame) -> list[str]:
    """What to hold against the comparison."""
    rows = frame.to_dict("records")
    notes = [verdict.judge_note({str(key): value for key, value in row.items()}) for row in rows]
    flags = [verdict.judge_flags({str(k): value for k, value in row.items()}) for row in rows]
    found = list(dict.fromkeys(note for note in (*flags, *notes) if note))
    if not frame["pretrained"].all():
        found.append(
            "Models without pretraining are among these: this is a test of the pipeline, not of"
            " the paper's claim."
        )
    few = [name for name, seeds in sizes(frame) if len(seeds) < 2]
    if few:
        found.append(f"One seed only: {', '.join(few)}. How much seeds differ there is unknown.")
    for row in rows:
        one = {str(key): value for key, value in row.items()}
        found += [f"{row['name']} seed {row['seed']}: {said}" for said in verdict.unjudged(one)]
    return found


def alike(records: list[Record], frame: pd.DataFrame) -> list[str]:
    """A warning for each way in which the sizes differ but should not."""
    different = differing_settings(records, FREE)
    found = [
        f"The sizes are NOT alike: {name} differs ({' / '.join(values)})."
        for name, values in different.items()
    ]
    for column, what in (("judge", "The judge"), ("posts", "The number of posts judged")):
        if frame[column].nunique() > 1:
            values = " / ".join(str(one) for one in frame[column].unique())
            found.append(f"{what} differs between the runs ({values}).")
    if len({frozenset(seeds["seed"]) for _, seeds in sizes(frame)}) > 1:
        found.append("The sizes were run with different seeds.")
    return found


def _checked(records: list[Record]) -> str:
    different = differing_settings(records, FREE)
    code = sorted({one["code_version"] for record in records for one in record.manifests.values()})
    checked = (
        f"{', '.join(different)}: see the notes above."
        if different
        else "nothing but the base model and how batches are cut to fit memory (and the seed)."
    )
    return (
        f"Checked against the settings that the {len(records)} runs recorded, the sizes differ in"
        f" {checked} Code versions: {', '.join(code)}. {made_with.where(records)}"
    )


def means_table(frame: pd.DataFrame) -> Table:
    """A column a size: the mean over seeds, and the lowest and highest seed."""
    groups = sizes(frame)
    rows = [
        ["parameters", *(plots.count(seeds["parameters"].iloc[0]) for _, seeds in groups)],
        ["seeds", *(str(len(seeds)) for _, seeds in groups)],
    ]
    for key, title, form in MEASURED:
        rows.append([title, *(_spread(seeds[key].dropna().tolist(), form) for _, seeds in groups)])
    caption = "Mean over seeds; in brackets the lowest and the highest seed."
    return Table(["", *(name for name, _ in groups)], rows, caption, strong=True)


def spreads_table(frame: pd.DataFrame) -> Table:
    """The spread of win rates over seeds and over posts, apart: these are two kinds of doubt."""
    rows = []
    for name, seeds in sizes(frame):
        for policy in _policies(frame):
            if seeds[f"{policy}/unjudged"].isna().all():
                continue  # this run has no such policy
            given = seeds.dropna(subset=[f"{policy}/win_rate"])
            values = given[f"{policy}/win_rate"].tolist()
            halves = (given[f"{policy}/high"] - given[f"{policy}/low"]) / 2
            bounds = mean_of_seeds(values)
            rows.append(
                [
                    name,
                    policy.upper(),
                    str(len(values)),
                    percent(given[f"{policy}/win_rate"].mean()),
                    _within_limits(bounds) if bounds else verdict.MISSING,
                    percent(given[f"{policy}/win_rate"].std()),
                    percent(halves.mean()),
                ]
            )
    header = "run|policy|seeds|win rate|95% over seeds|spread of seeds|of posts, 95% half-width"
    caption = (
        "Over seeds: Student's t interval of the mean, and the seeds' standard deviation. Over"
        " posts: half the width of a seed's own 95% interval, on average. Neither holds the other."
    )
    return Table(header.split("|"), rows, caption)


def _policies(frame: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(one for found in frame["policies"] for one in found))


def _within_limits(bounds: tuple[float, float]) -> str:
    return verdict.interval(max(0.0, bounds[0]), min(1.0, bounds[1]))


def _spread(values: list[float], form: Callable[[float], str]) -> str:
    if not values:
        return verdict.MISSING
    mean = form(sum(values) / len(values))
    return mean if len(values) < 2 else f"{mean} ({form(min(values))} to {form(max(values))})"


def seeds_table(frame: pd.DataFrame) -> Table:
    """One row a seed, with its intervals."""
    rows = []
    for name, seeds in sizes(frame):
        for values in seeds.sort_values("seed").to_dict("records"):
            one = {str(key): value for key, value in values.items()}
            inside = verdict.interval(one["accuracy_low"], one["accuracy_high"])
            rates = [verdict.rate(one, policy) for policy in ("sft", "ppo")]
            accuracy = f"{percent(one['accuracy'])} {inside}"
            numbers = [verdict.points(one), number(one["kl"], 1), number(one["ppo/tokens"], 1)]
            rows.append([name, str(one["seed"]), accuracy, *rates, *numbers])
    header = ["run", "seed", *(title for _, title, _ in MEASURED[:6])]
    return Table(header, rows, "In brackets: 95% intervals over the posts, or the pairs.")


def plot(frame: pd.DataFrame) -> Figure:
    """Win rates and accuracy over parameters."""
    panels = [
        plots.over_sizes(
            "Win rate against the reference",
            [
                _series(frame, "sft/win_rate", "SFT", plots.SFT),
                _series(frame, "ppo/win_rate", "PPO", plots.PPO),
            ],
            even=0.5,
        ),
        plots.over_sizes(
            "Reward model's accuracy", [_series(frame, "accuracy", "reward model", plots.RM)]
        ),
    ]
    caption = (
        "A dot is a seed, its bar the 95% interval over posts (or pairs); the line goes through"
        " the means of the seeds. Dashed: even with the reference."
    )
    parts = [plots.alone(panel, f"sizes{i}", 1.3, 1.3) for i, panel in enumerate(panels)]
    return Figure("sizes", caption, plots.together(panels, 1.3, 1.3), parts)


def _series(frame: pd.DataFrame, key: str, label: str, color: str) -> dict[str, Any]:
    _, low, high = CLAIMS[key]
    columns = [frame[name].tolist() for name in ("parameters", key, low, high)]
    averages = [(values["parameters"], values[key]) for values in means(frame).values()]
    points = list(zip(*columns, strict=True))
    return {"label": label, "color": color, "points": points, "means": averages}


def _beside_the_paper(frame: pd.DataFrame) -> list[Block]:
    title = Heading("Beside the paper")
    if not all(paper.is_comparable(preset) for preset in frame["preset"]):
        return [title, Text("The paper's numbers are not comparable with these presets.")]
    header, rows = paper.beside(means(frame))
    labels = Details(
        "How far to trust the paper's numbers", [Table(("label", "meaning"), paper.labels())]
    )
    return [title, Table(header, rows, paper.caption()), labels]


if __name__ == "__main__":
    main()
