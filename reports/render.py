"""Templates -> Markdown -> one self-contained HTML file.

A page is a template in `reports/templates` and the values that it prints. Jinja2 fills the template
in, which gives the Markdown page, and markdown-it-py turns the same text into HTML. The HTML
holds its style and its figures, loads nothing, and forbids scripts.

Everything that a template prints is escaped here, in `escape`: posts, summaries and names may
contain anything and stay text. Only what this module writes itself (figures, folded sections) is
Markdown already.
"""

import html
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markupsafe import Markup

from reports import formats, limits
from reports.plots import Figure
from stages.config.errors import UserError, visible
from stages.runs.files import file_hash, read_record, write_json, write_text

TEMPLATES = Path(__file__).with_name("templates")
PUBLIC = "public"  # the folder of a page without other people's texts
# An image of a figure, as `fill` writes it. No escaped text looks like it.
IMAGE = re.compile(r'<img class="figure" src="(?P<file>[\w.-]+\.svg)" alt="(?P<title>[^"]*)">')
TERMINAL_COLUMNS = 80
# The bounds of an interval, and a p-value, in which no line is broken.
BOUNDS = re.compile(r"\[([-+]?[\d.,]+), ([-+]?[\d.,]+)\]")
P_VALUE = re.compile(r"\bp (=|&lt;) (?=\d)")


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page that has been filled in but not written yet."""

    stem: str
    """The name of its files without an ending."""
    markdown: str
    figures: Mapping[str, str]
    """File name -> SVG."""

    @property
    def title(self) -> str:
        """The text of the first heading."""
        return _plain_text(self.markdown.split("\n", 1)[0].removeprefix("# "))

    @property
    def answer(self) -> str:
        """The first paragraph, which answers the page's question."""
        return _plain_text(self.markdown.split("\n\n")[1])

    @property
    def html(self) -> str:
        """The page as one HTML file."""
        return to_html(self.title, self.markdown, self.figures)


# -- filling templates in --------------------------------------------------------------------------


def fill(template: str, stem: str, **values: Any) -> Page:
    """Fill a Markdown template in. `stem` is the name of the page's files without an ending."""
    figures: dict[str, str] = {}

    def show_figure(figure: Figure | None, caption: str = "") -> Markup:
        """Write a figure, one image for each panel, and its caption; nothing without a figure."""
        if figure is None:
            return Markup("")
        images = []
        for place, drawing in enumerate(figure.drawings, start=1):
            number = f"-{place}" if len(figure.drawings) > 1 else ""
            file = f"{stem}-{figure.name}{number}.svg"
            figures[file] = drawing.svg
            images.append(f'<img class="figure" src="{file}" alt="{html.escape(drawing.title)}">')
        written = "\n".join(images)
        return Markup(f"{written}\n\n*{escape(caption)}*" if caption else written)

    environment = _environment(TEMPLATES, finalize=_escaped)
    text = environment.get_template(template).render(**values, figure=show_figure)
    return Page(stem=stem, markdown=_tidy(text), figures=figures)


def fill_text(template: str, **values: Any) -> str:
    """Fill in a template for the terminal. Control characters of what it prints are replaced."""
    environment = _environment(TEMPLATES, finalize=_printable)
    text = environment.get_template(template).render(**values)
    lines = [_wrapped(line) for line in _tidy(text).replace("**", "").splitlines()]
    return "\n".join(lines) + "\n"


def _escaped(value: object) -> Markup:
    """Escape a printed value, in one line: a line break could end a heading or a paragraph."""
    return value if isinstance(value, Markup) else cell(value)


def _printable(value: object) -> Markup:
    return Markup(visible(str(value)))


@cache
def _environment(folder: Path, finalize: Callable[[Any], Markup]) -> Environment:
    """Return a Jinja2 environment that passes each printed value through `finalize`."""
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,  # what macros and `figure` return is Markup, and is not escaped again
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "percent": formats.percent,
        "points": formats.points,
        "bare_points": formats.bare_points,
        "number": formats.number,
        "difference": formats.difference,
        "count": formats.count,
        "bounds": formats.bounds,
        "parameter_count": formats.parameter_count,
        "p_value": formats.p_value,
        "bare_p_value": formats.bare_p_value,
        "plural": formats.plural,
        "listed": formats.listed,
        "duration": formats.duration,
        "cell": cell,
        "quote": quote,
    }
    environment.filters |= filters
    environment.globals["limits"] = limits
    return environment


# -- escaping --------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """Return plain text as Markdown that shows it: no markup, HTML, table or list by accident."""
    text = html.escape(visible(text), quote=False)
    text = re.sub(r"(?m)^[ \t]+", "", text)
    text = re.sub(r"([\\`*|~])", r"\\\1", text)
    text = re.sub(r"\](?=[(\[:])", r"\\]", text)  # no link, and no definition of one
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
    text = re.sub(r"(?m)^([#+=-])(?=[#+=\s-]|$)", r"\\\1", text)
    return re.sub(r"(?m)^(\d+)([.)])(?=\s|$)", r"\1\\\2", text)


