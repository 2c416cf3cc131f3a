"""A reward model's accuracy beside length: by hand, by simulation, and on the pages."""

import numpy as np
import pytest

from eval.stats.formulas import wilson
from eval.stats.reward_pairs import accuracy_at_equal_length, beside_length, pair_statistics
from stages.data.ragged import TokenizedSplit, make_ragged
from stages.training.preferences import gap_rows

CHOSEN = [20, 20, 20, 10, 15, 30, 12, 40, 19, 10]
REJECTED = [10, 19, 20, 30, 10, 31, 12, 20, 20, 11]  # longer on 4, equal on 2, shorter on 4


def split_of(chosen: list[int], rejected: list[int]) -> TokenizedSplit:
    lengths = {"queries": [3] * len(chosen), "chosen": chosen, "rejected": rejected}
    columns = {name: make_ragged([[1] * n for n in ns]) for name, ns in lengths.items()}
    rows = [
        {"id": f"t{k}", "split": "v", "batch": "b", "strength": 6, "policies": "a--b"}
        for k in range(len(chosen))
    ]
    return TokenizedSplit(columns=columns, rows=rows)


def test_a_scorer_of_length_alone_gets_what_the_longer_one_gets():
    gaps = [float(a - b) for a, b in zip(CHOSEN, REJECTED, strict=True)]
    found = pair_statistics(gap_rows(gaps, split_of(CHOSEN, REJECTED)))["length"]
    # Longer: rows 0, 1, 4, 7; equal: 2, 6. So (4 + 2 / 2) / 10.
    assert found["longer"]["estimate"] == 0.5
    # Bonett and Price: with one post more at each end the squares sum to 10 / 4 and to 2.
    half, none = (1.959964 * (12 / 11 * squares) ** 0.5 / 12 for squares in (2.5, 2.0))
    assert found["longer"]["low"] == pytest.approx(0.5 - half, abs=1e-6)
    assert found["longer"]["high"] == pytest.approx(0.5 + half, abs=1e-6)
    assert (found["above_longer"]["estimate"], found["above_longer"]["posts"]) == (0.0, 10)
    assert found["above_longer"]["high"] == pytest.approx(none, abs=1e-6)
    # At most 10 % apart: rows 1, 2, 5, 6, 8, 9 (10 of 11 is 9.1 %).
    assert found["near_equal"] == found["longer_near_equal"]
    assert (found["near_equal"]["estimate"], found["near_equal"]["pairs"]) == (2 / 6, 6)
    assert found["at_equal_length"]["estimate"] is None  # of 10 pairs


def test_two_summaries_of_one_length_are_half_a_point_for_the_longer_one_in_groups_too():
    length = pair_statistics(gap_rows([1.0] * 4, split_of([7, 7, 8, 6], [7, 7, 7, 7])))["length"]
    assert length["longer"]["estimate"] == 0.5
    (group,) = length["by_split"].values()
    assert (group["accuracy"], group["pairs"]) == (0.5, 4)


def test_two_pairs_of_a_post_that_go_together_count_as_one():
    """6 of 10 posts are ranked right, each by two pairs; as 12 of 20 it was narrower."""
    split = split_of(CHOSEN * 2, REJECTED * 2)
    split.rows[10:] = split.rows[:10]
    found = pair_statistics(gap_rows([1.0] * 6 + [-1.0] * 4 + [1.0] * 6 + [-1.0] * 4, split))
    low, high = wilson(0.6 * 9, 9)  # the spread over 10 posts is that of 9 with a known mean
    (group,) = found["by_split"].values()
    for shares in (found, group):
        assert (shares["accuracy"], shares["pairs"]) == (0.6, 20)
        assert (shares["accuracy_low"], shares["accuracy_high"]) == pytest.approx((low, high))
    alone = pair_statistics(gap_rows([1.0] * 6 + [-1.0] * 4, split_of(CHOSEN, REJECTED)))
    assert (alone["accuracy_low"], alone["accuracy_high"]) == pytest.approx(wilson(6, 10))


def test_pairs_of_one_post_widen_the_interval_at_equal_length():
    random = np.random.default_rng(3)
    chosen = np.repeat(random.integers(10, 60, 60), 4).tolist()
    rejected = np.repeat(random.integers(10, 60, 60), 4).tolist()
    gaps = np.repeat(random.choice([-1.0, 1.0], 60, p=[0.3, 0.7]), 4).tolist()
    posts = [f"t{number // 4}" for number in range(240)]
    apart = [f"t{number}" for number in range(240)]
    together, alone = (
        beside_length(gaps, chosen, rejected, ids)["at_equal_length"] for ids in (posts, apart)
    )
    assert together["estimate"] == alone["estimate"]
    widths = [measured["high"] - measured["low"] for measured in (together, alone)]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.1)  # 4 pairs tell what one tells


def simulated(by_length: float, by_quality: float, pairs: int = 4000, at_once: bool = False):
    """Whether a scorer is right, and log ratios: the better one tends to be longer, and the scorer
    adds length, its view of quality and noise. `at_once`: a little longer counts as far longer."""
    random = np.random.default_rng(5)
    ratios = random.normal(0.3, 0.5, pairs)
    lengths = np.tanh(ratios / 0.2) if at_once else ratios
    gaps = by_length * lengths + by_quality + random.logistic(size=pairs)
    return (gaps > 0).astype(float), ratios


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("by_quality", [0.0, 1.0])
def test_at_equal_length_only_quality_is_left(by_quality, at_once):
    right, ratios = simulated(by_length=2.0, by_quality=by_quality, at_once=at_once)
    expected = 1 / (1 + np.exp(-by_quality))
    found = accuracy_at_equal_length(right, ratios, np.arange(len(right)))
    assert found["low"] < expected < found["high"]
    assert right.mean() > expected + 0.05  # what length adds
    assert found["high"] - found["low"] < 0.1


def test_length_alone_has_no_finite_fit_and_says_so():
    _, ratios = simulated(1.0, 0.0, pairs=200)
    found = accuracy_at_equal_length((ratios > 0).astype(float), ratios, np.arange(200))
    assert found["estimate"] is None
    assert "no finite fit" in found["why"]
