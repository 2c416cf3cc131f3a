"""Sends metrics and results of a stage to wandb and TensorBoard, if the environment asks for it.

WANDB_PROJECT and TENSORBOARD_LOGGING_DIR turn them on, and wandb's own WANDB_MODE says whether it
is online. The record of a run remains its metrics.jsonl and its manifests.
"""

import importlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from stages.config.config import Config
from stages.config.errors import UserError, first_line, say_error
from stages.config.judge import file_name
from stages.config.public import public_settings
from stages.config.stages import STAGES
from stages.runs.code import code_version
from stages.runs.files import read_json, write_json
from stages.runs.manifest import partial_of, stage_folder

TRACKED = "tracked.json"
"""The id of the stage's run in wandb."""
WANDB = "wandb"
TENSORBOARD = "tensorboard"
SETTINGS = {WANDB: "WANDB_PROJECT", TENSORBOARD: "TENSORBOARD_LOGGING_DIR"}

# wandb would also send the terminal's output, the command line, host, folder, and the address of
# the repository. Each of them can contain a name, a server or a key.
QUIET: dict[str, Any] = {
    "console": "off",
    "x_disable_meta": True,
    "disable_git": True,
    "disable_code": True,
    "host": "not shown",
    "init_timeout": 30.0,
}
Send = Callable[[int | None, Mapping[str, Any]], None]
"""Takes the number of a step and its metrics, or None and the results of the stage."""


@contextmanager
def tracked(config: Config, stage: str) -> Iterator[Send]:
    """Yield a function that sends metrics and results of a stage to the active trackers.

    If a tracker fails, one line says so, and the stage continues without it. Raises UserError for a
    package that is missing.
    """
    trackers = {}
    for library, setting in SETTINGS.items():
        if os.environ.get(setting):
            tracker = start_tracker(config, stage, library)
            if tracker is not None:
                trackers[library] = tracker

    prefix = f"results/{stage}"
    if STAGES[stage].per_judge:
        prefix += f"/{config.judge.folder}"

    def drop(library: str, method: str, error: Exception) -> None:
        del trackers[library]
        text = f"{method} failed ({first_line(error)}): the stage continues without it"
        print(f"{library}: {text}", file=sys.stderr, flush=True)

    def send(step: int | None, values: Mapping[str, Any]) -> None:
        numbers = {}
        for name, value in values.items():
            if isinstance(value, int | float):
                numbers[f"{prefix}/{name}" if step is None else name] = value
        for library, tracker in list(trackers.items()):
            try:
                tracker.log(numbers, step=step)
            except Exception as error:
                drop(library, "log", error)

    try:
        yield send
    finally:
        for library, tracker in list(trackers.items()):
            try:
                tracker.finish()
            except Exception as error:
                drop(library, "finish", error)


def start_tracker(config: Config, stage: str, library: str) -> Any:
    """Start accelerate's tracker of a stage; return None if it cannot start."""
    setting = SETTINGS[library]
    try:
        importlib.import_module(library)
        tracker = make_tracker(config, stage, library, os.environ[setting])
        tracker.start()
        return tracker
    except ImportError:
        raise UserError(
            f"{setting} is set but {library} is missing:"
            f" run `.venv/bin/pip install {library}`, or unset it"
        ) from None
    except Exception as error:
        why = " ".join(f"{error}".split())[:300]  # it may take several lines
        say_error(f"{library} cannot start ({why}): the stage continues without it")
        return None


def make_tracker(config: Config, stage: str, library: str, place: str) -> Any:
    """Return accelerate's tracker of a stage.

    A resumed stage continues its wandb run, whose id is kept in the stage's partial folder.
    """
    from accelerate import PartialState, tracking

    PartialState()  # accelerate's trackers log through it
    name = f"{config.name}/seed{config.seed}/{stage}"
    if library == TENSORBOARD:
        return tracking.TensorBoardTracker(name, place)

    id_file = partial_of(stage_folder(config, stage)) / TRACKED
    identifier = read_json(id_file)
    if not identifier:
        identifier = f"{file_name(config.name)[:60]}-{stage}-{secrets.token_hex(4)}"
    write_json(id_file, identifier)

    import wandb

    # After an hour, unsent data remain on this disk, and the pipeline continues.
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", "3600")
    return tracking.WandBTracker(
        place,
        resume="allow",
        config={**public_settings(config), "code_version": code_version()},
        settings=wandb.Settings(**QUIET, allow_val_change=True),
        group=config.name,
        job_type=stage,
        name=name,
        id=identifier,
    )
