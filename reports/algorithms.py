"""The page that compares PPO, RLOO, DPO, best-of-n and so on at equal KL, over seeds.

    python -m reports.algorithms --name tiny --kl-coefs 0.02 0.05 0.1 0.2

reads the finished seeds of the runs `tiny-kl0.02`, ... and writes runs/reports/algorithms-tiny.md
and .html. An algorithm has one point for each coefficient of the KL penalty, best-of-n one for each
n. Between its points an algorithm is a straight line over the square root of KL. Two algorithms are
compared where both lines are, seed by seed; nothing is extrapolated. The text of the page is
`templates/algorithms.md`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import sqrt
from pathlib import Path
from statistics import fmean, median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from eval.stats.hypothesis_tests import p_of_interval
from eval.stats.intervals import Floats, mean_over_posts, post_numbers
from reports import about_runs, render
from reports.formats import MISSING, p_value, points, text_table
from reports.plots import (
    INK,
    NO_DIFFERENCE,
    Bar,
    Figure,
    Panel,
    color_of,
    differences,
    draw_legend,
    figure,
)
from reports.posts import judged_posts, texts_of
from reports.results import Interval, RunResult, find_all, title_of
from reports.verdicts import Comparison, Verdict, Word, mean_over_seeds, verdicts
from stages.config.checks import UserError
from stages.config.faults import Parser, in_one_line
from stages.config.judge import BEST_OF
from stages.config.stages import POLICY_GRADIENT_STAGES

PLACES = 21  # at which two lines are compared
BASE = "ppo"
BEST_OF_N = "best-of-n"
SFT = "sft"


@dataclass(frozen=True, kw_only=True)
class Point:
    """An algorithm in one seed at one setting."""

    seed: int
    algorithm: str
    setting: str
    """The coefficient of the KL penalty, or n; empty for an algorithm without one."""
    kl: float
    """From SFT, nats per summary; of best-of-n the bound."""
    win_rate: float
    gold: float | None
    """The mean score by the judge, if it gives scores."""
    proxy: float | None
    """The mean score by the run's own reward model."""
    tokens: float | None
    seconds: float | None
    """Of training; None without training."""
    post_scores: Mapping[str, float] = field(default_factory=dict, repr=False)
    """The score of each judged post."""
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Post -> the first post with the same text."""

    @property
    def root(self) -> float:
        """The square root of KL, over which an algorithm is a straight line."""
        return sqrt(max(0.0, self.kl))


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Where the lines of two algorithms overlap in one seed."""

    kl_from: float
    kl_to: float
    first: tuple[tuple[Point, float], ...]
    """The first line's points, with their weights in its mean over the overlap."""
    second: tuple[tuple[Point, float], ...]

    def difference(self, value_of: Callable[[Point], float]) -> float:
        """Return the mean difference of a value over the overlap."""
        first = sum(weight * value_of(point) for point, weight in self.first)
        return first - sum(weight * value_of(point) for point, weight in self.second)

    def difference_on(self, post: str) -> float:
        """Return the mean difference of a post's scores over the overlap."""
        return self.difference(lambda point: point.post_scores[post])


@dataclass(frozen=True, kw_only=True)
class AlgorithmPair:
    """Two algorithms at equal KL; the one with the higher win rate is the first."""

    first: str
    second: str
    comparison: Comparison | None
    """Of the win rates; None if no seed has a KL that both cover."""
    verdict: Verdict | None
    """None for fewer than two seeds: one says nothing about other seeds."""
    gold: float | Interval | None
    """The difference in gold score: the mean over seeds."""
    kl_from: float
    kl_to: float
    """Lowest and highest KL at which they were compared, over the seeds."""
    compared_seeds: int
    all_seeds: int
    """Seeds of the page that have both."""

    @property
    def first_title(self) -> str:
        """How the page calls the first one."""
        return named(self.first)

    @property
    def second_title(self) -> str:
        """How the page calls the second one."""
        return named(self.second)

    @property
    def name(self) -> str:
        """Both, as a difference."""
        return f"{self.first_title} minus {self.second_title}"

    @property
    def mean(self) -> float:
        """The mean difference in win rate over seeds."""
        assert self.comparison is not None
        return fmean(self.comparison.by_seed)


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """An algorithm at one setting, over seeds."""

    title: str
    algorithm: str
    setting: str
    seeds: int
    win_rate: float | Interval | None
    gold: float | Interval | None
    proxy: float | None
    kl: float
    tokens: float | None
    seconds: float | None
    """Of training, the median."""


