"""The page of over-optimisation: gold score against KL, the law of Gao et al. 2022, does it hold.

    python -m reports.overoptimisation_page --input points.csv
    python -m reports.overoptimisation_page --runs tiny-pairs750 tiny-pairs3000

writes overoptimisation-<file or runs>.md and .html to runs/reports/. Its table `points` has the
columns that INPUT takes, so `<page>-numbers/points.csv` makes the page again.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes

from eval.rates.formulas import Floats, mean_of_seeds
from eval.rates.overoptimisation import (
    Law,
    SeedLaw,
    SeedMean,
    accuracies,
    fit_curves,
    of,
    over_seeds,
    seeds_of,
    starts,
)
from eval.rates.strengths import holm
from reports.parts import page, plots
from reports.parts.collect import Record, find_runs, numbers_of
from reports.parts.kl_points import (
    COLUMNS,
    RUNS,
    as_cells,
    check_points,
    points_of_runs,
    read_points,
    temperature_notes,
)
from reports.parts.page import Block, Heading, Table, Text
from reports.parts.run_report import stem_about, write_about_runs
from reports.parts.sentences import against, distrust, lead, notes_of_judges
from reports.parts.words import MISSING, number, p_value, percent
from stages.settings.checks import UserError

LAW = "R(d) = d (alpha - beta log d)"
LEVEL = 0.05  # of the test that the law holds, over all strengths together
ALL = "all points"  # where the file names no strength
UNTESTED = "not shown: no point beyond a shown peak"
STRENGTHS, KLS = 4, 6  # with fewer the page says that they are few
GRID = 60  # places at which a line is drawn
PROXY = {"accuracy": "Proxy accuracy on the policy's samples", "proxy": "Proxy score"}


def main(argv: list[str] | None = None) -> None:
    """Write the page and print its answer."""
    parser = page.arguments("gold score against KL, and the law of over-optimisation")
    parser.add_argument("--input", default="", help=f"a file with columns {', '.join(COLUMNS)}")
    parser.add_argument("--runs", nargs="+", default=[], help="names of finished runs")
    page.print_page(lambda args: write_page(args.input, args.runs, args.judge), parser, argv)


def write_page(path: str, names: Sequence[str], judge: str = "") -> str:
    """Write the page from a file or from runs; its lines for the terminal.

    Raises UserError unless one of the two is given, and where they hold no curve.
    """
    if bool(path) == bool(names):
        raise UserError('give INPUT=points.csv, or finished runs, such as RUNS="tiny-a tiny-b"')
    records: list[Record] = []
    left_out: list[str] = []
    if path:
        points, about, command = read_points(Path(path)), [Path(path).name], f'INPUT="{path}"'
        stem = stem_about("overoptimisation", [Path(path).stem])
    else:
        about, command = list(dict.fromkeys(names)), f'RUNS="{" ".join(names)}"'
        for name in about:
            runs, lines = find_runs(name, judge)
            records, left_out = [*records, *runs], [*left_out, *lines]
        points = points_of_runs(records)
        check_points(", ".join(about), points)
        stem = stem_about("overoptimisation", about)
    curves = fit_curves(points)
    made = blocks(curves, records, left_out)
    more = {"command": f"make overoptimisation {command}"}
    title = f"Over-optimisation: {', '.join(about)}"
    written = write_about_runs(stem, title, made, about, records, more)
    return page.for_terminal([turned(curves) + answer(curves)], written)


# -- in words --------------------------------------------------------------------------------------


def failing(curves: Sequence[Law]) -> tuple[list[Law], float]:
    """The strengths at which the law is refuted, and the largest of their p-values after Holm."""
    corrected = zip(curves, holm([curve.p_value for curve in curves]), strict=True)
    refuted = [(curve, p) for curve, p in corrected if p < LEVEL]
    return [curve for curve, _ in refuted], max((p for _, p in refuted), default=0.0)


def answer(curves: Sequence[Law]) -> str:
    """Whether the law is refuted here, and where the gold score peaks: at most 60 words."""
    wrong, largest = failing(curves)
    tested = [curve for curve in curves if curve.reaches_beyond]
    forecasts = [forecast for curve in curves for forecast in curve.forecasts]
    inside = sum(forecast.inside for forecast in forecasts)
    counted = f"{inside} of {len(forecasts)} left-out points are inside its 95% intervals"
    if wrong:
        biased = sum(curve.bias.leaves_out_0 for curve in wrong)
        return (
            f"The law {LAW} does NOT hold here{_at(wrong, curves)}: fitted to smaller KL, it errs"
            f" too far at the largest ({p_value(largest)}); the mean error's interval over seeds"
            f" leaves out 0 at {biased} of {len(wrong)}."
        )
    if not tested:
        alone = all(len(curve.fits) == 1 for curve in curves)
        return (
            f"Whether the law {LAW} holds is NOT shown here:"
            f" {'one seed shows no' if alone else 'no points lie beyond a'} peak of the gold score."
            f" Fitted to smaller KL, {counted}."
        )
    peaks = " and ".join(f"{told(x.peak)}{_named(x)}" for x in [tested[0], *tested[1:][-1:]])
    return (
        f"The law {LAW} is not refuted here{_at(tested, curves)}: fitted to smaller KL,"
        f" {counted}. The gold score peaks at KL {peaks}."
    )


def turned(curves: Sequence[Law]) -> str:
    """In how many seeds the gold score ends below its start and the proxy's above, and from which
    KL on; empty where points lack it.
    """
    known = sum(len(x.gained(lambda point: point.proxy)) for x in curves)
    if not known or known != sum(len(curve.fits) for curve in curves):
        return ""
    fallen = [place for curve in curves for place in curve.over_optimised.items()]
    counted = f"In {len(fallen)} of {known} {'seeds' if len(curves) == 1 else 'curves'}"
    where = " and ".join(f"{kl:.2g} nats ({seed})" for seed, kl in fallen)
    since = f"; from KL {where} on none is above it" if 0 < len(fallen) <= 3 >= known else ""
    return f"{counted} the gold score falls below its start, the proxy's rises{since}. "


def _at(some: Sequence[Law], curves: Sequence[Law]) -> str:
    """At how many of the strengths, if not at all of them."""
    if len(some) == len(curves):
        return ""
    return f" (at {len(some)} of {len(curves)} strengths of the proxy)"


def _named(curve: Law) -> str:
    return f" ({curve.strength})" if curve.strength else ""


def _at_peak(curve: Law) -> str:
    if curve.without_peak:
        return f"none in {len(curve.without_peak)} of {len(curve.fits)} seeds"
    why = "beta may be 0" if len(curve.fits) > 1 else "one seed"
    return told(curve.peak) if curve.shows_peak else f"not shown: {why}"


def told(estimate: SeedMean | None) -> str:
    """A mean with its interval over seeds, to three digits; a dash for None."""
    if estimate is None:
        return MISSING
    bounds = [f"{bound:.3g}" for bound in estimate.bounds or ()]
    return " ".join([f"{estimate.mean:.3g}", *([f"[{', '.join(bounds)}]"] if bounds else [])])


def caveats(curves: Sequence[Law]) -> Iterator[str]:
    """What to hold against the answer."""
    if len(curves) < STRENGTHS:
        some = "strength" if len(curves) == 1 else "strengths"
        yield f"{len(curves)} {some} of the proxy: {STRENGTHS} or more would show what it changes."
    for curve in curves:
        name = f"{curve.strength}: " if curve.strength else ""
        by_seed = [of(curve.points, seed=seed) for seed in seeds_of(curve.points)]
        kls = [{point.kl for point in points} - {0.0} for points in by_seed]
        if min(map(len, kls)) < KLS:
            yield f"{name}a seed has fewer than {KLS} KLs above 0."
        if len(kls) == 1:
            yield f"{name}one seed, so there are no intervals over seeds."
        if curve.shows_peak and not curve.reaches_beyond:
            yield (
                f"{name}no point lies beyond the peak (largest KL {number(curve.reach, 1)}): its"
                " place is extrapolated."
            )
        relative = sum(not starts(points) for points in by_seed)
        if relative:
            yield (
                f"{name}{relative} of {len(kls)} seeds have no point at KL 0: their gold scores are"
                " taken as differences from it."
            )


# -- the page --------------------------------------------------------------------------------------


def blocks(
    curves: Sequence[Law], records: Sequence[Record], left_out: Sequence[str]
) -> list[Block]:
    """The page: the answer, the law at each strength, the curves, the proxy, every point."""
    rows = [numbers_of(record) for record in records]
    points = [point for curve in curves for point in curve.points]
    method = [*METHOD, *(RUNS if records else ())]
    listed = Table(COLUMNS, [as_cells(point) for point in points], "Every point.", name="points")
    return [
        lead(turned(curves) + answer(curves), distrust(rows)),
        laws(curves),
        figure(curves),
        *against(
            [*caveats(curves), *temperature_notes(records), *notes_of_judges(rows), *left_out]
        ),
        Heading("Whether the law holds"),
        checks(curves),
        *proxy_blocks(curves),
        Heading("How it is fitted"),
        *(Text(text) for text in method),
        Heading("All points"),
        listed,
    ]


METHOD = (
    f"{LAW}, with d the square root of the KL from SFT in nats and R the gold score - that at KL"
    " 0 (Gao et al. 2022). Each seed of each strength is fitted by itself by least squares; where"
    " it has points at KL 0, the score there is fitted with them. Intervals are Student's t over"
    " the seeds. Of the peak, d* = exp(alpha / beta - 1), each seed's estimate is transformed, and"
    " the interval is that of its logarithm; the gold score there is beta d*.",
    "A third of each seed's KLs, the largest, are left out and predicted from the rest, with 95%"
    " prediction intervals (noise of one size in all seeds of a strength). The law is refuted"
    " where the errors of a strength are together too large (Chow's test of prediction, 5% over all"
    " strengths after Holm). It counts as tested only where points lie beyond a peak, which is"
    " shown where the interval of beta over seeds leaves out 0. Points that share noise, as"
    " neighbours on one training curve may, refute it too often; then the interval over seeds of"
    " the mean error is the safer guide. Wide intervals contain much: that the law is not refuted"
    " does not say that it is exact.",
)


def laws(curves: Sequence[Law]) -> Table:
    """A row a strength: alpha, beta, and the peak."""
    rows = [
        [
            curve.strength or ALL,
            told(curve.over_seeds(lambda fit: fit.alpha)),
            told(curve.over_seeds(lambda fit: fit.beta)),
            _at_peak(curve),
            told(curve.top),
            told(over_seeds(ends)) if (ends := curve.gained(lambda point: point.gold)) else MISSING,
        ]
        for curve in curves
    ]
    caption = (
        "Means over seeds with 95% intervals over seeds, from all points; gold score - that at"
        " KL 0. The last column is of the points of the largest KL alone, without a law."
    )
    header = ["proxy", "alpha", "beta", "peak at KL, nats", "gold score there"]
    columns = [*header, "gold at the largest KL"]
    return Table(columns, rows, caption, strong=True, name="law")


def checks(curves: Sequence[Law]) -> Table:
    """A row a strength: whether what was left out refutes the law."""
    wrong, _ = failing(curves)
    rows = []
    for curve in curves:
        inside = sum(forecast.inside for forecast in curve.forecasts)
        least = min(forecast.point.kl for forecast in curve.forecasts)
        counted = f"{inside} of {len(curve.forecasts)}"
        refuted = "yes" if curve in wrong else "no" if curve.reaches_beyond else UNTESTED
        told_p, bias = p_value(curve.p_value), told(curve.bias)
        rows.append([curve.strength or ALL, counted, number(least, 1), bias, told_p, refuted])
    caption = (
        "Points of the largest KL, left out of the fit: how many lie in their 95% prediction"
        " intervals, from which KL on, and their mean error, gold score - prediction, with its"
        " 95% interval over seeds. The p-value is that of all their errors together: the law is"
        f" refuted where p is below {LEVEL} after Holm's correction for the strengths."
    )
    header = ["proxy", "inside", "from KL", "mean error", "p-value", "refuted?"]
    return Table(header, rows, caption, name="left-out")


def figure(curves: Sequence[Law]) -> Block:
    """Gold score over the root of KL: points, the law, and what it predicts of those left out."""
    caption = (
        "Gold score - that at KL 0, a dot a point of a seed. Solid: the law fitted to all"
        " points, the mean over seeds with its 95% band. Dashed: fitted without the hollow points."
    )
    panel = plots.Panel("Gold score", lambda axes: _draw(axes, curves), _about(curves))
    return plots.figure("law", caption, [panel], wide=2.0, high=1.5)


def _about(curves: Sequence[Law]) -> str:
    return " ".join(
        f"{curve.strength or ALL}: alpha"
        f" {told(curve.over_seeds(lambda fit: fit.alpha))}, beta"
        f" {told(curve.over_seeds(lambda fit: fit.beta))}, peak at KL {_at_peak(curve)}."
        for curve in curves
    )


def _draw(axes: Axes, curves: Sequence[Law]) -> None:
    for place, curve in enumerate(curves):
        color = plots.COLORS[place % len(plots.COLORS)]
        _dots(axes, curve, color)
        _law(axes, curve, color)
    axes.set_xlabel("square root of KL, nats")
    plots.legend(axes)


def _dots(axes: Axes, curve: Law, color: str) -> None:
    left = {id(forecast.point) for forecast in curve.forecasts}
    for hollow in (False, True):
        own = [point for point in curve.points if (id(point) in left) == hollow]
        roots = [point.root for point in own]
        heights = [point.gold - curve.fits[point.seed].start for point in own]
        face = "none" if hollow else color
        axes.scatter(roots, heights, s=13, facecolors=face, edgecolors=color, alpha=0.75, lw=1)


def _law(axes: Axes, curve: Law, color: str) -> None:
    roots = np.linspace(0, max(point.root for point in curve.points), GRID)
    values = _lines(curve.fits.values(), roots)
    axes.plot(roots, values.mean(axis=0), color=color, label=curve.strength or "the law")
    if len(values) > 1:  # at KL 0 all lines are 0
        bands = [mean_of_seeds(at) or (at[0], at[0]) for at in values.T.tolist()]
        lows, highs = zip(*bands, strict=True)
        axes.fill_between(roots, lows, highs, color=color, alpha=0.13, lw=0)
    predicted = _lines(curve.kept.values(), roots).mean(axis=0)
    axes.plot(roots, predicted, "--", color=color, lw=1.1)


def _lines(fits: Iterable[SeedLaw], roots: Floats) -> Floats:
    """The law of each seed [seeds, roots]."""
    return np.array([fit.at(roots) for fit in fits])


def proxy_blocks(curves: Sequence[Law]) -> list[Block]:
    """The proxy on the policy's own samples against KL; nothing where no point says it."""
    panels = [
        _panel(curves, title, measure)
        for measure, title in PROXY.items()
        if any(getattr(x, measure) is not None for curve in curves for x in curve.points)
    ]
    if not panels:
        return []
    caption = "Against the square root of KL, a line a seed."
    drawn = plots.figure("proxy", caption, panels, wide=1.4)
    return [Heading("The proxy on the policy's own samples"), *accuracy_table(curves), drawn]


