"""The user's own kinds of rows become rows of the two schemas, and missing splits are derived."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.config.errors import UserError
from stages.config.sections import COMPARISONS, POSTS, Data, format_post
from stages.data.bad_rows import BadRowError, BadRows
from stages.data.formats import describe_whole_prompts, to_openai_schema
from stages.data.lengths import Limits
from stages.data.readers import read_source
from stages.data.schemas import check_comparison, chosen_text, info_of, rejected_text
from stages.data.tables import LocatedRow
from stages.data.tokens import tokenize_posts
from tests.lib.rows import LIMITS, PAIR, POST, BadRow, write_rows

QUESTION = {"role": "user", "content": "Why?"}
GOOD = {"role": "assistant", "content": "Because."}
POOR = {"role": "assistant", "content": "No."}
CHAT = "User: Why?\n\nAssistant:"


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
    row = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}

    first = to_openai_schema("x:1", row, "comparisons_train")
    second = to_openai_schema("x:2", row | {"chosen": "So."}, "comparisons_train")

    assert first["info"]["id"] == second["info"]["id"]


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


ROWS_THAT_LACK_A_FIELD = {
    "no rejected text": BadRow(
        split="comparisons_train",
        row={"prompt": "x", "chosen": "y"},
        reason="no field rejected (its fields: prompt, chosen): give prompt, chosen and rejected",
    ),
    "no prompt of a pair": BadRow(
        split="comparisons_train",
        row={"chosen": "x", "rejected": "y"},
        reason="no field prompt (its fields: chosen, rejected)",
    ),
    "no completion": BadRow(
        split="sft_train",
        row={"prompt": "x"},
        reason="no field completion (its fields: prompt): give completion (rows with only a prompt",
    ),
    "no prompt for PPO": BadRow(
        split="ppo_train",
        row={"completion": "x"},
        reason="no field prompt (its fields: completion): give prompt",
    ),
}
ROWS_WITH_A_BAD_VALUE = {
    "null": BadRow(
        split="sft_train",
        row={"post": None, "summary": "x"},
        reason="field post is null or empty",
    ),
    "a blank": BadRow(
        split="sft_train",
        row={"prompt": " ", "completion": "x"},
        reason="field prompt is empty",
    ),
    "a number": BadRow(
        split="sft_train",
        row={"prompt": 3, "completion": "x"},
        reason="field prompt is not text",
    ),
    "a number as rejected text": BadRow(
        split="comparisons_train",
        row={"prompt": "x", "chosen": "x", "rejected": 1},
        reason="field rejected is not text",
    ),
    "a message without content": BadRow(
        split="sft_train",
        row={"messages": [{"role": "user"}]},
        reason="a message without text in content",
    ),
    "no messages": BadRow(
        split="sft_train",
        row={"messages": []},
        reason="field messages is an empty list",
    ),
    "a printed dict": BadRow(
        split="sft_train",
        row={"prompt": "x", "completion": "{'text': ['So.'], 'start': [3]}"},
        reason="field completion is a printed dict or list: give its text",
    ),
}
ROWS_THAT_CONTRADICT_THEMSELVES = {
    "two prompts": BadRow(
        split="sft_train",
        row={"prompt": "x", "post": "y", "completion": "z"},
        reason="prompt and post both give a prompt: drop or rename one",
    ),
    "a prompt next to messages": BadRow(
        split="sft_train",
        row={"messages": [QUESTION, GOOD], "prompt": "Another?"},
        reason="prompt and messages both give a prompt",
    ),
    "a completion next to messages": BadRow(
        split="sft_train",
        row={"messages": [QUESTION, GOOD], "completion": "So."},
        reason="messages and completion both give an answer: drop or rename one",
    ),
    "different conversations": BadRow(
        split="comparisons_train",
        row={"chosen": [QUESTION, GOOD], "rejected": [QUESTION, GOOD, QUESTION, POOR]},
        reason="chosen and rejected begin with different turns",
    ),
    "another conversation than the prompt": BadRow(
        split="comparisons_train",
        row={"prompt": "Who?", "chosen": [QUESTION, GOOD], "rejected": "No."},
        reason="field chosen has turns before the answer that are not those of prompt",
    ),
}
BAD_ROWS = ROWS_THAT_LACK_A_FIELD | ROWS_WITH_A_BAD_VALUE | ROWS_THAT_CONTRADICT_THEMSELVES


@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_refused_with_its_place_and_the_reason(bad):
    with pytest.raises(BadRowError) as error:
        to_openai_schema("pairs.jsonl:7", bad.row, bad.split)
    assert str(error.value).startswith("pairs.jsonl:7: ")
    assert bad.reason in str(error.value)


def test_a_field_with_half_a_character_is_refused(tmp_path):
    path = tmp_path / "pairs.jsonl"
    write_rows(path, ['{"prompt": "a \\ud800", "chosen": "b", "rejected": "c"}'])
    with pytest.raises(UserError, match=r"field info\.post has an unpaired surrogate"):
        read(path)


@pytest.mark.parametrize(
    ("info", "field"),
    [
        ({"site": ["a", "\ud83d"]}, r"info\.site\[1\]"),
        ({"site": {"\ud83d": "a"}}, r"info\.site\.'\\ud83d'"),
    ],
    ids=["in a list", "in a key"],
)
def test_half_a_character_is_refused_in_fields_that_are_only_copied(info, field):
    row = {**PAIR, "info": {**PAIR["info"], **info}}

    with pytest.raises(BadRowError, match=rf"field {field} has an unpaired surrogate"):
        check_comparison("pairs.jsonl:1", row)


def test_a_whole_prompt_is_not_filled_into_a_template_and_keeps_its_end(tokenizer):
    users_row = {"prompt": "First words. " * 9 + "Why?", "completion": "So."}
    row = to_openai_schema("x:1", users_row, "sft_train")
    limits = Limits(query=8, response=20, query_response=40)

    split = tokenize_posts([("x:1", row)], tokenizer, limits, "sft_train")

    query = split.columns["queries"][0]
    assert len(query) == 8
    assert tokenizer.decode(query).endswith("Why?")
    assert "TL;DR" not in tokenizer.decode(query)


# -- what counts as the answer ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["assistant", "model", "gpt", "Bot", "AI"])
@pytest.mark.parametrize(("role", "content"), [("role", "content"), ("from", "value")])
def test_the_assistant_is_known_by_many_names(name, role, content):
    messages = [{role: "human", content: "Why?"}, {role: name, content: "Because."}]
    converted = to_openai_schema("x:1", {"messages": messages}, "sft_train")
    assert converted["post"] == CHAT
    assert converted["summary"] == "Because."


def test_a_conversation_that_ends_with_the_user_is_cut_and_counted(tmp_path):
    thanks = {"role": "user", "content": "Thanks!"}
    rows = [{"messages": [QUESTION | {"content": f"Why {n}?"}, GOOD, thanks]} for n in range(40)]
    write_rows(tmp_path / "chats.jsonl", rows)
    bad_rows = BadRows("stop")

    splits = read_source(
        Data(source="x"), str(tmp_path / "chats.jsonl"), bad_rows, needed_splits=POSTS
    )

    assert {row["summary"] for _, row in splits["sft_train"]} == {"Because."}
    assert bad_rows.changes == {"conversations are cut after the assistant's last turn": 40}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([QUESTION], "field messages has no turn of the assistant"),
        ([GOOD], "field messages has no turn before the answer"),
        (
            [QUESTION, {"role": "moss", "content": "So."}],
            "field messages has a turn by 'moss': name the side that answers 'assistant'",
        ),
        ([QUESTION, {"content": "So."}], "field messages has a message without a role"),
    ],
)
def test_a_conversation_without_an_answer_is_refused(messages, reason):
    with pytest.raises(BadRowError, match=reason):
        to_openai_schema("x:1", {"messages": messages}, "sft_train")


def test_an_answer_by_the_user_is_refused():
    row = {"prompt": [QUESTION], "chosen": [QUESTION], "rejected": [POOR]}
    with pytest.raises(BadRowError, match="field chosen has no turn of the assistant"):
        to_openai_schema("x:1", row, "comparisons_train")


@pytest.mark.parametrize("prompt", ["Why?", [QUESTION]])
def test_answers_may_repeat_the_prompt(prompt):
    row = {"prompt": prompt, "chosen": [QUESTION, GOOD], "rejected": [QUESTION, POOR]}
    converted = to_openai_schema("x:1", row, "comparisons_train")
    assert chosen_text(converted) == "Because."


def test_messages_for_ppo_may_end_with_the_user():
    converted = to_openai_schema("x:1", {"messages": [QUESTION]}, "ppo_train")
    assert converted["post"] == CHAT
    assert "summary" not in converted


@pytest.mark.parametrize("label", [False, "False", 0, 0.0, "0"])
def test_a_bad_completion_is_left_out_and_counted_even_if_no_row_is_skipped(tmp_path, label):
    rows: list[Any] = [{"prompt": f"Why {n}?", "completion": "So.", "label": 1} for n in range(40)]
    rows.append({"prompt": "Why 40?", "completion": "No.", "label": label})
    write_rows(tmp_path / "kto.jsonl", rows)
    bad_rows = BadRows("stop")

    path = str(tmp_path / "kto.jsonl")
    splits = read_source(Data(source=path), path, bad_rows, needed_splits=POSTS)

    posts = [row for split in POSTS for _, row in splits[split]]
    assert {row["summary"] for row in posts} == {"So."}
    assert [row["where"] for row in bad_rows.skipped] == [f"{path}:41"]
    [(change, count)] = bad_rows.changes.items()
    assert change == "rows are left out: their label marks the completion as bad"
    assert count == 1


# -- printed structures ----------------------------------------------------------------------------


@pytest.mark.parametrize("write", [json.dumps, str])
def test_messages_that_a_csv_cell_holds_as_text_are_read_back(write):
    row = {"prompt": write([QUESTION]), "chosen": write([GOOD]), "rejected": write([POOR])}
    converted = to_openai_schema("x:1", row, "comparisons_train")
    assert converted["info"]["post"] == CHAT
    assert chosen_text(converted) == "Because."


def test_messages_printed_by_numpy_are_refused_with_their_place():
    printed = "[{'role': 'user', 'content': 'Why?'}\n {'role': 'assistant', 'content': 'So.'}]"
    with pytest.raises(BadRowError, match="x:1: field prompt is a printed list of messages that"):
        to_openai_schema("x:1", {"prompt": printed, "completion": "x"}, "sft_train")


def test_a_text_that_only_begins_with_brackets_stays_a_text():
    converted = to_openai_schema(
        "x:1", {"prompt": "[1, 2] is a list.", "completion": "x"}, POSTS[0]
    )
    assert converted["post"] == "[1, 2] is a list."


# -- the user's own columns and ids ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["query", "reference", "whole", "columns", "title", "info"])
def test_columns_of_any_name_stay_the_users_own(tokenizer, name):
    users_row = {"prompt": "Why?", "completion": "So.", name: "mine"}
    row = to_openai_schema("x:1", users_row, "sft_train")
    limits = Limits(query=20, response=20, query_response=40)

    split = tokenize_posts([("x:1", row)], tokenizer, limits, "sft_train")

    [facts] = split.rows
    assert facts["query"] == "Why?"
    assert facts["reference"] == "So."
    assert facts["columns"] == users_row


def test_columns_next_to_a_published_schema_are_kept_and_change_nothing(tokenizer):
    users_row = POST | {"whole": True, "wish": "short"}
    row = to_openai_schema("x:1", users_row, "sft_train")
    split = tokenize_posts([("x:1", row)], tokenizer, LIMITS, "sft_train")
    assert split.rows[0]["query"] == format_post(POST)
    assert split.rows[0]["columns"] == {"whole": True, "wish": "short"}


def test_posts_derived_from_pairs_keep_the_columns_of_their_row(tmp_path):
    rows = [row | {"wish": n} for n, row in enumerate(numbered_pairs(count=40, prompts=40))]
    write_rows(tmp_path / "pairs.jsonl", rows)
    for _, row in read(tmp_path / "pairs.jsonl")["sft_train"]:
        assert row["columns"]["wish"] == int(row["post"].removeprefix("Question ")[:-1])


def test_an_id_that_names_two_prompts_is_refused_with_both_places(tmp_path):
    rows = [row | {"id": n % 20} for n, row in enumerate(numbered_pairs(count=40, prompts=40))]
    path = tmp_path / "pairs.jsonl"
    write_rows(path, rows)
    with pytest.raises(UserError, match=rf"{path}:21: id '0' names another prompt at {path}:1"):
        read_source(Data(source=str(path), on_bad_row="skip"), str(path), BadRows("skip"))


@pytest.mark.parametrize("missing", ["NaN", "null", '""'])
def test_a_missing_id_is_replaced_by_the_prompts_and_counted(tmp_path, missing):
    rows = []
    for row in numbered_pairs(count=40, prompts=40):
        fields = json.dumps(row).removesuffix("}")
        rows.append(f'{fields}, "id": {missing}}}')
    write_rows(tmp_path / "pairs.jsonl", rows)
    bad_rows = BadRows("stop")

    path = str(tmp_path / "pairs.jsonl")
    splits = read_source(Data(source=path), path, bad_rows)

    assert len({info_of(row)["id"] for _, row in splits["comparisons_train"]}) > 30
    assert bad_rows.changes == {"rows have no value in column id: a hash of the prompt is used": 40}


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
    with pytest.raises(UserError, match=r"comparisons_train is empty \(no field chosen"):
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
    with pytest.raises(UserError, match=r"pairs\.json:61: no field chosen"):
        read(path)


def test_json_lines_may_be_in_a_json_file(tmp_path):
    path = tmp_path / "pairs.json"
    write_rows(path, numbered_pairs(count=60, prompts=60))
    splits = read(path)
    assert len(splits["comparisons_train"]) + len(splits["comparisons_validation"]) == 60
