"""The settings of a run that judges a released policy and trains nothing. Standard library only."""

import re
from dataclasses import dataclass

from stages.settings.checks import require


@dataclass(frozen=True, kw_only=True)
class Released:
    """A checkpoint that others trained, summarised and judged as it is."""

    policy: str = ""
    """Folder or hub id[@revision] of a causal LM; empty: the run trains its own policies."""
    reward_model: str = ""
    """Folder or hub id[@revision] of the reward model that scores its summaries, in our layout or
    in that of Huang et al. 2024; empty: no scores."""

    def __post_init__(self) -> None:
        together = bool(self.policy or not self.reward_model)
        require(together, "released.reward_model", "come with released.policy (make: POLICY=)")

    @property
    def run_name(self) -> str:
        """The run's folder if none is named: `released-` and the last name of the policy."""
        last = self.policy.rstrip("/").split("/")[-1]
        return "released-" + re.sub(r"[^A-Za-z0-9._]+", "-", last).strip("-.")
