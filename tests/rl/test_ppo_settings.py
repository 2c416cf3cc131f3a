"""Settings that act before the update: their formulas by hand, and which values are refused."""

import math
import statistics
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.ppo import Ppo
from stages.config.sections import Optimizer
from stages.data.ragged import make_ragged
from stages.functional import (
    token_logprobs,
)
from stages.models import sampling
from stages.models.forward import ResponseBatch, response_logprobs
from stages.models.loading import load_policy, new_reward_model
from stages.models.policy import PolicyModel
from stages.ppo import kept_models
from stages.rl import advantages
from stages.rl import rollout as rollout_module
from stages.rl.episodes import Episodes
from stages.rl.metrics import describe, describe_advantages, samples
from stages.rl.networks import parameter_groups
from stages.rl.update import check_episodes, first_kl_coef, next_kl_coef, set_rate
from stages.training.optimizer import make_optimizer
from tests.lib.asserts import close
from tests.lib.fabricated_runs import write_rows
from tests.lib.learners import learner_of, rolled_out, rollout_from

EOS, PAD = 0, 9
RESPONSES = torch.tensor([[4, 5, EOS, PAD, PAD], [6, 7, 8, 6, 7], [EOS, PAD, PAD, PAD, PAD]])
LENGTHS = [3, 5, 1]
IDS = SimpleNamespace(eos_id=EOS)
DESCRIBED: Any = SimpleNamespace(accelerator=Accelerator(cpu=True), networks=IDS)


# -- rewards and advantages ------------------------------------------------------------------------


def episodes() -> Episodes:
    generator = torch.Generator().manual_seed(3)
    logprobs, ref_logprobs, values, sampled_logprobs = (
        torch.randn(RESPONSES.shape, generator=generator) for _ in range(4)
    )
    return Episodes(
        queries=torch.ones(3, 2, dtype=torch.long),
        responses=RESPONSES,
        pad_id=PAD,
        sampled_logprobs=sampled_logprobs,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        sampler_gaps=torch.zeros(3),
        scores=torch.tensor([1.5, -1.0, 0.3]),
    )


def rewards_by_hand(case: Episodes, settings: Ppo) -> list[list[float]]:
    """The KL penalty at each real token, and the score once."""
    rewards = []
    for row, length in enumerate(LENGTHS):
        rewards_of_row = [0.0] * 5
        if settings.kl_in == "reward":
            for t in range(length):
                kl = (case.logprobs[row, t] - case.ref_logprobs[row, t]).item()
                rewards_of_row[t] = -settings.kl_coef * kl
        score_position = length  # one after the last real token, if there is one
        if settings.score_at == "eos" or length == 5:
            score_position = length - 1
        rewards_of_row[score_position] += case.scores[row].item()
        rewards.append(rewards_of_row)
    return rewards


def counted_values(settings: Ppo) -> list[range]:
    """The positions of each row at which a value counts."""
    if settings.score_at == "eos":  # after EOS the episode is over
        return [range(length) for length in LENGTHS]
    return [range(min(length + 1, 5)) for length in LENGTHS]


def whitened_rewards(rewards: list[list[float]], counted: list[range]) -> list[list[float]]:
    """Scaled by the deviation of those that count; their mean stays."""
    flat = torch.tensor([rewards[row][t] for row in range(3) for t in counted[row]])
    mean = flat.mean().item()
    deviation = (flat.var(unbiased=False) + 1e-8).sqrt().item()
    return [
        [(x - mean) / deviation + mean if t in counted[row] else x for t, x in enumerate(one)]
        for row, one in enumerate(rewards)
    ]


def gae_by_hand(case: Episodes, settings: Ppo, lam: float) -> list[list[float]]:
    """Advantages of the real tokens before whitening, by loops over tokens."""
    counted = counted_values(settings)
    rewards = rewards_by_hand(case, settings)
    if settings.whiten_rewards:
        rewards = whitened_rewards(rewards, counted)
    assert case.values is not None
    advantages = []
    for row, length in enumerate(LENGTHS):
        values = [0.0] * 6
        for t in counted[row]:
            values[t] = case.values[row, t].item()
        running = 0.0
        of_row: list[float] = []
        for t in reversed(range(5)):
            running = rewards[row][t] + values[t + 1] - values[t] + lam * running
            of_row.insert(0, running)
        advantages.append(of_row[:length])
    return advantages


