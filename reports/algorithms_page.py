"""PPO, RLOO, Dr.GRPO, DPO and best-of-n from one SFT and one reward model, at equal KL, over seeds.

    python -m reports.algorithms_page --name tiny --kl-coefs 0.02 0.05 0.1 0.2

reads the finished seeds of runs `tiny-kl0.02`, ... and writes runs/reports/rivals-tiny.md, .html.
A rival has one point per coefficient of the KL penalty, best-of-n one per n. Between its points a
rival is a straight line over the square root of KL. Two rivals are compared where both lines are,
seed by seed; nothing is extrapolated.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from eval.stats.formulas import CONFIDENCE, holm, mean_of_seeds, p_of_seeds
from reports.parts import page, plots
from reports.parts.blocks import Block, Heading, Table, Text, slug
from reports.parts.cells import MISSING, Number
from reports.parts.collect import Record, find_all, numbers_of, policies_of
from reports.parts.run_report import write_about_runs
from reports.parts.sentences import against, distrust, lead, notes_of_runs
from reports.parts.words import named, number, percent, points, seeds_mean, seeds_of, whole
from stages.config.checks import UserError
from stages.config.judge import BEST_OF
from stages.config.stages import POLICY_GRADIENT_STAGES

GRID = 21  # places at which two lines are compared
BEST = "best-of-n"
TITLES = {"gold": "gold score", "win_rate": "win rate"}
# How a difference is written.
FORMS: dict[str, Callable[[float], Number]] = {
    "gold": partial(Number, signed=True),
    "win_rate": points,
}


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
    records, left_out = find_all(names, judge)
    frame, stem = policies_frame(records), f"rivals-{name}"
    if frame.empty:
        raise UserError(f"no policy of {', '.join(names)} has a win rate: see the judge's replies")
    heading = f"{name}: {title(frame)}"
    path = write_about_runs(stem, heading, blocks(records, frame, left_out), names, records)
    return page.for_terminal([f"{heading}.", answer(frame)], path)


def policies_frame(records: Sequence[Record]) -> pd.DataFrame:
    """A row per seed, rival and setting, for policies that have a win rate and a KL.

    setting: the coefficient of the KL penalty, or n. kl: from SFT, nats a summary; of best-of-n the
    bound. gold: the gold scorer's mean, NaN where none scored. seconds: of training, NaN for none.
    """
    rows = [row for record in records for row in _rows(record)]
    if not rows:
        return pd.DataFrame()
    frame = pd.DataFrame(rows).dropna(subset=["kl", "win_rate"])
    return frame.drop_duplicates(["seed", "rival", "setting"])  # SFT is the same in every run


def _rows(record: Record) -> list[dict[str, object]]:
    """The policies of one run."""
    numbers, summaries = numbers_of(record), record.results("summaries")["policies"]
    gold = record.results("win_rate").get("scores", {}).get("gold", {})
    rows: list[dict[str, object]] = []
    for policy in policies_of(record):
        learned, best = policy in POLICY_GRADIENT_STAGES, policy.startswith(BEST_OF)
        by_updates = learned or policy == "sft"
        setting = policy.removeprefix(BEST_OF) if best else ""
        row = {
            "seed": record.seed,
            "rival": BEST if best else policy,
            "setting": f"{record.settings[policy]['kl_coef']:g}" if learned else setting,
            "kl": numbers[f"{policy}/kl"] if by_updates else summaries[policy]["kl"],
            "win_rate": numbers[f"{policy}/win_rate"],
            "gold": gold[policy]["estimate"] if gold.get(policy) else np.nan,
            "proxy": numbers[f"{policy}/score"],
            "tokens": numbers[f"{policy}/tokens"],
            "seconds": record.manifests[policy]["seconds"] if learned else np.nan,
        }
        rows.append(row)
    return rows


# -- at equal KL -----------------------------------------------------------------------------------


class Matched(NamedTuple):
    """One rival - another at equal KL, one difference a seed."""

    first: str
    second: str
    each: list[float]
    low: float
    high: float
    """The KL at which they were compared, nats: lowest and highest over the seeds."""
    apart: int
    """Seeds in which no KL is covered by both."""

    @property
    def names(self) -> str:
        """Both, as the page writes a difference."""
        return f"{named(self.first)} - {named(self.second)}"

    @property
    def is_clear(self) -> bool:
        """Whether the 95 % t interval over seeds leaves out 0; no interval of fewer than two."""
        interval = mean_of_seeds(self.each)
        return interval is not None and (interval[0] > 0 or interval[1] < 0)


def matched(frame: pd.DataFrame, first: str, second: str, measure: str) -> Matched:
    """The mean difference over the roots of KL that both lines cover, seed by seed."""
    known = frame.dropna(subset=[measure])
    known = known.assign(root=np.sqrt(known["kl"].clip(lower=0.0))).sort_values(["root", measure])
    each, apart, ends = [], 0, []
    for _, seed in known.groupby("seed"):
        line, other = (seed[seed["rival"] == rival] for rival in (first, second))
        if line.empty or other.empty:
            continue
        low = max(line["root"].min(), other["root"].min())
        high = min(line["root"].max(), other["root"].max())
        if low > high:
            apart += 1
            continue
        roots = np.linspace(low, high, GRID)
        values, others = (np.interp(roots, x["root"], x[measure]) for x in (line, other))
        each.append(float(np.mean(values - others)))
        ends += [low**2, high**2]
    return Matched(first, second, each, min(ends, default=0.0), max(ends, default=0.0), apart)


def rivals_of(frame: pd.DataFrame) -> list[str]:
    """The rivals that have a line: more than one point in some seed."""
    counts = frame[frame["rival"] != "sft"].groupby(["rival", "seed"], sort=False).size()
    return list(dict.fromkeys(counts[counts > 1].index.get_level_values("rival")))


def pairs_of(frame: pd.DataFrame) -> list[Matched]:
    """All pairs of rivals, the better one first, the largest difference first."""
    measure, pairs = measure_of(frame), []
    for first, second in combinations(rivals_of(frame), 2):
        pair = matched(frame, first, second, measure)
        if pair.each and fmean(pair.each) < 0:
            pair = matched(frame, second, first, measure)
        pairs.append(pair)
    return sorted(pairs, key=lambda x: fmean(x.each) if x.each else -1.0, reverse=True)


def better(pairs: Sequence[Matched]) -> list[Matched]:
    """The pairs that Holm's correction for all of them tells apart."""
    corrected = holm([p_of_seeds(pair.each) for pair in pairs])
    return [x for x, p in zip(pairs, corrected, strict=True) if x.is_clear and p < 1 - CONFIDENCE]


