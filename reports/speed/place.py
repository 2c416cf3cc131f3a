"""What every measurement of ours needs."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from eval.rates.formulas import clustered_logit, wilson
from reports.needs.lengths import lengths_of
from reports.needs.memory import Setting
from reports.needs.shapes import shape_of
from reports.speed.meter import Meter
from stages.learning.loop import make_accelerator
from stages.posts.ragged import TokenizedSplit, load_split
from stages.settings.config import Config


@dataclass(frozen=True, kw_only=True)
class Place:
    """What every measurement needs: settings, device, meter and the prepared folder."""

    config: Config
    folder: Path
    accelerator: Accelerator
    meter: Meter
    setting: Setting

    @property
    def weights(self) -> Path:
        """The folder of the policy that everything starts from."""
        return self.folder / "model"

    @property
    def scorer(self) -> Path:
        """The folder of the reward model."""
        return self.folder / "reward_model"

    def split(self, name: str) -> TokenizedSplit:
        """A split of the bench's texts."""
        return load_split(self.folder / "base" / "data", name)


def make_place(config: Config, folder: Path) -> Place:
    """The place of this process. Weights are not loaded yet: memory is counted from here."""
    accelerator = make_accelerator(config)
    load_statistics()
    setting = Setting(
        config=config,
        shape=shape_of(config.base),
        lengths=lengths_of(config),
        on_gpu=accelerator.device.type == "cuda",
    )
    meter = Meter(torch.device(accelerator.device))
    return Place(
        config=config, folder=folder, accelerator=accelerator, meter=meter, setting=setting
    )


def load_statistics() -> None:
    """Have a stage's libraries of statistics in memory, so that they are not counted as tensors.

    A peer has no such stage, and none of these libraries.
    """
    wilson(1, 2)
    clustered_logit(np.array([1.0, 0.0, 1.0, 0.0]), np.ones((4, 1)), np.arange(4))
