"""What training spends until its gain in reward is there: updates, sampled tokens, seconds.

The gold score of held-out posts is known at the end alone, and the reward in every update. So the
reward is the clock, and the gold score at the end says whether equal rewards were worth the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from reports.parts.collect import Record
from reports.parts.page import Table
from reports.parts.words import Row, named, number, seeds_mean, whole

GAIN = 0.9
"""Share of the gain in reward that is timed: of a run's own, or of the smallest rival's."""
SMOOTHED = 5
"""Updates whose mean reward counts as one."""


def update_of_gain(rows: Sequence[Row]) -> int | None:
    """The update at which GAIN of a run's own gain is there; None where its reward did not rise.

    It ends the first SMOOTHED updates whose mean reward is GAIN of the way from the first update's
    to the mean of the last fifth.
    """
    rewards = [row["objective/scores"] for row in rows]
    start, end = rewards[0], fmean(rewards[-max(1, len(rewards) // 5) :])
    return _first_at(rewards, start + GAIN * (end - start)) if end > start else None


def _first_at(rewards: Sequence[float], target: float) -> int | None:
    ends = range(SMOOTHED, len(rewards) + 1)
    return next((n for n in ends if fmean(rewards[n - SMOOTHED : n]) >= target), None)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a rival of one seed spent until its reward was there."""

    updates: float
    tokens: float
    """Sampled, of the responses up to EOS."""
    seconds: float


def spent(curves: Mapping[str, Sequence[Row]]) -> dict[str, Spent]:
    """Rivals of one seed by name, from the rows of their updates.

    All begin at one SFT model, so the start is the mean of their first updates' rewards. The target
    is GAIN of the way from there to the lowest of their last rewards. Nothing where no rival rose,
    or where one has fewer than SMOOTHED updates.
    """
    if not curves:
        return {}
    rewards = {name: [row["objective/scores"] for row in rows] for name, rows in curves.items()}
    start = fmean(values[0] for values in rewards.values())
    lowest = min(fmean(values[-SMOOTHED:]) for values in rewards.values())
    if lowest <= start or min(map(len, rewards.values())) < SMOOTHED:
        return {}
    target, reached = start + GAIN * (lowest - start), {}
    for name, rows in curves.items():
        end = _first_at(rewards[name], target)
        assert end is not None  # the last five are above it in every rival
        done = rows[:end]
        batch = rows[0]["episode"]
        reached[name] = Spent(
            updates=end,
            tokens=batch * sum(row["policy/response_length"] for row in done),
            seconds=sum(row["seconds/update"] for row in done),
        )
    return reached


def spent_table(records: Sequence[Record], kl_coef: float) -> Table | None:
    """Means over seeds at one coefficient of the KL penalty; None where no seed has two rivals."""
    each: dict[str, list[Spent]] = {}
    memory: dict[str, list[float]] = {}
    for record in records:
        stages = [x for x in record.gradient_stages if record.settings[x]["kl_coef"] == kl_coef]
        if len(stages) < 2:
            continue
        for name, own in spent({stage: record.rows(stage) for stage in stages}).items():
            each.setdefault(name, []).append(own)
            memory.setdefault(name, []).append(record.manifests[name]["peak_memory_gib"])
    if not each:
        return None
    rows = [
        [
            named(name),
            seeds_mean([x.updates for x in seeds], whole),
            seeds_mean([x.tokens / 1000 for x in seeds], whole),
            seeds_mean([x.seconds for x in seeds], whole),
            number(max(memory[name])),
            str(len(seeds)),
        ]
        for name, seeds in each.items()
    ]
    header = ["", "updates", "sampled tokens, thousands", "seconds", "memory, GiB", "seeds"]
    caption = (
        f"At kl_coef {kl_coef:g}, until the mean reward of {SMOOTHED} updates has {GAIN:.0%} of the"
        " gain that every rival of the seed makes; PPO's updates of the critic alone count. Means"
        " over seeds with 95% intervals. Memory is the most that the stage's process held. Seconds"
        " compare only where nothing else ran."
    )
    return Table(header, rows, caption)
