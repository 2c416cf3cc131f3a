"""Every formula agrees with the paper's own numbers, hand calculations or independent formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stages.functional import (
    adapt_kl_coef,
    bound_values,
    critic_beats_constant,
    entropy,
    explained_variance,
    first_true_index,
    gae,
    kl_estimate,
    kl_penalty,
    leave_one_out,
    length_adaptive_lambda,
    loss_weights,
    masked_mean,
    masked_whiten,
    minus_group_mean,
    minus_mean_return,
    paper_token_logprobs,
    penalize_missing_eos,
    policy_loss,
    policy_losses,
    preference_loss,
    preference_over_reference,
    response_masks,
    returns_to_go,
    shape_rewards,
    subtract_missing_eos,
    token_logprobs,
    truncate_after,
    value_loss,
    value_losses,
    weighted_sum,
)
from tests.lib.asserts import close

EOS = 0
PAD = 99
NAN = math.nan
LN3 = math.log(3)
GOLDEN = pytest.mark.parametrize("name", ["ppo_plain", "ppo_whiten_rewards", "ppo_gamma_lam"])


def random_case(seed: int, rows: int = 4, length: int = 7) -> dict[str, Tensor]:
    """Rewards, values and KL of responses of random lengths, and the mask of their tokens."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values, kl = torch.randn(3, rows, length, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    mask = torch.arange(length) < lengths
    return {"rewards": rewards, "values": values, "kl": kl, "mask": mask}


# -- the paper's own numbers -----------------------------------------------------------------------


@GOLDEN
def test_responses_are_cut_and_masked_as_in_the_papers_code(golden, name):
    case = golden(name)
    cut = truncate_after(case["responses"], EOS, PAD)
    response_mask, value_mask = response_masks(cut, PAD)
    assert torch.equal(cut, case["truncated_responses"])
    assert torch.equal(response_mask, ~case["padding_mask"])
    assert torch.equal(value_mask, ~case["padding_mask_p1"])
    assert torch.equal(first_true_index(cut == PAD) - 1, case["last_index"])


@GOLDEN
def test_scores_without_eos_are_those_of_the_papers_code(golden, name):
    case = golden(name)
    penalty = case["non_eos_penalty"].item()
    scores = penalize_missing_eos(case["scores"], case["truncated_responses"], EOS, penalty)
    close(scores, case["penalized_scores"])


@GOLDEN
def test_kl_and_rewards_are_those_of_the_papers_code(golden, name):
    case = golden(name)
    response_mask, value_mask = response_masks(case["truncated_responses"], PAD)
    kl = kl_estimate(case["logprobs"], case["ref_logprobs"])
    close(torch.where(response_mask, kl, 0.0), case["kl"], 1e-5)
    coefficient = case["kl_coef"].item()
    rewards = shape_rewards(kl, case["penalized_scores"], response_mask, coefficient)
    if case["whiten_rewards"]:
        rewards = masked_whiten(rewards, value_mask, shift_mean=False)
    close(rewards, case["rewards"], 1e-5)


@GOLDEN
def test_advantages_and_returns_are_those_of_the_papers_code(golden, name):
    case = golden(name)
    response_mask, value_mask = response_masks(case["truncated_responses"], PAD)
    values = torch.where(value_mask, case["values"], 0.0)
    close(values, case["masked_values"], 1e-5)
    advantages, returns = gae(
        case["rewards"], values, gamma=case["gamma"].item(), lam=case["lam"].item()
    )
    close(returns, case["returns"], 1e-5)
    close(masked_whiten(advantages, response_mask), case["advantages"], 1e-5)


@GOLDEN
def test_losses_are_those_of_the_papers_code(golden, name):
    case = golden(name)
    response_mask, value_mask = response_masks(case["truncated_responses"], PAD)

    loss_of_policy, policy_clipfrac = policy_loss(
        case["new_logprobs"],
        case["logprobs"],
        case["advantages"],
        response_mask,
        cliprange=0.2,
    )
    loss_of_value, value_clipfrac = value_loss(
        case["vpred"],
        case["masked_values"],
        case["returns"],
        value_mask,
        cliprange_value=0.2,
    )

    close(loss_of_policy, case["pg_loss"], 1e-5)
    close(policy_clipfrac, case["pg_clipfrac"], 1e-5)
    close(loss_of_value, case["vf_loss"], 1e-5)
    close(value_clipfrac, case["vf_clipfrac"], 1e-5)
    total = loss_of_policy + case["vf_coef"].float() * loss_of_value
    close(total, case["total_loss"], 1e-5)


