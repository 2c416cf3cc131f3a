"""A row of numbers for each seed, and the seeds of each size."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from reports.collect import Record, policies_of, table

POLICIES = ("sft", "ppo", "dpo")  # in the order in which they are shown


def frame_of(records: Sequence[Record]) -> pd.DataFrame:
    """`reports.collect.table`, and what only this page compares, one row a seed.

    Raises UserError for a run of what others made.
    """
    frame = table(list(records))
    extra = pd.DataFrame([_more(record) for record in records], index=frame.index)
    return frame.join(extra.astype(float))


def _more(record: Record) -> dict[str, Any]:
    written = record.results("summaries")["policies"]
    judged = record.results("win_rate")
    gains = judged.get("scores", {}).get("gains", {}).get("ppo", {})
    found: dict[str, Any] = {"sft_loss": record.results("sft")["loss/validation"]}
    for policy in policies_of(record):
        found[f"{policy}/copied"] = written[policy].get("copied_title_words")
        at_length = judged["policies"][policy]["statistics"]["length_controlled"]
        for end in ("low", "high"):
            found[f"{policy}/controlled_{end}"] = at_length[end]
        found[f"{policy}/extrapolated"] = at_length.get("extrapolated", False)
    for scorer in ("proxy", "gold"):
        for key in ("estimate", "low", "high"):
            found[f"{scorer}_gain/{key}"] = (gains.get(scorer) or {}).get(key)
    return found


def sizes(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The runs and their seeds, from the smallest model to the largest."""
    groups = [(str(name), seeds) for name, seeds in frame.groupby("name", sort=False)]
    return sorted(groups, key=lambda group: float(group[1]["parameters"].iloc[0]))


def policies(frame: pd.DataFrame) -> list[str]:
    """The policies that any seed has, in the order in which they are shown."""
    there = {one for found in frame["policies"] for one in found}
    return [one for one in POLICIES if one in there] + sorted(there - set(POLICIES))


def given(seeds: pd.DataFrame, key: str) -> list[float]:
    """The numbers of the seeds that have one, in the order of the seeds."""
    if key not in seeds:
        return []
    return [float(one) for one in seeds.sort_values("seed")[key] if one is not None and one == one]
