"""Normalization of the reward model: which references are scored, and their mean of 0."""

from itertools import pairwise

import pytest

from stages import normalize
from stages.config.errors import UserError


def test_a_mean_of_references_that_is_not_0_is_caught_within_what_bf16_rounds():
    normalize.check_mean(5e-4, normalize.TOLERANCES["no"])
    normalize.check_mean(-0.004, normalize.TOLERANCES["bf16"])  # SmolLM2-135M, 16 rows
    for mean, precision in ((2e-3, "no"), (0.06, "bf16"), (float("nan"), "bf16")):
        with pytest.raises(UserError, match="check the metrics of the rm stage"):
            normalize.check_mean(mean, normalize.TOLERANCES[precision])


def test_as_many_references_as_asked_are_spread_evenly():
    for rows, count in ((8000, 2000), (512, 256), (600, 600)):  # two presets, and all
        assert normalize.evenly(rows, count) == list(range(0, rows, rows // count))
    assert normalize.evenly(5, 3) == [0, 1, 3]
    assert normalize.evenly(3, 5) == [0, 1, 2]
    spread = normalize.evenly(2600, 1000)
    assert len(spread) == 1000
    assert {after - before for before, after in pairwise(spread)} == {2, 3}
