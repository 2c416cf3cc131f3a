"""Grids of runs over seeds: ablations, algorithms, and the study over presets.

A run that fails does not stop the others, and the last line names those that failed.
`stages/__main__.py` calls `run_grid`.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stages.config.command_line import Request, config_of
from stages.config.config import Config
from stages.config.error_messages import describe_user_error
from stages.config.errors import UserError, say_error
from stages.config.presets import (
    ABLATIONS,
    ablations_named,
    run_name,
    settings_of_ablation,
)
from stages.config.stages import SHARED_SECTIONS, TRAINED
from stages.config.values import key_of, section_of
from stages.pipeline.launch import StageFailedError
from stages.pipeline.plan import refusal_text, wanted_stages
from stages.pipeline.runner import PlannedRun, Runner
from stages.pipeline.start import release
from stages.rl.algorithms import ALGORITHMS

LADDER = ("tiny-xs", "tiny-s", "tiny", "tiny-l", "tiny-xl")
BEST_OF_N = "1,2,4,8,16,32,64"


@dataclass(frozen=True, kw_only=True)
class GridOptions:
    """What the variables of a command choose for a grid."""

    seeds: Sequence[int] = (44413, 55513, 66613)
    presets: Sequence[str] = LADDER
    """The presets of a study."""
    targets: Sequence[str] = ("ppo", "eval")
    """The targets of each run of a study."""
    ablations: Sequence[str] = tuple(ABLATIONS)
    kl_coefs: Sequence[str] = ("0.02", "0.05", "0.1", "0.2")
    """Coefficients of the KL penalty, for the comparison of algorithms."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The runs of a grid, and the page about them."""

    base_runs: list[PlannedRun]
    """The runs that variants start from, or all runs of a grid without variants."""
    variants: list[PlannedRun]
    """The runs that start from the base run of the same seed."""
    page_options: list[str]
    """Options of the command that writes the page."""
    page_names: list[str]
    """The runs that the page compares; those that have failed are left out."""


def run_grid(runner: Runner, grid: Grid, write_page: Callable[[list[str]], None]) -> int:
    """Run a grid, then write its page if the runs were evaluated; return the exit status.

    If a seed's base run fails, its variants do not run. The last line names the runs that failed.
    """
    count = len(grid.base_runs) + len(grid.variants)
    statuses: dict[str, int] = {}  # label -> exit status

    def run_each(runs: Sequence[PlannedRun]) -> None:
        for planned in runs:
            position = f"{len(statuses) + 1} of {count}"
            statuses[planned.label] = run_safely(runner, planned, position)

    run_each(grid.base_runs)
    seeds = {planned.config.seed for planned in grid.base_runs if not statuses[planned.label]}
    variants = [planned for planned in grid.variants if planned.config.seed in seeds]
    run_each(variants)

    failed = [label for label, status in statuses.items() if status]
    if failed:
        say_error(f"error: {len(failed)} runs failed: {', '.join(failed)}")

    runs = [*grid.base_runs, *variants]
    succeeded = {planned.config.name for planned in runs if not statuses[planned.label]}
    if succeeded and "eval" in runs[-1].targets:
        options = list(grid.page_options)
        names = [name for name in grid.page_names if name in succeeded]
        if names:
            options += ["--names", *names]
        write_page([*options, "--judge", runs[0].config.judge.folder])
    return max(statuses.values())


def run_safely(runner: Runner, planned: PlannedRun, position: str) -> int:
    """Run one run of a grid and return its status: 0, or that of the stage that failed."""
    status = 0
    try:
        runner.run(planned)
    except StageFailedError as failure:
        status = failure.status
    except Exception as error:
        line = describe_user_error(error)
        status = 1 if line is None else 2
        if line is None:
            traceback.print_exc()
        else:
            say_error(f"error: {planned.label}: {line}")
    release()  # the exception kept its stage's models in memory until here
    outcome = f"FAILED with status {status}" if status else "has finished"
    print(f"\n{planned.label} {outcome} ({position} runs)", flush=True)
    return status


def show_grid(runner: Runner, grid: Grid) -> None:
    """Print what would run, without writing anything. Raises UserError as the runs would."""
    for planned in grid.base_runs:
        runner.show(planned)
    for planned in grid.variants:
        changes = " ".join(planned.request.overrides)
        print(f"{planned.label}: would follow, with {changes}")


# -- the runs of each grid -------------------------------------------------------------------------


