"""The data of a run on its page: where it came from, its lengths, and odd rows."""

from dataclasses import dataclass

from reports.results import Json, RunResult

# Column of the page -> the keys of the longest texts in the results of the stage `base`.
LONGEST_QUERY = ("query",)
LONGEST_SUMMARY = ("summary", "chosen", "rejected")
LONGEST_BOTH = ("query_summary", "query_chosen", "query_rejected")


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A repository of the hub, at its commit."""

    setting: str
    repository: str
    configuration: str
    revision: str
    commit: str


@dataclass(frozen=True, kw_only=True)
class Split:
    """The rows of one split, the longest lengths in tokens, and the number of odd rows."""

    name: str
    rows: int | None
    longest_query: int | None
    longest_summary: int | None
    longest_both: int | None
    over_limit: int | None
    most_over: int | None
    empty_summaries: int | None
    equal_summaries: int | None
    without_confidence: int | None
    skipped: int | None


@dataclass(frozen=True, kw_only=True)
class PublishedSplit:
    """The rows of a split of published data, and the number that is known from the publication."""

    name: str
    rows: int
    known: int


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Everything that a page says about the data."""

    sources: tuple[HubSource, ...]
    splits: tuple[Split, ...]
    published: tuple[PublishedSplit, ...]


def data_section(run: RunResult) -> DataSection | None:
    """Return what is known of a run's data; None if the run read none of its own."""
    if "base" not in run.stages:
        return None
    base = run.stages["base"].results
    return DataSection(
        sources=tuple(
            HubSource(
                setting=row["setting"],
                repository=row["repository"],
                configuration=row["configuration"],
                revision=row["revision"],
                commit=row["commit"],
            )
            for row in base.get("hub", [])
        ),
        splits=tuple(
            _split(name, measured, base["rows"].get(name, {}))
            for name, measured in base["tokens"].items()
        ),
        published=tuple(
            PublishedSplit(name=_words(name), rows=row["rows"], known=row["known"])
            for name, row in base["published"].items()
        ),
    )


def _split(name: str, measured: Json, odd: Json) -> Split:
    return Split(
        name=_words(name),
        rows=measured.get("rows"),
        longest_query=_longest(measured, LONGEST_QUERY),
        longest_summary=_longest(measured, LONGEST_SUMMARY),
        longest_both=_longest(measured, LONGEST_BOTH),
        over_limit=odd.get("over_limit"),
        most_over=odd.get("most_over"),
        empty_summaries=odd.get("empty_summaries"),
        equal_summaries=odd.get("equal_summaries"),
        without_confidence=odd.get("without_confidence"),
        skipped=odd.get("skipped"),
    )


def _longest(measured: Json, keys: tuple[str, ...]) -> int | None:
    """Return the largest of the lengths that were measured."""
    lengths = [measured[f"longest_{key}"] for key in keys if f"longest_{key}" in measured]
    return max((length for length in lengths if length is not None), default=None)


def _words(split: str) -> str:
    return split.replace("_", " ")
