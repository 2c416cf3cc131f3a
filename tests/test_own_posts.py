"""Posts and comparisons of one's own: what is passed over, and what is refused by its place."""

from tests.test_posts import POST, read_all, write_folder


def test_blank_lines_are_no_rows_and_are_counted(tmp_path):
    folder = write_folder(tmp_path, sft_train=[POST, "", POST, " "])
    places = [where.rpartition(":")[2] for where, _ in read_all(folder)["sft_train"]]
    assert places == ["1", "3"]