def variant_of(
    planned: PlannedRun, name: str, overrides: Sequence[str], targets: Sequence[str]
) -> PlannedRun:
    """Return a run with different settings that starts from another run, or from its upstream.

    It takes over the stages before the first one that the settings change.
    """
    request = planned.request
    changed = {key_of(override) for override in overrides}
    kept = []
    for override in request.overrides:
        # If the base run is the upstream, its record has these settings. A variant of a run that
        # has an upstream itself starts from that one, whose record lacks them.
        is_recorded = section_of(override) in SHARED_SECTIONS and not request.upstream
        if key_of(override) not in changed and not is_recorded:
            kept.append(override)

    variant = replace(
        request,
        name=f"{planned.config.name}-{name}",
        upstream=request.upstream or planned.config.name,
        overrides=(*kept, *overrides),
    )
    # The base run may not have started yet: its config stands for its record.
    config = config_of(variant, upstream_config=None if request.upstream else planned.config)
    return PlannedRun(request=variant, config=config, targets=tuple(targets))


def runs_of_seeds(
    request: Request, seeds: Sequence[int], targets: Sequence[str]
) -> list[PlannedRun]:
    """Return a run for each seed. Raises UserError for a run without training."""
    runs = []
    for seed in dict.fromkeys(seeds):
        seed_request = replace(request, seed=seed)
        config = config_of(seed_request)
        if config.kind != TRAINED:
            raise UserError(refusal_text("a grid of runs", config.kind))
        runs.append(PlannedRun(request=seed_request, config=config, targets=tuple(targets)))
    return runs


def ablations(request: Request, options: GridOptions) -> Grid:
    """Return a run for each seed, and for each ablation the same run with one setting changed.

    The options may name groups of ablations. If an ablation changes nothing, or the same as another
    one, a line says which run it equals. Raises UserError for an unknown ablation.
    """
    base_runs = runs_of_seeds(request, options.seeds, ["eval"])
    variants = []
    names: list[str] = []
    for planned in base_runs:
        # Config -> the run that has it.
        seen = {_without_names(planned.config): "the run itself"}
        for name in ablations_named(options.ablations):
            variant = variant_of(planned, name, settings_of_ablation(name), ["eval"])
            config = _without_names(variant.config)
            if config not in seen:
                seen[config] = name
                if name not in names:
                    names.append(name)
                variants.append(variant)
            elif planned is base_runs[0]:  # the same for every seed, so it is printed once
                print(f"ablation {name} is left out: with these settings it equals {seen[config]}")

    if not names:
        raise UserError("no ablation is left that changes the run: name another one in ABLATIONS=")
    return Grid(
        base_runs=base_runs,
        variants=variants,
        page_options=["--name", base_runs[0].config.name, "--ablations", *names],
        page_names=[],
    )


def _without_names(config: Config) -> Config:
    """Return a config without the fields that name the run."""
    return config.changed(name="run", upstream="", own_from="", overrides=())


def algorithms(request: Request, options: GridOptions) -> Grid:
    """Return all algorithms at several coefficients of the KL penalty, for each seed.

    The base run trains SFT and the reward model; each coefficient is a variant with all algorithms.
    The first variant also has best-of-n and DPO, on which the penalty has no effect. Summaries are
    sampled at PPO's temperature, because the KL is estimated from such samples. Raises UserError
    for coefficients that are not numbers.
    """
    base_runs = runs_of_seeds(request, options.seeds, ["rm"])
    variants = []
    for planned in base_runs:
        for coef in dict.fromkeys(options.kl_coefs):
            targets = [*ALGORITHMS, "eval"]
            overrides = [f"{name}.kl_coef={coef}" for name in ALGORITHMS]
            overrides.append(f"eval.temperature={planned.config.ppo.temperature:g}")
            if coef == options.kl_coefs[0]:
                targets.append("dpo")
                overrides.append(f"eval.best_of={BEST_OF_N}")
            variants.append(variant_of(planned, f"kl{coef}", overrides, targets))
    return Grid(
        base_runs=base_runs,
        variants=variants,
        page_options=["--name", base_runs[0].config.name, "--kl-coefs", *options.kl_coefs],
        page_names=[],
    )


def study(request: Request, options: GridOptions) -> Grid:
    """Return a run for each preset and seed: all sizes of one seed, then those of the next.

    With a name, each run is named after its preset and that name, such as tiny-xs-other. Raises
    UserError for an unknown preset or target, a setting without a name, and an upstream.
    """
    if request.upstream:
        raise UserError("a study trains every size from its own start: leave out UPSTREAM=")
    runs = []
    for seed in dict.fromkeys(options.seeds):
        for preset in dict.fromkeys(options.presets):
            name = f"{run_name(preset)}-{request.name}" if request.name else ""
            preset_request = replace(request, preset=preset, name=name)
            runs += runs_of_seeds(preset_request, [seed], options.targets)
            wanted_stages(runs[-1].config, runs[-1].targets)  # raises for an unknown target
    names = dict.fromkeys(planned.config.name for planned in runs)
    return Grid(base_runs=runs, variants=[], page_options=[], page_names=list(names))
