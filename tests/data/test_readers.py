"""The splits of the data are read from folders, files and the hub, and only good rows are used."""

import errno
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets.exceptions import DatasetGenerationError

from stages.config.errors import UserError
from stages.config.sections import HUB, Data
from stages.data.bad_rows import BadRows
from stages.data.readers import SPLITS, describe_unread, read_hub, read_source, subsample
from tests.lib.asserts import refusal_of
from tests.lib.rows import (
    BAD_ROWS,
    PAIR,
    POST,
    good_row,
    line_numbers,
    read_all,
    without,
    write_folder,
    write_rows,
)

# -- places of rows --------------------------------------------------------------------------------


def test_rows_of_a_folder_come_with_file_and_line(tmp_path):
    # U+2028 is a line break for Python's `splitlines`, but not for JSON Lines.
    folder = write_folder(tmp_path, sft_train=[POST, POST | {"id": "a2", "post": "a\u2028b"}])

    splits = read_all(folder)

    assert list(splits) == list(SPLITS)
    assert [where for where, _ in splits["sft_train"]] == [
        f"{folder}/sft_train.jsonl:1",
        f"{folder}/sft_train.jsonl:2",
    ]
    assert splits["sft_train"][0][1] == POST
    assert splits["comparisons_validation"] == [(f"{folder}/comparisons_validation.jsonl:1", PAIR)]


def test_blank_lines_are_not_rows_but_count_as_lines(tmp_path):
    folder = write_folder(tmp_path, sft_train=[POST, "", POST, " "])
    assert line_numbers(read_all(folder)["sft_train"]) == [1, 3]


def test_ppo_train_is_an_optional_split(tmp_path):
    folder = write_folder(tmp_path)
    assert "ppo_train" not in read_all(folder)

    post = without(POST, "summary")
    write_rows(folder / "ppo_train.jsonl", [post])
    assert read_all(folder)["ppo_train"] == [(f"{folder}/ppo_train.jsonl:1", post)]


def test_files_of_a_folder_count_with_any_ending_in_any_case(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "sft_train.jsonl").rename(folder / "sft_train.JSONL")
    (folder / "sft_validation.jsonl").rename(folder / "sft_validation.json")
    splits = read_all(folder)
    assert [row for _, row in splits["sft_train"]] == [POST]
    assert [row for _, row in splits["sft_validation"]] == [POST]


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "part-2.jsonl").touch()
    (folder / "notes.txt").touch()
    [line] = describe_unread(str(folder))
    assert line.startswith(f"not read in {folder}: notes.txt, part-2.jsonl (splits are called ")


# -- bad rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_refused_with_file_line_and_field(tmp_path, bad):
    folder = write_folder(tmp_path, **{bad.split: [good_row(bad.split), bad.row]})

    line = refusal_of(read_all, folder)

    assert line.startswith(f"{folder}/{bad.split}.jsonl:2: ")
    assert bad.reason in line


@pytest.mark.parametrize("name", ["not JSON", "missing field", "choice 2"])
def test_a_bad_row_is_skipped_and_listed_if_the_setting_says_so(tmp_path, name):
    bad = BAD_ROWS[name]
    good = good_row(bad.split)
    folder = write_folder(tmp_path, **{bad.split: [good, bad.row, good]})
    bad_rows = BadRows("skip")

    splits = read_source(Data(source=str(folder), on_bad_row="skip"), str(folder), bad_rows)

    assert line_numbers(splits[bad.split]) == [1, 3]
    [skipped] = bad_rows.skipped
    assert skipped["split"] == bad.split
    assert skipped["where"] == f"{folder}/{bad.split}.jsonl:2"
    assert bad.reason in skipped["reason"]


def test_a_split_of_only_bad_rows_is_refused_even_if_rows_are_skipped(tmp_path):
    folder = write_folder(tmp_path, sft_train=["{", "{"])
    with pytest.raises(UserError, match="sft_train is empty"):
        read_source(Data(source=str(folder), on_bad_row="skip"), str(folder))


@pytest.mark.parametrize(("field", "value"), [("post", 3), ("summary", 5)])
def test_a_bad_row_of_ppo_train_is_refused(tmp_path, field, value):
    folder = write_folder(tmp_path)
    write_rows(folder / "ppo_train.jsonl", [without(POST, "summary") | {field: value}])
    with pytest.raises(UserError, match=rf"ppo_train\.jsonl:1: field {field} is of type int"):
        read_all(folder)


REPEATED_ID = [POST, POST | {"id": "a2"}, POST | {"post": "Another."}]


def test_two_held_out_posts_with_one_id_are_refused(tmp_path):
    folder = write_folder(tmp_path, sft_validation=REPEATED_ID)
    assert refusal_of(read_all, folder).startswith(
        f"{folder}/sft_validation.jsonl:3: field id is 'a1', as in an earlier row: "
        "give each held-out post its own id"
    )


def test_a_held_out_post_with_a_repeated_id_is_skipped_if_the_setting_says_so(tmp_path):
    folder = write_folder(tmp_path, sft_validation=REPEATED_ID)
    bad_rows = BadRows("skip")
    splits = read_source(Data(source=str(folder), on_bad_row="skip"), str(folder), bad_rows)
    assert [row["id"] for _, row in splits["sft_validation"]] == ["a1", "a2"]
    assert [row["where"] for row in bad_rows.skipped] == [f"{folder}/sft_validation.jsonl:3"]


