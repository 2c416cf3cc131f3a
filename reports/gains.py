"""What training changed: the proxy and the gold score of a policy minus SFT's, seed by seed.

The proxy is the reward model that the policies of a run learned from. Where it rises and the gold
score falls, a policy learned the proxy's mistakes (Gao et al. 2022, 2210.10760).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from reports.entries import Entry
from reports.plots import INK, Figure, Panel, color_of, draw_legend, figure
from reports.results import Interval, interval_from
from reports.scores import FELL, ROSE, direction
from reports.verdicts import mean_over_seeds

MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True, kw_only=True)
class Gain:
    """By how much a score differs from SFT's on the same posts."""

    by_seed: tuple[Interval, ...]
    """Of each seed, with its interval over posts."""

    @property
    def mean(self) -> float | Interval:
        """The mean over seeds with its t interval; of one seed its interval over posts."""
        if len(self.by_seed) == 1:
            return self.by_seed[0]
        mean = mean_over_seeds([gain.estimate for gain in self.by_seed])
        assert mean is not None  # there is a gain for each seed
        return mean

    @property
    def moves(self) -> list[str]:
        """Whether the score rose or fell in each seed, by its interval over posts."""
        return [direction(gain) for gain in self.by_seed]

    @property
    def rose(self) -> int:
        """The number of seeds in which it rose."""
        return self.moves.count(ROSE)

    @property
    def fell(self) -> int:
        """The number of seeds in which it fell."""
        return self.moves.count(FELL)

    @property
    def lowest(self) -> float:
        """The gain of the seed with the lowest one."""
        return min(gain.estimate for gain in self.by_seed)

    @property
    def highest(self) -> float:
        """The gain of the seed with the highest one."""
        return max(gain.estimate for gain in self.by_seed)


@dataclass(frozen=True, kw_only=True)
class Gains:
    """The gains of one entry; None where a seed has no such score, and of SFT itself."""

    label: str
    proxy: Gain | None
    gold: Gain | None

    @property
    def over_optimized(self) -> int:
        """The number of seeds in which the proxy rose and the gold score fell."""
        if self.proxy is None or self.gold is None:
            return 0
        moves = list(zip(self.proxy.moves, self.gold.moves, strict=True))
        return moves.count((ROSE, FELL))


def gains_of(entries: Sequence[Entry]) -> list[Gains]:
    """Return the gains of the entries that have any."""
    rows = []
    for entry in entries:
        gains = Gains(label=entry.label, proxy=_gain(entry, "proxy"), gold=_gain(entry, "gold"))
        if gains.proxy is not None or gains.gold is not None:
            rows.append(gains)
    return rows


def _gain(entry: Entry, scorer: str) -> Gain | None:
    by_seed = []
    for run in entry.runs:
        scores = run.stages["win_rate"].results.get("scores") or {}
        gains = scores.get("gains", {}).get(entry.policy) or {}
        gain = interval_from(gains.get(scorer))
        if gain is None:
            return None
        by_seed.append(gain)
    return Gain(by_seed=tuple(by_seed))


def gold_over_kl(entries: Sequence[Entry]) -> Figure | None:
    """Draw each seed's gain in gold score over the root of its KL from SFT; None without any.

    Source: Gao et al. 2022, 2210.10760, figure 1.
    """
    points = []
    for entry in entries:
        gold = _gain(entry, "gold")
        kls = [result.kl for result in entry.results]
        if gold is not None and None not in kls:
            roots = [sqrt(max(0.0, kl)) for kl in kls if kl is not None]
            points.append((entry, roots, [gain.estimate for gain in gold.by_seed]))
    if not points:
        return None

    def draw(axes: Axes) -> None:
        for place, (entry, roots, gains) in enumerate(points):
            # Entries with the same policy have its color, and another marker.
            marker = MARKERS[place % len(MARKERS)]
            axes.plot(roots, gains, marker, ms=5, color=color_of(entry.policy), label=entry.label)
        axes.axhline(0.0, color=INK, lw=1, ls=(0, (4, 3)))
        largest = max(max(roots) for _, roots, _ in points)
        axes.set_xlim(-0.02 * largest, 1.05 * largest or 1.0)  # a KL is not below 0
        axes.set_xlabel("square root of the KL from SFT in nats")
        axes.set_ylabel("gold score minus SFT's")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        draw_legend(axes)

    return figure("gold-over-kl", [Panel(title="Gold score over KL", draw=draw)])
