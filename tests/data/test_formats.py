"""The user's own kinds of rows become rows of the two schemas, and missing splits are derived."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.config.checks import UserError
from stages.config.sections import COMPARISONS, POSTS, Data
from stages.data.bad_rows import BadRowError, BadRows
from stages.data.formats import ASSISTANT, describe_whole_prompts, to_openai_schema
from stages.data.lengths import Limits
from stages.data.readers import read_source
from stages.data.schemas import chosen_text, info_of, rejected_text
from stages.data.tables import LocatedRow
from stages.data.tokens import tokenize_posts
from tests.lib.rows import POST, write_rows

QUESTION = {"role": "user", "content": "Why?"}
GOOD = {"role": "assistant", "content": "Because."}
POOR = {"role": "assistant", "content": "No."}
CHAT = f"User: Why?\n\n{ASSISTANT}"


def read(source: Path) -> dict[str, list[LocatedRow]]:
    return read_source(Data(source=str(source)), str(source))


def numbered_pairs(count: int, prompts: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Question {n % prompts}?", "chosen": f"Yes {n}.", "rejected": f"No {n}."}
        for n in range(count)
    ]


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "Why?", "chosen": "Because.", "rejected": "No."}, "Why?"),
        ({"prompt": [QUESTION], "chosen": [GOOD], "rejected": [POOR]}, CHAT),
        ({"chosen": [QUESTION, GOOD], "rejected": [QUESTION, POOR]}, CHAT),
    ],
)
def test_a_pair_keeps_its_prompt_and_label(row, prompt):
    converted = to_openai_schema("x:1", row, "comparisons_train")
    assert converted["info"]["post"] == prompt
    assert chosen_text(converted) == "Because."
    assert rejected_text(converted) == "No."


def test_the_chosen_text_is_not_always_the_first():
    rows = numbered_pairs(count=20, prompts=20)
    choices = {to_openai_schema("x:1", row, "comparisons_train")["choice"] for row in rows}
    assert choices == {0, 1}


def test_rows_with_one_prompt_get_one_id():
    first = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}
    second = first | {"chosen": "So."}
    ids = {
        to_openai_schema("x:1", row, "comparisons_train")["info"]["id"] for row in (first, second)
    }
    assert len(ids) == 1


POST_ROWS = [
    ({"prompt": "Why?", "completion": "Because."}, "Why?"),
    ({"prompt": [QUESTION], "completion": [GOOD]}, CHAT),
    ({"messages": [QUESTION, GOOD]}, CHAT),
    ({"post": "It rained.", "summary": "Because."}, "It rained.\n\nTL;DR:"),
]


@pytest.mark.parametrize(("row", "prompt"), POST_ROWS)
def test_a_post_keeps_its_prompt_and_completion(row, prompt):
    converted = to_openai_schema("x:1", row, "sft_train")
    assert converted["post"] == prompt
    assert converted["summary"] == "Because."


@pytest.mark.parametrize(("row", "prompt"), POST_ROWS)
def test_ppo_train_needs_only_a_prompt(row, prompt):
    no_answer = {name: row[name] for name in row if name not in ("completion", "summary")}
    assert to_openai_schema("x:1", no_answer, "ppo_train")["post"] == prompt


@pytest.mark.parametrize(
    ("row", "split", "reason"),
    [
        ({"text": "x"}, "comparisons_train", "(its fields: text): give prompt, chosen, rejected"),
        ({"prompt": "x"}, "sft_train", "give prompt, completion (rows with only a prompt belong"),
        ({"completion": "x"}, "ppo_train", "(its fields: completion): give prompt"),
        ({"prompt": " ", "completion": "x"}, "sft_train", "field prompt is empty or not a text"),
        (
            {"prompt": "x", "chosen": "x", "rejected": 1},
            "comparisons_train",
            "field rejected is not a text",
        ),
        ({"messages": [{"role": "user"}]}, "sft_train", "a message without a text in content"),
        ({"messages": []}, "sft_train", "a message without a text in content"),
    ],
)
def test_a_row_of_unknown_kind_is_refused_with_its_fields(row, split, reason):
    with pytest.raises(BadRowError) as error:
        to_openai_schema("pairs.jsonl:7", row, split)
    assert str(error.value).startswith("pairs.jsonl:7: ")
    assert reason in str(error.value)


def test_a_field_with_half_a_character_is_refused(tmp_path):
    path = tmp_path / "pairs.jsonl"
    write_rows(path, ['{"prompt": "a \\ud800", "chosen": "b", "rejected": "c"}'])
    with pytest.raises(UserError, match=r"field info\.post holds half a character"):
        read(path)


def test_a_whole_prompt_is_not_filled_into_a_template_and_keeps_its_end(tokenizer):
    own_row = {"prompt": "First words. " * 9 + "Why?", "completion": "So."}
    row = to_openai_schema("x:1", own_row, "sft_train")
    limits = Limits(query=8, response=20, query_response=40)

    split = tokenize_posts([("x:1", row)], tokenizer, limits, "sft_train")

    query = split.columns["queries"][0]
    assert len(query) == 8
    assert tokenizer.decode(query).endswith("Why?")
    assert "TL;DR" not in tokenizer.decode(query)


# -- one file as all data --------------------------------------------------------------------------


@pytest.fixture
def splits_of_200_pairs(tmp_path) -> dict[str, list[LocatedRow]]:
    """The splits of one file of 200 pairs, two for each prompt."""
    write_rows(tmp_path / "pairs.jsonl", numbered_pairs(count=200, prompts=100))
    return read(tmp_path / "pairs.jsonl")


def test_a_file_of_pairs_gives_all_splits(splits_of_200_pairs):
    counts = {split: len(rows) for split, rows in splits_of_200_pairs.items()}
    assert counts["comparisons_train"] + counts["comparisons_validation"] == 200
    assert counts["sft_train"] + counts["sft_validation"] == 100  # each prompt once


def test_a_post_is_held_out_in_all_splits_or_in_none(splits_of_200_pairs):
    ids = {
        split: {info_of(row)["id"] for _, row in rows}
        for split, rows in splits_of_200_pairs.items()
    }
    assert ids["sft_train"] == ids["comparisons_train"]
    assert ids["sft_validation"] == ids["comparisons_validation"]
    assert not ids["sft_train"] & ids["sft_validation"]
    assert 1 <= len(ids["sft_validation"]) <= 15


def test_derived_posts_have_the_text_that_their_first_pair_chose(splits_of_200_pairs):
    for where, row in splits_of_200_pairs["sft_train"]:
        line = int(where.rpartition(":")[2])
        assert line <= 100  # the second pair of each prompt is in the other half of the file
        assert row["summary"] == f"Yes {line - 1}."


def test_derived_splits_are_described(splits_of_200_pairs):
    line = describe_whole_prompts(splits_of_200_pairs)[0]
    assert line.startswith("comparisons_train: ")
    assert line.endswith(" rows, each with a whole prompt")


def test_at_least_one_post_is_held_out(tmp_path):
    rows = [{"prompt": f"Why {n // 2}?", "chosen": "So.", "rejected": "No."} for n in range(6)]
    write_rows(tmp_path / "few.jsonl", rows)
    splits = read(tmp_path / "few.jsonl")
    assert [len(splits[split]) for split in COMPARISONS] == [4, 2]
    assert [len(splits[split]) for split in POSTS] == [2, 1]


def test_a_file_of_posts_is_enough_if_no_pairs_are_needed(tmp_path):
    rows = [{"prompt": f"Question {n}?", "completion": "Yes."} for n in range(40)]
    path = tmp_path / "posts.jsonl"
    write_rows(path, rows)

    splits = read_source(Data(source=str(path)), str(path), needed_splits=POSTS)
    assert set(splits) == set(POSTS)

    with pytest.raises(UserError, match=r"comparisons_train.jsonl is missing .* reward\.function"):
        read(path)


def test_a_file_of_only_bad_rows_is_refused_with_the_first_reason(tmp_path):
    path = tmp_path / "bad.jsonl"
    write_rows(path, [{"question": "Why?"}])
    with pytest.raises(UserError, match=r"comparisons_train is empty \(a row of unknown kind"):
        read_source(Data(source=str(path), on_bad_row="skip"), str(path), BadRows("skip"))


def test_splits_of_openais_schema_are_never_derived(tmp_path):
    write_rows(tmp_path / "sft_train.jsonl", [POST])
    with pytest.raises(UserError, match=r"sft_validation\.jsonl is missing"):
        read(tmp_path)


# -- an array of JSON ------------------------------------------------------------------------------


def test_an_array_of_json_is_read_row_by_row(tmp_path):
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(numbered_pairs(count=60, prompts=60), indent=1))
    splits = read(path)
    assert len(splits["comparisons_train"]) + len(splits["comparisons_validation"]) == 60


def test_a_bad_element_of_an_array_is_named(tmp_path):
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps([*numbered_pairs(count=60, prompts=60), {"prompt": "Why?"}]))
    with pytest.raises(UserError, match=r"pairs\.json:61: a row of unknown kind"):
        read(path)


def test_json_lines_may_be_in_a_json_file(tmp_path):
    path = tmp_path / "pairs.json"
    write_rows(path, numbered_pairs(count=60, prompts=60))
    splits = read(path)
    assert len(splits["comparisons_train"]) + len(splits["comparisons_validation"]) == 60
