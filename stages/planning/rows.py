"""The number of rows in each split of a run's data, as far as it is known before the run."""

from pathlib import Path

from stages.config.config import Config
from stages.config.sections import ALL_PAIRS, COMPARISONS, HUB, POSTS, TOY, Data

# Rows of the published data: TL;DR posts, and comparisons of them (Huang et al. 2024).
PUBLISHED_ROWS = {
    "sft_train": 116_722,
    "sft_validation": 6_447,
    "comparisons_train": 92_858,
    "comparisons_validation": 83_802,
}


def split_rows(config: Config) -> dict[str, int]:
    """Number of rows of every split that a run uses. 0: not known, or no such split."""
    world = config.world
    if config.data.source == TOY:
        rows = {
            "sft_train": world.train_posts,
            "sft_validation": world.validation_posts,
            "comparisons_train": world.train_comparisons,
            "comparisons_validation": world.validation_comparisons,
        }
    elif config.data.source == HUB:
        rows = _hub_rows(config.data)
    else:
        folder = Path(config.data.source)
        rows = {split: _rows_in_folder(folder, split) for split in PUBLISHED_ROWS}
    return used_rows(config, rows)


def used_rows(config: Config, rows: dict[str, int]) -> dict[str, int]:
    """The rows of each split that the settings use: at most `data.*`, and half of the pairs if
    `rm.pairs` says so.
    """
    used = {}
    for split, count in rows.items():
        most = config.data.rows.get(split) or count  # 0: all
        used[split] = min(count, most)
    if config.rm.pairs != ALL_PAIRS and COMPARISONS[0] in used:
        used[COMPARISONS[0]] //= 2
    return used


def _hub_rows(data: Data) -> dict[str, int]:
    """The published numbers for the published data sets, and 0 for any other."""
    rows = dict(PUBLISHED_ROWS)
    published = Data()
    if data.sft_dataset != published.sft_dataset:
        rows |= dict.fromkeys(POSTS, 0)
    if data.comparisons_dataset != published.comparisons_dataset:
        rows |= dict.fromkeys(COMPARISONS, 0)
    return rows


def _rows_in_folder(folder: Path, split: str) -> int:
    """Rows of one split of a folder; a Parquet file is read if pyarrow is installed."""
    lines = folder / f"{split}.jsonl"
    if lines.is_file():
        with lines.open("rb") as file:
            return sum(1 for _ in file)
    try:
        import pyarrow.parquet

        table = pyarrow.parquet.ParquetFile(folder / f"{split}.parquet")
    except (ImportError, OSError):
        return 0
    return int(table.metadata.num_rows)
