"""Stage `summaries` of existing summaries (`make judge INPUT=...`).

It reads JSON, JSON Lines, CSV or Parquet, a folder of such files, or the summaries of a run, and
writes each system's summaries in the place of a policy's. From then on, judging and reporting are
the same as for a trained run.

An empty summary is judged. An empty reference or post is an error, and so are null and numbers.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.judges.protocol import Row
from eval.stats.length_control import mean_words
from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.judge import Outputs, file_name
from stages.config.sections import format_post
from stages.data.bad_rows import BadRowError
from stages.data.conversations import PRINTED_MESSAGES
from stages.data.tables import LocatedRow, parsed_rows
from stages.data.text_metrics import text_measures
from stages.runs.run import open_stage, write_rows
from stages.runs.user_files import ROW_FILES, output_files, unread_outputs

LONGEST_SUMMARY = (
    10_000  # characters; ROUGE-L takes time proportional to the product of two lengths
)
HALF_CHARACTER = re.compile(r"[\ud800-\udfff]")
QUERY = "query"  # the column of a prompt that the judge sees unchanged
REFERENCE = "reference"  # the name of the human texts on every page, so systems cannot use it
# What a label means, in lower case. pandas writes a column with empty cells as 1.0, 0.0 and nan.
LABELS: dict[str, bool | None] = {
    "1": True,
    "1.0": True,
    "true": True,
    "summary": True,
    "policy": True,
    "0": False,
    "0.0": False,
    "false": False,
    "reference": False,
    "": None,
    "none": None,
    "nan": None,
    "<na>": None,
    "0.5": None,
    "tie": None,
}


@dataclass(frozen=True, kw_only=True)
class ExistingSummary:
    """A system's summary of one post, as it is in its file."""

    where: str
    """`file:line`."""
    system: str
    """The system's name as in its file."""
    id: str
    """The post's id, or a hash of its text."""
    query: str
    """The post as the judge sees it."""
    summary: str
    reference: str
    label: bool | None
    """Whether people prefer the summary to the reference; None without a label."""

    @property
    def name(self) -> str:
        """The system's name as a file name."""
        return file_name(self.system)


def take_outputs(config: Config) -> None:
    """Run the stage. Raises UserError, with file and line, for rows that cannot be judged."""
    with open_stage(config, "summaries") as run:
        unread = unread_outputs(config.outputs.file)
        if unread:
            print(f"not read in {config.outputs.file}: {', '.join(unread)}", flush=True)
        summaries = read_table(config.outputs)
        systems = read_systems(summaries, config.outputs, count=config.eval.posts)
        for name, rows in systems.items():
            write_rows(run, f"{name}.jsonl", rows)

        references = {row["id"]: row["reference"] for rows in systems.values() for row in rows}
        results: dict[str, Any] = {
            "posts": len(references),
            "policies": {name: describe(rows) for name, rows in systems.items()},
            "reference_tokens": None,
            "reference_words": mean_words(references.values()),
        }
        original_names = {
            summary.name: summary.system for summary in summaries if summary.name != summary.system
        }
        if original_names:
            results["given_names"] = original_names
        run.finish(results)
    empty = [row for rows in systems.values() for row in rows if not row["summary"]]
    if empty:
        print(f"empty summaries, judged as they are: {len(empty):,}")


# -- files -----------------------------------------------------------------------------------------


def read_table(settings: Outputs) -> list[ExistingSummary]:
    """Every summary of the files, each once. Raises UserError for rows that cannot be judged."""
    rows = read_rows(settings)
    column_names = {column for _, row in rows for column in row}

    # Labels and posts first, so that their errors are found before those of any summary.
    labels = [_read_label(where, row, settings.label) for where, row in rows]
    queries = [_read_query(where, row, column_names, settings) for where, row in rows]

    summaries: dict[ExistingSummary, ExistingSummary] = {}
    for column in settings.summary_columns:
        for (where, row), query, label in zip(rows, queries, labels, strict=True):
            text = _read_text(where, row, column, can_be_empty=True)
            reference = _read_text(where, row, settings.reference)
            _check_length(where, column, text)
            _check_length(where, settings.reference, reference)
            summary = ExistingSummary(
                where=where,
                system=_system_of(where, row, column, settings),
                id=_read_name(row, settings.id) or _hash(query),
                query=query,
                summary=text.strip(),
                reference=reference.strip(),
                label=label,
            )
            # A row that occurs again, perhaps in another file, is the same summary.
            summaries.setdefault(replace(summary, where=""), summary)
    check_names(list(summaries.values()))
    return list(summaries.values())


