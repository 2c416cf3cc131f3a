"""Summaries that exist already (`make judge INPUT=...`): the stage `summaries` of such a run.

    python -m eval.outputs --preset outputs --set outputs.file=outputs.jsonl

reads JSONL, CSV or Parquet, a folder of such files, or the summaries of a run, and puts each
system's summaries where those of a policy are looked for. So the judge, its controls, the win rates
and the pages are those of every run.

All kinds of file become one frame, a row a summary. An empty summary is a summary; an empty
reference or post, and a summary or reference that is null, is refused; a title or subreddit that is
null is empty. Numbers are no texts.
"""

import hashlib
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pandas as pd

from eval.judges.protocol import Row
from eval.rates.length_control import mean_words
from stages.driving.start import run_stage
from stages.posts.bad_rows import BadRowError
from stages.posts.readers import text_of
from stages.posts.tables import parsed_rows
from stages.posts.text_metrics import text_measures
from stages.running.inputs import OUTPUT_FILES, output_files
from stages.running.progress import folded
from stages.runs import open_stage, write_rows
from stages.settings.config import Config, Outputs, UserError
from stages.settings.judge import file_name
from stages.settings.prompt import format_post

LONGEST_SUMMARY = 10_000  # characters; ROUGE-L takes time by the product of two lengths
FILL = "fill it, or drop the row"
EMPTY = 'write "" where the system wrote nothing, or drop the row'
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
        reference = "" if has_references(table) else config.outputs.reference
        run.finish(
            {
                "posts": len(references),
                "policies": {name: describe(rows) for name, rows in systems.items()},
                "reference_tokens": None,
                "reference_words": mean_words(references.values()),
                **({"given_names": other} if other else {}),
                **({"reference_system": reference} if reference else {}),
            }
        )
    empty = {name: sum(not row["summary"] for row in rows) for name, rows in systems.items()}
    counts = [f"{n} of {len(systems[name])} of {name}" for name, n in empty.items() if n]
    if counts:
        print("\n".join(folded(f"empty summaries, judged as they are: {', '.join(counts)}")))


# -- the frame -------------------------------------------------------------------------------------


def read_table(settings: Outputs) -> pd.DataFrame:
    """A row for every summary of the files, each once: `where` it stands, `system` as it is called
    and its `name` as its file will be, post `id`, `query`, `summary`, `reference` (None where the
    files have none) and `label` (whether people prefer the summary, or None).

    Prints what was merged. Raises UserError for what cannot be judged.
    """
    cells = read_cells(settings)
    check_columns(cells, settings)
    columns, queries = settings.summary_columns, _queries(cells, settings)
    references: list[str] | list[None] = [None] * len(cells)
    if settings.reference in cells:
        references = _texts(cells, settings.reference, LONGEST_SUMMARY)
    hashes = [hashlib.sha256(query.encode()).hexdigest()[:12] for query in queries]
    stems = [Path(where.rpartition(":")[0]).stem for where in cells.index]
    table = pd.DataFrame(
        {
            "where": cells.index,
            "query": queries,
            "reference": references,
            "id": _named(cells, settings.id, hashes),
            "system": _named(cells, settings.system, stems),
            "label": _labels(cells, settings),
        },
        index=cells.index,
        dtype=object,
    )
    of_columns = []
    for column in columns:
        texts = _texts(cells, column, LONGEST_SUMMARY, can_be_empty=True)
        system = table["system"] if len(columns) == 1 else column
        of_columns.append(table.assign(summary=texts, system=system))
    whole = pd.concat(of_columns)
    once = whole.drop_duplicates([name for name in whole if name != "where"])
    if len(once) < len(whole):
        print(f"merged: {len(whole) - len(once):,} rows that repeat a summary")
    check_table(once, settings)
    return once


def read_cells(settings: Outputs) -> pd.DataFrame:
    """The files' rows as they are, by `file:line`."""
    paths = output_files(settings.file)
    if not paths:
        what = f"no file of summaries ({', '.join(OUTPUT_FILES)})"
        raise UserError(f"{settings.file}: {what} there: correct INPUT=")
    rows = {where: row for path in paths for where, row in parsed_rows(path)}
    if not rows:
        raise UserError(f"{settings.file} holds no summaries: give at least one row")
    return pd.DataFrame(list(rows.values()), index=list(rows), dtype=object)


