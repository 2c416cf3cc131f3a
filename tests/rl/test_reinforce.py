"""REINFORCE++: its returns by hand, its settings, and that it learns."""

import json

import pytest
import torch

from stages.functional import masked_whiten
from stages.rl.algorithms import ALGORITHMS, GlobalBatch, Reinforce
from tests.lib.make_stages import run_module

REWARD = '''
def short(queries, responses, rows):
    """The fewer characters, the better."""
    return [-len(text) / 10 for text in responses]
'''

SETTINGS = """
    base.hidden_size=32 base.num_layers=1 base.vocab_size=1024
    world.train_posts=64 world.validation_posts=4
    world.train_comparisons=8 world.validation_comparisons=4
    sft.epochs=2 normalize.posts=16 memory.cpu_threads=1
    reward.function=short_texts:short ppo.critic_init=zero eval.posts=4
    reinforce.total_episodes=640 reinforce.batch_size=32 reinforce.learning_rate=2e-3
    reinforce.kl_coef=0.01 reinforce.eos_trick=off
"""


def test_a_tokens_advantage_is_the_reward_from_it_on():
    batch = GlobalBatch(
        rewards=torch.tensor([[-0.1, -0.2, 1.0, 0.0], [0.3, 0.5, 0.0, 0.0]]),
        response_mask=torch.tensor([[True, True, True, False], [True, True, False, False]]),
        value_mask=torch.ones(2, 4, dtype=torch.bool),
        values=None,
        samples_per_query=1,
    )

    advantages, returns = ALGORITHMS["reinforce"].advantages(batch, Reinforce())

    expected = torch.tensor([[0.7, 0.8, 1.0, 0.0], [0.8, 0.5, 0.0, 0.0]])
    torch.testing.assert_close(advantages, expected)
    assert returns is None


def test_advantages_are_normalized_over_the_tokens_of_the_whole_batch():
    returns = torch.tensor([[0.7, 0.8, 1.0, 9.0], [0.8, 0.5, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])

    whitened = masked_whiten(returns, mask)

    # Mean 0.76, variance 0.0264 of 0.7, 0.8, 1.0, 0.8, 0.5: the 9s do not count.
    assert whitened[0, 2].item() == pytest.approx(0.24 / 0.0264**0.5, abs=1e-4)
    assert whitened[1, 1].item() == pytest.approx(-0.26 / 0.0264**0.5, abs=1e-4)
    assert Reinforce().whiten_advantages


def test_its_defaults_are_ppos_without_critic_and_with_one_response_per_query():
    settings = Reinforce()

    assert not settings.uses_critic
    assert (settings.samples_per_query, settings.cliprange, settings.kl_in) == (1, 0.2, "reward")
    assert ALGORITHMS["reinforce"].name == "reinforce"


@pytest.mark.learns
def test_it_learns_what_is_rewarded(tmp_path, monkeypatch):
    from stages import base, normalize, ppo, rm, sft

    monkeypatch.chdir(tmp_path)
    (tmp_path / "short_texts.py").write_text(REWARD)
    arguments = ["--preset", "tiny", "--name", "short", "--set", *SETTINGS.split()]
    for module in (base, sft, rm, normalize):
        run_module(module, arguments)
    run_module(ppo, arguments, "reinforce")

    metrics = tmp_path / "runs/short/seed44413/reinforce/metrics.jsonl"
    scores = [json.loads(line)["objective/scores"] for line in metrics.open()]
    assert len(scores) == 20
    assert sum(scores[-3:]) / 3 > scores[0] + 0.5
