"""Intervals contain the truth, on few data sets; `make simulations` runs 200 of each scenario."""

import pytest

from tests.lib.simulations import (
    COVERED,
    EXTRAPOLATED,
    SHIFTS,
    length_coverage,
    main,
    shift_coverage,
    tie_coverage,
)

DATA_SETS = 40
# An interval that contains the truth in 95% of the data sets misses this in 3 of 1,000 tests.
LEAST_CONTAINED = 34 / DATA_SETS
BIASED_SHIFTS = [name for name in SHIFTS if "our summaries" in name]


@pytest.mark.parametrize("name", COVERED)
def test_the_rate_at_equal_length_contains_the_truth_where_its_model_covers_it(name):
    coverage = length_coverage(COVERED[name], DATA_SETS)

    assert coverage.contained >= LEAST_CONTAINED
    assert coverage.answered >= 0.9
    # The half width is 1.96 standard errors; the mean error is within four of its own.
    assert abs(coverage.bias) < 4 * coverage.half_width / 1.96 / DATA_SETS**0.5


@pytest.mark.parametrize("name", EXTRAPOLATED)
def test_where_the_data_say_little_the_rate_is_extrapolated(name):
    assert length_coverage(EXTRAPOLATED[name], DATA_SETS).answered < 0.1


@pytest.mark.parametrize("name", SHIFTS)
def test_the_corrected_rate_contains_the_truth_despite_a_shift_of_10_points(name):
    assert shift_coverage(SHIFTS[name], DATA_SETS, allowed=0.1).contained >= 0.9


@pytest.mark.parametrize("name", BIASED_SHIFTS)
def test_without_the_allowance_a_shift_to_one_side_hides_the_truth(name):
    assert shift_coverage(SHIFTS[name], DATA_SETS, allowed=0.0).contained < 0.85


@pytest.mark.parametrize(("ties", "posts", "half_width"), [(0.6, 100, 6.0), (0.85, 400, 1.9)])
def test_intervals_of_shares_with_ties_are_as_narrow_as_the_ties_allow(ties, posts, half_width):
    coverage = tie_coverage(ties, posts, data_sets=400)
    assert coverage.contained >= 0.92  # three standard errors below 95%
    assert 100 * coverage.half_width == pytest.approx(half_width, abs=0.2)


def test_the_table_is_printed(capsys):
    main(["--data-sets", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert sum("EXTRAPOLATED" in line for line in lines) == len(EXTRAPOLATED)
