"""How much text there is: rows of every split, and tokens of a row. Standard library only.

Rows of the published data sets are known counts. Rows of a folder are counted. Tokens of a row are
means that were measured once, of real posts with the tokenizer that Pythia uses.
"""

from dataclasses import dataclass
from pathlib import Path

from stages.settings.config import HUB, TOY, Config
from stages.settings.sections import ALL_PAIRS

# Huang et al. 2024, sections C.1 and C.2: TL;DR posts, and comparisons of them.
HUB_ROWS = {
    "sft_train": 116_722,
    "sft_validation": 6_447,
    "comparisons_train": 92_858,
    "comparisons_validation": 83_802,
    "comparisons_cnndm": 2_284,
}
# Means over 4,707 posts of OpenAI's filtered TL;DR data and 4,107 human comparisons of such posts,
# in tokens of GPT-NeoX's tokenizer, with the template, cut to 512 tokens, summaries with EOS.
QUERY_TOKENS = 346.0
SUMMARY_TOKENS = 33.8
COMPARED_TOKENS = 32.5
# CNN/DM articles are cut at 1919 tokens; most are shorter. An assumption: half of the limit.
ARTICLE_TOKENS = 960.0
# What the built-in world's own tokenizer makes of its posts (`make sft PRESET=tiny`, the manifest
# of `base`): a query fills most of its limit.
TOY_SHARE = 0.8
CHARACTERS_PER_TOKEN = 4.06
"""Of the same posts."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Rows of the splits, and tokens: means, which say how much work there is, and the longest,
    which say how much memory it takes.
    """

    rows: dict[str, int]
    query: float
    """Mean tokens of a query."""
    summary: float
    """Mean tokens of a reference summary with its EOS."""
    compared: float
    """Mean tokens of a compared summary."""
    longest_query: int
    longest_summary: int
    """Also what PPO samples."""
    longest_compared: int
    longest_sft: int
    """Longest query and summary together."""
    longest_pair: int
    """Longest query and compared summary together."""

    @property
    def longest_episode(self) -> int:
        """Longest query and response of PPO together."""
        return self.longest_query + self.longest_summary


def lengths_of(config: Config) -> Lengths:
    """What a run reads. Missing files count 0 rows: the run itself says what is wrong with them."""
    data = config.data
    share = TOY_SHARE if data.source == TOY else 1.0
    longest = data.max_query_tokens
    query = longest * share if data.source == TOY else min(QUERY_TOKENS, longest)
    summary = min(SUMMARY_TOKENS, data.max_summary_tokens * share)
    return Lengths(
        rows=_used_rows(config),
        query=query,
        summary=summary,
        compared=min(COMPARED_TOKENS, data.max_comparison_tokens * share),
        longest_query=longest,
        longest_summary=data.max_summary_tokens,
        longest_compared=data.max_comparison_tokens,
        longest_sft=data.max_query_summary_tokens,
        longest_pair=data.max_query_comparison_tokens,
    )


def _used_rows(config: Config) -> dict[str, int]:
    """Rows of every split, no more than the settings use."""
    rows, most = _rows_of(config), config.data.rows
    used = {name: min(count, most.get(name) or count) for name, count in rows.items()}
    if config.rm.pairs != ALL_PAIRS:
        used["comparisons_train"] //= 2
    return used


def _rows_of(config: Config) -> dict[str, int]:
    source, world = config.data.source, config.world
    if source == HUB:
        return dict(HUB_ROWS)
    if source == TOY:
        return {
            "sft_train": world.train_posts,
            "sft_validation": world.validation_posts,
            "comparisons_train": world.train_comparisons,
            "comparisons_validation": world.validation_comparisons,
            "comparisons_cnndm": 0,
        }
    rows = {name: _lines_of(Path(source), name) for name in HUB_ROWS if name[-5:] != "cnndm"}
    return rows | {"comparisons_cnndm": 0}


def _lines_of(folder: Path, split: str) -> int:
    """Rows of one split of a folder; a Parquet file is read where pyarrow is installed."""
    if (folder / f"{split}.jsonl").is_file():
        with (folder / f"{split}.jsonl").open("rb") as lines:
            return sum(1 for _ in lines)
    if (folder / f"{split}.parquet").is_file():
        try:
            import pyarrow.parquet
        except ImportError:
            return 0
        return int(pyarrow.parquet.ParquetFile(folder / f"{split}.parquet").metadata.num_rows)
    return 0
