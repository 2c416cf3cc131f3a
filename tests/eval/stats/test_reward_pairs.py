"""A reward model's held-out accuracy compared with length: by hand and by simulation."""

import numpy as np
import pytest

from eval.stats.intervals import wilson
from eval.stats.reward_pairs import (
    accuracy_at_equal_length,
    compare_with_length,
    pair_statistics,
)

CHOSEN = [20, 20, 20, 10, 15, 30, 12, 40, 19, 10]
REJECTED = [10, 19, 20, 30, 10, 31, 12, 20, 20, 11]  # longer on 4, equal on 2, shorter on 4
Z = 1.959964


def rows_of(gaps, chosen, rejected, ids=None):
    """The rows that a stage writes about its held-out pairs, by default about different posts."""
    if ids is None:
        ids = [f"t{number}" for number in range(len(gaps))]
    return [
        {
            "id": ids[number],
            "gap": gaps[number],
            "chosen_tokens": chosen[number],
            "rejected_tokens": rejected[number],
            "split": "v",
            "batch": "b",
            "strength": 6,
            "policies": "a--b",
        }
        for number in range(len(gaps))
    ]


def length_of_a_scorer_of_length():
    gaps = [float(chosen - rejected) for chosen, rejected in zip(CHOSEN, REJECTED, strict=True)]
    return pair_statistics(rows_of(gaps, CHOSEN, REJECTED))["length"]


def test_the_longer_one_is_right_where_the_chosen_summary_is_longer():
    longer = length_of_a_scorer_of_length()["longer"]

    # Rows 0, 1, 4 and 7, and half of rows 2 and 6. In the interval of Bonett and Price, with one
    # post more at each end, the squares sum to 10 / 4.
    half_width = Z * (12 / 11 * 2.5) ** 0.5 / 12
    assert longer["estimate"] == 0.5
    assert (longer["low"], longer["high"]) == pytest.approx((0.5 - half_width, 0.5 + half_width))


def test_a_scorer_of_length_is_no_better_than_the_longer_one():
    above_longer = length_of_a_scorer_of_length()["above_longer"]

    # All differences are 0; the two added ones are -1 and 1.
    assert above_longer["estimate"] == 0.0
    assert above_longer["posts"] == 10
    assert above_longer["high"] == pytest.approx(Z * (12 / 11 * 2.0) ** 0.5 / 12)


def test_lengths_that_differ_by_at_most_10_percent_are_nearly_equal():
    length = length_of_a_scorer_of_length()

    # Rows 1, 2, 5, 6, 8 and 9 (10 and 11 differ by 9.1%).
    assert length["near_equal"]["estimate"] == 2 / 6
    assert length["near_equal"]["pairs"] == 6
    assert length["longer_near_equal"] == length["near_equal"]


def test_ten_pairs_have_no_accuracy_at_equal_length():
    assert length_of_a_scorer_of_length()["at_equal_length"]["estimate"] is None


def test_equal_lengths_count_half_in_groups_too():
    rows = rows_of([1.0] * 4, [7, 7, 8, 6], [7, 7, 7, 7])

    length = pair_statistics(rows)["length"]

    [group] = length["by_split"].values()
    assert length["longer"]["estimate"] == 0.5
    assert group["accuracy"] == 0.5
    assert group["pairs"] == 4


def test_two_pairs_of_a_post_that_go_together_count_as_one():
    """6 of 10 posts are ranked right, each by two pairs."""
    gaps = [1.0] * 6 + [-1.0] * 4
    ids = [f"t{number}" for number in range(10)]

    result = pair_statistics(rows_of(gaps * 2, CHOSEN * 2, REJECTED * 2, ids * 2))

    # The spread over 10 posts is that of 9 with a known mean.
    low, high = wilson(0.6 * 9, 9)
    [group] = result["by_split"].values()
    for accuracy in (result, group):
        assert accuracy["accuracy"] == 0.6
        assert accuracy["pairs"] == 20
        assert accuracy["accuracy_low"] == pytest.approx(low)
        assert accuracy["accuracy_high"] == pytest.approx(high)


def test_pairs_about_different_posts_have_wilsons_interval():
    result = pair_statistics(rows_of([1.0] * 6 + [-1.0] * 4, CHOSEN, REJECTED))
    assert (result["accuracy_low"], result["accuracy_high"]) == pytest.approx(wilson(6, 10))


def test_another_id_of_the_same_post_is_in_its_cluster():
    rows = rows_of([1.0, 1.0], [20, 20], [10, 10])
    rows[1]["post"] = "t0"
    result = pair_statistics(rows)
    assert (result["accuracy_low"], result["accuracy_high"]) == pytest.approx(wilson(1, 1))


# -- at equal length -------------------------------------------------------------------------------


def test_pairs_of_one_post_widen_the_interval_at_equal_length():
    random = np.random.default_rng(3)
    chosen = np.repeat(random.integers(10, 60, 60), 4).tolist()
    rejected = np.repeat(random.integers(10, 60, 60), 4).tolist()
    gaps = np.repeat(random.choice([-1.0, 1.0], 60, p=[0.3, 0.7]), 4).tolist()

    def at_equal_length(posts):
        length = compare_with_length(
            gaps=gaps, chosen_tokens=chosen, rejected_tokens=rejected, posts=posts
        )
        return length["at_equal_length"]

    together = at_equal_length([f"t{number // 4}" for number in range(240)])
    apart = at_equal_length([f"t{number}" for number in range(240)])

    # Four equal pairs say what one says, so the interval is sqrt(4) times as wide.
    width = together["high"] - together["low"]
    assert together["estimate"] == apart["estimate"]
    assert width == pytest.approx(2 * (apart["high"] - apart["low"]), rel=0.1)


def simulate(by_length, by_quality, pairs=4000, is_sudden=False):
    """Whether a scorer is right, and log length ratios.

    The better summary tends to be longer. The scorer adds length, its view of quality, and noise.
    `is_sudden`: a little longer counts as much as far longer.
    """
    random = np.random.default_rng(5)
    ratios = random.normal(0.3, 0.5, pairs)
    lengths = np.tanh(ratios / 0.2) if is_sudden else ratios
    gaps = by_length * lengths + by_quality + random.logistic(size=pairs)
    return (gaps > 0).astype(float), ratios


@pytest.mark.parametrize("is_sudden", [False, True])
@pytest.mark.parametrize("by_quality", [0.0, 1.0])
def test_at_equal_length_only_quality_is_left(by_quality, is_sudden):
    right, ratios = simulate(by_length=2.0, by_quality=by_quality, is_sudden=is_sudden)

    result = accuracy_at_equal_length(right, ratios, np.arange(len(right)))

    expected = 1 / (1 + np.exp(-by_quality))
    assert right.mean() > expected + 0.05  # what length adds
    assert result["low"] < expected < result["high"]
    assert result["high"] - result["low"] < 0.1


def test_a_scorer_of_length_alone_has_no_finite_fit():
    _, ratios = simulate(by_length=1.0, by_quality=0.0, pairs=200)
    result = accuracy_at_equal_length((ratios > 0).astype(float), ratios, np.arange(200))
    assert result["estimate"] is None
    assert "no finite fit" in result["why"]