# -- masks -----------------------------------------------------------------------------------------


def test_first_true_index_is_the_length_where_nothing_is_true():
    x = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.bool)
    assert first_true_index(x).tolist() == [1, 3, 0, 2]
    assert first_true_index(x.view(2, 2, 3)).tolist() == [[1, 3], [0, 2]]


def test_the_first_stop_token_is_kept_and_the_rest_is_padding():
    responses = torch.tensor([[0, 5, 6], [5, 0, 0], [5, 6, 0], [5, 6, 7], [5, 0, 6]])
    cut = [[0, 99, 99], [5, 0, 99], [5, 6, 0], [5, 6, 7], [5, 0, 99]]
    assert truncate_after(responses, EOS, PAD).tolist() == cut


def test_values_count_one_position_further_than_responses():
    cut = torch.tensor([[5, 0, 99, 99], [5, 6, 0, 99], [5, 6, 7, 0], [0, 99, 99, 99]])
    response_mask, value_mask = response_masks(cut, PAD)
    assert response_mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert value_mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert response_mask.dtype == value_mask.dtype == torch.bool


def test_a_missing_eos_replaces_the_score_and_subtracts_nothing():
    cut = torch.tensor([[5, 0, 99], [5, 6, 7], [0, 99, 99]])
    scores = torch.tensor([2.0, 3.0, -5.0])
    assert penalize_missing_eos(scores, cut, EOS, -1.0).tolist() == [2.0, -1.0, -5.0]


def test_a_missing_eos_may_be_subtracted_from_the_score_as_in_trl():
    cut = torch.tensor([[5, 0, 99], [5, 6, 7], [0, 99, 99]])
    scores = torch.tensor([2.0, 3.0, -5.0])
    assert subtract_missing_eos(scores, cut, EOS, -1.0).tolist() == [2.0, 2.0, -5.0]


# -- log-probabilities, entropy, KL ----------------------------------------------------------------


def test_token_logprobs_divide_logits_by_the_temperature():
    logits = torch.tensor([[[0.0, LN3], [0.0, LN3]]])  # probabilities 1/4, 3/4
    tokens = torch.tensor([[0, 1]])
    close(token_logprobs(logits, tokens, 1.0), [[math.log(1 / 4), math.log(3 / 4)]])
    # Half the temperature squares the odds: 1 to 9.
    close(token_logprobs(logits, tokens, 0.5), [[math.log(0.1), math.log(0.9)]])


def test_token_logprobs_of_half_precision_logits_are_computed_in_float32():
    exact = torch.tensor([[[0.0, 1.0, 2.0, 3.0]]])  # whole numbers are exact in bfloat16
    logprobs = token_logprobs(exact.bfloat16(), torch.tensor([[1]]), 1.0)
    assert logprobs.dtype == torch.float32
    close(logprobs, [[1 - math.log(1 + math.e + math.e**2 + math.e**3)]])
    assert token_logprobs(exact.double(), torch.tensor([[1]]), 1.0).dtype == torch.float64


def test_the_gradient_of_a_logprob_is_the_token_minus_the_probabilities():
    logits = torch.tensor([[[0.0, LN3]]], requires_grad=True)
    token_logprobs(logits, torch.tensor([[0]]), 2.0).sum().backward()
    share = 1 / (1 + math.sqrt(3))
    assert logits.grad is not None
    close(logits.grad, [[[(1 - share) / 2, -(1 - share) / 2]]])


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), temperature)


def test_entropy_is_log_v_of_even_logits_and_0_of_certainty():
    logits = torch.tensor([[[7.0, 7.0, 7.0], [500.0, 0.0, 0.0]]])
    close(entropy(logits), [[LN3, 0.0]])
    close(entropy(torch.tensor([[[1.0, 1.0 + LN3]]])), [[math.log(4) - 0.75 * LN3]])


def test_a_token_of_probability_0_adds_nothing_to_the_entropy_and_has_no_gradient():
    logits = torch.tensor([[[0.0, LN3, -math.inf]]], requires_grad=True)  # 1/4, 3/4, 0
    entropies = entropy(logits)
    close(entropies, [[math.log(4) - 0.75 * LN3]])
    entropies.sum().backward()
    # dH/dx_i = -p_i * (log p_i + H)
    first = -0.25 * (math.log(0.25) + entropies.item())
    assert logits.grad is not None
    close(logits.grad, [[[first, -first, 0.0]]])