@dataclass(frozen=True, kw_only=True)
class PenaltyEffect:
    """What changes from an algorithm's largest penalty to its smallest, seed by seed."""

    title: str
    largest: str
    smallest: str
    kl: float | Interval | None
    proxy: float | Interval | None
    gold: float | Interval | None
    win_rate: float | Interval | None

    @property
    def is_over_optimized(self) -> bool:
        """Whether the proxy rose and the gold score fell, by the intervals over seeds."""
        if not isinstance(self.proxy, Interval) or not isinstance(self.gold, Interval):
            return False
        return self.proxy.is_above(0) and self.gold.is_below(0)


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The numbers of the page, as its JSON has them."""

    pairs: Sequence[AlgorithmPair]
    settings: Sequence[SettingRow]
    penalties: Sequence[PenaltyEffect]


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Write the page; print its verdicts and its path."""
    parser = Parser(description="compare algorithms at equal KL, over seeds")
    parser.add_argument("--name", required=True, help="the run that gave SFT and reward model")
    parser.add_argument("--kl-coefs", nargs="+", required=True, help="penalties of the runs")
    parser.add_argument("--judge", default="", help="the judge, if several have judged the runs")
    arguments = parser.parse_args(argv)
    print(write_page(arguments.name, arguments.kl_coefs, arguments.judge), end="")


def write_page(name: str, kl_coefs: Sequence[str], judge: str = "") -> str:
    """Write the page, and return its text for the terminal.

    Raises UserError if a run has not finished, or if no policy has a win rate.
    """
    names = [f"{name}-kl{coef}" for coef in dict.fromkeys(kl_coefs)]
    runs, left_out = find_all(names, judge)
    found = points_of(runs)
    if not found:
        raise UserError(f"no policy of {', '.join(names)} has a win rate: see the judge's replies")

    pairs = pairs_of(found)
    penalties = penalty_effects(found)
    settings = setting_rows(found)
    seeds = {point.seed for point in found}
    path = about_runs.write_page(
        "algorithms.md",
        stem=f"algorithms-{name}",
        names=names,
        runs=runs,
        numbers=Numbers(pairs=pairs, settings=settings, penalties=penalties),
        name=name,
        pairs=pairs,
        verdict_groups=by_verdict(pairs),
        has_lines=bool(pairs),
        penalties=penalties,
        settings=settings,
        seed_count=len(seeds),
        best_of_n=BEST_OF_N,
        places=PLACES,
        left_out=left_out,
        main_figure=main_figure(found, pairs),
        outside=outside_the_zoom(found),
        gold_figure=over_kl_figure(found, is_gold=True),
        rate_figure=over_kl_figure(found, is_gold=False),
    )
    return terminal_text(name, pairs, len(seeds), path)


# -- the points ------------------------------------------------------------------------------------


def points_of(runs: Sequence[RunResult]) -> list[Point]:
    """Return the points of all policies that have a win rate and a KL."""
    by_place: dict[tuple[int, str, str], Point] = {}
    for run in runs:
        for policy in run.policies:
            point = _point(run, policy)
            if point is not None:  # SFT is the same in every run
                by_place.setdefault((point.seed, point.algorithm, point.setting), point)
    return list(by_place.values())


