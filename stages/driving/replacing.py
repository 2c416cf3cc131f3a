"""What REPLACE makes anew. Standard library only.

REPLACE=1 makes anew the stages of the goals that were asked for, and of the stages that they need
those made with other settings or other code. REPLACE=ppo makes that stage anew and what follows
from it; REPLACE="ppo rloo" does so for both. What an upstream supplies stays as it is.

The old stages move to `aside/` first. Then `replacing.json`, beside the stages, names them. As long
as one of them is not made again, the same command goes on: it keeps what has been made since then,
unless that was made with other settings or other code than those of now.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from stages.finished import (
    changed_code,
    damage,
    lock_of,
    partial_of,
    read_manifest,
    stage_folder,
    stages_of,
    why_not,
)
from stages.running.files import read_record, write_json
from stages.runs import held, move_aside
from stages.settings import config as settings
from stages.settings.checks import UserError, unknown
from stages.settings.config import Config
from stages.settings.stages import STAGES, row_of

ALL = "1"


class Replacement:
    """What a command replaces of one run; nothing where it asks for no REPLACE."""

    def __init__(
        self, config: Config, replace: str, goals: Sequence[str], own: Sequence[str]
    ) -> None:
        """`own`: the stages that the run makes itself. Raises UserError for any other one."""
        self.config, self.request = config, {"replace": replace, "goals": [*goals]}
        self.seed = settings.RUNS / config.name / f"seed{config.seed}"
        self.note = self.seed / "replacing.json"
        candidates = own if replace in ("", ALL) else _following(config, replace.split(), own)
        always = stages_of(config, goals) if replace == ALL else {*candidates}
        before = read_record(self.note)
        if before is None:
            before = {"request": None, "folders": []}
        goes_on = before["request"] == self.request and not self._is_done(before["folders"])
        self.moved: list[str] = before["folders"] if goes_on else []
        """What an interrupted command moved aside, as folders below the seed: `judge/facts`."""
        self.stages = [
            stage
            for stage in candidates
            if replace
            and ((stage in always and self._name(stage) not in self.moved) or self._differs(stage))
        ]

    def _name(self, stage: str) -> str:
        return str(stage_folder(self.config, stage).relative_to(self.seed))

    def _is_done(self, folders: Sequence[str]) -> bool:
        return all(read_manifest(self.seed / folder) is not None for folder in folders)

    def _differs(self, stage: str) -> bool:
        """Whether a stage was made, or begun, with other settings or other code, or is damaged."""
        problem = why_not(self.config, stage) or damage(self.config, stage)
        needs_replace = problem is not None and problem.needs_replace
        return needs_replace or bool(changed_code(self.config, stage))

    def move_aside(self) -> None:
        """Move what is replaced aside, finished or half done; then write down that it was.

        Raises UserError, and moves nothing, if one of the stages is under way elsewhere.
        """
        folders = {stage: stage_folder(self.config, stage) for stage in self.stages}
        there = [
            (stage, path)
            for stage, folder in folders.items()
            for path in (folder, partial_of(folder))
            if path.is_dir()
        ]
        with ExitStack() as locks:
            for stage in dict(there):
                locks.enter_context(held(lock_of(folders[stage]), stage))
            for stage, path in there:
                print(f"{stage}: moved to {move_aside(path)}", flush=True)
            if self.stages and self.seed.is_dir():
                folders_moved = [*self.moved, *map(self._name, self.stages)]
                write_json(self.note, {"request": self.request, "folders": folders_moved})

    def forget_if_done(self) -> None:
        """Remove the note if all stages that it names are made again."""
        note = read_record(self.note)
        if note is not None and self._is_done(note["folders"]):
            self.note.unlink()


def _following(config: Config, named: Sequence[str], own: Sequence[str]) -> list[str]:
    """Stages of the run and those made from them, directly or not, in the order of the run."""
    for stage in named:
        if stage not in STAGES:
            raise unknown("stage", stage, STAGES)
        if config.is_upstreams(stage):
            where = f"it belongs to {config.upstream}"
            raise UserError(f"REPLACE={stage}: {where}: leave out UPSTREAM=")
        if stage not in own:
            raise UserError(f"REPLACE={stage}: no goal here needs it: add {STAGES[stage].goal}")
    following: list[str] = []
    for name in own:
        row = row_of(name, config.kind)
        if name in named or {*row.inputs, *row.joined_by}.intersection(following):
            following.append(name)
    return following
