"""A bench as figures: the best run, the spread, the bound, and the check of ratios.

The lower bound is the work that an update cannot do without, counted in operations without any
padding, at the rate of a large matrix product in the same call. Standard library only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reports.needs.work import STEPS
from reports.speed.speed import ALONE, OURS

Record = dict[str, Any]
SLOWER, LARGER = 0.15, 0.02  # what a check allows in time and in memory, as shares


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One implementation at one shape; times of its fastest run."""

    label: str
    seconds: float
    spread: float
    """The slowest run above the fastest, as a share of it."""
    steps: dict[str, float]
    """Seconds."""
    episodes: float
    """A second."""
    tokens: float
    """A second, of queries and responses; each token counts once."""
    peak: float
    """The most that any run held, bytes."""
    above: float
    """Times the lower bound."""
    learning_above: float
    """Learning alone, times the lower bound of learning."""


def best(runs: Sequence[Record]) -> tuple[Record, float]:
    """The fastest run, and the spread of all of them."""
    fastest = min(runs, key=lambda run: run["seconds"])
    slowest = max(run["seconds"] for run in runs)
    return fastest, slowest / fastest["seconds"] - 1


def bound(flops: dict[str, float], rate: float) -> dict[str, float]:
    """Seconds that the counted work needs, by steps, and `all`."""
    seconds = {step: flops[step] / rate for step in STEPS}
    return seconds | {"all": sum(seconds.values())}


def least(shape: Record, rate: float) -> dict[str, float]:
    """The lower bound of a shape's update."""
    return bound(shape["measured"][OURS][0]["flops"], rate)


def figures(bench: Record, name: str) -> list[Figures]:
    """Ours and every peer that was measured at a shape, ours first."""
    shape, about = bench["shapes"][name], bench["about"]
    labels = {OURS: OURS, ALONE: ALONE, **about["peers"]}
    bounds = least(shape, about["matrix_rate"])
    made = []
    for key, label in labels.items():
        runs = [run for run in shape["measured"].get(key, []) if "failed" not in run]
        if runs:
            made.append(_figures(label, runs, shape["batch"], bounds))
    return made


def _figures(label: str, runs: list[Record], batch: int, bounds: dict[str, float]) -> Figures:
    fastest, spread = best(runs)
    return Figures(
        label=label,
        seconds=fastest["seconds"],
        spread=spread,
        steps={step: fastest[step] for step in STEPS},
        episodes=batch / fastest["seconds"],
        tokens=fastest["tokens"] / fastest["seconds"],
        peak=max(run["peak"] for run in runs),
        above=fastest["seconds"] / bounds["all"],
        learning_above=fastest["learn"] / bounds["learn"],
    )


def failures(bench: Record) -> list[str]:
    """Peers that could not be installed, and measurements of peers that failed."""
    lines, labels = list(bench["about"]["left_out"]), bench["about"]["peers"]
    for name, shape in bench["shapes"].items():
        for key, runs in shape["measured"].items():
            failed = [run["failed"] for run in runs if "failed" in run]
            lines += [f"{labels[key]} at {name}: {reason}" for reason in failed[:1]]
    return lines


# -- the check -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A number that should not depend on the machine; larger is worse."""

    value: float
    allowed: float
    """The share by which it may grow."""


def ratios(bench: Record) -> dict[str, Ratio]:
    """Every ratio that a check compares, by its name."""
    made: dict[str, Ratio] = {}

    def add(name: str, value: float, allowed: float = SLOWER) -> None:
        made[name] = Ratio(value=value, allowed=allowed)

    for name in bench["shapes"]:
        ours, *peers = figures(bench, name)
        add(f"{name}: time over the bound", ours.above)
        add(f"{name}: learning over the bound", ours.learning_above)
        for peer in peers:
            add(f"{name}: time over {peer.label}", ours.seconds / peer.seconds)
            add(f"{name}: memory over {peer.label}", ours.peak / peer.peak, LARGER)
    for name, steps in bench["stages"].items():
        for step, runs in steps.items():
            value = over_bound(best(runs)[0], bench["about"]["matrix_rate"])
            add(f"{name}: {step} over the bound", value)
    return made


def over_bound(run: Record, rate: float) -> float:
    """How many times the counted work's seconds a step of a stage takes."""
    return float(run["seconds"] * rate / run["flops"])


def compare(published: Record, now: Record) -> tuple[list[str], list[str]]:
    """A line on every published ratio, and those lines again that are worse than allowed."""
    after = ratios(now)
    lines, worse = [], []
    for name, before in ratios(published).items():
        if name not in after:
            line, fails = f"{name}: {before.value:.2f} published, not measured now", True
        else:
            change = after[name].value / before.value - 1
            line = f"{name}: {before.value:.2f} published, {after[name].value:.2f} now"
            line += f" ({change:+.0%}, allowed {before.allowed:+.0%})"
            fails = change > before.allowed
        lines.append(line)
        worse += [line] if fails else []
    return lines, worse