def measure_of(frame: pd.DataFrame) -> str:
    """What the answer is about: the gold score, or the win rate where nothing has one."""
    return "gold" if frame["gold"].notna().any() else "win_rate"


def title(frame: pd.DataFrame) -> str:
    """Who is better than whom at equal KL, also after Holm's correction."""
    if frame["seed"].nunique() == 1:
        return "who is better at equal KL needs several seeds, and this is one"
    over = [f"{named(x.first)} over {named(x.second)}" for x in better(pairs_of(frame))]
    if not over:
        return "at equal KL no rival is shown to be better than another"
    return f"better at equal KL: {', '.join(over)}"


def answer(frame: pd.DataFrame) -> str:
    """By what that was measured, who stands out by itself alone, and what training took."""
    measure, pairs = measure_of(frame), pairs_of(frame)
    count, seeds = len(pairs), max((len(x.each) for x in pairs), default=0)
    alone = [x for x in pairs if x.is_clear and x not in better(pairs)]
    compared = f"{count} pair{'s' * (count != 1)} compared by {TITLES[measure]}"
    parts = [f"{compared} over {seeds_of(seeds)}, with Holm's correction."]
    if alone:
        over = (f"{x.names} ({seeds_mean(x.each, FORMS[measure])})" for x in alone)
        parts.append(f"Without it these would stand out: {'; '.join(over)}.")
    seconds = frame.groupby("rival", sort=False)["seconds"].median().dropna()
    took = ", ".join(f"{named(str(rival))} {whole(each)} s" for rival, each in seconds.items())
    parts += [f"Training took {took} (median of runs that may have shared a machine)."] * bool(took)
    return " ".join(parts)


# -- the page --------------------------------------------------------------------------------------


def blocks(records: Sequence[Record], frame: pd.DataFrame, left_out: Sequence[str]) -> list[Block]:
    """The page: the answer, pairs at equal KL, the curves, and every point."""
    rows = [numbers_of(record) for record in records]
    first, *others = figures(frame)
    return [
        lead(answer(frame), distrust(rows)),
        pairs_table(frame),
        first,
        *against([*notes_of_runs(rows), *left_out]),
        Heading("Each rival"),
        *others,
        rivals_table(frame),
        Text(METHOD),
    ]