def test_rows_of_training_may_repeat_an_id(tmp_path):
    folder = write_folder(tmp_path, sft_train=REPEATED_ID, comparisons_train=[PAIR, PAIR])
    splits = read_all(folder)
    assert len(splits["sft_train"]) == 3
    assert len(splits["comparisons_train"]) == 2


# -- which rows are used ---------------------------------------------------------------------------


@pytest.fixture
def posts_of_four_lengths(tmp_path) -> Path:
    posts = [POST | {"id": f"a{size}", "post": "x" * size} for size in (9, 10, 11, 12)]
    return write_folder(tmp_path, sft_train=posts, sft_validation=posts[:1])


def used_rows(folder: Path, **settings: Any) -> dict[str, list[int]]:
    """The lines of the rows that the settings use."""
    splits = subsample(Data(source=str(folder), **settings), read_all(folder))
    return {split: line_numbers(rows) for split, rows in splits.items()}


def test_longer_posts_are_left_out_and_pairs_are_kept(posts_of_four_lengths):
    assert len(PAIR["info"]["post"]) > 10
    used = used_rows(posts_of_four_lengths, max_post_characters=10)
    assert used["sft_train"] == [1, 2]
    assert used["comparisons_train"] == [1]


def test_longer_posts_are_left_out_before_the_draw(posts_of_four_lengths):
    used = used_rows(posts_of_four_lengths, max_post_characters=10, train_posts=1)
    assert used["sft_train"] in ([1], [2])


def test_more_rows_than_there_are_is_refused(posts_of_four_lengths):
    with pytest.raises(UserError, match="asks for 3 rows of sft_train, but there are 2"):
        used_rows(posts_of_four_lengths, max_post_characters=10, train_posts=3)


def test_a_length_that_leaves_no_post_is_refused(posts_of_four_lengths):
    with pytest.raises(UserError, match="max_post_characters is 2, but all posts of sft_tr"):
        used_rows(posts_of_four_lengths, max_post_characters=2)


def test_a_missing_ppo_train_is_no_shortage(tmp_path):
    folder = write_folder(tmp_path)
    assert "ppo_train" not in used_rows(folder, ppo_posts=512)


def test_a_short_ppo_train_is_refused(tmp_path):
    folder = write_folder(tmp_path)
    write_rows(folder / "ppo_train.jsonl", [POST])
    assert refusal_of(used_rows, folder, ppo_posts=512) == (
        "data.ppo_posts asks for 512 rows of ppo_train, but there are 1: "
        "give at most that, or 0 for all"
    )


# -- the hub ---------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of `datasets` of the test's own."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("own_cache")
def test_hub_data_sets_are_read_by_configuration_and_split(tmp_path):
    posts = tmp_path / "posts"
    pairs = tmp_path / "pairs"
    posts.mkdir()
    pairs.mkdir()
    write_rows(posts / "train.jsonl", [POST])
    write_rows(posts / "validation.jsonl", [POST | {"id": "held out"}])
    write_rows(pairs / "train.jsonl", [PAIR])
    write_rows(pairs / "validation.jsonl", [PAIR])
    (pairs / "README.md").write_text(
        "---\n"
        "configs:\n"
        "- config_name: comparisons\n"
        "  data_files:\n"
        "  - split: train\n"
        "    path: train.jsonl\n"
        "  - split: validation\n"
        "    path: validation.jsonl\n"
        "---\n"
    )
    data = Data(source=HUB, sft_dataset=str(posts), comparisons_dataset=f"{pairs}:comparisons")

    splits = read_source(data, HUB)

    assert splits["sft_train"] == [(f"{posts}[train]:1", POST)]
    assert splits["sft_validation"][0][1]["id"] == "held out"
    where, row = splits["comparisons_train"][0]
    assert where == f"{pairs}:comparisons[train]:1"
    assert row["summaries"] == PAIR["summaries"]
    assert row["choice"] == 1


@pytest.mark.usefixtures("own_cache")
def test_a_damaged_data_set_is_refused_with_the_innermost_cause(tmp_path):
    posts = tmp_path / "posts"
    posts.mkdir()
    write_rows(posts / "train.jsonl", [json.dumps({"id": "a1"}), '{"id": '])
    with pytest.raises(UserError, match=r"posts, split train, does not load: JSON parse error: .*"):
        list(read_hub(Data(source=HUB, sft_dataset=str(posts)), "sft_train"))


def test_a_full_disk_is_not_blamed_on_the_data_set(tmp_path, monkeypatch):
    def fill_the_disk(*_: Any, **__: Any) -> None:
        raise DatasetGenerationError("while generating") from OSError(errno.ENOSPC, "No space")

    monkeypatch.setattr(datasets, "load_dataset", fill_the_disk)
    write_rows(tmp_path / "train.jsonl", [POST])
    with pytest.raises(OSError, match="No space") as error:
        list(read_hub(Data(source=HUB, sft_dataset=str(tmp_path)), "sft_train"))
    assert error.value.errno == errno.ENOSPC
