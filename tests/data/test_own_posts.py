"""Posts and comparisons of one's own: what is passed over, and what is refused by its place."""

import errno

import datasets
import pytest
from datasets.exceptions import DatasetGenerationError

from stages.data.bad_rows import BadRows
from stages.data.readers import read_hub, read_source, subsample
from stages.settings.config import HUB, Data, UserError
from tests.data.test_posts import PAIR, POST, read_all, write_folder
from tests.lib.asserts import refusal_of


def test_blank_lines_are_no_rows_and_are_counted(tmp_path):
    folder = write_folder(tmp_path, sft_train=[POST, "", POST, " "])
    places = [where.rpartition(":")[2] for where, _ in read_all(folder)["sft_train"]]
    assert places == ["1", "3"]


def test_the_id_of_an_earlier_held_out_post_is_refused_or_skipped_and_elsewhere_kept(tmp_path):
    again = [POST, POST | {"id": "a2"}, POST | {"post": "Another."}]
    folder = write_folder(
        tmp_path, sft_train=again, sft_validation=again, comparisons_train=[PAIR] * 2
    )
    text = refusal_of(read_all, folder)
    assert text.startswith(
        f"{folder}/sft_validation.jsonl:3: field id is 'a1', as in an earlier row"
    )
    assert "give each held-out post its own id" in text
    bad = BadRows("skip")
    kept = dict(read_source(Data(source=str(folder), on_bad_row="skip"), str(folder), bad))
    assert [row["id"] for _, row in kept["sft_validation"]] == ["a1", "a2"]
    assert [listed["where"] for listed in bad.skipped] == [f"{folder}/sft_validation.jsonl:3"]
    assert (len(kept["sft_train"]), len(kept["comparisons_train"])) == (3, 2)


def test_a_data_set_whose_files_are_damaged_is_refused_with_what_is_wrong_below(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    posts = tmp_path / "posts"
    posts.mkdir()
    (posts / "train.jsonl").write_text('{"id": "a1"}\n{"id": \n')
    with pytest.raises(UserError, match=r"posts, split train, does not load: JSON parse error: .*"):
        list(read_hub(Data(source=HUB, sft_dataset=str(posts)), "sft_train"))

    def full(*_, **__):
        raise DatasetGenerationError("while generating") from OSError(errno.ENOSPC, "No space")

    monkeypatch.setattr(datasets, "load_dataset", full)
    with pytest.raises(OSError, match="No space") as stop:
        list(read_hub(Data(source=HUB, sft_dataset=str(posts)), "sft_train"))
    assert stop.value.errno == errno.ENOSPC


def test_the_optional_split_may_be_missing_where_a_preset_counts_its_posts(tmp_path):
    data = Data(source=str(write_folder(tmp_path)), ppo_posts=512)
    assert "ppo_train" not in subsample(data, read_all(tmp_path))
    (tmp_path / "ppo_train.jsonl").write_text((tmp_path / "sft_train.jsonl").read_text())
    asked = "data.ppo_posts: 512 rows of ppo_train are asked for, there are 1"
    line = f"{asked}: give at most that, or 0 for all"
    assert refusal_of(subsample, data, read_all(tmp_path)) == line
