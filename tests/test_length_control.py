"""Length and order, taken off: simulated judges of known leanings, and an independent fit."""

import json

import numpy as np
import pytest
from scipy.optimize import approx_fprime, minimize

from eval.stats.length_control import VerdictTable, length_controlled, rates_by_length
from eval.stats.table import analyse, verdict_table
from tests.lib.simulations import Scenario, logistic, sigmoid, verdicts_of

PUBLISHED = {  # of all 1,000 verdicts, by another author; 880 of them are in ../shared/tldr
    "raw": 0.640,
    "shown_first": 0.716,
    "shown_second": 0.558,
    "share_first": 0.584,
    "length_controlled": 0.536,
}


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


def simulate(rng, posts, judge, orders=2, ratio=0.2):
    return verdicts_of(Scenario(judge=judge, posts=posts, orders=orders, ratio=ratio), rng)


def independent_fit(table):
    """The same rate by a general minimiser, with the sandwich and the delta method by numbers."""
    order = np.where(table.shown_first, 0.5, -0.5)
    ratios = np.exp(table.log_ratios)
    # tanh(log r / s) in another form: (r^(2/s) - 1) / (r^(2/s) + 1), for s = 0.8 and 0.2
    wide, narrow = ((ratios**k - 1) / (ratios**k + 1) for k in (2.5, 10))
    x = np.column_stack([np.ones(len(order)), order, wide, narrow, order * wide])
    y = table.outcomes

    def loss(b):
        return np.logaddexp(0, x @ b).sum() - y @ (x @ b)

    def rate_logit(b):
        rate = (sigmoid(b[0] + b[1] / 2) + sigmoid(b[0] - b[1] / 2)) / 2
        return np.log(rate / (1 - rate))

    b = minimize(loss, np.zeros(5), method="BFGS", options={"gtol": 1e-9}).x
    p = sigmoid(x @ b)
    bread = np.linalg.inv(x.T @ (x * (p * (1 - p))[:, None]))
    meat = np.zeros((5, 5))
    for post in np.unique(table.posts):
        mine = table.posts == post
        score = x[mine].T @ (y - p)[mine]
        meat += np.outer(score, score)
    g, n = len(np.unique(table.posts)), len(y)
    covariance = bread @ meat @ bread * g / (g - 1) * (n - 1) / (n - 5)
    gradient = approx_fprime(b, rate_logit, 1e-6)
    error, logit = np.sqrt(gradient @ covariance @ gradient), rate_logit(b)
    return tuple(sigmoid(logit + k * 1.959964 * error) for k in (0, -1, 1))


def test_the_controlled_rate_is_that_of_an_independent_fit():
    table = simulate(np.random.default_rng(0), 200, logistic(0.3, 1.7, lambda x: 2 * x, 1.0))
    table.outcomes[::7] = 0.5  # ties
    found = length_controlled(table)
    expected = independent_fit(table)
    assert tuple(found[key] for key in ("estimate", "low", "high")) == pytest.approx(
        expected, abs=5e-5
    )


def test_without_an_effect_of_length_the_rate_agrees_with_the_one_beside_it():
    """Place takes nothing off and adds nothing: both are means over the two orders."""
    for order in (0.0, 2.0, 4.0):
        judge = logistic(0.9, order, lambda x: 0 * x)
        found = analyse(simulate(np.random.default_rng(8), 4000, judge, ratio=0.0))
        balanced, controlled = found["order_balanced"], found["length_controlled"]
        assert controlled["estimate"] == pytest.approx(balanced["estimate"], abs=0.01)
        truth = (sigmoid(0.9 + order / 2) + sigmoid(0.9 - order / 2)) / 2
        assert controlled["estimate"] == pytest.approx(truth, abs=0.02)


