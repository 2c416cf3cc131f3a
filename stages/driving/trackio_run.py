"""trackio for the mirror: a local dashboard (`trackio show`) whose interface is wandb's, in part.

It needs no account. What it writes lies on this machine, unless its own TRACKIO_SPACE_ID or
TRACKIO_SERVER_URL says otherwise.
"""

import contextlib
import importlib
import io
import os
from typing import Any

from stages.driving.mirror import MISSING, TRACKIO, one_line, tags_of, warn
from stages.running.machine import code_version
from stages.settings.checks import UserError
from stages.settings.config import Config, public_settings

SETTING = "TRACKIO_PROJECT"


class TrackioRun:
    """trackio's run behind those methods of wandb's that are used here; what it prints is dropped.

    It has no axes, and no summary: results are one more step.
    """

    def __init__(self, module: Any, request: dict[str, Any]) -> None:
        self.summary, self.module = self, module
        with contextlib.redirect_stdout(io.StringIO()):
            self.run = module.init(**request)

    def define_metric(self, *_: str, **__: Any) -> None:
        """Every metric can be shown against any other."""

    def log(self, metrics: dict[str, Any]) -> None:
        """The metrics of one step."""
        self.run.log(metrics)

    update = log

    def alert(self, title: str, text: str, level: str) -> None:
        """A warning, which is its default."""
        with contextlib.redirect_stdout(io.StringIO()):
            self.run.alert(title=title, text=text)

    def finish(self, exit_code: int) -> None:
        """Write the rest; it keeps no exit status."""
        with contextlib.redirect_stdout(io.StringIO()):
            self.module.finish()  # the run's own would be called once more when the process ends


def connect(config: Config, stage: str, number: str) -> TrackioRun | None:
    """trackio's run of a seed, which it resumes by its name; None if it fails.

    Raises UserError if trackio is not installed or refuses a setting.
    """
    try:
        module = importlib.import_module(TRACKIO)
    except ImportError:
        raise UserError(MISSING.format(setting=SETTING, package=TRACKIO)) from None
    about = {"code_version": code_version(), "tags": tags_of(config, stage)}
    request = {
        "project": os.environ[SETTING],
        "name": number,
        "group": config.name,
        "config": {**public_settings(config), **about},
        "resume": "allow",
        "embed": False,
        "auto_log_gpu": False,
        "auto_log_cpu": False,
    }
    try:
        return TrackioRun(module, request)
    except ValueError as error:
        raise UserError(f"trackio: {one_line(error)}: correct it, or unset {SETTING}") from None
    except Exception as error:
        warn(f"it fails ({one_line(error)}): the stage goes on without trackio", TRACKIO)
        return None
