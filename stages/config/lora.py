"""The settings of adapters."""

from pydantic import Field, model_validator
from typing_extensions import Self

from stages.config.section import Section
from stages.config.stages import LORA_STAGES

ALL_LINEAR = "all-linear"


class Lora(Section):
    """LoRA adapters, which are trained in place of linear layers and merged when a model is saved.

    Off by default, as in Huang et al. 2024.
    """

    rank: int = Field(default=0, ge=0, le=1_000_000)
    """Rank of the adapters. 0: no adapters, all weights are trained."""
    alpha: int = Field(default=32, gt=0, le=1_000_000)
    """An adapter's output is scaled by alpha / rank."""
    target_modules: str = ALL_LINEAR
    """Layers that get adapters: `all-linear`, or names of linear layers separated by commas. A name
    may be the end of a longer one: `dense` matches `layers.0.attention.dense` too."""
    stages: str = ",".join(LORA_STAGES)
    """Stages that train adapters, separated by commas."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if not all(self.target_names):
            raise ValueError(
                f"lora.target_modules must be {ALL_LINEAR}, or names of layers separated by commas"
            )
        if not set(self.stages.split(",")) <= set(LORA_STAGES):
            raise ValueError(f"lora.stages must be some of {','.join(LORA_STAGES)}")
        return self

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names in `target_modules`."""
        return tuple(name.strip() for name in self.target_modules.split(","))

    @property
    def adapted_stages(self) -> tuple[str, ...]:
        """The stages that train adapters; none if the rank is 0."""
        return tuple(self.stages.split(",")) if self.rank else ()
