"""The numbers behind the page about sizes: pooled intervals, called-out seeds, fits, the paper."""

import re
from math import inf, isinf, sqrt

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from reports.parts import plots, sentences
from reports.parts.collect import find_runs, numbers_of
from reports.scaling.answers import win_rates
from reports.scaling.beside_paper import HIGHER, LOWER, REPRODUCED, UNKNOWN, verdict_of, welch
from reports.scaling.measures import called_out, fit, over_optimised, pool
from stages.config.command_line import make_config
from tests.lib.fabricated_runs import fabricate, interval

# -- pooled intervals ------------------------------------------------------------------------------


def test_seeds_without_any_doubt_over_posts_have_students_interval():
    values = [0.5389, 0.2224, 0.1973, 0.6179]
    found = pool(values, [(one, one) for one in values])
    expected = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert found is not None
    assert (found.low, found.high) == pytest.approx(expected)


def test_seeds_that_agree_leave_the_doubt_of_posts_undivided():
    found = pool([0.6] * 5, [(0.57, 0.63)] * 5)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.57, 0.63))


def test_both_kinds_of_doubt_are_added_by_hand():
    # Seeds 0.60 to 0.66: s^2 / k = (0.002 / 3) / 4 = 1 / 6000. Posts: 0.0392 / 1.96 = 0.02.
    # Degrees of freedom 3 * (1 / 6000 + 0.0004)^2 / (1 / 6000)^2 = 34.68.
    values = [0.6, 0.62, 0.64, 0.66]
    intervals = [(one - 0.0392, one + 0.0392) for one in values]
    found = pool(values, intervals)
    assert found is not None
    half = stats.t.ppf(0.975, 34.68) * sqrt(1 / 6000 + 0.0004)
    assert found.high - found.low == pytest.approx(2 * half, rel=1e-3)
    within = pool([one + 0.34 for one in values], [(a + 0.34, b + 0.34) for a, b in intervals])
    assert within is not None
    assert (within.low, within.high) == pytest.approx((0.97 - half, 1.0), rel=1e-3)


def test_doubt_over_posts_never_makes_the_interval_of_the_seeds_narrower():
    values = [0.6, 0.64]
    found = pool(values, [(one - 0.0392, one + 0.0392) for one in values])
    assert found is not None
    expected = stats.t.interval(0.95, 1, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected)


def test_one_seed_has_the_interval_of_its_posts_and_none_has_nothing():
    found = pool([0.6], [(0.55, 0.66)])
    assert found is not None
    assert (found.low, found.high) == (0.55, 0.66)
    assert pool([], []) is None


def test_the_pooled_interval_holds_the_truth_where_seeds_and_posts_both_vary():
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(400):
        post = rng.normal(0, 0.02)  # the same posts for all seeds
        values = 0.6 + post + rng.normal(0, 0.03, size=3)
        found = pool(list(values), [(one - 0.0392, one + 0.0392) for one in values])
        assert found is not None
        held += found.low <= 0.6 <= found.high
    assert 0.93 <= held / 400 <= 1


# -- seeds that are called out ---------------------------------------------------------------------


def seeds_of(*rows: tuple[float, float]) -> pd.DataFrame:
    """Seeds with PPO's and SFT's win rate; the interval of the difference is 4 points each way."""
    return pd.DataFrame(
        {
            "name": "x",
            "seed": number,
            "ppo/win_rate": ppo,
            "sft/win_rate": sft,
            "difference_high": ppo - sft + 0.04,
        }
        for number, (ppo, sft) in enumerate(rows, start=1)
    )


def called(*rows: tuple[float, float]) -> list[tuple[int, bool]]:
    """Seed and whether it collapsed, of the seeds that are called out."""
    found = called_out(seeds_of(*rows))
    return [*zip(found["seed"], found["collapsed"], strict=True)]


def test_the_rule_finds_the_papers_two_collapsed_seeds_and_no_other():
    """Huang et al. 2024, 1B: 53.9, 22.2, 19.7 and 61.8 %, SFT 32.7 %."""
    ones = (0.5389, 0.2224, 0.1973, 0.6179)
    assert called(*((one, 0.327) for one in ones)) == [(2, True), (3, True)]
    assert called(*((one, 0.407) for one in (0.7292, 0.7113, 0.7051, 0.7487))) == []


def test_a_seed_far_below_the_others_fell_behind_without_having_collapsed():
    assert called((0.89, 0.34), (0.73, 0.34), (0.88, 0.34)) == [(2, False)]
    assert called((0.89, 0.34), (0.80, 0.34), (0.88, 0.34)) == []
    assert called((0.73, 0.34)) == called((0.31, 0.34)) == []  # the second's interval holds 0
    assert called((float("nan"), 0.34)) == []