def _system_of(where: str, row: Row, column: str, settings: Outputs) -> str:
    """The name of the system that wrote a column's summary.

    It is the system's name in the row, or else the name of the file. With several columns of
    summaries, each column is a system of its own, and so is each name of a system.
    """
    name = _read_name(row, settings.system)
    if len(settings.summary_columns) > 1:
        return f"{name} {column}".strip()
    return name or Path(_file_of(where)).stem


def read_rows(settings: Outputs) -> list[LocatedRow]:
    """The files' rows, unchanged, after a check that every needed column exists."""
    paths = output_files(settings.file)
    if not paths:
        raise UserError(
            f"{settings.file}: no file of summaries ({', '.join(ROW_FILES)}) found: correct INPUT="
        )
    rows = [row for path in paths for row in parsed_rows(path)]
    if not rows:
        raise UserError(f"{settings.file} contains no summaries: give at least one row")
    first_place, _ = rows[0]
    columns = list(dict.fromkeys(column for _, row in rows for column in row))

    # Each required column, and the setting that names it.
    setting_of_column = dict.fromkeys(settings.summary_columns, "outputs.summary")
    if QUERY not in columns:
        setting_of_column[settings.post] = "outputs.post"
    setting_of_column[settings.reference] = "outputs.reference"
    if settings.label:
        setting_of_column[settings.label] = "outputs.label"
    missing = [column for column in setting_of_column if column not in columns]
    if missing:
        # Several columns of summaries share one setting.
        fixes = dict.fromkeys(f"{setting_of_column[column]}=..." for column in missing)
        raise BadRowError(
            first_place,
            f"no column {', '.join(missing)}: name it, SET='{' '.join(fixes)}' "
            f"(it has {', '.join(columns)})",
        )
    if QUERY in columns and settings.post in columns and settings.post != QUERY:
        raise BadRowError(
            first_place,
            f"columns {settings.post} and {QUERY} may both be the post: drop one, or name the "
            f"right one, SET='outputs.post={QUERY}'",
        )
    for where, row in rows:
        for column, cell in row.items():
            if HALF_CHARACTER.search(str(cell)):
                raise BadRowError(
                    where, f"column {column} has an unpaired surrogate: save the file as UTF-8"
                )
    return rows


# -- cells -----------------------------------------------------------------------------------------


def _read_text(where: str, row: Row, column: str, can_be_empty: bool = False) -> str:
    """A cell's text. Raises BadRowError, with the fix, for null, another type and an empty text."""
    value = row.get(column)
    fix = 'write "" where the system wrote nothing' if can_be_empty else "fill it"
    if value is None:
        is_csv = _file_of(where).lower().endswith(".csv")
        what = "null (a cell such as NaN or None)" if is_csv else "null"
        raise BadRowError(where, f"column {column} is {what}: {fix}, or drop the row")
    if not isinstance(value, str):
        raise BadRowError(
            where,
            f"column {column} has type {type(value).__name__}: write it as text, or name another "
            "column (outputs.summary, .post, .reference)",
        )
    if PRINTED_MESSAGES.match(value):
        raise BadRowError(
            where, f"column {column} is a printed list of messages: give the text of the messages"
        )
    if not value.strip() and not can_be_empty:
        raise BadRowError(where, f"column {column} is empty: {fix}, or drop the row")
    return value


def _check_length(where: str, column: str, text: str) -> None:
    if len(text) > LONGEST_SUMMARY:
        raise BadRowError(
            where,
            f"column {column} has {len(text):,} characters, more than {LONGEST_SUMMARY:,}: "
            "shorten it, or name another column",
        )


def _file_of(where: str) -> str:
    """The file of `file:line`."""
    file, _, _ = where.rpartition(":")
    return file


def _read_name(row: Row, column: str) -> str:
    """A cell as a name; empty if it is missing."""
    value = row.get(column)
    return "" if value is None else str(value)


