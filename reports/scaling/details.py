"""The blocks below the first screen: growth, seeds and posts, the paper, all numbers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from eval.stats.formulas import mean_of_seeds
from reports.parts import paper, plots, sentences, words
from reports.parts.blocks import Block, Details, Heading, Table
from reports.parts.cells import MISSING, Number
from reports.parts.collect import MEMORY_KNOBS, Record
from reports.parts.paired import rows_of, settings_apart
from reports.parts.words import named, number, percent
from reports.scaling import beside_paper
from reports.scaling.beside_paper import NOT_COMPARABLE, PaperNumber
from reports.scaling.measures import LEAST_SIZES, fit, given, parameters_of, policies, sizes

Form = Callable[[float | None], Number]
one_digit, three_digits = partial(number, digits=1), partial(number, digits=3)

# What may differ between sizes: the base model itself, and how batches are cut.
BASE = ("base.checkpoint", "base.hidden_size", "base.num_layers", "base.num_heads")
FREE = (*MEMORY_KNOBS, *BASE)

MEASURED: tuple[tuple[str, str, Form], ...] = (
    ("accuracy", "RM accuracy", percent),
    ("longer", "accuracy of taking the longer summary", percent),
    ("difference", "PPO - SFT", words.points),
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
# What may grow with size -> its name, the columns of its interval over posts or pairs, its form.
GROWING: dict[str, tuple[str, tuple[str, str], Form]] = {
    "ppo/win_rate": ("PPO win rate", ("ppo/low", "ppo/high"), percent),
    "sft/win_rate": ("SFT win rate", ("sft/low", "sft/high"), percent),
    "accuracy": ("RM accuracy", ("accuracy_low", "accuracy_high"), percent),
    "difference": ("PPO - SFT", ("difference_low", "difference_high"), words.points),
}


# -- growth ----------------------------------------------------------------------------------------


def growth_table(frame: pd.DataFrame) -> Table:
    """How each number changes from the smallest size to the largest: at every step, beyond the
    ranges of both, and with ten times the parameters.
    """
    groups = [seeds for _, seeds in sizes(frame)]
    rows: list[list[object]] = []
    for key, (title, bounds, form) in GROWING.items():
        ranges = [_range(seeds, key, bounds, form) for seeds in (groups[0], groups[-1])]
        means = [float(seeds[key].mean()) for seeds in groups]
        steps = pd.Series([round(mean, 3) for mean in means]).diff().dropna()
        rows.append(
            [
                title,
                *ranges,
                f"{sum(steps > 0)} of {len(steps)}",
                _beside(*ranges),
                *_fit_cells([parameters_of(seeds) for seeds in groups], means),
            ]
        )
    caption = (
        "Means over seeds; in brackets from the lowest to the highest end of the 95% intervals of a"
        " size's seeds: ranges that overlap establish no rise by themselves; none where a seed has"
        " too many posts without a verdict. Ten times: a straight line through the means of the"
        " sizes, by ordinary least squares, with 95% intervals. A line may hold between the sizes"
        f" that were run, and nowhere else; fewer than {LEAST_SIZES} sizes cannot carry one with an"
        " interval."
    )
    header = ["", "smallest", "largest", "steps that rise", "ranges", "for ten times", "R²"]
    return Table(header, rows, caption, name="growth")


def _range(seeds: pd.DataFrame, key: str, bounds: tuple[str, str], form: Form) -> Number:
    """The mean, and the lowest and highest end of the seeds' intervals; a dash where one lacks."""
    if seeds[key].isna().any():
        return MISSING
    ends = form(seeds[bounds[0]].min()).value, form(seeds[bounds[1]].max()).value
    return replace(form(seeds[key].mean()), low=ends[0], high=ends[1])


def _beside(smallest: Number, largest: Number) -> object:
    ends = smallest.low, smallest.high, largest.low, largest.high
    if None in ends:
        return MISSING
    low, high, largest_low, largest_high = (float(end) for end in ends if end is not None)
    return "apart" if largest_low > high or largest_high < low else "overlap"


def _fit_cells(parameters: Sequence[float], means: Sequence[float]) -> list[Number]:
    line = fit(parameters, means)
    return [MISSING, MISSING] if line is None else [words.points(*line[0]), number(line[1])]


# -- everything measured, seeds and posts apart ----------------------------------------------------