def whitened(advantages: list[list[float]]) -> list[list[float]]:
    """Mean 0 and variance 1 over all tokens."""
    flat = torch.tensor([x for row in advantages for x in row])
    mean = flat.mean().item()
    deviation = (flat.var(unbiased=False) + 1e-8).sqrt().item()
    return [[(x - mean) / deviation for x in row] for row in advantages]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"score_at": "eos"},
        {"whiten_rewards": True},
        {"whiten_advantages": False},
        {"lam": 0.7},
        {"lam_value": 1.0},
        {"kl_in": "loss", "kl_estimator": "k3"},
    ],
    ids=str,
)
def test_advantages_and_returns_are_those_of_a_loop_over_tokens(changes):
    settings = Ppo(kl_coef=0.5, **changes)
    rollout = rollout_from(episodes(), settings, PAD)

    expected = gae_by_hand(episodes(), settings, settings.lam)
    if settings.whiten_advantages:
        expected = whitened(expected)
    for row, advantages_of_row in enumerate(expected):
        close(rollout.advantages[row, : LENGTHS[row]], advantages_of_row, 1e-5)

    # The critic's targets are never whitened, and may have their own lambda.
    assert rollout.values is not None
    assert rollout.returns is not None
    for row, unwhitened in enumerate(gae_by_hand(episodes(), settings, settings.critic_lam)):
        returns = torch.tensor(unwhitened) + rollout.values[row, : LENGTHS[row]]
        close(rollout.returns[row, : LENGTHS[row]], returns, 1e-5)


def test_a_lambda_by_length_is_that_of_each_episode_in_a_loop_over_tokens():
    settings = Ppo(kl_coef=0.5, lam_value=1.0, lam_length_alpha=0.4, whiten_advantages=False)
    rollout = rollout_from(episodes(), settings, PAD)

    # 1 - 1 / (0.4 * length) for 3, 5 and 1 tokens; the last one would be negative.
    for row, lam in enumerate([1 / 6, 0.5, 0.0]):
        expected = gae_by_hand(episodes(), settings, lam)[row]
        close(rollout.advantages[row, : LENGTHS[row]], expected, 1e-5)


def test_shaped_scores_are_rewarded_and_scores_reported():
    shaped_scores = torch.tensor([0.8, -1.0, 0.4])
    reference_scores = torch.tensor([0.1, 0.2, 0.6])
    shaped = replace(episodes(), shaped_scores=shaped_scores, reference_scores=reference_scores)
    settings = Ppo(batch_size=3, score_shaping="preference", kl_coef=0.0)

    rollout = rollout_from(shaped, settings, PAD)
    metrics = describe(DESCRIBED, rollout, settings, kl_coef=0.0)

    close(rollout.rewards.sum(dim=1), shaped_scores)
    assert metrics["objective/scores"] == pytest.approx(episodes().scores.mean().item())
    assert metrics["objective/shaped_scores"] == pytest.approx(0.2 / 3)
    assert metrics["objective/rlhf_reward"] == pytest.approx(0.2 / 3)
    assert metrics["objective/reference_scores"] == pytest.approx(0.3)


def test_explained_variance_is_reported_for_targets_and_for_realized_returns():
    settings = Ppo(batch_size=3, lam=0.0)
    rollout = rollout_from(episodes(), settings, PAD)
    metrics = describe(DESCRIBED, rollout, settings, settings.kl_coef)

    returns = rewards_by_hand(episodes(), settings)
    for rewards_of_row in returns:
        for t in reversed(range(4)):
            rewards_of_row[t] += rewards_of_row[t + 1]
    counted = counted_values(settings)
    realized = [returns[row][t] for row in range(3) for t in counted[row]]
    assert rollout.values is not None
    errors = [
        returns[row][t] - rollout.values[row, t].item() for row in range(3) for t in counted[row]
    ]
    expected = 1 - statistics.pvariance(errors) / statistics.pvariance(realized)
    assert metrics["val/explained_variance_realized"] == pytest.approx(expected, abs=1e-4)
    # The targets of lambda 0 contain the critic's own values.
    assert metrics["val/explained_variance"] != pytest.approx(expected, abs=0.1)


def test_with_lambda_1_both_explained_variances_are_the_same():
    settings = Ppo(batch_size=3, lam_value=1.0)
    rollout = rollout_from(episodes(), settings, PAD)
    metrics = describe(DESCRIBED, rollout, settings, settings.kl_coef)
    bootstrapped = metrics["val/explained_variance"]
    assert metrics["val/explained_variance_realized"] == pytest.approx(bootstrapped, abs=1e-5)


