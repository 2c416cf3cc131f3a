"""Whether a finished stage matches a config, and what to do if it does not.

Content decides: the hashes of settings, inputs and outputs that a manifest records. Code does not
count, but a warning names stages that ran with different code (`changed_code`).
"""

from dataclasses import dataclass
from typing import Any, Literal

from stages.config.config import Config
from stages.config.errors import UserError, first_few
from stages.config.stages import STAGES
from stages.runs.code import changed_files, is_comparable
from stages.runs.differences import differing_inputs, differing_settings
from stages.runs.files import file_hash, read_record
from stages.runs.make_command import make_command
from stages.runs.manifest import ATTEMPT, partial_of, read_manifest, stage_folder


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why a stage does not match a config."""

    text: str
    """A phrase that follows the stage's name."""
    needs_replace: bool = False
    """Whether the stage reruns only if REPLACE asks for it, because that replaces finished work."""

    def __str__(self) -> str:
        return self.text


MISSING = Problem(text="is missing")


def find_problem(
    config: Config, stage: str, compare: Literal["sizes", "records", "hashes"] = "sizes"
) -> Problem | None:
    """Return why a finished stage does not match this config; None if it does.

    Settings, inputs as they are now, and outputs must be those that its manifest records. Outputs
    are compared by size, because hashing the models of a large run takes a while; with `hashes`
    also by content. With `records` the content of the JSON and JSONL files directly in the stage's
    folder is compared, which is what pages show.
    """
    folder = stage_folder(config, stage)
    manifest = read_manifest(folder)
    if manifest is None:
        return MISSING

    # The settings of an upstream's stage are the recorded ones.
    if not config.is_from_upstream(stage):
        differences = differing_settings(config, stage, manifest["settings"], verb="ran with")
        if differences:
            text = f"has finished with other settings ({first_few(differences, '; ')})"
            return Problem(text=text, needs_replace=True)

    differences = differing_inputs(config, stage, manifest)
    if differences:
        return Problem(text=f"ran {differences[0]}")

    for name, size in manifest["sizes"].items():
        path = folder / name
        if not path.exists() or path.stat().st_size != size:
            return _output_problem(stage, name)
    if compare == "sizes":
        return None
    return changed_output(config, stage, records_only=compare == "records")


def changed_output(config: Config, stage: str, records_only: bool = False) -> Problem | None:
    """Return the first output of a finished stage whose hash has changed, as a problem, or None.

    With `records_only`, only JSON and JSONL files directly in the stage's folder are compared.
    """
    folder = stage_folder(config, stage)
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    for name, recorded_hash in manifest["outputs"].items():
        is_record = "/" not in name and name.endswith((".json", ".jsonl"))
        if records_only and not is_record:
            continue
        if not (folder / name).exists() or file_hash(folder / name) != recorded_hash:
            return _output_problem(stage, name)
    return None


def _output_problem(stage: str, name: str) -> Problem:
    """Return the problem of a changed file. Only pages are rewritten without REPLACE."""
    is_page = STAGES[stage].reads_records
    return Problem(text=f"has changed on disk ({name})", needs_replace=not is_page)


def check_stage(config: Config, stage: str) -> None:
    """Raise UserError, with the fix, unless a stage matches this config, to the last byte."""
    problem = find_problem(config, stage, compare="hashes")
    if problem is not None:
        raise refusal(config, stage, problem)


def refusal(config: Config, stage: str, problem: Problem) -> UserError:
    """Return the one-line error about a stage with a problem, with its fix."""
    command = make_command(config, stage)
    fix = f"run `{command}`"
    if problem.needs_replace:
        fix = (
            f"choose another NAME, or run `{command} REPLACE={stage}`, which moves the finished"
            " stage aside"
        )
    return UserError(f"stage {stage} {problem}: {fix}")


# -- code ------------------------------------------------------------------------------------------


def changed_code(config: Config, stage: str) -> list[str]:
    """Return the files whose code has changed since a stage finished, or began if half finished.

    Empty if there is no such stage, or if an earlier version wrote its record.
    """
    folder = stage_folder(config, stage)
    record: dict[str, Any] | None = read_manifest(folder)
    if record is None:
        record = read_record(partial_of(folder) / ATTEMPT)
    return changed_files(record["code"]) if record else []


def has_same_code(config: Config, stage: str) -> bool:
    """Return whether a finished stage is known to have run with today's code."""
    manifest = read_manifest(stage_folder(config, stage))
    if manifest is None or not is_comparable(manifest["code"]):
        return False
    return not changed_files(manifest["code"])
