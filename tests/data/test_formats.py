"""Rows as people have them become rows of the two schemas."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.data.bad_rows import BadRowError, BadRows
from stages.data.formats import ASSISTANT, as_known, recognised
from stages.data.readers import read_source
from stages.data.tokens import Limits, tokenize_posts
from stages.settings.checks import UserError
from stages.settings.sections import COMPARISONS, POSTS, Data

QUESTION = [{"role": "user", "content": "Why?"}]
CHAT = f"User: Why?\n\n{ASSISTANT}"
GOOD, POOR = ({"role": "assistant", "content": text} for text in ("Because.", "No."))


def read(source: Path) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    return read_source(Data(source=str(source)), str(source))


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def texts_of(row: dict[str, Any]) -> tuple[str, str, str]:
    chosen, rejected = (row["summaries"][row["choice"] ^ flip]["text"] for flip in (0, 1))
    return row["info"]["post"], chosen, rejected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Why?", "chosen": "Because.", "rejected": "No."}, "Why?"),
        ({"prompt": QUESTION, "chosen": [GOOD], "rejected": [POOR]}, CHAT),
        ({"chosen": [*QUESTION, GOOD], "rejected": [*QUESTION, POOR]}, CHAT),
    ],
)
def test_a_pair_keeps_its_prompt_and_which_text_was_chosen(row, expected):
    known = as_known("x:1", row, "comparisons_train")
    assert texts_of(known) == (expected, "Because.", "No.")
    assert known["info"]["id"] == as_known("x:2", row, "comparisons_train")["info"]["id"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Why?", "completion": "Because."}, "Why?"),
        ({"prompt": QUESTION, "completion": [GOOD]}, CHAT),
        ({"messages": [*QUESTION, GOOD]}, CHAT),
        ({"post": "It rained.", "summary": "Because."}, "It rained.\n\nTL;DR:"),
    ],
)
def test_a_post_keeps_its_prompt_and_completion(row, expected):
    known = as_known("x:1", row, "sft_train")
    assert (known["post"], known["summary"]) == (expected, "Because.")
    alone = as_known("x:1", {key: row[key] for key in row if key != "summary"}, "ppo_train")
    assert alone["post"] == expected


@pytest.mark.parametrize(
    ("row", "split", "reason"),
    [
        ({"text": "x"}, "comparisons_train", "(its fields: text): give prompt, chosen, rejected"),
        ({"prompt": "x"}, "sft_train", "give prompt, completion (prompts alone: "),
        ({"prompt": " ", "completion": "x"}, "sft_train", "field prompt is empty or no text"),
        ({"prompt": "x", "chosen": "x", "rejected": 1}, "comparisons_train", "rejected is no text"),
        ({"messages": [{"role": "user"}]}, "sft_train", "a message without a text in content"),
    ],
)
def test_a_row_of_no_known_kind_is_one_line_that_names_its_fields(row, split, reason):
    with pytest.raises(BadRowError) as refusal:
        as_known("pairs.jsonl:7", row, split)
    assert str(refusal.value).startswith("pairs.jsonl:7: ")
    assert reason in str(refusal.value)


def test_one_file_of_pairs_is_all_data_and_a_post_is_held_out_in_all_splits_or_in_none(tmp_path):
    rows = [
        {"prompt": f"Question {n % 100}?", "chosen": f"Yes {n}.", "rejected": f"No {n}."}
        for n in range(200)
    ]
    located = read(written(tmp_path / "pairs.jsonl", rows))
    ids = {
        split: {row.get("info", row)["id"] for _, row in of_split}
        for split, of_split in located.items()
    }
    assert ids["sft_train"] == ids["comparisons_train"]
    assert ids["sft_validation"] == ids["comparisons_validation"]
    assert not ids["sft_train"] & ids["sft_validation"]
    assert 1 <= len(ids["sft_validation"]) <= 15
    counts = {split: len(of_split) for split, of_split in located.items()}
    assert counts["comparisons_train"] + counts["comparisons_validation"] == 200
    assert counts["sft_train"] + counts["sft_validation"] == 100  # each prompt once
    where, first = located["sft_train"][0]
    assert first["summary"] == rows[int(where.split(":")[1]) - 1]["chosen"]
    assert recognised(located)[0].startswith("comparisons_train: ")


def test_one_file_of_posts_is_all_data_only_where_no_pairs_are_needed(tmp_path):
    rows = [{"prompt": f"Question {n}?", "completion": "Yes."} for n in range(40)]
    path = written(tmp_path / "posts.jsonl", rows)
    assert {*read_source(Data(source=str(path)), str(path), None, POSTS)} == {*POSTS}
    with pytest.raises(UserError, match=r"comparisons_train.jsonl is missing .* reward\.function"):
        read(path)


def test_an_array_of_json_is_read_row_by_row_and_a_bad_one_is_named(tmp_path):
    path = tmp_path / "pairs.json"
    rows = [{"prompt": f"Why {n}?", "chosen": "So.", "rejected": "No."} for n in range(60)]
    path.write_text(json.dumps(rows, indent=1))
    assert len(read(path)["comparisons_train"]) > 50
    path.write_text(json.dumps([*rows, {"prompt": "Why?"}]))
    with pytest.raises(UserError, match=r"pairs\.json:61: a row of no known kind"):
        read(path)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert len(read(path)["comparisons_train"]) > 50


def test_of_few_rows_one_post_at_least_is_held_out_and_of_bad_ones_the_reason_is_said(tmp_path):
    rows = [{"prompt": f"Why {n // 2}?", "chosen": "So.", "rejected": "No."} for n in range(6)]
    located = read(written(tmp_path / "few.jsonl", rows))
    assert [len(located[split]) for split in COMPARISONS] == [4, 2]
    assert [len(located[split]) for split in POSTS] == [2, 1]
    path = written(tmp_path / "bad.jsonl", [{"question": "Why?"}])
    with pytest.raises(UserError, match=r"comparisons_train is empty \(a row of no known kind"):
        read_source(Data(source=str(path), on_bad_row="skip"), str(path), BadRows("skip"))
    path.write_text('{"prompt": "a \\ud800", "chosen": "b", "rejected": "c"}')
    with pytest.raises(UserError, match=r"field info\.post holds half a character"):
        read(path)


def test_splits_of_openais_schema_are_never_derived(tmp_path):
    post = {"id": "a", "subreddit": "tifu", "title": "T", "post": "P", "summary": "S"}
    written(tmp_path / "sft_train.jsonl", [post])
    with pytest.raises(UserError, match=r"sft_validation\.jsonl is missing"):
        read(tmp_path)


def test_a_whole_prompt_is_formatted_no_further_and_keeps_its_end(tokenizer):
    row = as_known(
        "x:1", {"prompt": "First words. " * 9 + "Why?", "completion": "So."}, "sft_train"
    )
    limits = Limits(query=8, response=20, query_response=40)
    split = tokenize_posts([("x:1", row)], tokenizer, limits, "sft_train")
    query = tokenizer.decode(split.columns["queries"][0])
    assert len(split.columns["queries"][0]) == 8
    assert query.endswith("Why?")
    assert "TL;DR" not in query
