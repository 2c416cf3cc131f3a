"""Our numbers are compared with the paper's; the runs are fabricated, of three Pythia sizes."""

from math import isinf, sqrt

import numpy as np
import pytest
from scipy import stats

from reports.paper_comparison import (
    PaperComparison,
    PaperVerdict,
    compare_with_paper,
    verdict_on,
    welch,
)
from reports.results import Interval, find_all
from reports.sizes import runs_by_label
from stages.config.command_line import make_config
from tests.lib.fabricated_runs import ONLINE, fabricate, pythia_study


def compared(**changes) -> dict[str, PaperComparison]:
    """Each size of the fabricated study next to the paper."""
    runs, _ = find_all(pythia_study(**changes))
    return {row.size: row for row in compare_with_paper(runs_by_label(runs))}


# -- statistics ------------------------------------------------------------------------------------


def test_differences_from_the_paper_have_welchs_interval():
    ours = [0.70, 0.72, 0.75]
    theirs = [0.7292, 0.7113, 0.7051, 0.7487]
    bounds = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
    mean = float(np.mean(theirs))
    deviation = float(np.std(theirs, ddof=1))

    difference = welch(ours, mean=mean, deviation=deviation, count=4)

    assert difference.estimate == pytest.approx(np.mean(ours) - np.mean(theirs))
    assert difference.low == pytest.approx(bounds.low)
    assert difference.high == pytest.approx(bounds.high)


def test_one_seed_of_ours_is_one_more_draw_from_the_papers():
    half_width = stats.t.ppf(0.975, 3) * 0.0190 * sqrt(1 + 1 / 4)
    difference = welch([0.70], mean=0.72, deviation=0.0190, count=4)
    assert difference.estimate == pytest.approx(-0.02)
    assert difference.low == pytest.approx(-0.02 - half_width)
    assert difference.high == pytest.approx(-0.02 + half_width)


def test_one_seed_next_to_a_mean_without_spread_has_no_bounds():
    assert isinf(welch([0.70], mean=0.72, deviation=None, count=4).high)


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [
        (Interval(0.01, -0.03, 0.05), PaperVerdict.REPRODUCED),
        (Interval(0.03, 0.01, 0.05), PaperVerdict.REPRODUCED),  # higher, but by less than a tenth
        (Interval(0.10, 0.05, 0.15), PaperVerdict.HIGHER),
        (Interval(-0.10, -0.15, -0.05), PaperVerdict.LOWER),
        (Interval(0.00, -0.30, 0.30), PaperVerdict.INCONCLUSIVE),
        (Interval(0.00, float("-inf"), float("inf")), PaperVerdict.INCONCLUSIVE),
    ],
)
def test_verdicts_on_a_number_of_the_paper_of_72_percent(difference, verdict):
    assert verdict_on(difference, paper_mean=0.72) is verdict


# -- which numbers compare -------------------------------------------------------------------------


def test_every_size_of_the_paper_has_its_nine_numbers(runs):
    counts = {size: len(row.numbers) for size, row in compared().items()}
    assert counts == {"1b": 9, "2.8b": 9, "6.9b": 9}


def test_the_papers_own_rates_are_reproduced(runs):
    number = compared()["6.9b"].number("ppo_win_rate")
    assert number is not None
    assert number.verdict is PaperVerdict.REPRODUCED
    assert number.our_values == (0.7813, 0.7531, 0.7656, 0.777)  # in the order of our seeds
    assert number.paper_values == (0.777, 0.7656, 0.7531, 0.7813)


def test_seeds_that_spread_widely_are_inconclusive_and_say_why(runs):
    number = compared()["1b"].number("ppo_win_rate")
    assert number is not None
    assert number.verdict is PaperVerdict.INCONCLUSIVE
    assert number.why == "the interval of the difference is too wide"


def test_with_another_judge_only_win_rates_are_not_comparable(runs):
    row = compared(judge=ONLINE)["2.8b"]
    (rate,) = [number for number in row.numbers if number.key == "ppo_win_rate"]
    assert rate.verdict is PaperVerdict.NOT_COMPARABLE
    assert rate.why == "judged by gpt-4o-mini, the paper's judge was gpt-3.5-turbo-0125"
    assert row.number("ppo_win_rate") is None
    tokens = row.number("ppo_tokens")
    assert tokens is not None
    assert tokens.verdict is PaperVerdict.REPRODUCED


def test_other_settings_than_the_papers_are_named(runs):
    ppo = make_config("pythia-1b").ppo.changed(kl_coef=0.2)
    rows = compared(ppo=ppo).values()
    reasons = {row.why_not for row in rows}
    assert reasons == {"other settings than the paper's: ppo.kl_coef"}
    assert not any(row.numbers for row in rows)


def test_built_in_posts_are_not_compared(runs):
    fabricate(make_config("tiny"))
    runs_of_size, _ = find_all(["tiny"])
    (row,) = compare_with_paper(runs_by_label(runs_of_size))
    assert row.why_not == "another model on other data"


def test_a_rate_with_too_many_unjudged_posts_is_not_compared(runs):
    fabricate(make_config("pythia-1b"), judge=ONLINE, unjudged=0.05)
    runs_of_size, _ = find_all(["pythia-1b"])

    (row,) = compare_with_paper(runs_by_label(runs_of_size))

    keys = {number.key for number in row.numbers}
    assert "ppo_win_rate" not in keys
    assert "sft_win_rate" in keys
