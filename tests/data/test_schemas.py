"""What is read from a row of the real data's schemas."""

from stages.data.schemas import check_comparison, is_cnndm, label_strength
from tests.lib.rows import EMPTY_PAIR, EQUAL_PAIR, PAIR, edited


def test_empty_and_equal_summaries_are_in_the_schema():
    check_comparison("here", EMPTY_PAIR)
    check_comparison("here", EQUAL_PAIR)


def test_label_strength_is_the_distance_from_a_tie():
    strengths = [label_strength(edited(PAIR, "extra.confidence", n)) for n in range(1, 10)]
    assert strengths == [4, 3, 2, 1, 0, 1, 2, 3, 4]


def test_label_strength_without_a_confidence_is_unknown():
    assert label_strength(edited(PAIR, "extra.confidence", None)) is None
    assert label_strength(PAIR | {"extra": None}) is None


def test_news_articles_are_recognized_by_their_batch():
    for batch in ("batch0_cnndm", "cnndm0", "cnndm2"):
        assert is_cnndm(PAIR | {"batch": batch})
    for number in (*range(3, 21), 22):
        assert not is_cnndm(PAIR | {"batch": f"batch{number}"})
