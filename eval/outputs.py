"""Summaries that exist already (`make judge INPUT=...`): the stage `summaries` of such a run.

    python -m eval.outputs --preset outputs --set outputs.file=outputs.jsonl

reads JSONL, CSV or Parquet, a folder of such files, or the summaries of a run, and puts each
system's summaries where those of a policy are looked for. So all that follows is as in every run.

All kinds of file become one frame, a row a summary, whose index says where it stands. An empty
summary is judged; an empty reference or post is refused, and so are a null and a number.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from eval.judges.protocol import Row
from eval.rates.length_control import mean_words
from stages.config.config import Config, Outputs, UserError
from stages.config.judge import file_name
from stages.config.sections import format_post
from stages.data.bad_rows import BadRowError
from stages.data.tables import parsed_rows
from stages.data.text_metrics import text_measures
from stages.runs.inputs import OUTPUT_FILES, output_files
from stages.runs.run import open_stage, write_rows

LONGEST_SUMMARY = 10_000  # characters; ROUGE-L takes time by the product of two lengths
HALF = re.compile(r"[\ud800-\udfff]")
QUERY = "query"  # the column of a prompt that is shown as it is
TAKEN = "reference"  # on every page: no system may be called so
LABELS: dict[str, bool | None] = {  # numbers also as pandas writes a column with empty cells
    **dict.fromkeys(("1", "1.0", "true", "summary", "policy"), True),
    **dict.fromkeys(("0", "0.0", "false", "reference"), False),
    **dict.fromkeys(("", "none", "nan", "<na>", "0.5", "tie"), None),
}


def take_outputs(config: Config) -> None:
    """Run the stage. Raises UserError, with file and line, for what cannot be judged."""
    with open_stage(config, "summaries") as run:
        table = read_table(config.outputs)
        systems = read_systems(table, config.outputs, config.eval.posts)
        references = {row["id"]: row["reference"] for rows in systems.values() for row in rows}
        for name, rows in systems.items():
            write_rows(run, f"{name}.jsonl", rows)
        names = dict(zip(table["name"], table["system"], strict=True))
        other = {name: as_typed for name, as_typed in names.items() if name != as_typed}
        run.finish(
            {
                "posts": len(references),
                "policies": {name: describe(rows) for name, rows in systems.items()},
                "reference_tokens": None,
                "reference_words": mean_words(references.values()),
                **({"given_names": other} if other else {}),
            }
        )
    empty = sum(not row["summary"] for rows in systems.values() for row in rows)
    if empty:
        print(f"empty summaries, judged as they are: {empty:,}")


def read_table(settings: Outputs) -> pd.DataFrame:
    """A row for every summary of the files, each once: `system` as it is called and its `name` as
    its file will be, post `id`, `query`, `summary`, `reference` and `label` (whether people prefer
    the summary, or None).

    Raises UserError for what cannot be judged.
    """
    cells = read_cells(settings)
    queries, columns = _queries(cells, settings), settings.summary_columns
    hashes = queries.map(lambda query: hashlib.sha256(query.encode()).hexdigest()[:12])
    files = cells.index.map(lambda where: Path(where.rpartition(":")[0]).stem)
    table = pd.DataFrame(
        {
            "query": queries,
            "reference": _texts(cells, settings.reference, True),
            "id": _named(cells, settings.id, hashes),
            "system": _named(cells, settings.system, files.to_series(cells.index)),
            "label": _labels(cells, settings),
        },
        dtype=object,
    )
    tables = []
    for column in columns:
        system = table["system"] if len(columns) == 1 else column
        summaries = _texts(cells, column, True, can_be_empty=True)
        tables.append(table.assign(summary=summaries, system=system))
    whole = pd.concat(tables)
    return with_names(whole[~whole.duplicated()])


def read_cells(settings: Outputs) -> pd.DataFrame:
    """The files' rows as they are, by `file:line`, with every column that is needed."""
    paths = output_files(settings.file)
    if not paths:
        what = f"no file of summaries ({', '.join(OUTPUT_FILES)})"
        raise UserError(f"{settings.file}: {what} there: correct INPUT=")
    rows = {where: row for path in paths for where, row in parsed_rows(path)}
    if not rows:
        raise UserError(f"{settings.file} holds no summaries: give at least one row")
    cells = pd.DataFrame(list(rows.values()), index=list(rows), dtype=object)
    needed = dict.fromkeys(settings.summary_columns, "outputs.summary")
    needed |= {} if QUERY in cells else {settings.post: "outputs.post"}
    needed |= {settings.reference: "outputs.reference"}
    needed |= {settings.label: "outputs.label"} if settings.label else {}
    lacking = {column: setting for column, setting in needed.items() if column not in cells}
    if lacking:
        mends = " ".join(dict.fromkeys(f"{setting}=..." for setting in lacking.values()))
        problem = f"no column {', '.join(lacking)}: name it, SET='{mends}'"
        raise BadRowError(cells.index[0], f"{problem} (it has {', '.join(map(str, cells))})")
    for column in cells:
        halves = cells[column].map(lambda cell: HALF.search(str(cell)) is not None)
        _refuse(halves, f"column {column} holds half a character: save the file as UTF-8")
    return cells


def _refuse(bad: pd.Series, reason: str | pd.Series) -> None:
    """Raise BadRowError at the first row that is bad, with its reason."""
    for row in bad.to_numpy().nonzero()[0][:1]:
        text = reason if isinstance(reason, str) else reason.iloc[row]
        raise BadRowError(str(bad.index[row]), text)


