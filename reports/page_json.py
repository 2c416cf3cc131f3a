"""What a page says, as plain JSON: enough to write its Markdown again without the runs.

A plot is named by its caption, and its drawing is the file beside the page. Of a block that only
scripts can show, what Markdown shows of it is kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from reports.blocks import Block, Details, Figure, Heading, Note, Sample, Table, Text

KINDS: dict[str, type[Block]] = {
    kind.__name__: kind for kind in (Heading, Text, Note, Table, Figure, Sample, Details)
}
NOT_KEPT = {"whole", "parts"}  # the drawings of a plot


def to_json(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """The blocks as JSON holds them."""
    found: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, Details):
            found.append(_named(block, {"summary": block.summary, "blocks": to_json(block.blocks)}))
        elif type(block).__name__ in KINDS:
            found.append(_named(block, asdict(block)))
        else:
            found += to_json(block.inside())
    return found


def from_json(rows: Sequence[Mapping[str, Any]]) -> list[Block]:
    """The blocks again, plots without their drawings."""
    return [_block(KINDS[row["kind"]], row) for row in rows]


def _named(block: Block, row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in row.items() if key not in NOT_KEPT}
    return {"kind": type(block).__name__, **kept}


def _block(kind: type[Block], row: Mapping[str, Any]) -> Block:
    values = {one.name: row.get(one.name, "") for one in fields(kind)}
    if kind is Details:
        values["blocks"] = from_json(row["blocks"])
    return kind(**values)
