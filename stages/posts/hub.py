"""Posts and comparisons from the hub, through `datasets`.

A repository of the hub holds its configurations in one of two ways: its card names them, or, on the
branch that the hub's bot converts to Parquet, each has a folder of its name and there is no card.
"""

from collections.abc import Iterator
from typing import Any

from stages.running.hub import Fetched, Source, dataset_source, fetch
from stages.settings.checks import UserError
from stages.settings.sections import Data

CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
ROWS = ("*.parquet", "*.jsonl", "*.json", "*.csv")


def sources_of(data: Data) -> tuple[Source, Source]:
    """Where the posts and the comparisons come from."""
    return (
        dataset_source("data.sft_dataset", data.sft_dataset),
        dataset_source("data.comparisons_dataset", data.comparisons_dataset),
    )


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

    disable_progress_bars()
    kind, part = split.split("_", 1)
    source = sources_of(data)[kind != "sft"]
    fetched = fetch_rows(source)
    name = source.configuration
    has_folder = bool(name) and (fetched.folder / name).is_dir()
    chosen = {"data_dir": name} if has_folder else {"name": name or None}
    try:
        loaded = load_dataset(str(fetched.folder), split=part, **chosen)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{source.label}, split {part}, does not load: {reason}") from None
    text = data.sft_dataset if kind == "sft" else data.comparisons_dataset
    for number, row in enumerate(loaded, start=1):
        yield f"{text}[{part}]:{number}", dict(row)
