"""The win rate at equal length, for simulated judges of known biases and by an independent fit."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import approx_fprime, minimize

from eval.stats.length_control import length_controlled, rates_by_length
from eval.stats.table import analyse
from eval.stats.verdict_table import VerdictTable
from tests.lib.simulations import Scenario, linear, logistic, no_effect, sigmoid, verdicts_of

Z = 1.959964


def table_of(posts, outcomes, shown_first, log_ratios):
    """Verdicts on texts that differ."""
    return VerdictTable(
        posts=posts,
        ids=posts,
        outcomes=outcomes,
        shown_first=shown_first,
        log_ratios=log_ratios,
        differ=np.ones(len(posts), dtype=bool),
    )


def both_orders_of(outcomes, log_ratios):
    """Verdicts on posts that were judged in both orders, with the same outcome in each."""
    posts = len(outcomes)
    return table_of(
        np.repeat(np.arange(posts), 2),
        np.repeat(outcomes, 2).astype(float),
        np.tile([True, False], posts),
        np.repeat(log_ratios, 2),
    )


def simulate(judge, *, posts, seed, ratio=0.2):
    scenario = Scenario(judge=judge, posts=posts, ratio=ratio)
    return verdicts_of(scenario, np.random.default_rng(seed))


# -- the model -------------------------------------------------------------------------------------


def independent_fit(table):
    """The rate and its bounds by a general minimizer, with the sandwich formula written out and the
    delta method by numerical derivatives."""
    order = np.where(table.shown_first, 0.5, -0.5)
    ratios = np.exp(table.log_ratios)
    # tanh(log(r) / s) is (r^(2/s) - 1) / (r^(2/s) + 1); s is 0.8 and 0.2.
    wide = (ratios**2.5 - 1) / (ratios**2.5 + 1)
    narrow = (ratios**10 - 1) / (ratios**10 + 1)
    x = np.column_stack([np.ones(len(order)), order, wide, narrow, order * wide])
    y = table.outcomes

    def loss(b):
        return np.logaddexp(0, x @ b).sum() - y @ (x @ b)

    def logit_of_rate(b):
        rate = (sigmoid(b[0] + b[1] / 2) + sigmoid(b[0] - b[1] / 2)) / 2
        return np.log(rate / (1 - rate))

    b = minimize(loss, np.zeros(5), method="BFGS", options={"gtol": 1e-9}).x
    p = sigmoid(x @ b)
    bread = np.linalg.inv(x.T @ (x * (p * (1 - p))[:, None]))
    meat = np.zeros((5, 5))
    posts = np.unique(table.posts)
    for post in posts:
        rows = table.posts == post
        score = x[rows].T @ (y - p)[rows]
        meat += np.outer(score, score)
    g = len(posts)
    n = len(y)
    covariance = bread @ meat @ bread * g / (g - 1) * (n - 1) / (n - 5)
    gradient = approx_fprime(b, logit_of_rate, 1e-6)
    error = np.sqrt(gradient @ covariance @ gradient)
    logit = logit_of_rate(b)
    return sigmoid(logit), sigmoid(logit - Z * error), sigmoid(logit + Z * error)


def test_the_rate_is_that_of_an_independent_fit():
    table = simulate(logistic(0.3, 1.7, linear, quality=1.0), posts=200, seed=0)
    table.outcomes[::7] = 0.5  # ties

    result = length_controlled(table)

    rate, low, high = independent_fit(table)
    assert result["estimate"] == pytest.approx(rate, abs=5e-5)
    assert result["low"] == pytest.approx(low, abs=5e-5)
    assert result["high"] == pytest.approx(high, abs=5e-5)


@pytest.mark.parametrize("order", [0.0, 2.0, 4.0])
def test_without_an_effect_of_length_the_rate_is_the_order_balanced_one(order):
    judge = logistic(0.9, order, no_effect)

    result = analyse(simulate(judge, posts=4000, seed=8, ratio=0.0))

    rate = result["length_controlled"]["estimate"]
    truth = (sigmoid(0.9 + order / 2) + sigmoid(0.9 - order / 2)) / 2
    assert rate == pytest.approx(result["order_balanced"]["estimate"], abs=0.01)
    assert rate == pytest.approx(truth, abs=0.02)


def test_a_judge_of_length_and_position_alone_is_seen_through():
    judge = logistic(0.0, 0.8, lambda ratios: 2.2 * ratios)

    result = analyse(simulate(judge, posts=3000, seed=1))

    assert result["raw"]["low"] > 0.55  # what length bought
    assert result["share_first"]["low"] > 0.55
    assert result["shown_first"]["low"] > result["shown_second"]["high"]
    controlled = result["length_controlled"]
    assert controlled["estimate"] == pytest.approx(0.5, abs=0.03)  # 2.5 standard errors
    _, low, high = controlled["order_logits"]
    assert low < 0.8 < high
    _, low, high = controlled["doubled_length_logits"]
    assert low < 2.2 * np.log(2) < high
    assert high - low < 0.6


def test_both_orders_of_a_post_are_one_cluster():
    judge = logistic(0.2, 0.5, lambda ratios: 1.5 * ratios, quality=8.0)
    table = simulate(judge, posts=400, seed=3)
    each_its_own_post = replace(table, posts=np.arange(len(table.posts)))

    clustered = length_controlled(table)
    independent = length_controlled(each_its_own_post)

    assert clustered["estimate"] == pytest.approx(independent["estimate"])
    clustered_width = clustered["high"] - clustered["low"]
    assert clustered_width > 1.2 * (independent["high"] - independent["low"])


# -- where the model has no finite fit -------------------------------------------------------------


def test_where_position_decides_nearly_all_the_orders_are_averaged_first():
    table = simulate(logistic(0.0, 0.0, no_effect), posts=200, seed=7)
    # The first text always wins, apart from three posts whose second text wins, too.
    outcomes = table.shown_first.astype(float)
    outcomes[[41, 187, 253]] = 1

    result = length_controlled(replace(table, outcomes=outcomes))

    # 197 posts score 1/2, and three score 1.
    assert result["order_logits"] is None
    assert result["estimate"] == pytest.approx((197 / 2 + 3) / 200, abs=0.01)
    assert result["low"] < 0.5075 < result["high"]
    # So close to 1/2 the model is linear: least squares over the posts, with the sandwich formula.
    ratios = table.log_ratios[::2]
    means = (outcomes[::2] + outcomes[1::2]) / 2
    x = np.column_stack([np.ones(200), np.tanh(ratios / 0.8), np.tanh(ratios / 0.2)])
    bread = np.linalg.inv(x.T @ x)
    residuals = means - x @ (bread @ x.T @ means)
    error = np.sqrt((bread @ (x.T * residuals**2) @ x @ bread)[0, 0])
    assert result["high"] - result["low"] == pytest.approx(2 * 1.96 * error, rel=0.05)


def longer_always_wins(posts_of_equal_length):
    """100 posts: those of equal length win or tie, and of the others the longer text wins."""
    numbers = np.arange(100)
    is_equal = numbers < posts_of_equal_length
    log_ratios = np.where(is_equal, 0.0, np.linspace(-0.8, 0.8, 100))
    wins_or_ties = np.where(numbers < 10, 1.0, 0.5)
    return both_orders_of(np.where(is_equal, wins_or_ties, log_ratios > 0), log_ratios)


def test_where_every_longer_text_wins_the_rate_is_that_of_equal_length():
    result = length_controlled(longer_always_wins(40))

    # 10 wins and 30 ties.
    assert result["estimate"] == pytest.approx(25 / 40)
    assert result["equal_posts"] == 40
    assert 0.5 < result["low"] < 25 / 40 < result["high"] < 0.75
    assert result["extrapolated"] is False


def test_fewer_than_20_posts_of_equal_length_give_no_rate():
    result = length_controlled(longer_always_wins(19))
    assert result["estimate"] is None
    assert result["extrapolated"] is True


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"log_ratios": np.zeros(200)}, "length ratios"),
        ({"log_ratios": np.tile([-0.7, 0.0, 0.0, 0.7], 50)}, "length ratios"),
        ({"outcomes": np.ones(200)}, "verdicts are the same"),
        ({"shown_first": np.ones(200, dtype=bool)}, "same position"),
        ({"outcomes": np.full(200, np.nan)}, "fewer than 30"),
        ({"posts": np.repeat([0, 1], 100)}, "fewer than 15 posts"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_without_a_rate_it_says_why(changes, why):
    table = simulate(logistic(0.0, 0.0, lambda ratios: ratios), posts=100, seed=4)
    result = length_controlled(replace(table, **changes))
    assert result["estimate"] is None
    assert why in result["why"]


# -- extrapolation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "posts", "extrapolated"),
    [(0.1, 200, False), (0.5, 300, False), (1.0, 300, True), (0.6, 60, True)],
)
def test_a_rate_with_few_posts_of_nearly_equal_length_is_extrapolated(ratio, posts, extrapolated):
    judge = logistic(0.2, 0.3, lambda ratios: ratios)
    result = length_controlled(simulate(judge, posts=posts, seed=5, ratio=ratio))

    assert result["extrapolated"] == extrapolated
    if not extrapolated:
        assert result["near_equal"] >= 20


@pytest.mark.parametrize(("near", "extrapolated"), [(19, True), (20, False)])
def test_a_rate_in_a_gap_between_the_lengths_is_extrapolated(near, extrapolated):
    """Half of the other texts are far shorter, and half are far longer."""
    table = simulate(logistic(0.2, 0.3, lambda ratios: ratios), posts=200, seed=5)
    far = np.linspace(0.4, 0.9, 100)
    ratios = np.concatenate([np.linspace(-0.2, 0.2, near), far, -far])[:200]

    result = length_controlled(replace(table, log_ratios=np.repeat(ratios, 2)))

    assert result["near_equal"] == near
    assert result["extrapolated"] == extrapolated


# -- identical texts -------------------------------------------------------------------------------


def with_identical_texts(table, posts):
    """The table, and this many posts more whose two texts are identical."""
    identical = both_orders_of(np.full(posts, 0.5), np.zeros(posts))
    return VerdictTable(
        posts=np.concatenate([table.posts, 1_000_000 + identical.posts]),
        ids=np.concatenate([table.ids, 1_000_000 + identical.ids]),
        outcomes=np.concatenate([table.outcomes, identical.outcomes]),
        shown_first=np.concatenate([table.shown_first, identical.shown_first]),
        log_ratios=np.concatenate([table.log_ratios, identical.log_ratios]),
        differ=np.concatenate([table.differ, np.zeros(2 * posts, dtype=bool)]),
    )


def four_of_five_won(log_ratios):
    """Every fifth post is lost in both orders, the others are won, at any length."""
    return both_orders_of(np.arange(len(log_ratios)) % 5 > 0, log_ratios)


def test_identical_texts_tie_at_any_length():
    differing = four_of_five_won(np.repeat(np.linspace(0.1, 0.9, 60), 5))

    result = length_controlled(with_identical_texts(differing, 100))

    # A quarter of the posts tie, and 80% of the others are won: the raw rate.
    assert result["estimate"] == pytest.approx(0.25 / 2 + 0.75 * 0.8, abs=1e-6)
    assert result["low"] < 0.725 < result["high"]


def test_identical_texts_do_not_count_as_equally_long():
    differing = four_of_five_won(np.repeat(np.linspace(0.1, 0.9, 60), 5))

    result = length_controlled(with_identical_texts(differing, 100))

    assert result["near_equal"] == length_controlled(differing)["near_equal"] < 60
    assert result["extrapolated"]


@pytest.fixture(scope="module")
def half_identical():
    """100 posts whose texts differ, and 100 whose texts are identical."""
    random = np.random.default_rng(2)
    return with_identical_texts(four_of_five_won(random.normal(0, 0.35, 100)), 100)


def test_the_interval_includes_the_spread_of_the_share_of_identical_texts(half_identical):
    random = np.random.default_rng(4)
    rows_of_post = np.arange(400).reshape(200, 2)
    estimates = []
    for _ in range(200):
        rows = rows_of_post[random.integers(200, size=200)].ravel()
        resampled = half_identical.only(rows)
        # A post that is drawn twice counts as two.
        numbers = np.repeat(np.arange(200), 2)
        estimates.append(length_controlled(replace(resampled, posts=numbers))["estimate"])

    result = length_controlled(half_identical)

    assert result["high"] - result["low"] == pytest.approx(2 * 1.96 * np.std(estimates), rel=0.15)


def test_the_spread_of_the_share_is_added_as_a_square(half_identical):
    result = length_controlled(half_identical)

    # Half of the rate's own error, and the error of a share of 1/2 among 200 posts.
    differing = length_controlled(half_identical.only(half_identical.differ))
    half_width_of_rate = (differing["estimate"] - differing["low"]) / 2
    half_width_of_share = (differing["estimate"] - 0.5) * 1.96 * np.sqrt(0.25 / 200)
    expected = np.hypot(half_width_of_rate, half_width_of_share)
    assert result["estimate"] - result["low"] == pytest.approx(expected, rel=1e-3)


# -- bins ------------------------------------------------------------------------------------------


def test_rates_by_length_are_counted_bin_by_bin():
    # 20 judgements at each ratio, of which 4, 10, 12, 16 and 20 are won.
    ratios = np.log(np.repeat([0.5, 1.0, 2.0, 3.0, 4.0], 20))
    outcomes = np.repeat([1.0, 0.0] * 5, [4, 16, 10, 10, 12, 8, 16, 4, 20, 0])
    table = table_of(np.arange(100), outcomes, np.tile([True, False], 50), ratios)

    bins = rates_by_length(table)

    assert [row["rate"] for row in bins] == pytest.approx([0.2, 0.5, 0.6, 0.8, 1.0])
    assert [row["from"] for row in bins] == pytest.approx([0.5, 1, 2, 3, 4])
    assert [row["judgements"] for row in bins] == [20, 20, 20, 20, 20]
    # Wilson's interval of 4 of 20, by an online calculator of the score interval.
    assert (bins[0]["low"], bins[0]["high"]) == pytest.approx((0.0807, 0.4160), abs=5e-4)


def test_without_verdicts_there_are_no_bins():
    table = table_of(np.arange(1), np.array([np.nan]), np.array([True]), np.zeros(1))
    assert rates_by_length(table) == []
