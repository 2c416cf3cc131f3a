"""One update of PPO or RLOO at one shape, as SHAPES names it: `pythia-14m:32:8`."""

import re
from dataclasses import dataclass

import torch

from stages.config.command_line import Request, config_of
from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.presets import PRESETS, preset_config

CASE = re.compile(r"([^:]+):([1-9]\d*):([1-9]\d*)(?::(rloo))?")
NO_POSTS = "."  # queries are random, so no file of the folder is read


@dataclass(frozen=True, kw_only=True)
class Case:
    """One update of an algorithm: the shape of a preset's model, and batch sizes."""

    preset: str
    batch: int
    """Episodes of the update."""
    microbatch: int
    """Sequences of a forward and backward pass."""
    algorithm: str = "ppo"
    overrides: tuple[str, ...] = ()
    """Other settings, as SET takes them."""

    @property
    def name(self) -> str:
        """The case as SHAPES names it."""
        shape = f"{self.preset}:{self.batch}:{self.microbatch}"
        return shape if self.algorithm == "ppo" else f"{shape}:{self.algorithm}"

    @property
    def title(self) -> str:
        """The case as a page names it."""
        return f"{self.algorithm.upper()}, {self.preset}"

    def make_config(self) -> Config:
        """Return the settings of the update. Raises UserError as `config_of` does."""
        fixed = {
            f"{self.algorithm}.batch_size": self.batch,
            "ppo.samples_per_query": 1,
            "ppo.critic_updates": 0,
            "memory.microbatch_size": self.microbatch,
            "memory.forward_batch_size": self.batch,
            "memory.mixed_precision": "bf16" if torch.cuda.is_available() else "no",
            "lora.rank": 0,  # TRL trains all weights
        }
        overrides = [f"{key}={value}" for key, value in fixed.items()]
        overrides += self.overrides
        needs_posts = self.preset in PRESETS and not preset_config(self.preset).data.source
        request = Request(
            preset=self.preset,
            name="one-update",  # no run has this folder
            data=NO_POSTS if needs_posts else "",
            overrides=tuple(overrides),
        )
        return config_of(request)


def parse_case(text: str, overrides: tuple[str, ...] = ()) -> Case:
    """Return the case that SHAPES names. Raises UserError for a text that names none."""
    parts = CASE.fullmatch(text)
    if parts is None:
        raise UserError(
            f"SHAPES={text}: give preset:batch:microbatch, such as pythia-14m:32:8;"
            " add :rloo to measure RLOO"
        )
    case = Case(
        preset=parts[1],
        batch=int(parts[2]),
        microbatch=int(parts[3]),
        algorithm=parts[4] or "ppo",
        overrides=overrides,
    )
    if case.batch % case.microbatch:
        raise UserError(f"SHAPES={text}: the batch must be divisible by the microbatch")
    return case
