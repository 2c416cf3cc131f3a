"""The numbers of the page about sizes: pooled rates, failed seeds, over-optimization, growth."""

from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
from scipy import stats

from reports.results import Interval, find_all
from reports.scaling_measures import (
    Outcome,
    differing_settings,
    failed_seeds,
    fit,
    growth,
    outcome_of,
    over_optimized_seed,
    pool,
    runs_by_label,
    seed_range,
    size_result,
)
from stages.config.checks import UserError
from stages.config.command_line import make_config
from tests.lib.fabricated_runs import fabricate, interval


def rate(estimate: float, half: float = 0.03) -> Interval:
    return Interval(estimate=estimate, low=estimate - half, high=estimate + half)


def pooled(rates: list[Interval]) -> Interval:
    found = pool(rates)
    assert found is not None
    return found.interval


# -- pooled intervals ------------------------------------------------------------------------------


def test_seeds_without_uncertainty_over_posts_have_students_interval():
    values = [0.5389, 0.2224, 0.1973, 0.6179]
    found = pooled([rate(value, half=0.0) for value in values])
    expected = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected)


def test_seeds_that_agree_keep_the_uncertainty_over_posts():
    found = pooled([rate(0.6)] * 5)
    assert (found.low, found.high) == pytest.approx((0.57, 0.63))


def test_both_sources_of_uncertainty_are_added():
    # Seeds 0.60 to 0.66: s^2 / k = (0.002 / 3) / 4 = 1 / 6000. Posts: 0.0392 / 1.96 = 0.02.
    # Degrees of freedom 3 * (1 / 6000 + 0.0004)^2 / (1 / 6000)^2 = 34.68.
    found = pooled([rate(value, half=0.0392) for value in (0.6, 0.62, 0.64, 0.66)])
    half = stats.t.ppf(0.975, 34.68) * sqrt(1 / 6000 + 0.0004)
    assert found.high - found.low == pytest.approx(2 * half, rel=1e-3)


def test_a_pooled_rate_is_cut_at_100_percent():
    found = pooled([rate(value, half=0.0392) for value in (0.94, 0.96, 0.98, 1.0)])
    half = stats.t.ppf(0.975, 34.68) * sqrt(1 / 6000 + 0.0004)
    assert (found.low, found.high) == pytest.approx((0.97 - half, 1.0), rel=1e-3)


def test_uncertainty_over_posts_never_narrows_the_interval_of_the_seeds():
    found = pooled([rate(value, half=0.0392) for value in (0.6, 0.64)])
    expected = stats.t.interval(0.95, 1, 0.62, stats.sem([0.6, 0.64]))
    assert (found.low, found.high) == pytest.approx(expected)


def test_one_seed_has_the_interval_of_its_posts():
    assert pooled([Interval(estimate=0.6, low=0.55, high=0.66)]) == Interval(0.6, 0.55, 0.66)


def test_no_seed_has_no_pooled_rate():
    assert pool([]) is None


def test_the_pooled_interval_covers_the_truth_where_seeds_and_posts_vary():
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(400):
        post = rng.normal(0, 0.02)  # the same posts for all seeds
        values = 0.6 + post + rng.normal(0, 0.03, size=3)
        found = pooled([rate(float(value), half=0.0392) for value in values])
        covered += found.low <= 0.6 <= found.high
    assert 0.93 <= covered / 400 <= 1


@pytest.mark.parametrize(
    ("estimate", "outcome"),
    [
        (0.60, Outcome.BEATS),
        (0.52, Outcome.INCONCLUSIVE),
        (0.40, Outcome.LOSES),
    ],
)
def test_the_whole_interval_has_to_be_on_one_side_of_50_percent(estimate, outcome):
    assert outcome_of(pool([rate(estimate)])) is outcome


def test_without_a_rate_the_outcome_is_inconclusive():
    assert outcome_of(None) is Outcome.INCONCLUSIVE


# -- failed seeds ----------------------------------------------------------------------------------


def failed(*seeds: tuple[float, float]) -> list[tuple[int, bool]]:
    """The number of each failed seed and whether it collapsed; PPO's and SFT's rates are given.

    The interval of their difference is 4 points to each side.
    """
    for number, (ppo, sft) in enumerate(seeds, start=1):
        fabricate(make_config("tiny", seed=number), ppo=ppo, sft=sft)
    found, _ = find_all(["tiny"])
    return [(seed.seed, seed.has_collapsed) for seed in failed_seeds(found)]


def test_the_rule_finds_the_papers_two_collapsed_seeds(runs):
    """Huang et al. 2024, 1B: 53.9, 22.2, 19.7 and 61.8%, SFT 32.7%."""
    rates = ((0.5389, 0.327), (0.2224, 0.327), (0.1973, 0.327), (0.6179, 0.327))
    assert failed(*rates) == [(2, True), (3, True)]


