"""The runs of an ablation study: seeds with a result, seeds that failed, and odd settings.

A seed fails if PPO ended in an error, or if its win rate is not above that of its own SFT
model: the interval of the difference, paired by post, does not lie above 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from eval.scores import START
from eval.stats.hypothesis_tests import fisher_exact
from reports.entries import Entry, Paired, compare, differing_settings
from reports.provenance import shown
from reports.results import RunResult, find_runs
from reports.verdicts import SIGNIFICANCE
from stages.config import config as settings_module
from stages.config.config import CUT_BATCHES, SECTIONS, override_of
from stages.config.errors import UserError
from stages.config.presets import ABLATIONS, settings_of_ablation
from stages.config.stages import SHARED_STAGES, first_changed, shared_before
from stages.rl.algorithms import ALGORITHMS
from stages.runs.manifest import partial_of
from stages.runs.run import FAILED

PPO = "ppo"  # the policy that ablations change
DEFAULT = "default"
# Memory settings that only cut batches; they may differ between runs.
BATCH_SETTINGS = tuple(f"memory.{name}" for name in CUT_BATCHES)


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """All seeds of a run: those with a win rate, and those that ended in an error."""

    title: str
    """How the page calls the run: an ablation's title, or `default`."""
    run_name: str
    policy: str = PPO
    runs: tuple[RunResult, ...]
    """The seeds in which the policy has a win rate."""
    ended_in_error: tuple[int, ...]
    left_out: tuple[str, ...]
    """A line about each other seed."""

    @property
    def failed(self) -> int:
        """The number of seeds that failed."""
        failed = [has_failed(run, self.policy) is True for run in self.runs]
        return len(self.ended_in_error) + sum(failed)

    @property
    def tried(self) -> int:
        """The number of seeds of which it is known whether they failed."""
        known = [has_failed(run, self.policy) is not None for run in self.runs]
        return len(self.ended_in_error) + sum(known)

    @cached_property
    def entry(self) -> Entry:
        """The policy in these seeds, for comparisons."""
        return Entry(name=self.run_name, policy=self.policy, runs=self.runs, label=self.title)


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How many seeds failed, with an ablation and without it."""

    failed: int
    tried: int
    default_failed: int
    default_tried: int
    p_value: float
    """Fisher's exact test, before correction; 1 if nothing was tried."""
    corrected_p_value: float
    """After Holm's correction for all ablations of the page."""

    @property
    def are_different(self) -> bool:
        """Whether the ablation changes how many seeds fail."""
        return self.corrected_p_value < SIGNIFICANCE

    @property
    def any(self) -> bool:
        """Whether any seed failed."""
        return self.failed + self.default_failed > 0


@dataclass(frozen=True, kw_only=True)
class Oddity:
    """What some seeds differ in from the default, apart from the ablation."""

    seeds: tuple[int, ...]
    settings: tuple[str, ...]
    """Such as `ppo.kl_coef (0.1)`."""
    has_other_models: bool
    """Whether the SFT model, or the reward model if it is shared, is not the default's."""
    is_own_judge: bool
    """Whether the run trained the reward model that judged it."""


@dataclass(frozen=True, kw_only=True)
class AblatedRun:
    """The runs of one ablation, compared with the default on the same seeds and posts.

    Or another algorithm of the default's own runs.
    """

    name: str
    """Of the ablation or the algorithm."""
    seeds: Seeds
    paired: Paired | None
    """None if no seed has a win rate."""
    oddities: tuple[Oddity, ...]

    @property
    def compared_runs(self) -> tuple[RunResult, ...]:
        """The runs whose seed the default has, too."""
        return self.paired.runs if self.paired else ()


@dataclass(frozen=True, kw_only=True)
class AblationRuns:
    """All runs of a study."""

    default: Seeds
    ablations: tuple[AblatedRun, ...]
    left_out: tuple[str, ...]
    """A line about each seed without a win rate."""

    @property
    def all_runs(self) -> list[RunResult]:
        """The default's runs, then those that are compared with them."""
        runs = list(self.default.runs)
        for ablation in self.ablations:
            if ablation.seeds.policy == PPO:  # an algorithm is in the default's runs
                runs += ablation.compared_runs
        return runs


