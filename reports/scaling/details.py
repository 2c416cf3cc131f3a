"""The blocks below the first screen: growth, fits, the paper, all numbers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pandas as pd

from eval.rates.formulas import mean_of_seeds
from reports.parts import paper, plots, words
from reports.parts.cells import MISSING, Number
from reports.parts.page import Block, Details, Heading, Table, Text
from reports.parts.words import number, percent
from reports.scaling import beside_paper
from reports.scaling.beside_paper import NOT_COMPARABLE, PaperNumber
from reports.scaling.measures import Fit, fit, given, parameters_of, policies, rows_of, sizes

Form = Callable[[float | None], Number]
one_digit, three_digits = partial(number, digits=1), partial(number, digits=3)


def in_points(value: float | None) -> Number:
    """A difference of two shares, in points."""
    return MISSING if value is None or value != value else words.points(value)


# What should rise with size, most important first -> its name, its interval's columns, its form.
CLAIMS: dict[str, tuple[str, str, str, Form]] = {
    "ppo/win_rate": ("The win rate of PPO", "ppo/low", "ppo/high", percent),
    "sft/win_rate": ("The win rate of SFT", "sft/low", "sft/high", percent),
    "accuracy": ("The reward model's accuracy", "accuracy_low", "accuracy_high", percent),
    "difference": ("What PPO adds to SFT", "difference_low", "difference_high", in_points),
}
MEASURED: tuple[tuple[str, str, Form], ...] = (
    ("accuracy", "RM accuracy", percent),
    ("longer", "accuracy of taking the longer summary", percent),
    ("difference", "PPO - SFT", in_points),
    ("kl", "KL of PPO from SFT, nats per summary", one_digit),
    ("scores", "score while PPO ended", number),
    ("sft_loss", "SFT validation loss, nats a token", three_digits),
    ("reference/tokens", "reference tokens", one_digit),
)
OF_POLICIES: tuple[tuple[str, str, Form], ...] = (
    ("win_rate", "win rate", percent),
    ("controlled", "at equal length", percent),
    ("rm_agrees", "the reward model agrees with the judge", percent),
    ("rougeL", "ROUGE-L", three_digits),
    ("tokens", "tokens", one_digit),
    ("score", "score of held-out summaries", number),
    ("eos_rate", "summaries that end by themselves", percent),
    ("copied", "words of the title that are copied", percent),
)
FITTED: tuple[tuple[str, str, bool], ...] = (
    ("ppo/win_rate", "PPO win rate", False),
    ("sft/win_rate", "SFT win rate", False),
    ("accuracy", "RM accuracy", False),
    ("difference", "PPO - SFT", False),
    ("sft_loss", "SFT validation loss (power law)", True),
)


def conclusions(frame: pd.DataFrame) -> list[str]:
    """What the sizes say of growing, in plain words."""
    return [conclusion(frame, key) for key in CLAIMS]


def conclusion(frame: pd.DataFrame, key: str) -> str:
    """Whether one number rises with size, and whether the intervals can tell.

    The range of a size reaches from the lowest to the highest end of its seeds' 95% intervals, so
    that it holds both the posts' and the seeds' spread.
    """
    what, low, high, form = CLAIMS[key]
    without = [name for name, seeds in sizes(frame) if seeds[key].isna().any()]
    if without:
        names = ", ".join(without)
        return f"{what} is not compared: a seed of {names} has too many posts without a verdict."
    values = [seeds[key].mean() for _, seeds in sizes(frame)]
    ranges = [(seeds[low].min(), seeds[high].max()) for _, seeds in sizes(frame)]
    path = " to ".join(str(form(value)) for value in values)
    shown = [round(value, 3) for value in values]
    apart = ranges[-1][0] > ranges[0][1] or ranges[-1][1] < ranges[0][0]
    doubt = "do not overlap" if apart else "overlap, which establishes no rise by itself"
    if all(later > earlier for earlier, later in pairwise(shown)):
        trend = "rises with every step in size"
    elif shown[-1] > shown[0]:
        trend = (
            "is higher for the largest size than for the smallest, though it does not rise at"
            " every step"
        )
    else:
        trend, doubt = "does NOT rise with size", "do not overlap" if apart else "overlap"
    ends = f"{words.interval(*ranges[0])} and {words.interval(*ranges[-1])}"
    return f"{what} {trend} ({path}); the ranges of the smallest and the largest, {ends}, {doubt}."


RANGE = "A range reaches from the lowest to the highest end of the 95% intervals of a size's seeds."


# -- everything measured, seeds and posts apart ----------------------------------------------------


def measured_table(frame: pd.DataFrame) -> Table:
    """A column a size: the mean over seeds, and the lowest and highest seed."""
    groups = sizes(frame)
    rows: list[list[object]] = [["seeds", *(str(len(seeds)) for _, seeds in groups)]]
    listed = [*MEASURED]
    for policy in policies(frame):
        title = policy.upper() + _of_how_many(frame, policy)
        listed += [(f"{policy}/{key}", f"{title}: {w}", f) for key, w, f in OF_POLICIES]
    for key, title, form in listed:
        cells = [_of_seeds(seeds, key, form) for _, seeds in groups]
        rows += [[title, *cells]] if any(cell != MISSING for cell in cells) else []
    header = ["", *(f"{name}, {plots.count(parameters_of(seeds))}" for name, seeds in groups)]
    caption = "Mean over seeds; in brackets the lowest and the highest seed."
    return Table(header, rows, caption, name="measured")


def _of_seeds(seeds: pd.DataFrame, key: str, form: Form) -> Number:
    """The spread over the seeds that have the number, and their count where some lack it.

    Seeds without the policy are counted in the row's title.
    """
    values = given(seeds, key)
    policy = key.partition("/")[0]
    count = sum(policy in judged for judged in seeds["policies"]) if "/" in key else len(seeds)
    lacking = 0 < len(values) < count
    spread = _spread(values, form)
    return replace(spread, note=f"{len(values)} of {count} seeds") if lacking else spread


def _of_how_many(frame: pd.DataFrame, policy: str) -> str:
    """How many runs have a policy, where not all have it."""
    count = sum(policy in judged for judged in frame["policies"])
    return f" ({count} of {len(frame)} runs)" if count < len(frame) else ""


def _spread(values: Sequence[float], form: Form) -> Number:
    if not values:
        return MISSING
    mean, low, high = map(form, (sum(values) / len(values), min(values), max(values)))
    if len(values) < 2:
        return mean
    return replace(mean, low=low.value, high=high.value, is_range=True)


def spreads_table(frame: pd.DataFrame) -> Table:
    """The spread of win rates over seeds and over posts, apart: these are two kinds of doubt."""
    rows = []
    for name, seeds in sizes(frame):
        for policy in policies(frame):
            if f"{policy}/unjudged" not in seeds or seeds[f"{policy}/unjudged"].isna().all():
                continue  # this run has no such policy
            has_rate = seeds.dropna(subset=[f"{policy}/win_rate"])
            rates = has_rate[f"{policy}/win_rate"]
            halves = (has_rate[f"{policy}/high"] - has_rate[f"{policy}/low"]) / 2
            bounds = mean_of_seeds(rates.tolist())
            rows.append(
                [
                    name,
                    policy.upper(),
                    str(len(rates)),
                    percent(rates.mean()),
                    words.interval(max(0.0, bounds[0]), min(1.0, bounds[1])) if bounds else MISSING,
                    number(100 * rates.std(), 1),
                    number(100 * halves.mean(), 1),
                ]
            )
    header = "run|policy|seeds|win rate|95% over seeds|spread of seeds|95% half-width of posts"
    caption = (
        "Over seeds: Student's t interval of the mean, and the seeds' standard deviation. Over"
        " posts: half the width of a seed's own 95% interval, on average. Spread and half-width are"
        " in points of win rate."
    )
    return Table(header.split("|"), rows, caption, name="seeds-and-posts")


def seeds_table(frame: pd.DataFrame) -> Table:
    """One row a seed, with its intervals."""
    judged = policies(frame)
    rows = []
    for name, seeds in sizes(frame):
        for row in rows_of(seeds.sort_values("seed")):
            rates = [
                words.rate(row, policy) if policy in row["policies"] else MISSING
                for policy in judged
            ]
            numbers = [words.above_sft(row), number(row["kl"], 1), number(row["ppo/tokens"], 1)]
            rows.append([name, str(row["seed"]), *rates, *numbers, words.accuracy(row)])
    rated = [f"{policy.upper()} win rate" for policy in judged]
    header = ["run", "seed", *rated, "PPO - SFT", "KL", "PPO tokens", "RM accuracy"]
    caption = "In brackets: 95% intervals over the posts, or the pairs."
    return Table(header, rows, caption, name="seeds")


# -- fits ------------------------------------------------------------------------------------------


def fits_blocks(frame: pd.DataFrame) -> list[Block]:
    """How much each number changes with ten times the parameters, or why there is no fit."""
    groups = sizes(frame)
    parameters = [parameters_of(seeds) for _, seeds in groups]
    fitted = {
        title: fit(parameters, [float(seeds[key].mean()) for _, seeds in groups], power)
        for key, title, power in FITTED
    }
    reasons = {result for result in fitted.values() if isinstance(result, str)}
    if len(reasons) == 1 and all(isinstance(result, str) for result in fitted.values()):
        return [Text(f"{reasons.pop().capitalize()}.")]
    rows = [[title, *_fit_cells(result)] for title, result in fitted.items()]
    header = ("", "for ten times the parameters", "R²", "sizes")
    caption = (
        "A straight line through the means of the sizes, by ordinary least squares, with 95%"
        " intervals; of the loss: the exponent of a power law. A line may hold between the sizes"
        " that were run, and nowhere else."
    )
    return [Table(header, rows, caption, name="fits")]


def _fit_cells(result: Fit | str) -> list[object]:
    if isinstance(result, str):
        return [result, MISSING, MISSING]
    ends = result.per_tenfold, result.low, result.high
    middle, low, high = (value * (1 if result.power else 100) for value in ends)
    digits, unit = (3, "") if result.power else (1, "points")
    slope = Number(middle, digits, unit, low, high, signed=True)
    return [slope, number(result.r_squared), number(result.sizes, 0)]


# -- the paper -------------------------------------------------------------------------------------


def paper_blocks(paper_numbers: Sequence[PaperNumber]) -> list[Block]:
    """Each number of the paper with its verdict; none where nothing compares."""
    if not_comparable(paper_numbers):
        return []
    rows = [
        [
            entry.size,
            entry.what,
            f"{entry.verdict}: {entry.why}" if entry.why else entry.verdict,
            _values(entry.key, entry.own_values),
            _values(entry.key, entry.paper_values),
            entry.source or MISSING,
        ]
        for entry in paper_numbers
    ]
    header = ("size", "number", "verdict", "ours, by seed", "the paper's, by seed", "source")
    labels = Details(
        "How far to trust the paper's numbers", [Table(("label", "meaning"), paper.labels())]
    )
    caption = f"{beside_paper.RULE} {paper.caption()}"
    return [Heading("Beside the paper"), Table(header, rows, caption, name="paper"), labels]


def not_comparable(paper_numbers: Sequence[PaperNumber]) -> list[str]:
    """Why nothing of the paper stands beside these runs; no line where something does."""
    if not all(entry.verdict == NOT_COMPARABLE and not entry.key for entry in paper_numbers):
        return []
    reasons = "; ".join(dict.fromkeys(entry.why for entry in paper_numbers))
    return [f"The paper's numbers are not comparable with these runs: {reasons}."]


def _values(key: str, values: Sequence[float]) -> str:
    forms = {name: form for name, _, form in paper.COMPARED}
    return ", ".join(str(forms[key](value)) for value in values) or str(MISSING)
