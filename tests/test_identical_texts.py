"""Identical texts at equal length: ties that say nothing of a judge, beside those that differ."""

import numpy as np
import pytest

from eval.rates.length_control import VerdictTable, length_controlled


def beside_identical(table, identical):
    """A table of both orders of each post, and so many posts more whose two texts are identical."""
    rows = 2 * identical
    posts = np.repeat(1_000_000 + np.arange(identical), 2)
    columns = {
        "posts": posts,
        "ids": posts,
        "outcomes": np.full(rows, 0.5),
        "shown_first": np.tile([True, False], identical),
        "log_ratios": np.zeros(rows),
        "differ": np.zeros(rows, dtype=bool),
    }
    both = {name: np.concatenate([vars(table)[name], columns[name]]) for name in columns}
    return VerdictTable(**both)


def four_of_five_won(posts, ratios):
    """Every fifth post is lost in both orders, the others are won, at any length."""
    return VerdictTable(
        posts=np.repeat(np.arange(posts), 2),
        ids=np.repeat(np.arange(posts), 2),
        outcomes=np.repeat(np.arange(posts) % 5 > 0, 2).astype(float),
        shown_first=np.tile([True, False], posts),
        log_ratios=np.repeat(ratios, 2),
        differ=np.ones(2 * posts, dtype=bool),
    )


def test_identical_texts_are_ties_at_any_length_and_say_nothing_of_equal_length():
    """100 identical texts pulled the rate to 50%, and stood for posts of nearly equal length."""
    differing = four_of_five_won(300, np.repeat(np.linspace(0.1, 0.9, 60), 5))
    found = length_controlled(beside_identical(differing, 100))
    assert found["estimate"] == pytest.approx(0.25 / 2 + 0.75 * 0.8, abs=1e-6)  # the raw rate
    assert found["low"] < 0.725 < found["high"]
    assert found["extrapolated"]
    assert found["near_equal"] == length_controlled(differing)["near_equal"] < 60


def test_the_share_of_identical_texts_varies_with_the_posts():
    rng = np.random.default_rng(2)
    table = beside_identical(four_of_five_won(100, rng.normal(0, 0.35, 100)), 100)
    pairs = np.arange(400).reshape(200, 2)  # the rows of each post
    estimates = []
    for _ in range(200):
        rows = pairs[rng.integers(200, size=200)].ravel()
        drawn = table.only(rows)
        drawn.posts[:] = np.repeat(np.arange(200), 2)
        estimates.append(length_controlled(drawn)["estimate"])
    found = length_controlled(table)
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * np.std(estimates), rel=0.15)
    # By hand: half of the rate's own error, and what a share of 1/2 in 200 posts adds.
    alone = length_controlled(table.only(table.differ))
    own, above = (alone["estimate"] - alone["low"]) / 2, alone["estimate"] - 0.5
    both = np.hypot(own, above * 1.96 * np.sqrt(0.25 / 200))
    assert found["estimate"] - found["low"] == pytest.approx(both, rel=1e-3)
