"""What training changed: the proxy and the gold score of policies, minus SFT's, by seed.

The proxy is the reward model that a run's own policies learned from. Where it rises and the gold
score falls, the policy learned the proxy's mistakes (Gao et al. 2022, 2210.10760).
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from matplotlib.axes import Axes

from reports.parts import plots
from reports.parts.blocks import Figure, Table
from reports.parts.cells import MISSING, Number
from reports.parts.collect import Record, judged_row
from reports.parts.paired import Entry
from reports.parts.words import Row, direction, seeds_mean

SCORERS = {"proxy": "proxy", "gold": "gold score"}
MOST_SEEDS = 6  # that are listed one by one
GAIN, SMOOTHED = 0.9, 5  # a share of PPO's gain; updates whose mean score counts as one


def update_of_gain(record: Record) -> int | None:
    """The update that ends PPO's first SMOOTHED ones whose mean score holds GAIN of its gain.

    It gains from the first update's score to the mean of the last fifth; None if that is nothing.
    """
    scores = [row["objective/scores"] for row in record.rows("ppo")]
    start, end = scores[0], fmean(scores[-max(1, len(scores) // 5) :])
    means = {n: fmean(scores[n - SMOOTHED : n]) for n in range(SMOOTHED, len(scores) + 1)}
    reached = (n for n, mean in means.items() if mean >= start + GAIN * (end - start))
    return next(reached, None) if end > start else None


def gains(entry: Entry, scorer: str) -> list[Row]:
    """The mean difference from SFT on the same posts with its interval over posts, of each run.

    In the scorer's unit. Empty if a run has none: its judge was no reward model, or SFT itself.
    """
    results = [run.results("win_rate").get("scores") or {} for run in entry.runs]
    each = [(scores.get("gains", {}).get(entry.policy) or {}).get(scorer) for scores in results]
    return [gain for gain in each if gain is not None] if None not in each else []


def table(entries: Sequence[Entry]) -> list[Table]:
    """A row for each entry that has gains; no table without any."""
    rows = [
        [entry.label, *(cell for scorer in SCORERS for cell in _cells(gains(entry, scorer)))]
        for entry in entries
        if any(gains(entry, scorer) for scorer in SCORERS)
    ]
    header = [f"{title} - SFT [95%]" for title in SCORERS.values()]
    caption = (
        "Mean differences on the same posts, each scorer in its own unit; intervals over seeds, of"
        " one seed over posts. By seed: with a +, or a -, where the interval over posts leaves out"
        f" 0; of more than {MOST_SEEDS} seeds the lowest, the highest, and how many are + or -."
    )
    columns = ["", header[0], "by seed", header[1], "by seed"]
    return [Table(columns, rows, caption, name="gained")] if rows else []


def _cells(each: Sequence[Row]) -> list[object]:
    """The mean with its interval, and the difference of every seed."""
    if not each:
        return [MISSING] * 2
    middles = [gain["estimate"] for gain in each]
    mean = seeds_mean(middles, lambda value: Number(value, signed=True))
    if len(each) == 1:
        mean = replace(mean, low=each[0]["low"], high=each[0]["high"])
    if len(each) > MOST_SEEDS:
        counts = (f"{sum(_sign(gain) == sign for gain in each)}{sign}" for sign in (" (+)", " (-)"))
        return [mean, f"{Number(min(middles))} to {Number(max(middles))}: {', '.join(counts)}"]
    return [mean, ", ".join(f"{Number(gain['estimate'])}{_sign(gain)}" for gain in each)]


def _sign(gain: Row) -> str:
    """Whether a seed's interval over posts lies above or below 0."""
    return {"rose": " (+)", "fell": " (-)"}.get(direction(gain), "")


def over_kl(entries: Sequence[Entry], colors: Sequence[str]) -> list[Figure]:
    """The gold score - SFT's over the square root of KL from it, a point for each seed.

    None where no entry has both. Source: Gao et al. 2022, 2210.10760, figure 1.
    """
    points = {}
    for entry, color in zip(entries, colors, strict=True):
        kls = [judged_row(run)[f"{entry.policy}/kl"] for run in entry.runs]
        golds = [gain["estimate"] for gain in gains(entry, "gold")]
        if golds and None not in kls:
            points[entry.label] = color, [max(0.0, kl) ** 0.5 for kl in kls], golds

    def draw(axes: Axes) -> None:
        for label, (color, roots, golds) in points.items():
            axes.plot(roots, golds, "o", ms=3.5, color=color, label=label)
        axes.axhline(0.0, color=plots.INK, lw=0.6, ls=":")
        axes.set_xlabel("square root of KL, nats")
        plots.legend(axes)

    about = " ".join(
        f"{label}: " + ", ".join(f"{y:.2f} at {x:.2f}" for x, y in zip(*both, strict=True)) + "."
        for label, (_, *both) in points.items()
    )
    caption = "A point is a seed. Below 0 the policy is worse than SFT by the gold score."
    panel = plots.Panel("Gold score - SFT", draw, about)
    return [plots.figure("gold-over-kl", caption, [panel], wide=1.4)] if points else []
