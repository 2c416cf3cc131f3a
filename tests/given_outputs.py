"""Summaries that exist already, as the stage `summaries` of such a run reads them."""

from eval import outputs
from eval.judges.protocol import Row
from stages.settings.config import Outputs


def systems_of(settings: Outputs) -> dict[str, list[Row]]:
    """The rows of each system, in the files' order."""
    return outputs.read_systems(outputs.read_table(settings), settings, 0)
