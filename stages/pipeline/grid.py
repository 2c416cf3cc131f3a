"""Grids of runs over seeds: ablations, algorithms, and the study over presets.

A run that fails stops no other, and the end names those that failed. `stages/__main__.py` calls
this.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stages.config.checks import say_error
from stages.config.command_line import Request, config_of
from stages.config.config import Config, UserError
from stages.config.faults import describe_user_error
from stages.config.presets import ABLATIONS, settings_of_ablation
from stages.config.stages import SHARED_SECTIONS, TRAINED
from stages.pipeline.runner import PlannedRun, Runner, StageFailedError
from stages.pipeline.start import release
from stages.pipeline.wanted import no_part, wanted_stages
from stages.rl.algorithms import ALGORITHMS

LADDER = ("tiny-xs", "tiny-s", "tiny", "tiny-l", "tiny-xl")
BEST_OF_N = "1,2,4,8,16,32,64"


@dataclass(frozen=True, kw_only=True)
class GridOptions:
    """What the variables of a grid choose."""

    seeds: Sequence[int] = (44413, 55513, 66613)
    presets: Sequence[str] = LADDER
    """Of a study."""
    targets: Sequence[str] = ("ppo", "eval")
    """Of each run of a study."""
    ablations: Sequence[str] = tuple(ABLATIONS)
    kl_coefs: Sequence[str] = ("0.02", "0.05", "0.1", "0.2")
    """Coefficients of the KL penalty, for the comparison of algorithms."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The runs of a grid, and the page about them."""

    first: list[PlannedRun]
    """Those that others start from, or all."""
    others: list[PlannedRun]
    """Those that start from a run of the same seed."""
    page_options: list[str]
    """The command line of the page."""


def run_grid(runner: Runner, grid: Grid, write_page: Callable[[list[str]], None]) -> int:
    """Run all of a grid, then write its page if the runs were evaluated; return the exit status.

    A seed whose first run fails has no others. The end names the runs that failed.
    """
    count = len(grid.first) + len(grid.others)
    statuses: dict[str, int] = {}
    for planned in grid.first:
        statuses[planned.label] = run_safely(runner, planned, f"{len(statuses) + 1} of {count}")
    seeds = {planned.config.seed for planned in grid.first if not statuses[planned.label]}
    others = [planned for planned in grid.others if planned.config.seed in seeds]
    for planned in others:
        statuses[planned.label] = run_safely(runner, planned, f"{len(statuses) + 1} of {count}")

    failed = [label for label, status in statuses.items() if status]
    if failed:
        say_error(f"error: {len(failed)} runs failed: {', '.join(failed)}")
    runs = [*grid.first, *others]
    names = {planned.config.name for planned in runs}
    succeeded = {planned.config.name for planned in runs if not statuses[planned.label]}
    if succeeded and "eval" in runs[-1].targets:
        options = [word for word in grid.page_options if word not in names - succeeded]
        write_page([*options, "--judge", runs[0].config.judge.folder])
    return max(statuses.values())


def run_safely(runner: Runner, planned: PlannedRun, place: str) -> int:
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
    release()  # an exception keeps the models of its stage until here
    outcome = f"FAILED with status {status}" if status else "is done"
    print(f"\n{planned.label} {outcome} ({place} runs)", flush=True)
    return status


def show_grid(runner: Runner, grid: Grid) -> None:
    """Print what would run; nothing is written. Raises UserError as the runs would."""
    for planned in grid.first:
        show_plan(runner, planned)
    for planned in grid.others:
        changes = " ".join(planned.request.overrides)
        print(f"{planned.label}: would follow, with {changes}")


def show_plan(runner: Runner, planned: PlannedRun) -> None:
    """Print which stages of a run would run, and why; nothing is written."""
    steps = runner.plan(planned)
    runner.warn(planned, steps)
    lines = [f"would run {stage} ({why})" for stage, why in steps.items()]
    for line in lines or ["nothing to do"]:
        print(f"{planned.label}: {line}")


