"""The numbers of a page for programs: each table as CSV, all of them as one JSON.

A cell such as `63.0% [60.0, 66.0]` becomes three cells: the number, `low` and `high`. A dash, which
is a number that is not there, becomes an empty cell (null in JSON). Numbers are as exact as the
page shows them.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from reports.parts.blocks import Block, Details, Figure, Heading, Note, Quoted, Sample, Table, Text
from reports.parts.words import MISSING
from stages.settings.checks import visible

Cell = str | float | None
NUMBER = r"[-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?"
CELL = re.compile(
    rf"(?P<middle>{NUMBER})?(?P<unit>%| points)?"
    rf"(?: ?[\[(](?P<low>{NUMBER})%?(?:,| to) (?P<high>{NUMBER})%?[\])])?"
)
INTERVAL = " [95%]"
FORMULA = ("=", "+", "-", "@", "\t")  # a spreadsheet would compute such a text


@dataclass(frozen=True)
class Columns:
    """A table as programs read it."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def columns_of(table: Table) -> Columns:
    """The table with a column for each number."""
    parts = [
        _column(title, [row[index] for row in table.rows])
        for index, title in enumerate(table.header)
    ]
    header = [title for titles, _ in parts for title in titles]
    rows = [
        [cell for _, cells in parts for cell in cells[number]] for number in range(len(table.rows))
    ]
    return Columns(header, rows)


def as_csv(table: Table) -> str:
    """The table as CSV, comma and LF; a text that begins like a formula gets an apostrophe."""
    columns = columns_of(table)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_no_formula(title) for title in columns.header])
    writer.writerows([_no_formula(cell) for cell in row] for row in columns.rows)
    return text.getvalue()


def as_record(table: Table, section: str) -> dict[str, Any]:
    """The table as JSON holds it; `section` is the heading that it stands under."""
    columns = columns_of(table)
    return {
        "name": table.name,
        "section": section,
        "caption": table.caption,
        "columns": list(columns.header),
        "rows": [list(row) for row in columns.rows],
    }


def _column(title: str, cells: Sequence[str]) -> tuple[list[str], list[list[Cell]]]:
    """The titles and the cells, row by row, that a column becomes."""
    matches = [CELL.fullmatch(cell) if cell else None for cell in cells]
    blank = [cell == "" or cell.startswith(MISSING) for cell in cells]
    known = [match for match, missing in zip(matches, blank, strict=True) if match and not missing]
    if not known or len(known) + sum(blank) < len(cells):
        return [title], [[cell] for cell in cells]
    bounds = any(match["low"] for match in known)
    unit = next((match["unit"].strip() for match in known if match["unit"]), "")
    title = title.replace(INTERVAL, "") if bounds else title
    titles = [f"{title}, {unit}".removeprefix(", ") if unit else title]
    keys = ["middle", *(("low", "high") if bounds else ())]
    titles += [f"{title} {key}".strip() for key in keys[1:]]
    rows: list[list[Cell]] = [
        [None if match is None or missing else _number(match[key]) for key in keys]
        for match, missing in zip(matches, blank, strict=True)
    ]
    return titles, rows


def _number(text: str | None) -> float | None:
    if text is None:
        return None
    plain = text.replace(",", "").removeprefix("+")
    return int(plain) if plain.lstrip("-").isdigit() else float(plain)


def _no_formula(cell: Cell) -> Cell:
    if not isinstance(cell, str):
        return cell
    text = visible(cell)  # before it is quoted: a carriage return becomes a line break
    return f"'{text}" if text.startswith(FORMULA) else text


KINDS: dict[str, type[Block]] = {
    kind.__name__: kind for kind in (Heading, Text, Note, Table, Figure, Quoted, Sample, Details)
}
NOT_KEPT = {"whole", "parts"}  # the drawings of a plot


def to_json(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """The blocks as JSON holds them."""
    kept: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, Details):
            kept.append(_named(block, {"summary": block.summary, "blocks": to_json(block.blocks)}))
        elif type(block).__name__ in KINDS:
            kept.append(_named(block, asdict(block)))
        else:
            kept += to_json(block.inside())
    return kept


def from_json(rows: Sequence[Mapping[str, Any]]) -> list[Block]:
    """The blocks again, plots without their drawings."""
    return [_block(KINDS[row["kind"]], row) for row in rows]


def _named(block: Block, row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in row.items() if key not in NOT_KEPT}
    return {"kind": type(block).__name__, **kept}


def _block(kind: type[Block], row: Mapping[str, Any]) -> Block:
    values = {attribute.name: row.get(attribute.name, "") for attribute in fields(kind)}
    if kind is Details:
        values["blocks"] = from_json(row["blocks"])
    return kind(**values)
