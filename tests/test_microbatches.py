"""The microbatch size is a memory knob and nothing else: equal weights in SFT and reward model.

PPO's is in test_stages.py, DPO's in test_dpo.py, two processes in test_processes.py.
"""

import copy
import random
from dataclasses import replace

import pytest
import torch

from stages import reward, sft
from stages.learning.learner import NonFiniteError
from stages.learning.loop import make_optimizer
from stages.posts.ragged import TokenizedSplit, make_ragged
from stages.settings.command_line import make_config
from tests.conftest import state_of

ROWS = 16


def texts(seed: int, longest: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(1, 29) for _ in range(rng.randint(1, longest))] for _ in range(ROWS)]


def split(*names: str) -> TokenizedSplit:
    columns = {name: make_ragged(texts(seed, 9)) for seed, name in enumerate(names)}
    return TokenizedSplit(columns=columns, rows=[{"split": "train"}] * ROWS)


SPLITS = {sft: split("queries", "summaries"), reward: split("queries", "chosen", "rejected")}


def weights_after_two_updates(stage, network, microbatch_size: int) -> torch.Tensor:
    config = make_config("tiny")
    config = replace(config, memory=replace(config.memory, microbatch_size=microbatch_size))
    network = copy.deepcopy(network)
    optimizer = make_optimizer(network.parameters(), 1e-3, config.optimizer)
    for rows in (list(range(8)), list(range(8, 16))):
        stage.take_step(state_of(config, network, optimizer), SPLITS[stage], rows)
    return torch.cat([one.detach().flatten() for one in network.parameters()])


@pytest.mark.parametrize("stage", SPLITS, ids=lambda one: one.__name__)
def test_two_updates_give_equal_weights_for_any_microbatch(stage, policy, reward_model):
    network = policy if stage is sft else reward_model
    start = torch.cat([one.detach().flatten() for one in network.parameters()])
    whole = weights_after_two_updates(stage, network, 8)
    assert (whole - start).abs().max() > 1e-4
    for microbatch_size in (1, 2, 16):
        parts = weights_after_two_updates(stage, network, microbatch_size)
        assert (parts - whole).abs().max() < 1e-5, microbatch_size


@pytest.mark.parametrize("stage", SPLITS, ids=lambda one: one.__name__)
def test_a_gradient_that_is_not_finite_stops_before_the_step(stage, policy, reward_model):
    network = copy.deepcopy(policy if stage is sft else reward_model)
    weights = next(network.parameters())  # its loss stays finite
    weights.register_hook(lambda gradient: gradient * torch.nan)
    config, before = make_config("tiny"), weights.detach().clone()
    state = state_of(config, network, make_optimizer(network.parameters(), 1e-3, config.optimizer))
    with pytest.raises(NonFiniteError, match=rf"gradient not finite.*{state.learner.stage}"):
        stage.take_step(state, SPLITS[stage], list(range(8)))
    assert torch.equal(weights, before)
