"""How scores, lengths and distances are spread over the held-out posts, policy by policy."""

from typing import Any

from reports import panels, plots
from reports.collect import Record, policies_of
from reports.page import Block, Figure, Heading

Row = dict[str, Any]
REFERENCE = "reference"
CAPTION = (
    "How the held-out summaries are spread: outlines are shares of the posts, dashed lines are"
    " means. What lies beyond the ends counts in the first or the last bar."
)


def blocks(record: Record) -> list[Block]:
    """The section; none where the summaries have neither scores nor tokens."""
    rows = {one: record.rows("summaries", f"{one}.jsonl") for one in policies_of(record)}
    first = next(iter(rows.values()), [])
    drawn = [
        _panel("Reward-model score", "score", rows, _numbers(first, "reference_score")),
        _panel("Length, tokens", "tokens", rows, _numbers(first, "reference_tokens")),
        _panel("KL from SFT, nats per summary", "kl", rows, []),
    ]
    shown = [panel for panel in drawn if panel is not None]
    if not shown:
        return []
    parts = [plots.alone(panel, f"spread{index}") for index, panel in enumerate(shown)]
    figure = Figure("spread", CAPTION, plots.together(shown), parts)
    return [Heading("How the summaries are spread"), figure]


def _panel(
    title: str, key: str, rows: dict[str, list[Row]], reference: list[float]
) -> plots.Panel | None:
    """A panel of the policies that have a number; None if none has."""
    groups = [(REFERENCE, plots.INK, reference)] if reference else []
    for policy, written in rows.items():
        values = _numbers(written, key)
        if values:
            color = plots.POLICY_COLORS.get(policy, plots.OTHER)
            groups.append((policy.upper(), color, values))
    of_policies = groups[1:] if reference else groups
    return panels.spread(title, groups, title) if of_policies else None


def _numbers(rows: list[Row], key: str) -> list[float]:
    return [float(row[key]) for row in rows if row.get(key) is not None]
