"""Readers for the two real schemas, from files or from the hub; every row is checked.

Posts have the schema of `tldr_3_filtered` (id, subreddit, title, post, summary), comparisons that
of `openai/summarize_from_feedback` (info, summaries, choice, worker, batch, split, extra). They
come from a folder (`sft_train.jsonl`, ... or another ending), one file, or the hub. Rows of other
kinds are made rows of these by `formats.py`. A bad row is refused with file, line and field, or
skipped. Source: Huang et al. 2024, details 1 and 10, and the pages of the data sets.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.data import formats
from stages.data.bad_rows import BadRowError, BadRows
from stages.data.tables import READERS, parse_line, raw_rows
from stages.running.hub import ABOUT_THE_DISK, Fetched, fetch
from stages.running.inputs import Source, dataset_source
from stages.settings.checks import UserError, first_line
from stages.settings.sections import COMPARISONS, HUB, POSTS, PPO_TRAIN, USED_ROWS, Data

SPLITS = (*POSTS, *COMPARISONS)
CNNDM_BATCHES = ("batch0_cnndm", "cnndm0", "cnndm2")
CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
ROWS = ("*.parquet", "*.jsonl", "*.json", "*.csv")
# Data set, without its configuration and revision -> split -> rows. The test split of the posts
# (6,553 rows) is read by no stage.
KNOWN_ROWS = {
    "vwxyzjn/summarize_from_feedback_tldr_3_filtered": {
        "sft_train": 116_722,
        "sft_validation": 6_447,
    },
    "openai/summarize_from_feedback": {
        "comparisons_train": 92_858,
        "comparisons_validation": 86_086,  # 2,284 of them about news articles
    },
}

Located = tuple[str, dict[str, Any]]  # "file:line" and the row


def read_source(
    data: Data, folder: str, bad: BadRows | None = None, needed: Sequence[str] = SPLITS
) -> dict[str, list[Located]]:
    """Each split's checked rows, from a folder, a file, or, for source `hub`, through `datasets`.

    Splits that are not `needed` are left out where they are not there. `bad` notes the rows that
    are skipped. Raises UserError for a missing file and for a bad row that is not skipped.
    """
    located = {split: read_split(data, folder, split, bad) for split in splits_in(data, folder)}
    every = formats.derive(located)
    for split in (*located, *needed):
        if split not in every:
            pairs = ", or give reward.function, which needs none" if split == COMPARISONS[0] else ""
            first = f"{folder}: {split}.jsonl is missing (or .parquet, .csv)"
            raise UserError(f"{first}: add it{pairs}, or correct DATA=")
        if not every[split]:
            why = f" ({bad.skipped[0]['reason']})" if bad and bad.skipped else ""
            raise UserError(f"{folder}: split {split} is empty{why}: give it at least one good row")
    return every


def splits_in(data: Data, folder: str) -> list[str]:
    """The splits of a source. A file or data set alone is one, which its first row tells."""
    if folder == HUB and data.sft_dataset and data.comparisons_dataset:
        return [*SPLITS]
    if folder != HUB and not Path(folder).is_file():
        return [split for split in (*SPLITS, PPO_TRAIN) if _there(folder, split)]
    for where, row in _raw(data, folder, COMPARISONS[0]):
        with suppress(BadRowError):
            return [formats.split_of(parse_line(where, row) if isinstance(row, bytes) else row)]
    return [COMPARISONS[0]]


def read_split(data: Data, folder: str, split: str, bad: BadRows | None = None) -> list[Located]:
    """The checked rows of one split. Raises UserError as `read_source` does."""
    bad = bad or BadRows(data.on_bad_row)
    located, ids = [], set[str]()
    for where, row in _raw(data, folder, split):
        with bad.of(split):
            given_row = parse_line(where, row) if isinstance(row, bytes) else row
            checked = formats.as_known(where, given_row, split)
            if split in COMPARISONS:
                check_comparison(where, checked)
            else:
                check_post(where, checked, with_summary=split in POSTS)
            if split == POSTS[1]:  # summaries are told apart by it
                if checked["id"] in ids:
                    fault = f"field id is {checked['id'][:60]!r}, as in an earlier row"
                    raise BadRowError(where, f"{fault}: give each held-out post its own id")
                ids.add(checked["id"])
            located.append((where, checked))
    return located


def _raw(data: Data, folder: str, split: str) -> Iterator[tuple[str, Any]]:
    return read_hub(data, split) if folder == HUB else raw_rows(*_there(folder, split))


def _there(source: str, split: str) -> list[Path]:
    """The file of a split, if there is one."""
    path = Path(source)
    if path.is_file():
        return [path]
    files = (path / f"{split}{ending}" for ending in READERS)
    return [file for file in files if file.is_file()][:1]


def sources_of(data: Data) -> tuple[Source, Source]:
    """Where the posts and the comparisons come from: one of the two may be all that is named."""
    posts = dataset_source("data.sft_dataset", data.sft_dataset)
    pairs = dataset_source("data.comparisons_dataset", data.comparisons_dataset)
    return posts if data.sft_dataset else pairs, pairs if data.comparisons_dataset else posts


def fetch_rows(source: Source) -> Fetched:
    """The files of a data set: of its configuration's folder, if it has one, else all.

    Raises UserError as `fetch` does.
    """
    if source.configuration:
        fetched = fetch(source, (*CARDS, f"{source.configuration}/*"))
        if (fetched.folder / source.configuration).is_dir():
            return fetched
    return fetch(source, (*CARDS, *ROWS))


def read_hub(data: Data, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one split (`sft_train`, ...), each with where it stands.

    Raises UserError for a data set that cannot be fetched or has no such configuration or split.
    """
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetsError

    disable_progress_bars()
    kind, part = split.split("_", 1)
    source = sources_of(data)[kind != "sft"]
    fetched = fetch_rows(source)
    name = source.configuration
    has_folder = bool(name) and (fetched.folder / name).is_dir()
    chosen = {"data_dir": name} if has_folder else {"name": name or None}
    try:
        loaded = load_dataset(str(fetched.folder), split=part, **chosen)
    except (OSError, RuntimeError, ValueError, DatasetsError) as error:
        deepest: BaseException = error  # the one on top says only that something was wrong
        while deepest.__cause__ is not None:
            deepest = deepest.__cause__
        if isinstance(deepest, OSError) and deepest.errno in ABOUT_THE_DISK:
            raise deepest from None
        reason = f"{source.label}, split {part}, does not load: {first_line(deepest)}"
        raise UserError(f"{reason}: correct its files or the setting") from None
    text = getattr(data, source.setting.removeprefix("data."))
    for number, row in enumerate(loaded, start=1):
        yield f"{text}[{part}]:{number}", dict(row)


