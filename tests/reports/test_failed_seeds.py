"""Seeds that collapsed, fell behind, or over-optimized their reward."""

from typing import Any

from reports.failed_seeds import failed_seeds, over_optimized_seed
from reports.results import find_all
from stages.config.command_line import make_config
from tests.lib.fabricated_runs import fabricate, interval

# -- collapsed, or behind the others ---------------------------------------------------------------


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