def test_the_papers_logprobs_have_the_digits_of_bf16():
    logits = torch.tensor([[[1.0, 2.0, 4.0]]])
    logprob = paper_token_logprobs(logits, torch.tensor([[1]]), 0.5)
    exact = 4.0 - math.log(math.exp(2) + math.exp(4) + math.exp(8))
    assert logprob.dtype == torch.float32
    assert logprob.item() == torch.tensor(logprob.item()).bfloat16().item()
    assert logprob.item() == pytest.approx(exact, rel=2**-8)
    assert logprob.item() != pytest.approx(exact, rel=1e-6)
    with pytest.raises(ValueError, match="above 0"):
        paper_token_logprobs(logits, torch.tensor([[1]]), 0.0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_of_a_policy_to_itself_is_0(kind):
    x = random_case(5)["values"]
    assert torch.equal(kl_estimate(x, x, kind), torch.zeros_like(x))


def test_kl_estimates_of_one_token():
    policy = torch.tensor([[-1.0]])
    ref = torch.tensor([[-1.5]])
    close(kl_estimate(policy, ref), [[0.5]])
    close(kl_estimate(policy, ref, "k2"), [[0.125]])
    close(kl_estimate(policy, ref, "k3"), [[math.exp(-0.5) - 1 + 0.5]])
    close(kl_estimate(ref, policy), [[-0.5]])
    close(kl_estimate(ref, policy, "k3"), [[math.exp(0.5) - 1 - 0.5]])


def test_k1_and_k3_are_unbiased_under_the_policy():
    p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    q = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    exact = 0.2 * math.log(0.4) + 0.3 * math.log(1.2) + 0.5 * math.log(2)
    for kind in ("k1", "k3"):
        close((p * kl_estimate(p.log(), q.log(), kind)).sum(), exact, 1e-12)
    assert (kl_estimate(p.log(), q.log(), "k3") > 0).all()


def test_k3_of_a_token_that_the_policy_all_but_excludes_is_finite_with_its_gradient():
    # exp(100) is infinite in float32, so the log-ratio is cut at 80 in the exponential.
    new = torch.tensor([[-100.0]], requires_grad=True)
    kl = kl_estimate(new, torch.zeros(1, 1), "k3")
    assert kl.item() == pytest.approx(math.exp(80) - 1 - 100, rel=1e-5)
    kl.sum().backward()
    assert new.grad is not None
    close(new.grad, [[1.0]])  # that of the term outside the exponential


# Log-ratios to the old policy: 0.2 and -0.1, together 0.1; to ref_policy: 0.5 and -0.3.
NEW = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
OLD = torch.tensor([[-1.2, -1.9]], dtype=torch.float64)
REF = torch.tensor([[-1.5, -1.7]], dtype=torch.float64)
BOTH_TOKENS = torch.tensor([[True, True]])
ESTIMATES = {
    "k1": [0.5, -0.3],
    "k2": [0.125, 0.045],
    "k3": [math.exp(-0.5) - 0.5, math.exp(0.3) - 1.3],
}


@pytest.mark.parametrize("kind", ESTIMATES)
@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ("off", [1.0, 1.0]),
        ("token", [math.exp(0.2), math.exp(-0.1)]),
        ("sequence", [math.exp(0.1), math.exp(0.1)]),
    ],
)
def test_the_kl_penalty_is_the_estimate_times_the_corrections_ratio(kind, correction, weights):
    penalty = kl_penalty(NEW, OLD, REF, BOTH_TOKENS, kind, correction)
    first, second = ESTIMATES[kind]
    close(penalty, [[weights[0] * first, weights[1] * second]], 1e-12)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("off", [1.0, 1.0]),
        # d(r * k1) = r * (1 + k1), of the same token
        ("token", [math.exp(0.2) * 1.5, math.exp(-0.1) * 0.7]),
        # d(r * (k1 + k1')) = r * (1 + k1 + k1'), of both tokens
        ("sequence", [math.exp(0.1) * 1.2, math.exp(0.1) * 1.2]),
    ],
)
def test_the_kl_penaltys_gradient_flows_through_the_ratio(correction, expected):
    new = NEW.clone().requires_grad_()
    kl_penalty(new, OLD, REF, BOTH_TOKENS, "k1", correction).sum().backward()
    assert new.grad is not None
    close(new.grad, [expected], 1e-12)


