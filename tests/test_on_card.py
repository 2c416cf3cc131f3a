"""What only a card can show: `make card` runs it there. Elsewhere the pretended card does."""

import pytest
import torch

from reports.speed import measure, speed
from stages.learning.loop import make_accelerator
from stages.learning.passes import response_logprobs, score_responses
from stages.learning.sampling import Noise
from stages.running.files import read_json
from stages.settings.command_line import config_of

pytestmark = [
    pytest.mark.card,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no card: `make card` runs it on one"),
]
CONFIG = config_of(speed.case_of("tiny-s:8:4", ("memory.mixed_precision=bf16",)).request)


@pytest.fixture(scope="module")
def updated(tmp_path_factory):
    """A learner after an update of PPO, and the rollout."""
    folder = tmp_path_factory.mktemp("card")
    measure.prepare(CONFIG, CONFIG.ppo, folder)
    learner = measure.load_learner(CONFIG, CONFIG.ppo, folder, make_accelerator(CONFIG))
    noise = Noise(seed=1, purpose="card", length=CONFIG.data.max_summary_tokens)
    queries = read_json(folder / speed.QUERIES)
    return learner, measure.take_update(learner, queries, CONFIG.ppo, noise)


def test_weights_gradients_moments_and_episodes_are_on_the_card(updated):
    learner, rollout = updated
    networks = learner.networks
    four = (networks.policy, networks.critic, networks.ref_policy, networks.reward_model)
    weights = [weight for network in four for weight in network.state_dict().values()]
    moments = [
        moment for moments in learner.optimizer.state.values() for moment in moments.values()
    ]
    episodes = [part for part in vars(rollout).values() if isinstance(part, torch.Tensor)]
    assert len(moments) > len(weights) / 2
    assert {part.device.type for part in (*weights, *moments, *episodes)} == {"cuda"}


def computed(networks, rollout, device, half):
    """Log-probabilities and scores of a rollout's texts on a device."""
    policy, scorer = networks.ref_policy.to(device), networks.reward_model.to(device)
    queries, responses = rollout.queries.to(device), rollout.responses.to(device)
    texts = torch.cat([queries, responses], dim=1)
    length, pad_id = responses.shape[1], networks.pad_id
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=half):
        logprobs = response_logprobs(policy, texts, texts != pad_id, length, 1.0)
        scores = score_responses(scorer, queries, responses, pad_id)
    return logprobs.cpu()[(responses != pad_id).cpu()], scores.cpu()


def test_log_probabilities_and_scores_are_those_of_the_cpu_and_near_in_bf16(updated):
    learner, rollout = updated
    rounded, exact = (computed(learner.networks, rollout, "cuda", half) for half in (True, False))
    expected = computed(learner.networks, rollout, "cpu", half=False)
    for part in range(2):
        torch.testing.assert_close(exact[part], expected[part], atol=1e-3, rtol=0)
        torch.testing.assert_close(rounded[part], exact[part], atol=0.1, rtol=0)
        assert not torch.equal(rounded[part], exact[part])


def test_the_rollout_of_one_noise_is_the_same_twice(updated):
    learner, _ = updated
    noise = Noise(seed=1, purpose="again", length=CONFIG.data.max_summary_tokens)
    queries = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    first, second = (
        measure.sample_responses(learner, queries, noise, CONFIG.ppo).responses for _ in range(2)
    )
    assert torch.equal(first, second)
    assert torch.cuda.max_memory_allocated() > 0