def branch(
    planned: PlannedRun, name: str, overrides: Sequence[str], targets: Sequence[str]
) -> PlannedRun:
    """Return a run with other settings that starts from another run, or from its upstream.

    It takes the stages before the first one that the settings change.
    """
    request = planned.request
    changed = {text.partition("=")[0] for text in overrides}
    kept = []
    for text in request.overrides:
        key = text.partition("=")[0]
        # The run has recorded its own changes to shared stages; its upstream has not.
        is_recorded = not request.upstream and text.split(".")[0] in SHARED_SECTIONS
        if key not in changed and not is_recorded:
            kept.append(text)

    branched = replace(
        request,
        name=f"{planned.config.name}-{name}",
        upstream=request.upstream or planned.config.name,
        overrides=(*kept, *overrides),
    )
    config = config_of(branched, None if request.upstream else planned.config)
    return PlannedRun(request=branched, config=config, targets=tuple(targets))


def first_runs(request: Request, seeds: Sequence[int], *targets: str) -> list[PlannedRun]:
    """Return a run for each seed. Raises UserError for a run that trains nothing."""
    runs = []
    for seed in dict.fromkeys(seeds):
        of_seed = replace(request, seed=seed)
        config = config_of(of_seed)
        if config.kind != TRAINED:
            raise UserError(no_part("a grid of runs", config.kind))
        runs.append(PlannedRun(request=of_seed, config=config, targets=targets))
    return runs


def ablations(request: Request, options: GridOptions) -> Grid:
    """Return a run for each seed, and the same with one setting changed, for each ablation.

    An ablation may change nothing, or the same as another: then a line says which run it equals.
    Raises UserError for an unknown ablation.
    """
    first = first_runs(request, options.seeds, "eval")
    others = []
    for planned in first:
        seen = {_without_names(planned.config): "the run itself"}
        for name in dict.fromkeys(options.ablations):
            changed = branch(planned, name, settings_of_ablation(name), ["eval"])
            twin = seen.setdefault(_without_names(changed.config), name)
            if twin == name:
                others.append(changed)
            elif planned is first[0]:
                print(f"ablation {name} is left out: with these settings it is {twin}")

    name = first[0].config.name
    kept = dict.fromkeys(planned.config.name.removeprefix(f"{name}-") for planned in others)
    if not kept:
        raise UserError("no ablation is left: name another one, see ABLATIONS= in make help")
    page = ["--name", name, "--ablations", *kept]
    return Grid(first=first, others=others, page_options=page)


def _without_names(config: Config) -> Config:
    """Return a config without what names it."""
    return config.changed(name="run", upstream="", own_from="", overrides=())


def algorithms(request: Request, options: GridOptions) -> Grid:
    """Return the runs that give SFT and reward model, and one for each coefficient of the penalty.

    Each of the latter has all algorithms; the first one also has best-of-n and DPO, on which the
    penalty has no effect. Summaries are sampled at PPO's temperature, as the KL is that of samples.
    Raises UserError for coefficients that are no numbers.
    """
    first = first_runs(request, options.seeds, "rm")
    others = []
    for planned in first:
        for coef in dict.fromkeys(options.kl_coefs):
            targets = [*ALGORITHMS, "eval"]
            overrides = [f"{name}.kl_coef={coef}" for name in ALGORITHMS]
            overrides.append(f"eval.temperature={planned.config.ppo.temperature:g}")
            if coef == options.kl_coefs[0]:
                targets.append("dpo")
                overrides.append(f"eval.best_of={BEST_OF_N}")
            others.append(branch(planned, f"kl{coef}", overrides, targets))
    page = ["--name", first[0].config.name, "--kl-coefs", *options.kl_coefs]
    return Grid(first=first, others=others, page_options=page)


def study(request: Request, options: GridOptions) -> Grid:
    """Return a run for each preset and seed: all sizes of a seed before the next seed.

    With a name each run is called after its preset and that name, such as tiny-xs-other. Raises
    UserError for an unknown preset or target, a setting without a name, and an upstream.
    """
    if request.upstream:
        raise UserError("a study trains every size from its own start: leave out UPSTREAM=")
    runs = []
    for seed in dict.fromkeys(options.seeds):
        for preset in dict.fromkeys(options.presets):
            name = f"{preset}-{request.name}" if request.name else ""
            of_size = replace(request, preset=preset, name=name, recorded=())
            runs += first_runs(of_size, [seed], *options.targets)
            wanted_stages(runs[-1].config, runs[-1].targets)  # raises for an unknown target
    names = dict.fromkeys(planned.config.name for planned in runs)
    return Grid(first=runs, others=[], page_options=["--names", *names])