@pytest.mark.parametrize("correction", ["off", "token", "sequence"])
def test_the_kl_penalty_ignores_whatever_is_masked(correction):
    nan = torch.tensor([[NAN]])
    new = torch.cat([NEW, nan], dim=1).requires_grad_()
    old = torch.cat([OLD, nan], dim=1)
    ref = torch.cat([REF, nan], dim=1)
    mask = torch.tensor([[True, True, False]])

    penalty = kl_penalty(new, old, ref, mask, "k3", correction)
    penalty.sum().backward()

    close(penalty[:, :2], kl_penalty(NEW, OLD, REF, BOTH_TOKENS, "k3", correction))
    assert penalty[0, 2] == 0
    assert new.grad is not None
    assert new.grad.isfinite().all()
    assert new.grad[0, 2] == 0


@pytest.mark.parametrize("correction", ["token", "sequence"])
def test_the_kl_penalty_of_a_huge_ratio_is_finite_with_its_gradient(correction):
    new = torch.tensor([[100.0]], requires_grad=True)
    zero = torch.zeros(1, 1)
    mask = torch.ones(1, 1).bool()

    penalty = kl_penalty(new, zero, zero, mask, "k1", correction)
    penalty.sum().backward()

    assert penalty.isfinite().all()
    assert new.grad is not None
    assert new.grad.isfinite().all()


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),
        (6.6, 0.1 * (1 + 0.1 * 64 / 1000)),
        (5.4, 0.1 * (1 - 0.1 * 64 / 1000)),
        (100.0, 0.1 * (1 + 0.2 * 64 / 1000)),  # the error is clipped to 0.2 ...
        (0.0, 0.1 * (1 - 0.2 * 64 / 1000)),  # ... on both sides
    ],
)
def test_the_kl_coefficient_follows_the_error_from_its_target(kl, expected):
    coefficient = adapt_kl_coef(0.1, kl, target=6.0, episodes=64, horizon=1000)
    assert coefficient == pytest.approx(expected, rel=1e-12)


# -- rewards, means, whitening ---------------------------------------------------------------------


def test_the_score_stands_after_the_last_token_or_at_it():
    kl = torch.tensor([[1.0, 2.0, NAN, NAN], [1.0, 2.0, 3.0, 4.0], [2.0, NAN, NAN, NAN]])
    mask = ~kl.isnan()
    scores = torch.tensor([10.0, 20.0, 30.0])
    after = [[-0.5, -1.0, 10.0, 0.0], [-0.5, -1.0, -1.5, 18.0], [-1.0, 30.0, 0.0, 0.0]]
    at = [[-0.5, 9.0, 0.0, 0.0], [-0.5, -1.0, -1.5, 18.0], [29.0, 0.0, 0.0, 0.0]]
    close(shape_rewards(kl, scores, mask, 0.5), after)
    close(shape_rewards(kl, scores, mask, 0.5, score_at="eos"), at)


@given(st.integers(0, 10_000), st.sampled_from(["after_eos", "eos"]))
def test_rewards_of_an_episode_sum_to_its_score_minus_its_kl_penalty(seed, score_at):
    case = random_case(seed)
    kl = case["kl"]
    mask = case["mask"]
    scores = case["values"][:, 0]

    rewards = shape_rewards(kl, scores, mask, 0.3, score_at)

    for row in range(len(scores)):
        close(rewards[row].sum(), scores[row] - 0.3 * kl[row][mask[row]].sum(), 1e-9)


def test_a_masked_mean_ignores_whatever_is_masked():
    x = torch.tensor([1.0, 2.0, NAN, 6.0, math.inf, -math.inf])
    close(masked_mean(x, x.isfinite()), 3.0)


def test_whitening_gives_mean_0_and_variance_1_where_the_mask_counts():
    x = torch.tensor([[1.0, 3.0, NAN], [5.0, NAN, 7.0]])  # mean 4, variance 5
    mask = ~x.isnan()
    root = math.sqrt(5)
    close(masked_whiten(x, mask), [[-3 / root, -1 / root, 0.0], [1 / root, 0.0, 3 / root]])
    kept = [[4 - 3 / root, 4 - 1 / root, 0.0], [4 + 1 / root, 0.0, 4 + 3 / root]]
    close(masked_whiten(x, mask, shift_mean=False), kept)


