"""A page as a list of blocks, and the two ways to write it: Markdown and self-contained HTML.

All text is plain text. It is escaped when the page is written, so a post may contain anything. The
HTML holds its style and its plots; it loads nothing. The Markdown's plots are files beside it. A
page's bytes depend on its blocks only.
"""

import html
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.settings import config as settings
from stages.sharing import contents
from stages.system.files import write_text

STYLE = Path(__file__).with_name("style.css")
PUBLIC = contents.PUBLIC
COLUMNS = 80


@dataclass(frozen=True)
class Heading:
    """A section's title."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    lead: bool = False
    """Whether it is the paragraph that sums the page up."""


@dataclass(frozen=True)
class Note:
    """A caveat that nobody should miss."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; columns of numbers are set flush right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    strong: bool = False
    """Whether it is the page's main table."""


@dataclass(frozen=True)
class Figure:
    """Plots: one drawing for the Markdown page, one per panel for HTML, where they flow."""

    name: str
    caption: str
    whole: str
    parts: Sequence[str]


@dataclass(frozen=True)
class Sample:
    """One post with the summaries of it."""

    title: str
    post: str
    summaries: Sequence[tuple[str, str, str]]
    """Who wrote it, the summary, what was said of it."""


@dataclass(frozen=True)
class Details:
    """What only some readers unfold."""

    summary: str
    blocks: Sequence["Block"]


Block = Heading | Text | Note | Table | Figure | Sample | Details
NUMERIC = re.compile(r"[-+[]?[\d.]|[-–]$")
PLOT = re.compile(r"^!\[Plot: (?P<name>[\w-]+)\]\(", re.MULTILINE)  # no escaped text looks so


def write(folder: Path, stem: str, title: str, blocks: Sequence[Block]) -> Path:
    """Write the page's files to a folder, each whole or not at all; returns the HTML's path.

    All files of a page that it replaces are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = files_of(folder, stem)
    for figure in (block for block in blocks if isinstance(block, Figure)):
        write_text(folder / f"{stem}-{figure.name}.svg", figure.whole)
    write_text(folder / f"{stem}.md", to_markdown(stem, title, blocks))
    path = folder / f"{stem}.html"
    write_text(path, to_html(title, blocks))
    for old in set(before) - set(files_of(folder, stem)):
        old.unlink()
    return path


def files_of(folder: Path, stem: str) -> list[Path]:
    """The files of a page in a folder: Markdown, HTML, and the plots that the Markdown shows."""
    markdown = folder / f"{stem}.md"
    if not markdown.exists():
        return []
    plots = PLOT.findall(markdown.read_text(encoding="utf-8"))
    names = [f"{stem}.md", f"{stem}.html", *(f"{stem}-{plot}.svg" for plot in plots)]
    return [folder / name for name in names if (folder / name).exists()]


def for_terminal(texts: Sequence[str], path: Path) -> str:
    """Sentences in lines of at most 80 columns, then the page's path."""
    lines = [line for text in texts for line in wrapped(text)]
    return "\n".join([*lines, "report:", f"{path}"])


def wrapped(text: str, mark: str = "") -> list[str]:
    """A text in lines of at most 80 columns; `mark` stands before the first."""
    indent = " " * len(mark)
    return textwrap.wrap(
        text, COLUMNS, initial_indent=mark, subsequent_indent=indent, break_on_hyphens=False
    )


