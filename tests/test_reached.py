"""When rivals have the same reward, and what they have spent by then, by hand."""

import pytest

from reports.parts.reached import Spent, spent


def curve(rewards, seconds=2.0, length=10.0):
    """Rows of updates of 4 episodes."""
    return [
        {
            "episode": 4 * (step + 1),
            "objective/scores": reward,
            "policy/response_length": length,
            "seconds/update": seconds,
        }
        for step, reward in enumerate(rewards)
    ]


def test_all_are_timed_to_nine_tenths_of_the_smallest_gain():
    # Both start at 0. The slow one ends at 10, so the target is 9, of means over five updates.
    fast, slow = [0.0, *[12.0] * 19], [0.0, *[5.0] * 9, *[10.0] * 10]
    made = spent({"fast": curve(fast), "slow": curve(slow, seconds=0.5, length=20)})
    # Mean of updates 1 to 5 is 9.6; that of 11 to 14 with one 5 is 9.0.
    assert made["fast"] == Spent(updates=5, tokens=4 * 10 * 5, seconds=10.0)
    assert made["slow"] == Spent(updates=14, tokens=4 * 20 * 14, seconds=7.0)


def test_each_starts_at_the_mean_of_all_first_updates():
    # Start 1, lowest end 3, target 2.8.
    made = spent({"a": curve([2.0] + [3.0] * 9), "b": curve([0.0] + [3.0] * 9)})
    assert made["a"].updates == 5  # (2 + 4 * 3) / 5 is 2.8
    assert made["b"].updates == 6


@pytest.mark.parametrize("curves", [{}, {"a": curve([1.0] * 9), "b": curve([1.0] + [2.0] * 8)}])
def test_where_no_gain_is_shared_nothing_is_timed(curves):
    assert spent(curves) == {}