@given(st.integers(0, 10_000))
def test_whitening_without_shift_keeps_the_mean_and_scales_the_variance(seed):
    case = random_case(seed, rows=5)
    mask = case["mask"]
    x = 3 * case["values"] + 2

    shifted = masked_whiten(x, mask, shift_mean=True)[mask]
    unshifted = masked_whiten(x, mask, shift_mean=False)[mask]

    close(shifted.mean(), 0.0, 1e-9)
    close(unshifted.mean(), x[mask].mean(), 1e-9)
    close(shifted.var(unbiased=False), 1.0)
    close(unshifted.var(unbiased=False), 1.0)


def test_whitening_equal_numbers_divides_by_the_floor_and_not_by_0():
    close(masked_whiten(torch.full((2, 2), 3.0), torch.ones(2, 2).bool()), torch.zeros(2, 2))
    # variance 1e-8, as large as the floor: the root of their sum is 1.4142e-4
    x = torch.tensor([[1e-4, -1e-4]], dtype=torch.float64)
    close(masked_whiten(x, torch.ones(1, 2).bool()), [[1 / math.sqrt(2), -1 / math.sqrt(2)]])


def test_a_weighted_sum_ignores_what_has_no_weight():
    close(weighted_sum(torch.tensor([2.0, NAN, 3.0]), torch.tensor([0.5, 0.0, 2.0])), 7.0)


