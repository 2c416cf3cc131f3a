"""Plots: the same bytes for the same numbers, axes that are named, colors that follow the theme."""

import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from reports import plots
from reports.results import Curve, Interval
from stages.rl.algorithms import ALGORITHMS


def line(values, label="x"):
    steps = tuple(range(1, len(values) + 1))
    curve = Curve(key="x", steps=steps, values=tuple(values))
    return plots.Line(label=label, color="#123456", curve=curve)


def texts_of(svg):
    return re.findall(r">([^<>]+)</text>", svg)


def test_two_drawings_of_the_same_numbers_are_equal():
    panel = plots.lines("Score", "mean score", [line([1.0, 2.0, 3.0])])
    assert plots.draw(panel) == plots.draw(panel)


def test_the_axes_are_named():
    texts = texts_of(plots.draw(plots.lines("KL", "nats per summary", [line([0.0, 1.0])])))
    assert {"KL", "update", "nats per summary"} <= set(texts)


def test_an_axis_of_shares_ends_at_100_percent():
    panel = plots.lines("EOS", "share", [line([1.0, 0.98, 1.0])], is_share=True)
    labels = [text for text in texts_of(plots.draw(panel)) if text.endswith("%")]
    assert max(float(label.removesuffix("%")) for label in labels) == 100.0


def test_text_and_grid_follow_the_readers_theme_and_the_background_is_transparent():
    svg = plots.draw(plots.lines("KL", "nats", [line([0.0, 1.0])]))
    assert "prefers-color-scheme: dark" in svg
    assert f"var(--plot-ink, {plots.INK})" in svg
    assert "#ffffff" not in svg.lower()


def test_a_long_curve_is_drawn_as_the_mean_and_range_of_neighbors(monkeypatch):
    monkeypatch.setattr(plots, "MOST_POINTS", 2)
    axes = Figure().add_subplot()
    plots.lines("x", "", [line([1.0, 3.0, 5.0, 9.0])]).draw(axes)
    (drawn,) = axes.lines
    assert np.array_equal(drawn.get_xdata(), [1.5, 3.5])
    assert np.array_equal(drawn.get_ydata(), [2.0, 7.0])
    assert len(axes.collections) == 1  # the band


def test_a_plot_of_differences_shades_what_counts_as_no_difference():
    bar = plots.Bar(label="RLOO", color="#123456", value=-2.3, interval=(-3.2, -1.4))
    axes = Figure().add_subplot()
    plots.differences("Difference", [bar], x_label="points").draw(axes)
    (band,) = axes.patches
    edges = band.get_extents().transformed(axes.transData.inverted())
    assert (edges.x0, edges.x1) == pytest.approx((-3.0, 3.0))


def bar(value, half=1.0):
    return plots.Bar(label="x", color="#123456", value=value, interval=(value - half, value + half))


def test_an_axis_of_differences_shows_the_band_and_all_bars():
    # From -3 to 9, and a tenth of that on each side.
    assert plots.limits_of_differences([bar(1), bar(8)]) == pytest.approx((-4.2, 10.2))


def test_one_difference_far_off_does_not_squeeze_the_others():
    # The bars reach 2, 3 and 41: more than 3 times 3 is far off.
    limits = plots.limits_of_differences([bar(1), bar(2), bar(-40)])
    assert limits == pytest.approx((-3.6, 3.6))


def test_differences_that_are_all_large_are_all_shown():
    assert plots.limits_of_differences([bar(32), bar(34)]) == pytest.approx((-6.8, 38.8))


def test_a_difference_beyond_the_axis_is_an_arrow_with_its_numbers():
    svg = plots.draw(plots.differences("Gap", [bar(1), bar(2), bar(-40)], x_label="points"))
    assert {"-40.0 [-41.0, -39.0]", "(arrow: reaches beyond the axis)"} <= set(texts_of(svg))


def test_an_interval_that_is_cut_off_says_where_it_ends():
    svg = plots.draw(plots.differences("Gap", [bar(1), bar(2), bar(2, 50)], x_label="points"))
    assert {"to -48.0", "to +52.0"} <= set(texts_of(svg))


def test_a_bar_ends_where_its_interval_ends():
    """A projecting cap would add half the thickness of the line at both ends."""
    svg = plots.draw(plots.differences("Gap", [bar(1)], x_label="points"))
    (style,) = re.findall(r'style="([^"]*stroke-width: 5\b[^"]*)"', svg)
    assert "square" not in style


def test_the_bar_of_a_single_seed_is_hollow():
    single = plots.Bar(
        label="x", color="#123456", value=0.5, interval=(0.4, 0.6), is_of_one_seed=True
    )
    axes = Figure().add_subplot()
    plots.win_rates("Win rate", [single]).draw(axes)
    (marker,) = [line for line in axes.lines if line.get_marker() == "o"]
    assert marker.get_markerfacecolor() == "none"


def test_every_algorithm_has_a_color_of_its_own():
    policies = ["sft", "dpo", *ALGORITHMS]
    assert len({plots.color_of(policy) for policy in policies}) == len(policies)


def test_policies_without_a_rate_have_no_bar():
    rate = Interval(estimate=0.6, low=0.5, high=0.7)
    (bar,) = plots.bars_of({"ppo": ("PPO", rate), "sft": ("SFT", None)})
    assert bar.label == "PPO"
    assert bar.value == 0.6
    assert bar.interval == (0.5, 0.7)


def test_a_figure_without_panels_is_none():
    assert plots.figure("empty", []) is None
