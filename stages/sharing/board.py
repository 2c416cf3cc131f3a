"""TensorBoard's event files, where TENSORBOARD_LOGGING_DIR asks for them.

The variable is the one of transformers' own trainer. Standard library at the top.
"""

import os
from pathlib import Path
from typing import Any

from stages.settings.config import Config, UserError

DIRECTORY = "TENSORBOARD_LOGGING_DIR"
MISSING = (
    f"{DIRECTORY} is set but tensorboard is missing: run `pip install tensorboard`, or unset it"
)


class Board:
    """The scalars of one stage."""

    def __init__(self, folder: Path) -> None:
        """Nothing is written before the first step. Raises ImportError without tensorboard."""
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.open = folder, SummaryWriter
        self.writer: Any = None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics of one step; an earlier try's metrics from this step on are not shown."""
        if self.writer is None:
            self.writer = self.open(str(self.folder), purge_step=step)
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Write what is left."""
        if self.writer is not None:
            self.writer.close()


def open_board(config: Config, stage: str) -> Board | None:
    """Where the scalars of a stage go, if they are asked for.

    Raises UserError if the package is missing.
    """
    asked = os.environ.get(DIRECTORY)
    if not asked:
        return None
    try:
        return Board(Path(asked) / config.name / f"seed{config.seed}" / stage)
    except ImportError:
        raise UserError(MISSING) from None
