"""PPO, RLOO, Dr.GRPO and best-of-n from one SFT and one reward model, at equal KL, over seeds.

    python -m reports.rivals_page --name tiny --kl-coefs 0.02 0.05 0.1 0.2

reads the finished seeds of runs `tiny-kl0.02`, ... and writes runs/reports/rivals-tiny.md, .html.
A rival has one point per coefficient of the KL penalty, best-of-n one per n. Between its points a
rival is a straight line over the square root of KL. Two rivals are compared where both lines are,
seed by seed; nothing is extrapolated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes

from eval.rates.formulas import mean_of_seeds, p_of_seeds
from reports.parts import page, plots
from reports.parts.cells import MISSING, Number
from reports.parts.collect import Record, find_runs, numbers_of, policies_of
from reports.parts.page import Block, Heading, Table, Text
from reports.parts.reached import spent_table
from reports.parts.run_report import write_about_runs
from reports.parts.sentences import against, distrust, lead, notes_of_runs
from reports.parts.verdicts import after_holm
from reports.parts.words import named, number, seeds_mean, seeds_of
from stages.settings.checks import UserError
from stages.settings.ppo import Ppo
from stages.settings.sections import BEST_OF
from stages.settings.stages import POLICY_GRADIENT_STAGES

GRID = 21  # places at which two lines are compared
BEST = "best-of-n"
# What is compared -> its title and how many digits a difference has, after which factor.
MEASURES = {"gold": ("gold score", 2, 1.0), "win_rate": ("win rate, points", 1, 100.0)}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One policy of one seed."""

    seed: int
    rival: str
    setting: str
    """What moved it along the curve: the coefficient of the KL penalty, or n."""
    kl: float
    """From SFT, nats a summary; of best-of-n the bound."""
    win_rate: float
    gold: float | None
    """The gold scorer's mean, in its unit; None where none scored."""
    proxy: float
    tokens: float


def main(argv: list[str] | None = None) -> None:
    """Write the page and print its lines."""
    parser = page.arguments("rivals of PPO at equal KL, over seeds")
    parser.add_argument("--name", required=True, help="the run whose SFT and reward model they had")
    parser.add_argument("--kl-coefs", nargs="+", required=True, help="those of the runs to read")
    page.print_page(lambda args: write_page(args.name, args.kl_coefs, args.judge), parser, argv)


def write_page(name: str, kl_coefs: Sequence[str], judge: str = "") -> str:
    """Write the page; its lines for the terminal. Raises UserError if a run has not finished, and
    where no policy has a win rate.
    """
    names = [f"{name}-kl{coef}" for coef in dict.fromkeys(kl_coefs)]
    collected = [find_runs(run, judge) for run in names]
    records = [record for runs, _ in collected for record in runs]
    left_out = [line for _, lines in collected for line in lines]
    points, stem = points_of(records), f"rivals-{name}"
    if not points:
        raise UserError(f"no policy of {', '.join(names)} has a win rate: see the judge's replies")
    made = blocks(records, points, left_out)
    path = write_about_runs(stem, f"Rivals of PPO from run {name}", made, names, records)
    return page.for_terminal([answer(points)], path)


def points_of(records: Sequence[Record]) -> list[Point]:
    """All points; a policy without a win rate, or without a KL, has none."""
    points: list[Point] = []
    seen: set[tuple[int, str, str]] = set()  # SFT is in every run, and the same
    for record in records:
        row = numbers_of(record)
        gold = record.results("win_rate").get("scores", {}).get("gold", {})
        for policy in policies_of(record):
            kl, rate = row[f"{policy}/kl"], row[f"{policy}/win_rate"]
            rival, setting = policy, ""
            if policy.startswith(BEST_OF):
                rival, setting = BEST, policy.removeprefix(BEST_OF)
                kl = record.results("summaries")["policies"][policy]["kl"]
            elif policy in POLICY_GRADIENT_STAGES:
                setting = f"{record.settings[policy]['kl_coef']:g}"
            elif policy != "sft":
                kl = record.results("summaries")["policies"][policy]["kl"]
            if kl is None or rate is None or (record.seed, policy, setting) in seen:
                continue
            seen.add((record.seed, policy, setting))
            points.append(
                Point(
                    seed=record.seed,
                    rival=rival,
                    setting=setting,
                    kl=kl,
                    win_rate=rate,
                    gold=gold[policy]["estimate"] if gold.get(policy) else None,
                    proxy=row[f"{policy}/score"],
                    tokens=row[f"{policy}/tokens"],
                )
            )
    return points


