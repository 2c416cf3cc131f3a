"""Devices, compiled layers and bf16, which need a GPU: `pytest -m gpu` runs these tests there.

Elsewhere `test_pretend_gpu.py` runs them on a pretended GPU.
"""

import pytest
import torch
from accelerate.utils import is_triton_available

from stages.data.ragged import pad_left
from stages.models.forward import ResponseBatch, response_logprobs, score_responses
from stages.models.loading import load_policy, load_reward_model
from stages.models.policy import PolicyModel
from stages.models.sampling import Decoding, Noise
from stages.rl import rollout
from stages.rl.metrics import compilations
from stages.runs.files import read_json
from stages.training.accelerator import make_accelerator
from stages.training.compiling import COMPILER
from tests.bench import ours
from tests.bench.case import parse_case
from tests.lib import pretend_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: `pytest -m gpu` needs one"),
]
CONFIG = parse_case("tiny-s:8:4", ("memory.mixed_precision=bf16",)).make_config()
PPO = CONFIG.ppo


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    ours.prepare(CONFIG, PPO, folder)
    return folder


def test_weights_moments_and_episodes_are_on_the_gpu(folder):
    learner = ours.load_learner(CONFIG, PPO, folder, make_accelerator(CONFIG))
    queries = read_json(folder / "queries.json")
    noise = Noise(seed=1, purpose="gpu", length=4)

    episodes = ours.take_update(learner, queries, PPO, noise)

    tensors = [value for value in vars(episodes).values() if isinstance(value, torch.Tensor)]
    for moments in learner.optimizer.state.values():
        tensors += moments.values()
    networks = learner.networks
    for network in (networks.policy, networks.critic, networks.ref_policy, networks.reward_model):
        tensors += network.state_dict().values()
    assert {tensor.device.type for tensor in tensors} == {"cuda"}


def test_replayed_steps_sample_the_same_tokens_and_layers_are_compiled(folder, monkeypatch):
    is_real_gpu = torch.cuda.get_device_name() != pretend_gpu.NAME
    learner = ours.load_learner(CONFIG, PPO, folder, make_accelerator(CONFIG))
    queries = [torch.tensor(query) for query in read_json(folder / "queries.json")]
    noise = Noise(seed=1, purpose="gpu", length=20)

    monkeypatch.setattr(Decoding, "records", True)
    replayed = rollout.sample_responses(learner, queries, noise, PPO)
    assert Decoding.records == is_real_gpu, "recording a step as a CUDA graph failed"
    monkeypatch.setattr(Decoding, "records", False)
    plain = rollout.sample_responses(learner, queries, noise, PPO)

    assert torch.equal(replayed.responses, plain.responses)
    assert torch.equal(replayed.sampled_logprobs, plain.sampled_logprobs)
    measured = rollout.measure(learner, replayed, PPO)
    assert measured.sampler_gaps.mean() < 0.1 * noise.length
    assert COMPILER.is_on == bool(is_triton_available()), "torch.compile failed"
    if COMPILER.is_on:
        assert 0 < compilations()["compilations"] <= 8


def test_bf16_is_near_float32_in_log_probabilities_scores_and_gradients(folder):
    device = make_accelerator(CONFIG).device
    policy = PolicyModel(load_policy(folder / "model").to(device))
    reward_model = load_reward_model(folder / "reward_model").to(device)
    pad_id = ours.task_for_trl(CONFIG, folder).pad_id
    queries = [torch.tensor(query) for query in read_json(folder / "queries.json")[:4]]
    batch = ResponseBatch(
        queries=pad_left(queries, pad_id).to(device),
        responses=torch.randint(1, pad_id, (4, CONFIG.data.max_summary_tokens)).to(device),
        pad_id=pad_id,
    )

    def outputs(is_half):
        policy.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=is_half):
            logprobs, _ = response_logprobs(policy, batch)
            scores = score_responses(reward_model, batch)
        torch.autograd.backward(logprobs.mean())
        gradients = [weight.grad for weight in policy.parameters() if weight.grad is not None]
        gradient = torch.cat([gradient.flatten() for gradient in gradients])
        return {"log-probabilities": logprobs.detach(), "scores": scores, "gradient": gradient}

    half = outputs(is_half=True)
    exact = outputs(is_half=False)

    for name in exact:
        error = (half[name] - exact[name]).abs().mean().item()
        assert 0 < error < 0.05 * exact[name].abs().mean().item(), name