def test_against_the_mean_a_token_has_its_return_minus_the_mean_return_of_episodes():
    settings = Ppo(kl_coef=0.5, baseline="mean", whiten_advantages=False)
    rollout = rollout_from(replace(episodes(), values=None), settings, PAD)
    assert rollout.returns is None
    rewards = rewards_by_hand(episodes(), settings)
    mean_return = sum(sum(rewards_of_row) for rewards_of_row in rewards) / 3
    for row, length in enumerate(LENGTHS):
        expected = [sum(rewards[row][t:]) - mean_return for t in range(length)]
        close(rollout.advantages[row, :length], expected, 1e-5)
        assert not rollout.advantages[row, length:].any()


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("over", ["batch", "process"])
def test_whitening_is_over_all_processes_or_over_each_apart(over, index):
    other = torch.full((1, 2), 10.0)

    def gather(x: torch.Tensor) -> torch.Tensor:
        parts = [other if x.is_floating_point() else torch.ones(1, 2).bool()]
        parts.insert(index, x)
        return torch.cat(parts)

    process: Any = SimpleNamespace(gather=gather, process_index=index)
    values = torch.tensor([[1.0, 3.0]])
    mask = torch.ones(1, 2).bool()

    whitened = advantages.whiten(process, values, mask, Ppo(whiten_over=over), shift_mean=True)

    expected = {
        "batch": [[-5 / math.sqrt(16.5), -3 / math.sqrt(16.5)]],  # mean 6, variance (25+9+16+16)/4
        "process": [[-1.0, 1.0]],
    }
    close(whitened, expected[over])


@pytest.mark.parametrize(
    ("trick", "expected"),
    [("replace", [2.0, -1.5, 0.1]), ("subtract", [2.0, 2.5, 0.1]), ("off", [2.0, 4.0, 0.1])],
)
def test_a_missing_eos_costs_what_the_setting_says(trick, expected):
    settings = Ppo(eos_trick=trick, missing_eos_penalty=-1.5)
    scores = torch.tensor([2.0, 4.0, 0.1])
    close(rollout_module.eos_trick(scores, RESPONSES, EOS, settings), expected)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_reported_kl_is_k1_whatever_is_trained_on(kind):
    settings = Ppo(kl_in="loss", kl_estimator=kind, kl_coef=0.5, batch_size=3)
    rollout = rollout_from(episodes(), settings, PAD)
    metrics = describe(DESCRIBED, rollout, settings, settings.kl_coef)
    d = torch.where(rollout.response_mask, rollout.logprobs - rollout.ref_logprobs, 0.0)
    assert metrics["objective/kl"] == pytest.approx(d.sum().item() / 3, abs=1e-5)
    k3 = ((-d).exp() - 1 + d).sum().item() / 3
    assert metrics["objective/kl_k3"] == pytest.approx(k3, abs=1e-5)
    assert metrics["objective/non_score_reward"] == 0
    assert metrics["objective/rlhf_reward"] == pytest.approx(metrics["objective/scores"])


def test_the_reported_penalty_is_that_of_the_coefficient_of_this_update():
    settings = Ppo(kl_coef=0.5, kl_target=6.0, batch_size=3)
    rollout = rollout_from(episodes(), settings, PAD)
    metrics = describe(DESCRIBED, rollout, settings, kl_coef=0.4)
    assert metrics["objective/kl_coef"] == 0.4
    penalty = metrics["objective/non_score_reward"]
    assert penalty == pytest.approx(-0.4 * metrics["objective/kl"])
    reward = metrics["objective/scores"] + penalty
    assert metrics["objective/rlhf_reward"] == pytest.approx(reward, abs=1e-5)