def test_loss_weights_count_tokens_sequences_or_microbatches_alike():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    close(loss_weights(mask, "tokens"), [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    close(loss_weights(mask, "sequences"), [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    close(loss_weights(mask, "episodes"), loss_weights(mask, "tokens"))
    close(loss_weights(mask, "microbatches"), [[1 / 3, 1 / 3, 0.0], [1 / 3, 0.0, 0.0]])


# -- advantages ------------------------------------------------------------------------------------


def test_advantages_of_a_hand_made_episode():
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    values = torch.tensor([[0.5, 1.0, 2.0]])
    # deltas 1 + .5*1 - .5 = 1, 2 + .5*2 - 1 = 2, 4 - 2 = 2; then A_t = delta_t + .25 A_{t+1}
    advantages, returns = gae(rewards, values, gamma=0.5, lam=0.5)
    close(advantages, [[1.625, 2.5, 2.0]])
    close(returns, [[2.125, 3.5, 4.0]])


def test_each_episode_may_have_its_own_lambda():
    rewards = torch.tensor([[1.0, 2.0, 4.0]]).expand(2, 3)
    values = torch.tensor([[0.5, 1.0, 2.0]]).expand(2, 3)
    advantages, _ = gae(rewards, values, gamma=0.5, lam=torch.tensor([0.5, 0.0]))
    # The first as above, the second only the one-step errors.
    close(advantages, [[1.625, 2.5, 2.0], [1.0, 2.0, 2.0]])


def test_a_return_is_the_discounted_sum_of_the_rewards_from_a_token_on():
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    # 1 + 2/2 + 4/4 = 3; 2 + 4/2 = 4; 4
    close(returns_to_go(rewards, 0.5), [[3.0, 4.0, 4.0]])
    close(returns_to_go(rewards, 1.0), [[7.0, 6.0, 4.0]])
    close(returns_to_go(rewards, 0.0), [[1.0, 2.0, 4.0]])


def test_the_mean_return_of_the_episodes_is_subtracted_from_each_tokens_return():
    # G with gamma 1/2, by hand: [6, 6, 4] and [-2, -3, -2]; the mean of G_0 is 2.
    rewards = torch.tensor([[3.0, 4.0, 4.0], [-0.5, -2.0, -2.0]])
    close(minus_mean_return(rewards, 0.5), [[4.0, 4.0, 2.0], [-4.0, -5.0, -4.0]])
    close(minus_mean_return(rewards, 1.0).mean(dim=0)[0], 0.0)


@given(st.integers(0, 10_000))
def test_gae_without_decay_is_reward_to_go_minus_value(seed):
    case = random_case(seed)
    advantages, returns = gae(case["rewards"], case["values"], gamma=1.0, lam=1.0)
    to_go = torch.stack([case["rewards"][:, t:].sum(dim=1) for t in range(7)], dim=1)
    close(advantages, to_go - case["values"], 1e-9)
    close(returns, to_go, 1e-9)


@given(st.integers(0, 10_000), st.floats(0, 1))
def test_gae_of_lambda_0_is_the_one_step_error(seed, gamma):
    case = random_case(seed)
    advantages, _ = gae(case["rewards"], case["values"], gamma, lam=0.0)
    close(advantages, one_step_errors(case, gamma), 1e-9)


def one_step_errors(case: dict[str, Tensor], gamma: float) -> Tensor:
    """r_t + gamma * V_{t+1} - V_t, where the value after the last token is 0."""
    rewards = case["rewards"]
    values = case["values"]
    next_values = torch.zeros_like(values)
    next_values[:, :-1] = values[:, 1:]
    return rewards + gamma * next_values - values


@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_decaying_sum_of_one_step_errors(seed, gamma, lam):
    case = random_case(seed)
    errors = one_step_errors(case, gamma)

    advantages, returns = gae(case["rewards"], case["values"], gamma, lam)

    for t in range(7):
        expected = torch.zeros(4, dtype=torch.float64)
        for k in range(7 - t):
            expected += (gamma * lam) ** k * errors[:, t + k]
        close(advantages[:, t], expected, 1e-9)
    close(returns - case["values"], advantages, 1e-9)


def test_the_length_adaptive_lambda_by_hand():
    lengths = torch.tensor([1, 2, 5, 20])
    # 1 - 1 / (0.4 * length); 0.4 and 0.8 would give -1.5 and -0.25.
    close(length_adaptive_lambda(lengths, alpha=0.4), [0.0, 0.0, 0.5, 0.875])


def test_the_weights_of_a_length_adaptive_lambda_reach_over_a_share_of_the_response():
    length = 400
    lam = length_adaptive_lambda(torch.tensor([length]), alpha=0.1).double()
    weights = lam ** torch.arange(10 * length)
    assert weights.sum().item() == pytest.approx(0.1 * length, rel=1e-4)


def test_gae_takes_a_lambda_for_each_episode():
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    values = torch.zeros(2, 3)
    advantages, _ = gae(rewards, values, gamma=1.0, lam=torch.tensor([0.5, 1.0]))
    close(advantages, [[0.25, 0.5, 1.0], [1.0, 1.0, 1.0]])


def test_bounded_values_by_hand():
    outputs = torch.tensor([0.0, 1.0, -1.0, 1e9, -1e9])
    # arctan(1) is pi / 4: three quarters of the range from -1 to 3.
    close(bound_values(outputs, low=-1.0, high=3.0), [1.0, 2.0, 0.0, 3.0, -1.0])


def test_the_slope_of_a_bounded_value_is_that_of_the_arctangent():
    outputs = torch.tensor([0.0, 2.0], requires_grad=True)
    bound_values(outputs, low=-1.0, high=3.0).sum().backward()
    assert outputs.grad is not None
    close(outputs.grad, [4 / math.pi, 4 / (5 * math.pi)])


@pytest.mark.parametrize("high", [-1.0, -2.0, NAN])
def test_a_range_without_room_is_refused(high):
    with pytest.raises(ValueError, match="a range with low < high"):
        bound_values(torch.zeros(1), low=-1.0, high=high)


def test_a_preference_is_the_sigmoid_of_the_margin_over_the_reference():
    scores = torch.tensor([2.0, 2.0, -1.0])
    reference_scores = torch.tensor([2.0, 2.0 - math.log(3), -1.0 + math.log(4)])
    close(preference_over_reference(scores, reference_scores), [0.5, 0.75, 0.2])


MASKED_RETURNS = torch.tensor([1.0, 3.0, NAN])
COUNTED = torch.tensor([True, True, False])


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 3.0, 9.0], 1.0), ([5.0, 5.0, 9.0], 0.0), ([3.0, 1.0, 9.0], -3.0)],
    ids=["perfect", "constant", "wrong"],
)
def test_explained_variance_of_a_critic(values, expected):
    share = explained_variance(torch.tensor(values), MASKED_RETURNS, COUNTED)
    assert share.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 3.0, 9.0], True), ([5.0, 5.0, 9.0], False), ([3.0, 1.0, 9.0], False)],
    ids=["perfect", "constant", "wrong"],
)
def test_a_critic_beats_a_constant_where_it_explains_some_of_the_returns(values, expected):
    assert critic_beats_constant(torch.tensor(values), MASKED_RETURNS, COUNTED) is expected


@pytest.mark.parametrize("constant", [0.0, 0.25])
def test_a_constant_critic_does_not_beat_a_constant_on_returns_that_hardly_vary(constant):
    returns = 2.0**-20 * torch.tensor([1.0, -1.0, 2.0, 2.0], dtype=torch.float64)
    mask = torch.ones(4).bool()
    values = torch.full((4,), constant, dtype=torch.float64)  # every sum here is exact
    assert not critic_beats_constant(values, returns, mask)
    assert critic_beats_constant(0.5 * returns, returns, mask)
    # The eps in explained variance would say otherwise.
    assert explained_variance(values, returns, mask) > 0.9