def test_a_judge_of_length_and_place_alone_is_seen_through():
    table = simulate(np.random.default_rng(1), 3000, logistic(0.0, 0.8, lambda x: 2.2 * x))
    found = analyse(table)
    assert found["raw"]["low"] > 0.55  # what length bought
    controlled = found["length_controlled"]
    assert controlled["estimate"] == pytest.approx(0.5, abs=0.03)  # 2.5 standard errors
    assert controlled["order_logits"][1] < 0.8 < controlled["order_logits"][2]
    _, low, high = controlled["doubled_length_logits"]
    assert low < 2.2 * np.log(2) < high
    assert high - low < 0.6
    assert found["share_first"]["low"] > 0.55
    assert found["shown_first"]["low"] > found["shown_second"]["high"]


def test_both_orders_of_a_post_are_no_two_observations():
    table = simulate(np.random.default_rng(3), 400, logistic(0.2, 0.5, lambda x: 1.5 * x, 8.0))
    apart = VerdictTable(**{**vars(table), "posts": np.arange(len(table.posts))})
    clustered, plain = length_controlled(table), length_controlled(apart)
    assert clustered["estimate"] == pytest.approx(plain["estimate"])
    assert clustered["high"] - clustered["low"] > 1.2 * (plain["high"] - plain["low"])


