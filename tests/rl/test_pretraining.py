"""The pretraining term (PPO-ptx): its loss and gradient next to plain transformers, its rows."""

import copy

import pytest
import torch
import torch.nn.functional as F

from stages.config.command_line import make_config
from stages.rl.networks import PolicyAndCritic
from stages.rl.pretraining import PretrainingMix, load_pretraining_mix, pretraining_losses
from stages.rl.update import optimize
from tests.lib.learners import learner_of, rolled_out
from tests.lib.small_splits import POSTS

COEF = 0.3


def mix_of(loss_on_query=False, batch_size=4):
    return PretrainingMix(
        split=POSTS,
        coef=COEF,
        loss_on_query=loss_on_query,
        batch_size=batch_size,
        steps_per_update=2,
        seed=1,
    )


def plain_loss(model, rows, loss_on_query):
    """Mean negative log-likelihood of the rows' counted tokens, one text at a time."""
    total = torch.zeros(())
    count = 0
    for row in rows:
        query = POSTS.columns["queries"][row]
        tokens = torch.cat([query, POSTS.columns["summaries"][row]])
        first = 1 if loss_on_query else len(query)
        logits = model(tokens.unsqueeze(0)).logits[0]
        total = total + F.cross_entropy(logits[first - 1 : -1], tokens[first:], reduction="sum")
        count += len(tokens) - first
    return total / count


@pytest.mark.parametrize("loss_on_query", [True, False])
def test_the_term_and_its_gradient_are_those_of_plain_transformers(before_ppo, loss_on_query):
    mix = mix_of(loss_on_query)
    rows = [0, 3, 5, 7]
    expected_model = copy.deepcopy(before_ppo.policy.model)
    expected = COEF * plain_loss(expected_model, rows, loss_on_query)
    expected.backward()

    learner = learner_of(before_ppo, make_config("tiny"))
    tokens = mix.count_tokens(rows)
    for part in (rows[:1], rows[1:]):  # two microbatches add up to the whole
        for loss, _ in pretraining_losses(learner, mix, part, tokens):
            loss.backward()

    found = before_ppo.policy.model.get_input_embeddings().weight.grad
    torch.testing.assert_close(
        found, expected_model.get_input_embeddings().weight.grad, rtol=1e-4, atol=1e-6
    )


def test_each_step_has_other_references_and_the_same_again_for_the_same_update():
    mix = mix_of(batch_size=4)
    steps = [mix.rows(update, step) for update in range(2) for step in range(2)]
    assert sorted(row for rows in steps for row in rows) == list(range(16))  # one epoch
    assert mix.rows(1, 0) == steps[2]


def test_it_is_added_to_ppo_but_not_in_critic_warm_up(before_ppo):
    overrides = (
        "ppo.batch_size=4",
        "ppo.total_episodes=40",
        "ppo.critic_updates=1",
        "ppo.num_ppo_epochs=2",
        "ppo.ptx_coef=0.3",
        "data.max_summary_tokens=6",
    )
    config = make_config("tiny", name="ptx", overrides=overrides)
    trained = PolicyAndCritic(copy.deepcopy(before_ppo.policy), copy.deepcopy(before_ppo.critic))
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
    learner = learner_of(before_ppo, config, optimizer, trained=trained)
    queries = [torch.tensor([5, 6, 7])] * 4
    rollout, _ = rolled_out(config, learner, queries)

    learner.update = 0
    warm_up = optimize(learner, rollout, config.ppo, 1, config.ppo.kl_coef, mix_of())
    learner.update = 1
    training = optimize(learner, rollout, config.ppo, 1, config.ppo.kl_coef, mix_of())

    assert "loss/ptx_avg" not in warm_up
    assert training["loss/ptx_avg"] > 0


def test_without_a_coefficient_nothing_is_loaded(tmp_path):
    config = make_config("tiny")
    assert load_pretraining_mix(config, config.ppo, tmp_path) is None
