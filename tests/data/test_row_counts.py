"""What the manifest and the terminal say about the rows."""

from pathlib import Path
from typing import Any

from stages.base import remarks
from stages.config.sections import Data
from stages.data.row_counts import (
    compare_with_published,
    count_odd_comparisons,
    count_repeated_rows,
    describe_differences,
)
from tests.lib.rows import EMPTY_PAIR, EQUAL_PAIR, PAIR, POST, edited, without

# -- odd comparisons -------------------------------------------------------------------------------


def test_odd_comparisons_are_counted_by_kind():
    rows = [
        PAIR,
        EMPTY_PAIR,
        EQUAL_PAIR,
        edited(PAIR, "extra.confidence", 2),  # sure of the first; the second was chosen
        edited(PAIR, "extra.confidence", 5),  # a tie
        without(PAIR, "extra"),
        edited(EMPTY_PAIR, "summaries.0.text", " "),  # both empty, so equal
    ]
    assert count_odd_comparisons(rows) == {
        "empty_summaries": 2,
        "equal_summaries": 2,
        "without_confidence": 1,
        "against_choice": 1,
        "chose_first": 0,
        "contradicted": 0,
    }


def test_a_pair_with_both_labels_is_contradicted_whatever_its_id():
    other_label = edited(edited(PAIR, "info.id", "other"), "choice", 0)
    other_post = edited(other_label, "info.post", "Another.")
    counts = count_odd_comparisons([PAIR, other_label, other_post])
    assert counts["chose_first"] == 2
    assert counts["contradicted"] == 2


# -- held-out rows in the training data ------------------------------------------------------------

# The text of POST with other white space, under another id.
REPEATED = {"id": "b", "post": "First part.\n\n My boss  sold my bike.\n"}
OTHER_POST = POST | {"post": "Another."}


def test_repeated_posts_are_found_by_their_text():
    rows = {
        "sft_train": [POST],
        "ppo_train": [without(OTHER_POST, "summary")],
        "comparisons_train": [PAIR],
        "sft_validation": [
            POST | REPEATED,
            OTHER_POST,
            OTHER_POST | {"id": "c", "post": "A third."},
        ],
        "comparisons_validation": [],
    }
    counts = count_repeated_rows(rows)
    assert counts["in"] == {"sft_train": 1, "ppo_train": 1, "comparisons_train": 1}
    assert (counts["posts"], counts["of_posts"]) == (2, 3)


def test_repeated_pairs_are_found_in_either_order_with_either_label():
    swapped = PAIR | {"summaries": PAIR["summaries"][::-1], "info": PAIR["info"] | REPEATED}
    rows = {
        "sft_train": [POST],
        "sft_validation": [],
        "comparisons_train": [PAIR],
        "comparisons_validation": [
            swapped | {"choice": 0},  # the label of training
            swapped | {"choice": 1},  # the opposite one
            edited(PAIR, "info.title", "x"),
        ],
    }
    counts = count_repeated_rows(rows)
    assert (counts["pairs"], counts["of_pairs"], counts["against"]) == (2, 3, 1)


# -- published data sets ---------------------------------------------------------------------------

PUBLISHED = {
    "sft_train": 116_722,
    "sft_validation": 6_447,
    "comparisons_train": 92_858,
    "comparisons_validation": 86_086,
}


def known_rows(data: Data) -> dict[str, int]:
    return {split: count["known"] for split, count in compare_with_published(data, {}).items()}


def test_rows_are_compared_with_the_published_number():
    splits = {
        split: [("f:1", POST if split.startswith("sft") else PAIR)] * count
        for split, count in PUBLISHED.items()
    }
    assert describe_differences(compare_with_published(Data(), splits)) == ""

    splits["sft_train"].pop()
    line = describe_differences(compare_with_published(Data(), splits))
    assert "sft_train has 116,721 rows, 116,722 were published" in line
    assert "comparisons" not in line
    assert "\n" not in line


def test_published_data_sets_are_recognized_at_any_revision():
    assert known_rows(Data()) == PUBLISHED
    pinned = Data(comparisons_dataset="openai/summarize_from_feedback@0123abc")
    assert known_rows(pinned) == PUBLISHED


def test_other_data_are_compared_with_nothing():
    assert known_rows(Data(source="folder")) == {}
    assert known_rows(Data(sft_dataset="mine/posts", comparisons_dataset="mine/pairs")) == {}


# -- remarks ---------------------------------------------------------------------------------------


def results_of(**changed: Any) -> dict[str, Any]:
    """The results of stage base on which there is nothing to remark, with changes."""
    return {
        "rows": {"sft_validation": {"rows": 600, "skipped": 0, "over_limit": 0, "most_over": 0}},
        "published": {},
        "changed": {},
        "learned": {"posts": 0, "of_posts": 600, "pairs": 0, "of_pairs": 9},
        **changed,
    }


def test_nothing_is_remarked_on_plain_rows():
    assert remarks(results_of(), Path("skipped.jsonl")) == []


def test_repeated_pairs_are_remarked():
    repeated = {"posts": 0, "of_posts": 600, "pairs": 3, "of_pairs": 9}
    [line] = remarks(results_of(learned=repeated), Path("skipped.jsonl"))
    assert line.startswith("held-out pairs: 3 of 9 are in the training data too")


def test_each_remark_is_one_line():
    results = results_of(
        rows={"sft_train": {"rows": 1945, "skipped": 2, "over_limit": 27, "most_over": 4}},
        published={"sft_train": {"rows": 1945, "known": 116_722}},
    )
    over_limit, skipped, published = remarks(results, Path("skipped.jsonl"))
    assert over_limit.startswith("27 rows are up to 4 tokens over data.max_*: they are used whole")
    assert skipped == "2 bad rows were skipped; the reasons are in skipped.jsonl"
    assert "1,945 rows, 116,722 were published" in published
    assert "\n" not in over_limit + skipped + published