def check_columns(cells: pd.DataFrame, outputs: Outputs) -> None:
    """Raise UserError that names every column that is missing and how to name another."""
    needed = dict.fromkeys(outputs.summary_columns, "outputs.summary")
    needed |= {} if QUERY in cells else {outputs.post: "outputs.post"}
    needed |= {outputs.label: "outputs.label"} if outputs.label else {}
    lacking = {column: setting for column, setting in needed.items() if column not in cells}
    if lacking:
        mends = " ".join(dict.fromkeys(f"{setting}=..." for setting in lacking.values()))
        problem = f"no column {', '.join(lacking)}: name it, SET='{mends}'"
        raise BadRowError(cells.index[0], f"{problem} (it has {', '.join(map(str, cells))})")


def _refuse(table: pd.DataFrame, bad: pd.Series, reason: str, **columns: pd.Series) -> None:
    """Raise BadRowError at the first bad row, with the `where` of the index. With more `columns`,
    the reason is a template that names theirs and the row's.
    """
    for at in bad.to_numpy().nonzero()[0][:1]:
        known = {**table.iloc[at], **{name: column.iloc[at] for name, column in columns.items()}}
        where = str(table.index[at])
        raise BadRowError(where, reason.format(**known) if columns else reason)


def _texts(
    cells: pd.DataFrame, column: str, longest: int = 0, can_be_empty: bool = False
) -> list[str]:
    """The texts of a column; summaries, which have a `longest`, without outer spaces.

    Raises BadRowError, with the way out, where a cell is null, no text, empty, or too long.
    """
    values = cells[column]
    mend = EMPTY if can_be_empty else FILL
    _refuse(cells, values.isna(), f"column {column} is null: {mend}")
    for where, value in zip(map(str, cells.index), values, strict=True):
        if not isinstance(value, str):
            mend = "write it as text, or name another column (outputs.summary, .post, .reference)"
            raise BadRowError(where, f"column {column} is of type {type(value).__name__}: {mend}")
        text_of(where, {column: value}, column)  # refuses half characters
        if longest and len(value) > longest:
            size = f"column {column} has {len(value):,} characters, more than {longest:,}"
            mend = "name the column of the summaries, SET=outputs.summary=..., or shorten it"
            raise BadRowError(where, f"{size}: {mend}")
    texts = values.str.strip()
    if not can_be_empty:
        _refuse(cells, texts == "", f"column {column} is empty: {FILL}")
    return list(texts if longest else values)


def _named(cells: pd.DataFrame, column: str, otherwise: Sequence[str]) -> list[str]:
    """A column as names; where a cell is missing or empty, another name."""
    values = cells[column] if column in cells else [None] * len(cells)
    return [
        text_of(
            where, {column: other if value in (None, "") or value != value else str(value)}, column
        )
        for where, value, other in zip(cells.index, values, otherwise, strict=True)
    ]


def _queries(cells: pd.DataFrame, outputs: Outputs) -> list[str]:
    """The posts as the judge is shown them."""
    if outputs.post not in cells:
        return _texts(cells, QUERY)
    posts = _texts(cells, outputs.post)
    if not {"title", "subreddit"} <= {*cells.columns}:
        return posts
    known = cells.fillna({"title": "", "subreddit": ""})
    columns = [_texts(known, name, can_be_empty=True) for name in ("subreddit", "title")]
    keys = ("subreddit", "title", "post")
    rows = zip(*columns, posts, strict=True)
    return [format_post(dict(zip(keys, row, strict=True))) for row in rows]


def _labels(cells: pd.DataFrame, outputs: Outputs) -> list[bool | None]:
    """What a column of labels means."""
    if not outputs.label:
        return [None] * len(cells)
    words = cells[outputs.label].map(lambda label: str(label).strip().lower())
    mend = "write 1 where the summary is preferred, 0 where the reference is, else nothing"
    problem = f"column {outputs.label} is {{word!r}}: {mend}"
    _refuse(cells, ~words.isin([*LABELS]), problem, word=words)
    return [LABELS[word] for word in words]


