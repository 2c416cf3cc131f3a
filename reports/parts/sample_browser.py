"""The block that lets a reader search, filter and sort samples.

The samples lie in the page as data. Without JavaScript, and in Markdown, the first few stand there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reports.parts.blocks import Block, Sample
from reports.parts.page import as_data
from reports.parts.sample_rows import Row

MOST_SAMPLES = 200
MOST_BYTES = 2_500_000  # of all samples; a page stays below 5 MB
REFERENCE = "the reference"


@dataclass(frozen=True)
class SampleBrowser(Block):
    """Posts with all that was written about them, and what was said of it."""

    template = "sample_browser.html"
    style = "sample_browser.css"
    script = "sample_browser.js"
    name: str
    """Of the element on the page."""
    sides: Sequence[str]
    """Who wrote the summaries of each post, in their order."""
    posts: Sequence[Row]
    """Rows as `reports.parts.sample_rows` describes them."""
    few: Sequence[Sample]
    """What stands there where no script runs."""
    against: str = REFERENCE
    """With what each summary was compared."""
    shown: int = -1
    """The side whose verdicts and numbers are filtered and sorted at first."""

    @property
    def data(self) -> dict[str, Any]:
        """What the script reads."""
        shown = self.shown % len(self.sides)
        return {
            "sides": list(self.sides),
            "against": self.against,
            "shown": shown,
            "posts": list(self.posts),
        }

    def markdown(self, stem: str) -> str:
        """The first few."""
        return "\n\n".join(sample.markdown(stem) for sample in self.few)

    def inside(self) -> Sequence[Block]:
        """The first few."""
        return self.few

    def without_the_data(self) -> "SampleBrowser":
        """The policies' own words: no post, no reference, and no judge who may quote them."""
        return replace(
            self,
            posts=[own_words(row) for row in self.posts],
            few=[sample.without_the_data() for sample in self.few],
        )


def own_words(row: Row) -> Row:
    """A row without what others wrote."""
    sides = [side | {"said": []} for side in row["sides"]]
    return row | {"post": None, "reference": None, "sides": sides}


def fitting(rows: Iterable[Row], most: int = MOST_SAMPLES, size: int = MOST_BYTES) -> list[Row]:
    """The first rows, as many as a page holds."""
    rows_that_fit: list[Row] = []
    for row in rows:
        size -= len(as_data(row))
        if len(rows_that_fit) == most or size < 0:
            break
        rows_that_fit.append(row)
    return rows_that_fit
