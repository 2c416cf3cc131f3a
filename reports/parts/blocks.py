"""What a page is made of: kinds of blocks, each with its HTML template and its own Markdown.

All text is plain text. It is escaped when the page is written, so a post may contain anything.

A kind of block names a template below `templates`, which sees it as `block`, and says itself what
Markdown shows.

For programs all tables are written as one JSON: numbers in full precision (`reports.parts.cells`).
"""

import base64
import html
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from reports.parts.cells import columns_of, is_numeric

NOT_OURS = "The post and its reference are others' words: they stand on the run's own page alone."


@dataclass(frozen=True)
class Block(ABC):
    """A part of a page."""

    template: ClassVar[str]
    """File below reports/parts/templates."""

    @abstractmethod
    def markdown(self, stem: str) -> str:
        """The block in Markdown; nothing if Markdown cannot show it. `stem` names the page."""

    def inside(self) -> Sequence["Block"]:
        """The blocks that it holds."""
        return ()

    def without_the_data(self) -> "Block":
        """The block as it may be published: without posts and references, which others wrote."""
        return self


@dataclass(frozen=True)
class Heading(Block):
    """A section's title."""

    template = "heading.html"
    text: str

    @property
    def anchor(self) -> str:
        """What a link to it names: the anchor that GitHub gives it in Markdown."""
        return slug(self.text)

    def markdown(self, stem: str) -> str:
        """A heading of the second level."""
        return f"## {escape(self.text)}"


@dataclass(frozen=True)
class Text(Block):
    """A paragraph."""

    template = "text.html"
    text: str
    lead: bool = False
    """Whether it is the paragraph that sums the page up."""

    def markdown(self, stem: str) -> str:
        """A paragraph."""
        return escape(self.text)


@dataclass(frozen=True)
class Note(Block):
    """A caveat that nobody should miss."""

    template = "note.html"
    text: str

    def markdown(self, stem: str) -> str:
        """A quotation that says that it is a note."""
        return f"> **Note.** {escape(self.text)}"


@dataclass(frozen=True)
class Caveats(Block):
    """What to hold against a page's numbers, one under the other."""

    template = "caveats.html"
    texts: Sequence[str]

    def markdown(self, stem: str) -> str:
        """A list."""
        return "\n".join(f"- {' '.join(escape(text).split())}" for text in self.texts)


@dataclass(frozen=True)
class Table(Block):
    """Rows of cells under a header; columns of numbers are set flush right."""

    template = "table.html"
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    """Each cell is a `Number` of `reports.parts.cells`, or a text."""
    caption: str = ""
    strong: bool = False
    """Whether it is the page's main table."""
    name: str = ""
    """What the page's JSON calls it; the page finds one if there is none."""

    @property
    def texts(self) -> list[list[str]]:
        """The cells as the page shows them."""
        return [[str(cell) for cell in row] for row in self.rows]

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers only; the first names the rows."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.header)
        return [index > 0 and is_numeric(cells) for index, cells in enumerate(columns)]

    def markdown(self, stem: str) -> str:
        """The caption and the table."""
        drawn = table(self.header, self.rows, self.numeric)
        return f"*{escape(self.caption)}*\n\n{drawn}" if self.caption else drawn


@dataclass(frozen=True)
class Figure(Block):
    """Plots: a file beside the Markdown page, and a part of the HTML."""

    template = "figure.html"
    name: str
    caption: str
    svg: str
    about: str = ""
    """What it shows, for who cannot see it."""

    @property
    def source(self) -> str:
        """The drawing as an address that holds it."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}"

    def markdown(self, stem: str) -> str:
        """The picture beside the page, and its caption."""
        return f"![Plot: {self.name}]({stem}-{self.name}.svg)\n\n*{escape(self.caption)}*"


@dataclass(frozen=True)
class Quoted(Block):
    """A text word for word, with its lines, such as the question to a judge."""

    template = "quoted.html"
    title: str
    text: str

    def markdown(self, stem: str) -> str:
        """A quotation."""
        return quote(self.text)


@dataclass(frozen=True)
class Sample(Block):
    """One post with the summaries of it; the first is the reference."""

    template = "sample.html"
    title: str
    post: str
    summaries: Sequence[tuple[str, str, str]]
    """Who wrote it, the summary, what was said of it."""

    def markdown(self, stem: str) -> str:
        """The post as a quotation and the summaries as a table."""
        header = ("", "summary", "what was said of it")
        drawn = table(header, self.summaries, [False] * 3)
        return f"### {escape(self.title)}\n\n{quote(self.post)}\n\n{drawn}"

    def without_the_data(self) -> "Sample":
        """The summaries of the policies alone."""
        _, *by_policies = self.summaries
        return Sample(self.title, NOT_OURS, by_policies)


@dataclass(frozen=True)
class Details(Block):
    """What only some readers unfold."""

    template = "details.html"
    summary: str
    blocks: Sequence[Block]

    def markdown(self, stem: str) -> str:
        """The same element, which Markdown knows."""
        inner = "\n\n".join(block.markdown(stem) for block in self.blocks)
        label = html.escape(" ".join(self.summary.split()), quote=False)
        return f"<details><summary>{label}</summary>\n\n{inner}\n\n</details>"

    def inside(self) -> Sequence[Block]:
        """The blocks that are unfolded."""
        return self.blocks

    def without_the_data(self) -> "Details":
        """All of it, each block as it may be published."""
        return replace(self, blocks=[block.without_the_data() for block in self.blocks])


def escape(text: str) -> str:
    """Plain text as Markdown that shows it: no markup, no HTML, no table or list by accident."""
    text = re.sub(r"(?m)^[ \t]+", "", html.escape(text, quote=False))
    text = re.sub(r"([\\`*|~])", r"\\\1", text)
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
    text = re.sub(r"\](?=[(\[:])", r"\\]", text)
    text = re.sub(r"(?m)^([#+=-])(?=[#+=\s-]|$)", r"\\\1", text)
    return re.sub(r"(?m)^(\d+)([.)])(?=\s|$)", r"\1\\\2", text)


def quote(text: str) -> str:
    """A text as a quotation that keeps its lines."""
    lines = "\n".join(f"> {line}".rstrip() for line in escape(text).split("\n"))
    return lines.replace("\n> ", "  \n> ")


def link(label: str, target: str) -> str:
    """A link to a heading of the page or to a file beside it."""
    inside = re.sub(r"(?<!\\)((?:\\\\)*)([\[\]])", r"\1\\\2", escape(label))
    return f"[{inside}]({target})"


def table(header: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[bool]) -> str:
    """A table; `right` says which columns are set flush right."""

    def line(cells: Sequence[object]) -> str:
        flat = (escape(" ".join(str(cell).split())) for cell in cells)
        return f"| {' | '.join(flat)} |"

    rule = "|".join("---:" if flush else "---" for flush in right)
    return "\n".join((line(header), f"|{rule}|", *map(line, rows)))


def slug(text: str) -> str:
    """A text as an anchor, by GitHub's rule."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def as_record(table: Table, name: str, section: str) -> dict[str, Any]:
    """The table as JSON holds it; `section` is the heading that it stands under."""
    columns = columns_of(table.header, table.rows)
    rows = [list(row) for row in zip(*(values for _, values in columns), strict=True)]
    about = {"name": name, "section": section, "caption": table.caption}
    return about | {"columns": [title for title, _ in columns], "rows": rows}