# -- at equal KL -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Matched:
    """One rival - another at equal KL, one difference a seed."""

    first: str
    second: str
    each: list[float]
    low: float
    high: float
    """The KL at which they were compared, nats: lowest and highest over the seeds."""
    apart: list[int]
    """Seeds in which no KL is covered by both."""

    @property
    def names(self) -> str:
        """Both, as the page writes a difference."""
        return f"{named(self.first)} - {named(self.second)}"

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % t interval of the mean over seeds; None for fewer than two."""
        return mean_of_seeds(self.each)

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


def line_of(points: Sequence[Point], measure: str) -> tuple[list[float], list[float]]:
    """A rival's line in one seed: roots of KL, ascending, and the measure at each."""
    known = [(sqrt(max(0.0, point.kl)), getattr(point, measure)) for point in points]
    known = sorted((root, value) for root, value in known if value is not None)
    return [root for root, _ in known], [value for _, value in known]


def matched(points: Sequence[Point], first: str, second: str, measure: str) -> Matched:
    """The mean difference over the roots of KL that both lines cover, seed by seed."""
    each, apart, kls = [], [], []
    for seed in sorted({point.seed for point in points}):
        lines = [
            line_of([x for x in points if x.seed == seed and x.rival == rival], measure)
            for rival in (first, second)
        ]
        if not all(roots for roots, _ in lines):
            continue
        low, high = max(roots[0] for roots, _ in lines), min(roots[-1] for roots, _ in lines)
        if low > high:
            apart.append(seed)
            continue
        at = np.linspace(low, high, GRID)
        ours, theirs = (np.interp(at, roots, values) for roots, values in lines)
        each.append(float(np.mean(ours - theirs)))
        kls += [low**2, high**2]
    ends = (min(kls), max(kls)) if kls else (0.0, 0.0)
    return Matched(first=first, second=second, each=each, low=ends[0], high=ends[1], apart=apart)


def rivals_of(points: Sequence[Point]) -> list[str]:
    """The rivals that have a line: more than one point in some seed."""
    names = dict.fromkeys(point.rival for point in points if point.rival != "sft")
    seeds = {point.seed for point in points}
    return [
        rival
        for rival in names
        if any(sum(p.rival == rival and p.seed == seed for p in points) > 1 for seed in seeds)
    ]


def pairs_of(points: Sequence[Point], measure: str) -> list[Matched]:
    """All pairs of rivals, the better one first."""
    pairs = []
    for first, second in combinations(rivals_of(points), 2):
        pair = matched(points, first, second, measure)
        if pair.each and fmean(pair.each) < 0:
            pair = matched(points, second, first, measure)
        pairs.append(pair)
    return pairs


def measure_of(points: Sequence[Point]) -> str:
    """What the answer is about: the gold score, or the win rate where nothing has one."""
    return "gold" if any(point.gold is not None for point in points) else "win_rate"


