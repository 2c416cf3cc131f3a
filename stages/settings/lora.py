"""The settings of adapters. Standard library only."""

from dataclasses import dataclass

from stages.settings.checks import Section, require
from stages.settings.stages import LORA_STAGES


@dataclass(frozen=True, kw_only=True)
class Lora(Section):
    """Adapters of all linear layers, which learn in their place, and are merged when saved.

    Off by default, as in Huang et al. 2024.
    """

    rank: int = 0
    """Width of an adapter; 0: no adapters, all weights learn."""
    alpha: int = 32
    """An adapter's product is scaled by alpha / rank."""
    stages: str = ",".join(LORA_STAGES)
    """The stages that learn adapters, separated by commas."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = set(self.stages.split(",")) <= set(LORA_STAGES)
        require(known, "lora.stages", f"be some of {','.join(LORA_STAGES)}")

    @property
    def adapted_stages(self) -> tuple[str, ...]:
        """The stages that learn adapters; none if the rank is 0."""
        return tuple(self.stages.split(",")) if self.rank else ()