def test_where_place_decides_nearly_all_the_orders_are_averaged_first():
    """The first is never lost, so that order alone has no finite fit."""
    table = simulate(np.random.default_rng(7), 200, logistic(0.0, 0.0, lambda x: 0 * x))
    outcomes = table.shown_first.astype(float)
    outcomes[[41, 187, 253]] = 1  # of the posts that are shown second
    found = length_controlled(VerdictTable(**{**vars(table), "outcomes": outcomes}))
    assert found["order_logits"] is None
    # 197 posts have 1/2 and three have 1.
    assert found["estimate"] == pytest.approx((197 / 2 + 3) / 200, abs=0.01)
    assert found["low"] < 0.5075 < found["high"]
    # So near to 1/2 the model is a straight line: least squares over the posts, and its sandwich.
    ratios, means = table.log_ratios[::2], (outcomes[::2] + outcomes[1::2]) / 2
    x = np.column_stack([np.ones(200), np.tanh(ratios / 0.8), np.tanh(ratios / 0.2)])
    bread = np.linalg.inv(x.T @ x)
    rest = means - x @ (bread @ x.T @ means)
    error = np.sqrt((bread @ (x.T * rest**2) @ x @ bread)[0, 0])
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * error, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"log_ratios": np.zeros(200)}, "length ratios"),
        ({"log_ratios": np.tile([-0.7, 0.0, 0.0, 0.7], 50)}, "length ratios"),
        ({"outcomes": np.ones(200)}, "verdicts are alike"),
        ({"shown_first": np.ones(200, dtype=bool)}, "same place"),
        ({"outcomes": np.full(200, np.nan)}, "fewer than 30"),
        ({"posts": np.repeat([0, 1], 100)}, "fewer than 30"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_where_there_is_no_fit_it_says_why(changes, why):
    table = simulate(np.random.default_rng(4), 100, logistic(0.0, 0.0, lambda x: x))
    found = length_controlled(VerdictTable(**{**vars(table), **changes}))
    assert found["estimate"] is None
    assert why in found["why"]


def test_where_every_longer_text_wins_the_rate_is_read_off_the_posts_of_equal_length():
    """No rate was given, as if length said nothing, beside 40 posts of equal length."""
    posts = np.repeat(np.arange(100), 2)
    ratios = np.repeat(np.where(np.arange(100) < 40, 0.0, np.linspace(-0.8, 0.8, 100)), 2)
    equal = np.repeat(np.where(np.arange(100) < 10, 1.0, 0.5), 2)  # 10 wins and 30 ties of 40
    outcomes = np.where(ratios == 0, equal, ratios > 0)
    first = np.tile([True, False], 100)
    table = table_of(posts, outcomes, first, ratios)
    found = length_controlled(table)
    assert (found["estimate"], found["equal_posts"]) == (pytest.approx(25 / 40), 40)
    assert 0.5 < found["low"] < 25 / 40 < found["high"] < 0.75
    assert found["extrapolated"] is False
    few = table.only(posts >= 21)  # 19 of equal length
    assert length_controlled(few)["estimate"] is None


@pytest.mark.parametrize(
    ("ratio", "posts", "extrapolated"),
    [(0.1, 200, False), (0.5, 300, False), (1.0, 300, True), (0.6, 60, True)],
)
def test_a_rate_that_few_posts_of_equal_length_speak_for_is_called_extrapolated(
    ratio, posts, extrapolated
):
    judge = logistic(0.2, 0.3, lambda x: x)
    found = length_controlled(simulate(np.random.default_rng(5), posts, judge, ratio=ratio))
    assert found["extrapolated"] == extrapolated
    assert (found["near_equal"] < 20) <= extrapolated


@pytest.mark.parametrize(("near", "extrapolated"), [(19, True), (20, False)])
def test_a_rate_in_a_gap_between_the_lengths_is_called_extrapolated(near, extrapolated):
    """Half of the texts are shorter, half are longer, and few posts lie between."""
    table = simulate(np.random.default_rng(5), 200, logistic(0.2, 0.3, lambda x: x))
    apart, between = np.linspace(0.4, 0.9, 100), np.linspace(-0.2, 0.2, near)
    ratios = np.repeat(np.concatenate([between, apart, -apart])[:200], 2)
    found = length_controlled(VerdictTable(**{**vars(table), "log_ratios": ratios}))
    assert (found["near_equal"], found["extrapolated"]) == (near, extrapolated)


def test_rates_by_length_are_counted_bin_by_bin():
    ratios = np.log(np.repeat([0.5, 1.0, 2.0, 3.0, 4.0], 20))
    outcomes = np.concatenate([np.repeat([1.0, 0.0], [k, 20 - k]) for k in (4, 10, 12, 16, 20)])
    table = table_of(np.arange(100), outcomes, np.tile([True, False], 50), ratios)
    found = rates_by_length(table)
    assert [one["rate"] for one in found] == pytest.approx([0.2, 0.5, 0.6, 0.8, 1.0])
    assert [one["from"] for one in found] == pytest.approx([0.5, 1, 2, 3, 4])
    assert [one["judgements"] for one in found] == [20] * 5
    # Wilson for 4 of 20, by an online calculator of the score interval.
    assert (found[0]["low"], found[0]["high"]) == pytest.approx((0.0807, 0.4160), abs=5e-4)


def both(post, first, second):
    orders = {"policy_first": first, "reference_first": second}
    return [{"id": post, "order": order, "verdict": verdict} for order, verdict in orders.items()]


def test_the_analysis_counts_as_one_would_by_hand():
    rows = [
        *both("a", "policy", "policy"),
        *both("b", "policy", "reference"),  # the first shown, twice
        *both("c", "tie", "reference"),
        *both("d", "unjudged", "policy"),
    ]
    texts = dict.fromkeys("ab", ("one two three", "one two"))
    texts |= dict.fromkeys("cd", ("one two", "two one"))
    found = analyse(verdict_table(rows, texts))
    assert found["unjudged"] == 1 / 8
    assert found["raw"]["estimate"] == pytest.approx(4.5 / 7)
    assert found["shown_first"]["estimate"] == pytest.approx(2.5 / 3)
    assert found["shown_second"]["estimate"] == pytest.approx(2 / 4)
    # Over the posts that have both orders: 1, 1/2 and 1/4.
    assert found["order_balanced"]["estimate"] == pytest.approx(1.75 / 3)
    # Decided: a first, a second, b first, b first (by the reference), c second's loss, d's win.
    assert found["share_first"]["estimate"] == pytest.approx(4 / 6)
    assert found["swap_consistency"]["estimate"] == pytest.approx(1 / 3)
    assert found["median_length_ratio"] == pytest.approx(1.5**0.5)  # of 0 and log 1.5
    assert found["length_controlled"]["estimate"] is None


def test_a_post_under_two_ids_leaves_the_order_balanced_interval_as_wide_as_under_one():
    # 60 posts: 30 won in both orders, 15 lost, and 15 won in one order only.
    verdicts = [("policy", "policy"), ("policy", "reference"), ("policy", "policy")]
    verdicts = [*verdicts, ("reference", "reference")] * 15
    rows = [row for post, pair in enumerate(verdicts) for row in both(f"p{post}", *pair)]
    again = [row | {"id": f"again-{row['id']}"} for row in rows]
    texts = {row["id"]: ("one two", "two one") for row in (*rows, *again)}
    post_of = {row["id"]: row["id"].removeprefix("again-") for row in (*rows, *again)}

    once = analyse(verdict_table(rows, texts, post_of))["order_balanced"]
    twice = analyse(verdict_table([*rows, *again], texts, post_of))["order_balanced"]

    assert once["estimate"] == pytest.approx(37.5 / 60)
    assert twice == pytest.approx(once)


def test_identical_texts_say_nothing_of_a_judges_consistency():
    rows = [*both("a", "tie", "tie"), *both("b", "policy", "reference")]
    texts = {"a": ("same  words", "same words"), "b": ("one", "two")}
    found = analyse(verdict_table(rows, texts))
    high = pytest.approx(1.959964**2 / (1 + 1.959964**2))  # Wilson for 0 of 1
    assert found["swap_consistency"] == {"estimate": 0.0, "low": 0.0, "high": high, "posts": 1}
    assert found["raw"]["estimate"] == 0.5


def published_table(folder):
    """Published GPT verdicts about OpenAI's 1.3B PPO policy, in the order that each was shown."""
    paths = sorted(folder.glob("comparisons_*.jsonl"))
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    judgements, texts = [], {}
    for number, row in enumerate(rows):
        policies = [summary["policy"] for summary in row["summaries"]]
        if sorted(policies) != ["ppo_1.3b", "ref"]:
            continue
        place = policies.index("ppo_1.3b")
        order = ("policy_first", "reference_first")[place]
        verdict = "policy" if row["choice"] == place else "reference"
        judgements.append({"id": str(number), "order": order, "verdict": verdict})
        ours, theirs = (row["summaries"][k]["text"] for k in (place, 1 - place))
        texts[str(number)] = ours, theirs
    return verdict_table(judgements, texts)


def test_the_published_verdicts_give_the_published_rates(shared):
    table = published_table(shared / "tldr")
    found = analyse(table)
    assert len(table.outcomes) == 880
    for key, value in PUBLISHED.items():
        interval = found[key]
        assert interval["low"] < value < interval["high"], key
        assert interval["estimate"] == pytest.approx(value, abs=0.02), key
    controlled = found["length_controlled"]
    assert controlled["order_logits"][0] == pytest.approx(0.74, abs=0.15)
    worth, low, high = controlled["doubled_length_logits"]
    assert low < 2.16 * 0.6931 < high  # published with an unbounded term: logits a unit
    assert worth > 0.7
    # Of 880 draws without replacement from 1,000 little can differ; a wide interval would.
    width = controlled["high"] - controlled["low"]
    assert width == pytest.approx((57.6 - 49.3) / 100 * (1000 / 880) ** 0.5, abs=0.012)


def beside_identical(table, identical):
    """A table of both orders of each post, and so many posts more whose two texts are identical."""
    posts, first = np.repeat(1_000_000 + np.arange(identical), 2), np.tile([True, False], identical)
    same = table_of(posts, np.full(len(posts), 0.5), first, np.zeros(len(posts)))
    same.differ[:] = False
    names = vars(table)
    return VerdictTable(
        **{name: np.concatenate([vars(of)[name] for of in (table, same)]) for name in names}
    )


def four_of_five_won(posts, ratios):
    """Every fifth post is lost in both orders, the others are won, at any length."""
    numbers = np.repeat(np.arange(posts), 2)
    first = np.tile([True, False], posts)
    return table_of(numbers, (numbers % 5 > 0).astype(float), first, np.repeat(ratios, 2))


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