def check_post(where: str, row: dict[str, Any], with_summary: bool = True) -> None:
    """Raise BadRowError unless the row has the schema of `tldr_3_filtered`.

    The posts of split `ppo_train` need no summary.
    """
    for name in ("id", "subreddit", "title", "post", *(("summary",) if with_summary else ())):
        _require_type(where, row, name, str)
    if with_summary and not row["summary"].strip():
        raise BadRowError(where, "field summary is empty: drop the row or fill it")
    if not with_summary and row.get("summary") is not None:
        _require_type(where, row, "summary", str)


def check_comparison(where: str, row: dict[str, Any]) -> None:
    """Raise BadRowError unless the row has the schema of `comparisons`.

    A summary may be empty, and both may be equal: policies did write nothing, people compared it,
    and the published data keep such rows.
    """
    of_info = ("id", "article") if is_cnndm(row) else ("id", "subreddit", "title", "post")
    info, wanted = row.get("info"), ("info", "summaries", "choice", "batch", "split")
    lacking = [name for name in wanted if row.get(name) is None]
    if isinstance(info, dict):
        lacking += [f"info.{name}" for name in of_info if info.get(name) is None]
    if lacking:
        raise BadRowError(where, f"no field {', '.join(lacking)}")
    for name, kind in (("info", dict), ("summaries", list), ("batch", str), ("split", str)):
        _require_type(where, row, name, kind)
    for name in of_info:
        _require_type(where, row["info"], name, str, "info.")
    if len(row["summaries"]) != 2:
        raise BadRowError(where, f"field summaries has {len(row['summaries'])} entries, not 2")
    for index, summary in enumerate(row["summaries"]):
        if not isinstance(summary, dict):
            raise BadRowError(where, f"field summaries[{index}] is not an object")
        for name in ("text", "policy"):
            _require_type(where, summary, name, str, f"summaries[{index}].")
    if type(row.get("choice")) is not int or row["choice"] not in (0, 1):  # nor True, nor 1.0
        raise BadRowError(where, f"field choice is {row.get('choice')!r}: it must be 0 or 1")
    extra = row.get("extra") or {}
    if not isinstance(extra, dict):
        raise BadRowError(where, f"field extra is {extra!r}: it must be an object or null")
    confidence = extra.get("confidence")
    if confidence is not None and (type(confidence) is not int or not 1 <= confidence <= 9):
        raise BadRowError(
            where, f"field extra.confidence is {confidence!r}: it must be 1 to 9, 5 a tie, or null"
        )


