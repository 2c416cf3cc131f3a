"""Every switch of PPO that acts before the update: its formula by hand, and that it is obeyed."""

import math
import statistics
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from stages.data.ragged import make_ragged
from stages.data.text_metrics import copied_title_words, distinct
from stages.functional import (
    loss_weights,
    paper_token_logprobs,
    policy_losses,
    token_logprobs,
    value_losses,
    weighted_sum,
)
from stages.models import forward, sampling
from stages.models.loading import load_policy, new_reward_model
from stages.ppo import kept_models
from stages.rl import advantages
from stages.rl import rollout as rollout_module
from stages.rl.episodes import Episodes, Rollout
from stages.rl.metrics import describe, describe_advantages, samples
from stages.rl.networks import parameter_groups
from stages.rl.update import check_episodes, set_rate
from stages.settings.command_line import make_config
from stages.settings.config import Optimizer, Ppo, UserError
from stages.settings.ppo import PAPER_QUIRKS
from stages.training.loop import make_optimizer
from tests.lib.asserts import close
from tests.lib.learners import learner_of, rolled_out

EOS, PAD = 0, 9
RESPONSES = torch.tensor([[4, 5, EOS, PAD, PAD], [6, 7, 8, 6, 7], [EOS, PAD, PAD, PAD, PAD]])
LENGTHS = [3, 5, 1]
NAN = float("nan")
IDS = SimpleNamespace(eos_id=EOS)
DESCRIBED: Any = SimpleNamespace(accelerator=Accelerator(cpu=True), networks=IDS)


# -- formulas --------------------------------------------------------------------------------------


def test_the_papers_logprobs_have_the_digits_of_bf16():
    logits = torch.tensor([[[1.0, 2.0, 4.0]]])
    found = paper_token_logprobs(logits, torch.tensor([[1]]), 0.5)
    exact = 4.0 - math.log(math.exp(2) + math.exp(4) + math.exp(8))
    assert found.dtype == torch.float32
    assert found.item() == torch.tensor(found.item()).bfloat16().item()
    assert found.item() == pytest.approx(exact, rel=2**-8)
    assert found.item() != pytest.approx(exact, rel=1e-6)
    with pytest.raises(ValueError, match="above 0"):
        paper_token_logprobs(logits, torch.tensor([[1]]), 0.0)


