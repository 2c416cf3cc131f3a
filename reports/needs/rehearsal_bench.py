"""What every part of a rehearsal needs: settings, device, meter, folders, and what it finds."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from eval.rates.formulas import clustered_logit, wilson
from reports.needs.lengths import lengths_of
from reports.needs.memory import Setting
from reports.needs.meter import Meter
from reports.needs.shapes import shape_of
from reports.needs.texts import read_texts
from reports.needs.work import forward_flops
from stages.learning.batches import Order
from stages.learning.loop import make_accelerator
from stages.learning.state import State
from stages.posts.ragged import TokenizedSplit
from stages.runs import Run
from stages.settings.config import Config

PARTS_TIMED = 3
"""Microbatches of a timed step, spread over short and long rows."""


class RehearsalRun(Run):
    """A stage's run whose folders lie in the rehearsal's own, and whose inputs need no manifest."""

    def __init__(self, config: Config, stage: str, folder: Path) -> None:
        super().__init__(config, stage)
        self.root = folder
        self.folder = folder / "stages" / stage
        self.partial = folder / "stages" / f"{stage}.partial"
        self.resume = self.partial / "resume"
        self.partial.mkdir(parents=True, exist_ok=True)

    def require(self, stage: str) -> Path:
        """The folder of an earlier stage of the rehearsal."""
        return self.root / stage


@dataclass(kw_only=True)
class Bench:
    """One part's process; `found` collects what is measured, by the part's name."""

    config: Config
    folder: Path
    accelerator: Accelerator
    meter: Meter
    setting: Setting
    ids: Any
    """`eos_token_id` and `pad_token_id`, as a tokenizer has them."""
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def weights(self) -> Path:
        """The folder of the policy that every stage starts from."""
        return self.folder / "sft" / "model"

    def split(self, name: str) -> TokenizedSplit:
        """A split of the rehearsal's texts."""
        return read_texts(self.folder / "base", name)

    def note(self, part: str, **measured: Any) -> None:
        """Keep what was measured of a part: bytes, seconds, tokens, operations."""
        self.found[part] = {**self.found.get(part, {}), **measured}

    def flops(self, lengths: list[int], logits: float) -> float:
        """Operations of a forward pass over sequences, each with `logits` positions."""
        mean = sum(lengths) / len(lengths)
        return forward_flops(self.setting, sum(lengths), mean, logits * len(lengths))

    def state(self, run: Run, network: Any, optimizer: Any, rows: int, batch_size: int) -> State:
        """A training loop about to take its first update."""
        order = Order(rows=rows, batch_size=batch_size, seed=self.config.seed, purpose="rehearsal")
        return State(
            run=run,
            accelerator=self.accelerator,
            trained=network,
            optimizer=optimizer,
            updates=10,
            order=order,
            kl_coef=self.config.ppo.kl_coef,
        )


def load_statistics() -> None:
    """Have a stage's libraries of statistics in memory, so that they are not counted as tensors.

    A peer has no such stage, and none of these libraries.
    """
    wilson(1, 2)
    clustered_logit(np.array([1.0, 0.0, 1.0, 0.0]), np.ones((4, 1)), np.arange(4))


def make_bench(config: Config, folder: Path) -> Bench:
    """The bench of this process. Weights are not loaded yet: memory is counted from here."""
    accelerator = make_accelerator(config)
    load_statistics()
    ids = json.loads((folder / "base/ids.json").read_text(encoding="utf-8"))
    tokens = SimpleNamespace(eos_token_id=ids["eos"], pad_token_id=ids["pad"])
    on_gpu = accelerator.device.type == "cuda"
    setting = Setting(
        config=config, shape=shape_of(config.base), lengths=lengths_of(config), on_gpu=on_gpu
    )
    return Bench(
        config=config,
        folder=folder,
        accelerator=accelerator,
        meter=Meter(torch.device(accelerator.device)),
        setting=setting,
        ids=tokens,
    )
