"""A stage at wandb and in TensorBoard, if the environment asks: accelerate's trackers.

A stage that goes on after an interruption goes on in its run there, by an id that lies in its
partial folder. The record stays metrics.jsonl and the manifests: whatever goes wrong here is
printed in one line, and the stage goes on. Standard library at the top.
"""

import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from stages.finished import partial_of, stage_folder
from stages.running.files import read_json, write_json
from stages.running.machine import code_version
from stages.runs import TRACKED, Show
from stages.settings.checks import UserError
from stages.settings.config import Config, public_settings, slug
from stages.settings.stages import STAGES, TRAINING_STAGES

WANDB, BOARD = "wandb", "tensorboard"
SETTINGS = {WANDB: "WANDB_PROJECT", BOARD: "TENSORBOARD_LOGGING_DIR"}
# What wandb would send beside what is logged: output of the terminal, command line, host, folder,
# and the address of the repository. Each of them can hold a name, a server or a key.
QUIET: dict[str, Any] = {
    "console": "off",
    "x_disable_meta": True,
    "disable_git": True,
    "disable_code": True,
    "host": "not shown",
    "init_timeout": 30.0,
}
REFUSED = ("UsageError", "AuthenticationError")  # as wandb calls a setting that it refuses


@contextmanager
def tracked(config: Config, stage: str) -> Iterator[Show]:
    """What takes a stage's metrics, and its results as those of no step, while it is under way.

    Raises UserError if a package that the environment asks for is missing, or refuses a setting.
    """
    wanted = {library for library, setting in SETTINGS.items() if os.environ.get(setting)}
    wanted -= set() if stage in TRAINING_STAGES else {BOARD}
    trackers = [Tracker(config, stage, library) for library in sorted(wanted)]

    def show(step: int | None, values: Mapping[str, Any]) -> None:
        start = "" if step is not None else f"results/{stage}/"
        if step is None and STAGES[stage].per_judge:
            start += f"{config.judge.folder}/"
        numbers = {f"{start}{key}": x for key, x in values.items() if isinstance(x, int | float)}
        for tracker in trackers:
            tracker.call("log", numbers, step=step)

    try:
        yield show
    finally:
        for tracker in trackers:
            tracker.call("finish")


class Tracker:
    """accelerate's tracker of a stage in one library; what fails in it is its last call."""

    def __init__(self, config: Config, stage: str, library: str) -> None:
        self.library, self.tracker = library, None
        setting = SETTINGS[library]
        try:
            import_module(library)
            self.tracker = make_tracker(config, stage, library)
            self.tracker.start()
        except ImportError:
            mend = f"{library} is missing: run `pip install {library}`, or unset it"
            raise UserError(f"{setting} is set but {mend}") from None
        except Exception as error:
            if isinstance(error, ValueError) or type(error).__name__ in REFUSED:
                mend = f"{one_line(error)} Correct it, or unset {setting}"
                raise UserError(f"{library}: {mend}") from None
            self._give_up("start", error)

    def call(self, method: str, *values: Any, **more: Any) -> None:
        """Call a method of accelerate's, unless an earlier call has failed."""
        if self.tracker is not None:
            try:
                getattr(self.tracker, method)(*values, **more)
            except Exception as error:
                self._give_up(method, error)

    def _give_up(self, method: str, error: Exception) -> None:
        self.tracker = None
        text = f"{method} failed ({one_line(error)}): the stage goes on without it"
        print(f"{self.library}: {text}", file=sys.stderr, flush=True)


def make_tracker(config: Config, stage: str, library: str) -> Any:
    """accelerate's tracker of a stage, which has not begun yet."""
    from accelerate import PartialState, tracking

    PartialState()  # accelerate's trackers log through it
    place, run = os.environ[SETTINGS[library]], f"{config.name}/seed{config.seed}/{stage}"
    if library == BOARD:
        return tracking.TensorBoardTracker(run, place)
    note = partial_of(stage_folder(config, stage)) / TRACKED
    number = read_json(note) or f"{slug(config.name)[:60]}-{stage}-{secrets.token_hex(4)}"
    write_json(note, number)
    import wandb

    # After an hour what was not sent stays on this disk, and the pipeline goes on.
    wait = {} if "WANDB_FINISH_TIMEOUT" in os.environ else {"finish_timeout": 3600.0}
    request: dict[str, Any] = {
        **{"group": config.name, "job_type": stage, "name": run, "id": number, "resume": "allow"},
        "config": {**public_settings(config), "code_version": code_version()},
        "settings": wandb.Settings(**QUIET | wait, allow_val_change=True),
    }
    return tracking.WandBTracker(place, **request)


def one_line(error: Exception) -> str:
    """An error of a library in one line; a setting that it refuses takes it several to say."""
    lines = [line.strip() for line in str(error).splitlines() if "further information" not in line]
    return " ".join(filter(None, lines))[:300] or type(error).__name__