def _point(run: RunResult, policy: str) -> Point | None:
    result = run.policies[policy]
    is_trained = policy in POLICY_GRADIENT_STAGES
    kl = result.kl
    if not is_trained and policy != SFT:
        # Measured on the held-out summaries: DPO, and the bound of best-of-n.
        kl = run.stages["summaries"].results["policies"][policy].get("kl")
    if kl is None or result.win_rate is None:
        return None

    setting = ""
    if is_trained:
        setting = f"{run.settings[policy]['kl_coef']:g}"
    is_best_of = policy.startswith(BEST_OF)
    if is_best_of:
        setting = policy.removeprefix(BEST_OF)
    scores = run.stages["win_rate"].results.get("scores") or {}
    gold = scores.get("gold", {}).get(policy)
    posts = judged_posts(run, policy).dropna(subset=["score"])
    return Point(
        seed=run.seed,
        algorithm=BEST_OF_N if is_best_of else policy,
        setting=setting,
        kl=kl,
        win_rate=result.win_rate.estimate,
        gold=gold["estimate"] if gold else None,
        proxy=result.score,
        tokens=result.tokens,
        seconds=run.stages[policy].manifest["seconds"] if is_trained else None,
        post_scores=dict(zip(posts["post"], posts["score"], strict=True)),
        texts=texts_of(posts),
    )


def named(algorithm: str) -> str:
    """Return how the page calls an algorithm."""
    return algorithm if algorithm == BEST_OF_N else title_of(algorithm)


def algorithms_of(points: Sequence[Point]) -> list[str]:
    """Return all algorithms, in the order of their first point."""
    return list(dict.fromkeys(point.algorithm for point in points))


def lines_of(points: Sequence[Point]) -> list[str]:
    """Return the algorithms that have a line: several points in some seed."""
    found = []
    for algorithm in algorithms_of(points):
        seeds = [point.seed for point in points if point.algorithm == algorithm]
        if algorithm != SFT and len(set(seeds)) < len(seeds):
            found.append(algorithm)
    return found


# -- at equal KL -----------------------------------------------------------------------------------


def overlaps_of(points: Sequence[Point], first: str, second: str) -> tuple[list[Overlap], int]:
    """Return where two lines overlap in each seed, and the number of seeds that have both lines."""
    overlaps = []
    seeds_with_both = 0
    for seed in dict.fromkeys(point.seed for point in points):
        line = _line(points, first, seed)
        other = _line(points, second, seed)
        if not line or not other:
            continue
        seeds_with_both += 1
        low = max(line[0].root, other[0].root)
        high = min(line[-1].root, other[-1].root)
        if low > high:
            continue
        roots = np.linspace(low, high, PLACES)
        overlaps.append(
            Overlap(
                kl_from=low**2,
                kl_to=high**2,
                first=_weighted(line, roots),
                second=_weighted(other, roots),
            )
        )
    return overlaps, seeds_with_both


def _line(points: Sequence[Point], algorithm: str, seed: int) -> list[Point]:
    line = [point for point in points if (point.algorithm, point.seed) == (algorithm, seed)]
    return sorted(line, key=lambda point: (point.root, point.win_rate))


def _weighted(line: Sequence[Point], roots: Floats) -> tuple[tuple[Point, float], ...]:
    """Return each point with its weight in the mean of the line over these places.

    Interpolation is linear in the values, so the weight is the mean of the line that is 1 at this
    point and 0 at the others.
    """
    own_roots = [point.root for point in line]
    weighted = []
    for point, indicator in zip(line, np.eye(len(line)), strict=True):
        weighted.append((point, float(np.interp(roots, own_roots, indicator).mean())))
    return tuple(weighted)


def pairs_of(points: Sequence[Point]) -> list[AlgorithmPair]:
    """Return all pairs of algorithms, each with the better one first.

    Pairs that were compared on all seeds come first, then by difference; those that share no KL
    come last.
    """
    pairs = [_pair(points, first, second) for first, second in combinations(lines_of(points), 2)]

    # One seed says nothing about other seeds, so such a pair has no verdict.
    tested = [pair for pair in pairs if pair.compared_seeds > 1]
    found = verdicts([pair.comparison for pair in tested if pair.comparison is not None])
    verdict_of = dict(zip([pair.name for pair in tested], found, strict=True))
    pairs = [replace(pair, verdict=verdict_of.get(pair.name)) for pair in pairs]

    def place(pair: AlgorithmPair) -> tuple[bool, int, float]:
        missing_seeds = pair.all_seeds - pair.compared_seeds
        return pair.comparison is None, missing_seeds, -pair.mean if pair.comparison else 0.0

    return sorted(pairs, key=place)