def test_loss_weights_count_tokens_sequences_or_calls_alike():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    close(loss_weights(mask, "tokens"), [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    close(loss_weights(mask, "sequences"), [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    close(loss_weights(mask, "episodes"), loss_weights(mask, "tokens"))
    close(loss_weights(mask, "microbatches"), [[1 / 3, 1 / 3, 0.0], [1 / 3, 0.0, 0.0]])


def test_a_weighted_sum_ignores_what_has_no_weight():
    close(weighted_sum(torch.tensor([2.0, NAN, 3.0]), torch.tensor([0.5, 0.0, 2.0])), 7.0)


def test_losses_stand_at_their_tokens_and_are_0_elsewhere():
    mask = torch.tensor([[True, True, False]])
    new = torch.tensor([[math.log(2), 0.0, NAN]])
    advantages = torch.tensor([[1.0, 3.0, NAN]])
    losses, clipped = policy_losses(new, torch.zeros(1, 3), advantages, mask, 0.2)
    close(losses, [[-1.2, -3.0, 0.0]])
    close(clipped, [[1.0, 0.0, 0.0]])
    values = torch.tensor([[1.0, 0.1, NAN]]), torch.zeros(1, 3), torch.tensor([[2.0, 0.0, NAN]])
    losses, clipped = value_losses(*values, mask, 0.2)
    close(losses, [[0.5 * 3.24, 0.5 * 0.01, 0.0]])
    losses, clipped = value_losses(*values, mask, math.inf)
    close(losses, [[0.5 * 1.0, 0.5 * 0.01, 0.0]])
    close(clipped, [[0.0, 0.0, 0.0]])


def test_copied_words_are_those_of_the_title_and_distinct_n_counts_all_texts():
    query = "SUBREDDIT: r/x\n\nTITLE: My dog, my CAT\n\nPOST: the dog ran\n\nTL;DR:"
    assert copied_title_words(query, "a dog and my hamster ran") == pytest.approx(2 / 3)
    assert copied_title_words("no title here", "title") is None
    assert distinct(["a b a", "b a"], 1) == pytest.approx(2 / 5)
    assert distinct(["a b a", "b a"], 2) == pytest.approx(2 / 3)
    assert distinct([""], 2) == 0


# -- rewards and advantages ------------------------------------------------------------------------


def episodes() -> Episodes:
    generator = torch.Generator().manual_seed(3)
    names = ("logprobs", "ref_logprobs", "values", "sampled_logprobs")
    return Episodes(
        queries=torch.ones(3, 2, dtype=torch.long),
        responses=RESPONSES,
        sampler_gaps=torch.zeros(3),
        scores=torch.tensor([1.5, -1.0, 0.3]),
        **{name: torch.randn(RESPONSES.shape, generator=generator) for name in names},
    )


def credited(settings: Ppo) -> Rollout:
    shaped = advantages.shape_rewards(episodes(), settings, PAD, settings.kl_coef)
    return advantages.compute_advantages(Accelerator(cpu=True), shaped, ALGORITHMS["ppo"], settings)


def credit_by_hand(case: Episodes, settings: Ppo) -> list[list[float]]:
    """Advantages of the real tokens, by loops over tokens as the paper describes them."""
    rewards = []
    for row, length in enumerate(LENGTHS):
        kls = []
        for t in range(length):
            d = (case.logprobs[row, t] - case.ref_logprobs[row, t]).item()
            kinds = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}
            kls.append(kinds[settings.kl_estimator])
        weight = 0.0 if settings.kl_in == "loss" else settings.kl_coef
        one = [-weight * kl for kl in kls] + [0.0] * (5 - length)
        at = length - 1 if settings.score_at == "eos" or length == 5 else length
        one[at] += case.scores[row].item()
        rewards.append(one)
    further = 0 if settings.score_at == "eos" else 1  # after EOS the episode is over
    counted = [range(min(length + further, 5)) for length in LENGTHS]
    if settings.whiten_rewards:
        flat = torch.tensor([rewards[row][t] for row in range(3) for t in counted[row]])
        deviation = (flat.var(unbiased=False) + 1e-8).sqrt().item()
        mean = flat.mean().item()
        for row in range(3):
            for t in counted[row]:
                rewards[row][t] = (rewards[row][t] - mean) / deviation + mean
    found = []
    for row, length in enumerate(LENGTHS):
        assert case.values is not None
        values = [case.values[row, t].item() if t in counted[row] else 0.0 for t in range(5)] + [0]
        running = 0.0
        advantages: list[float] = []
        for t in reversed(range(5)):
            running = rewards[row][t] + values[t + 1] - values[t] + 0.95 * running
            advantages.insert(0, running)
        found.append(advantages[:length])
    if settings.whiten_advantages:
        flat = torch.tensor([x for one in found for x in one])
        mean, deviation = flat.mean().item(), (flat.var(unbiased=False) + 1e-8).sqrt().item()
        found = [[(x - mean) / deviation for x in one] for one in found]
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"score_at": "eos"},
        {"whiten_rewards": True},
        {"whiten_advantages": False},
        {"kl_estimator": "k2"},
        {"kl_estimator": "k3"},
        {"kl_in": "loss", "kl_estimator": "k3"},
    ],
    ids=str,
)
def test_advantages_are_those_of_a_loop_over_tokens(changes):
    settings = Ppo(kl_coef=0.5, **changes)
    rollout = credited(settings)
    for row, expected in enumerate(credit_by_hand(episodes(), settings)):
        close(rollout.advantages[row, : LENGTHS[row]], expected, 1e-5)
    raw = credit_by_hand(episodes(), replace(settings, whiten_advantages=False))
    assert rollout.values is not None
    assert rollout.returns is not None
    for row, expected in enumerate(raw):  # the critic's targets are never whitened
        returns = torch.tensor(expected) + rollout.values[row, : LENGTHS[row]]
        close(rollout.returns[row, : LENGTHS[row]], returns, 1e-5)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("over", ["batch", "process"])
def test_whitening_is_over_all_processes_or_over_each_apart(over, index):
    other = torch.full((1, 2), 10.0)

    def gather(x: torch.Tensor) -> torch.Tensor:
        parts = [other if x.is_floating_point() else torch.ones(1, 2).bool()]
        parts.insert(index, x)
        return torch.cat(parts)

    process: Any = SimpleNamespace(gather=gather, process_index=index)
    mine, mask = torch.tensor([[1.0, 3.0]]), torch.ones(1, 2).bool()
    found = advantages.whiten(process, mine, mask, Ppo(whiten_over=over), shift_mean=True)
    together = [-5 / math.sqrt(16.5), -3 / math.sqrt(16.5)]  # mean 6, variance (25+9+16+16)/4
    close(found, [together] if over == "batch" else [[-1.0, 1.0]])


@pytest.mark.parametrize(
    ("trick", "expected"),
    [("replace", [2.0, -1.5, 0.1]), ("subtract", [2.0, 2.5, 0.1]), ("off", [2.0, 4.0, 0.1])],
)
def test_a_missing_eos_costs_what_the_setting_says(trick, expected):
    settings = Ppo(eos_trick=trick, missing_eos_penalty=-1.5)
    scores = torch.tensor([2.0, 4.0, 0.1])
    close(advantages.eos_trick(scores, RESPONSES, EOS, settings), expected)


