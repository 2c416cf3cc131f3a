"""Intervals hold the truth, on few data sets; `make simulations` runs 200 of each scenario."""

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

FEW = 40
HELD = 34 / FEW  # fewer are held in 3 of 1,000 runs of an interval that holds 95%


@pytest.mark.parametrize("name", COVERED)
def test_the_rate_at_equal_length_holds_the_truth_where_its_model_covers_it(name):
    found = length_coverage(COVERED[name], FEW)
    assert found.held >= HELD
    # The half width is 1.96 standard errors. The mean error of 40 data sets is within four of its.
    assert abs(found.bias) < 4 * found.half / 1.96 / FEW**0.5
    assert found.said >= 0.9


@pytest.mark.parametrize("name", EXTRAPOLATED)
def test_where_the_data_say_little_the_rate_is_called_extrapolated(name):
    assert length_coverage(EXTRAPOLATED[name], FEW).said < 0.1


@pytest.mark.parametrize("name", SHIFTS)
def test_the_corrected_rate_holds_the_truth_through_a_shift_of_10_points(name):
    assert shift_coverage(SHIFTS[name], FEW, 0.1).held >= 0.9
    if "our summaries" in name:  # errors that favour one side
        assert shift_coverage(SHIFTS[name], FEW, 0.0).held < 0.85


@pytest.mark.parametrize(("ties", "posts", "half"), [(0.6, 100, 6.0), (0.85, 400, 1.9)])
def test_shares_with_ties_are_held_by_intervals_as_narrow_as_the_ties_allow(ties, posts, half):
    found = tie_coverage(ties, posts, 400)
    assert found.held >= 0.92  # three standard errors below 95%
    assert 100 * found.half == pytest.approx(half, abs=0.2)


def test_the_table_is_printed(capsys):
    main(["--data-sets", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("EXTRAPOLATED" in line for line in lines) == len(EXTRAPOLATED)
