"""Length and order, taken off: simulated judges of known leanings, and an independent fit."""

import numpy as np
import pytest
from scipy.optimize import minimize

from eval.rates.length_control import VerdictTable, length_controlled, rates_by_length, word_count
from eval.rates.table import analyse, verdict_table


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def simulate(rng, posts, b0, order, length, orders=2, ratio=0.2, spread=0.35, quality=0.0):
    """Verdicts of a judge with known leanings; a post's own quality is shared by its orders."""
    log_ratios = np.repeat(rng.normal(ratio, spread, size=posts), orders)
    first = np.tile([True, False], posts) if orders == 2 else rng.random(posts) < 0.5
    of_post = np.repeat(rng.normal(0, quality, size=posts), orders) if quality else 0.0
    logits = b0 + order * np.where(first, 0.5, -0.5) + length * log_ratios + of_post
    return VerdictTable(
        posts=np.repeat(np.arange(posts), orders),
        outcomes=(rng.random(len(logits)) < sigmoid(logits)).astype(float),
        shown_first=first,
        log_ratios=log_ratios,
        asked=np.ones(len(log_ratios), dtype=bool),
    )


def independent_fit(table):
    """The same estimate by a general minimiser, with a sandwich written out post by post."""
    x = np.column_stack(
        [np.ones(len(table.outcomes)), np.where(table.shown_first, 0.5, -0.5), table.log_ratios]
    )
    y = table.outcomes

    def loss(b):
        return np.logaddexp(0, x @ b).sum() - y @ (x @ b)

    b = minimize(loss, np.zeros(3), method="BFGS", options={"gtol": 1e-9}).x
    p = sigmoid(x @ b)
    bread = np.linalg.inv(x.T @ (x * (p * (1 - p))[:, None]))
    meat = np.zeros((3, 3))
    for post in np.unique(table.posts):
        mine = table.posts == post
        score = x[mine].T @ (y - p)[mine]
        meat += np.outer(score, score)
    g, n = len(np.unique(table.posts)), len(y)
    error = np.sqrt((bread @ meat @ bread)[0, 0] * g / (g - 1) * (n - 1) / (n - 3))
    return sigmoid(b[0]), sigmoid(b[0] - 1.959964 * error), sigmoid(b[0] + 1.959964 * error)


def test_the_controlled_rate_is_that_of_an_independent_fit():
    table = simulate(np.random.default_rng(0), 200, 0.3, 0.7, 2.0, quality=1.0)
    table.outcomes[::7] = 0.5  # ties
    found = length_controlled(table)
    expected = independent_fit(table)
    assert tuple(found[key] for key in ("estimate", "low", "high")) == pytest.approx(
        expected, abs=2e-5
    )


def test_a_judge_of_length_and_place_alone_is_seen_through():
    table = simulate(np.random.default_rng(1), 3000, 0.0, 0.8, 2.2)
    found = analyse(table)
    assert found["raw"]["low"] > 0.55  # what length bought
    controlled = found["length_controlled"]
    assert controlled["estimate"] == pytest.approx(0.5, abs=0.03)  # 2.5 standard errors
    assert controlled["order_logits"][1] < 0.8 < controlled["order_logits"][2]
    assert controlled["log_length_logits"][1] < 2.2 < controlled["log_length_logits"][2]
    assert found["share_first"]["low"] > 0.55
    assert found["shown_first"]["low"] > found["shown_second"]["high"]


@pytest.mark.parametrize(("orders", "posts"), [(2, 200), (1, 400)])
def test_the_controlled_interval_holds_the_truth_19_times_in_20(orders, posts):
    rng = np.random.default_rng(2)
    held = 0
    for _ in range(200):
        found = length_controlled(simulate(rng, posts, 0.4, 0.7, 2.0, orders))
        held += found["low"] <= sigmoid(0.4) <= found["high"]
    assert 0.91 <= held / 200 <= 0.985


def test_both_orders_of_a_post_are_no_two_observations():
    table = simulate(np.random.default_rng(3), 400, 0.2, 0.5, 1.5, quality=8.0)
    apart = VerdictTable(**{**vars(table), "posts": np.arange(len(table.posts))})
    clustered, plain = length_controlled(table), length_controlled(apart)
    assert clustered["estimate"] == pytest.approx(plain["estimate"])
    assert clustered["high"] - clustered["low"] > 1.2 * (plain["high"] - plain["low"])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"log_ratios": np.zeros(200)}, "all length ratios are alike"),
        ({"outcomes": np.ones(200)}, "all verdicts are alike"),
        ({"shown_first": np.ones(200, dtype=bool)}, "shown in the same place"),
        ({"outcomes": np.tile([1.0, 0.0], 100)}, "decides nearly every verdict"),
        ({"outcomes": np.full(200, np.nan)}, "fewer than 30 judgements"),
        ({"posts": np.repeat([0, 1], 100)}, "fewer than 15 posts"),
    ],
)
def test_where_there_is_no_fit_it_says_why(changes, why):
    table = simulate(np.random.default_rng(4), 100, 0.0, 0.0, 1.0)
    found = length_controlled(VerdictTable(**{**vars(table), **changes}))
    assert found["estimate"] is None
    assert why in found["why"]


def test_verdicts_that_length_alone_decides_have_no_finite_fit():
    table = simulate(np.random.default_rng(4), 100, 0.0, 0.0, 1.0)
    outcomes = (table.log_ratios > 0).astype(float)
    found = length_controlled(VerdictTable(**{**vars(table), "outcomes": outcomes}))
    assert found["estimate"] is None