def _read_query(where: str, row: Row, column_names: set[str], settings: Outputs) -> str:
    """The post as the judge sees it: filled into the prompt if there are title and subreddit.

    If the files have no column of posts, it is the prompt in their column `query`.
    """
    if settings.post not in column_names:
        return _read_text(where, row, QUERY)
    post = _read_text(where, row, settings.post)
    if not {"subreddit", "title"} <= column_names:
        return post
    fields = {"post": post}
    for column in ("subreddit", "title"):
        if row.get(column) is None:
            fields[column] = ""
        else:
            fields[column] = _read_text(where, row, column, can_be_empty=True)
    return format_post(fields)


def _read_label(where: str, row: Row, column: str) -> bool | None:
    """Whether people prefer the summary; None without a label or a column of labels."""
    if not column:
        return None
    word = str(row.get(column)).strip().lower()
    if word not in LABELS:
        raise BadRowError(
            where,
            f"column {column} is {word!r}: write 1 if the summary is preferred, 0 if the reference "
            "is, and leave it empty otherwise",
        )
    return LABELS[word]


def _hash(text: str) -> str:
    """The id of a post without one: the beginning of a hash of its text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# -- systems ---------------------------------------------------------------------------------------


def check_names(summaries: Sequence[ExistingSummary]) -> None:
    """Raise BadRowError if systems or posts cannot be told apart.

    Two systems must not share a name, and `reference` is not allowed as a name. A system has one
    summary of a post, and an id means the same post and reference in all systems.
    """
    first_of_name: dict[str, ExistingSummary] = {}
    first_of_id: dict[str, ExistingSummary] = {}
    first_of_both: dict[tuple[str, str], ExistingSummary] = {}
    for summary in summaries:
        if summary.system == REFERENCE:
            raise BadRowError(
                summary.where,
                f"a system is called {REFERENCE}, like the text it is compared with: rename it",
            )

        same_name = first_of_name.setdefault(summary.name, summary)
        if same_name.system != summary.system:
            raise BadRowError(
                summary.where,
                f"systems {summary.system!r} and {same_name.system!r} look alike: rename one",
            )

        same_post = first_of_id.setdefault(summary.id, summary)
        different = ""
        if same_post.query != summary.query:
            different = "post"
        elif same_post.reference != summary.reference:
            different = "reference"
        if different:
            raise BadRowError(
                summary.where,
                f"the {different} of id {summary.id} differs from that at {same_post.where}: "
                "use the same for all systems",
            )

        first = first_of_both.setdefault((summary.name, summary.id), summary)
        if first is not summary:
            raise BadRowError(
                summary.where,
                f"post {summary.id} of system {summary.system} is also at {first.where}: drop one",
            )


def read_systems(
    summaries: Sequence[ExistingSummary], outputs: Outputs, count: int
) -> dict[str, list[Row]]:
    """The rows of each system about the first `count` posts, in the order of the files; 0: all.

    Systems are compared on the posts that all of them have. Raises UserError if there is no such
    post, and if no label is left.
    """
    posts = list(dict.fromkeys(summary.id for summary in summaries))
    if count > len(posts):
        raise UserError(f"eval.posts is {count} but there are {len(posts)} posts")
    kept_posts = set(posts[: count or len(posts)])

    systems: dict[str, list[Row]] = {summary.name: [] for summary in summaries}
    for summary in summaries:
        if summary.id not in kept_posts:
            continue
        row: Row = {
            "id": summary.id,
            "query": summary.query,
            "reference": summary.reference,
            "summary": summary.summary,
            # Only the person who ran the model knows these.
            "tokens": None,
            "reference_tokens": None,
            "has_eos": None,
            "score": None,
            "reference_score": None,
        }
        if summary.label is not None:
            row["label"] = summary.label
        systems[summary.name].append(row)

    posts_of_systems = [{row["id"] for row in rows} for rows in systems.values()]
    if not set.intersection(*posts_of_systems):
        raise UserError(
            f"{outputs.file}: no post has a summary by every system: give all systems the same"
            " posts (SET=outputs.id=... names the column), or raise eval.posts"
        )
    if outputs.label and not any("label" in row for rows in systems.values() for row in rows):
        raise UserError(
            f"{outputs.file}: column {outputs.label} has no label: fill it, raise eval.posts, or "
            "leave out outputs.label"
        )
    return systems


def describe(rows: Sequence[Row]) -> dict[str, float | None]:
    """Means over a system's posts; None for those that only the person who ran the model knows."""
    return {
        "tokens": None,
        "score": None,
        "reference_score": None,
        "eos_rate": None,
        "words": mean_words(row["summary"] for row in rows),
        "posts": len(rows),
        **text_measures(rows),
    }
