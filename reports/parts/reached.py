"""When a run's gain in reward is there.

The gold score of held-out posts is known at the end alone, and the reward in every update. So the
reward is the clock.
"""

from collections.abc import Sequence
from statistics import fmean

from reports.parts.words import Row

GAIN = 0.9
"""Share of a run's gain in reward that is timed."""
SMOOTHED = 5
"""Updates whose mean reward counts as one."""


def update_of_gain(rows: Sequence[Row]) -> int | None:
    """The update at which GAIN of a run's own gain is there; None where its reward did not rise.

    It ends the first SMOOTHED updates whose mean reward is GAIN of the way from the first update's
    to the mean of the last fifth.
    """
    rewards = [row["objective/scores"] for row in rows]
    start, end = rewards[0], fmean(rewards[-max(1, len(rewards) // 5) :])
    if end <= start:
        return None
    target, ends = start + GAIN * (end - start), range(SMOOTHED, len(rewards) + 1)
    return next((n for n in ends if fmean(rewards[n - SMOOTHED : n]) >= target), None)
