"""What the published data are known to hold: how many rows, and which odd ones are kept.

Source of the counts: Huang et al. 2024, details 1 and 10, and the pages of the data sets.
Standard library only.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stages.posts.readers import Located, is_cnndm
from stages.settings.sections import COMPARISONS, HUB, POSTS, Data

# Data set, without its configuration and revision -> split -> rows. The test split of the posts
# (6,553 rows) is read by no stage.
KNOWN_ROWS = {
    "vwxyzjn/summarize_from_feedback_tldr_3_filtered": {
        "sft_train": 116_722,
        "sft_validation": 6_447,
    },
    "openai/summarize_from_feedback": {
        "comparisons_train": 92_858,
        "comparisons_validation": 86_086,
        "comparisons_validation, TL;DR": 83_802,
        "comparisons_validation, CNN/DM": 2_284,
    },
}


def known_rows(data: Data) -> dict[str, int]:
    """The known number of rows by split; empty unless published data sets are read from the hub."""
    known: dict[str, int] = {}
    if data.source == HUB:
        for source in (data.sft_dataset, data.comparisons_dataset):
            known |= KNOWN_ROWS.get(source.partition("@")[0].partition(":")[0], {})
    return known


def beside_known(data: Data, located: Mapping[str, Sequence[Located]]) -> dict[str, Any]:
    """For each split whose number of rows is known: `rows` read and `known`."""
    rows = {split: len(located[split]) for split in (*POSTS, *COMPARISONS)}
    held_out = COMPARISONS[1]
    articles = sum(is_cnndm(row) for _, row in located[held_out])
    rows[f"{held_out}, TL;DR"] = rows[held_out] - articles
    rows[f"{held_out}, CNN/DM"] = articles
    return {
        split: {"rows": rows[split], "known": count} for split, count in known_rows(data).items()
    }


def differences(counts: Mapping[str, Mapping[str, int]]) -> str:
    """One line about splits whose rows are not as many as known; empty if there is none."""
    odd = [
        f"{split} has {rows['rows']:,} rows, known are {rows['known']:,}"
        for split, rows in counts.items()
        if rows["rows"] != rows["known"]
    ]
    return f"the published data have changed, or were cut short: {'; '.join(odd)}" if odd else ""


def kept_odd_rows(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many comparisons are odd and kept, by kind.

    `empty_summaries`: a policy wrote nothing. `equal_summaries`: both are the same text.
    `without_confidence`: in no group by strength. `against_choice`: the labeller's confidence is on
    the side that was not chosen; never so in the 1,771 published rows that we could read.
    """
    odd = Counter(empty_summaries=0, equal_summaries=0, without_confidence=0, against_choice=0)
    for row in rows:
        first, second = (summary["text"].strip() for summary in row["summaries"])
        confidence = (row.get("extra") or {}).get("confidence")
        odd["empty_summaries"] += not (first and second)
        odd["equal_summaries"] += first == second
        odd["without_confidence"] += confidence is None
        if confidence not in (None, 5):
            odd["against_choice"] += (confidence > 5) != (row["choice"] == 1)
    return dict(odd)
