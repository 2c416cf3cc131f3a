"""The figures of the page about algorithms."""

import pytest

from reports.algorithm_figures import bars_against_base, outside_the_zoom
from reports.equal_kl import pairs_of
from tests.lib.algorithm_points import PPO, RLOO, line, lines


def test_the_plot_has_the_sign_of_the_table():
    (pair,) = pairs_of(PPO + lines("rloo", 0.74, 0.75, 0.76))
    assert pair.name == "RLOO minus PPO"

    (bar,) = bars_against_base([pair])

    assert bar.label == "RLOO"
    assert bar.value == pytest.approx(-5.0)
    assert bar.interval == pytest.approx((-7.48, -2.52), abs=0.01)


def test_algorithms_outside_the_zoomed_plot_are_named():
    far_away = line("dpo", 0.8, kls=(17,)) + line("sft", 0.5, kls=(0,))
    assert outside_the_zoom(PPO + RLOO + far_away) == ["DPO", "SFT"]
