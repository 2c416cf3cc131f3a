"""An ablation beside the default run, by seed: same posts, SFT and reward model.

This module says what the runs on disk show, and whether they fit such a comparison.
`reports.ablations_page` puts it into words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from eval.rates.formulas import mean_of_seeds
from eval.win_rate import Scores, paired_difference
from reports.parts.collect import MEMORY_KNOBS, Record, differing_settings, find_runs, row
from reports.parts.verdict import shown
from stages.settings.command_line import override_of
from stages.settings.config import SECTIONS, UserError
from stages.settings.presets import ABLATIONS, settings_of_ablation
from stages.settings.stages import SHARED_STAGES

EQUAL = 1e-12  # numbers that are closer than this are one number, rounded


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One ablation beside the default run: rows of numbers, and differences in win rate by seed."""

    name: str
    rows: list[dict[str, Any]]
    differences: dict[int, float]
    """Seed -> difference of the win rate on the same posts, a fraction."""
    posts: tuple[float, float]
    """95% interval of the mean difference over posts, the seeds held fixed."""
    changed: int
    """Held-out summaries that differ from the default run's, in all seeds."""
    written: int
    """Held-out summaries in all seeds."""
    runs: list[Record]
    """The ablation's runs on the seeds that are compared."""
    notes: list[str]
    """What differs from the default run, apart from the one switch."""

    @property
    def mean(self) -> float:
        """Mean difference of the win rate, a fraction."""
        return fmean(self.differences.values())

    @property
    def seeds(self) -> tuple[float, float] | None:
        """95% interval of the mean difference over seeds, as `over_seeds` gives it."""
        return over_seeds(list(self.differences.values()))

    @property
    def is_clear(self) -> bool:
        """Whether the intervals over seeds and over posts leave out 0, both on one side."""
        if self.seeds is None or not self.changed:
            return False
        return min(self.seeds[0], self.posts[0]) > 0 or max(self.seeds[1], self.posts[1]) < 0


def over_seeds(values: Sequence[float]) -> tuple[float, float] | None:
    """95% t interval of a mean over seeds; None for one seed, and if all seeds are equal.

    Equal seeds show no spread, but other seeds might.
    """
    if max(values) - min(values) < EQUAL:
        return None
    return mean_of_seeds(values)


def collect(
    base: str, names: Sequence[str], judge: str = ""
) -> tuple[list[Record], list[Compared], list[str]]:
    """The default runs, the ablations beside them, and a line on each seed that is left out.

    `judge`: the folder of one judge, if several have judged the runs.
    Raises UserError if a name is unknown, or if no seed of a run can be compared.
    """
    if not names:
        raise UserError(f"no ablation is named: known are {', '.join(ABLATIONS)}")
    for name in names:
        settings_of_ablation(name)  # an unknown one is refused
    default, left_out = rated_runs(base, judge)
    if not default:
        raise UserError(f"no seed of {base} has a win rate: {' '.join(left_out)}")
    others = []
    for name in names:
        runs, out = rated_runs(f"{base}-{name}", judge)
        left_out += out
        if runs:
            others.append(compare(name, default, runs))
    if not others:
        raise UserError(f"no seed of an ablation has a win rate: {' '.join(left_out)}")
    return default, others, left_out


def rated_runs(name: str, judge: str = "") -> tuple[list[Record], list[str]]:
    """The finished seeds of a run whose win rate may be given, and a line on each other seed."""
    runs, left_out = find_runs(name, judge)
    unrated = [one for one in runs if numbers(one)["ppo/win_rate"] is None]
    left_out += [
        f"{name} seed{one.seed} is left out: too many of its posts have no verdict."
        for one in unrated
    ]
    return [one for one in runs if one not in unrated], left_out


def compare(name: str, default: Sequence[Record], runs: Sequence[Record]) -> Compared:
    """An ablation beside the default run, on the seeds of both. Raises UserError without one."""
    by_seed = {one.seed: one for one in default}
    pairs = [(one, by_seed[one.seed]) for one in runs if one.seed in by_seed]
    if not pairs:
        raise UserError(
            f"ablation {name} has no seed in common with the default run: run make ablations"
        )
    found = [(scores(run), scores(base)) for run, base in pairs]
    mine, defaults = zip(*found, strict=True)
    together = paired_difference(mean_scores(mine), mean_scores(defaults))
    changed = [changed_summaries(run, base) for run, base in pairs]
    return Compared(
        name=name,
        rows=[numbers(run) for run, _ in pairs],
        runs=[run for run, _ in pairs],
        differences={
            run.seed: paired_difference(*sides).estimate
            for (run, _), sides in zip(pairs, found, strict=True)
        },
        posts=(together.low, together.high),
        changed=sum(map(sum, changed)),
        written=sum(map(len, changed)),
        notes=[note for run, base in pairs for note in oddities(name, run, base)],
    )


def numbers(record: Record) -> dict[str, Any]:
    """One run's row, with what ablations look at beside it."""
    ppo = record.results("ppo")
    return row(record) | {"eos_rate": ppo["policy/eos_rate"], "kl": ppo["objective/kl_k1"]}


def scores(record: Record) -> Scores:
    """The score of each post's PPO summary."""
    rows = record.rows("win_rate", "post_scores.jsonl")
    return {one["id"]: one["score"] for one in rows if one["policy"] == "ppo"}


def mean_scores(sides: Sequence[Scores]) -> Scores:
    """Each post's mean over the seeds; None if a seed has no verdict on it."""
    found: dict[str, float | None] = {}
    for post in sides[0]:
        values = [side.get(post) for side in sides]
        judged = [value for value in values if value is not None]
        found[post] = fmean(judged) if len(judged) == len(values) else None
    return found


def changed_summaries(run: Record, default: Record) -> list[bool]:
    """For each post, whether the PPO summary differs from the default run's."""
    before = {one["id"]: one["summary"] for one in default.rows("summaries", "ppo.jsonl")}
    rows = run.rows("summaries", "ppo.jsonl")
    return [one["summary"] != before.get(one["id"]) for one in rows]


def oddities(name: str, run: Record, default: Record) -> list[str]:
    """What a run differs in from the default, apart from this one switch."""
    wanted = switched(name)
    differing = differing_settings([default, run], free=MEMORY_KNOBS)
    wrong = [key for key in differing if key not in wanted]
    for key, value in wanted.items():
        section, field = key.split(".")
        if run.settings[section].get(field) != value:
            wrong.append(key)
    notes = []
    if wrong:
        said = ", ".join(f"{key} ({_value(run, key)})" for key in wrong)
        notes.append(f"{name}, seed {run.seed}, is not the default with this switch alone: {said}.")
    inputs = [
        {stage: one.manifests["ppo"]["inputs"].get(stage) for stage in SHARED_STAGES}
        for one in (default, run)
    ]
    if inputs[0] != inputs[1]:
        notes.append(f"{name}, seed {run.seed}: its SFT or reward model is not the default's.")
    return notes


def switched(name: str) -> dict[str, Any]:
    """The settings that an ablation changes, `section.field` -> value."""
    asked: dict[str, dict[str, Any]] = {}
    for override in ABLATIONS[name].settings.split():
        section, field, value = override_of(override)
        asked.setdefault(section, {})[field] = value
    found: dict[str, Any] = {}
    for section, values in asked.items():
        made: Any = SECTIONS[section]
        plain, turned = made(), made(**values)
        found |= {
            f"{section}.{field}": value
            for field, value in vars(turned).items()
            if value != getattr(plain, field)
        }
    return found


def _value(run: Record, key: str) -> str:
    section, field = key.split(".")
    return shown(key, run.settings[section].get(field))