# -- reading ---------------------------------------------------------------------------------------


def names_of_study(base: str) -> list[str]:
    """Return the ablations of a run that have a folder of runs, in the order of the list."""
    return [name for name in ABLATIONS if (settings_module.RUNS / f"{base}-{name}").is_dir()]


def read_study(
    base: str, names: Sequence[str], algorithms: Sequence[str] = (), judge: str = ""
) -> AblationRuns:
    """Read the default run and its ablations.

    `algorithms` are policies of the default run that are compared with its PPO as well, if it has
    them. `judge` is the folder of one judge, if several have judged the runs. Raises UserError if a
    name is unknown, or if no seed of a run can be compared.
    """
    if not names:
        raise UserError(f"no ablation is named: choose from {', '.join(ABLATIONS)}")
    for name in names:
        settings_of_ablation(name)  # raises UserError for an unknown name
    default = read_seeds(base, DEFAULT, judge)
    if not default.runs:
        raise UserError(f"no seed of {base} has a win rate: {' '.join(default.left_out)}")

    ablations = []
    left_out = list(default.left_out)
    for name in names:
        seeds = read_seeds(f"{base}-{name}", ABLATIONS[name].title, judge)
        left_out += seeds.left_out
        if seeds.runs or seeds.ended_in_error:
            ablations.append(_compared(name, seeds, default))
    if not ablations:
        raise UserError(f"no seed of an ablation has a win rate: {' '.join(left_out)}")

    for algorithm in algorithms:
        runs = tuple(run for run in default.runs if has_win_rate(run, algorithm))
        if runs:
            seeds = Seeds(
                title=ALGORITHMS[algorithm].title,
                run_name=base,
                policy=algorithm,
                runs=runs,
                ended_in_error=(),
                left_out=(),
            )
            ablations.append(_compared(algorithm, seeds, default))
    return AblationRuns(default=default, ablations=tuple(ablations), left_out=tuple(left_out))


def read_seeds(name: str, title: str, judge: str) -> Seeds:
    """Read the seeds of a run.

    Raises UserError if no seed has finished, and none ended in an error.
    """
    ended = _seeds_ended_in_error(name)
    try:
        finished, lines = find_runs(name, judge)
    except UserError:
        if not ended:
            raise
        finished = []
        lines = []

    runs = []
    left_out = [f"{name} seed{seed} failed: its PPO ended in an error." for seed in ended]
    for line in lines:
        if not any(line.startswith(f"{name} seed{seed} ") for seed in ended):
            left_out.append(line)
    for run in finished:
        if has_win_rate(run, PPO):
            runs.append(run)
            continue
        reason = "it has no policy ppo"
        if PPO in run.policies:
            reason = "too many of its posts have no verdict"
        left_out.append(f"{name} seed{run.seed} is left out: {reason}.")
    return Seeds(
        title=title,
        run_name=name,
        runs=tuple(runs),
        ended_in_error=tuple(ended),
        left_out=tuple(left_out),
    )


def has_win_rate(run: RunResult, policy: str) -> bool:
    """Return whether a run has the policy, and enough verdicts for its win rate."""
    return policy in run.policies and run.policies[policy].win_rate is not None


def _seeds_ended_in_error(name: str) -> list[int]:
    seeds = []
    for folder in sorted((settings_module.RUNS / name).glob("seed*")):
        stage = folder / PPO
        if (partial_of(stage) / FAILED).exists() and not stage.exists():
            seeds.append(int(folder.name.removeprefix("seed")))
    return seeds