def test_a_rate_at_a_ratio_that_nobody_saw_is_called_extrapolated():
    rng = np.random.default_rng(5)
    near = length_controlled(simulate(rng, 200, 0.2, 0.3, 1.0, ratio=0.1, spread=0.3))
    far = length_controlled(simulate(rng, 200, 0.2, 0.3, 1.0, ratio=1.0, spread=0.3))
    assert (near["extrapolated"], far["extrapolated"]) == (False, True)


def test_rates_by_length_are_counted_bin_by_bin():
    ratios = np.log(np.repeat([0.5, 1.0, 2.0, 3.0, 4.0], 20))
    outcomes = np.concatenate([np.repeat([1.0, 0.0], [k, 20 - k]) for k in (4, 10, 12, 16, 20)])
    table = VerdictTable(
        posts=np.arange(100),
        outcomes=outcomes,
        shown_first=np.tile([True, False], 50),
        log_ratios=ratios,
        asked=np.ones(100, dtype=bool),
    )
    found = rates_by_length(table)
    assert [one["rate"] for one in found] == pytest.approx([0.2, 0.5, 0.6, 0.8, 1.0])
    assert [one["from"] for one in found] == pytest.approx([0.5, 1, 2, 3, 4])
    assert [one["judgements"] for one in found] == [20] * 5
    # Wilson for 4 of 20, by an online calculator of the score interval.
    assert (found[0]["low"], found[0]["high"]) == pytest.approx((0.0807, 0.4160), abs=5e-4)


def row(post, order, verdict):
    return {"id": post, "order": order, "verdict": verdict}


def both(post, first, second):
    return [row(post, "policy_first", first), row(post, "reference_first", second)]


def test_the_analysis_counts_as_one_would_by_hand():
    rows = [
        *both("a", "policy", "policy"),
        *both("b", "policy", "reference"),  # the first shown, twice
        *both("c", "tie", "reference"),
        *both("d", "unjudged", "policy"),
    ]
    texts = dict.fromkeys("abcd", ("one two three", "one two"))
    found = analyse(verdict_table(rows, texts))
    assert (found["judgements"], found["posts"]) == (8, 4)
    assert found["unjudged"] == 1 / 8
    assert found["raw"]["estimate"] == pytest.approx(4.5 / 7)
    assert found["worst_case"] == pytest.approx([4.5 / 8, 5.5 / 8])
    assert found["shown_first"]["estimate"] == pytest.approx(2.5 / 3)
    assert found["shown_second"]["estimate"] == pytest.approx(2 / 4)
    # Over the posts that have both orders: 1, 1/2 and 1/4.
    assert found["order_balanced"]["estimate"] == pytest.approx(1.75 / 3)
    # Decided: a first, a second, b first, b first (by the reference), c second's loss, d's win.
    assert found["share_first"]["estimate"] == pytest.approx(4 / 6)
    assert found["swap_consistency"]["estimate"] == pytest.approx(1 / 3)
    assert found["median_length_ratio"] == pytest.approx(1.5)
    assert found["length_controlled"]["why"] == "fewer than 30 judgements"


def test_identical_texts_say_nothing_of_a_judges_consistency():
    rows = [*both("a", "tie", "tie"), *both("b", "policy", "reference")]
    texts = {"a": ("same  words", "same words"), "b": ("one", "two")}
    found = analyse(verdict_table(rows, texts))
    assert found["swap_consistency"] == {
        "estimate": 0.0,
        "low": 0.0,
        "high": 0.7934,
        "posts": 1,
    } | {
        "high": pytest.approx(1.959964**2 / (1 + 1.959964**2))  # Wilson for 0 of 1
    }
    assert found["raw"]["estimate"] == 0.5


def test_with_one_order_a_post_both_orders_weigh_alike():
    rng = np.random.default_rng(6)
    first = np.arange(400) < 300  # three times as often first
    outcomes = (rng.random(400) < np.where(first, 0.8, 0.4)).astype(float)
    table = VerdictTable(
        posts=np.arange(400),
        outcomes=outcomes,
        shown_first=first,
        log_ratios=rng.normal(size=400),
        asked=np.ones(400, dtype=bool),
    )
    found = analyse(table)["order_balanced"]
    means = outcomes[first].mean(), outcomes[~first].mean()
    assert found["estimate"] == pytest.approx(sum(means) / 2)
    error = 0.5 * np.sqrt(means[0] * (1 - means[0]) / 300 + means[1] * (1 - means[1]) / 100)
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * error, rel=0.05)


def test_a_post_that_was_seen_twice_does_not_speak_for_all():
    """100 posts in one order each, 60% won, and one more in both orders, lost in both."""
    outcomes = np.array([1.0, 1.0, 1.0, 0.0, 0.0] * 20 + [0.0, 0.0])
    table = VerdictTable(
        posts=np.array([*range(100), 100, 100]),
        outcomes=outcomes,
        shown_first=np.array([True] * 50 + [False] * 50 + [True, False]),
        log_ratios=np.zeros(102),
        asked=np.ones(102, dtype=bool),
    )
    found = analyse(table)["order_balanced"]
    assert found["estimate"] == pytest.approx(30 / 51)
    assert found["posts"] == 101


def test_an_empty_summary_has_one_word():
    assert [word_count(text) for text in ("", "  ", "one", "a b\nc")] == [1, 1, 1, 3]
