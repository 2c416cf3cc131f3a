"""Summaries that exist already (`make judge INPUT=...`): the stage `summaries` of such a run.

    python -m eval.outputs --preset outputs --set outputs.file=outputs.jsonl

reads JSONL, CSV or Parquet, a folder of such files, the summaries of a run, or comparisons in their
published schema, and puts each system's summaries where those of a policy are looked for. So the
judge, its controls, the win rates and the pages are those of every run.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from eval.judges.protocol import Row
from eval.rates.length_control import word_count
from eval.rates.simple_judges import measured
from stages.finished import OUTPUT_FILES, output_files
from stages.posts.bad_rows import BadRowError
from stages.posts.readers import check_comparison, format_post, text_of
from stages.posts.tables import parsed_rows
from stages.posts.text_metrics import text_measures
from stages.running.kept import write_rows
from stages.running.start import run_stage
from stages.runs import open_stage
from stages.settings.config import Config, Outputs, UserError
from stages.settings.outputs import LONGEST_NAME, file_name

QUERY = "query"  # the column of a prompt that is shown as it is
REFERENCE = "ref"  # the reference's policy in published comparisons
TAKEN = "reference"  # on every page: no system may be called so
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


def take_outputs(config: Config) -> None:
    """Run the stage. Raises UserError, with file and line, for what cannot be judged."""
    with open_stage(config, "summaries") as run:
        systems = first_posts(read_outputs(config.outputs), config.eval.posts)
        check_shared_posts(config.outputs.file, systems)
        if config.outputs.label and not _labelled(systems):
            raise UserError(
                f"eval.posts={config.eval.posts} leaves no row with a label in column"
                f" {config.outputs.label}: raise it, or leave out outputs.label"
            )
        references = {row["id"]: row["reference"] for rows in systems.values() for row in rows}
        for name, rows in systems.items():
            write_rows(run, f"{name}.jsonl", rows)
        run.finish(
            {
                "posts": len(references),
                "policies": {name: describe(rows) for name, rows in systems.items()},
                "reference_tokens": None,
                "reference_words": _mean_words(list(references.values())),
            }
        )


def read_outputs(outputs: Outputs) -> dict[str, list[Row]]:
    """For each system its rows, in the files' order, as the stage `summaries` writes them.

    Raises UserError, with file and line, for a row that cannot be judged.
    """
    paths = output_files(outputs.file)
    if not paths:
        kinds = ", ".join(OUTPUT_FILES)
        raise UserError(f"{outputs.file}: no file of summaries ({kinds}) there: correct INPUT=")
    found: list[Output] = []
    columns: dict[str, None] = {}
    for path in paths:
        for where, raw in parsed_rows(path):
            for row in flattened(where, raw, outputs):
                columns |= dict.fromkeys(row)
                found += outputs_of(where, path.stem, row, outputs)
    if not found:
        raise UserError(f"{outputs.file} holds no summaries: give at least one row")
    systems = by_system(found)
    check_posts(found)
    rows = with_references(systems, outputs)
    if outputs.label:
        _check_labels(rows, outputs, list(columns))
    return rows


def _check_labels(
    systems: Mapping[str, Sequence[Row]], outputs: Outputs, columns: Sequence[str]
) -> None:
    """Refuse a column of labels that is missing or empty now, before anything is paid."""
    mend = "correct SET=outputs.label=... or leave it out"
    if outputs.label not in columns:
        has = ", ".join(map(str, columns))
        raise UserError(f"{outputs.file}: no column {outputs.label}: {mend} (it has {has})")
    if not _labelled(systems):
        raise UserError(
            f"{outputs.file}: column {outputs.label} has no label beside ties and empty cells, on"
            f" which a judge could be calibrated: fill it, or {mend}"
        )


def _labelled(systems: Mapping[str, Sequence[Row]]) -> bool:
    return any("label" in row for rows in systems.values() for row in rows)


def flattened(where: str, row: Row, outputs: Outputs) -> Iterator[Row]:
    """A row as it is; a published comparison as the row of the summary beside the reference.

    A comparison without a reference is left out. Its `choice` says whether the summary was chosen.
    """
    if not {"info", "summaries", "choice"} <= row.keys():
        yield row
        return
    check_comparison(where, row)
    policies = [one["policy"] for one in row["summaries"]]
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


def outputs_of(where: str, stem: str, row: Row, outputs: Outputs) -> list[Output]:
    """The summaries of one row. Raises BadRowError for a column that is missing or no text."""
    query = _query(where, row, outputs)
    digest = hashlib.sha256(query.encode()).hexdigest()[:12]
    reference = None
    if outputs.reference in row:
        reference = text_of(where, row, outputs.reference).strip()
        if not reference:
            raise BadRowError(where, f"column {outputs.reference} is empty: fill it")
    columns = outputs.summary_columns
    found = []
    for column in columns:
        system = _named(row, outputs.system, stem) if len(columns) == 1 else column
        found.append(
            Output(
                where=where,
                system=system,
                post_id=_named(row, outputs.id, digest),
                query=query,
                summary=_text(where, row, column, "outputs.summary").strip(),
                reference=reference,
                label=_label(where, row, outputs.label),
            )
        )
    return found


def _named(row: Row, column: str, otherwise: str) -> str:
    given = row.get(column)
    return otherwise if given in (None, "") else str(given)


def _query(where: str, row: Row, outputs: Outputs) -> str:
    """The post as the judge is shown it."""
    if outputs.post not in row and QUERY in row:
        return text_of(where, row, QUERY)
    post = _text(where, row, outputs.post, "outputs.post")
    if not post.strip():
        raise BadRowError(where, f"column {outputs.post} is empty: fill it")
    if not {"title", "subreddit"} <= row.keys():
        return post
    title, subreddit = (text_of(where, row, name) for name in ("title", "subreddit"))
    return format_post({"subreddit": subreddit, "title": title, "post": post})


def _text(where: str, row: Row, column: str, setting: str) -> str:
    if column not in row:
        has = ", ".join(map(str, row))
        raise BadRowError(where, f"no column {column}: name it, SET={setting}=... (it has {has})")
    return text_of(where, row, column)


def _label(where: str, row: Row, column: str) -> bool | None:
    if not column:
        return None
    word = str(row.get(column, "")).strip().lower()
    if word not in LABELS:
        taken = {
            meaning: ", ".join(one or "an empty cell" for one in LABELS if LABELS[one] is meaning)
            for meaning in (True, False, None)
        }
        raise BadRowError(
            where,
            f"column {column} is {word!r}: correct it to one of {taken[True]} (the summary is"
            f" preferred); {taken[False]} (the reference is); {taken[None]} (neither)",
        )
    return LABELS[word]


def by_system(found: Sequence[Output]) -> dict[str, dict[str, Output]]:
    """System -> post id -> output; systems are named as their files will be.

    Raises UserError where a post stands twice, and where two systems would share a file.
    """
    systems: dict[str, dict[str, Output]] = {}
    originals: dict[str, str] = {}
    for one in found:
        if len(one.system) > LONGEST_NAME:
            raise UserError(
                f"{one.where}: the system's name has {len(one.system)} characters"
                f" ({one.system[:20]!r}...): shorten it to at most {LONGEST_NAME}"
                " (SET=outputs.system=... names its column)"
            )
        name = file_name(one.system)
        other = originals.setdefault(name, one.system)
        if other != one.system:
            raise UserError(f"{one.where}: system {one.system!r} reads like {other!r}: rename it")
        posts = systems.setdefault(name, {})
        if one.post_id in posts:
            first = posts[one.post_id].where
            raise UserError(
                f"{one.where}: post {one.post_id} of system {one.system} stands at {first} too:"
                " drop one (SET=outputs.id=, outputs.system= name the columns)"
            )
        posts[one.post_id] = one
    return systems


def check_posts(found: Sequence[Output]) -> None:
    """Raise UserError unless all systems were given the same post under the same id."""
    first: dict[str, Output] = {}
    for one in found:
        known = first.setdefault(one.post_id, one)
        if (known.query, known.reference) != (one.query, one.reference):
            what = "post" if known.query != one.query else "reference"
            raise UserError(
                f"{one.where}: the {what} of id {one.post_id} differs from that at {known.where}:"
                " all systems must have been given the same"
            )


def with_references(
    systems: Mapping[str, Mapping[str, Output]], outputs: Outputs
) -> dict[str, list[Row]]:
    """The rows of each system: against its file's references, or against one of the systems.

    Raises UserError where there is neither, where a post has no reference, and where a system
    beside the references is called so itself.
    """
    of_posts = {}
    if not any(one.reference for posts in systems.values() for one in posts.values()):
        if outputs.reference not in systems:
            raise UserError(
                f"{outputs.file} has no column {outputs.reference} and no system of that name:"
                " name what to compare with, a column or a system: SET=outputs.reference=..."
                f" (systems: {', '.join(systems)})"
            )
        of_posts = {key: one.summary for key, one in systems[outputs.reference].items()}
    found = {}
    for name, posts in systems.items():
        if of_posts and name == outputs.reference:
            continue
        found[name] = [_row(one, of_posts.get(key, one.reference)) for key, one in posts.items()]
    if not found:
        raise UserError(f"{outputs.file} has one system, {outputs.reference}: nothing to compare")
    if TAKEN in found:
        where = next(iter(systems[TAKEN].values())).where
        raise UserError(
            f"{where}: a system is called {TAKEN}, as what it is compared with: rename it, or"
            f" compare with it (SET=outputs.reference={TAKEN}, in files without such a column)"
        )
    return found


def _row(one: Output, reference: str | None) -> Row:
    if not reference:
        raise UserError(
            f"{one.where}: post {one.post_id} has no reference: add it, or drop the row"
        )
    row = {
        **{"id": one.post_id, "query": one.query, "reference": reference, "summary": one.summary},
        **dict.fromkeys(("tokens", "reference_tokens", "has_eos", "score", "reference_score")),
    }
    return row if one.label is None else row | {"label": one.label}


def first_posts(systems: Mapping[str, list[Row]], count: int) -> dict[str, list[Row]]:
    """The rows about the first `count` posts, in the order of the files; all of them if it is 0."""
    posts = list(dict.fromkeys(row["id"] for rows in systems.values() for row in rows))
    if count > len(posts):
        raise UserError(f"eval.posts is {count} but there are {len(posts)} posts")
    kept = set(posts[: count or len(posts)])
    found = {name: [row for row in rows if row["id"] in kept] for name, rows in systems.items()}
    lacking = [name for name, rows in found.items() if not rows]
    if lacking:
        raise UserError(f"eval.posts={count} leaves no post of {', '.join(lacking)}: raise it")
    return found


def check_shared_posts(source: str, systems: Mapping[str, Sequence[Row]]) -> None:
    """Raise UserError unless some posts have a summary of every system.

    Systems are compared on these posts alone.
    """
    posts = {name: {row["id"] for row in rows} for name, rows in systems.items()}
    if set.intersection(*posts.values()):
        return
    apart = [pair for pair in combinations(posts, 2) if not posts[pair[0]] & posts[pair[1]]]
    said = f"systems {apart[0][0]} and {apart[0][1]} share no post" if apart else ""
    raise UserError(
        f"{source}: {said or 'no post has a summary of every system'}: give all systems the same"
        " posts (SET=outputs.id=... names the column), or judge each by an INPUT= of its own"
    )


def labelled_rows(systems: Mapping[str, Sequence[Row]]) -> list[Row]:
    """The rows that people have judged too, as the calibration takes them."""
    return [
        {
            "id": f"{name}/{row['id']}",
            "post": row["id"],
            **{key: row[key] for key in ("query", "summary", "reference", "label")},
            **measured(row["query"], row["summary"], row["reference"]),
            "with_reference": True,
            "family": name,
            "strength": None,
        }
        for name, rows in systems.items()
        for row in rows
        if "label" in row
    ]


def describe(rows: Sequence[Row]) -> dict[str, float | None]:
    """Means over a system's posts; None for what only the model that wrote them could say."""
    unknown: dict[str, float | None] = dict.fromkeys(
        ("tokens", "score", "reference_score", "eos_rate")
    )
    words = {"words": _mean_words([row["summary"] for row in rows]), "posts": len(rows)}
    return unknown | words | text_measures(rows)


def _mean_words(texts: Sequence[str]) -> float:
    return sum(word_count(text) for text in texts) / len(texts)


def main(argv: list[str] | None = None) -> None:
    """Command line of the stage."""
    run_stage("summaries", take_outputs, argv, "summaries that exist already, for a judge")


if __name__ == "__main__":
    main()
