"""Summaries that exist already, as the stage `summaries` of such a run reads them."""

from eval.judges.protocol import Row
from eval.outputs import of_systems, read_rows
from stages.settings.config import Outputs


def systems_of(outputs: Outputs) -> dict[str, list[Row]]:
    """The rows of each system, in the files' order."""
    return of_systems(*read_rows(outputs), outputs)
