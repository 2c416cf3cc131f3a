"""A table of verdicts and its statistics, counted by hand and compared with published rates."""

import json
from math import log

import numpy as np
import pytest

from eval.stats.table import analyse, leaning, verdict_table

# The rates of all 1,000 published verdicts, by another author; 880 of them are in the shared data.
PUBLISHED = {
    "raw": 0.640,
    "shown_first": 0.716,
    "shown_second": 0.558,
    "share_first": 0.584,
    "length_controlled": 0.536,
}


def judged(post, first, second):
    """The verdicts on a post: with the policy shown first, and shown second."""
    return [
        {"id": post, "order": "policy_first", "verdict": first},
        {"id": post, "order": "reference_first", "verdict": second},
    ]


# -- the table -------------------------------------------------------------------------------------


def test_a_table_has_the_columns_of_its_judgements():
    rows = [*judged("a", "policy", "tie"), *judged("b", "reference", "unjudged")]
    texts = {"a": ("one two", "one"), "b": ("same  words", "same words")}

    table = verdict_table(rows, texts, post_of={"a": "first", "b": "first"})

    assert table.posts.tolist() == [0, 0, 0, 0]
    assert table.ids.tolist() == [0, 0, 1, 1]
    assert table.outcomes.tolist() == pytest.approx([1.0, 0.5, 0.0, np.nan], nan_ok=True)
    assert table.shown_first.tolist() == [True, False, True, False]
    assert table.log_ratios.tolist() == pytest.approx([log(2), log(2), 0.0, 0.0])
    assert table.differ.tolist() == [True, True, False, False]


# -- its statistics --------------------------------------------------------------------------------


@pytest.fixture
def statistics():
    rows = [
        *judged("a", "policy", "policy"),
        *judged("b", "policy", "reference"),  # the first one both times
        *judged("c", "tie", "reference"),
        *judged("d", "unjudged", "policy"),
    ]
    texts = {
        "a": ("one two three", "one two"),
        "b": ("one two three", "one two"),
        "c": ("one two", "two one"),
        "d": ("one two", "two one"),
    }
    return analyse(verdict_table(rows, texts))


def test_rates_are_means_of_judgements(statistics):
    assert statistics["raw"]["estimate"] == pytest.approx(4.5 / 7)
    assert statistics["shown_first"]["estimate"] == pytest.approx(2.5 / 3)
    assert statistics["shown_second"]["estimate"] == pytest.approx(2 / 4)


def test_the_order_balanced_rate_is_of_posts_with_both_orders(statistics):
    # 1, 1/2 and 1/4; the fourth post lacks an order.
    assert statistics["order_balanced"]["estimate"] == pytest.approx(1.75 / 3)


def test_the_judges_biases_are_shares_of_its_decisions(statistics):
    # First: a first, a second not, b both times, c second and d second not.
    assert statistics["share_first"]["estimate"] == pytest.approx(4 / 6)
    assert statistics["swap_consistency"]["estimate"] == pytest.approx(1 / 3)
    assert statistics["unjudged"] == 1 / 8


def test_the_median_length_ratio_is_that_of_judgements(statistics):
    # Half of the log ratios are log 1.5 and half are 0.
    assert statistics["median_length_ratio"] == pytest.approx(1.5**0.5)


def test_a_few_posts_have_no_rate_at_equal_length(statistics):
    assert statistics["length_controlled"]["estimate"] is None


def test_a_post_with_two_ids_leaves_the_order_balanced_interval():
    # 60 posts: 30 won in both orders, 15 lost, and 15 won in one order only.
    verdicts = [
        ("policy", "policy"),
        ("policy", "reference"),
        ("policy", "policy"),
        ("reference", "reference"),
    ]
    rows = []
    for number, (first, second) in enumerate(verdicts * 15):
        rows += judged(f"p{number}", first, second)
    rows_again = [row | {"id": f"again-{row['id']}"} for row in rows]
    texts = {row["id"]: ("one two", "two one") for row in (*rows, *rows_again)}
    post_of = {row["id"]: row["id"].removeprefix("again-") for row in (*rows, *rows_again)}

    once = analyse(verdict_table(rows, texts, post_of))["order_balanced"]
    twice = analyse(verdict_table([*rows, *rows_again], texts, post_of))["order_balanced"]

    assert once["estimate"] == pytest.approx(37.5 / 60)
    assert twice == pytest.approx(once)


