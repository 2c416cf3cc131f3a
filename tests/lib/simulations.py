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
from eval.stats.intervals import clustered_share
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
        of_posts = (self.first(0 * nodes, nodes) + self.second(0 * nodes, nodes)) / 2
        rate = float(of_posts @ weights / weights.sum())
        return (1 - ties) * rate + ties / 2


def logistic(base: float, order: float, length: Effect, quality: float = 0.0) -> Judge:
    """Base, order, length and the post's own quality add up in logits."""
    return Judge(
        first=lambda x, post: sigmoid(base + order / 2 + length(x) + quality * post),
        second=lambda x, post: sigmoid(base - order / 2 + length(x) + quality * post),
    )


def lazy(share: float, base: float, length: Effect) -> Judge:
    """Takes the first without reading in a share of the questions: place is additive in chances."""
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
# Here the data say little at equal length, and the model says so.
EXTRAPOLATED = {
    "saturating, far longer": Scenario(judge=logistic(0.4, 0.7, saturating), posts=300, ratio=1.0),
    "linear, few posts near": Scenario(judge=logistic(0.4, 0.7, linear), posts=60, ratio=0.5),
}


def verdicts_of(scenario: Scenario, rng: np.random.Generator) -> VerdictTable:
    """One data set."""
    posts, orders = scenario.posts, scenario.orders
    log_ratios = np.repeat(rng.normal(scenario.ratio, SPREAD, size=posts), orders)
    of_post = np.repeat(rng.normal(size=posts), orders)
    first = np.tile([True, False], posts) if orders == 2 else rng.random(posts) < 0.5
    judge = scenario.judge
    chances = np.where(first, judge.first(log_ratios, of_post), judge.second(log_ratios, of_post))
    outcomes = (rng.random(len(first)) < chances).astype(float)
    outcomes[rng.random(len(first)) < scenario.ties] = 0.5
    numbers = np.repeat(np.arange(posts), orders)
    return VerdictTable(
        posts=numbers,
        ids=numbers,
        outcomes=outcomes,
        shown_first=first,
        log_ratios=log_ratios,
        differ=np.ones(len(first), dtype=bool),
    )


# -- errors of a judge that are not those on labelled pairs ----------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shift:
    """A judge's errors on labelled pairs, and how far those on the judged texts are from them."""

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


def labelled(shift: Shift, rng: np.random.Generator) -> pd.DataFrame:
    """Labelled pairs, half of them for the summary."""
    labels = rng.random(shift.pairs) < 0.5
    right = np.where(labels, shift.sensitivity, 1 - shift.specificity)
    answers = (rng.random(shift.pairs) < right).astype(float)
    return pd.DataFrame({"label": labels, "answer": answers, "post": np.arange(shift.pairs)})


def judged(shift: Shift, rng: np.random.Generator) -> Floats:
    """Scores of one policy's posts: the judge's, with the errors that it has on them."""
    sensitivity, specificity = shift.sensitivity + shift.by[0], shift.specificity + shift.by[1]
    won = rng.random(shift.posts) < shift.rate
    return (rng.random(shift.posts) < np.where(won, sensitivity, 1 - specificity)).astype(float)


# -- counting --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How often intervals held the truth, and the mean error, in [0, 1]."""

    held: float
    bias: float
    half: float
    """Mean half width."""
    said: float
    """Share of the data sets that have an estimate which is not called extrapolated."""


def coverage(found: Iterable[Any], truth: float) -> Coverage:
    """Of estimates with `estimate`, `low` and `high`; None is an estimate withheld."""
    asked = [one if isinstance(one, dict) or one is None else vars(one) for one in found]
    given = [one for one in asked if one is not None and one["estimate"] is not None]
    rows = np.array([[one[key] for key in ("estimate", "low", "high")] for one in given])
    return Coverage(
        held=float(((rows[:, 1] <= truth) & (truth <= rows[:, 2])).mean()),
        bias=float(rows[:, 0].mean() - truth),
        half=float((rows[:, 2] - rows[:, 1]).mean() / 2),
        said=sum(not one.get("extrapolated", False) for one in given) / len(asked),
    )


def length_coverage(scenario: Scenario, data_sets: int) -> Coverage:
    """Of the rate at equal length."""
    rng = np.random.default_rng(17)
    tables = (verdicts_of(scenario, rng) for _ in range(data_sets))
    return coverage(map(length_controlled, tables), scenario.truth)


def tie_coverage(ties: float, posts: int, data_sets: int) -> Coverage:
    """Of a share of posts with so many ties; of the others 70% are won."""
    rng, truth = np.random.default_rng(20), ties / 2 + 0.7 * (1 - ties)
    chances = [0.7 * (1 - ties), ties, 0.3 * (1 - ties)]
    drawn = (rng.choice([1.0, 0.5, 0.0], size=posts, p=chances) for _ in range(data_sets))
    return coverage((clustered_share(scores, np.arange(posts)) for scores in drawn), truth)


def shift_coverage(shift: Shift, data_sets: int, allowed: float) -> Coverage:
    """Of the corrected rate, whose interval allows for a shift."""
    rng = np.random.default_rng(18)
    return coverage(
        (
            corrected_rate(judged(shift, rng), labelled(shift, rng), allowed)
            for _ in range(data_sets)
        ),
        shift.rate,
    )


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="coverage of intervals, by simulation")
    parser.add_argument("--data-sets", type=int, default=DATA_SETS)
    count = parser.parse_args(argv).data_sets
    print(f"{count} data sets each; % of the truth: error, held, half width")
    for name, scenario in (COVERED | EXTRAPOLATED).items():
        _print(f"at equal length: {name}", length_coverage(scenario, count))
    for name, shift in SHIFTS.items():
        for allowed in (0.0, 0.1):
            found = shift_coverage(shift, count, allowed)
            _print(f"corrected, {allowed:.1f} allowed: {name}", found)
    for ties in (0.0, 0.3, 0.6, 0.85, 0.95):
        for posts in (20, 100, 400):
            _print(f"{ties:.0%} ties, {posts} posts", tie_coverage(ties, posts, 5 * count))


def _print(name: str, of: Coverage) -> None:
    mark = "" if of.said > 0.5 else " EXTRAPOLATED"
    numbers = f"{100 * of.bias:+5.1f} {100 * of.held:5.1f} {100 * of.half:4.1f}"
    print(f"{name:50} {numbers}{mark}", flush=True)


if __name__ == "__main__":
    main()