# -- losses ----------------------------------------------------------------------------------------


def test_equal_logprobs_give_the_plain_policy_gradient_and_clip_nothing():
    advantages = torch.tensor([[1.0, -4.0, NAN]])
    new = torch.full((1, 3), -2.0, requires_grad=True)
    loss, clipfrac = policy_loss(
        new, torch.full((1, 3), -2.0), advantages, ~advantages.isnan(), 0.2
    )
    close(loss, 1.5)
    close(clipfrac, 0.0)
    loss.backward()
    assert new.grad is not None
    close(new.grad, [[-0.5, 2.0, 0.0]])


def test_the_policy_loss_takes_the_worse_of_ratio_and_clipped_ratio():
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1, NAN]])
    advantages = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0, NAN]])
    # -A * ratio: -3, 3, -1, 1, -2.2; clipped to [.8, 1.2]: -2.4, 2.4, -1.6, 1.6, -2.2
    worse = [-2.4, 3.0, -1.0, 1.6, -2.2]
    new = (ratios.log() - 1).requires_grad_()
    old = torch.where(ratios.isnan(), ratios, -1.0)
    loss, clipfrac = policy_loss(new, old, advantages, ~ratios.isnan(), 0.2)
    close(torch.stack([loss, clipfrac]), [sum(worse) / 5, 2 / 5])
    loss.backward()
    # No gradient where the clipped term is taken, -A * ratio / N elsewhere, none from padding.
    assert new.grad is not None
    close(new.grad, [[0.0, 3.0 / 5, -1.0 / 5, 0.0, -2.2 / 5, 0.0]])


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected", "is_clipped"),
    [
        (100.0, 1.0, -1.2, True),
        (100.0, -1.0, math.exp(80), False),  # exp(100) is infinite in float32
        (-100.0, 1.0, 0.0, False),
        (-100.0, -1.0, 0.8, True),
    ],
)
def test_a_huge_ratio_gives_a_finite_loss_and_a_gradient_of_0(
    log_ratio, advantage, expected, is_clipped
):
    new = torch.tensor([[log_ratio]], dtype=torch.float32, requires_grad=True)
    mask = torch.ones(1, 1).bool()

    losses, clipped = policy_losses(new, torch.zeros(1, 1), torch.tensor([[advantage]]), mask, 0.2)
    losses.sum().backward()

    assert losses.item() == pytest.approx(expected, rel=1e-5, abs=1e-30)
    assert bool(clipped) == is_clipped
    assert new.grad is not None
    close(new.grad, [[0.0]], 1e-30)


def test_policy_losses_are_at_their_tokens_and_0_elsewhere():
    new = torch.tensor([[math.log(2), 0.0, NAN]])
    advantages = torch.tensor([[1.0, 3.0, NAN]])
    mask = torch.tensor([[True, True, False]])
    losses, clipped = policy_losses(new, torch.zeros(1, 3), advantages, mask, cliprange=0.2)
    close(losses, [[-1.2, -3.0, 0.0]])
    close(clipped, [[1.0, 0.0, 0.0]])


def test_value_losses_are_at_their_tokens_and_0_elsewhere():
    new = torch.tensor([[1.0, 0.1, NAN]])
    returns = torch.tensor([[2.0, 0.0, NAN]])
    mask = torch.tensor([[True, True, False]])

    losses, _ = value_losses(new, torch.zeros(1, 3), returns, mask, cliprange_value=0.2)
    close(losses, [[0.5 * 3.24, 0.5 * 0.01, 0.0]])

    losses, clipped = value_losses(new, torch.zeros(1, 3), returns, mask, cliprange_value=math.inf)
    close(losses, [[0.5 * 1.0, 0.5 * 0.01, 0.0]])
    close(clipped, [[0.0, 0.0, 0.0]])


@pytest.mark.parametrize("loss_of", [policy_loss, value_loss])
def test_a_masked_nan_reaches_no_loss_and_no_gradient(loss_of):
    mask = torch.tensor([[True, False]])
    broken = torch.tensor([[0.5, NAN]])
    new = torch.tensor([[0.3, NAN]], requires_grad=True)
    loss, _ = loss_of(new, broken, broken, mask, 0.2)
    (gradient,) = torch.autograd.grad(loss, new)
    assert torch.isfinite(loss)
    assert gradient[0, 1] == 0
    assert gradient[0, 0] != 0