def test_over_optimisation_takes_a_rising_proxy_and_a_falling_win_rate_or_gold_score():
    nan = float("nan")
    rows = [
        # proxy gain and half its interval, high end of PPO - SFT, high end of the gold gain
        (1.0, 0.2, -0.05, nan),
        (1.0, 0.2, 0.02, nan),
        (1.0, 0.2, 0.2, -0.1),
        (-1.0, 0.2, -0.05, -0.1),
        (1.0, 1.2, -0.05, -0.1),  # it may not have risen
    ]
    frame = pd.DataFrame(
        {"name": "x", "seed": seed, "kl": 9.0, "score_gain": interval(gain, half)}
        | {"difference_high": high, "gold_gain/high": gold}
        for seed, (gain, half, high, gold) in enumerate(rows)
    )
    assert over_optimised(frame)["seed"].tolist() == [0, 2]


def test_a_score_that_may_not_have_risen_is_no_over_optimisation(runs):
    fabricate(make_config("tiny"), sft=0.6, ppo=0.4)
    row = numbers_of(find_runs("tiny")[0][0])
    assert any("over-optimised" in note for note in sentences.caveats(row))
    row["score_gain"] = interval(0.05, 0.21)
    assert not any("over-optimised" in note for note in sentences.caveats(row))


# -- fits ------------------------------------------------------------------------------------------


def test_three_sizes_carry_no_fit_and_four_do():
    assert fit([1e5, 1e6, 1e7], [0.1, 0.2, 0.3]) is None
    assert fit([1e5, 1e5, 1e6, 1e7], [0.1, 0.1, 0.2, 0.3]) is None
    assert fit([1e5, 1e6, 1e7, 1e8], [0.1, 0.2, float("nan"), 0.3]) is None


def test_a_fit_is_the_line_and_interval_of_another_library():
    parameters, means = [1e5, 2e5, 1e6, 3e6, 5e6], [0.30, 0.33, 0.48, 0.50, 0.61]
    line = stats.linregress(np.log10(parameters), means)
    half = stats.t.ppf(0.975, 3) * line.stderr
    found = fit(parameters, means)
    assert found is not None
    expected = (line.slope, line.slope - half, line.slope + half)
    assert found[0] == pytest.approx(expected)
    assert found[1] == pytest.approx(line.rvalue**2)


# -- the paper -------------------------------------------------------------------------------------


def test_differences_from_the_paper_have_welchs_interval():
    ours, theirs = [0.70, 0.72, 0.75], [0.7292, 0.7113, 0.7051, 0.7487]
    test = stats.ttest_ind(ours, theirs, equal_var=False)
    bounds = test.confidence_interval()
    deviation = float(np.std(theirs, ddof=1))
    found = welch(ours, float(np.mean(theirs)), deviation, 4)
    assert found == pytest.approx((np.mean(ours) - np.mean(theirs), bounds.low, bounds.high))


def test_one_seed_of_ours_is_one_more_draw_from_theirs():
    deviation = 0.0190
    half = stats.t.ppf(0.975, 3) * deviation * sqrt(1 + 1 / 4)
    assert welch([0.70], 0.72, deviation, 4) == pytest.approx((-0.02, -0.02 - half, -0.02 + half))
    assert isinf(welch([0.70], 0.72, None, 4)[2])


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [
        ((0.01, -0.03, 0.05), REPRODUCED),
        ((0.03, 0.01, 0.05), REPRODUCED),  # surely higher, and by less than a tenth
        ((0.10, 0.05, 0.15), HIGHER),
        ((-0.10, -0.15, -0.05), LOWER),
        ((0.00, -0.30, 0.30), UNKNOWN),
        ((0.00, -inf, inf), UNKNOWN),
    ],
)
def test_verdicts_beside_a_number_of_0_72(difference, verdict):
    assert verdict_of(difference, 0.72) == verdict


# -- what is drawn ---------------------------------------------------------------------------------


def of_two_sizes() -> pd.DataFrame:
    nan = float("nan")
    return pd.DataFrame(
        {
            "name": name,
            "seed": 1,
            "parameters": size,
            "policies": ["sft", "ppo", "dpo"],
            "dpo/win_rate": dpo,
        }
        | {"sft/win_rate": 0.3, "ppo/win_rate": ppo, "preset": name}
        for name, size, ppo, dpo in (
            ("large", 4e6, 0.8, 0.6),
            ("small", 1e5, 0.5, 0.4),
            ("small", 1e5, 0.7, nan),
        )
    )


def test_every_policy_is_a_line_over_parameters_dpo_too_and_a_seed_without_a_rate_is_left_out():
    assert win_rates(of_two_sizes(), []).about == (
        "SFT at 100K parameters: 30.0%. SFT at 4M parameters: 30.0%."
        " PPO at 100K parameters: 60.0%. PPO at 4M parameters: 80.0%."
        " DPO at 100K parameters: 40.0%. DPO at 4M parameters: 60.0%."
    )


def test_the_legend_beside_the_plot_of_win_rates_lies_inside_the_picture():
    svg = plots.drawn([win_rates(of_two_sizes(), [])], 1.6, 1.2, "")
    (width,) = re.findall(r'viewBox="0 0 ([\d.]+) ', svg)
    places = {
        said: float(x) for x, said in re.findall(r'<text[^>]* x="([\d.]+)"[^>]*>([^<]+)', svg)
    }
    for label in ("references", "SFT", "PPO", "DPO"):
        assert places[label] + 5 * len(label) < float(width), label