def test_the_rule_finds_none_of_the_papers_larger_seeds(runs):
    """Huang et al. 2024, 2.8B, SFT 40.7%."""
    assert failed((0.7292, 0.407), (0.7113, 0.407), (0.7051, 0.407), (0.7487, 0.407)) == []


def test_a_seed_far_below_the_others_fell_behind(runs):
    assert failed((0.89, 0.34), (0.73, 0.34), (0.88, 0.34)) == [(2, False)]


def test_a_seed_9_points_below_the_others_did_not_fall_behind(runs):
    assert failed((0.89, 0.34), (0.80, 0.34), (0.88, 0.34)) == []


def test_a_single_seed_has_no_others_to_fall_behind(runs):
    assert failed((0.73, 0.34)) == []


def test_a_seed_whose_difference_includes_0_did_not_collapse(runs):
    assert failed((0.31, 0.34)) == []


def test_a_seed_with_too_many_unjudged_posts_is_not_judged(runs):
    fabricate(make_config("tiny", seed=9), ppo=0.1, sft=0.34, unjudged=0.05)
    assert failed((0.89, 0.34)) == []


# -- over-optimization -----------------------------------------------------------------------------

RISEN_PROXY = interval(1.0, 0.2)
GOLD_SCORER = {"gold": {"label": "gold reward model"}}


def over_optimized(ppo, proxy_gain=RISEN_PROXY, gold_gain=None):
    """Whether and why a seed is over-optimized; SFT wins 50%."""
    found: dict[str, Any] = {}
    if gold_gain is not None:
        gains = {"ppo": {"proxy": proxy_gain, "gold": gold_gain}}
        scores = {"proxy": {}, "gold": {"ppo": interval(1.0)}, "gains": gains}
        found = {"win_rate": {"scores": scores}, "judge": GOLD_SCORER}
    fabricate(make_config("tiny"), ppo=ppo, sft=0.5)
    ((run,), _) = find_all(["tiny"])
    run.stages["win_rate"].results["policies"]["ppo"]["score_gain"] = proxy_gain
    for stage, changes in found.items():
        run.stages[stage].results.update(changes)
    seed = over_optimized_seed(run, size="471K")
    return seed and (seed.has_lower_win_rate, seed.has_lower_gold_score)


def test_a_rising_proxy_and_a_falling_win_rate_are_over_optimization(runs):
    assert over_optimized(ppo=0.40) == (True, False)


def test_a_rising_proxy_and_a_falling_gold_score_are_over_optimization(runs):
    assert over_optimized(ppo=0.60, gold_gain=interval(-0.2, 0.1)) == (False, True)


def test_a_win_rate_that_may_not_have_fallen_is_no_over_optimization(runs):
    assert over_optimized(ppo=0.48) is None


def test_a_proxy_that_may_not_have_risen_is_no_over_optimization(runs):
    assert over_optimized(ppo=0.40, proxy_gain=interval(1.0, 1.2)) is None


def test_a_falling_proxy_is_no_over_optimization(runs):
    assert over_optimized(ppo=0.40, proxy_gain=interval(-1.0, 0.2)) is None


# -- growth ----------------------------------------------------------------------------------------


def test_three_sizes_carry_no_line():
    assert fit([1e5, 1e6, 1e7], [0.1, 0.2, 0.3]) is None


def test_two_runs_of_one_size_count_as_one_size_for_the_line():
    assert fit([1e5, 1e5, 1e6, 1e7], [0.1, 0.1, 0.2, 0.3]) is None


def test_equal_means_have_no_line():
    assert fit([1e5, 1e6, 1e7, 1e8], [0.3, 0.3, 0.3, 0.3]) is None


def test_a_fit_is_the_line_and_interval_of_another_library():
    parameters = [1e5, 2e5, 1e6, 3e6, 5e6]
    means = [0.30, 0.33, 0.48, 0.50, 0.61]
    line = stats.linregress(np.log10(parameters), means)
    half = stats.t.ppf(0.975, 3) * line.stderr
    found = fit(parameters, means)
    assert found is not None
    slope, r_squared = found
    expected = (line.slope, line.slope - half, line.slope + half)
    assert (slope.estimate, slope.low, slope.high) == pytest.approx(expected)
    assert r_squared == pytest.approx(line.rvalue**2)


