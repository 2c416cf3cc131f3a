"""Reads the splits of the data from a folder, a file or the hub, and checks every row.

A folder contains `sft_train.jsonl`, ... (or other file types, see `tables.py`). Rows of the user's
own kinds are converted by `formats.py`; then every row must have one of the two schemas of
`schemas.py`. A bad row raises an error with file, line and field, or is skipped.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from stages.config.errors import UserError, first_line
from stages.config.sections import COMPARISONS, HUB, POSTS, PPO_TRAIN, USED_ROWS, Data
from stages.data.bad_rows import BadRowError, BadRows
from stages.data.formats import (
    check_ids,
    derive_missing_splits,
    to_openai_schema,
    training_split_of,
)
from stages.data.schemas import check_comparison, check_post
from stages.data.tables import LocatedRow, RawRow, parse_row, raw_rows
from stages.runs.hub import DISK_ERRORS, Fetched, Source, dataset_source, fetch
from stages.runs.user_files import split_file, unread_files

SPLITS = (*POSTS, *COMPARISONS)
# The files of a data set that are fetched: its card and its rows.
DATASET_CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
DATASET_ROWS = ("*.parquet", "*.jsonl", "*.json", "*.csv")
LONGEST_SHOWN_ID = 60  # characters of an id in a message
MOST_NAMES = 5  # names of files in a message


def read_source(
    data: Data,
    source: str,
    bad_rows: BadRows | None = None,
    needed_splits: Sequence[str] = SPLITS,
) -> dict[str, list[LocatedRow]]:
    """The checked rows of each split, from a folder, a file, or, for source `hub`, `datasets`.

    Missing splits are derived where that is possible (`derive_missing_splits`). `bad_rows` collects
    the rows that are skipped.
    Raises UserError if one of `needed_splits` is missing, if a split has no good row, and for a bad
    row that is not skipped.
    """
    given_splits = {
        split: read_split(data, source, split, bad_rows) for split in available_splits(data, source)
    }
    splits = derive_missing_splits(given_splits)
    for split in (*given_splits, *needed_splits):
        if split not in splits:
            raise _missing_split(source, split)
        if not splits[split]:
            reason = ""
            if bad_rows is not None and bad_rows.skipped:
                reason = f" ({bad_rows.skipped[0]['reason']})"
            raise UserError(
                f"{source}: split {split} is empty{reason}: give it at least one good row"
            )
    return splits


def _missing_split(source: str, split: str) -> UserError:
    add = "add it"
    if split == COMPARISONS[0]:
        add += ", or set reward.function, which needs no pairs"
    others = ""
    if unread_files(source):
        others = f" (other files there: {', '.join(unread_files(source)[:MOST_NAMES])})"
    return UserError(
        f"{source}: {split}.jsonl is missing (or .json, .parquet, .csv): {add}, or correct "
        f"DATA={others}"
    )


def describe_unread(source: str) -> list[str]:
    """A line that names the files of a folder that are not read, if there are any."""
    names = unread_files(source)
    if not names:
        return []
    shown = ", ".join(names[:MOST_NAMES])
    if len(names) > MOST_NAMES:
        shown += f" and {len(names) - MOST_NAMES} others"
    return [f"not read in {source}: {shown} (splits are called {', '.join((*SPLITS, PPO_TRAIN))})"]


def available_splits(data: Data, source: str) -> list[str]:
    """The splits that a source has.

    A folder has the splits that it has files for. A single file, or a hub source with only one data
    set, is one split: its first readable row tells whether these are pairs or posts.
    """
    is_hub = source == HUB
    if is_hub and data.sft_dataset and data.comparisons_dataset:
        return list(SPLITS)
    if not is_hub and not Path(source).is_file():
        return [split for split in (*SPLITS, PPO_TRAIN) if split_file(source, split) is not None]
    for where, raw in _raw_rows(data, source, COMPARISONS[0]):
        try:
            row = parse_row(where, raw)
        except BadRowError:
            continue
        return [training_split_of(row)]
    return [COMPARISONS[0]]


def read_split(
    data: Data, source: str, split: str, bad_rows: BadRows | None = None
) -> list[LocatedRow]:
    """The checked rows of one split. Raises UserError as `read_source` does."""
    bad_rows = bad_rows or BadRows(data.on_bad_row)
    rows: list[LocatedRow] = []
    ids: set[str] = set()
    for where, raw in _raw_rows(data, source, split):
        with bad_rows.catch(split):
            changes: Counter[str] = Counter()
            row = to_openai_schema(where, parse_row(where, raw), split, changes)
            if split in COMPARISONS:
                check_comparison(where, row)
            else:
                check_post(where, row, needs_summary=split in POSTS)

            # Summaries of held-out posts are stored and compared by the post's id.
            if split == POSTS[1]:
                if row["id"] in ids:
                    raise BadRowError(
                        where,
                        f"field id is {row['id'][:LONGEST_SHOWN_ID]!r}, as in an earlier row: "
                        "give each held-out post its own id",
                    )
                ids.add(row["id"])
            rows.append((where, row))
            bad_rows.changes.update(changes)
    check_ids(rows)
    return rows


def _raw_rows(data: Data, source: str, split: str) -> Iterator[tuple[str, RawRow]]:
    if source == HUB:
        return read_hub(data, split)
    file = split_file(source, split)
    if file is None:
        raise _missing_split(source, split)
    return raw_rows(file)


# -- the hub ---------------------------------------------------------------------------------------


def hub_sources(data: Data) -> tuple[Source, Source]:
    """Where the posts and the comparisons come from; if only one is set, both come from there."""
    posts = dataset_source("data.sft_dataset", data.sft_dataset)
    comparisons = dataset_source("data.comparisons_dataset", data.comparisons_dataset)
    if not data.sft_dataset:
        return comparisons, comparisons
    if not data.comparisons_dataset:
        return posts, posts
    return posts, comparisons


def fetch_rows(source: Source) -> Fetched:
    """The files of a data set: those in its configuration's folder if it has one, else all.

    Raises UserError as `fetch` does.
    """
    if source.configuration:
        fetched = fetch(source, (*DATASET_CARDS, f"{source.configuration}/*"))
        if (fetched.folder / source.configuration).is_dir():
            return fetched
    return fetch(source, (*DATASET_CARDS, *DATASET_ROWS))


def read_hub(data: Data, split: str) -> Iterator[LocatedRow]:
    """Yield each row of a split (`sft_train`, ...) after its place, `data set[part]:number`.

    Raises UserError for a data set that cannot be fetched or has no such configuration or split.
    """
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetsError

    disable_progress_bars()
    kind, part = split.split("_", 1)
    posts_source, comparisons_source = hub_sources(data)
    source = posts_source if kind == "sft" else comparisons_source

    # A configuration is a folder of the data set, or a name in its card.
    fetched = fetch_rows(source)
    configuration = source.configuration
    selection: dict[str, str | None] = {"name": configuration or None}
    if configuration and (fetched.folder / configuration).is_dir():
        selection = {"data_dir": configuration}
    try:
        rows = load_dataset(str(fetched.folder), split=part, **selection)
    except (OSError, RuntimeError, ValueError, DatasetsError) as error:
        # The outermost exception only says that something went wrong; the innermost says what.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, OSError) and cause.errno in DISK_ERRORS:
            raise cause from None
        raise UserError(
            f"{source.label}, split {part}, does not load: {first_line(cause)}: "
            "correct its files or the setting"
        ) from None

    is_sft_dataset = source.setting == "data.sft_dataset"
    name = data.sft_dataset if is_sft_dataset else data.comparisons_dataset
    for number, row in enumerate(rows, start=1):
        yield f"{name}[{part}]:{number}", dict(row)


# -- which rows are used ---------------------------------------------------------------------------


def subsample(data: Data, splits: Mapping[str, list[LocatedRow]]) -> dict[str, list[LocatedRow]]:
    """The rows of each split that the settings select, in their order.

    The selection depends only on the split, so that seeds and sizes are compared on the same rows.
    Raises UserError if a split has fewer rows than the settings ask for, or no post that is short
    enough. The optional split `ppo_train` may be missing.
    """
    used = dict(splits)

    # Long posts are left out before the draw.
    longest = data.max_post_characters
    if longest:
        for split in (*POSTS, PPO_TRAIN):
            if split not in used:
                continue
            used[split] = [
                (where, row) for where, row in used[split] if len(row["post"]) <= longest
            ]
            if not used[split]:
                raise UserError(
                    f"data.max_post_characters is {longest}, but all posts of {split} are longer: "
                    "raise it"
                )

    for split, rows in used.items():
        count = data.rows[split]
        if count > len(rows):
            raise UserError(
                f"data.{USED_ROWS[split]} asks for {count} rows of {split}, but there are "
                f"{len(rows)}: give at most that, or 0 for all"
            )
        if count:
            numbers = random.Random(split).sample(range(len(rows)), count)
            used[split] = [rows[number] for number in sorted(numbers)]
    return used
