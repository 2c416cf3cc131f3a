"""What the runs of one ablation show: beside the default's, seed by seed, and which seeds failed.

A seed of PPO fails where its win rate is not above that of its own SFT model (the interval of the
difference, paired by post, does not lie above 0), or where PPO ended in an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from statistics import fmean
from typing import Any

from eval.win_rate import pair_name
from reports.parts import words
from reports.parts.collect import MEMORY_KNOBS, Record, find_runs, numbers_of
from reports.parts.paired import Entry, Paired, beside, settings_apart
from reports.parts.words import Row
from stages.config import config as settings
from stages.config.checks import UserError
from stages.config.config import SECTIONS, override_of
from stages.config.presets import ABLATIONS, settings_of_ablation
from stages.config.stages import first_changed, shared_before
from stages.runs.manifest import partial_of

POLICY = "ppo"  # what the switches turn


@dataclass(frozen=True, kw_only=True)
class SeedsOfRun:
    """The seeds of a run: those with a win rate, those that ended in an error, and the others."""

    runs: list[Record]
    """With a win rate that may be given."""
    ended: list[int] = field(default_factory=list)
    """Seeds whose PPO ended in an error, without a result."""
    left_out: list[str] = field(default_factory=list)
    """A line on each seed without a win rate."""

    @cached_property
    def rows(self) -> list[Row]:
        """Numbers by seed."""
        return [numbers(run) for run in self.runs]

    @property
    def failed(self) -> int:
        """How many seeds failed."""
        return len(self.ended) + sum(fails(row) is True for row in self.rows)

    @property
    def tried(self) -> int:
        """Of how many seeds it is known whether they failed."""
        return len(self.ended) + sum(fails(row) is not None for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class AblatedRun:
    """One ablation beside the default run, on the seeds of both."""

    name: str
    pair: Paired | None
    """None where no seed of the ablation has a win rate."""
    default: SeedsOfRun
    turned: SeedsOfRun
    notes: list[str] = field(default_factory=list)
    """What differs from the default run, apart from the one switch."""

    @cached_property
    def rows(self) -> list[Row]:
        """Numbers by seed, of the seeds that are compared."""
        return [numbers(run) for run in self.pair.runs] if self.pair else []

    @property
    def each(self) -> list[float]:
        """The difference of each seed's win rate from the default's."""
        return self.pair.each if self.pair else []

    @property
    def changed(self) -> int:
        """Held-out summaries that differ from the default run's, in all seeds."""
        return self.pair.written - self.pair.alike if self.pair else 0

    @property
    def ended(self) -> int:
        """Seeds without a result, of the ablation and of the default run."""
        return len(self.default.ended) + len(self.turned.ended)


def collect(
    base: str, names: Sequence[str], judge: str = ""
) -> tuple[SeedsOfRun, list[AblatedRun], list[str]]:
    """The default runs, the ablations beside them, the largest difference first, and a line on each
    seed that is left out.

    `judge`: the folder of one judge, if several have judged the runs.
    Raises UserError if a name is unknown, or if no seed of a run can be compared.
    """
    if not names:
        raise UserError(f"no ablation is named: known are {', '.join(ABLATIONS)}")
    for name in names:
        settings_of_ablation(name)  # an unknown name is refused
    default = seeds_of(base, judge)
    left_out = [*default.left_out]
    if not default.runs:
        raise UserError(f"no seed of {base} has a win rate: {' '.join(left_out)}")
    others = []
    for name in names:
        turned = seeds_of(f"{base}-{name}", judge)
        left_out += turned.left_out
        if turned.runs or turned.ended:
            others.append(ablation_of(name, base, default, turned))
    if not others:
        raise UserError(f"no seed of an ablation has a win rate: {' '.join(left_out)}")
    others.sort(key=lambda x: abs(fmean(x.each)) if x.each else inf, reverse=True)
    return default, others, left_out


def there(base: str) -> list[str]:
    """The ablations that have a folder of runs, in the order of the list."""
    return [name for name in ABLATIONS if (settings.RUNS / f"{base}-{name}").is_dir()]


