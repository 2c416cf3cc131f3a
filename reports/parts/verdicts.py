"""Whether a switch matters: one verdict, from differences paired by seed and from failures.

The rule stands on the page (`reports.ablations_page.limits`): a t interval over seeds, Fisher's
exact test, and two one-sided tests at 5% (the 90% t interval; Schuirmann 1987). The page gives the
verdict that remains after Holm's correction for all its switches.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from eval.stats.formulas import (
    fisher_exact,
    holm,
    mean_of_seeds,
    p_of_seeds,
    seeds_needed,
    within_margin,
)
from reports.parts.ablated import AblatedRun
from reports.parts.cells import Number
from reports.parts.words import bounds_in_points, p_value, seeds_of, whole

MARGIN = 0.03
FEWEST = 3
SURE = 0.05  # p-values below it count
WITHIN = f"within +-{100 * MARGIN:.0f} points"

MATTERS = "matters"
LITTLE = "matters little"
NOT = "does not matter"
UNKNOWN = "inconclusive"
NONE = "no verdict"


class SwitchVerdict(NamedTuple):
    """One switch's verdict, and why."""

    kind: str
    """One of the five above."""
    why: str


def verdict_of(ablation: AblatedRun) -> SwitchVerdict:
    """The verdict on one switch by itself."""
    if p_of_failures(ablation) < SURE:
        points = f"; {_points(ablation.each)}" if ablation.each else ""
        return SwitchVerdict(MATTERS, f"it changes how many seeds fail{points}")
    if len(ablation.each) < FEWEST:
        return SwitchVerdict(NONE, f"{seeds_of(len(ablation.each))} with a win rate")
    verdict = SwitchVerdict(NOT, "no summary was changed")
    if ablation.changed:
        has_spread = mean_of_seeds(ablation.each) is not None
        verdict = _by_seeds(ablation) if has_spread else _without_spread(ablation)
    if verdict.kind in (NOT, LITTLE) and ablation.ended:  # these may hide a difference
        lost = f"{seeds_of(ablation.ended)} ended in an error"
        return SwitchVerdict(UNKNOWN, f"{verdict.why}, but {lost}")
    return verdict


def _by_seeds(ablation: AblatedRun) -> SwitchVerdict:
    """The verdict by the spread of the seeds alone."""
    each, points = ablation.each, _points(ablation.each)
    bounds, small = mean_of_seeds(each), within_margin(each, MARGIN)
    if bounds is not None and (bounds[0] > 0 or bounds[1] < 0):
        posts = ablation.pair.together if ablation.pair else None
        if posts is not None and posts.low <= 0 <= posts.high:
            over = bounds_in_points((posts.low, posts.high))
            points += f"; on these posts: the interval over posts, {over}, holds 0"
        return SwitchVerdict(LITTLE if small else MATTERS, points)
    if small:
        inside = bounds_in_points(mean_of_seeds(each, 0.9))
        return SwitchVerdict(NOT, f"{points}; the 90% interval {inside} lies {WITHIN}")
    needed = seeds_needed(each, MARGIN)
    narrow = f"{whole(needed)} seeds would narrow it to +-{100 * MARGIN:.0f} points at this spread"
    if needed <= len(each):
        narrow = f"it is no wider than +-{100 * MARGIN:.0f} points, but holds 0 and reaches beyond"
    return SwitchVerdict(UNKNOWN, f"{points}; {narrow}")


def _without_spread(ablation: AblatedRun) -> SwitchVerdict:
    """The verdict where all seeds give one number: the interval over posts stands in for seeds."""
    posts = ablation.pair.together if ablation.pair else None
    if posts is None:
        return SwitchVerdict(UNKNOWN, "too many posts have no verdict")
    small = posts.low > -MARGIN and posts.high < MARGIN
    certain = posts.low > 0 or posts.high < 0
    kind = {(True, True): LITTLE, (True, False): MATTERS, (False, True): NOT}
    bounds = bounds_in_points((posts.low, posts.high))
    why = f"{_signed(posts.estimate)} points in every seed; over posts {bounds}"
    return SwitchVerdict(kind.get((certain, small), UNKNOWN), why)


def _points(each: Sequence[float]) -> str:
    """The mean difference with its 95% interval over seeds."""
    bounds = bounds_in_points(mean_of_seeds(each))
    return f"{_signed(fmean(each))} points of win rate {bounds} over {seeds_of(len(each))}"