METHOD = (
    "All rivals of a seed start from its SFT model, learn from its reward model and write about the"
    " same held-out posts. They sample equally many responses, of which PPO spends some on updates"
    " of the critic alone. A rival's KL is that of its last updates, from SFT, summed over a"
    " summary's tokens; of DPO the log-ratio of its held-out summaries; of best-of-n the bound"
    " log n - (n - 1) / n. Its true KL may be smaller, so it may have been compared with rivals at"
    " a larger KL than its own. Between its points a rival is a straight line over the square root"
    f" of KL, and two lines are compared at {GRID} places of the stretch that both cover."
)


def pairs_table(frame: pd.DataFrame) -> Table:
    """All pairs of rivals: the differences at equal KL, and where they were compared."""
    rows, pairs = [], pairs_of(frame)
    for pair in pairs:
        each = {key: matched(frame, pair.first, pair.second, key).each for key in TITLES}
        verdict = "inconclusive" if pair.each else "no KL in common"
        rows.append(
            [
                pair.names,
                "better" if pair in better(pairs) else verdict,
                *(seeds_mean(each[key], FORMS[key]) for key in TITLES),
                f"{number(pair.low, 1)} to {number(pair.high, 1)}" if pair.each else MISSING,
                f"{len(pair.each)} of {len(pair.each) + pair.apart}",
            ]
        )
    caption = (
        "The better one first. Mean differences at equal KL with 95% intervals over seeds, not"
        f" corrected. Better: in {TITLES[measure_of(frame)]}, also after Holm's correction for all"
        " pairs. KL: from where to where they were compared."
    )
    header = ["pair", "verdict", *TITLES.values(), "KL, nats", "seeds"]
    return Table(header, rows, caption, strong=True, name="pairs")


def settings_of(frame: pd.DataFrame, rival: str) -> list[tuple[str, pd.DataFrame]]:
    """A rival's settings in the order of their mean KL, each with its seeds."""
    own = frame[frame["rival"] == rival]
    order = own.groupby("setting", sort=False)["kl"].mean().sort_values(kind="stable").index
    return [(str(setting), own[own["setting"] == setting]) for setting in order]


def rivals_table(frame: pd.DataFrame) -> Table:
    """Each rival at each setting: means over seeds, with intervals of what counts."""
    rows = [
        [
            named(rival),
            setting or MISSING,
            seeds_mean(group["win_rate"].tolist(), percent),
            seeds_mean(group["gold"].dropna().tolist(), number),
            number(group["proxy"].mean()),
            number(group["kl"].mean()),
            number(group["tokens"].mean(), 1),
            whole(len(group)),
        ]
        for rival in frame["rival"].unique()
        for setting, group in settings_of(frame, rival)
    ]
    header = ["", "kl_coef or n", "win rate [95%]", "gold score [95%]", "reward", "KL, nats"]
    caption = "Means over seeds of held-out summaries; in brackets 95% intervals over seeds."
    return Table([*header, "tokens", "seeds"], rows, caption)


def figures(frame: pd.DataFrame) -> list[Block]:
    """Gold score, if there is one, and win rate over the root of KL: means, bands over seeds."""
    caption = (
        "Means over seeds against the square root of KL from SFT; bands are 95% intervals over"
        " seeds. Best-of-n, dotted, needs no training."
    )
    known = [key for key in TITLES if frame[key].notna().any()]
    return [plots.figure(slug(TITLES[x]), caption, [_panel(frame, x)], wide=1.4) for x in known]


def _panel(frame: pd.DataFrame, measure: str) -> plots.Panel:
    title = {"gold": "Gold score, its own unit", "win_rate": "Win rate, %"}[measure]
    factor = 100.0 if measure == "win_rate" else 1.0

    def draw(axes: Axes) -> None:
        for rival in rivals_of(frame):
            groups = [x for _, x in settings_of(frame, rival) if x[measure].notna().all()]
            roots = [np.sqrt(group["kl"].clip(lower=0.0)).mean() for group in groups]
            values = [(factor * group[measure]).tolist() for group in groups]
            color = plots.color_of(rival) if rival != BEST else plots.INK
            style, means = ":" if rival == BEST else "-", [fmean(each) for each in values]
            axes.plot(roots, means, style, marker="o", ms=3.5, color=color, label=named(rival))
            bands = [mean_of_seeds(each) or (np.nan, np.nan) for each in values]
            low, high = np.reshape(bands, (-1, 2)).T
            axes.fill_between(roots, low, high, color=color, alpha=0.13, lw=0)
        axes.set_xlabel("square root of KL (in nats)")
        plots.legend(axes)

    return plots.Panel(title, draw)


if __name__ == "__main__":
    main()
