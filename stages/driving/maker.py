"""Makes the stages of runs: finds what is missing or stale, and calls each stage as a process.

Content decides everything (`stages.finished.why_not`), the age of a file decides nothing. If the
outputs of a stage's inputs have changed, the stage is made again and the old one moves aside. Other
code makes nothing stale: one line says which stages were made with it.

A run takes hours, and its last stages are asked for in the same command. So the settings of all of
them are checked first, and the rows as soon as the base stage has counted them.
Standard library only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stages.driving.replacing import move_all_aside, replaced_stages
from stages.driving.status import kept
from stages.driving.wanted import wanted_stages
from stages.driving.warm import START, Caller
from stages.finished import (
    GOLD,
    MISSING,
    changed_code,
    gold_inputs,
    identity,
    is_gold_of,
    lock_of,
    no_gold,
    own_gold,
    partial_of,
    read_manifest,
    refusal,
    stage_folder,
    why_not,
)
from stages.running.machine import other_code
from stages.running.progress import folded, say_if_killed
from stages.runs import halvings, held, put_in_place
from stages.settings.checks import UserError, check_dealt, check_filled, check_room, say_error
from stages.settings.command_line import Request
from stages.settings.config import Config
from stages.settings.faults import what_to_mend
from stages.settings.judge_models import check_asking
from stages.settings.sections import COMPARISONS, POSTS
from stages.settings.stages import STAGES, row_of

LEARNED = {"sft": POSTS[0], "rm": COMPARISONS[0], "dpo": COMPARISONS[0]}  # stage -> its split
Ended = Callable[[Config, str], None]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run to be made: what was asked, its config, and its goals."""

    request: Request
    config: Config
    goals: tuple[str, ...]

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.config.name} seed {self.config.seed}"

    def stages(self) -> list[str]:
        """The stages that it makes itself, in their order."""
        stages = wanted_stages(self.config, self.goals)
        return [name for name in stages if not self.config.is_upstreams(name)]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How stages are made: no result depends on it."""

    launch: tuple[str, ...] = ()
    """Command that starts the stages that run models; empty: this interpreter."""
    started_by: tuple[str, ...] = ()
    """The make variables that say the same as `launch`, for commands that are printed."""
    processes: int = 1
    """Of a stage that runs models."""
    max_cost: str = ""
    """The most that a judge may cost, USD, for the stages that ask one."""
    replace: str = ""
    """What is made anew: `1` or stages (`stages.driving.replacing`); empty: nothing."""
    dry_run: bool = False
    """Whether to print only what would be made."""
    ended: Ended | None = None
    """Called with the config and the name of each stage that has finished."""


class Maker(Caller):
    """Runs the stages of cells."""

    def __init__(self, execution: Execution) -> None:
        super().__init__(execution.started_by)
        self.execution = execution

    # -- one run -----------------------------------------------------------------------------------

    def make(self, cell: Cell) -> int:
        """Make what is missing or stale of one run; return the status of the first that fails.

        Raises UserError if the run has finished stages that are not as asked.
        """
        config, own = cell.config, cell.stages()
        if not self.execution.dry_run:
            _settle(config, own)
        anew, steps = self._planned(cell)
        if self.execution.dry_run:
            lines = [f"would make {stage} ({why})" for stage, why in steps] or ["nothing to do"]
            print("\n".join(f"{cell.label}: {line}" for line in lines))
            return 0
        move_all_aside(config, anew)
        renewed = []
        for number, stage in enumerate(own, start=1):
            why = why_not(config, stage)
            if why is None:
                continue
            if self.stopped:
                return self.stopped
            if stage != "base":
                check_rows(config, own)
            renewed.append(stage)
            what = row_of(stage, config.kind).what
            start = "\n".join(folded(f"[{number}/{len(own)}] {stage}: {what} ({why})"))
            print(f"\n{start}", flush=True)
            code = self.call_until_it_fits(config, stage, self.command(cell, stage))
            if code:
                say_if_killed(stage, code)
                return code
            if self.execution.ended:
                self.execution.ended(config, stage)
        _say_what_stays(cell, own, renewed)
        if "report" in own and "report" not in renewed:  # a new page has printed it already
            print((stage_folder(config, "report") / "headline.txt").read_text(), end="")
        return self.stopped

    def missing(self, cell: Cell) -> list[tuple[str, str]]:
        """The stages that a cell lacks, and why. Raises UserError for what `make` would refuse."""
        return self._planned(cell)[1]

    def _planned(self, cell: Cell) -> tuple[list[str], list[tuple[str, str]]]:
        """The stages that REPLACE makes anew, and the stages that would be made, with the reason.

        Some depend on the outcome of an earlier one. Raises UserError for settings that a stage
        would refuse, for a stage that only REPLACE may touch, and for one that an upstream lacks.
        """
        config, own = cell.config, cell.stages()
        anew = replaced_stages(config, self.execution.replace, cell.goals, own)
        for stage in wanted_stages(config, cell.goals):
            problem = None if stage in anew else why_not(config, stage)
            if problem and (problem.needs_replace or stage not in own):
                raise refusal(config, stage, problem)
        steps: dict[str, str] = {}
        for stage in own:
            row = row_of(stage, config.kind)
            before = [name for name in steps if name in (*row.inputs, *row.joined_by)]
            problem, partial = why_not(config, stage), partial_of(stage_folder(config, stage))
            if stage in anew:
                steps[stage] = "anew, as REPLACE asks"
            elif problem == MISSING and partial.is_dir():
                steps[stage] = f"half done, {kept(partial)}"
            elif problem is not None:
                steps[stage] = str(problem)
            elif before:
                steps[stage] = f"if {before[-1]} puts out something else than before"
        check_settings(config, list(steps), self.execution)
        return anew, list(steps.items())

    def command(self, cell: Cell, stage: str) -> list[str]:
        """The command line that makes one stage."""
        row = row_of(stage, cell.config.kind)
        launcher = self.execution.launch if row.computes else ()
        capped = "judge" in row.sections and self.execution.max_cost
        start = [*launcher, *START[1:], row.module] if launcher else [*START, row.module]
        words = [*start, *cell.request.arguments]
        return [*words, "--max-cost", self.execution.max_cost] if capped else words

    def call_until_it_fits(self, config: Config, stage: str, words: Sequence[str]) -> int:
        """`call`, and once more each time that several processes have halved what did not fit."""
        folder, alone = stage_folder(config, stage), self.execution.processes == 1
        while True:
            before = halvings(folder)
            code = self.call(words)
            if not code or self.stopped or alone or halvings(folder) == before:
                return code
            print(f"{stage} starts again with smaller passes", flush=True)

    # -- several runs ------------------------------------------------------------------------------

    def make_all(self, cells: Sequence[Cell]) -> list[int]:
        """Make several runs in turn; each one's status. A failed run stops no other."""
        codes: list[int] = []
        for cell in cells:
            codes.append(self.stopped or self._status_of(cell))
            if not (self.stopped or self.execution.dry_run):
                outcome = f"FAILED with status {codes[-1]}" if codes[-1] else "is done"
                news = f"{cell.label} {outcome}; {len(codes)} of {len(cells)} runs are through"
                print(f"\n{news}", flush=True)
        return codes

    def _status_of(self, cell: Cell) -> int:
        """Make one of several runs; its status. What a user can mend is said in one line."""
        try:
            return self.make(cell)
        except Exception as error:
            line = what_to_mend(error)
            if line is None:
                raise
            say_error(f"error: {cell.label}: {line}")
            return 2