def measured_table(frame: pd.DataFrame) -> Table:
    """A column a size: the mean over seeds, and the lowest and highest seed."""
    groups = sizes(frame)
    listed = [*MEASURED]
    for policy in policies(frame):
        listed += [(f"{policy}/{key}", f"{named(policy)}: {w}", f) for key, w, f in OF_POLICIES]
    rows: list[list[object]] = [["seeds", *(str(len(seeds)) for _, seeds in groups)]]
    for key, title, form in listed:
        cells = [_of_seeds(seeds, key, form) for _, seeds in groups]
        rows += [[title, *cells]] if not all(cell.is_missing for cell in cells) else []
    header = ["", *(f"{name}, {plots.count(parameters_of(seeds))}" for name, seeds in groups)]
    caption = (
        "Mean over the seeds that have the number; in brackets the lowest and the highest seed."
    )
    return Table(header, rows, caption, name="measured")


def _of_seeds(seeds: pd.DataFrame, key: str, form: Form) -> Number:
    """Mean, lowest and highest of the seeds that have the number, and their count where some lack
    it.
    """
    values = given(seeds, key)
    if not values:
        return MISSING
    mean, low, high = map(form, (sum(values) / len(values), min(values), max(values)))
    note = f"{len(values)} of {len(seeds)} seeds" if len(values) < len(seeds) else ""
    if len(values) < 2:
        return replace(mean, note=note)
    return replace(mean, low=low.value, high=high.value, is_range=True, note=note)


def spreads_table(frame: pd.DataFrame) -> Table:
    """The spread of win rates over seeds and over posts, apart: these are two kinds of doubt."""
    rows = []
    for name, seeds in sizes(frame):
        for policy in policies(frame):
            has_rate = seeds.dropna(subset=[f"{policy}/win_rate"])
            rates = has_rate[f"{policy}/win_rate"]
            halves = (has_rate[f"{policy}/high"] - has_rate[f"{policy}/low"]) / 2
            bounds = mean_of_seeds(rates.tolist())
            rows.append(
                [
                    name,
                    named(policy),
                    str(len(rates)),
                    percent(rates.mean()),
                    words.share(None, *np.clip(bounds, 0, 1)) if bounds else MISSING,
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
        for row in rows_of(seeds):
            rates = [
                words.rate(row, policy) if policy in row["policies"] else MISSING
                for policy in judged
            ]
            numbers = [words.above_sft(row), number(row["kl"], 1), number(row["ppo/tokens"], 1)]
            rows.append([name, str(row["seed"]), *rates, *numbers, words.accuracy(row)])
    rated = [f"{named(policy)} win rate" for policy in judged]
    header = ["run", "seed", *rated, "PPO - SFT", "KL", "PPO tokens", "RM accuracy"]
    caption = "In brackets: 95% intervals over the posts, or the pairs."
    return Table(header, rows, caption, name="seeds")


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
        "How far to trust the paper's numbers",
        [Table(("label", "meaning"), [*paper.load()["labels"].items()])],
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


def caveats(frame: pd.DataFrame) -> list[str]:
    """What to hold against the comparison."""
    rows = rows_of(frame)
    lines = sentences.notes_of_judges(rows)
    if not frame["pretrained"].all():
        lines.append(
            "Models without pretraining are among these: this is a test of the pipeline, not of"
            " the paper's claim."
        )
    few = [name for name, seeds in sizes(frame) if len(seeds) < 2]
    if few:
        lines.append(f"One seed only: {', '.join(few)}. How much seeds differ there is unknown.")
    lines += sentences.critic_notes(rows)
    for row in rows:
        lines += [f"{row['name']} seed {row['seed']}: {line}" for line in sentences.unjudged(row)]
    return lines


def alike(records: list[Record], frame: pd.DataFrame) -> list[str]:
    """A warning for each way in which the sizes differ but should not."""
    different = settings_apart({f"{x.name}/{x.seed}": [x] for x in records}, FREE)
    warnings = [
        f"The sizes are NOT alike: {name} differs ({' / '.join(sorted({*row.dropna()}))})."
        for name, row in different.iterrows()
    ]
    for column, what in (("judge", "The judge"), ("posts", "The number of posts judged")):
        if frame[column].nunique() > 1:
            values = " / ".join(str(value) for value in frame[column].unique())
            warnings.append(f"{what} differs between the runs ({values}).")
    if len({frozenset(seeds["seed"]) for _, seeds in sizes(frame)}) > 1:
        warnings.append("The sizes were run with different seeds.")
    return warnings
