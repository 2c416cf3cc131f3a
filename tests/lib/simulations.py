"""Simulated judges with known biases: do intervals contain the truth 19 times in 20?

    python -m tests.lib.simulations                 200 data sets, as `make simulations`
    python -m tests.lib.simulations --data-sets 20

`tests/eval/stats/test_simulations.py` runs the same scenarios on fewer data sets: the rate at equal
length, the corrected rate with a shift, and shares with many ties.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from eval.stats.correction import corrected_rate
from eval.stats.intervals import Interval, clustered_share
from eval.stats.length_control import length_controlled
from eval.stats.verdict_table import VerdictTable

Floats = Any
Effect = Callable[[Floats], Floats]
DATA_SETS = 200
SPREAD = 0.35  # of log length ratios, about that of published summaries


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), of arrays."""
    return 1 / (1 + np.exp(-x))


# -- length and place ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Chances that the policy is preferred, shown first and second."""

    first: Callable[[Floats, Floats], Floats]
    """Of log ratios and of random numbers, one a post, from a normal distribution."""
    second: Callable[[Floats, Floats], Floats]

    def rate_at_equal_length(self, ties: float) -> float:
        """The truth: the mean of both orders at a ratio of 1, over the posts' own quality."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(80)
        equal_length = np.zeros(len(nodes))
        rates = (self.first(equal_length, nodes) + self.second(equal_length, nodes)) / 2
        rate = float(rates @ weights / weights.sum())
        return (1 - ties) * rate + ties / 2


def logistic(base: float, order: float, length: Effect, quality: float = 0.0) -> Judge:
    """Base, order, length and the post's own quality add up in logits."""
    return Judge(
        first=lambda x, post: sigmoid(base + order / 2 + length(x) + quality * post),
        second=lambda x, post: sigmoid(base - order / 2 + length(x) + quality * post),
    )


def lazy(share: float, base: float, length: Effect) -> Judge:
    """Takes the first text without reading for a share of the questions: position adds to the
    probability, not to the logit."""
    return Judge(
        first=lambda x, post: share + (1 - share) * sigmoid(base + length(x)),
        second=lambda x, post: (1 - share) * sigmoid(base + length(x)),
    )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A judge, and what it is asked."""

    judge: Judge
    posts: int = 500
    orders: int = 2
    """How many orders of a post were asked about; of one, half of the posts are shown first."""
    ratio: float = 0.2
    """Mean log length ratio."""
    ties: float = 0.0
    """Share of verdicts that are a tie, whatever the judge leans to."""

    @property
    def truth(self) -> float:
        """The rate at equal length."""
        return self.judge.rate_at_equal_length(self.ties)


def no_effect(x: Floats) -> Floats:
    """No effect of length."""
    return 0 * x


def linear(x: Floats) -> Floats:
    """Two logits for each unit of the log ratio."""
    return 2 * x


def saturating(x: Floats) -> Floats:
    """Two logits at most, most of them at a ratio of 1.2."""
    return 2 * np.tanh(x / 0.2)


COVERED = {
    "no length effect, order 2": Scenario(judge=logistic(0.595, 2, no_effect)),
    "no length effect, order 4": Scenario(judge=logistic(1.03, 4, no_effect)),
    "saturating, longer summaries": Scenario(
        judge=logistic(0, 0.7, saturating), posts=300, ratio=0.5
    ),
    "saturating, order 4": Scenario(judge=logistic(0.9, 4, saturating)),
    "linear": Scenario(judge=logistic(0.4, 0.7, linear), posts=300),
    "linear, order 4": Scenario(judge=logistic(0.9, 4, linear)),
    "linear, longer summaries": Scenario(judge=logistic(0.4, 2, linear), ratio=0.5),
    "linear, 30% ties": Scenario(judge=logistic(0.4, 2, linear), posts=300, ties=0.3),
    "linear, posts differ": Scenario(judge=logistic(0.4, 2, linear, quality=1.5)),
    "saturating, posts differ": Scenario(judge=logistic(0.4, 2, saturating, quality=1.5)),
    "place without reading": Scenario(judge=lazy(0.5, 0.4, linear)),
    "linear, one order a post": Scenario(judge=logistic(0.4, 2, linear), orders=1, posts=600),
    "saturating, one order a post": Scenario(
        judge=logistic(0.4, 2, saturating), orders=1, posts=600
    ),
}
# In these scenarios the data say little about equal length, and the model says so.
EXTRAPOLATED = {
    "saturating, far longer": Scenario(judge=logistic(0.4, 0.7, saturating), posts=300, ratio=1.0),
    "linear, few posts near": Scenario(judge=logistic(0.4, 0.7, linear), posts=60, ratio=0.5),
}


def verdicts_of(scenario: Scenario, rng: np.random.Generator) -> VerdictTable:
    """One data set."""
    posts = scenario.posts
    orders = scenario.orders
    judge = scenario.judge
    log_ratios = np.repeat(rng.normal(scenario.ratio, SPREAD, size=posts), orders)
    quality = np.repeat(rng.normal(size=posts), orders)
    shown_first = np.tile([True, False], posts) if orders == 2 else rng.random(posts) < 0.5

    if_first = judge.first(log_ratios, quality)
    if_second = judge.second(log_ratios, quality)
    probabilities = np.where(shown_first, if_first, if_second)
    outcomes = (rng.random(len(shown_first)) < probabilities).astype(float)
    outcomes[rng.random(len(shown_first)) < scenario.ties] = 0.5
    numbers = np.repeat(np.arange(posts), orders)
    return VerdictTable(
        posts=numbers,
        ids=numbers,
        outcomes=outcomes,
        shown_first=shown_first,
        log_ratios=log_ratios,
        differ=np.ones(len(shown_first), dtype=bool),
    )


# -- errors of a judge that differ from those on labeled pairs -------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shift:
    """A judge's errors on labeled pairs, and how far those on the judged texts are from them."""

    sensitivity: float = 0.75
    specificity: float = 0.8
    by: tuple[float, float] = (0.0, 0.0)
    """What is added to both on the judged texts."""
    rate: float = 0.6
    """The truth: the share of posts on which people prefer the policy."""
    pairs: int = 500
    posts: int = 500