def accuracy_table(curves: Sequence[Law]) -> list[Table]:
    """A row a strength: accuracy at the fitted KLs, at the largest, and the difference."""
    rows = []
    for curve in curves:
        pairs = accuracies(curve.points)
        if pairs:
            before, after = (fmean(side) for side in zip(*pairs, strict=True))
            change = over_seeds([100 * (late - early) for early, late in pairs])
            rows.append([curve.strength or ALL, percent(before), percent(after), told(change)])
    header = ["proxy", "at smaller KL", "at the largest KL", "difference, points"]
    caption = (
        "How often the proxy ranks the policy's own samples as the gold scorer does: means over"
        " seeds of the points fitted and of those left out, with 95% intervals over seeds."
    )
    return [Table(header, rows, caption)] if rows else []


def _panel(curves: Sequence[Law], title: str, measure: str) -> plots.Panel:
    lines: list[tuple[str, str, list[tuple[float, float]]]] = []
    for place, curve in enumerate(curves):
        for seed in seeds_of(curve.points):
            known = [(x.root, getattr(x, measure)) for x in of(curve.points, seed=seed)]
            line = sorted((root, value) for root, value in known if value is not None)
            lines.append((curve.strength, plots.COLORS[place % len(plots.COLORS)], line))

    def draw(axes: Axes) -> None:
        named = set()
        for strength, color, line in lines:
            label = strength if strength and strength not in named else None
            named.add(strength)
            roots, values = [root for root, _ in line], [height for _, height in line]
            axes.plot(roots, values, "-o", color=color, ms=2.5, lw=0.8, alpha=0.8, label=label)
        axes.set_xlabel("square root of KL, nats")
        plots.legend(axes)

    about = " ".join(
        f"{strength} from {line[0][1]:.3g} at {line[0][0]:.3g} to {line[-1][1]:.3g} at"
        f" {line[-1][0]:.3g}."
        for strength, _, line in lines
        if line
    )
    return plots.Panel(title, draw, about)


if __name__ == "__main__":
    main()
