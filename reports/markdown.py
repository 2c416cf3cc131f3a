"""Plain text as Markdown that shows it, and tables in it."""

import html
import re
from collections.abc import Sequence


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
    inside = escape(label).replace("[", r"\[").replace("]", r"\]")
    return f"[{inside}]({target})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """A table; `right` says which columns are set flush right."""

    def line(cells: Sequence[str]) -> str:
        flat = (escape(" ".join(cell.split())) for cell in cells)
        return f"| {' | '.join(flat)} |"

    rule = "|".join("---:" if flush else "---" for flush in right)
    return "\n".join((line(header), f"|{rule}|", *map(line, rows)))