def test_the_reported_kl_is_the_one_that_is_trained_on():
    for kind in ("k1", "k2", "k3"):
        settings = Ppo(kl_estimator=kind, kl_coef=0.5, batch_size=3)
        rollout = credited(settings)
        found = describe(DESCRIBED, rollout, settings, settings.kl_coef)
        d = torch.where(rollout.response_mask, rollout.logprobs - rollout.ref_logprobs, 0.0)
        sums = {"k1": d.sum(), "k2": (d**2 / 2).sum(), "k3": ((-d).exp() - 1 + d).sum()}
        assert found["objective/kl"] == pytest.approx(sums[kind].item() / 3, abs=1e-5)
        assert found["objective/kl_k1"] == pytest.approx(sums["k1"].item() / 3, abs=1e-5)
        assert found["objective/kl_k3"] == pytest.approx(sums["k3"].item() / 3, abs=1e-5)
        assert found["objective/non_score_reward"] == pytest.approx(-0.5 * found["objective/kl"])
        reward = found["objective/scores"] + found["objective/non_score_reward"]
        assert found["objective/rlhf_reward"] == pytest.approx(reward, abs=1e-5)
    in_loss = replace(settings, kl_in="loss")
    assert describe(DESCRIBED, rollout, in_loss, in_loss.kl_coef)["objective/non_score_reward"] == 0


def test_what_is_reported_of_a_batch_by_hand():
    rollout = replace(credited(Ppo()), scores=torch.tensor([-2.0, -3.0, -2.0]))  # row 1 has no EOS
    found = describe(DESCRIBED, rollout, Ppo(batch_size=3), Ppo().kl_coef)
    shares = {"policy/eos_rate": 2 / 3, "val/num_eos_tokens": 2, "policy/below_penalty": 2 / 3}
    tokens = sum(rollout.logprobs[row, :n].sum().item() for row, n in enumerate(LENGTHS))
    expected = shares | {"policy/response_length": 9 / 3, "objective/entropy": -tokens / 3}
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    tokenizer: Any = SimpleNamespace(decode=lambda *_, **__: "")
    log_ratios = rollout.logprobs - rollout.ref_logprobs
    kl = [log_ratios[row, :n].sum().item() for row, n in enumerate(LENGTHS)]
    assert [row["kl"] for row in samples(rollout, tokenizer, 1)] == pytest.approx(kl)


def test_what_advantages_follow_is_pearsons_r_with_scores_above_the_others_of_the_query():
    rollout = credited(Ppo(batch_size=3))
    steps = [(row, place) for row, length in enumerate(LENGTHS) for place in range(length)]
    advantages = [rollout.advantages[step].item() for step in steps]
    scores = rollout.scores.tolist()
    left_out = [(3 * score - sum(scores)) / 2 for score in scores]
    expected = statistics.correlation(advantages, [left_out[row] for row, _ in steps])
    found = describe(DESCRIBED, rollout, Ppo(batch_size=3), Ppo().kl_coef)
    assert found["val/advantage_score_correlation"] == pytest.approx(expected, abs=1e-6)
    at_eos = (rollout.advantages[0, 2] + rollout.advantages[2, 0]).item() / 2
    assert found["policy/advantage_at_eos"] == pytest.approx(at_eos, abs=1e-6)

    twice = [torch.cat([column, column]) for column in (rollout.advantages, rollout.scores)]
    twice[1][3:] += 7  # another query, whose scores are all higher: no part of what is followed
    mask, responses = rollout.response_mask.repeat(2, 1), RESPONSES.repeat(2, 1)
    both: Any = SimpleNamespace(
        advantages=twice[0], scores=twice[1], response_mask=mask, responses=responses
    )
    grouped = describe_advantages(DESCRIBED, both, 3)
    assert grouped["val/advantage_score_correlation"] == pytest.approx(expected, abs=1e-6)

    unended = replace(rollout, responses=torch.full_like(RESPONSES, 5))
    assert "policy/advantage_at_eos" not in describe_advantages(DESCRIBED, unended, 1)


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

    def off_by_a_quarter(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        responses, logprobs = real(*args)
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
    ours = forward.response_logprobs(policy, tokens, real, response_length=2, temperature=1.0)
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


# -- settings --------------------------------------------------------------------------------------


def test_compat_paper_sets_the_quirks_and_nothing_else():
    plain, paper = Ppo(), Ppo(compat="paper")
    changed = {name for name in vars(plain) if vars(plain)[name] != vars(paper)[name]}
    assert changed == {"compat", *PAPER_QUIRKS}
    assert {name: getattr(paper, name) for name in PAPER_QUIRKS} == PAPER_QUIRKS
    assert replace(paper, lam=0.9).loss_mean == "microbatches"
    assert (paper.critic_init, paper.critic_updates) == ("reward_model", 0)


def test_a_quirk_that_compat_sets_cannot_be_asked_for_beside_it():
    asked = ("ppo.compat=paper", "ppo.loss_mean=tokens")
    with pytest.raises(UserError, match=r"ppo\.loss_mean has no effect: ppo\.compat=paper sets it"):
        make_config("tiny", name="mine", overrides=asked)


def test_k1_in_the_loss_is_refused_for_its_gradient_is_0_on_average():
    with pytest.raises(UserError, match="k2 or k3"):
        Ppo(kl_in="loss")