def _pair(points: Sequence[Point], first: str, second: str) -> AlgorithmPair:
    overlaps, all_seeds = overlaps_of(points, first, second)
    by_seed = [overlap.difference(lambda point: point.win_rate) for overlap in overlaps]
    if by_seed and fmean(by_seed) < 0:
        return _pair(points, second, first)
    return AlgorithmPair(
        first=first,
        second=second,
        comparison=_comparison(overlaps, by_seed) if by_seed else None,
        verdict=None,
        gold=_gold_difference(points, first, second),
        kl_from=min((overlap.kl_from for overlap in overlaps), default=0.0),
        kl_to=max((overlap.kl_to for overlap in overlaps), default=0.0),
        compared_seeds=len(overlaps),
        all_seeds=all_seeds,
    )


def _comparison(overlaps: Sequence[Overlap], by_seed: Sequence[float]) -> Comparison:
    """Return the difference of the win rates, over posts and by seed."""
    over_posts = difference_over_posts(overlaps)
    p_over_posts = 1.0
    if over_posts is not None:
        p_over_posts = p_of_interval(
            estimate=over_posts.estimate, low=over_posts.low, high=over_posts.high, value=0.0
        )
    return Comparison(over_posts=over_posts, p_over_posts=p_over_posts, by_seed=tuple(by_seed))


def difference_over_posts(overlaps: Sequence[Overlap]) -> Interval | None:
    """Return the mean difference with a bootstrap over posts; None without a post in all seeds.

    A line is linear in its points, so each post has a line, too: the same weights, on its scores.
    """
    by_seed = []
    for overlap in overlaps:
        judged = [set(point.post_scores) for point, _ in (*overlap.first, *overlap.second)]
        shared = set.intersection(*judged)
        by_seed.append({post: overlap.difference_on(post) for post in shared})
    # In the order of the first seed's posts, so that the bootstrap draws the same every time.
    first_point, _ = overlaps[0].first[0]
    posts = [post for post in first_point.post_scores if all(post in gaps for gaps in by_seed)]
    if not posts:
        return None
    means = np.array([fmean(gaps[post] for gaps in by_seed) for post in posts])
    texts = [first_point.texts[post] for post in posts]
    found = mean_over_posts(means, (-1.0, 1.0), post_numbers(texts))
    return Interval(estimate=found.estimate, low=found.low, high=found.high)


def _gold_difference(points: Sequence[Point], first: str, second: str) -> float | Interval | None:
    with_gold = [point for point in points if point.gold is not None]
    overlaps, _ = overlaps_of(with_gold, first, second)
    return mean_over_seeds([overlap.difference(_gold_of) for overlap in overlaps])


def _gold_of(point: Point) -> float:
    assert point.gold is not None
    return point.gold


def by_verdict(pairs: Sequence[AlgorithmPair]) -> dict[str, list[AlgorithmPair]]:
    """Return the pairs with each verdict, by the name of its word."""
    groups: dict[str, list[AlgorithmPair]] = {word.name.lower(): [] for word in Word}
    for pair in pairs:
        if pair.verdict is not None:
            groups[pair.verdict.word.name.lower()].append(pair)
    return groups


# -- each setting ----------------------------------------------------------------------------------


def settings_of(points: Sequence[Point], algorithm: str) -> list[tuple[str, list[Point]]]:
    """Return the settings of an algorithm in the order of their mean KL, each with its seeds."""
    by_setting: dict[str, list[Point]] = {}
    for point in points:
        if point.algorithm == algorithm:
            by_setting.setdefault(point.setting, []).append(point)
    return sorted(by_setting.items(), key=lambda item: fmean(point.kl for point in item[1]))


