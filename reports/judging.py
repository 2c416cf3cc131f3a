"""The judge of a run on its page: its controls, its prompt, and its calibration."""

from collections.abc import Mapping
from dataclasses import dataclass

from eval.calibration import HUMAN_CEILING, correct
from eval.control_texts import CONTROLS
from eval.judges.protocol import VERDICTS
from eval.stats.correction import SHIFT
from reports.posts import judged_posts
from reports.results import Interval, Json, RunResult, interval_from, title_of
from stages.config.judge import MOST_UNJUDGED
from stages.config.judge_prompt import OVERALL, REPLY_AS_JSON, REPLY_AS_LINES, read_prompt

LONGEST = "longest"
BUILT_IN = "built-in world"  # the source of the built-in labels
# The families of the built-in writers, whose names end at the first underscore.
FAMILIES = {
    "best": "best-of-n",
    "off": "off-topic",
    "sup": "supervised",
    "ref": "reference",
}


def _family_title(name: str) -> str:
    """Return how pages call a family of policies, or two that are compared: `best and off`."""
    return " and ".join(FAMILIES.get(part, part) for part in name.split(" and "))


@dataclass(frozen=True, kw_only=True)
class RuleText:
    """How pages write a simple rule: in a table or plot, and in the middle of a sentence."""

    title: str
    phrase: str


