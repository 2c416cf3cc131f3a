"""The numbers of one size, and whether sizes are alike."""

from dataclasses import replace

import pytest

from reports.results import find_all
from reports.sizes import differing_settings, runs_by_label, seed_range, size_result
from stages.config.command_line import make_config
from stages.config.errors import UserError
from tests.lib.fabricated_runs import fabricate
from tests.lib.fabricated_sizes import two_sizes


def test_sizes_are_called_by_their_parameters_from_the_smallest_on(runs):
    assert list(runs_by_label(two_sizes())) == ["100K", "1M"]


def test_two_runs_of_one_size_also_have_their_names(runs):
    fabricate(make_config("tiny", name="tiny-hot"), size=10**6)
    two_sizes()
    results, _ = find_all(["tiny", "tiny-hot"])
    assert list(runs_by_label(results)) == ["1M (tiny)", "1M (tiny-hot)"]


def test_a_size_has_means_and_spreads_of_its_seeds(runs):
    groups = runs_by_label(two_sizes())
    size = size_result("100K", groups["100K"])
    ppo = size.policies["ppo"]
    # Seeds of 30 and 40%: mean 35, deviation 7.07, t(1) = 12.706: 35 -+ 63.5, within 0 and 1.
    assert ppo.win_rate is not None
    assert ppo.win_rate.interval.low == 0.0
    assert ppo.win_rate.interval.high == pytest.approx(0.9853, abs=1e-4)
    assert ppo.seed_deviation == pytest.approx(0.0707, abs=1e-4)
    assert ppo.post_half_width == pytest.approx(0.03)
    assert size.gain is not None
    assert size.gain.interval.estimate == pytest.approx(0.10)


def test_equal_seeds_have_the_interval_of_their_posts(runs):
    groups = runs_by_label(two_sizes())
    sft = size_result("1M", groups["1M"]).policies["sft"]
    assert sft.win_rate is not None
    assert sft.post_half_width is not None
    interval = sft.win_rate.interval
    assert interval.high - interval.estimate == pytest.approx(sft.post_half_width)


def test_a_range_is_over_the_seeds_that_have_the_number():
    seeds = seed_range([0.3, None, 0.4])
    assert seeds is not None
    assert seeds.mean == pytest.approx(0.35)
    assert seeds.low == 0.3
    assert seeds.high == 0.4
    assert seeds.seeds == 2


def test_a_run_without_training_is_not_a_size(runs):
    fabricate(make_config("tiny"))
    (run,), _ = find_all(["tiny"])
    with pytest.raises(UserError, match="only its own page shows it"):
        runs_by_label([replace(run, training=None)])


# -- whether the sizes are alike -------------------------------------------------------------------


def test_settings_that_should_not_differ_are_listed(runs):
    ppo = make_config("tiny").ppo.changed(kl_coef=0.1)
    memory = make_config("tiny").memory.changed(cpu_threads=1, microbatch_size=3)
    differing = differing_settings(two_sizes(ppo=ppo, memory=memory))
    assert differing == {"ppo.kl_coef": ["0.05", "0.1"], "memory.cpu_threads": ["1", "2"]}


def test_a_section_is_compared_between_the_runs_that_have_it(runs):
    first, second, *others = two_sizes()
    first_with_dpo = replace(first, settings={**first.settings, "dpo": {"beta": 0.05}})
    second_with_dpo = replace(second, settings={**second.settings, "dpo": {"beta": 0.1}})
    assert differing_settings([first_with_dpo, second, *others]) == {}
    assert differing_settings([first_with_dpo, second_with_dpo, *others]) == {
        "dpo.beta": ["0.05", "0.1"]
    }
