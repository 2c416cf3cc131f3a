"""Numbers that are watched while a run is made, and when one leaves the range of other runs.

`reports.planted_page` asks which of them betrays an error first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import fmean

from reports.parts.ablated import POLICY
from reports.parts.collect import EXPLAINED, Record
from reports.parts.words import number, percent

IN_A_ROW = 2  # updates that a number must lie outside, so that one odd batch betrays nothing
BEFORE_PPO = 0
Series = dict[int, float]
"""A number of one run, by PPO's update."""


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A number that is looked at while a run is made."""

    name: str
    series: Callable[[Record], Series]
    floor: float
    """The least that the default's range is widened by, on both sides."""
    form: Callable[[float], str] = number


@dataclass(frozen=True, kw_only=True)
class Betrayal:
    """A number that has left the range of the default's seeds."""

    signal: Signal
    update: int
    value: float
    """The mean over the seeds with the error."""
    default: float
    """The mean over the default's seeds, at the same update."""

    @property
    def when(self) -> str:
        """When it was seen first."""
        return "before PPO" if self.update == BEFORE_PPO else f"from update {self.update}"


def by_update(key: str, record: Record) -> Series:
    """A number that PPO logs at every update."""
    rows = record.rows(POLICY)
    return {row["step"]: row[key] for row in rows if row.get(key) is not None}


def first_ratio(record: Record) -> Series:
    """The mean ratio of the policy's first update; while the critic learns alone there is none."""
    first = record.settings[POLICY].get("critic_updates", 0) + 1
    return {step: ratio for step, ratio in by_update("val/ratio", record).items() if step == first}


def held_out_accuracy(record: Record) -> Series:
    """The reward model's, which is known before PPO."""
    return {BEFORE_PPO: record.results("rm")["accuracy"]}


def of_ppo(name: str, key: str, floor: float, form: Callable[[float], str] = number) -> Signal:
    """A number of all of PPO's updates."""
    return Signal(name=name, series=partial(by_update, key), floor=floor, form=form)


SIGNALS = (
    Signal(name="held-out accuracy", series=held_out_accuracy, floor=0.02, form=percent),
    Signal(name="first ratio", series=first_ratio, floor=0.01, form=partial(number, digits=3)),
    of_ppo("explained variance", EXPLAINED, floor=0.1),
    of_ppo("KL", "objective/kl", floor=0.2),
    of_ppo("EOS rate", "policy/eos_rate", floor=0.02, form=percent),
    of_ppo("response length", "policy/response_length", floor=0.5),
    of_ppo("score", "objective/scores", floor=0.1),
)


def betrayal(signal: Signal, runs: Sequence[Record], default: Sequence[Record]) -> Betrayal | None:
    """The first update from which on a number of all runs lies beyond the default's range."""
    own, theirs = ([signal.series(run) for run in side] for side in (runs, default))
    steps = sorted(set.intersection(*(set(series) for series in (*own, *theirs))))
    sides = [
        _side([each[step] for each in own], [each[step] for each in theirs], signal.floor)
        for step in steps
    ]
    for at, step in enumerate(steps):
        following = sides[at : at + min(IN_A_ROW, len(steps))]
        if sides[at] and following == [sides[at]] * min(IN_A_ROW, len(steps)):
            value, usual = (fmean(each[step] for each in side) for side in (own, theirs))
            return Betrayal(signal=signal, update=step, value=value, default=usual)
    return None


def _side(values: Sequence[float], default: Sequence[float], floor: float) -> int:
    """1 if all values lie above the default's widened range, -1 if all lie below, else 0."""
    low, high = min(default), max(default)
    margin = max((high - low) / 2, floor)
    return (min(values) > high + margin) - (max(values) < low - margin)


def betrayals(runs: Sequence[Record], default: Sequence[Record]) -> list[Betrayal]:
    """Every number that leaves the default's range, the earliest first."""
    seen = (betrayal(signal, runs, default) for signal in SIGNALS)
    return sorted((each for each in seen if each is not None), key=lambda each: each.update)


def false_alarms(default: Sequence[Record], held: int) -> list[list[str]]:
    """The numbers that would betray so many of the default's seeds beside the others, each way."""
    return [
        [seen.signal.name for seen in betrayals(part, [run for run in default if run not in part])]
        for part in combinations(default, held)
    ]


def rule() -> str:
    """When a number betrays an error."""
    floors = ", ".join(f"{signal.name} {signal.floor:g}" for signal in SIGNALS)
    return (
        "A number betrays an error from the first update at which, and at the next, it lies outside"
        " the default's range in all seeds of the error, on one side. The range is that of the"
        " default's seeds at the same update, widened on either side by half its width or by a"
        f" floor, whichever is more. The floors: {floors}. The reward model's accuracy is known"
        " before PPO; the first ratio is that of the policy's first update alone. A check refuses"
        " an error if a stage would stop with its message: the mean of the normalized reward, the"
        " checks before PPO's first update and before every other one, and losses or gradients that"
        " are not finite."
    )
