"""How well a run's scorers rank held-out pairs: its reward model, and DPO's implicit reward."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp

from reports import paper
from reports.results import Interval, Json, RunResult, interval_from

# Group of pairs in the results -> how the page calls it.
GROUPS = {
    "by_split": "split",
    "by_strength": "strength of the label",
    "by_batch": "batch",
    "by_policies": "pair of policies",
}
MOST_GROUPS = 12  # of one kind


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A scorer of pairs, compared with taking the longer summary."""

    title: str
    pairs: int
    accuracy: Interval | None
    loss: float
    nearly_equal: Interval | None
    """Accuracy on pairs whose lengths differ by at most 10%."""
    nearly_equal_pairs: int
    at_equal_length: Interval | None
    why_not_at_equal_length: str
    above_longer: Interval | None
    """How much more often it is right than the longer summary."""
    longer: Interval | None
    longer_nearly_equal: Interval | None


@dataclass(frozen=True, kw_only=True)
class PairGroup:
    """The accuracy on some of the held-out pairs."""

    kind: str
    name: str
    pairs: int
    accuracies: tuple[Interval | None, ...]
    """Of each scorer."""
    paper: float | None
    """The paper's accuracy, where it has this size."""


@dataclass(frozen=True, kw_only=True)
class GapBin:
    """Pairs with about the same gap between their scores."""

    gap: float
    ranked_right: float
    promised: float
    """The sigmoid of the gap, which the loss fits."""
    pairs: int


@dataclass(frozen=True, kw_only=True)
class Normalization:
    """What normalization subtracted, and how far padding moves a score."""

    references: int
    mean_before: float
    std: float
    minimum: float
    maximum: float
    standard_error: float
    mean_after: float
    moved_by_padding: float


@dataclass(frozen=True, kw_only=True)
class RewardModelSection:
    """Everything that a page says about the reward."""

    function: str
    """The reward function in place of a reward model; empty without one."""
    scorers: tuple[Scorer, ...]
    groups: tuple[PairGroup, ...]
    paper_size: str
    calibration: tuple[GapBin, ...]
    normalization: Normalization


def reward_model(run: RunResult) -> RewardModelSection | None:
    """Return what is known of a run's reward; None if it trained nothing."""
    if "rm" not in run.stages or "normalize" not in run.stages:
        return None
    reward = run.stages["rm"].results
    function = reward.get("function") or ""
    results = {}
    if "pairs" in reward:
        results[f"function {function}" if function else "reward model"] = reward
    if "dpo" in run.stages and "pairs" in run.stages["dpo"].results:
        results["DPO's implicit reward"] = run.stages["dpo"].results
    size = paper.size_of(run.preset) or ""
    return RewardModelSection(
        function=function,
        scorers=tuple(_scorer(title, row) for title, row in results.items()),
        groups=tuple(_groups(results, size)),
        paper_size=size,
        calibration=tuple(_gap_bins(reward)) if results else (),
        normalization=_normalization(run.stages["normalize"].results),
    )


def accuracy_from(results: Json) -> Interval | None:
    """Return an accuracy with its interval; None without pairs."""
    if not results["pairs"]:
        return None
    return Interval(
        estimate=results["accuracy"], low=results["accuracy_low"], high=results["accuracy_high"]
    )


def _scorer(title: str, results: Json) -> Scorer:
    length = results["length"]
    nearly_equal = length["near_equal"]
    at_equal_length = length["at_equal_length"]
    return Scorer(
        title=title,
        pairs=results["pairs"],
        accuracy=accuracy_from(results),
        loss=results["loss"],
        nearly_equal=interval_from(nearly_equal),
        nearly_equal_pairs=nearly_equal["pairs"] if nearly_equal else 0,
        at_equal_length=interval_from(at_equal_length),
        why_not_at_equal_length=at_equal_length.get("why", ""),
        above_longer=interval_from(length["above_longer"]),
        longer=interval_from(length["longer"]),
        longer_nearly_equal=interval_from(length["longer_near_equal"]),
    )


def _groups(results: Mapping[str, Json], size: str) -> list[PairGroup]:
    """Return the largest groups of pairs of each kind."""
    if not results:
        return []
    main = next(iter(results.values()))
    of_paper = paper.load()["rm_accuracy_by_confidence"]["mean"] if size else {}
    groups = []
    for key, kind in GROUPS.items():
        if len(main[key]) == 1:  # the same pairs as all of them
            continue
        largest = sorted(main[key], key=lambda name: (-main[key][name]["pairs"], name))
        for name in sorted(largest[:MOST_GROUPS], key=lambda name: (len(name), name)):
            accuracies = [
                accuracy_from(row[key][name]) if name in row[key] else None
                for row in results.values()
            ]
            point = None
            if size and key == "by_strength":
                # Strengths 1 to 4 are the confidences 6 to 9 of the paper's figure.
                point = of_paper.get(str(5 + int(name)), {}).get(size)
            groups.append(
                PairGroup(
                    kind=kind,
                    name=name,
                    pairs=main[key][name]["pairs"],
                    accuracies=tuple(accuracies),
                    paper=point,
                )
            )
    return groups


def _gap_bins(results: Json) -> list[GapBin]:
    return [
        GapBin(gap=gap, ranked_right=right, promised=1 / (1 + exp(-gap)), pairs=pairs)
        for gap, right, pairs in results["calibration"]
    ]


def _normalization(results: Json) -> Normalization:
    return Normalization(
        references=results["references"],
        mean_before=results["mean_before"],
        std=results["std"],
        minimum=results["minimum"],
        maximum=results["maximum"],
        standard_error=results["standard_error"],
        mean_after=results["mean_after"],
        moved_by_padding=results["padding_difference_over_0.01"],
    )
