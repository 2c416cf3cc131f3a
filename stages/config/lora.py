"""The settings of adapters. Standard library only."""

from dataclasses import dataclass

from stages.config.checks import Section, require
from stages.config.stages import LORA_STAGES

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class Lora(Section):
    """Adapters (LoRA): they learn instead of linear layers, and are merged into them when saved.

    Off by default, as in Huang et al. 2024.
    """

    rank: int = 0
    """Width of an adapter; 0: no adapters, all weights learn."""
    alpha: int = 32
    """An adapter's product is scaled by alpha / rank."""
    target_modules: str = ALL_LINEAR
    """The layers that get adapters: `all-linear`, or names of linear layers separated by commas. A
    name may be the end of a longer one: `dense` stands for `layers.0.attention.dense` too."""
    stages: str = ",".join(LORA_STAGES)
    """The stages that learn adapters, separated by commas."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            all(self.target_names),
            "lora.target_modules",
            f"be {ALL_LINEAR}, or names of layers separated by commas",
        )
        known = set(self.stages.split(",")) <= set(LORA_STAGES)
        require(known, "lora.stages", f"be some of {','.join(LORA_STAGES)}")

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names in `target_modules`."""
        return tuple(name.strip() for name in self.target_modules.split(","))

    @property
    def adapted_stages(self) -> tuple[str, ...]:
        """The stages that learn adapters; none if the rank is 0."""
        return tuple(self.stages.split(",")) if self.rank else ()