def _compared(name: str, seeds: Seeds, default: Seeds) -> AblatedRun:
    """Compare an ablation with the default. Raises UserError if they have no seed in common."""
    default_by_seed = {run.seed: run for run in default.runs}
    shared = tuple(run for run in seeds.runs if run.seed in default_by_seed)
    if seeds.runs and not shared:
        raise UserError(
            f"ablation {name} has no seed in common with the default run: run make ablations"
        )
    paired = None
    oddities: dict[Oddity, list[int]] = {}  # without seeds -> the seeds
    if shared:
        entry = Entry(name=seeds.run_name, policy=seeds.policy, runs=shared, label=seeds.title)
        # The default has to have these seeds only: two single runs are compared whatever theirs.
        same_seeds = tuple(default_by_seed[run.seed] for run in shared)
        base = Entry(name=default.run_name, policy=PPO, runs=same_seeds, label=DEFAULT)
        paired = compare(entry, base)
        # An algorithm of the default's own runs shares everything but itself with PPO.
        for run in shared if seeds.policy == PPO else ():
            oddity = _oddity(name, run, default_by_seed[run.seed])
            oddities.setdefault(oddity, []).append(run.seed)
    return AblatedRun(
        name=name,
        seeds=seeds,
        paired=paired,
        oddities=tuple(
            Oddity(
                seeds=tuple(odd_seeds),
                settings=oddity.settings,
                has_other_models=oddity.has_other_models,
                is_own_judge=oddity.is_own_judge,
            )
            for oddity, odd_seeds in oddities.items()
            if oddity.settings or oddity.has_other_models or oddity.is_own_judge
        ),
    )


# -- failures --------------------------------------------------------------------------------------


def has_failed(run: RunResult, policy: str) -> bool | None:
    """Return whether a seed failed; None if it, or its SFT model, has too many unjudged posts."""
    difference = run.difference(policy, START)
    if difference is None or difference.interval is None:
        return None
    return difference.interval.low <= 0


def p_of_failures(seeds: Seeds, default: Seeds) -> float:
    """Return Fisher's exact p-value of as many failing seeds; 1 if nothing was tried."""
    if not seeds.tried or not default.tried:
        return 1.0
    return fisher_exact((seeds.failed, default.failed), (seeds.tried, default.tried))


# -- what differs apart from the ablation ----------------------------------------------------------


def _oddity(name: str, run: RunResult, default: RunResult) -> Oddity:
    """Return what a run differs in from the default of its seed; the seeds are left empty."""
    wanted = settings_changed_by(name)
    values = {
        f"{section}.{key}": value
        for section, fields in run.settings.items()
        for key, value in fields.items()
    }
    groups: Mapping[str, Sequence[RunResult]] = {DEFAULT: [default], name: [run]}
    odd = [
        setting.name
        for setting in differing_settings(groups, ignored=BATCH_SETTINGS)
        if setting.name not in wanted
    ]
    odd += [key for key, value in wanted.items() if values.get(key) != value]

    inputs = run.stages[PPO].manifest["inputs"]
    default_inputs = default.stages[PPO].manifest["inputs"]
    shared = shared_stages(name)
    return Oddity(
        seeds=(),
        settings=tuple(f"{key} ({shown(key, values.get(key))})" for key in odd),
        has_other_models=any(inputs.get(stage) != default_inputs.get(stage) for stage in shared),
        is_own_judge="normalize" not in shared and run.judge.kind == "reward_model",
    )


def shared_stages(name: str) -> tuple[str, ...]:
    """Return the stages before PPO that the runs of an ablation take from the default."""
    sections = {override_of(text)[0] for text in settings_of_ablation(name)}
    return shared_before(first_changed(sections))


def own_stages(name: str) -> list[str]:
    """Return the stages before PPO that the runs of an ablation run again."""
    shared = shared_stages(name)
    return [stage for stage in SHARED_STAGES if stage not in shared]


def settings_changed_by(name: str) -> dict[str, Any]:
    """Return the settings that an ablation names or thereby changes: `section.field` -> value."""
    overrides: dict[str, dict[str, Any]] = {}
    for text in ABLATIONS[name].settings:
        section, key, value = override_of(text)
        overrides.setdefault(section, {})[key] = value

    changed = {}
    for section, values in overrides.items():
        default = vars(SECTIONS[section]())
        ablated = vars(SECTIONS[section](**values))
        for key, value in ablated.items():
            if key in values or value != default[key]:
                changed[f"{section}.{key}"] = value
    return changed
