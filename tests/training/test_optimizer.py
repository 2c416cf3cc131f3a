"""AdamW with the paper's settings, and learning rates computed by hand."""

import math

import pytest
import torch

from stages.config.sections import Optimizer
from stages.rl.update import linear_rate
from stages.training.optimizer import cosine_rate, make_optimizer, set_learning_rate


def test_the_linear_rate_falls_from_1_and_the_last_update_still_has_its_share():
    assert [linear_rate(update, 4) for update in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert linear_rate(1952, 1953) == pytest.approx(1 / 1953)


def test_the_cosine_rate_at_hand_computed_points():
    points = {0: 1.0, 25: 0.5 + math.sqrt(2) / 4, 50: 0.5, 75: 0.5 - math.sqrt(2) / 4}
    for update, expected in points.items():
        assert cosine_rate(update, 100, 0.0) == pytest.approx(expected)
    assert 0 < cosine_rate(99, 100, 0.0) < 0.001


def test_the_warm_up_rises_in_even_steps_to_1_and_is_followed_by_the_cosine():
    rates = [cosine_rate(update, 10, 0.4) for update in range(10)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[7] == pytest.approx(0.5)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert cosine_rate(0, 1, 0.0) == 1.0


def test_the_optimizer_is_adamw_with_the_papers_settings():
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]
    groups = [{"params": weights[:1]}, {"params": weights[1:]}]
    optimizer = make_optimizer(groups, 3e-6, Optimizer())
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (group["lr"], group["eps"], group["weight_decay"]) == (3e-6, 1e-5, 0.01)
        assert group["betas"] == (0.9, 0.999)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