def test_the_value_loss_takes_the_worse_of_value_and_clipped_value():
    new = torch.tensor([[1.0, 1.0, 1.0, 0.1, 2.0, NAN]])
    returns = torch.tensor([[2.0, 0.0, 1.0, 0.0, 3.0, NAN]])
    values = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, NAN]])
    # squares of V - R: 1, 1, 0, .01, 1; of the clipped ones: 3.24, .04, .64, .01, 7.84
    worse = [3.24, 1.0, 0.64, 0.01, 7.84]
    loss, clipfrac = value_loss(new, values, returns, ~new.isnan(), 0.2)
    close(torch.stack([loss, clipfrac]), [0.5 * sum(worse) / 5, 3 / 5])


def test_the_value_loss_is_clipped_around_the_old_value():
    mask = torch.ones(1, 1, dtype=torch.bool)
    two = torch.tensor([[2.0]])
    five = torch.tensor([[5.0]])
    six = torch.tensor([[6.0]])

    # The new value 6 is cut to 5.5, which is 0.5 from the return 6.
    loss, _ = value_loss(six, five, six, mask, cliprange_value=0.5)
    close(loss, 0.5 * 0.25)

    # The value has not changed, so nothing is cut: 5 is 3 from the return 2.
    loss, clipfrac = value_loss(five, five, two, mask, cliprange_value=0.5)
    close(loss, 0.5 * 9.0)
    close(clipfrac, 0.0)


@pytest.mark.parametrize("cliprange_value", [50.0, math.inf])
def test_rounding_within_the_range_is_not_counted_as_clipping(cliprange_value):
    generator = torch.Generator().manual_seed(2)
    new, values, returns = torch.randn(3, 20, 50, generator=generator)
    assert (values + (new - values) != new).any()  # rounding alone
    loss, clipfrac = value_loss(new, values, returns, torch.ones(20, 50).bool(), cliprange_value)
    assert clipfrac == 0
    close(loss, 0.5 * (new - returns).square().mean(), 1e-5)


def test_the_preference_loss_of_a_tie_is_ln_2_and_falls_with_the_gap():
    close(preference_loss(torch.tensor([1.0]), torch.tensor([1.0])), math.log(2))
    close(preference_loss(torch.tensor([LN3]), torch.tensor([0.0])), -math.log(3 / 4))
    chosen = torch.tensor([LN3, 0.0])
    rejected = torch.tensor([0.0, LN3])
    close(preference_loss(chosen, rejected), (-math.log(3 / 4) - math.log(1 / 4)) / 2)
    close(preference_loss(torch.tensor([-500.0]), torch.tensor([500.0])), 1000.0)


def test_centering_costs_the_square_of_a_pairs_sum():
    chosen = torch.tensor([LN3 + 1])
    rejected = torch.tensor([1.0])
    loss = preference_loss(chosen, rejected, center=0.1)
    close(loss, -math.log(3 / 4) + 0.1 * (LN3 + 2) ** 2)


def test_centering_costs_nothing_if_the_sum_is_0():
    loss = preference_loss(torch.tensor([LN3 / 2]), torch.tensor([-LN3 / 2]), center=9)
    close(loss, -math.log(3 / 4))


def test_leave_one_out_is_each_reward_minus_the_mean_of_its_groups_others():
    rewards = torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0, 5.0])
    close(leave_one_out(rewards, 3), [-3, -1.5, 4.5, 0, 0, 0])


def test_leave_one_out_is_k_over_k_minus_1_times_the_distance_from_the_groups_mean():
    """Ahmadian et al. 2024, equation 9."""
    groups = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    distances = groups - groups.mean(dim=1, keepdim=True)
    close(leave_one_out(groups.flatten(), 4), distances.flatten() * 4 / 3, 1e-6)


@pytest.mark.parametrize(
    ("size", "error"), [(1, "at least 2"), (3, "8 episodes do not fill groups of 3")]
)
def test_leave_one_out_refuses_groups_of_another_size(size, error):
    with pytest.raises(ValueError, match=error):
        leave_one_out(torch.zeros(8), size)


def test_without_a_deviation_the_groups_mean_is_subtracted_from_each_reward():
    rewards = torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0, 5.0])
    close(minus_group_mean(rewards, 3), [-2.0, -1.0, 3.0, 0.0, 0.0, 0.0])
