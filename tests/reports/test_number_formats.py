"""Numbers as pages write them."""

import pytest

from reports import formats
from reports.results import Interval

RATE = Interval(estimate=0.6305, low=0.6004, high=0.66)
GAP = Interval(estimate=0.015, low=-0.0054, high=0.035)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (formats.percent(0.6305), "63.0%"),
        (formats.percent(RATE), "63.0% [60.0, 66.0]"),
        (formats.points(GAP), "+1.5 points [-0.5, +3.5]"),
        (formats.number(-0.001), "0.00"),
        (formats.number(1.239, digits=1), "1.2"),
        (formats.difference(0.25), "+0.25"),
        (formats.count(1234), "1,234"),
        (formats.bounds((0.59, 0.615)), "[59.0, 61.5]"),
        (formats.p_value(0.0004), "p < 0.001"),
        (formats.p_value(0.0321), "p = 0.032"),
        (formats.percent(None), "–"),
        (formats.number(float("nan")), "–"),
        (formats.p_value(None), "–"),
    ],
)
def test_a_number_is_written_with_its_unit_and_interval(written, text):
    assert written == text


def test_an_interval_without_width_is_not_shown():
    assert formats.number(Interval(estimate=0.0, low=0.0, high=0.0)) == "0.00"


@pytest.mark.parametrize(
    ("seconds", "text"), [(40, "40 s"), (1500, "25 min"), (3900, "1 h 05 min")]
)
def test_a_duration_is_written_for_people(seconds, text):
    assert formats.duration(seconds) == text


def test_a_terminal_table_aligns_numbers_to_the_right():
    table = formats.text_table(("", "rate"), [("SFT", "5%"), ("REINFORCE", "50%")])
    assert table.splitlines() == ["           rate", "SFT          5%", "REINFORCE   50%"]