def _require_type(where: str, row: dict[str, Any], name: str, kind: type, prefix: str = "") -> None:
    if row.get(name) is None:
        raise BadRowError(where, f"no field {prefix}{name}")
    if not isinstance(row[name], kind):
        actual = type(row[name]).__name__
        raise BadRowError(where, f"field {prefix}{name} is of type {actual}, not {kind.__name__}")
    if isinstance(row[name], str) and not row[name].isascii():
        try:
            row[name].encode()
        except UnicodeEncodeError:
            raise BadRowError(where, f"field {prefix}{name} holds half a character") from None


def label_strength(row: dict[str, Any]) -> int | None:
    """How sure the labeller of a comparison was: 1 (slightly better) to 4 (far better).

    0 is a tie, None is not known.
    OpenAI's 9 points run from 1, "the first is far better", to 9, "the second is far better", and
    5 is the tie in the middle. So strength is the distance from 5, whichever was chosen.
    differs: Huang et al. 2024 group by the point itself.
    """
    confidence = (row.get("extra") or {}).get("confidence")
    return None if confidence is None else abs(confidence - 5)


def is_cnndm(row: dict[str, Any]) -> bool:
    """Whether a comparison is about a news article: those batches are kept apart."""
    return row.get("batch") in CNNDM_BATCHES


def subsample(data: Data, located: dict[str, list[Located]]) -> dict[str, list[Located]]:
    """The rows of each split that the settings use, in their order.

    The draw depends on the split alone, so that seeds and sizes are compared on the same rows.
    Raises UserError if a split has fewer rows than are asked for, or none; the optional split may
    be missing.
    """
    drawn, longest = dict(located), data.max_post_characters
    for name in [name for name in (*POSTS, PPO_TRAIN) if longest and name in drawn]:
        drawn[name] = [row for row in drawn[name] if len(row[1]["post"]) <= longest]
        if not drawn[name]:
            raise UserError(f"data.max_post_characters: raise {longest}, no post of {name} is left")
    for name, rows in drawn.items():
        count = data.rows[name]
        if count > len(rows):
            short = f"{count} rows of {name} are asked for, there are {len(rows)}"
            raise UserError(f"data.{USED_ROWS[name]}: {short}: give at most that, or 0 for all")
        if count:
            places = sorted(random.Random(name).sample(range(len(rows)), count))
            drawn[name] = [rows[place] for place in places]
    return drawn


def beside_known(data: Data, located: Mapping[str, Sequence[Located]]) -> dict[str, Any]:
    """For each split of published data sets from the hub: `rows` read and `known`."""
    names = (data.sft_dataset, data.comparisons_dataset) if data.source == HUB else ()
    return {
        split: {"rows": len(located.get(split, ())), "known": count}
        for name in names
        for split, count in KNOWN_ROWS.get(name.partition("@")[0].partition(":")[0], {}).items()
    }


def differences(counts: Mapping[str, Mapping[str, int]]) -> str:
    """One line about splits whose rows are not as many as known; empty if there is none."""
    odd = [
        f"{split} has {rows['rows']:,} rows, known are {rows['known']:,}"
        for split, rows in counts.items()
        if rows["rows"] != rows["known"]
    ]
    return f"the published data have changed, or were cut short: {'; '.join(odd)}" if odd else ""


def kept_odd_rows(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many comparisons are odd and kept, by kind.

    `empty_summaries`: a policy wrote nothing. `equal_summaries`: both are the same text.
    `without_confidence`: in no group by strength. `against_choice`: the labeller's confidence is on
    the side that was not chosen; never so in the 3,294 published rows that we could read.
    `chose_first`: the first summary was chosen. `contradicted`: the same pair stands there with the
    other label, too; so do 5% of those published rows, which several people labelled.
    """
    odd = Counter(empty_summaries=0, equal_summaries=0, without_confidence=0, against_choice=0)
    labels = formats.labels_of(rows)
    odd["chose_first"] = sum(row["choice"] == 0 for row in rows)
    odd["contradicted"] = sum(len(labels[formats.pair_of(row)]) > 1 for row in rows)
    for row in rows:
        first, second = (summary["text"].strip() for summary in row["summaries"])
        confidence = (row.get("extra") or {}).get("confidence")
        odd["empty_summaries"] += not (first and second)
        odd["equal_summaries"] += first == second
        odd["without_confidence"] += confidence is None
        if confidence not in (None, 5):
            odd["against_choice"] += (confidence > 5) != (row["choice"] == 1)
    return dict(odd)