def answer(points: Sequence[Point]) -> str:
    """Who is over whom at equal KL, in one sentence, and over how many seeds."""
    measure = measure_of(points)
    title = _title(measure)
    pairs = pairs_of(points, measure)
    clear = [
        f"{named(x.first)} over {named(x.second)} ({told(x, measure)}, {seeds_of(len(x.each))})"
        for x in pairs
        if x.is_clear
    ]
    seeds = max((len(x.each) for x in pairs), default=0) or len({point.seed for point in points})
    if seeds == 1:
        return "Who is over whom needs several seeds, and this is one: name more with SEEDS."
    if not clear:
        return f"At equal KL no rival is shown to be over another in {title}, over {seeds} seeds."
    rest, apart = sum(bool(x.each) for x in pairs) - len(clear), sum(not x.each for x in pairs)
    left = f"; the other {rest} pairs are inconclusive" if rest else ""
    left = "; the other pair is inconclusive" if rest == 1 else left
    left += f"; pairs without a KL in common: {apart}" if apart else ""
    p_values = {x.names: p_of_seeds(x.each) for x in pairs}
    corrected = after_holm(p_values, [x.names for x in pairs if x.is_clear], "pairs")
    stands = f"At equal KL, in {title}: {'; '.join(clear)}{left}."
    return " ".join(filter(None, (stands, corrected)))


def bound_notes(points: Sequence[Point]) -> list[str]:
    """A caveat where best-of-n, of whose KL only a bound is known, is over or under a rival."""
    clear = [x.names for x in pairs_of(points, measure_of(points)) if x.is_clear]
    some = [names for names in clear if named(BEST) in names.split(" - ")]
    if not some:
        return []
    return [
        f"{'; '.join(some)}: of best-of-n's KL an upper bound is known. Its true KL may be smaller,"
        " so it may have been compared with rivals at a larger KL than its own."
    ]


def _title(measure: str) -> str:
    """What is compared, without a unit."""
    return MEASURES[measure][0].partition(",")[0]


def told(pair: Matched, measure: str) -> Number:
    """A mean difference with its interval over seeds."""
    _, digits, factor = MEASURES[measure]
    return seeds_mean(pair.each, lambda value: Number(factor * value, digits, signed=True))


# -- the page --------------------------------------------------------------------------------------


def blocks(
    records: Sequence[Record], points: Sequence[Point], left_out: Sequence[str]
) -> list[Block]:
    """The page: the answer, the curves, pairs at equal KL, every point, and what it cost."""
    rows = [numbers_of(record) for record in records]
    spent = spent_table(records, Ppo().kl_coef)
    return [
        lead(answer(points), distrust(rows)),
        pairs_table(points),
        figure(points),
        *against([*bound_notes(points), *notes_of_runs(rows), *left_out]),
        Heading("Each rival"),
        points_table(points),
        *([Heading("What it takes"), spent] if spent else []),
        Heading("How they are compared"),
        *(Text(text) for text in METHOD),
    ]


METHOD = (
    "All rivals of a seed start from its SFT model, learn from its reward model and sample equally"
    " many responses, of which PPO spends some on updates of the critic alone. Held-out summaries"
    " are sampled at the temperature of training, because KL is that of such samples. A rival's KL"
    " is that of its last updates, from SFT, summed over a summary's tokens; of best-of-n the bound"
    " log n - (n - 1) / n; of DPO the log-ratio of its held-out summaries. The true KL of best-of-n"
    " is at most that bound, so its curve may stand too far to the right.",
    "Between its points a rival is a straight line over the square root of KL. Two lines are"
    f" compared at {GRID} places of the stretch that both cover, and nothing is extrapolated. The"
    " interval is Student's t over the seeds' mean differences. Each pair is judged by itself: the"
    " more pairs, the likelier that one stands out by chance. So the first paragraph says how many"
    " remain after Holm's correction.",
)


def pairs_table(points: Sequence[Point]) -> Table:
    """All pairs of rivals: the differences at equal KL, and where they were compared."""
    rows = []
    for pair in pairs_of(points, measure_of(points)):
        cells = [told(matched(points, pair.first, pair.second, key), key) for key in MEASURES]
        verdict = "yes" if pair.is_clear else "inconclusive" if pair.each else "no KL in common"
        kl = f"{pair.low:.1f} to {pair.high:.1f}" if pair.each else MISSING
        seeds = f"{len(pair.each)} of {len(pair.each) + len(pair.apart)}"
        rows.append([pair.names, verdict, *cells, kl, seeds])
    header = ["pair", "over?", *(title for title, *_ in MEASURES.values()), "KL, nats", "seeds"]
    caption = (
        "The better one first. Mean differences at equal KL with 95% intervals over seeds; over:"
        f" the interval of the {_title(measure_of(points))} leaves out 0."
    )
    return Table(header, rows, caption, strong=True)