def two_sizes(**changes):
    """Two sizes with two seeds each; `changes` go to the larger one's config."""
    for seed, ppo in ((1, 0.3), (2, 0.4)):
        fabricate(make_config("tiny-s", seed=seed), ppo=ppo, sft=0.25, accuracy=0.7, size=10**5)
    for seed, ppo in ((1, 0.6), (2, 0.64)):
        config = make_config("tiny", seed=seed).changed(**changes)
        fabricate(config, ppo=ppo, sft=0.25, accuracy=0.7, size=10**6)
    return find_all(["tiny", "tiny-s"])[0]


def test_a_rise_beyond_both_ranges_is_a_rise(runs):
    ppo, *_ = growth(runs_by_label(two_sizes()))
    # Seeds of 30 and 40%, then 60 and 64%, with 3 points to each side.
    assert ppo.smallest is not None
    assert ppo.largest is not None
    smallest = (ppo.smallest.estimate, ppo.smallest.low, ppo.smallest.high)
    largest = (ppo.largest.estimate, ppo.largest.low, ppo.largest.high)
    assert smallest == pytest.approx((0.35, 0.27, 0.43))
    assert largest == pytest.approx((0.62, 0.57, 0.67))
    assert (ppo.rising_steps, ppo.steps, ppo.are_apart, ppo.is_higher) == (1, 1, True, True)


def test_equal_rates_do_not_rise(runs):
    _, sft, *_ = growth(runs_by_label(two_sizes()))
    assert (sft.rising_steps, sft.are_apart, sft.per_tenfold) == (0, False, None)


def test_a_size_with_an_unjudged_seed_has_no_range(runs):
    fabricate(make_config("tiny", seed=3), ppo=0.62, unjudged=0.05, size=10**6)
    ppo, *_ = growth(runs_by_label(two_sizes()))
    assert ppo.largest is None
    assert ppo.are_apart is None


def test_growth_of_one_size_has_no_rows(runs):
    fabricate(make_config("tiny"))
    assert growth(runs_by_label(find_all(["tiny"])[0])) == []


# -- sizes -----------------------------------------------------------------------------------------


def test_sizes_are_called_by_their_parameters_from_the_smallest_on(runs):
    assert list(runs_by_label(two_sizes())) == ["100K", "1M"]


def test_two_runs_of_one_size_also_have_their_names(runs):
    fabricate(make_config("tiny", name="tiny-hot"), size=10**6)
    two_sizes()
    found, _ = find_all(["tiny", "tiny-hot"])
    assert list(runs_by_label(found)) == ["1M (tiny)", "1M (tiny-hot)"]


def test_a_size_has_means_and_spreads_of_its_seeds(runs):
    groups = runs_by_label(two_sizes())
    size = size_result("100K", groups["100K"])
    ppo = size.policies["ppo"]
    # Seeds of 30 and 40%: mean 35, deviation 7.07, t(1) = 12.706: 35 -+ 63.5, within 0 and 1.
    assert ppo.over_seeds is not None
    assert (ppo.over_seeds.low, ppo.over_seeds.high) == pytest.approx((0.0, 0.9853), abs=1e-4)
    assert ppo.seed_deviation == pytest.approx(0.0707, abs=1e-4)
    assert ppo.post_half_width == pytest.approx(0.03)
    assert size.gain is not None
    assert size.gain.interval.estimate == pytest.approx(0.10)


def test_equal_seeds_have_no_interval_over_seeds(runs):
    groups = runs_by_label(two_sizes())
    assert size_result("1M", groups["1M"]).policies["sft"].over_seeds is None


def test_a_range_is_over_the_seeds_that_have_the_number():
    found = seed_range([0.3, None, 0.4])
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((0.35, 0.3, 0.4))
    assert found.seeds == 2


def test_a_run_without_training_is_not_a_size(runs):
    fabricate(make_config("tiny"))
    found, _ = find_all(["tiny"])
    with pytest.raises(UserError, match="only its own page shows it"):
        runs_by_label([replace(found[0], training=None)])


# -- whether the sizes are alike -------------------------------------------------------------------


def test_settings_that_should_not_differ_are_listed(runs):
    ppo = make_config("tiny").ppo.changed(kl_coef=0.1)
    memory = make_config("tiny").memory.changed(cpu_threads=1, microbatch_size=3)
    found = differing_settings(two_sizes(ppo=ppo, memory=memory))
    assert found == {"ppo.kl_coef": ["0.05", "0.1"], "memory.cpu_threads": ["1", "2"]}


def test_a_section_is_compared_between_the_runs_that_have_it(runs):
    first, second, *others = two_sizes()
    first = replace(first, settings={**first.settings, "dpo": {"beta": 0.05}})
    assert differing_settings([first, second, *others]) == {}
    second = replace(second, settings={**second.settings, "dpo": {"beta": 0.1}})
    assert differing_settings([first, second, *others]) == {"dpo.beta": ["0.05", "0.1"]}
