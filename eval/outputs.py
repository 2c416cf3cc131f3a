"""Summaries that exist already (`make judge INPUT=...`): the stage `summaries` of such a run.

    python -m eval.outputs --preset outputs --set outputs.file=outputs.jsonl

reads JSONL, CSV or Parquet, a folder of such files, the summaries of a run, or comparisons in their
published schema, and puts each system's summaries where those of a policy are looked for. So the
judge, its controls, the win rates and the pages are those of every run.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from eval.judges.protocol import Row
from eval.output_rows import (
    Output,
    check_texts,
    flattened,
    merge_repeated,
    outputs_of,
    why_left_out,
)
from eval.rates.length_control import mean_words
from eval.rates.simple_judges import measured
from stages.driving.start import run_stage
from stages.posts.tables import parsed_rows
from stages.posts.text_metrics import text_measures
from stages.running.inputs import OUTPUT_FILES, output_files
from stages.running.progress import folded
from stages.runs import open_stage, write_rows
from stages.settings.config import Config, Outputs, UserError
from stages.settings.outputs import LONGEST_NAME, file_name

MOST_SYSTEMS = 200
TAKEN = "reference"  # on every page: no system may be called so


def take_outputs(config: Config) -> None:
    """Run the stage. Raises UserError, with file and line, for what cannot be judged."""
    with open_stage(config, "summaries") as run:
        outputs, columns = read_rows(config.outputs)
        systems = first_posts(of_systems(outputs, columns, config.outputs), config.eval.posts)
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
                "reference_words": mean_words(references.values()),
                **given_names(outputs),
                **reference_system(outputs, config.outputs),
            }
        )
    if line := empty_summaries(systems):
        print(line)


def given_names(outputs: Sequence[Output]) -> dict[str, Any]:
    """`given_names`: the systems that are not called as their file called them, with that name.

    Empty where there is none.
    """
    names = {file_name(output.system): output.system for output in outputs}
    other = {safe: given for safe, given in names.items() if safe != given}
    return {"given_names": other} if other else {}


def reference_system(outputs: Sequence[Output], settings: Outputs) -> dict[str, str]:
    """The system that takes the place of the reference; empty where the file has references."""
    columns = settings.summary_columns
    is_column = len(columns) > 1 and settings.reference in columns
    taken = is_column or not any(output.reference for output in outputs)
    return {"reference_system": settings.reference} if taken else {}


def empty_summaries(systems: Mapping[str, Sequence[Row]]) -> str:
    """How many summaries of each system are empty, in a line of text; empty if none is."""
    empty = {name: sum(not row["summary"] for row in rows) for name, rows in systems.items()}
    counts = ", ".join(
        f"{count} of {len(systems[name])} of {name}" for name, count in empty.items() if count
    )
    return counts and "\n".join(folded(f"empty summaries, judged as they are: {counts}"))


def read_rows(settings: Outputs) -> tuple[list[Output], list[str]]:
    """Every summary of the files, each once, and the columns that there are.

    Prints what was left out or merged. Raises UserError.
    """
    paths = output_files(settings.file)
    if not paths:
        kinds = ", ".join(OUTPUT_FILES)
        raise UserError(f"{settings.file}: no file of summaries ({kinds}) there: correct INPUT=")
    outputs: list[Output] = []
    columns: dict[str, None] = {}
    left_out: Counter[str] = Counter()
    for path in paths:
        before = len(outputs)
        for where, raw in parsed_rows(path):
            rows = list(flattened(where, raw, settings))
            left_out.update([] if rows else [why_left_out(raw)])
            for row in rows:
                columns |= dict.fromkeys(row)
                outputs += outputs_of(where, path.stem, row, settings)
        check_texts(path, outputs[before:], settings.summary)
    different = merge_repeated(outputs)
    if line := _not_all(left_out, len(outputs) - len(different)):
        print(line)
    if not outputs:
        raise UserError(f"{settings.file} holds no summaries: give at least one row")
    return different, list(columns)


def _not_all(left_out: Mapping[str, int], merged: int) -> str:
    """How many rows of the files are left out or merged, in a line of text; empty if none is."""
    counts = [f"left out: {count:,} comparisons {why}" for why, count in left_out.items()]
    counts += [f"merged: {merged:,} rows that repeat a summary"] if merged else []
    return "\n".join(folded("; ".join(counts)))


def of_systems(
    outputs: Sequence[Output], columns: Sequence[str], settings: Outputs
) -> dict[str, list[Row]]:
    """The rows of each system, against their references. Raises UserError for what differs."""
    systems = by_system(outputs)
    if len(systems) > MOST_SYSTEMS:
        raise UserError(
            f"{settings.file} has {len(systems):,} systems, and all pairs of them are compared:"
            f" give at most {MOST_SYSTEMS} (SET=outputs.system=... names their column)"
        )
    check_posts(outputs)
    rows = with_references(systems, settings)
    if settings.label:
        _check_labels(rows, settings, columns)
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


def by_system(outputs: Sequence[Output]) -> dict[str, dict[str, Output]]:
    """System -> post id -> output; systems are named as their files will be.

    Raises UserError where a post has two summaries of one system, and where two systems would
    share a file.
    """
    systems: dict[str, dict[str, Output]] = {}
    originals: dict[str, str] = {}
    for output in outputs:
        where, system, post_id = output.where, output.system, output.post_id
        if len(system) > LONGEST_NAME:
            raise UserError(
                f"{where}: the system's name has {len(system)} characters ({system[:20]!r}...):"
                f" shorten it to at most {LONGEST_NAME} (SET=outputs.system=... names its column)"
            )
        name = file_name(system)
        other = originals.setdefault(name, system)
        if other != system:
            raise UserError(f"{where}: system {system!r} reads like {other!r}: rename it")
        posts = systems.setdefault(name, {})
        if post_id in posts:
            raise UserError(
                f"{where}: post {post_id} of system {system} stands at {posts[post_id].where} too:"
                " drop one (SET=outputs.id=, outputs.system= name the columns)"
            )
        posts[post_id] = output
    return systems


def check_posts(outputs: Sequence[Output]) -> None:
    """Raise UserError unless all systems were given the same post under the same id."""
    first: dict[str, Output] = {}
    for output in outputs:
        known = first.setdefault(output.post_id, output)
        if (known.query, known.reference) != (output.query, output.reference):
            what = "post" if known.query != output.query else "reference"
            raise UserError(
                f"{output.where}: the {what} of id {output.post_id} differs from that at"
                f" {known.where}: all systems must have been given the same"
            )


def with_references(
    systems: Mapping[str, Mapping[str, Output]], settings: Outputs
) -> dict[str, list[Row]]:
    """The rows of each system: against its file's references, or against one of the systems.

    Raises UserError where there is neither, where a post has no reference, and where a system
    beside the references is called so itself.
    """
    references: dict[str, str] = {}
    outputs = [output for posts in systems.values() for output in posts.values()]
    place = file_name(settings.reference)
    is_system = bool(reference_system(outputs, settings))
    if not any(output.reference for output in outputs):
        if place not in systems:
            raise UserError(
                f"{settings.file} has no column {settings.reference} and no system of that name:"
                " name what to compare with, a column or a system: SET=outputs.reference=..."
                f" (systems: {', '.join(systems)})"
            )
        references = {post: output.summary for post, output in systems[place].items()}
    rows = {
        name: [_row(output, references.get(post, output.reference)) for post, output in of.items()]
        for name, of in systems.items()
        if not (is_system and name == place)
    }
    if not rows:
        raise UserError(f"{settings.file} has one system, {settings.reference}: nothing to compare")
    if TAKEN in rows:
        where = next(iter(systems[TAKEN].values())).where
        raise UserError(
            f"{where}: a system is called {TAKEN}, as what it is compared with: rename it, or"
            f" compare with it (SET=outputs.reference={TAKEN}, in files without such a column)"
        )
    return rows


def _row(output: Output, reference: str | None) -> Row:
    where, _, post_id, query, summary, _, label = output
    if not reference:
        raise UserError(f"{where}: post {post_id} has no reference: add it, or drop the row")
    row = {
        **{"id": post_id, "query": query, "reference": reference, "summary": summary},
        **dict.fromkeys(("tokens", "reference_tokens", "has_eos", "score", "reference_score")),
    }
    return row if label is None else row | {"label": label}


def first_posts(systems: Mapping[str, list[Row]], count: int) -> dict[str, list[Row]]:
    """The rows about the first `count` posts, in the order of the files; all of them if it is 0."""
    posts = list(dict.fromkeys(row["id"] for rows in systems.values() for row in rows))
    if count > len(posts):
        raise UserError(f"eval.posts is {count} but there are {len(posts)} posts")
    kept = set(posts[: count or len(posts)])
    first = {name: [row for row in rows if row["id"] in kept] for name, rows in systems.items()}
    lacking = [name for name, rows in first.items() if not rows]
    if lacking:
        raise UserError(f"eval.posts={count} leaves no post of {', '.join(lacking)}: raise it")
    return first


def check_shared_posts(source: str, systems: Mapping[str, Sequence[Row]]) -> None:
    """Raise UserError unless some posts have a summary of every system.

    Systems are compared on these posts alone.
    """
    posts = {name: {row["id"] for row in rows} for name, rows in systems.items()}
    if set.intersection(*posts.values()):
        return
    apart = [pair for pair in combinations(posts, 2) if not posts[pair[0]] & posts[pair[1]]]
    problem = "no post has a summary of every system"
    if apart:
        problem = f"systems {apart[0][0]} and {apart[0][1]} share no post"
    raise UserError(
        f"{source}: {problem}: give all systems the same"
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
    words = {"words": mean_words(row["summary"] for row in rows), "posts": len(rows)}
    return unknown | words | text_measures(rows)


def main(argv: list[str] | None = None) -> None:
    """Command line of the stage."""
    run_stage("summaries", take_outputs, argv, "summaries that exist already, for a judge")


if __name__ == "__main__":
    main()
