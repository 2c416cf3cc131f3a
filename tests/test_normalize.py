"""Normalization of the reward model: the choice of references, and their mean score of 0."""

import math
from itertools import pairwise

import pytest

from stages import normalize
from stages.config.errors import UserError


@pytest.mark.parametrize(
    ("mean", "precision"),
    [
        (5e-4, "no"),
        (-0.004, "bf16"),  # measured with SmolLM2-135M on 16 rows
    ],
)
def test_a_mean_within_the_rounding_of_its_precision_is_accepted(mean, precision):
    normalize.check_mean(mean, normalize.TOLERANCES[precision])


@pytest.mark.parametrize(("mean", "precision"), [(2e-3, "no"), (0.06, "bf16"), (math.nan, "bf16")])
def test_another_mean_is_refused(mean, precision):
    with pytest.raises(UserError, match="check the metrics of the rm stage"):
        normalize.check_mean(mean, normalize.TOLERANCES[precision])


@pytest.mark.parametrize(
    ("rows", "count", "step"),
    [
        (8000, 2000, 4),  # of a preset
        (512, 256, 2),  # of a preset
        (600, 600, 1),
    ],
)
def test_references_are_spread_evenly(rows, count, step):
    assert normalize.evenly(rows, count) == list(range(0, rows, step))


def test_a_count_that_does_not_divide_the_rows_is_spread_as_evenly_as_possible():
    assert normalize.evenly(5, 3) == [0, 1, 3]
    chosen = normalize.evenly(2600, 1000)
    assert len(chosen) == 1000
    assert {after - before for before, after in pairwise(chosen)} == {2, 3}


def test_all_references_are_chosen_if_there_are_fewer_than_requested():
    assert normalize.evenly(3, 5) == [0, 1, 2]
