"""Statistics of the rows for the manifest: odd rows, repeated rows, and published numbers."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from stages.config.sections import COMPARISONS, HUB, POSTS, PPO_TRAIN, Data
from stages.data.schemas import TIE, chosen_text, confidence_of, post_text
from stages.data.tables import LocatedRow, Row
from stages.data.text_metrics import normalize_whitespace

# Data set, without its configuration and revision -> split -> rows. No stage reads the test split
# of the posts (6,553 rows).
PUBLISHED_ROWS = {
    "vwxyzjn/summarize_from_feedback_tldr_3_filtered": {
        "sft_train": 116_722,
        "sft_validation": 6_447,
    },
    "openai/summarize_from_feedback": {
        "comparisons_train": 92_858,
        "comparisons_validation": 86_086,  # 2,284 of them about news articles
    },
}


def count_odd_comparisons(rows: Sequence[Row]) -> dict[str, int]:
    """The number of comparisons of each kind that are odd but kept.

    `empty_summaries`: a policy wrote nothing. `equal_summaries`: both have the same text.
    `without_confidence`: these belong to no strength group. `against_choice`: the labeler's
    confidence is on the side that was not chosen; this never happens in the 3,294 published rows
    that we could read. `chose_first`: the first summary was chosen. `contradicted`: the same pair
    also occurs with the other label, as do 5% of those published rows, which several people
    labeled.
    """
    counts = {
        "empty_summaries": 0,
        "equal_summaries": 0,
        "without_confidence": 0,
        "against_choice": 0,
        "chose_first": 0,
        "contradicted": 0,
    }
    chosen_by_pair = _chosen_texts_by_pair(rows)
    for row in rows:
        first, second = (summary["text"].strip() for summary in row["summaries"])
        if not first or not second:
            counts["empty_summaries"] += 1
        if first == second:
            counts["equal_summaries"] += 1

        confidence = confidence_of(row)
        if confidence is None:
            counts["without_confidence"] += 1
        elif confidence != TIE:
            favored = 1 if confidence > TIE else 0
            if favored != row["choice"]:
                counts["against_choice"] += 1

        if row["choice"] == 0:
            counts["chose_first"] += 1
        if len(chosen_by_pair[_pair_key(row)]) > 1:
            counts["contradicted"] += 1
    return counts


def count_repeated_rows(rows: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Held-out posts and pairs that also occur in the training data, by text, whatever their ids.

    `rows` maps each split to its rows. The result has:
    `in`: training split -> the number of held-out posts that it contains;
    `posts`: the number of held-out posts, of `of_posts`, that any training split contains;
    `pairs`: the number of held-out comparisons, of `of_pairs`, whose two summaries of the post are
    compared in training; `against`: those of them whose label all training pairs contradict.
    """
    held_out_posts = [post_text(row) for row in rows[POSTS[1]]]
    distinct_posts = set(held_out_posts)
    repeated_by_split = {
        split: distinct_posts.intersection(post_text(row) for row in rows[split])
        for split in (POSTS[0], PPO_TRAIN, COMPARISONS[0])
        if split in rows
    }
    repeated_posts = set().union(*repeated_by_split.values())

    held_out_pairs = rows.get(COMPARISONS[1], ())
    chosen_in_training = _chosen_texts_by_pair(rows.get(COMPARISONS[0], ()))
    repeated_pairs = [row for row in held_out_pairs if _pair_key(row) in chosen_in_training]
    contradicted_pairs = [
        row
        for row in repeated_pairs
        if normalize_whitespace(chosen_text(row)) not in chosen_in_training[_pair_key(row)]
    ]
    return {
        "in": {
            split: sum(text in repeated for text in held_out_posts)
            for split, repeated in repeated_by_split.items()
        },
        "posts": sum(text in repeated_posts for text in held_out_posts),
        "of_posts": len(held_out_posts),
        "pairs": len(repeated_pairs),
        "of_pairs": len(held_out_pairs),
        "against": len(contradicted_pairs),
    }


def _pair_key(row: Row) -> Hashable:
    """Equal for comparisons of the same two summaries of the same post, in either order."""
    summaries = frozenset(normalize_whitespace(summary["text"]) for summary in row["summaries"])
    return hash((post_text(row), summaries))  # the hash, because the texts would take memory


def _chosen_texts_by_pair(rows: Sequence[Row]) -> dict[Hashable, set[str]]:
    """Each pair, by its texts -> the summaries of it that were chosen: two if labels disagree."""
    chosen: dict[Hashable, set[str]] = {}
    for row in rows:
        chosen.setdefault(_pair_key(row), set()).add(normalize_whitespace(chosen_text(row)))
    return chosen


def compare_with_published(
    data: Data, splits: Mapping[str, Sequence[LocatedRow]]
) -> dict[str, dict[str, int]]:
    """For each split of a published data set from the hub: the `rows` read and those `known`."""
    if data.source != HUB:
        return {}
    counts = {}
    for setting in (data.sft_dataset, data.comparisons_dataset):
        dataset = setting.partition("@")[0].partition(":")[0]
        for split, published in PUBLISHED_ROWS.get(dataset, {}).items():
            counts[split] = {"rows": len(splits.get(split, ())), "known": published}
    return counts


def describe_differences(counts: Mapping[str, Mapping[str, int]]) -> str:
    """One line about splits that do not have the published number of rows, or an empty text."""
    differences = [
        f"{split} has {count['rows']:,} rows, {count['known']:,} were published"
        for split, count in counts.items()
        if count["rows"] != count["known"]
    ]
    if not differences:
        return ""
    return f"the published data have changed, or were cut short: {'; '.join(differences)}"
