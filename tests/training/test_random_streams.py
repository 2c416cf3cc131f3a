"""The order of the data and every other use of randomness: functions of (seed, purpose, step)."""

import pytest
import torch

from stages.models.sampling import sampling_noise
from stages.training.random_streams import batch_rows, stream, stream_seed


@pytest.mark.parametrize(("rows", "batch_size"), [(12, 4), (10, 4), (3, 7), (5, 5), (1, 2)])
def test_every_row_comes_once_in_every_epoch(rows, batch_size):
    drawn: list[int] = []
    while len(drawn) < 4 * rows:
        drawn += batch_rows(rows, batch_size, len(drawn) // batch_size, seed=1, purpose="sft")
    epochs = [drawn[start : start + rows] for start in range(0, 4 * rows, rows)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)


def test_a_batch_is_a_function_of_seed_purpose_and_update():
    def rows(update: int = 5, seed: int = 1, purpose: str = "sft") -> list[int]:
        return batch_rows(100, 8, update, seed, purpose)

    first = rows()
    torch.manual_seed(9)
    torch.rand(3)
    rows(update=30)
    assert rows() == first
    assert len({tuple(other) for other in (first, rows(6), rows(seed=2), rows(purpose="rm"))}) == 4


def test_epochs_are_shuffled_anew():
    epochs = [batch_rows(50, 50, epoch, 1, "sft") for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != list(range(50))


def test_sampling_noise_depends_on_nothing_but_its_key():
    first = sampling_noise(1, "ppo", 3, rows=4, length=5)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    sampling_noise(1, "ppo", 4, 4, 5)
    assert torch.equal(sampling_noise(1, "ppo", 3, 4, 5), first)
    assert torch.equal(torch.get_rng_state(), before)
    for other in ((2, "ppo", 3), (1, "sft", 3), (1, "ppo", 4)):
        assert not torch.equal(sampling_noise(*other, 4, 5), first)


def test_seeds_of_different_uses_differ_and_fit_a_generator():
    keys = [(seed, purpose, step) for seed in (1, 11) for purpose in "ab" for step in (1, 11)]
    seeds = [stream_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert torch.rand(1, generator=stream(1, "a")) == torch.rand(1, generator=stream(1, "a", 0))
