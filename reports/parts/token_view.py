"""The block that shows episodes of PPO through training, each token coloured by a number of it.

The episodes lie in the page as data. Without JavaScript, and in Markdown, a table of one episode of
each update stands there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from reports.parts.blocks import Block, Table
from reports.parts.sample_rows import Row, finite

MOST_UPDATES = 12
NUMBERS = ("log_ratios", "values", "advantages", "rewards")  # what an episode has by token


@dataclass(frozen=True)
class TokenView(Block):
    """Episodes of some updates of training."""

    template = "token_view.html"
    style = "token_view.css"
    script = "token_view.js"
    name: str
    """Of the element on the page."""
    episodes: Sequence[Row]
    """Rows of samples.jsonl; those of an earlier version have no numbers by token."""
    table: Table
    """What stands there where no script runs."""

    @property
    def data(self) -> dict[str, Any]:
        """What the script reads."""
        return {"episodes": [shown(episode) for episode in self.episodes]}

    def markdown(self, stem: str) -> str:
        """The table."""
        return self.table.markdown(stem)

    def inside(self) -> Sequence[Block]:
        """The table."""
        return (self.table,)

    def holding(self, blocks: Sequence[Block]) -> "TokenView":
        """The same with another table."""
        (table,) = blocks
        assert isinstance(table, Table)
        return replace(self, table=table)

    def without_the_data(self) -> "TokenView":
        """The policy's own words, without the posts that it was asked about."""
        return replace(self, episodes=[episode | {"query": None} for episode in self.episodes])


def some_updates(rows: Sequence[Row], most: int = MOST_UPDATES) -> list[Row]:
    """The episodes of at most so many updates, evenly spread, the first and the last among them."""
    steps = sorted({row["step"] for row in rows})
    last = len(steps) - 1
    if last >= most:
        steps = [steps[round(place * last / (most - 1))] for place in range(most)]
    return [row for row in rows if row["step"] in steps]


def shown(row: Row) -> Row:
    """An episode as the page holds it, with numbers that JSON can hold."""
    kept = {key: row[key] for key in ("step", "query", "response")}
    kept |= {key: finite(row[key]) for key in ("score", "kl")}
    if "tokens" not in row:
        return kept
    columns = {key: [finite(value) for value in row[key]] for key in NUMBERS}
    return kept | {"tokens": row["tokens"]} | columns