def seeds_of(name: str, judge: str) -> SeedsOfRun:
    """The seeds of a run. Raises UserError if none has finished, and none ended in an error."""
    ended = [
        int(path.name.removeprefix("seed"))
        for path in sorted((settings.RUNS / name).glob("seed*"))
        if (partial_of(path / POLICY) / "failed.json").exists() and not (path / POLICY).exists()
    ]
    try:
        runs, left_out = find_runs(name, judge)
    except UserError:
        if not ended:
            raise
        runs, left_out = [], []
    rated = [run for run in runs if numbers(run)["ppo/win_rate"] is not None]
    gone = tuple(f"{name} seed{seed} " for seed in ended)
    left_out = [line for line in left_out if not line.startswith(gone)]
    left_out += [
        f"{name} seed{run.seed} is left out: too many of its posts have no verdict."
        for run in runs
        if run not in rated
    ]
    left_out += [f"{mark}failed: its PPO ended in an error." for mark in gone]
    return SeedsOfRun(runs=rated, ended=ended, left_out=left_out)


def fails(row: Row) -> bool | None:
    """Whether PPO failed by a run's numbers; None where it or SFT has too many unjudged posts."""
    difference = row["differences"].get(pair_name(POLICY, "sft"))
    if difference is None or not difference["headline"]:
        return None
    return bool(difference["low"] <= 0)


def ablation_of(name: str, base: str, default: SeedsOfRun, turned: SeedsOfRun) -> AblatedRun:
    """An ablation beside the default run, on the seeds of both. Raises UserError without one."""
    by_seed = {run.seed: run for run in default.runs}
    shared = [run for run in turned.runs if run.seed in by_seed]
    if not shared and turned.runs:
        raise UserError(
            f"ablation {name} has no seed in common with the default run: run make ablations"
        )
    if not shared:
        return AblatedRun(name=name, pair=None, default=default, turned=turned)
    pair = beside(
        Entry(name=f"{base}-{name}", policy=POLICY, runs=shared),
        Entry(name=base, policy=POLICY, runs=default.runs),
    )
    notes = [note for run in shared for note in oddities(name, run, by_seed[run.seed])]
    return AblatedRun(name=name, pair=pair, default=default, turned=turned, notes=notes)


def numbers(record: Record) -> Row:
    """One run's row, with what ablations look at beside it."""
    ppo = record.results(POLICY)
    return numbers_of(record) | {"eos_rate": ppo["policy/eos_rate"], "kl": ppo["objective/kl"]}


def oddities(name: str, run: Record, default: Record) -> list[str]:
    """What a run differs in from the default, apart from this one switch."""
    wanted, taken, which = switched(name), taken_stages(name), f"{name}, seed {run.seed},"
    own = {
        f"{section}.{key}": value
        for section, values in run.settings.items()
        for key, value in values.items()
    }
    differing = settings_apart({"default": [default], name: [run]}, free=MEMORY_KNOBS)
    wrong = [key for key in differing.index if key not in wanted]
    wrong += [key for key, value in wanted.items() if own.get(key) != value]
    notes = []
    if wrong:
        values = ", ".join(f"{key} ({words.shown(key, own.get(key))})" for key in wrong)
        notes.append(f"{which} is not the default with this switch alone: {values}.")
    inputs = [record.manifests[POLICY]["inputs"] for record in (default, run)]
    if any(inputs[0].get(stage) != inputs[1].get(stage) for stage in taken):
        shared = "SFT or reward" if "normalize" in taken else "SFT"
        notes.append(f"{which} has another {shared} model than the default.")
    if "normalize" not in taken and run.results("win_rate")["judge"]["kind"] == "reward_model":
        notes.append(f"{which} is judged by its own reward model, no one else's.")
    return notes


def taken_stages(name: str) -> tuple[str, ...]:
    """The stages before PPO that the runs of an ablation take from the default."""
    sections = {override_of(text)[0] for text in settings_of_ablation(name)}
    return shared_before(first_changed(sections))


def switched(name: str) -> dict[str, Any]:
    """The settings that an ablation names or thereby changes, `section.field` -> value."""
    overrides: dict[str, dict[str, Any]] = {}
    for override in ABLATIONS[name].settings:
        section, key, value = override_of(override)
        overrides.setdefault(section, {})[key] = value
    changed: dict[str, Any] = {}
    for section, values in overrides.items():
        section_class: Any = SECTIONS[section]
        plain, turned = section_class(), section_class(**values)
        changed |= {
            f"{section}.{key}": value
            for key, value in vars(turned).items()
            if key in values or value != getattr(plain, key)
        }
    return changed
