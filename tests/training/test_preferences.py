"""Comparisons: each text is measured once, posts stay together, and gaps are counted by hand."""

import pytest
import torch

from eval.stats.reward_pairs import calibration, pair_statistics
from stages.config.command_line import make_config
from stages.data.ragged import TokenizedSplit, make_ragged
from stages.rm import take_step
from stages.training.preferences import (
    gap_rows,
    measure_pairs,
    microbatches_of_texts,
    rows_by_post,
    summarize_gaps,
)
from stages.training.random_streams import batch_rows
from tests.lib.learners import state_of

POST_A, POST_B = [11, 12, 13], [21, 22]
# Texts of different lengths, so that a length names a text.
ONE, TWO, THREE, FOUR, FIVE, SIX = ([7] * length for length in range(1, 7))


@pytest.fixture
def pairs() -> TokenizedSplit:
    """Four comparisons: three of post A, with four different texts, and one of post B."""
    rows = [
        (POST_A, ONE, TWO),
        (POST_B, FIVE, SIX),
        (POST_A, THREE, FOUR),
        (POST_A, TWO, THREE),  # both texts have occurred before
    ]
    queries, chosen, rejected = zip(*rows, strict=True)
    columns = {
        "queries": make_ragged(queries),
        "chosen": make_ragged(chosen),
        "rejected": make_ragged(rejected),
    }
    return TokenizedSplit(columns=columns, rows=[{}] * 4)


class Lengths:
    """Measures the length of each summary, and remembers what it was given."""

    def __call__(
        self, queries: list[torch.Tensor], lists: list[list[torch.Tensor]]
    ) -> torch.Tensor:
        self.queries = [query.tolist() for query in queries]
        self.lengths = [[len(text) for text in texts] for texts in lists]
        return torch.tensor(self.lengths)


def test_a_post_and_each_of_its_different_summaries_are_measured_once(pairs):
    measure = Lengths()
    measure_pairs(pairs, [0, 1, 2, 3], measure)
    assert measure.queries == [POST_A, POST_B]
    # Post A has four texts; post B has two, and empty ones in the last two lists.
    assert measure.lengths == [[1, 5], [2, 6], [3, 0], [4, 0]]


def test_what_is_measured_comes_back_in_the_order_of_the_rows(pairs):
    chosen, rejected = measure_pairs(pairs, [2, 1, 0, 3], Lengths())
    assert chosen.tolist() == [3, 5, 1, 2]
    assert rejected.tolist() == [4, 6, 2, 3]


def test_rows_are_grouped_by_post_in_their_order(pairs):
    assert rows_by_post(pairs) == [[0, 2, 3], [1]]
    assert rows_by_post(pairs, [3, 1, 0]) == [[3, 0], [1]]


@pytest.mark.parametrize(
    ("size", "microbatches"),
    [
        (8, [[1, 0, 2, 3]]),
        (6, [[1, 0, 2, 3]]),  # two texts of post B and four of post A
        (5, [[1], [0, 2, 3]]),
        (4, [[1], [0, 2, 3]]),
        (3, [[1], [0], [2], [3]]),  # the texts of post A do not fit together
        (2, [[1], [0], [2], [3]]),
    ],
)
def test_the_pairs_of_a_post_share_a_microbatch_if_their_texts_fit(pairs, size, microbatches):
    assert microbatches_of_texts(pairs, [0, 1, 2, 3], size) == microbatches


def test_rows_of_a_group_stay_neighbors_and_each_row_comes_once_in_an_epoch():
    groups = [[0, 3], [1], [2, 4, 5]]
    epochs = [batch_rows(6, 6, epoch, 1, "rm", groups) for epoch in range(8)]
    texts = ["".join(map(str, epoch)) for epoch in epochs]
    for text in texts:
        assert sorted(text) == list("012345")
        assert "03" in text
        assert "245" in text
    assert len(set(texts)) > 1

    first_half, second_half = (batch_rows(6, 3, update, 1, "rm", groups) for update in (2, 3))
    assert first_half + second_half == epochs[1]


# -- gaps ------------------------------------------------------------------------------------------


def test_the_share_that_is_right_is_counted_by_the_size_of_the_gap():
    """Bins of half a reward unit, by hand: [0, 0.5), [0.5, 1), and [2, 2.5) after three empty."""
    found = calibration([0.2, -0.1, 0.4, 0.6, 0.9, -0.7, 0.99, 2.3])
    assert found == [[0.25, 2 / 3, 3], [0.75, 3 / 4, 4], [2.25, 1.0, 1]]


def test_a_gap_of_0_is_not_right(reward_model):
    about = dict.fromkeys(("id", "split", "batch", "policies"), "x") | {"strength": 2}
    columns = {
        "queries": make_ragged([POST_A, POST_B, POST_A]),
        "chosen": make_ragged([ONE, TWO, THREE]),
        "rejected": make_ragged([ONE, TWO, THREE]),
    }
    equal_texts = TokenizedSplit(columns=columns, rows=[about] * 3)
    gaps = [0.0, 0.5, -0.5]

    assert summarize_gaps(gaps)["accuracy"] == pytest.approx(1 / 3)
    statistics = pair_statistics(gap_rows(gaps, equal_texts))
    assert statistics["accuracy"] == pytest.approx(1 / 3)
    assert statistics["by_batch"]["x"]["accuracy"] == pytest.approx(1 / 3)
    assert statistics["calibration"][0][1] == 0

    optimizer = torch.optim.SGD(reward_model.parameters(), lr=0.0)
    state = state_of(make_config("tiny"), reward_model, optimizer)
    assert take_step(state, equal_texts, [0, 1, 2])["accuracy/train"] == 0