def test_identical_texts_say_nothing_about_consistency():
    rows = [*judged("a", "tie", "tie"), *judged("b", "policy", "reference")]
    texts = {"a": ("same  words", "same words"), "b": ("one", "two")}

    statistics = analyse(verdict_table(rows, texts))

    # Wilson's bound for 0 of 1.
    high = pytest.approx(1.959964**2 / (1 + 1.959964**2))
    assert statistics["swap_consistency"] == {"estimate": 0.0, "low": 0.0, "high": high, "posts": 1}
    assert statistics["raw"]["estimate"] == 0.5


# -- a judge that chooses by position --------------------------------------------------------------


def share(estimate, low, high):
    return {"estimate": estimate, "low": low, "high": high}


def test_a_preference_for_a_position_counts_if_it_is_sure_and_large():
    shares = {
        "first": share(0.62, 0.55, 0.69),
        "second": share(0.38, 0.31, 0.45),
        "little": share(0.54, 0.52, 0.56),
        "unsure": share(0.60, 0.45, 0.75),
        "silent": None,
    }
    assert leaning(shares) == ["first", "second"]


def test_a_preference_with_p_of_4_percent_counts_only_for_a_single_system():
    doubtful = share(0.60, 0.505, 0.695)
    even = share(0.5, 0.4, 0.6)
    assert leaning({"only": doubtful}) == ["only"]
    assert leaning({"one": doubtful, "two": even}) == []


# -- published verdicts ----------------------------------------------------------------------------


def published_table(folder):
    """Published GPT verdicts about OpenAI's 1.3B PPO policy, in the order that each was shown."""
    judgements = []
    texts = {}
    lines = []
    for path in sorted(folder.glob("comparisons_*.jsonl")):
        lines += path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        row = json.loads(line)
        policies = [summary["policy"] for summary in row["summaries"]]
        if sorted(policies) != ["ppo_1.3b", "ref"]:
            continue
        place = policies.index("ppo_1.3b")
        judgement = {
            "id": str(number),
            "order": "policy_first" if place == 0 else "reference_first",
            "verdict": "policy" if row["choice"] == place else "reference",
        }
        judgements.append(judgement)
        ours = row["summaries"][place]["text"]
        reference = row["summaries"][1 - place]["text"]
        texts[str(number)] = (ours, reference)
    return verdict_table(judgements, texts)


@pytest.fixture(scope="module")
def published(shared):
    table = published_table(shared / "tldr")
    assert len(table.outcomes) == 880
    return analyse(table)


def test_the_published_verdicts_give_the_published_rates(published):
    for key, rate in PUBLISHED.items():
        assert published[key]["low"] < rate < published[key]["high"], key
        assert published[key]["estimate"] == pytest.approx(rate, abs=0.02), key


def test_the_published_verdicts_give_the_published_effects(published):
    controlled = published["length_controlled"]
    assert controlled["order_logits"][0] == pytest.approx(0.74, abs=0.15)
    doubled, low, high = controlled["doubled_length_logits"]
    # Published with an unbounded term: 2.16 logits per unit of the log ratio.
    assert low < 2.16 * log(2) < high
    assert doubled > 0.7


def test_the_published_verdicts_give_an_interval_of_the_published_width(published):
    controlled = published["length_controlled"]
    width = controlled["high"] - controlled["low"]
    # 880 of 1,000 verdicts widen it by their square root.
    assert width == pytest.approx((0.576 - 0.493) * (1000 / 880) ** 0.5, abs=0.012)