def check_table(table: pd.DataFrame, outputs: Outputs) -> None:
    """Give every system the `name` of its file. Raise UserError where two systems would share one,
    a post has two summaries of a system, or systems were given different posts.
    """
    table["name"] = table["system"].map(file_name)

    def first(keys: list[str], column: str) -> pd.Series:
        return table.groupby(keys, sort=False)[column].transform("first")

    other, place = first(["name"], "system"), first(["name", "id"], "where")
    like = "system {system!r} reads like {other!r}: rename it"
    _refuse(table, table["system"] != other, like, other=other)
    twice = "post {id} of system {system} stands at {place} too: drop one"
    _refuse(table, table.duplicated(["name", "id"]), twice, place=place)
    place = first(["id"], "where")
    for column, what in (("query", "post"), ("reference", "reference")):
        differs = table[column].notna() & (table[column] != first(["id"], column))
        two = f"the {what} of id {{id}} differs from that at {{place}}: all systems need the same"
        _refuse(table, differs, two, place=place)


# -- systems ---------------------------------------------------------------------------------------


def has_references(table: pd.DataFrame) -> bool:
    """Whether the files have references; else one of the systems takes their place."""
    return not table["reference"].isna().all()


def compared(table: pd.DataFrame, outputs: Outputs) -> pd.DataFrame:
    """The summaries that are judged, each beside its file's reference or a system's summary.

    Raises UserError where there is neither, or none for a post, or a system is called `reference`.
    """
    others = table
    if not has_references(table):
        place, names = file_name(outputs.reference), list(table["name"].unique())
        if place not in names:
            raise UserError(
                f"{outputs.file} has no column {outputs.reference} and no system of that name: name"
                " what to compare with, a column or a system: SET=outputs.reference=..."
                f" (systems: {', '.join(names)})"
            )
        references = table[table["name"] == place].set_index("id")["summary"]
        others = table[table["name"] != place]
        others = others.assign(reference=others["id"].map(references))
    if others.empty:
        raise UserError(f"{outputs.file} has one system, {outputs.reference}: nothing to compare")
    taken = f"a system is called {TAKEN}, as what it is compared with: rename it"
    _refuse(others, others["name"] == TAKEN, taken)
    lacking = others["reference"].isna() | (others["reference"] == "")
    missing = "post {post} has no reference: add it, or drop the row"
    _refuse(others, lacking, missing, post=others["id"])
    return others


def read_systems(table: pd.DataFrame, outputs: Outputs, count: int) -> dict[str, list[Row]]:
    """The rows of each system about the first `count` posts, in the order of the files; all of them
    if it is 0. Systems are compared on the posts that all of them have.

    Raises UserError where there is no such post, and where no label is left.
    """
    posts = list(dict.fromkeys(table["id"]))
    if count > len(posts):
        raise UserError(f"eval.posts is {count} but there are {len(posts)} posts")
    others, kept = compared(table, outputs), posts[: count or len(posts)]
    unknown = dict.fromkeys(("tokens", "reference_tokens", "has_eos", "score", "reference_score"))
    systems: dict[str, list[Row]] = {str(name): [] for name in others["name"]}
    for row in others[others["id"].isin(kept)].to_dict("records"):
        known = {key: row[key] for key in ("id", "query", "reference", "summary")}
        label = {} if row["label"] is None else {"label": row["label"]}
        systems[row["name"]].append(known | unknown | label)
    ids = {name: {row["id"] for row in rows} for name, rows in systems.items()}
    if not set.intersection(*ids.values()):
        pairs = (
            f" ({a} and {b} share none)" for a, b in combinations(ids, 2) if not ids[a] & ids[b]
        )
        raise UserError(
            f"{outputs.file}: no post has a summary of every system{next(pairs, '')}: give all"
            " systems the same posts (SET=outputs.id=... names the column), or raise eval.posts"
        )
    if outputs.label and not any("label" in row for rows in systems.values() for row in rows):
        problem = f"{outputs.file}: column {outputs.label} has no label"
        raise UserError(f"{problem}: fill it, raise eval.posts, or leave out outputs.label")
    return systems


def describe(rows: Sequence[Row]) -> dict[str, float | None]:
    """Means over a system's posts; None for what only the model that wrote them could say."""
    unknown: dict[str, float | None] = dict.fromkeys(
        ("tokens", "score", "reference_score", "eos_rate")
    )
    words = {"words": mean_words(row["summary"] for row in rows), "posts": len(rows)}
    return unknown | words | text_measures(rows)


def main(argv: list[str] | None = None) -> None:
    """Command line of the stage."""
    run_stage("summaries", take_outputs, argv, "summaries that exist already, for a judge")


if __name__ == "__main__":
    main()
