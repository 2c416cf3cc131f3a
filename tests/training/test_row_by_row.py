"""Rows are shared out, measured, kept and gathered, each exactly once."""

from itertools import chain
from pathlib import Path

import pytest
import torch

from stages.runs.files import whole_lines
from stages.training import processes
from stages.training.memory import MemoryBudget, PassSize
from stages.training.processes import gather_rows, global_max, global_sum, local_share
from stages.training.row_by_row import KeptRows, measure_rows, measure_share
from tests.lib.processes import Process

# -- sharing out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 6, 7, 8])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_is_shared_out_is_gathered_in_its_order(monkeypatch, rows, count):
    launched = [Process(index, count) for index in range(count)]
    shares = [local_share(range(rows), process) for process in launched]
    assert sorted(chain(*shares)) == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    monkeypatch.setattr(processes, "gather_object", lambda share: list(shares))
    for process, share in zip(launched, shares, strict=True):
        assert gather_rows(process, share) == list(range(rows))


def test_the_sum_over_one_process_is_exact():
    assert global_sum(Process(), 2**24 + 1, torch.tensor(0.5)) == [16777217.0, 0.5]


def test_all_processes_get_the_largest_of_each_number():
    process = Process(index=0, count=2)
    other = torch.tensor([[3, 0, 5]])
    process.gather = lambda local: torch.cat([local, other])
    assert global_max(process, 1, 2, 5) == [3, 2, 5]


# -- measuring -------------------------------------------------------------------------------------

LENGTHS = [3, 1, 2, 5, 4, 1, 9]
THIRDS = [row / 3 for row in range(7)]
"""What the rows are measured to be; a third has no exact decimal."""


class Measurement:
    """Measures rows, two in a pass, and remembers which."""

    def __init__(self, keep: Path) -> None:
        self.keep = keep
        self.measured: list[list[int]] = []

    def measure(self, rows: list[int]) -> list[float]:
        self.measured.append(rows)
        return [row / 3 for row in rows]

    def share(self, process: Process) -> list[float]:
        return measure_share(process, **self.arguments("a b"))

    def rows(self, label: str = "a b") -> list[float]:
        return measure_rows(Process(), **self.arguments(label))

    def arguments(self, label: str) -> dict:
        return {
            "budget": MemoryBudget(forward_batch_size=2, microbatch_size=2),
            "label": label,
            "sort_keys": LENGTHS,
            "size": PassSize(rows=2),
            "measure": self.measure,
            "keep": self.keep,
        }


def test_rows_of_similar_length_share_a_pass_and_results_are_in_row_order(tmp_path):
    measurement = Measurement(tmp_path)
    assert measurement.rows() == THIRDS
    assert measurement.measured == [[1, 5], [2, 0], [4, 3], [6]]


def test_rows_that_two_processes_measured_are_known_to_one(tmp_path):
    measurement = Measurement(tmp_path)
    for index in (0, 1):
        assert measurement.share(Process(index, 2)) == THIRDS[index::2]
    measurement.measured.clear()

    assert measurement.rows() == THIRDS
    assert measurement.measured == []


def test_measurements_of_another_label_are_not_taken(tmp_path):
    measurement = Measurement(tmp_path)
    measurement.rows("a b")
    measurement.measured.clear()
    assert measurement.rows("other") == THIRDS
    assert measurement.measured == [[1, 5], [2, 0], [4, 3], [6]]


def test_a_part_whose_line_lacks_its_newline_is_measured_again(tmp_path):
    """A process may be killed when a line is written but for its newline. If that counted as a row,
    the next part would be written on the same line, and none of the two could be read again.
    """
    measurement = Measurement(tmp_path)
    measurement.rows()
    (file,) = tmp_path.iterdir()
    text = file.read_bytes()
    assert text.endswith(b"\n")
    file.write_bytes(text[:-1])
    measurement.measured.clear()

    assert measurement.rows() == THIRDS
    assert measurement.measured == [[6]]
    assert file.read_bytes() == text


def test_lines_count_only_up_to_the_first_damaged_one(tmp_path):
    file = tmp_path / "rows.jsonl"
    complete = b'{"a": 1}\n{"a": 2}\n'
    rows = [{"a": 1}, {"a": 2}]
    for rest in (b"", b'{"a": 3}', b'{"a": ', b'{"a": \n{"a": 4}\n', b"\xff\n"):
        file.write_bytes(complete + rest)
        assert whole_lines(file) == (rows, len(complete)), rest


def test_kept_rows_are_appended_after_a_line_that_was_cut_off(tmp_path):
    kept = KeptRows(tmp_path, "scores", 0)
    kept.add([0, 1], [0.5, 1.5])
    with kept.path.open("a") as lines:
        lines.write('{"rows": [2], "measured": [2.5]}')  # no newline

    again = KeptRows(tmp_path, "scores", 0)
    assert again.known == {0: 0.5, 1: 1.5}
    again.add([2], [2.5])
    assert KeptRows(tmp_path, "scores", 0).known == {0: 0.5, 1: 1.5, 2: 2.5}
