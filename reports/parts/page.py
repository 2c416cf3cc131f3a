"""A page as a list of blocks, and the two ways to write it: Markdown and self-contained HTML.

The HTML holds its style and its plots; it loads nothing, and its own policy lets no script run.
What stands before the first heading is in sight; each heading's section is folded. The Markdown's
plots are files beside it. `<page>.json` holds the page's first paragraph, the numbers of all
tables, the hashes of the other files, and what the page was made from. A page's bytes depend on
these only.
"""

import argparse
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from reports.parts.blocks import Block, Figure, Heading, Table, Text, as_record, escape, slug
from stages.config import config as settings
from stages.config.checks import UserError
from stages.config.faults import Parser, in_one_line
from stages.runs.files import file_hash, read_record, write_json, write_text

TEMPLATES = Path(__file__).with_name("templates")
STYLE = Path(__file__).with_name("style.css")
COLUMNS = 80
PUBLIC = "public"  # folder of a page about real data without the texts of others
PLOT = re.compile(r"^!\[Plot: (?P<name>[\w-]+)\]\(", re.MULTILINE)  # no escaped text looks so


def write(
    folder: Path, stem: str, title: str, blocks: Sequence[Block], made_from: Mapping[str, Any]
) -> Path:
    """Write the page's files to a folder, each whole or not at all; returns the HTML's path.

    `made_from` stands in its JSON (`run_report.made_from`). All files of a page that it replaces
    are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in files_of(folder, stem):
        old.unlink()
    for figure in (block for block in _all(blocks) if isinstance(block, Figure)):
        write_text(folder / f"{stem}-{figure.name}.svg", figure.svg)
    write_text(folder / f"{stem}.md", to_markdown(stem, title, blocks))
    path = folder / f"{stem}.html"
    write_text(path, to_html(title, blocks))
    record = {
        "title": title,
        "lead": next((block.text for block in _all(blocks) if isinstance(block, Text)), ""),
        "tables": tables_of(blocks),
        "files": {file.name: file_hash(file) for file in files_of(folder, stem)},
        "made_from": made_from,
    }
    write_json(folder / f"{stem}.json", record)
    return path


def measured_here(names: Sequence[str], device: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """What a page was made from that needed no run: a record of measurements, whose `about` has
    date, code_version and versions.
    """
    about = record["about"]
    return {
        "kind": "bench",
        "names": list(names),
        "judges": [],
        "code_versions": [about["code_version"]],
        "finished": about["date"],
        "devices": [device],
        "versions": about["versions"],
        "stages": {},
        "measured": record,
    }


def files_of(folder: Path, stem: str) -> list[Path]:
    """A page's files as they are published: Markdown, the plots that it shows, JSON."""
    text = folder / f"{stem}.md"
    if not text.exists():
        return []
    plots = PLOT.findall(text.read_text(encoding="utf-8"))
    names = [f"{stem}.md", *(f"{stem}-{plot}.svg" for plot in plots), f"{stem}.json"]
    return [folder / name for name in names if (folder / name).exists()]


def record_of(folder: Path, stem: str) -> dict[str, Any]:
    """A page's JSON. Raises UserError where it is none, or lacks what pages write."""
    path = folder / f"{stem}.json"
    record = read_record(path) or {}
    if not {"title", "lead", "files", "made_from"} <= record.keys():
        raise UserError(f"{path} is no record of a page: make the page again")
    return record


def arguments(about: str) -> argparse.ArgumentParser:
    """What a page about finished runs takes on the command line; the page adds its own."""
    parser = Parser(description=about)
    parser.add_argument("--judge", default="", help="where runs were judged by several")
    return parser


def print_page(
    write_page: Callable[[argparse.Namespace], str],
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
) -> None:
    """Print what writing a page returns, or the one line that says why it was not written."""
    with in_one_line():
        print(write_page(parser.parse_args(argv)))


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


def _all(blocks: Sequence[Block]) -> Iterator[Block]:
    """Every block, those inside others too."""
    for block in blocks:
        yield block
        yield from _all(block.inside())


def tables_of(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Every table as JSON holds it, each under another name.

    One without a name gets that of its section and of its first column.
    """
    records, section, uses = [], "", Counter[str]()
    for block in _all(blocks):
        if isinstance(block, Heading):
            section = block.text
        if isinstance(block, Table):
            named = "-".join(filter(None, (slug(section) or "page", slug(block.header[0]))))
            name = block.name or named
            again = f"-{uses[name]}" if uses[name] else ""
            uses[name] += 1
            records.append(as_record(block, f"{name}{again}", section))
    return records


def sections_of(blocks: Sequence[Block]) -> tuple[list[Block], list[tuple[Heading, list[Block]]]]:
    """What stands before the first heading, and each heading with what stands under it."""
    opening: list[Block] = []
    sections: list[tuple[Heading, list[Block]]] = []
    for block in blocks:
        if isinstance(block, Heading):
            sections.append((block, []))
        else:
            (sections[-1][1] if sections else opening).append(block)
    return opening, sections


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """The page as one HTML file that needs nothing else and lets no script run."""
    opening, sections = sections_of(blocks)
    style = Markup(STYLE.read_text(encoding="utf-8"))
    page = _environment().get_template("page.html")
    return page.render(title=title, style=style, opening=opening, sections=sections)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def rendered(blocks: Sequence[Block]) -> Markup:
        """The blocks one after the other."""
        templates = (environment.get_template(block.template) for block in blocks)
        html = (template.render(block=x) for template, x in zip(templates, blocks, strict=True))
        return Markup("\n".join(html))

    environment.filters["rendered"] = rendered
    return environment


def to_markdown(stem: str, title: str, blocks: Sequence[Block]) -> str:
    """The page as Markdown; its plots are the files `<stem>-<figure>.svg` beside it."""
    opening, sections = sections_of(blocks)
    parts = [f"# {escape(title)}", *(block.markdown(stem) for block in opening)]
    for heading, inside in sections:
        parts += ["<details><summary>", heading.markdown(stem), "</summary>"]
        parts += [*(block.markdown(stem) for block in inside), "</details>"]
    return "\n\n".join(filter(None, parts)) + "\n"
