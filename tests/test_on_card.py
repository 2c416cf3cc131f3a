"""What only a card can show: `make card` runs it there, and the pretended card elsewhere."""

import pytest
import torch
from accelerate.utils import is_triton_available

from reports.speed import measure, speed
from stages.config.command_line import config_of
from stages.models.sampling import Decoding, Noise
from stages.rl import rollout
from stages.rl.metrics import compilations
from stages.runs.files import read_json
from stages.training.accelerator import make_accelerator
from stages.training.compiling import COMPILER
from tests.lib import pretend_card

pytestmark = [
    pytest.mark.card,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no card: `make card` needs one"),
]
CONFIG = config_of(speed.case_of("tiny-s:8:4", ("memory.mixed_precision=bf16",)).request)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    measure.prepare(CONFIG, CONFIG.ppo, folder)
    return folder


def test_weights_moments_and_episodes_are_on_the_card(folder):
    learner = measure.load_learner(CONFIG, CONFIG.ppo, folder, make_accelerator(CONFIG))
    noise, queries = Noise(seed=1, purpose="card", length=4), read_json(folder / speed.QUERIES)
    rollout = measure.take_update(learner, queries, CONFIG.ppo, noise)
    tensors = [part for part in vars(rollout).values() if isinstance(part, torch.Tensor)]
    tensors += [part for kept in learner.optimizer.state.values() for part in kept.values()]
    for name in ("policy", "critic", "ref_policy", "reward_model"):
        tensors += getattr(learner.networks, name).state_dict().values()
    assert {tensor.device.type for tensor in tensors} == {"cuda"}


def test_recorded_steps_draw_the_same_tokens_and_layers_are_compiled(folder, monkeypatch):
    real = torch.cuda.get_device_name() != pretend_card.NAME
    learner = measure.load_learner(CONFIG, CONFIG.ppo, folder, make_accelerator(CONFIG))
    queries = [torch.tensor(row) for row in read_json(folder / speed.QUERIES)]
    noise, drawn = Noise(seed=1, purpose="card", length=20), []
    for records in (True, False):
        monkeypatch.setattr(Decoding, "records", records)
        drawn.append(rollout.sample_responses(learner, queries, noise, CONFIG.ppo))
        assert Decoding.records == (records and real), "recording a step failed"
    for name in ("responses", "sampled_logprobs"):
        assert torch.equal(*(getattr(sampled, name) for sampled in drawn))
    measured = rollout.measure(learner, drawn[0], CONFIG.ppo)
    assert measured.sampler_gaps.mean() < 0.1 * noise.length
    assert COMPILER.is_on == bool(is_triton_available()), "torch.compile failed"
    assert not COMPILER.is_on or 0 < compilations()["compilations"] <= 8


def test_bf16_is_near_float32_in_log_probabilities_scores_and_gradients(folder):
    for row in measure.compare_precision(CONFIG, CONFIG.ppo, folder)["rows"]:
        assert 0 < row["mean"] < 0.05 * row["mean size"], row