def setting_rows(points: Sequence[Point]) -> list[SettingRow]:
    """Return a row for each setting of each algorithm."""
    rows = []
    for algorithm in algorithms_of(points):
        for setting, seeds in settings_of(points, algorithm):
            seconds = [point.seconds for point in seeds if point.seconds is not None]
            rows.append(
                SettingRow(
                    title=named(algorithm),
                    algorithm=algorithm,
                    setting=setting,
                    seeds=len(seeds),
                    win_rate=mean_over_seeds([point.win_rate for point in seeds]),
                    gold=mean_over_seeds([x.gold for x in seeds if x.gold is not None]),
                    proxy=_mean([point.proxy for point in seeds]),
                    kl=fmean(point.kl for point in seeds),
                    tokens=_mean([point.tokens for point in seeds]),
                    seconds=median(seconds) if seconds else None,
                )
            )
    return rows


def penalty_effects(points: Sequence[Point]) -> list[PenaltyEffect]:
    """Return what changes from the largest to the smallest penalty of each trained algorithm."""
    rows = []
    for algorithm in algorithms_of(points):
        if algorithm not in POLICY_GRADIENT_STAGES:
            continue
        by_setting = dict(settings_of(points, algorithm))
        largest = max(by_setting, key=float)
        smallest = min(by_setting, key=float)
        if largest == smallest:
            continue
        start = {point.seed: point for point in by_setting[largest]}
        end = {point.seed: point for point in by_setting[smallest]}
        both = [(start[seed], end[seed]) for seed in start if seed in end]
        rows.append(
            PenaltyEffect(
                title=named(algorithm),
                largest=largest,
                smallest=smallest,
                kl=_mean_change(both, lambda point: point.kl),
                proxy=_mean_change(both, lambda point: point.proxy),
                gold=_mean_change(both, lambda point: point.gold),
                win_rate=_mean_change(both, lambda point: point.win_rate),
            )
        )
    return rows


def _mean_change(
    both: Sequence[tuple[Point, Point]], value_of: Callable[[Point], float | None]
) -> float | Interval | None:
    changes = []
    for start, end in both:
        before = value_of(start)
        after = value_of(end)
        if before is None or after is None:
            return None
        changes.append(after - before)
    return mean_over_seeds(changes)


