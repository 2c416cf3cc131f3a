"""Seeds that collapsed, fell behind, or over-optimized their reward are recognized."""

from reports.failed_seeds import failed_seeds, over_optimized_seed
from reports.results import find_all
from stages.config.command_line import make_config
from tests.lib.fabricated_runs import fabricate, interval

# -- collapsed, or behind the others ---------------------------------------------------------------


def failures_of(*ppo_rates: float, sft_rate: float) -> dict[int, str]:
    """How each failed seed failed, for PPO's win rates in seeds 1, 2, ... and SFT's in all seeds.

    The interval of their difference is 4 points to each side.
    """
    for seed, ppo_rate in enumerate(ppo_rates, start=1):
        fabricate(make_config("tiny", seed=seed), ppo=ppo_rate, sft=sft_rate)
    runs, _ = find_all(["tiny"])
    failures = {}
    for failed in failed_seeds(runs):
        failures[failed.seed] = "collapsed" if failed.has_collapsed else "fell behind"
    return failures


def test_the_rule_finds_the_papers_two_collapsed_seeds(runs):
    """Huang et al. 2024, 1B."""
    failures = failures_of(0.5389, 0.2224, 0.1973, 0.6179, sft_rate=0.327)
    assert failures == {2: "collapsed", 3: "collapsed"}


def test_the_rule_finds_none_of_the_papers_larger_seeds(runs):
    """Huang et al. 2024, 2.8B."""
    assert failures_of(0.7292, 0.7113, 0.7051, 0.7487, sft_rate=0.407) == {}


def test_a_seed_far_below_the_others_fell_behind(runs):
    assert failures_of(0.89, 0.73, 0.88, sft_rate=0.34) == {2: "fell behind"}


def test_a_seed_9_points_below_the_others_did_not_fall_behind(runs):
    assert failures_of(0.89, 0.80, 0.88, sft_rate=0.34) == {}


def test_a_single_seed_has_no_others_to_fall_behind(runs):
    assert failures_of(0.73, sft_rate=0.34) == {}


def test_a_seed_whose_difference_includes_0_did_not_collapse(runs):
    assert failures_of(0.31, sft_rate=0.34) == {}


def test_a_seed_with_too_many_unjudged_posts_is_not_judged(runs):
    fabricate(make_config("tiny", seed=9), ppo=0.1, sft=0.34, unjudged=0.05)
    assert failures_of(0.89, sft_rate=0.34) == {}


# -- over-optimization -----------------------------------------------------------------------------

RISEN_PROXY = interval(1.0, 0.2)


def run_with_gains(ppo, proxy_gain=RISEN_PROXY, gold_gain=None):
    """A run with PPO's win rate and its gains in score over SFT, which wins 50%."""
    fabricate(make_config("tiny"), ppo=ppo, sft=0.5)
    (run,), _ = find_all(["tiny"])
    win_rate = run.stages["win_rate"].results
    win_rate["policies"]["ppo"]["score_gain"] = proxy_gain
    if gold_gain is not None:
        gains = {"ppo": {"proxy": proxy_gain, "gold": gold_gain}}
        win_rate["scores"] = {"proxy": {}, "gold": {"ppo": interval(1.0)}, "gains": gains}
        run.stages["judge"].results["gold"] = {"label": "gold reward model"}
    return run


def test_a_rising_proxy_and_a_falling_win_rate_are_over_optimization(runs):
    seed = over_optimized_seed(run_with_gains(ppo=0.40), size="471K")
    assert seed is not None
    assert seed.has_lower_win_rate
    assert not seed.has_lower_gold_score


def test_a_rising_proxy_and_a_falling_gold_score_are_over_optimization(runs):
    run = run_with_gains(ppo=0.60, gold_gain=interval(-0.2, 0.1))
    seed = over_optimized_seed(run, size="471K")
    assert seed is not None
    assert not seed.has_lower_win_rate
    assert seed.has_lower_gold_score


def test_a_win_rate_that_may_not_have_fallen_is_no_over_optimization(runs):
    assert over_optimized_seed(run_with_gains(ppo=0.48), size="471K") is None


def test_a_proxy_that_may_not_have_risen_is_no_over_optimization(runs):
    run = run_with_gains(ppo=0.40, proxy_gain=interval(1.0, 1.2))
    assert over_optimized_seed(run, size="471K") is None


def test_a_falling_proxy_is_no_over_optimization(runs):
    run = run_with_gains(ppo=0.40, proxy_gain=interval(-1.0, 0.2))
    assert over_optimized_seed(run, size="471K") is None
