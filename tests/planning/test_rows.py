"""The number of rows that a run uses, as far as it is known before the run."""

from stages.config.command_line import make_config
from stages.planning.rows import split_rows


def test_the_published_data_have_their_published_rows():
    assert split_rows(make_config("pythia-1b"))["sft_train"] == 116_722


def test_another_data_set_of_the_hub_has_an_unknown_number_of_rows():
    config = make_config("pythia-1b", name="mine", overrides=("data.comparisons_dataset=a/b",))
    rows = split_rows(config)
    assert rows["sft_train"] == 116_722
    assert rows["comparisons_train"] == 0


def test_the_built_in_world_has_the_rows_of_its_settings():
    overrides = ("world.train_posts=70", "data.train_posts=40")
    config = make_config("tiny", name="mine", overrides=overrides)
    assert split_rows(config)["sft_train"] == 40


def test_the_lines_of_a_folders_files_are_counted(tmp_path):
    (tmp_path / "sft_train.jsonl").write_text("{}\n{}\n{}\n")
    (tmp_path / "comparisons_train.jsonl").write_text("{}\n{}\n")
    config = make_config("tiny", name="mine", data=str(tmp_path), overrides=("rm.pairs=even",))
    rows = split_rows(config)
    assert rows["sft_train"] == 3
    assert rows["sft_validation"] == 0  # there is no file
    assert rows["comparisons_train"] == 1  # half of the pairs