def _mean(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return fmean(measured) if measured else None


# -- plots -----------------------------------------------------------------------------------------


def main_figure(points: Sequence[Point], pairs: Sequence[AlgorithmPair]) -> Figure | None:
    """Draw the differences from PPO, at equal KL and at equal penalty, and the win rate over KL."""
    panels = []
    bars = bars_against_base(pairs)
    if bars:
        title = f"Difference from {named(BASE)} at equal KL"
        panels.append(differences(title, bars, x_label="points of win rate"))
    if BASE in algorithms_of(points):
        panels.append(_penalty_panel(points))
    panels.append(_zoomed_panel(points))
    return figure("comparison", panels)


def bars_against_base(pairs: Sequence[AlgorithmPair]) -> list[Bar]:
    """Return each algorithm's difference from PPO with the interval that decides."""
    bars = []
    for pair in pairs:
        if BASE not in (pair.first, pair.second):
            continue
        if pair.verdict is None or pair.verdict.interval is None:
            continue
        interval = pair.verdict.interval
        ends = (100 * interval.low, 100 * interval.high)
        value = 100 * interval.estimate
        algorithm = pair.first
        if pair.first == BASE:  # the difference is PPO's from the other one
            ends = (-ends[1], -ends[0])
            value = -value
            algorithm = pair.second
        label = named(algorithm)
        if pair.compared_seeds < pair.all_seeds:
            label = f"{label} ({pair.compared_seeds} of {pair.all_seeds} seeds)"
        bars.append(Bar(label=label, color=line_color(algorithm), value=value, interval=ends))
    return bars


def line_color(algorithm: str) -> str:
    """Return the color of an algorithm; best-of-n is not trained and has that of the text."""
    return INK if algorithm == BEST_OF_N else color_of(algorithm)


def differences_at_equal_penalty(
    points: Sequence[Point], algorithm: str
) -> dict[str, float | Interval]:
    """Return an algorithm's difference from PPO in points of win rate, by penalty.

    Both are of the same seed; the mean is over seeds.
    """
    base = {
        (point.seed, point.setting): point.win_rate for point in points if point.algorithm == BASE
    }
    by_penalty: dict[str, list[float]] = {}
    for point in points:
        place = (point.seed, point.setting)
        if point.algorithm == algorithm and place in base:
            gap = 100 * (point.win_rate - base[place])
            by_penalty.setdefault(point.setting, []).append(gap)
    means = {}
    for penalty, gaps in by_penalty.items():
        mean = mean_over_seeds(gaps)
        if mean is not None:
            means[penalty] = mean
    return means


def _penalty_panel(points: Sequence[Point]) -> Panel:
    penalties = sorted((setting for setting, _ in settings_of(points, BASE)), key=float)
    trained = [name for name in algorithms_of(points) if name in POLICY_GRADIENT_STAGES]
    others = [name for name in trained if name != BASE]

    def draw(axes: Axes) -> None:
        axes.axhspan(-NO_DIFFERENCE, NO_DIFFERENCE, color=INK, alpha=0.1, lw=0)
        axes.axhline(0.0, color=INK, lw=1, ls=(0, (4, 3)))
        for place, algorithm in enumerate(others):
            color = line_color(algorithm)
            # Next to each other, so that no interval hides another one.
            shift = 0.6 * (place - (len(others) - 1) / 2) / len(others)
            means = differences_at_equal_penalty(points, algorithm)
            for penalty, mean in means.items():
                if isinstance(mean, Interval):
                    x = penalties.index(penalty) + shift
                    axes.plot([x, x], [mean.low, mean.high], color=color, lw=4, alpha=0.35)
            axes.plot(
                [penalties.index(penalty) + shift for penalty in means],
                [mean.estimate if isinstance(mean, Interval) else mean for mean in means.values()],
                "o",
                ms=5,
                color=color,
                label=named(algorithm),
            )
        axes.set_xticks(range(len(penalties)), penalties)
        axes.set_xlim(-0.5, len(penalties) - 0.5)
        axes.set_xlabel("coefficient of the KL penalty")
        axes.set_ylabel("points of win rate")
        axes.grid(visible=False, axis="x")
        if others:
            draw_legend(axes)

    return Panel(title=f"Difference from {named(BASE)} at equal penalty", draw=draw, height=2.9)


def _mean_points(points: Sequence[Point], algorithm: str) -> list[tuple[float, float]]:
    """Return the mean KL and win rate, in percent, of each setting."""
    return [
        (fmean(point.kl for point in seeds), 100 * fmean(point.win_rate for point in seeds))
        for _, seeds in settings_of(points, algorithm)
    ]


@dataclass(frozen=True)
class Zoom:
    """The part of a plot of win rate, in percent, over KL that is drawn."""

    kls: tuple[float, float]
    rates: tuple[float, float]

    def shows(self, kl: float, rate: float) -> bool:
        """Whether a point is in this part."""
        return self.kls[0] <= kl <= self.kls[1] and self.rates[0] <= rate <= self.rates[1]


def zoom_of(points: Sequence[Point]) -> Zoom | None:
    """Return where the trained algorithms are, with a margin; None without any."""
    trained = [name for name in algorithms_of(points) if name in POLICY_GRADIENT_STAGES]
    means = [mean for name in trained for mean in _mean_points(points, name)]
    if not means:
        return None
    return Zoom(
        kls=_padded([kl for kl, _ in means], at_least=0.2),
        rates=_padded([rate for _, rate in means], at_least=1.0),
    )


def _padded(values: Sequence[float], at_least: float) -> tuple[float, float]:
    low = min(values)
    high = max(values)
    margin = max(at_least, 0.12 * (high - low))
    return low - margin, high + margin


def outside_the_zoom(points: Sequence[Point]) -> list[str]:
    """Return the algorithms that the zoomed plot does not show."""
    zoom = zoom_of(points)
    if zoom is None:
        return []
    outside = []
    for algorithm in algorithms_of(points):
        is_shown = any(zoom.shows(kl, rate) for kl, rate in _mean_points(points, algorithm))
        if not is_shown:
            outside.append(named(algorithm))
    return outside


def _zoomed_panel(points: Sequence[Point]) -> Panel:
    """The mean win rate over KL, where the trained algorithms are."""
    zoom = zoom_of(points)
    hidden = outside_the_zoom(points)

    def draw(axes: Axes) -> None:
        for algorithm in algorithms_of(points):
            if named(algorithm) in hidden:
                continue
            means = _mean_points(points, algorithm)
            style = ":" if algorithm == BEST_OF_N else "-"
            axes.plot(
                [kl for kl, _ in means],
                [rate for _, rate in means],
                style,
                marker="o",
                ms=4,
                color=line_color(algorithm),
                label=named(algorithm),
            )
        if zoom is not None:
            axes.set_xlim(*zoom.kls)
            axes.set_ylim(zoom.rates[0], min(100.0, zoom.rates[1]))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
        axes.set_xlabel("KL from SFT, nats per summary")
        axes.set_ylabel("win rate")
        draw_legend(axes)

    return Panel(title="Win rate over KL", draw=draw, height=2.9)


def over_kl_figure(points: Sequence[Point], is_gold: bool) -> Figure | None:
    """Draw gold scores or win rates over the root of KL, with intervals; None without any."""
    drawn = []
    for algorithm in lines_of(points):
        means = []
        for _, seeds in settings_of(points, algorithm):
            values = [point.gold if is_gold else 100 * point.win_rate for point in seeds]
            measured = [value for value in values if value is not None]
            if len(measured) == len(values):
                root = fmean(point.root for point in seeds)
                means.append((root, fmean(measured), mean_over_seeds(measured)))
        if means:
            drawn.append((algorithm, means))
    if not drawn:
        return None

    def draw(axes: Axes) -> None:
        for algorithm, means in drawn:
            color = line_color(algorithm)
            roots = [root for root, _, _ in means]
            middles = [middle for _, middle, _ in means]
            style = ":" if algorithm == BEST_OF_N else "-"
            axes.plot(
                roots, middles, style, marker="o", ms=3.5, color=color, label=named(algorithm)
            )
            bands = [mean for _, _, mean in means if isinstance(mean, Interval)]
            if len(bands) == len(means):
                lows = [band.low for band in bands]
                highs = [band.high for band in bands]
                axes.fill_between(roots, lows, highs, color=color, alpha=0.13, lw=0)
        axes.set_xlabel("square root of KL from SFT (nats)")
        axes.set_ylabel("gold score" if is_gold else "win rate, %")
        draw_legend(axes)

    title = "Gold score over KL" if is_gold else "Win rate over KL"
    name = "gold-score" if is_gold else "win-rate"
    return figure(name, [Panel(title=title, draw=draw, width=5.2, height=3.4)])


# -- the terminal ----------------------------------------------------------------------------------


def terminal_text(name: str, pairs: Sequence[AlgorithmPair], seed_count: int, path: Path) -> str:
    """Return the verdicts for a terminal; the last line is the path of the page."""
    table = []
    for pair in pairs:
        verdict = pair.verdict
        table.append(
            (
                pair.name,
                points(verdict.interval).replace(" points", "") if verdict else MISSING,
                p_value(verdict.p_value) if verdict else MISSING,
                verdict.word.value if verdict else MISSING,
            )
        )
    header = ("at equal KL", "points [95%]", "corrected p", "verdict")
    return render.fill_text(
        "algorithms_terminal.txt",
        name=name,
        verdict_groups=by_verdict(pairs),
        pairs=pairs,
        has_lines=bool(pairs),
        seed_count=seed_count,
        result_table=text_table(header, table) if table else "",
        path=path,
    )


if __name__ == "__main__":
    main()
