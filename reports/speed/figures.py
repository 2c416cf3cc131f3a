"""What a bench found, as figures: the best run, the spread, the bound, and the check of ratios.

The lower bound is the work that an update cannot do without, counted in operations without any
padding, at the rate of a large matrix product in the same call. Standard library only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reports.speed.speed import OURS

Found = dict[str, Any]
STEPS = ("sample", "measure", "score", "learn")
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


def best(runs: Sequence[Found]) -> tuple[Found, float]:
    """The fastest run, and the spread of all of them."""
    fastest = min(runs, key=lambda one: one["seconds"])
    slowest = max(one["seconds"] for one in runs)
    return fastest, slowest / fastest["seconds"] - 1


def bound(flops: dict[str, float], rate: float) -> dict[str, float]:
    """Seconds that the counted work needs, by steps, and `all`."""
    seconds = {step: flops[step] / rate for step in STEPS}
    return seconds | {"all": sum(seconds.values())}


def least(shape: Found, rate: float) -> dict[str, float]:
    """The lower bound of a shape's update."""
    return bound(shape["measured"][OURS][0]["flops"], rate)


def figures(found: Found, name: str) -> list[Figures]:
    """Ours and every peer that was measured at a shape, ours first."""
    shape, about = found["shapes"][name], found["about"]
    labels = {OURS: OURS, **about["peers"]}
    bounds = least(shape, about["matrix_rate"])
    made = []
    for key, label in labels.items():
        runs = [one for one in shape["measured"].get(key, []) if "failed" not in one]
        if runs:
            made.append(_figures(label, runs, shape["batch"], bounds))
    return made


def _figures(label: str, runs: list[Found], batch: int, bounds: dict[str, float]) -> Figures:
    fastest, spread = best(runs)
    return Figures(
        label=label,
        seconds=fastest["seconds"],
        spread=spread,
        steps={step: fastest[step] for step in STEPS},
        episodes=batch / fastest["seconds"],
        tokens=fastest["tokens"] / fastest["seconds"],
        peak=max(one["peak"] for one in runs),
        above=fastest["seconds"] / bounds["all"],
        learning_above=fastest["learn"] / bounds["learn"],
    )


def failures(found: Found) -> list[str]:
    """Peers that could not be installed, and measurements of peers that failed."""
    lines = list(found["about"]["left_out"])
    for name, shape in found["shapes"].items():
        for key, runs in shape["measured"].items():
            said = [one["failed"] for one in runs if "failed" in one]
            lines += [f"{found['about']['peers'][key]} at {name}: {one}" for one in said[:1]]
    return lines


# -- the check -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A number that should not depend on the machine; larger is worse."""

    name: str
    value: float
    allowed: float
    """The share by which it may grow."""


def ratios(found: Found) -> dict[str, Ratio]:
    """Every ratio that a check compares, by its name."""
    made = []
    for name in found["shapes"]:
        ours, *peers = figures(found, name)
        made += [
            _ratio(f"{name}: time over the bound", ours.above, SLOWER),
            _ratio(f"{name}: learning over the bound", ours.learning_above, SLOWER),
        ]
        for peer in peers:
            made += [
                _ratio(f"{name}: time over {peer.label}", ours.seconds / peer.seconds, SLOWER),
                _ratio(f"{name}: memory over {peer.label}", ours.peak / peer.peak, LARGER),
            ]
    for name, steps in found["stages"].items():
        for step, runs in steps.items():
            value = over_bound(best(runs)[0], found["about"]["matrix_rate"])
            made.append(_ratio(f"{name}: {step} over the bound", value, SLOWER))
    return {one.name: one for one in made}


def _ratio(name: str, value: float, allowed: float) -> Ratio:
    return Ratio(name=name, value=value, allowed=allowed)


def over_bound(run: Found, rate: float) -> float:
    """How many times the counted work's seconds a step of a stage takes."""
    return float(run["seconds"] * rate / run["flops"])


def compare(published: Found, now: Found) -> tuple[list[str], list[str]]:
    """A line on every published ratio, and those lines again that are worse than allowed."""
    before, after = ratios(published), ratios(now)
    lines, worse = [], []
    for name, one in before.items():
        if name not in after:
            line, fails = f"{name}: {one.value:.2f} published, not measured now", True
        else:
            change = after[name].value / one.value - 1
            line = f"{name}: {one.value:.2f} published, {after[name].value:.2f} now"
            line += f" ({change:+.0%}, allowed {one.allowed:+.0%})"
            fails = change > one.allowed
        lines.append(line)
        worse += [line] if fails else []
    return lines, worse
