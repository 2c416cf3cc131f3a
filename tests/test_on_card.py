"""What only a card can show: `make card` runs it there, and the pretended card elsewhere."""

from argparse import Namespace

import pytest
import torch

from reports.card import parts
from reports.speed import measure
from stages.learning.loop import make_accelerator
from stages.learning.sampling import Noise

pytestmark = [
    pytest.mark.card,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no card: `make card` needs one"),
]


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    return Namespace(shape="tiny-s:8:4", overrides=[], result=folder / "result.json")


def test_weights_moments_and_episodes_are_on_the_card(args):
    config, folder, queries = parts.prepared(args)
    learner = measure.load_learner(config, config.ppo, folder, make_accelerator(config))
    noise = Noise(seed=1, purpose="card", length=4)
    rollout = measure.take_update(learner, queries, config.ppo, noise)
    tensors = [part for part in vars(rollout).values() if isinstance(part, torch.Tensor)]
    tensors += [part for kept in learner.optimizer.state.values() for part in kept.values()]
    for name in ("policy", "critic", "ref_policy", "reward_model"):
        tensors += getattr(learner.networks, name).state_dict().values()
    assert {tensor.device.type for tensor in tensors} == {"cuda"}


def test_bf16_is_near_float32_in_log_probabilities_scores_and_gradients(args):
    for row in parts.precision(args):
        assert 0 < row["mean"] < 0.05 * row["mean size"], row
