"""The folder of a stage, and the manifest in it.

runs/<name>/seed<k>/<stage>/           a finished stage, with its manifest.json
runs/<name>/seed<k>/<stage>.partial/   the same stage until it has finished
"""

from pathlib import Path
from typing import Any

from stages.config import paths
from stages.config.config import Config
from stages.config.errors import UserError, unknown
from stages.config.stages import STAGES
from stages.runs.files import read_record

RESUME = "resume"
"""The subfolder from which an interrupted stage resumes."""
ATTEMPT = "attempt.json"
"""The settings, inputs and code with which a running stage began."""
MANIFEST_PARTS = ("settings", "inputs", "outputs", "sizes", "results", "code")


def stage_folder(config: Config, stage: str) -> Path:
    """Return the folder of a stage of this run; in its upstream, if that supplies the stage."""
    name = config.upstream if config.is_from_upstream(stage) else config.name
    folder = paths.RUNS / name / f"seed{config.seed}" / stage
    if STAGES[stage].per_judge:
        return folder / config.judge.folder
    return folder


def partial_of(folder: Path) -> Path:
    """Return the folder in which a stage works until it has finished."""
    return folder.with_name(f"{folder.name}.partial")


def lock_of(folder: Path) -> Path:
    """Return the file that a stage locks while it is under way."""
    return folder.with_name(f".{folder.name}.lock")


def last_checkpoint(partial: Path) -> int | None:
    """Return the number of updates after which the last checkpoint was saved; None without one."""
    # The name of a half-written checkpoint does not end with a digit.
    checkpoints = (partial / RESUME).glob("checkpoint-[0-9]*[0-9]")
    updates = [int(path.name.removeprefix("checkpoint-")) for path in checkpoints]
    return max(updates, default=None)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a finished stage; None without one.

    Raises UserError for a file that is not a manifest.
    """
    path = folder / "manifest.json"
    manifest: dict[str, Any] | None = read_record(path)
    if manifest is None:
        return None
    has_parts = all(isinstance(manifest.get(part), dict) for part in MANIFEST_PARTS)
    if not has_parts or "content" not in manifest:
        raise UserError(f"{path} is not a manifest of this project: move {folder} away")
    return manifest


def check_run(name: str) -> None:
    """Raise UserError, with the nearest names, if there are runs but none of this name."""
    names = sorted({path.parent.name for path in paths.RUNS.glob("*/seed*")})
    if names and name not in names:
        raise unknown("run", name, names, "run `make status` to see all runs")