# The simple judges of `eval.stats.simple_judges`, which need no judgment.
RULES = {
    "majority": RuleText(
        title="the most common label", phrase="always giving the most common label"
    ),
    LONGEST: RuleText(title="choose the longer text", phrase="choosing the longer text"),
    "overlap": RuleText(
        title="choose what repeats more of the post",
        phrase="choosing the text that repeats more of the post",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ControlRow:
    """One kind of text that a good judge must not prefer to the reference."""

    what: str
    posts: float
    preferred: Interval | None
    """How often the judge preferred it; None if it was not asked, or too much is unjudged."""
    unjudged: float | None
    result: str
    proves: str


@dataclass(frozen=True, kw_only=True)
class SimpleJudge:
    """Another judge on the same labeled pairs, compared with the calibrated one."""

    name: str
    title: str
    kappa: Interval | None
    agreement: Interval | None
    difference: Interval | None
    """By how much the calibrated judge agrees more often."""
    same: Interval | None
    """The same verdict, of the pairs that both decide."""
    right_if_same: Interval | None

    @property
    def is_rule(self) -> bool:
        """Whether it is a simple rule that needs no judgment."""
        return self.name in RULES

    @property
    def phrase(self) -> str:
        """What a rule does, in the middle of a sentence."""
        return RULES[self.name].phrase


@dataclass(frozen=True, kw_only=True)
class FamilyErrors:
    """How often the judge agrees with labels on one family of policies."""

    name: str
    pairs: int
    sensitivity: Interval | None
    specificity: Interval | None


@dataclass(frozen=True, kw_only=True)
class CorrectedRate:
    """A win rate corrected for the judge's errors on labeled pairs."""

    title: str
    raw: float | None
    rate: Interval | None

    @property
    def is_clipped(self) -> bool:
        """Whether the correction went beyond what a share can be."""
        return self.rate is not None and self.rate.estimate in (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """A judge on labeled pairs, and the win rates corrected by it."""

    pairs: int
    of_pairs: int
    posts: int
    ties: int
    is_built_in: bool
    is_own_rule: bool
    """Whether the labels are the judge's own rule with noise, so that they cannot test it."""
    source: str
    flags: tuple[str, ...]
    undecided: str
    kappa: Interval | None
    agreement: Interval | None
    agreement_decided: Interval | None
    prefers_longer: Interval | None
    labels_prefer_longer: Interval | None
    picks_first: Interval | None
    same_after_swap: Interval | None
    unjudged: float
    others: tuple[SimpleJudge, ...]
    families: tuple[FamilyErrors, ...]
    error_pairs: int
    with_reference: bool
    sensitivity: Interval | None
    specificity: Interval | None
    corrected: tuple[CorrectedRate, ...]
    shift: float

    @property
    def decided(self) -> float:
        """The share of the pairs on which the judge has a preference."""
        return (self.pairs - self.ties) / self.pairs

    @property
    def has_other_judges(self) -> bool:
        """Whether other judges than the simple rules are compared."""
        return any(not other.is_rule for other in self.others)

    @property
    def human_ceiling(self) -> str:
        """How often people agree with each other, in percent."""
        low, high = HUMAN_CEILING
        return f"{100 * low:.0f} to {100 * high:.0f}%"


def control_rows(results: Json) -> list[ControlRow]:
    """Return the controls of a judge, from the results of the stage `controls`."""
    rows = []
    for name, control in results["controls"].items():
        preferred = None
        unjudged = None
        if not control["judgements"]:
            result = f"not available: {control['why']}"
        else:
            unjudged = control["unjudged"]
            if control["preferred"] is not None and unjudged <= MOST_UNJUDGED:
                preferred = Interval(
                    estimate=control["preferred"], low=control["low"], high=control["high"]
                )
            result = control.get("why") or ("passed" if control["passed"] else "FAILED")
        rows.append(
            ControlRow(
                what=control["what"],
                posts=control["judgements"] / len(VERDICTS),
                preferred=preferred,
                unjudged=unjudged,
                result=result,
                proves=CONTROLS[name].proves,
            )
        )
    return rows


def judge_prompt(judge: Json) -> str:
    """Return what an LLM judge with these settings is sent; empty for other judges."""
    if judge["kind"] != "openai":
        return ""
    template = read_prompt(judge.get("prompt", ""), judge.get("axis", OVERALL))
    return (
        f"{template.text}\n\n{REPLY_AS_JSON}\n\n(to a server without JSON schemas:)\n\n"
        f"{REPLY_AS_LINES}"
    )


def calibration_result(
    results: Json | None,
    corrected: Mapping[str, Interval | None],
    raw: Mapping[str, float | None] | None = None,
    shift: float = SHIFT,
) -> CalibrationResult | None:
    """Return a calibration with types; None if the judge was not calibrated."""
    if results is None:
        return None
    is_built_in = results["source"] == BUILT_IN
    statistics = results["statistics"]
    longer = results["prefers_longer"] or {"judge": None, "labels": None}
    others = [
        SimpleJudge(
            name=name,
            title=RULES[name].title if name in RULES else name,
            kappa=interval_from(other["kappa"]),
            agreement=interval_from(other["agreement"]),
            difference=interval_from(other["difference"]),
            same=interval_from(other.get("same")),
            right_if_same=interval_from(other.get("right")),
        )
        for name, other in results["simple"].items()
    ]
    families = [
        FamilyErrors(
            name=_family_title(name) if is_built_in else name,
            pairs=family["pairs"],
            sensitivity=interval_from(family["sensitivity"]),
            specificity=interval_from(family["specificity"]),
        )
        for name, family in results["by_family"].items()
    ]
    return CalibrationResult(
        pairs=results["pairs"],
        of_pairs=results["of_pairs"],
        posts=results["posts"],
        ties=results["ties"],
        is_built_in=is_built_in,
        is_own_rule=is_built_in and results["judge"]["kind"] == "facts",
        source=results["source"],
        flags=tuple(results["flags"]),
        undecided=results.get("undecided") or "",
        kappa=interval_from(results["kappa_interval"]),
        agreement=interval_from(results["agreement"]),
        agreement_decided=interval_from(results["agreement_decided"]),
        prefers_longer=interval_from(longer["judge"]),
        labels_prefer_longer=interval_from(longer["labels"]),
        picks_first=interval_from(statistics["share_first"]),
        same_after_swap=interval_from(statistics["swap_consistency"]),
        unjudged=statistics["unjudged"],
        others=tuple(others),
        families=tuple(families),
        error_pairs=results["error_pairs"],
        with_reference=results["with_reference"],
        sensitivity=interval_from(results["sensitivity"]),
        specificity=interval_from(results["specificity"]),
        corrected=tuple(
            CorrectedRate(
                title=title_of(policy, list(corrected)), raw=(raw or {}).get(policy), rate=rate
            )
            for policy, rate in corrected.items()
        ),
        shift=shift,
    )


def calibration_of_run(run: RunResult) -> CalibrationResult | None:
    """Return the calibration of a run's judge, and the win rates corrected by it."""
    if run.calibration is None:
        return None
    corrected: dict[str, Interval | None] = {}
    shift = SHIFT
    for name, policy in run.policies.items():
        corrected[name] = None
        posts = judged_posts(run, name).dropna(subset=["score"])
        scores = [*zip(posts["text"], posts["score"], strict=True)]
        if not scores or policy.win_rate is None:
            continue
        rate = correct(scores, list(run.calibration_pairs))
        if rate is not None:
            corrected[name] = Interval(estimate=rate.estimate, low=rate.low, high=rate.high)
            shift = max(shift, rate.shift)
    raw = {
        name: policy.win_rate.estimate if policy.win_rate else None
        for name, policy in run.policies.items()
    }
    return calibration_result(run.calibration, corrected, raw, shift)