def _signed(difference: float) -> Number:
    return Number(100 * difference, 1, signed=True)


# -- failures --------------------------------------------------------------------------------------


def p_of_failures(ablation: AblatedRun) -> float:
    """Fisher's exact p-value that the switch changes how many seeds fail; 1 without failures."""
    turned, default = ablation.turned, ablation.default
    if not turned.tried or not default.tried:
        return 1.0
    return fisher_exact((turned.failed, default.failed), (turned.tried, default.tried))


def in_brief(ablation: AblatedRun) -> str:
    """How many seeds failed on both sides; empty if none did."""
    turned, default = ablation.turned, ablation.default
    if not turned.failed and not default.failed:
        return ""
    return (
        f"{turned.failed} of {turned.tried} seeds failed, {default.failed} of {default.tried} by"
        " default"
    )


# -- many tests ------------------------------------------------------------------------------------


def p_of(ablation: AblatedRun) -> float:
    """The p-value behind a verdict: the smaller of its two tests, over seeds and of failures, and
    twice that, since either of the two would do (Bonferroni). With too few win rates failures alone
    are tested.

    Where all seeds give one number, the test over posts stands in for that over seeds.
    """
    if len(ablation.each) < FEWEST:
        return p_of_failures(ablation)
    of_seeds = p_of_seeds(ablation.each)
    posts = ablation.pair.together if ablation.pair and ablation.changed else None
    if posts and ablation.each and mean_of_seeds(ablation.each) is None:
        of_seeds = posts.p_value
    return min(1.0, 2 * min(of_seeds, p_of_failures(ablation)))


def verdicts_of(others: Sequence[AblatedRun]) -> dict[str, SwitchVerdict]:
    """The verdict on each switch among all that were turned.

    A difference that Holm's correction leaves no sign of is inconclusive, and does not matter where
    it is shown to be small.
    """
    corrected = holm([p_of(ablation) for ablation in others])
    verdicts = {}
    for ablation, p in zip(others, corrected, strict=True):
        verdict = verdict_of(ablation)
        if verdict.kind in (MATTERS, LITTLE) and p >= SURE:
            kind = NOT if verdict.kind == LITTLE else UNKNOWN
            verdict = SwitchVerdict(kind, f"{verdict.why}; {_corrected(ablation, p, others)}")
        verdicts[ablation.name] = verdict
    return verdicts


def _corrected(ablation: AblatedRun, p: float, others: Sequence[AblatedRun]) -> str:
    tests = f"{len(others)} switches" if len(others) > 1 else "its two tests"
    return f"{p_value(p_of(ablation))} by itself, {p_value(p)} after Holm's correction for {tests}"


# -- words -----------------------------------------------------------------------------------------


def sentence(ablation: AblatedRun, verdict: SwitchVerdict) -> str:
    """One switch: its verdict, why, and the seeds that failed."""
    failed, p = in_brief(ablation), p_value(p_of_failures(ablation))
    counts = f" {failed} (Fisher's exact test, {p})." if failed else ""
    return f"{ablation.name}: {verdict.kind} ({verdict.why}).{counts}"


def title(verdicts: Mapping[str, SwitchVerdict]) -> str:
    """Which switches matter, in one sentence."""
    kept = [name for name, verdict in verdicts.items() if verdict.kind in (MATTERS, LITTLE)]
    switches = f"{len(verdicts)} switch{'es' * (len(verdicts) > 1)}"
    if kept:
        return f"{len(kept)} of {switches} matter{'s' * (len(kept) == 1)}: {', '.join(kept)}"
    if {verdict.kind for verdict in verdicts.values()} == {NONE}:  # nothing was tested
        return f"too few seeds for a verdict on {switches}"
    return f"none of {switches} is shown to matter"


def summary(verdicts: Mapping[str, SwitchVerdict], most: int | None = None) -> str:
    """Each verdict with the switches that have it, in one sentence.

    `most`: of more names with a verdict only their number is told, but of those that matter.
    """
    names: dict[str, list[str]] = {}
    for name, verdict in verdicts.items():
        names.setdefault(verdict.kind, []).append(name)
    most = len(verdicts) if most is None else most
    parts = [
        f"{kind}: {', '.join(names[kind])}"
        if kind == MATTERS or len(names[kind]) <= most
        else f"{kind}: {len(names[kind])} switches"
        for kind in (MATTERS, LITTLE, UNKNOWN, NOT, NONE)
        if kind in names
    ]
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."
