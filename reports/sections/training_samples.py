"""Episodes of PPO through training, with what the update learned from each token."""

from collections.abc import Sequence

from reports.collect import Record
from reports.page import Block, Heading, Table, Text
from reports.sample_rows import Row
from reports.token_view import TokenView, some_updates
from reports.verdict import number

CAPTION = "The first logged response of each update, to another post each time."
ABOUT = (
    "What PPO sampled while it learned: of some updates the episodes that were logged, spread over"
    " the lengths of the posts."
)
BY_TOKEN = (
    " Each token can be coloured by its log-ratio to the reference policy, the advantage that the"
    " update learned from, the critic's value of the text before it, and its reward: the penalty"
    " for KL, and after the end the score. Tab reaches an episode, the arrow keys its tokens."
)


def blocks(record: Record) -> list[Block]:
    """The section; none for a run that logged no episodes."""
    rows = some_updates(record.rows("ppo", "samples.jsonl"))
    if not rows:
        return []
    about = ABOUT + (BY_TOKEN if any("tokens" in row for row in rows) else "")
    return [
        Heading("Samples through training"),
        Text(about),
        TokenView("episodes-of-ppo", rows, table(rows)),
    ]


def table(rows: Sequence[Row]) -> Table:
    """One episode of each update."""
    firsts: dict[int, Row] = {}
    for row in rows:
        firsts.setdefault(row["step"], row)
    cells = [
        [str(step), row["response"].strip(), number(row["score"]), number(row["kl"], 1)]
        for step, row in firsts.items()
    ]
    return Table(["update", "response", "score", "KL, nats"], cells, CAPTION)