def _settle(config: Config, stages: Sequence[str]) -> None:
    """Rename stages that had finished when their process was killed, just before the rename."""
    for stage in stages:
        folder = stage_folder(config, stage)
        if read_manifest(partial_of(folder)) is not None:
            with held(lock_of(folder), stage):
                put_in_place(config, stage)


def _say_what_stays(cell: Cell, own: Sequence[str], renewed: Sequence[str]) -> None:
    """One line: that nothing was to do, and which stages were made with other code, if any were."""
    kept_stages = [name for name in own if name not in renewed]
    code = other_code({name: changed_code(cell.config, name) for name in kept_stages})
    parts = [] if renewed else [f"nothing to do, {len(own)} stages are done"]
    parts += [f"{code}: REPLACE=1 makes them anew"] if code else []
    if parts:
        print(f"{cell.label}: {'; '.join(parts)}")


# -- what would be refused hours later -------------------------------------------------------------


def check_settings(config: Config, stages: Sequence[str], execution: Execution) -> None:
    """Raise UserError where one of some stages cannot be made, or not in so many processes."""
    if any("judge" in STAGES[stage].sections for stage in stages):
        check_asking(config, capped=execution.max_cost != "")
        gold = gold_inputs(config, "judge").get(GOLD, "")
        if gold is None:
            raise no_gold(config)
        own = gold == identity(config, "normalize", "judge")
        if gold and (own or is_gold_of(config, config)):
            raise own_gold(config)
    for stage in stages:
        section: Any = getattr(config, stage, None)
        if hasattr(section, "batch_size"):
            minibatches = getattr(section, "num_minibatches", 1)
            samples = getattr(section, "samples_per_query", 1)
            check_dealt(stage, section.batch_size, execution.processes, minibatches, samples)


def check_rows(config: Config, stages: Sequence[str]) -> None:
    """Raise UserError where the base stage has too few rows for one of some stages, or its model
    too few positions for DPO's summaries.
    """
    manifest = read_manifest(stage_folder(config, "base"))
    results = manifest["results"] if manifest else {}
    rows = {split: counts["rows"] for split, counts in results.get("rows", {}).items()}
    half = results.get("halves", {}).get(config.rm.pairs)
    for stage in stages:
        split = LEARNED.get(stage, "")
        size = getattr(getattr(config, stage, None), "batch_size", 0)
        if split == COMPARISONS[0] and half is not None:
            check_filled(stage, size, half, f" of rm.pairs={config.rm.pairs}")
        elif split in rows:
            check_filled(stage, size, rows[split])
    if "summaries" in stages and config.eval.posts > rows.get(POSTS[1], config.eval.posts):
        check = f"eval.posts is {config.eval.posts} but the validation split has {rows[POSTS[1]]}"
        raise UserError(f"{check} posts: lower it, or 0 for all")
    if "dpo" in stages and "positions" in results:
        query, longest = results["tokens"][POSTS[1]]["longest_query"], "eval.dpo_summary_tokens"
        check_room(results["positions"], query, config.eval.dpo_summary_tokens, longest)