def settings_of(points: Sequence[Point], rival: str) -> list[str]:
    """What moved a rival along its curve, in the order of its mean KL."""
    settings = dict.fromkeys(point.setting for point in points if point.rival == rival)
    return sorted(settings, key=lambda setting: fmean(x.kl for x in at(points, rival, setting)))


def at(points: Sequence[Point], rival: str, setting: str) -> list[Point]:
    """The points of one rival at one setting, a seed each."""
    return [point for point in points if (point.rival, point.setting) == (rival, setting)]


def points_table(points: Sequence[Point]) -> Table:
    """Each rival at each setting: means over seeds, with intervals of what counts."""
    rows = []
    for rival in dict.fromkeys(point.rival for point in points):
        for setting in settings_of(points, rival):
            group = at(points, rival, setting)
            rows.append(
                [
                    named(rival),
                    setting or MISSING,
                    number(fmean(point.kl for point in group)),
                    number(fmean(point.proxy for point in group)),
                    _mean([point.gold for point in group], "gold"),
                    _mean([point.win_rate for point in group], "win_rate"),
                    number(fmean(point.tokens for point in group), 1),
                    str(len(group)),
                ]
            )
    header = ["", "kl_coef or n", "KL, nats", "reward", "gold score", "win rate, %"]
    caption = "Means over seeds of held-out summaries; in brackets 95% intervals over seeds."
    return Table([*header, "tokens", "seeds"], rows, caption)


def _mean(values: Sequence[float | None], measure: str) -> Number:
    known = [value for value in values if value is not None]
    _, digits, factor = MEASURES[measure]
    return seeds_mean(known, lambda value: Number(factor * value, digits))


def figure(points: Sequence[Point]) -> Block:
    """Gold score and win rate over the root of KL, means and bands over seeds."""
    measures = [key for key in MEASURES if any(getattr(x, key) is not None for x in points)]
    caption = (
        "Means over seeds against the square root of KL from SFT; bands are 95% intervals over"
        " seeds. Best-of-n, dotted, needs no training."
    )
    return plots.figure("rivals", caption, [_panel(points, key) for key in measures], wide=1.4)


def _panel(points: Sequence[Point], measure: str) -> plots.Panel:
    title, _, factor = MEASURES[measure]
    title = title.replace("points", "%")  # a rate, where the table has differences
    lines = {}
    for rival in rivals_of(points):
        groups = [at(points, rival, setting) for setting in settings_of(points, rival)]
        values = [[getattr(x, measure) for x in group] for group in groups]
        lines[rival] = [
            (fmean(sqrt(max(0.0, x.kl)) for x in group), factor * fmean(own), mean_of_seeds(own))
            for group, own in zip(groups, values, strict=True)
            if None not in own
        ]

    def draw(axes: Axes) -> None:
        for rival, line in lines.items():
            color = plots.color_of(rival) if rival != BEST else plots.INK
            roots, means = [root for root, *_ in line], [mean for _, mean, _ in line]
            style = ":" if rival == BEST else "-"
            axes.plot(roots, means, style, marker="o", ms=3.5, color=color, label=named(rival))
            bands = [(root, band) for root, _, band in line if band]
            if bands:
                lows, highs = ([factor * band[end] for _, band in bands] for end in (0, 1))
                axes.fill_between(
                    [root for root, _ in bands], lows, highs, color=color, alpha=0.13, lw=0
                )
        axes.set_xlabel("square root of KL, nats")
        plots.legend(axes)

    about = " ".join(
        f"{named(rival)}: " + ", ".join(f"{mean:.2f} at {root:.2f}" for root, mean, _ in line) + "."
        for rival, line in lines.items()
    )
    return plots.Panel(f"{title[0].upper()}{title[1:]}", draw, about)


if __name__ == "__main__":
    main()
