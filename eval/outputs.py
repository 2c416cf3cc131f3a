"""Summaries that exist already (`make judge INPUT=...`): the stage `summaries` of such a run.

    python -m eval.outputs --preset outputs --set outputs.file=outputs.jsonl

reads JSONL, CSV or Parquet, a folder of such files, the summaries of a run, or comparisons in their
published schema, and puts each system's summaries where those of a policy are looked for. So the
judge, its controls, the win rates and the pages are those of every run.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from eval.judges.protocol import Row
from eval.output_rows import Output, check_texts, flattened, outputs_of
from eval.rates.length_control import word_count
from eval.rates.simple_judges import measured
from stages.finished import OUTPUT_FILES, output_files
from stages.posts.tables import parsed_rows
from stages.posts.text_metrics import text_measures
from stages.running.progress import folded
from stages.running.start import run_stage
from stages.runs import open_stage, write_rows
from stages.settings.config import Config, Outputs, UserError
from stages.settings.outputs import LONGEST_NAME, file_name

TAKEN = "reference"  # on every page: no system may be called so


def take_outputs(config: Config) -> None:
    """Run the stage. Raises UserError, with file and line, for what cannot be judged."""
    with open_stage(config, "summaries") as run:
        found, columns = read_rows(config.outputs)
        systems = first_posts(of_systems(found, columns, config.outputs), config.eval.posts)
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
                **given_names(found),
                **reference_system(found, config.outputs),
            }
        )
    if line := said_of_empty(systems):
        print(line)


def given_names(found: Sequence[Output]) -> dict[str, Any]:
    """`given_names`: the systems that are not called as their file called them, with that name.

    Empty where there is none.
    """
    names = {file_name(one.system): one.system for one in found}
    other = {safe: given for safe, given in names.items() if safe != given}
    return {"given_names": other} if other else {}


def reference_system(found: Sequence[Output], outputs: Outputs) -> dict[str, str]:
    """The system that takes the place of the reference; empty where the file has references."""
    columns = outputs.summary_columns
    is_column = len(columns) > 1 and outputs.reference in columns
    taken = is_column or not any(one.reference for one in found)
    return {"reference_system": outputs.reference} if taken else {}


def said_of_empty(systems: Mapping[str, Sequence[Row]]) -> str:
    """How many summaries of each system are empty, in a line of text; empty if none is."""
    empty = {name: sum(not row["summary"] for row in rows) for name, rows in systems.items()}
    said = ", ".join(
        f"{count} of {len(systems[name])} of {name}" for name, count in empty.items() if count
    )
    return said and "\n".join(folded(f"empty summaries, judged as they are: {said}"))


def read_outputs(outputs: Outputs) -> dict[str, list[Row]]:
    """For each system its rows, in the files' order, as the stage `summaries` writes them.

    Raises UserError, with file and line, for a row that cannot be judged.
    """
    return of_systems(*read_rows(outputs), outputs)


def read_rows(outputs: Outputs) -> tuple[list[Output], list[str]]:
    """Every summary of the files, and the columns that there are. Raises UserError."""
    paths = output_files(outputs.file)
    if not paths:
        kinds = ", ".join(OUTPUT_FILES)
        raise UserError(f"{outputs.file}: no file of summaries ({kinds}) there: correct INPUT=")
    found: list[Output] = []
    columns: dict[str, None] = {}
    for path in paths:
        before = len(found)
        for where, raw in parsed_rows(path):
            for row in flattened(where, raw, outputs):
                columns |= dict.fromkeys(row)
                found += outputs_of(where, path.stem, row, outputs)
        check_texts(path, found[before:], outputs.summary)
    if not found:
        raise UserError(f"{outputs.file} holds no summaries: give at least one row")
    return found, list(columns)


def of_systems(
    found: Sequence[Output], columns: Sequence[str], outputs: Outputs
) -> dict[str, list[Row]]:
    """The rows of each system, against their references. Raises UserError for what differs."""
    systems = by_system(found)
    check_posts(found)
    rows = with_references(systems, outputs)
    if outputs.label:
        _check_labels(rows, outputs, columns)
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
    rows = [one for posts in systems.values() for one in posts.values()]
    place = file_name(outputs.reference)
    is_system = bool(reference_system(rows, outputs))
    if not any(one.reference for one in rows):
        if place not in systems:
            raise UserError(
                f"{outputs.file} has no column {outputs.reference} and no system of that name:"
                " name what to compare with, a column or a system: SET=outputs.reference=..."
                f" (systems: {', '.join(systems)})"
            )
        of_posts = {key: one.summary for key, one in systems[place].items()}
    found = {}
    for name, posts in systems.items():
        if is_system and name == place:
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
