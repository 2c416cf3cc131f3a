"""Grids of runs over seeds: ablations, rivals, and the study over presets. Standard library only.

A cell is one run. The maker makes the cells, a failed one stops no other, and the end names what
failed. `stages.pipeline` calls this.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from stages.driving.maker import Cell, Maker
from stages.driving.wanted import no_part, wanted_stages
from stages.settings.command_line import Request, config_of
from stages.settings.config import Config, UserError
from stages.settings.presets import settings_of_ablation
from stages.settings.stages import SHARED_SECTIONS, TRAINED

SEEDS = (44413, 55513, 66613)
LADDER = ("tiny-xs", "tiny-s", "tiny", "tiny-l", "tiny-xl")
STUDY_GOALS = ("ppo", "eval")
RIVALS = ("ppo", "rloo", "grpo")
KL_COEFS = ("0.02", "0.05", "0.1", "0.2")
BEST_OF_N = "1,2,4,8,16,32,64"
Page = Callable[[list[str]], Sequence[str]]


def make_grid(maker: Maker, start: Sequence[Cell], others: Sequence[Cell], page: Page) -> int:
    """Make the runs that others begin from, then these, then the page if they were evaluated.

    A seed whose own run fails has no others; the other seeds go on. The end names what failed.
    `page` gives a page's module and arguments of the names of runs that are there.
    """
    maker.says_stop = True
    codes = maker.make_all(start)
    ready = {cell.config.seed for cell, code in zip(start, codes, strict=True) if not code}
    if maker.execution.dry_run:
        # What a cell lacks can be looked up only where the run that it begins from is complete.
        ready -= {cell.config.seed for cell in start if others and maker.missing(cell)}
        for cell in (cell for cell in others if cell.config.seed not in ready):
            first, overrides = cell.config.own_from or "ppo", " ".join(cell.request.overrides)
            print(f"{cell.label}: would make {first} and what follows, {overrides}")
    cells = [*start, *(cell for cell in others if cell.config.seed in ready)]
    codes += maker.make_all(cells[len(start) :])
    if maker.execution.dry_run:
        return max(codes)
    if maker.stopped:
        name = signal.Signals(maker.stopped - 128).name
        print(f"stopped by {name}: the same command, without REPLACE, goes on", file=sys.stderr)
        return maker.stopped
    done = [cell.config.name for cell, code in zip(cells, codes, strict=True) if not code]
    failed = [cell.label for cell, code in zip(cells, codes, strict=True) if code]
    if failed:
        print(f"error: {len(failed)} runs failed: {', '.join(failed)}", file=sys.stderr)
    if not done or "eval" not in cells[-1].goals:
        return max(codes)
    module, *words = page([*dict.fromkeys(done)])
    command = [sys.executable, "-m", f"reports.{module}", *words]
    return max(*codes, maker.call([*command, "--judge", cells[0].config.judge.folder]))


def config_to_train(request: Request, goal: str) -> Config:
    """The config of a run of a grid. Raises UserError for a run that trains nothing."""
    config = config_of(request)
    if config.kind != TRAINED:
        raise UserError(no_part(goal, config.kind))
    return config


def branch(request: Request, config: Config, name: str, overrides: Sequence[str]) -> Cell:
    """A run with other settings that takes the stages before the first one that these change from
    the run of `request`, or from its upstream.
    """
    # What the run itself changes in shared stages it has on record; its upstream has not.
    own = [
        text
        for text in request.overrides
        if request.upstream or text.split(".")[0] not in SHARED_SECTIONS
    ]
    turned = replace(
        request,
        name=f"{config.name}-{name}",
        upstream=request.upstream or config.name,
        overrides=overridden(own, overrides),
    )
    upstream = None if request.upstream else config
    return Cell(request=turned, config=config_of(turned, upstream), goals=("eval",))


def overridden(own: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """Overrides with others after them, which stand for those of the same key."""
    keys = {text.partition("=")[0] for text in others}
    return (*(text for text in own if text.partition("=")[0] not in keys), *others)


# -- ablations -------------------------------------------------------------------------------------


def ablation_cells(
    request: Request, seeds: Sequence[int], names: Sequence[str]
) -> tuple[list[Cell], list[Cell]]:
    """The runs to compare with, one per seed, and each of them with one switch turned.

    Raises UserError for an unknown ablation.
    """
    switches = {name: settings_of_ablation(name) for name in names}
    default, turned = [], []
    for seed in dict.fromkeys(seeds):
        of_seed = replace(request, seed=seed)
        config = config_to_train(of_seed, "ablations")
        default.append(Cell(request=of_seed, config=config, goals=("eval",)))
        turned += [branch(of_seed, config, name, switch) for name, switch in switches.items()]
    return default, turned


def distinct_ablations(request: Request, seed: int, names: Sequence[str]) -> list[str]:
    """The ablations that make runs of their own; a line says which other run each of the rest is.

    A switch may stand already where it would be turned, or two may come to the same settings.
    Raises UserError where none is left.
    """
    (default,), turned = ablation_cells(request, [seed], names)
    seen = {_settings_alone(default.config): "the run itself"}
    for name, cell in zip(dict.fromkeys(names), turned, strict=True):
        twin = seen.setdefault(_settings_alone(cell.config), name)
        if twin != name:
            print(f"ablation {name} is left out: with these settings it is {twin}")
    if len(seen) == 1:
        raise UserError("no ablation is left: name another one, see ABLATIONS= in make help")
    return [*seen.values()][1:]


def _settings_alone(config: Config) -> Config:
    """A config without what names it."""
    return replace(config, name="run", upstream="", own_from="", overrides=())


def make_ablations(
    maker: Maker, request: Request, seeds: Sequence[int], names: Sequence[str]
) -> int:
    """Make the runs and their ablations, then the page that compares them."""
    names = distinct_ablations(request, seeds[0], names)
    default, turned = ablation_cells(request, seeds, names)
    page = ["ablations_page", "--name", default[0].config.name, "--ablations", *names]
    return make_grid(maker, default, turned, lambda _: page)


# -- rivals ----------------------------------------------------------------------------------------


def rival_cells(
    request: Request, seeds: Sequence[int], kl_coefs: Sequence[str]
) -> tuple[list[Cell], list[Cell]]:
    """The runs that give SFT and reward model, one per seed; and from each, for every coefficient
    of the KL penalty, one with all rivals. The first of these has best-of-n and DPO too, on which
    the penalty has no effect. Summaries are sampled as PPO samples, which is what KL is of.

    Raises UserError for coefficients that are no numbers, and for a run that trains nothing.
    """
    start, rivals = [], []
    first, *_ = coefs = list(dict.fromkeys(kl_coefs))
    for seed in dict.fromkeys(seeds):
        of_seed = replace(request, seed=seed)
        config = config_to_train(of_seed, "rivals")
        start.append(Cell(request=of_seed, config=config, goals=("rm",)))
        for coef in coefs:
            overrides = [*(f"{rival}.kl_coef={coef}" for rival in RIVALS)]
            overrides.append(f"eval.temperature={config.ppo.temperature:g}")
            overrides += [f"eval.best_of={BEST_OF_N}"] if coef == first else []
            goals = (*RIVALS, *(["dpo"] if coef == first else []), "eval")
            rivals.append(replace(branch(of_seed, config, f"kl{coef}", overrides), goals=goals))
    return start, rivals


def make_rivals(
    maker: Maker, request: Request, seeds: Sequence[int], kl_coefs: Sequence[str]
) -> int:
    """Make the rivals of a run, then the page that compares them at equal KL."""
    start, rivals = rival_cells(request, seeds, kl_coefs)
    page = ["rivals_page", "--name", start[0].config.name, "--kl-coefs", *kl_coefs]
    return make_grid(maker, start, rivals, lambda _: page)


# -- the study -------------------------------------------------------------------------------------


def study_cells(
    request: Request, presets: Sequence[str], seeds: Sequence[int], goals: Sequence[str] = ()
) -> list[Cell]:
    """A cell for each preset and seed, a whole row of sizes before the next seed.

    With a name each run is called after its preset and that name, such as tiny-xs-other.
    Raises UserError for an unknown preset or goal, a setting without a name, and an upstream.
    """
    if request.upstream:
        raise UserError("a study trains every size from its own start: leave out UPSTREAM=")
    cells = []
    for seed in dict.fromkeys(seeds):
        for preset in dict.fromkeys(presets):
            name = f"{preset}-{request.name}" if request.name else ""
            part = replace(request, preset=preset, seed=seed, name=name)
            config = config_to_train(part, "study")
            cells.append(Cell(request=part, config=config, goals=tuple(goals) or STUDY_GOALS))
            wanted_stages(config, cells[-1].goals)
    return cells


def make_study(maker: Maker, cells: Sequence[Cell]) -> int:
    """Make every cell that is missing, then the page about all sizes; returns the exit status."""
    return make_grid(maker, cells, [], lambda names: ["scaling_page", "--names", *names])
