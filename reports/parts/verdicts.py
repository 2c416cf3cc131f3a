"""Whether a switch matters: one verdict, from differences paired by seed and from failures.

A switch matters where the 95% t interval over seeds leaves out 0, or where Fisher's exact test
says that it changes how many seeds fail. It does not matter where two one-sided tests at 5% (the
90% t interval over seeds; Schuirmann 1987) show the difference to lie within `MARGIN`. Else it is
inconclusive. Of fewer than `FEWEST` seeds there is no verdict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from eval.rates.formulas import (
    fisher_exact,
    holm,
    mean_of_seeds,
    p_of_seeds,
    seeds_needed,
    within_margin,
)
from reports.parts.ablated import AblatedRun
from reports.parts.words import bounds_in_points, p_value, seeds_of, whole

MARGIN = 0.03
FEWEST = 3
SURE = 0.05  # p-values below it count
WITHIN = f"within +-{100 * MARGIN:.0f} points"

MATTERS = "matters"
LITTLE = f"matters little: {WITHIN}, but not 0"
NOT = "does not matter"
UNKNOWN = "inconclusive"
NONE = "no verdict"


@dataclass(frozen=True, kw_only=True)
class SwitchVerdict:
    """One switch's verdict, and why."""

    kind: str
    """One of the five above."""
    why: str


def verdict_of(ablation: AblatedRun) -> SwitchVerdict:
    """The verdict on one switch."""
    seeds, p = len(ablation.each), p_of_failures(ablation)
    if p < SURE:
        points = f"; {_points(ablation.each)}" if ablation.each else ""
        return SwitchVerdict(kind=MATTERS, why=f"{_safe(ablation)} prevents failures{points}")
    if seeds < FEWEST:
        why = f"{seeds_of(seeds)} with a win rate, and fewer than {FEWEST} say too little"
        return SwitchVerdict(kind=NONE, why=f"{why} about other seeds")
    if not ablation.changed:
        return _unless_some_ended(ablation, SwitchVerdict(kind=NOT, why="no summary was changed"))
    if mean_of_seeds(ablation.each) is None:
        return _unless_some_ended(ablation, _without_spread(ablation))
    return _unless_some_ended(ablation, _by_seeds(ablation))


def _by_seeds(ablation: AblatedRun) -> SwitchVerdict:
    """The verdict by the spread of the seeds alone."""
    each = ablation.each
    bounds, points = mean_of_seeds(each), _points(each)
    certain = bounds is not None and (bounds[0] > 0 or bounds[1] < 0)
    small = within_margin(each, MARGIN)
    if certain:
        why = f"{points}{_if_posts_doubt(ablation)}"
        return SwitchVerdict(kind=LITTLE if small else MATTERS, why=why)
    if small:
        inside = bounds_in_points(mean_of_seeds(each, 0.9))
        return SwitchVerdict(kind=NOT, why=f"{points}; the 90% interval {inside} lies {WITHIN}")
    needed = seeds_needed(each, MARGIN)
    narrow = f"{whole(needed)} seeds would narrow it to +-{100 * MARGIN:.0f} points at this spread"
    if needed <= len(each):
        narrow = f"it is no wider than +-{100 * MARGIN:.0f} points, but holds 0 and reaches beyond"
    return SwitchVerdict(kind=UNKNOWN, why=f"{points}; {narrow}")


def _if_posts_doubt(ablation: AblatedRun) -> str:
    """What to add where seeds agree on these posts, and others might show nothing."""
    posts = ablation.pair.together if ablation.pair else None
    if posts is None or posts.low > 0 or posts.high < 0:
        return ""
    bounds = bounds_in_points((posts.low, posts.high))
    return f"; on these posts: the interval over posts, {bounds}, holds 0"


def _without_spread(ablation: AblatedRun) -> SwitchVerdict:
    """The verdict where all seeds give one number: the interval over posts stands in for seeds."""
    posts = ablation.pair.together if ablation.pair else None
    if posts is None:
        return SwitchVerdict(kind=UNKNOWN, why="too many posts have no verdict")
    small = posts.low > -MARGIN and posts.high < MARGIN
    certain = posts.low > 0 or posts.high < 0
    kind = {(True, True): LITTLE, (True, False): MATTERS, (False, True): NOT}
    bounds = bounds_in_points((posts.low, posts.high))
    why = f"{100 * posts.estimate:+.1f} points in every seed; over posts {bounds}"
    return SwitchVerdict(kind=kind.get((certain, small), UNKNOWN), why=why)


def _unless_some_ended(ablation: AblatedRun, verdict: SwitchVerdict) -> SwitchVerdict:
    """The same, unless a difference may be hidden by seeds that gave no result."""
    if verdict.kind not in (NOT, LITTLE) or not ablation.ended:
        return verdict
    lost = f"{seeds_of(ablation.ended)} ended in an error, so the other seeds are not enough"
    return SwitchVerdict(kind=UNKNOWN, why=f"{verdict.why}, but {lost}")


