"""Rows of summaries that exist already: what a file of any kind says of one summary of one post.

All kinds of file are read alike. An empty summary is a summary; an empty reference or post, and a
summary or reference that is null, is refused; a title or subreddit that is null is empty. Numbers
are no texts.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from eval.judges.protocol import Row
from stages.posts.bad_rows import BadRowError
from stages.posts.readers import check_comparison, is_cnndm, text_of
from stages.settings.config import Outputs, UserError
from stages.settings.prompt import format_post

LONGEST_SUMMARY = 10_000  # characters; ROUGE-L takes time by the product of two lengths
FILL = "fill it, or drop the row"
EMPTY = 'write "" where the system wrote nothing, or drop the row'
QUERY = "query"  # the column of a prompt that is shown as it is
REFERENCE = "ref"  # the reference's policy in published comparisons
LABELS: dict[str, bool | None] = {  # numbers also as pandas writes a column with empty cells
    **dict.fromkeys(("1", "1.0", "true", "summary", "policy"), True),
    **dict.fromkeys(("0", "0.0", "false", "reference"), False),
    **dict.fromkeys(("", "none", "nan", "<na>", "0.5", "tie"), None),
}


class Output(NamedTuple):
    """One summary of one post, as a file has it."""

    where: str
    system: str
    post_id: str
    query: str
    summary: str
    reference: str | None
    """None where the file has no column for it."""
    label: bool | None
    """Whether people prefer the summary to the reference; None where nobody said."""


def flattened(where: str, row: Row, outputs: Outputs) -> Iterator[Row]:
    """A row as it is; a published comparison as the row of the summary beside the reference.

    A comparison without a reference, or about a news article, is left out (`why_left_out`). Its
    `choice` says whether the summary was chosen.
    """
    if not {"info", "summaries", "choice"} <= row.keys():
        yield row
        return
    check_comparison(where, row)
    if is_cnndm(row):
        return
    policies = [summary["policy"] for summary in row["summaries"]]
    if policies.count(REFERENCE) == 1:
        place = policies.index(REFERENCE)
        yield {
            **row["info"],
            outputs.id: row["info"]["id"],
            outputs.system: policies[1 - place],
            outputs.summary: row["summaries"][1 - place]["text"],
            outputs.reference: row["summaries"][place]["text"],
            "choice": row["choice"] != place,
        }


def why_left_out(row: Row) -> str:
    """Why `flattened` leaves out a published comparison."""
    return "about news articles" if is_cnndm(row) else "without exactly one reference"


def outputs_of(where: str, stem: str, row: Row, outputs: Outputs) -> list[Output]:
    """The summaries of one row. Raises BadRowError for columns that are missing or no text."""
    _check_columns(where, row, outputs)
    query = _query(where, row, outputs)
    digest = hashlib.sha256(query.encode()).hexdigest()[:12]
    reference = None
    if outputs.reference in row:
        reference = _short(where, outputs.reference, _cell(where, row, outputs.reference, FILL))
        if not reference:
            raise BadRowError(where, f"column {outputs.reference} is empty: {FILL}")
    columns = outputs.summary_columns
    system = _named(row, outputs.system, stem)
    return [
        Output(
            where=where,
            system=system if len(columns) == 1 else column,
            post_id=_named(row, outputs.id, digest),
            query=query,
            summary=_short(where, column, _text(where, row, column, "outputs.summary", EMPTY)),
            reference=reference,
            label=_label(where, row, outputs.label),
        )
        for column in columns
    ]


def _check_columns(where: str, row: Row, outputs: Outputs) -> None:
    """Raise BadRowError that names every column that the row lacks and how to name another."""
    needed = [(column, "outputs.summary") for column in outputs.summary_columns]
    needed += [] if QUERY in row else [(outputs.post, "outputs.post")]
    lacking = [(column, setting) for column, setting in needed if column not in row]
    if lacking:
        columns = ", ".join(dict.fromkeys(column for column, _ in lacking))
        mends = " ".join(dict.fromkeys(f"{setting}=..." for _, setting in lacking))
        mends = f'"{mends}"' if " " in mends else mends
        has = ", ".join(map(str, row))
        raise BadRowError(where, f"no column {columns}: name it, SET={mends} (it has {has})")


def _short(where: str, column: str, text: str) -> str:
    """A summary without outer spaces. Raises BadRowError where it is too long to be one."""
    if len(text) > LONGEST_SUMMARY:
        raise BadRowError(
            where,
            f"column {column} has {len(text):,} characters, more than {LONGEST_SUMMARY:,}: name the"
            " column of the summaries, SET=outputs.summary=..., shorten it or drop the row",
        )
    return text.strip()


def _named(row: Row, column: str, otherwise: str) -> str:
    given = row.get(column)
    return otherwise if given in (None, "") else str(given)


def _query(where: str, row: Row, outputs: Outputs) -> str:
    """The post as the judge is shown it."""
    if outputs.post not in row and QUERY in row:
        return _cell(where, row, QUERY, FILL)
    post = _text(where, row, outputs.post, "outputs.post", FILL)
    if not post.strip():
        raise BadRowError(where, f"column {outputs.post} is empty: {FILL}")
    if not {"title", "subreddit"} <= row.keys():
        return post
    known = row | {name: "" for name in ("title", "subreddit") if row[name] is None}
    title, subreddit = (_cell(where, known, name, FILL) for name in ("title", "subreddit"))
    return format_post({"subreddit": subreddit, "title": title, "post": post})


def _text(where: str, row: Row, column: str, setting: str, if_null: str) -> str:
    named = isinstance(row[column], int | float) and f", or name another column, SET={setting}=..."
    return _cell(where, row, column, if_null, named or "")


def _cell(where: str, row: Row, column: str, if_null: str, or_else: str = "") -> str:
    """The text in a column. Raises BadRowError, with the way out, where it is null or no text."""
    value = row[column]
    if value is None:
        raise BadRowError(where, f"column {column} is null: {if_null}")
    if not isinstance(value, str):
        kind = type(value).__name__
        raise BadRowError(where, f"column {column} is of type {kind}: write it as text{or_else}")
    return text_of(where, row, column)


def merge_repeated(outputs: Sequence[Output]) -> list[Output]:
    """Each summary once: rows that differ in their label alone become one, the first.

    In published comparisons several people judged the same pair. The label is what most of them
    prefer; None where as many prefer the other.
    """
    same: dict[Output, list[Output]] = {}
    for output in outputs:
        same.setdefault(output._replace(where="", label=None), []).append(output)
    return [rows[0]._replace(label=_majority(rows)) for rows in same.values()]


def _majority(outputs: Sequence[Output]) -> bool | None:
    labels = [output.label for output in outputs if output.label is not None]
    more = 2 * sum(labels) - len(labels)
    return more > 0 if more else None


def check_texts(path: Path, outputs: Sequence[Output], column: str) -> None:
    """Raise UserError if all summaries of a CSV file, which holds text alone, are numbers."""
    if path.suffix == ".csv" and outputs and all(_is_number(row.summary) for row in outputs):
        raise UserError(
            f"{path}: column {column} holds numbers alone: name the column of the summaries,"
            " SET=outputs.summary=..."
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _label(where: str, row: Row, column: str) -> bool | None:
    if not column:
        return None
    word = str(row.get(column, "")).strip().lower()
    if word not in LABELS:
        taken = {
            meaning: ", ".join(key or "an empty cell" for key in LABELS if LABELS[key] is meaning)
            for meaning in (True, False, None)
        }
        raise BadRowError(
            where,
            f"column {column} is {word!r}: correct it to one of {taken[True]} (the summary is"
            f" preferred); {taken[False]} (the reference is); {taken[None]} (neither)",
        )
    return LABELS[word]