def cell(text: object) -> Markup:
    """Return a text for a cell of a table: escaped, in one line."""
    return Markup(escape(" ".join(str(text).split())))


def quote(text: str) -> Markup:
    """Return a text as a quotation that keeps its lines and paragraphs."""
    paragraphs = re.split(r"\n\s*\n", escape(text.strip()))
    quoted = ["  \n".join(f"> {line}" for line in part.split("\n")) for part in paragraphs]
    return Markup("\n>\n".join(quoted))


def _tidy(text: str) -> str:
    """Remove the empty lines that the statements of a template leave."""
    text = re.sub(r"(?m)[ \t]+$", lambda spaces: "  " if spaces[0] == "  " else "", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    text = re.sub(r"(?m)(^- .*)\n\n(?=- )", r"\1\n", text)
    return text.strip() + "\n"


def _plain_text(markdown: str) -> str:
    """Return a paragraph of Markdown without its markup."""
    text = re.sub(r"\\([^A-Za-z0-9\s])", r"\1", markdown.replace("**", ""))
    return html.unescape(" ".join(text.split()))


def _wrapped(line: str) -> str:
    """Break a long line of prose for the terminal; tables and paths keep their lines."""
    if len(line) <= TERMINAL_COLUMNS or "  " in line.strip():
        return line
    return textwrap.fill(
        line,
        TERMINAL_COLUMNS,
        subsequent_indent="  " if line.startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


# -- HTML ------------------------------------------------------------------------------------------


def to_html(title: str, markdown: str, figures: Mapping[str, str]) -> str:
    """Return Markdown as one HTML file that holds its figures and lets no script run."""
    # Raw HTML is on for the folds and figures of the templates; `escape` leaves none in a text.
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    parser.add_render_rule("table_open", _open_table)
    parser.add_render_rule("table_close", _close_table)
    body = parser.render(markdown)
    body = BOUNDS.sub(r"[\1,&nbsp;\2]", body)
    body = P_VALUE.sub(r"p&nbsp;\1&nbsp;", body)
    body = IMAGE.sub(lambda match: _inline_figure(match, figures), body)
    page = _environment(TEMPLATES, finalize=Markup).get_template("page.html")
    return page.render(
        title=Markup(html.escape(title)),
        style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
        body=Markup(body),
    )


def _inline_figure(match: re.Match[str], figures: Mapping[str, str]) -> str:
    """Put the SVG itself in the place of its image, where it follows the theme of the page."""
    svg = figures[match["file"]]
    return f'<span class="panel" role="img" aria-label="{match["title"]}">{svg}</span>'


def _open_table(self: RendererHTML, tokens: Sequence[Any], index: int, *_: Any) -> str:
    """Let a wide table scroll by itself; the keyboard can reach it."""
    return '<div class="scroll" role="region" aria-label="Table" tabindex="0"><table>\n'


def _close_table(self: RendererHTML, tokens: Sequence[Any], index: int, *_: Any) -> str:
    return "</table></div>\n"


# -- writing ---------------------------------------------------------------------------------------


def write(folder: Path, page: Page, numbers: object, made_from: Mapping[str, Any]) -> Path:
    """Write a page as Markdown, HTML, SVG and JSON, and return the path of its HTML.

    The JSON has the page's title and answer, `numbers` (a typed result, or plain data) in full
    precision, what the page was made from, and the hashes of its other files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in files_of(folder, page.stem):
        old.unlink()
    for name, svg in page.figures.items():
        write_text(folder / name, svg)
    write_text(folder / f"{page.stem}.md", page.markdown)
    path = folder / f"{page.stem}.html"
    write_text(path, page.html)
    record = {
        "title": page.title,
        "lead": page.answer,
        "numbers": plain(numbers),
        "files": {file.name: file_hash(file) for file in files_of(folder, page.stem)},
        "made_from": made_from,
    }
    write_json(folder / f"{page.stem}.json", record)
    return path


def files_of(folder: Path, stem: str) -> list[Path]:
    """Return the files of a page that are published: Markdown, the figures it shows, JSON."""
    markdown = folder / f"{stem}.md"
    if not markdown.exists():
        return []
    text = markdown.read_text(encoding="utf-8")
    figures = [match["file"] for match in IMAGE.finditer(text)]
    # Pages of earlier versions show their figures as Markdown images.
    figures += re.findall(r"^!\[Plot: [\w-]+\]\(([\w.-]+\.svg)\)", text, re.MULTILINE)
    names = [f"{stem}.md", *dict.fromkeys(figures), f"{stem}.json"]
    return [folder / name for name in names if (folder / name).exists()]


def read_page_record(folder: Path, stem: str) -> dict[str, Any]:
    """Return the JSON of a page. Raises UserError if it is none."""
    path = folder / f"{stem}.json"
    record = read_record(path) or {}
    if not {"title", "lead", "files", "made_from"} <= record.keys():
        raise UserError(f"{path} is not the record of a page: write the page again")
    return record


def plain(value: Any) -> Any:
    """Return typed results as plain data for JSON; paths become their names, words their text."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value.name if isinstance(value, Path) else value
