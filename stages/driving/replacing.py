"""What REPLACE makes anew, and what is refused without it. Standard library only.

REPLACE=1 makes anew the stages of the goals that were asked for, and of the stages that they need
those made with other settings or other code. REPLACE=ppo makes that stage anew and what follows
from it; REPLACE="ppo rloo" does so for both. What an upstream supplies stays as it is.

The old stages move to `aside/` first. Then `replacing.json`, beside the stages, names them. As long
as one of them is not made again, the same REPLACE goes on: it keeps what has been made since then,
unless that was made with other settings or other code than those of now.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from stages.finished import (
    changed_code,
    damage,
    lock_of,
    partial_of,
    read_manifest,
    refusal,
    stage_folder,
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
        self,
        config: Config,
        replace: str,
        own: Sequence[str],
        of_goals: set[str],
        renewed: set[Path],
    ) -> None:
        """`own`: the stages that the run makes itself. `of_goals`: those that the goals name.

        `renewed`: the folders that this command has replaced already, for another judge.
        Raises UserError if `replace` names no stage that the run makes.
        """
        self.config, self.own, self.renewed = config, own, renewed
        self.note = settings.RUNS / config.name / f"seed{config.seed}" / "replacing.json"
        candidates = own if replace in ("", ALL) else _following(config, replace.split(), own)
        always = of_goals.intersection(own) if replace == ALL else {*candidates}
        self.request = {"replace": replace, "stages": sorted(always)}
        self.stages = [
            stage
            for stage in candidates
            if replace
            and ((stage in always and self._is_first_time(stage)) or self._is_unlike(stage))
        ]

    def _moved_before(self) -> list[str]:
        """The folders that an interrupted command with the same REPLACE has moved aside."""
        before = read_record(self.note)
        if before is None or before["request"] != self.request or _is_done(self.note):
            return []
        return list(before["folders"])

    def _is_first_time(self, stage: str) -> bool:
        folder = stage_folder(self.config, stage)
        return folder not in self.renewed and _name(folder) not in self._moved_before()

    def _is_unlike(self, stage: str) -> bool:
        """Whether a stage was made, or begun, with other settings or other code, or is damaged."""
        problem = why_not(self.config, stage) or damage(self.config, stage)
        needs_replace = problem is not None and problem.needs_replace
        return needs_replace or bool(changed_code(self.config, stage))

    def refuse_others(self, stages: Sequence[str]) -> None:
        """Raise UserError for a stage that only REPLACE may touch, and that is not replaced here.

        It names the difference and the two ways out. Raises it also if an upstream has not finished
        a stage that this run takes from it.
        """
        for stage in stages:
            problem = None if stage in self.stages else why_not(self.config, stage)
            if problem and (problem.needs_replace or stage not in self.own):
                raise refusal(self.config, stage, problem)

    def move_aside(self) -> None:
        """Move what is replaced aside, finished or half done; then write down that it was.

        Raises UserError, and moves nothing, if one of the stages is under way elsewhere.
        """
        moved = self._moved_before()
        with ExitStack() as locks:
            for stage in self.stages:
                if _on_disk(stage_folder(self.config, stage)):
                    locks.enter_context(held(lock_of(stage_folder(self.config, stage)), stage))
            for stage in self.stages:
                folder = stage_folder(self.config, stage)
                for old in _on_disk(folder):
                    print(f"{stage}: moved to {move_aside(old)}", flush=True)
                self.renewed.add(folder)
                moved.append(_name(folder))
            if self.stages and self.note.parent.is_dir():
                write_json(self.note, {"request": self.request, "folders": moved})


def forget_if_done(config: Config) -> None:
    """Remove the note of a REPLACE whose stages are all made again."""
    note = settings.RUNS / config.name / f"seed{config.seed}" / "replacing.json"
    if note.exists() and _is_done(note):
        note.unlink()


def _is_done(note: Path) -> bool:
    folders = (read_record(note) or {"folders": ()})["folders"]
    return all(read_manifest(note.parent / folder) is not None for folder in folders)


def _on_disk(folder: Path) -> list[Path]:
    """What lies there of a stage, finished or half done."""
    return [path for path in (folder, partial_of(folder)) if path.is_dir()]


def _name(folder: Path) -> str:
    """A stage's folder below its seed: `judge/facts`."""
    seed = next(parent for parent in folder.parents if parent.name.startswith("seed"))
    return str(folder.relative_to(seed))


def _following(config: Config, named: Sequence[str], own: Sequence[str]) -> list[str]:
    """Stages of the run and those made from them, directly or not, in the order of the run."""
    for stage in named:
        if stage not in STAGES:
            raise unknown("stage", stage, STAGES)
        if config.is_upstreams(stage):
            raise UserError(
                f"REPLACE={stage}: it belongs to {config.upstream}: leave out UPSTREAM="
            )
        if stage not in own:
            raise UserError(f"REPLACE={stage}: no goal here needs it: add {STAGES[stage].goal}")
    following: list[str] = []
    for name in own:
        row = row_of(name, config.kind)
        if name in named or {*row.inputs, *row.joined_by}.intersection(following):
            following.append(name)
    return following