def _texts(
    cells: pd.DataFrame, column: str, is_summary: bool = False, can_be_empty: bool = False
) -> pd.Series:
    """The texts of a column; summaries and references without outer spaces.

    Raises BadRowError, with the way out, where a cell is null, no text, empty, or too long.
    """
    values, start = cells[column], f"column {column} "
    mend = 'write "" where the system wrote nothing' if can_be_empty else "fill it"
    _refuse(values.isna(), f"{start}is null: {mend}, or drop the row")
    kinds = values.map(lambda value: type(value).__name__)
    other = "write it as text, or name another column (outputs.summary, .post, .reference)"
    _refuse(kinds != "str", f"{start}is of type " + kinds + f": {other}")
    if is_summary:
        sizes = values.str.len()
        most = f" characters, more than {LONGEST_SUMMARY:,}: shorten it, or name another column"
        _refuse(sizes > LONGEST_SUMMARY, f"{start}has " + sizes.map("{:,}".format) + most)
    stripped = values.str.strip()
    if not can_be_empty:
        _refuse(stripped == "", f"{start}is empty: {mend}, or drop the row")
    return stripped if is_summary else values


def _named(cells: pd.DataFrame, column: str, otherwise: pd.Series) -> pd.Series:
    """A column as names; where a cell is missing or empty, another name."""
    if column not in cells:
        return otherwise
    is_empty = cells[column].isna() | (cells[column] == "")
    return cells[column].map(str).mask(is_empty, otherwise)


def _queries(cells: pd.DataFrame, outputs: Outputs) -> pd.Series:
    """The posts as the judge is shown them."""
    if outputs.post not in cells:
        return _texts(cells, QUERY)
    posts, keys = _texts(cells, outputs.post), ("subreddit", "title")
    if not {*keys} <= {*cells.columns}:
        return posts
    known = cells.fillna({"title": "", "subreddit": ""})
    fields = pd.DataFrame({key: _texts(known, key, can_be_empty=True) for key in keys})
    return fields.assign(post=posts).apply(lambda row: format_post(dict(row)), axis=1)


def _labels(cells: pd.DataFrame, outputs: Outputs) -> pd.Series | None:
    """What a column of labels means."""
    if not outputs.label:
        return None
    words = cells[outputs.label].map(lambda label: str(label).strip().lower())
    mend = "write 1 where the summary is preferred, 0 where the reference is, else nothing"
    _refuse(~words.isin([*LABELS]), f"column {outputs.label} is " + words.map(repr) + f": {mend}")
    return words.map(LABELS.__getitem__).astype(object)


def with_names(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the `name` of every system's file.

    Raises UserError where two systems would share one, or one is called `reference`, a post has two
    summaries of a system, or systems were given different posts.
    """
    table = table.assign(name=table["system"].map(file_name), where=table.index)

    def first(keys: list[str], column: str) -> pd.Series:
        return table.groupby(keys, sort=False)[column].transform("first")

    system, post, other = table["system"], table["id"], first(["name"], "system")
    taken = f"a system is called {TAKEN}, as what it is compared with: rename it"
    _refuse(system == TAKEN, taken)
    like = "system " + system.map(repr) + " reads like " + other.map(repr) + ": rename it"
    _refuse(system != other, like)
    place = first(["name", "id"], "where")
    twice = "post " + post + " of system " + system + " stands at " + place + " too: drop one"
    _refuse(table.duplicated(["name", "id"]), twice)
    place = first(["id"], "where")
    for column, what in (("query", "post"), ("reference", "reference")):
        mend = ": all systems need the same"
        differs = table[column] != first(["id"], column)
        _refuse(differs, f"the {what} of id " + post + " differs from that at " + place + mend)
    return table


def read_systems(table: pd.DataFrame, outputs: Outputs, count: int) -> dict[str, list[Row]]:
    """The rows of each system about the first `count` posts, in the order of the files; all of them
    if it is 0. Systems are compared on the posts that all of them have.

    Raises UserError where there is no such post, and where no label is left.
    """
    posts = list(dict.fromkeys(table["id"]))
    if count > len(posts):
        raise UserError(f"eval.posts is {count} but there are {len(posts)} posts")
    kept = posts[: count or len(posts)]
    unknown = dict.fromkeys(("tokens", "reference_tokens", "has_eos", "score", "reference_score"))
    systems: dict[str, list[Row]] = {str(name): [] for name in table["name"]}
    for row in table[table["id"].isin(kept)].to_dict("records"):
        known = {key: row[key] for key in ("id", "query", "reference", "summary")}
        label = {} if row["label"] is None else {"label": row["label"]}
        systems[row["name"]].append(known | unknown | label)
    if not set.intersection(*({row["id"] for row in rows} for rows in systems.values())):
        raise UserError(
            f"{outputs.file}: no post has a summary of every system: give all systems the same"
            " posts (SET=outputs.id=... names the column), or raise eval.posts"
        )
    if outputs.label and not any("label" in row for rows in systems.values() for row in rows):
        problem = f"{outputs.file}: column {outputs.label} has no label"
        raise UserError(f"{problem}: fill it, raise eval.posts, or leave out outputs.label")
    return systems


def describe(rows: Sequence[Row]) -> dict[str, float | None]:
    """Means over a system's posts; None for what only the model that wrote them could say."""
    unknown = dict.fromkeys(("tokens", "score", "reference_score", "eos_rate"))
    words = {"words": mean_words(row["summary"] for row in rows), "posts": len(rows)}
    return {**unknown, **words, **text_measures(rows)}