def _points(each: Sequence[float]) -> str:
    """The mean difference with its 95% interval over seeds."""
    bounds = bounds_in_points(mean_of_seeds(each))
    return f"{100 * fmean(each):+.1f} points of win rate {bounds} over {seeds_of(len(each))}"


# -- failures --------------------------------------------------------------------------------------


def p_of_failures(ablation: AblatedRun) -> float:
    """Fisher's exact p-value that the switch changes how many seeds fail; 1 without failures."""
    turned, default = ablation.turned, ablation.default
    if not turned.tried or not default.tried:
        return 1.0
    return fisher_exact((turned.failed, default.failed), (turned.tried, default.tried))


def _safe(ablation: AblatedRun) -> str:
    """The side that fails less often."""
    turned, default = ablation.turned, ablation.default
    if turned.failed * default.tried < default.failed * turned.tried:
        return "the switch"
    return "what it takes away" if _takes_away(ablation) else "the default's setting"


def _takes_away(ablation: AblatedRun) -> bool:
    return ablation.name.startswith("no-")


def in_brief(ablation: AblatedRun) -> str:
    """How many seeds failed on both sides; empty if none did."""
    turned, default = ablation.turned, ablation.default
    if not turned.failed and not default.failed:
        return ""
    return (
        f"{turned.failed} of {turned.tried} seeds failed, {default.failed} of {default.tried} by"
        " default"
    )


def failures(ablation: AblatedRun) -> str:
    """The same with the p-value."""
    counts, p = in_brief(ablation), p_value(p_of_failures(ablation))
    return f"{counts} (Fisher's exact test, {p})." if counts else ""


# -- many tests ------------------------------------------------------------------------------------


def p_of(ablation: AblatedRun) -> float:
    """The p-value behind a verdict: the smaller of its two tests, over seeds and of failures, and
    twice that, since either of the two would do (Bonferroni).

    Where all seeds give one number, the test over posts stands in for that over seeds.
    """
    of_seeds = p_of_seeds(ablation.each)
    posts = ablation.pair.together if ablation.pair and ablation.changed else None
    if posts and ablation.each and mean_of_seeds(ablation.each) is None:
        of_seeds = posts.p_value
    return min(1.0, 2 * min(of_seeds, p_of_failures(ablation)))


def remaining(others: Sequence[AblatedRun]) -> str:
    """How many of the switches that matter by themselves do so among all that were turned."""
    clear = [x.name for x in others if verdict_of(x).kind in (MATTERS, LITTLE)]
    return after_holm({x.name: p_of(x) for x in others}, clear, "switches")


def after_holm(p_values: Mapping[str, float], clear: Sequence[str], what: str) -> str:
    """How many of the differences that stand out by themselves do so among all that were tested.

    `p_values`: every name -> its own p-value; `clear`: the names that stand out. Empty without any.
    """
    corrected = dict(zip(p_values, holm([*p_values.values()]), strict=True))
    kept = [name for name in clear if corrected[name] < SURE]
    if not clear or len(p_values) < 2:
        return ""
    named = f" ({', '.join(kept)})" if 0 < len(kept) < len(clear) else ""
    return (
        f"After Holm's correction for all {len(p_values)} {what}, {len(kept)} of {len(clear)}"
        f" remain{'s' * (len(clear) == 1)}{named}."
    )


# -- words -----------------------------------------------------------------------------------------


def sentence(ablation: AblatedRun) -> str:
    """One switch: its verdict, why, and the seeds that failed."""
    verdict = verdict_of(ablation)
    verdict_text = f"{ablation.name}: {verdict.kind} ({verdict.why})."
    return " ".join(filter(None, (verdict_text, failures(ablation))))


def summary(others: Sequence[AblatedRun], most: int | None = None) -> str:
    """Which switches matter, which do not, and which are inconclusive, in one sentence.

    Where none has a verdict, nothing was tested, and the sentence says that. `most`: of more names
    in a group only their number is told, but of those that matter.
    """
    names: dict[str, list[str]] = {}
    for ablation in others:
        names.setdefault(verdict_of(ablation).kind, []).append(ablation.name)
    groups = {
        MATTERS: ("matters", "matter"),
        LITTLE: ("matters little", "matter little"),
        NOT: ("does not matter", "do not matter"),
        UNKNOWN: ("is inconclusive", "are inconclusive"),
        NONE: ("has no verdict", "have no verdict"),
    }
    most = len(others) if most is None else most
    if [*names] == [NONE]:
        named = f" ({', '.join(names[NONE])})" if len(others) <= most else ""
        return f"No verdict on {_switches(others)}{named}: fewer than {FEWEST} seeds."
    parts = [
        f"{len(sorted_in)} {several if len(sorted_in) > 1 else single}"
        + (f" ({', '.join(sorted_in)})" if kind == MATTERS or len(sorted_in) <= most else "")
        for kind, (single, several) in groups.items()
        if (sorted_in := names.get(kind))
    ]
    if MATTERS not in names:
        parts.insert(0, "none is shown to matter for the win rate")
    return f"Of {_switches(others)}, {'; '.join(parts)}."


def _switches(others: Sequence[AblatedRun]) -> str:
    return f"{len(others)} switch{'es' if len(others) > 1 else ''}"