def test_what_is_reported_of_a_batch_by_hand():
    rollout = rollout_from(episodes(), Ppo(), PAD)
    rollout = replace(rollout, scores=torch.tensor([-2.0, -3.0, -2.0]))  # row 1 has no EOS
    metrics = describe(DESCRIBED, rollout, Ppo(batch_size=3), Ppo().kl_coef)
    logprobs = sum(rollout.logprobs[row, :n].sum().item() for row, n in enumerate(LENGTHS))
    expected = {
        "policy/eos_rate": 2 / 3,
        "val/num_eos_tokens": 2,
        "policy/below_penalty": 2 / 3,
        "policy/response_length": 9 / 3,
        "objective/entropy": -logprobs / 3,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


def test_a_sample_has_the_kl_of_its_own_tokens():
    rollout = rollout_from(episodes(), Ppo(), PAD)
    tokenizer: Any = SimpleNamespace(decode=lambda *_, **__: "")
    log_ratios = rollout.logprobs - rollout.ref_logprobs
    expected = [log_ratios[row, :n].sum().item() for row, n in enumerate(LENGTHS)]
    assert [row["kl"] for row in samples(rollout, tokenizer, 1)] == pytest.approx(expected)


def test_what_advantages_follow_is_pearsons_r_with_scores_above_the_others_of_the_query():
    rollout = rollout_from(episodes(), Ppo(batch_size=3), PAD)
    steps = [(row, place) for row, length in enumerate(LENGTHS) for place in range(length)]
    advantages = [rollout.advantages[step].item() for step in steps]
    scores = rollout.scores.tolist()
    left_out = [(3 * score - sum(scores)) / 2 for score in scores]
    expected = statistics.correlation(advantages, [left_out[row] for row, _ in steps])
    found = describe(DESCRIBED, rollout, Ppo(batch_size=3), Ppo().kl_coef)
    assert found["val/advantage_score_correlation"] == pytest.approx(expected, abs=1e-6)
    at_eos = (rollout.advantages[0, 2] + rollout.advantages[2, 0]).item() / 2
    assert found["policy/advantage_at_eos"] == pytest.approx(at_eos, abs=1e-6)


def test_scores_are_compared_within_their_query():
    rollout = rollout_from(episodes(), Ppo(batch_size=3), PAD)
    alone = describe_advantages(DESCRIBED, rollout)
    # A second query with the same samples, whose scores are all higher.
    two_queries: Any = SimpleNamespace(
        advantages=rollout.advantages.repeat(2, 1),
        scores=torch.cat([rollout.scores, rollout.scores + 7]),
        response_mask=rollout.response_mask.repeat(2, 1),
        responses=RESPONSES.repeat(2, 1),
        samples_per_query=3,
    )
    key = "val/advantage_score_correlation"
    grouped = describe_advantages(DESCRIBED, two_queries)
    assert grouped[key] == pytest.approx(alone[key], abs=1e-6)


def test_without_an_eos_no_advantage_at_eos_is_reported():
    rollout = rollout_from(episodes(), Ppo(batch_size=3), PAD)
    unended = replace(rollout, responses=torch.full_like(RESPONSES, 5))
    assert "policy/advantage_at_eos" not in describe_advantages(DESCRIBED, unended)


@pytest.mark.parametrize("times", [3.0, 0.5])
def test_the_critic_keeps_its_own_learning_rate_while_both_decay(before_ppo, times):
    sizes: Any = {"batch_size": 512, "total_episodes": 2048}
    ppo = Ppo(learning_rate=1e-3, critic_learning_rate=times * 1e-3, **sizes)
    learner = learner_of(before_ppo, make_config("tiny"))
    groups = parameter_groups(learner.trained, ppo)
    learner.optimizer = make_optimizer(groups, 1e-3, Optimizer())
    for learner.update, rate in ((0, 1e-3), (1, 0.75e-3)):
        assert set_rate(learner, ppo) == pytest.approx(rate)
        rates = [group["lr"] for group in learner.optimizer.param_groups]
        assert rates == [pytest.approx(rate), pytest.approx(times * rate)]


@pytest.mark.parametrize(
    ("checkpoints", "waits", "updates"),
    [(0, 0, []), (1, 0, [4]), (3, 0, [2, 4, 7]), (3, 4, [6, 7, 9]), (2, 9, [10, 11])],
)
def test_policies_are_kept_at_equal_steps_of_the_learning_rates_sum(checkpoints, waits, updates):
    """Of 12 updates the rates are as 12, 11, ..., 1, which sum to 78: 42 after 4, 63 after 7."""
    ppo = Ppo(checkpoints=checkpoints, critic_updates=waits, batch_size=1, total_episodes=12)
    assert kept_models(ppo) == {update - 1: f"model-{update:02}" for update in updates}


def test_episodes_that_a_process_cannot_deal_into_minibatches_are_refused():
    two: Any = SimpleNamespace(num_processes=2)
    check_episodes("ppo", Ppo(batch_size=12, num_minibatches=6), two)
    with pytest.raises(UserError, match=r"ppo\.batch_size is 12: it must be divisible by 2"):
        check_episodes("ppo", Ppo(batch_size=12, num_minibatches=4), two)


# -- sampling and networks -------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["recomputed", "sampled"])
def test_the_rollout_keeps_the_logprobs_asked_for_and_reports_the_mismatch(
    monkeypatch, before_ppo, kept
):
    real = sampling.sample

    def off_by_a_quarter(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        responses, logprobs = real(*args, **options)
        return responses, logprobs + 0.25

    monkeypatch.setattr(rollout_module, "sample", off_by_a_quarter)
    changes = "ppo.batch_size=4", f"ppo.logprobs={kept}"
    config = make_config("tiny", name="mine", overrides=changes)
    queries = make_ragged([[5, 6, 7], [8], [3, 4], [9, 9, 9, 9]])
    rollout, metrics = rolled_out(config, learner_of(before_ppo, config), queries)
    gap = (rollout.logprobs - rollout.ref_logprobs)[rollout.response_mask]
    close(gap, torch.full_like(gap, 0.25 if kept == "sampled" else 0.0), 1e-4)
    assert metrics["val/sampler_mismatch"] == pytest.approx(0.25, abs=1e-4)


def test_position_ids_that_the_paper_does_not_pass_change_rounding_alone(policy):
    queries = torch.tensor([[PAD, PAD, PAD, 5, 6, 7], [1, 2, 3, 4, 5, 6]])
    real = queries != PAD
    tokens = queries.masked_fill(~real, 0)
    batch = ResponseBatch(queries=queries[:, :4], responses=queries[:, 4:], pad_id=PAD)
    ours, _ = response_logprobs(PolicyModel(policy), batch)
    papers = policy(input_ids=tokens, attention_mask=real.long()).logits[:, -3:-1]
    close(ours, token_logprobs(papers, tokens[:, -2:], 1.0), 1e-4)


def test_dropout_is_off_unless_asked_for(policy_folder):
    tokens = torch.tensor([[3, 4, 5, 6]])
    for probability in (0.0, 0.3):
        scorer = new_reward_model(policy_folder, torch.Generator(), probability)
        for model in (load_policy(policy_folder, probability).train(), scorer.train()):
            modules = [one.p for one in model.modules() if isinstance(one, torch.nn.Dropout)]
            assert set(modules) == {probability}
            with torch.no_grad():
                same = torch.equal(model(tokens).logits, model(tokens).logits)
            assert same == (probability == 0)


# -- the adaptive KL coefficient -------------------------------------------------------------------

ADAPTIVE = Ppo(
    kl_coef=0.1,
    kl_target=6.0,
    kl_horizon=1000,
    batch_size=64,
    total_episodes=640,
    critic_updates=2,
)


def test_the_coefficient_adapts_to_the_kl_once_the_policy_learns():
    assert next_kl_coef(ADAPTIVE, 0.1, kl=0.0, update=1) == 0.1  # critic warm-up
    expected = 0.1 * (1 + 0.1 * 64 / 1000)  # the KL is 10% above its target
    assert next_kl_coef(ADAPTIVE, 0.1, kl=6.6, update=2) == pytest.approx(expected)
    fixed = ADAPTIVE.changed(kl_target=0.0)
    assert next_kl_coef(fixed, 0.1, kl=6.6, update=2) == 0.1


def test_a_resumed_run_continues_with_the_coefficient_that_follows_from_its_log(tmp_path):
    metrics_file = tmp_path / "metrics.jsonl"
    logged = [
        {"step": 1, "objective/kl_coef": 0.1, "objective/kl": 0.0},
        {"step": 2, "objective/kl_coef": 0.1, "objective/kl": 0.0},
        {"step": 3, "objective/kl_coef": 0.1, "objective/kl": 6.6},
        {"step": 4, "objective/kl_coef": 0.10064, "objective/kl": 100.0},
    ]
    write_rows(metrics_file, logged)
    expected = {0: 0.1, 2: 0.1, 3: 0.10064, 4: 0.10064 * (1 + 0.2 * 64 / 1000)}
    for update, kl_coef in expected.items():
        assert first_kl_coef(ADAPTIVE, metrics_file, update) == pytest.approx(kl_coef)