def beside_the_runs() -> Path:
    """Where pages about several runs are written."""
    return settings.RUNS / "reports"


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """The page as one HTML file that needs nothing else."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n"
        f"<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{html.escape(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{html.escape(text)}</h2>"
        case Text(text, lead):
            mark = ' class="lead"' if lead else ""
            return f"<p{mark}>{html.escape(text)}</p>"
        case Note(text):
            return f'<p class="note">{html.escape(text)}</p>'
        case Table():
            return _html_table(block)
        case Figure(name, caption, _, parts):
            drawn = "\n".join(f'<div class="panel">{part}</div>' for part in parts)
            label = html.escape(caption)
            return (
                f'<figure id="{name}"><div class="panels n{min(len(parts), 3)}">{drawn}</div>\n'
                f"<figcaption>{label}</figcaption></figure>"
            )
        case Sample():
            return _html_sample(block)
        case Details(summary, inner):
            inside = "\n".join(_html(one) for one in inner)
            return f"<details><summary>{html.escape(summary)}</summary>\n{inside}\n</details>"


def _html_table(block: Table) -> str:
    numeric = _numeric_columns(block)

    def line(tag: str, cells: Sequence[str]) -> str:
        marks = (' class="number"' if right else "" for right in numeric)
        parts = (f"<{tag}{m}>{html.escape(c)}</{tag}>" for m, c in zip(marks, cells, strict=True))
        return f"<tr>{''.join(parts)}</tr>"

    caption = f'<p class="caption">{html.escape(block.caption)}</p>\n' if block.caption else ""
    rows = "\n".join(line("td", cells) for cells in block.rows)
    kind = " strong" if block.strong else ""
    return (
        f'<div class="table{kind}">{caption}<table><thead>{line("th", block.header)}</thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _html_sample(block: Sample) -> str:
    cards = "\n".join(
        f'<div class="summary {who.lower()}"><h4>{html.escape(who)}</h4>'
        f"<p>{html.escape(text)}</p><footer>{html.escape(facts)}</footer></div>"
        for who, text, facts in block.summaries
    )
    return (
        f'<article class="sample"><h3>{html.escape(block.title)}</h3>\n'
        f'<div class="post" tabindex="0">{html.escape(block.post)}</div>\n'
        f'<div class="summaries">\n{cards}\n</div></article>'
    )


def _numeric_columns(block: Table) -> list[bool]:
    """Which columns hold numbers only (a dash is a number that is not there)."""
    columns = list(zip(*block.rows, strict=True)) or [()] * len(block.header)
    return [
        index > 0 and bool(cells) and all(NUMERIC.match(cell) for cell in cells)
        for index, cells in enumerate(columns)
    ]


def to_markdown(stem: str, title: str, blocks: Sequence[Block]) -> str:
    """The page as Markdown; its plots are the files `<stem>-<figure>.svg` beside it."""
    parts = [f"# {escape(title)}", *(_markdown(stem, block) for block in blocks)]
    return "\n\n".join(parts) + "\n"


def _markdown(stem: str, block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {escape(text)}"
        case Text(text):
            return escape(text)
        case Note(text):
            return f"> **Note.** {escape(text)}"
        case Table():
            return _markdown_table(block)
        case Figure(name, caption):
            return f"![Plot: {name}]({stem}-{name}.svg)\n\n*{escape(caption)}*"
        case Sample(title, post, summaries):
            table = Table(("", "summary", "what was said of it"), summaries)
            quote = "\n".join(f"> {line}".rstrip() for line in escape(post).split("\n"))
            hard = quote.replace("\n> ", "  \n> ")
            return f"### {escape(title)}\n\n{hard}\n\n{_markdown_table(table)}"
        case Details(summary, inner):
            inside = "\n\n".join(_markdown(stem, one) for one in inner)
            label = html.escape(summary, quote=False)
            return f"<details><summary>{label}</summary>\n\n{inside}\n\n</details>"


def _markdown_table(block: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        flat = (escape(" ".join(cell.split())) for cell in cells)
        return f"| {' | '.join(flat)} |"

    rule = "|".join("---:" if right else "---" for right in _numeric_columns(block))
    caption = f"*{escape(block.caption)}*\n\n" if block.caption else ""
    return caption + "\n".join((line(block.header), f"|{rule}|", *map(line, block.rows)))


def escape(text: str) -> str:
    """Plain text as Markdown that shows it: no markup, no HTML, no table or list by accident."""
    text = re.sub(r"(?m)^[ \t]+", "", html.escape(text, quote=False))
    text = re.sub(r"([\\`*|~])", r"\\\1", text)
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
    text = re.sub(r"\](?=[(\[:])", r"\\]", text)
    text = re.sub(r"(?m)^([#+=-])(?=[#+=\s-]|$)", r"\\\1", text)
    return re.sub(r"(?m)^(\d+)([.)])(?=\s|$)", r"\1\\\2", text)
