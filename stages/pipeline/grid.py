"""Grids of runs over seeds: ablations, algorithms, and the study over presets.

A cell is one run. The maker makes the cells, a failed one stops no other, and the end names what
failed. `stages.pipeline` calls this.
"""

import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from stages.config.command_line import Request, config_of
from stages.config.config import Config, UserError
from stages.config.presets import settings_of_ablation
from stages.config.stages import SHARED_SECTIONS, TRAINED
from stages.pipeline.maker import Cell, Maker
from stages.pipeline.wanted import no_part, wanted_stages
from stages.rl.algorithms import ALGORITHMS

SEEDS = (44413, 55513, 66613)
LADDER = ("tiny-xs", "tiny-s", "tiny", "tiny-l", "tiny-xl")
STUDY_GOALS = ("ppo", "eval")
KL_COEFS = ("0.02", "0.05", "0.1", "0.2")
BEST_OF_N = "1,2,4,8,16,32,64"


class Grid(NamedTuple):
    """Runs, others that begin from one of the same seed, and the page's module and words."""

    start: list[Cell]
    others: list[Cell]
    page: list[str]


def make_grid(maker: Maker, grid: Grid) -> int:
    """Make the runs that others begin from, then these, then the page if they were evaluated.

    A seed whose own run fails has no others; the other seeds go on. The end names what failed.
    """
    maker.says_stop = True
    codes = maker.make_all(grid.start)
    if maker.dry_run:
        for cell in grid.others:
            print(f"{cell.label}: would follow, with {' '.join(cell.request.overrides)}")
        return max(codes)
    ready = {cell.config.seed for cell, code in zip(grid.start, codes, strict=True) if not code}
    others = [cell for cell in grid.others if cell.config.seed in ready]
    codes += maker.make_all(others)
    if maker.stopped:
        name = signal.Signals(maker.stopped - 128).name
        print(f"stopped by {name}: the same command, without REPLACE, goes on", file=sys.stderr)
        return maker.stopped
    cells = list(zip([*grid.start, *others], codes, strict=True))
    failed = [cell.label for cell, code in cells if code]
    if failed:
        print(f"error: {len(failed)} runs failed: {', '.join(failed)}", file=sys.stderr)
    done = {cell.config.name for cell, code in cells if not code}
    if not done or "eval" not in cells[-1][0].goals:
        return max(codes)
    gone = {cell.config.name for cell, _ in cells} - done
    module, *words = (word for word in grid.page if word not in gone)
    command = [sys.executable, "-m", f"reports.{module}", *words]
    return max(*codes, maker.call([*command, "--judge", cells[0][0].config.judge.folder]))


def branch(cell: Cell, name: str, overrides: Sequence[str], goals: Sequence[str]) -> Cell:
    """A run with other settings that takes the stages before the first one that these change from
    another run, or from its upstream.
    """
    request, keys = cell.request, {text.partition("=")[0] for text in overrides}
    # What the run itself changes in shared stages it has on record; its upstream has not.
    own = [
        text
        for text in request.overrides
        if text.partition("=")[0] not in keys
        and (request.upstream or text.split(".")[0] not in SHARED_SECTIONS)
    ]
    turned = replace(
        request,
        name=f"{cell.config.name}-{name}",
        upstream=request.upstream or cell.config.name,
        overrides=(*own, *overrides),
    )
    config = config_of(turned, None if request.upstream else cell.config)
    return Cell(request=turned, config=config, goals=tuple(goals))


def start_cells(request: Request, seeds: Sequence[int], *goals: str) -> list[Cell]:
    """A run for each seed. Raises UserError for a run that trains nothing."""
    requests = [replace(request, seed=seed) for seed in dict.fromkeys(seeds)]
    cells = [Cell(request=each, config=config_of(each), goals=goals) for each in requests]
    if cells[0].config.kind != TRAINED:
        raise UserError(no_part("a grid of runs", cells[0].config.kind))
    return cells


def ablations(request: Request, seeds: Sequence[int], names: Sequence[str]) -> Grid:
    """The runs to compare with, and each of them with one switch turned.

    A switch may stand already where it would be turned, or two may come to the same settings: then
    a line says which other run it is. Raises UserError for an unknown ablation.
    """
    start, others = start_cells(request, seeds, "eval"), []
    for cell in start:
        seen = {_settings_alone(cell.config): "the run itself"}
        for name in dict.fromkeys(names):
            turned = branch(cell, name, settings_of_ablation(name), ["eval"])
            twin = seen.setdefault(_settings_alone(turned.config), name)
            if twin == name:
                others.append(turned)
            elif cell is start[0]:
                print(f"ablation {name} is left out: with these settings it is {twin}")
    name = start[0].config.name
    own = dict.fromkeys(cell.config.name.removeprefix(f"{name}-") for cell in others)
    if not own:
        raise UserError("no ablation is left: name another one, see ABLATIONS= in make help")
    return Grid(start, others, ["ablations_page", "--name", name, "--ablations", *own])


def _settings_alone(config: Config) -> Config:
    """A config without what names it."""
    return config.changed(name="run", upstream="", own_from="", overrides=())


def algorithms(request: Request, seeds: Sequence[int], kl_coefs: Sequence[str]) -> Grid:
    """The runs that give SFT and reward model; and from each, for every coefficient of the KL
    penalty, one with all algorithms. The first of these has best-of-n and DPO too, on which the
    penalty has no effect. Summaries are sampled at PPO's temperature, as the KL is that of samples.

    Raises UserError for coefficients that are no numbers.
    """
    start, others = start_cells(request, seeds, "rm"), []
    for cell in start:
        for coef in dict.fromkeys(kl_coefs):
            goals = [*ALGORITHMS, "eval"]
            overrides = [f"{name}.kl_coef={coef}" for name in ALGORITHMS]
            overrides.append(f"eval.temperature={cell.config.ppo.temperature:g}")
            if coef == kl_coefs[0]:
                goals.append("dpo")
                overrides.append(f"eval.best_of={BEST_OF_N}")
            others.append(branch(cell, f"kl{coef}", overrides, goals))
    page = ["algorithms_page", "--name", start[0].config.name, "--kl-coefs", *kl_coefs]
    return Grid(start, others, page)


def study(
    request: Request, presets: Sequence[str], seeds: Sequence[int], goals: Sequence[str] = ()
) -> Grid:
    """A run for each preset and seed, a whole row of sizes before the next seed.

    With a name each run is called after its preset and that name, such as tiny-xs-other.
    Raises UserError for an unknown preset or goal, a setting without a name, and an upstream.
    """
    if request.upstream:
        raise UserError("a study trains every size from its own start: leave out UPSTREAM=")
    cells = []
    for seed in dict.fromkeys(seeds):
        for preset in dict.fromkeys(presets):
            name = f"{preset}-{request.name}" if request.name else ""
            part = replace(request, preset=preset, name=name, recorded=())
            cells += start_cells(part, [seed], *(goals or STUDY_GOALS))
            wanted_stages(cells[-1].config, cells[-1].goals)
    names = dict.fromkeys(cell.config.name for cell in cells)
    return Grid(cells, [], ["scaling_page", "--names", *names])