SHIFTS = {
    "no shift": Shift(),
    "5 points, to our summaries": Shift(by=(0.05, -0.05)),
    "10 points, to our summaries": Shift(by=(0.1, -0.1)),
    "10 points, from our summaries": Shift(by=(-0.1, 0.1)),
    "10 points, better": Shift(by=(0.1, 0.1)),
}


def labeled_pairs(shift: Shift, rng: np.random.Generator) -> pd.DataFrame:
    """Labeled pairs; half of the labels are for the summary."""
    labels = rng.random(shift.pairs) < 0.5
    probabilities = np.where(labels, shift.sensitivity, 1 - shift.specificity)
    answers = (rng.random(shift.pairs) < probabilities).astype(float)
    return pd.DataFrame({"label": labels, "answer": answers, "post": np.arange(shift.pairs)})


def judged_scores(shift: Shift, rng: np.random.Generator) -> Floats:
    """The judge's scores of one policy's posts, with its errors on these texts."""
    by_sensitivity, by_specificity = shift.by
    sensitivity = shift.sensitivity + by_sensitivity
    specificity = shift.specificity + by_specificity
    is_won = rng.random(shift.posts) < shift.rate
    probabilities = np.where(is_won, sensitivity, 1 - specificity)
    return (rng.random(shift.posts) < probabilities).astype(float)


# -- counting --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How often intervals contained the truth, and the mean error; all in [0, 1]."""

    contained: float
    bias: float
    half_width: float
    """Mean half width."""
    answered: float
    """Share of the data sets with an estimate that is not called extrapolated."""


def coverage(estimates: Iterable[Any], truth: float) -> Coverage:
    """The coverage of estimates with `estimate`, `low` and `high`; None where there is none."""
    rows = []
    data_sets = 0
    answered = 0
    for estimate in estimates:
        data_sets += 1
        row = vars(estimate) if isinstance(estimate, Interval) else estimate
        if row is not None and row["estimate"] is not None:
            rows.append([row["estimate"], row["low"], row["high"]])
            answered += not row.get("extrapolated", False)
    values, lows, highs = np.array(rows).T
    return Coverage(
        contained=float(((lows <= truth) & (truth <= highs)).mean()),
        bias=float(values.mean() - truth),
        half_width=float((highs - lows).mean() / 2),
        answered=answered / data_sets,
    )


def length_coverage(scenario: Scenario, data_sets: int) -> Coverage:
    """Coverage of the rate at equal length."""
    rng = np.random.default_rng(17)
    rates = (length_controlled(verdicts_of(scenario, rng)) for _ in range(data_sets))
    return coverage(rates, scenario.truth)


def tie_coverage(ties: float, posts: int, data_sets: int) -> Coverage:
    """Coverage of a share with this share of ties; of the other posts 70% are won."""
    rng = np.random.default_rng(20)
    probabilities = [0.7 * (1 - ties), ties, 0.3 * (1 - ties)]
    numbers = np.arange(posts)
    shares = (
        clustered_share(rng.choice([1.0, 0.5, 0.0], size=posts, p=probabilities), numbers)
        for _ in range(data_sets)
    )
    return coverage(shares, ties / 2 + 0.7 * (1 - ties))


def shift_coverage(shift: Shift, data_sets: int, allowed: float) -> Coverage:
    """Coverage of the corrected rate, whose interval allows for a shift."""
    rng = np.random.default_rng(18)
    rates = (
        corrected_rate(judged_scores(shift, rng), labeled_pairs(shift, rng), allowed)
        for _ in range(data_sets)
    )
    return coverage(rates, shift.rate)


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="coverage of intervals, by simulation")
    parser.add_argument("--data-sets", type=int, default=DATA_SETS)
    data_sets = parser.parse_args(argv).data_sets
    print(f"{data_sets} data sets each; % of the truth: error, contained, half width")
    for name, scenario in (COVERED | EXTRAPOLATED).items():
        _print(f"at equal length: {name}", length_coverage(scenario, data_sets))
    for name, shift in SHIFTS.items():
        for allowed in (0.0, 0.1):
            row = f"corrected, {allowed:.1f} allowed: {name}"
            _print(row, shift_coverage(shift, data_sets, allowed))
    for ties in (0.0, 0.3, 0.6, 0.85, 0.95):
        for posts in (20, 100, 400):
            _print(f"{ties:.0%} ties, {posts} posts", tie_coverage(ties, posts, 5 * data_sets))


def _print(name: str, row: Coverage) -> None:
    numbers = f"{100 * row.bias:+5.1f} {100 * row.contained:5.1f} {100 * row.half_width:4.1f}"
    mark = "" if row.answered > 0.5 else " EXTRAPOLATED"
    print(f"{name:50} {numbers}{mark}", flush=True)


if __name__ == "__main__":
    main()
