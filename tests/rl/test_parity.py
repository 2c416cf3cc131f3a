"""`optimize` against an independent implementation that shares no code with functional.py.

Loops over tokens, the losses as written in the papers, AdamW by hand; in float64. Every setting
that changes what an update learns is one of the variants.
"""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from stages.config.command_line import make_config
from stages.config.ppo import Ppo
from stages.config.sections import Optimizer
from stages.models.policy import PolicyModel
from stages.rl.episodes import Rollout
from stages.rl.networks import Networks, PolicyAndCritic, parameter_groups
from stages.rl.update import optimize
from stages.training.optimizer import make_optimizer
from stages.training.step import NonFiniteError
from tests.lib.learners import learner_of, rolled_out

RATE = 2e-3
PLAIN: dict[str, Any] = {
    "learning_rate": RATE,
    "cliprange": 0.1,
    "cliprange_value": 0.15,
    "vf_coef": 0.3,
    "num_ppo_epochs": 3,
    "temperature": 0.7,
    "batch_size": 4,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "mean over sequences": {"loss_mean": "sequences"},
    "mean of microbatch means": {"loss_mean": "microbatches"},
    "values not clipped": {"clip_values": False},
    "k2 in the loss": {"kl_in": "loss", "kl_estimator": "k2"},
    "k3 in the loss": {"kl_in": "loss", "kl_estimator": "k3"},
    "k1, token's ratio": {"kl_in": "loss", "kl_estimator": "k1", "kl_correction": "token"},
    "k3, token's ratio": {"kl_in": "loss", "kl_estimator": "k3", "kl_correction": "token"},
    "k1, sequence's ratio": {"kl_in": "loss", "kl_estimator": "k1", "kl_correction": "sequence"},
    "k3, sequence's ratio": {"kl_in": "loss", "kl_estimator": "k3", "kl_correction": "sequence"},
    "entropy bonus": {"entropy_coef": 0.2},
    "critic's own rate": {"critic_learning_rate": 5e-4},
    "norm clipped": {"max_grad_norm": 0.05},
    "critic's norm clipped": {"critic_max_grad_norm": 0.05},
    "two minibatches": {"num_minibatches": 2},
    "critic warm-up": {"critic_updates": 1, "max_grad_norm": 0.05},
}
KL_COEF = 0.3  # of the update, not the settings', because it may be adaptive
LENGTHS = [(3, 4), (2, 6), (5, 1), (4, 3)]  # real tokens of query and response
QUERY, RESPONSE = 5, 6


def make_rollout(seed: int, pad_id: int, kl_in_loss: bool) -> Rollout:
    """Random numbers where the update reads them, NaN where nothing may be read."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(LENGTHS), RESPONSE

    def noise() -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    queries = torch.randint(1, 30, (len(LENGTHS), QUERY), generator=generator)
    responses = torch.randint(1, 30, shape, generator=generator)
    mask = torch.zeros(shape, dtype=torch.bool)
    value_mask = mask.clone()
    for row, (query, response) in enumerate(LENGTHS):
        queries[row, : QUERY - query] = pad_id
        responses[row, response:] = pad_id
        mask[row, :response] = True
        value_mask[row, : response + 1] = True
    nan = float("nan")
    return Rollout(
        queries=queries,
        responses=responses,
        pad_id=pad_id,
        logprobs=torch.where(mask, -3.4 + 0.3 * noise(), nan),
        ref_logprobs=torch.where(mask & kl_in_loss, -3.3 + 0.3 * noise(), nan),
        values=torch.where(value_mask, 0.2 * noise(), nan),
        scores=noise()[:, 0] * nan,
        sampled_logprobs=torch.full(shape, nan),
        sampler_gaps=torch.full(shape[:1], nan),
        response_mask=mask,
        value_mask=value_mask,
        rewards=torch.full(shape, nan),
        advantages=torch.where(mask, noise(), nan),
        returns=torch.where(value_mask, noise(), nan),
    )


def policy_term(logprobs, rollout: Rollout, row: int, t: int, ppo: Ppo) -> torch.Tensor:
    """One token's clipped policy loss, with the KL term if the settings ask for it.

    logprobs: of all tokens of the response.
    """
    ratio = math.e ** (logprobs[t] - rollout.logprobs[row, t])
    advantage = rollout.advantages[row, t]
    clipped = min(max(ratio.item(), 0.9), 1.1)
    inside = ratio if clipped == ratio.item() else torch.tensor(clipped)
    term = -torch.min(ratio * advantage, inside * advantage)
    if ppo.kl_in == "loss":
        weight = torch.tensor(1.0)
        if ppo.kl_correction == "token":
            weight = ratio
        if ppo.kl_correction == "sequence":
            for s, logprob in enumerate(logprobs):
                weight = weight * math.e ** (logprob - rollout.logprobs[row, s])
        term = term + KL_COEF * weight * kl_term(logprobs[t], rollout.ref_logprobs[row, t], ppo)
    return term


def kl_term(logprob, ref_logprob, ppo: Ppo) -> torch.Tensor:
    """One token's estimate of KL(policy || ref_policy), in Schulman's notation."""
    log_ratio = ref_logprob - logprob
    if ppo.kl_estimator == "k1":
        return -log_ratio
    if ppo.kl_estimator == "k2":
        return log_ratio**2 / 2
    return math.e**log_ratio - 1 - log_ratio


def value_term(value, rollout: Rollout, row: int, t: int, ppo: Ppo) -> torch.Tensor:
    """One position's value loss."""
    assert rollout.values is not None
    assert rollout.returns is not None
    old = rollout.values[row, t]
    target = rollout.returns[row, t]
    if not ppo.clip_values:
        return (value - target) ** 2 / 2
    near = old + torch.clip(value - old, -0.15, 0.15)
    return torch.max((value - target) ** 2, (near - target) ** 2) / 2


def mean_as_asked(terms: list[list[torch.Tensor]], loss_mean: str, size: int) -> torch.Tensor:
    """terms[sequence][token], in the order of the microbatches of so many sequences."""
    flat = [one for sequence in terms for one in sequence]
    if loss_mean == "tokens":
        return torch.stack(flat).mean()
    if loss_mean == "sequences":
        return torch.stack([torch.stack(one).mean() for one in terms]).mean()
    parts = [terms[at : at + size] for at in range(0, len(terms), size)]
    means = [torch.stack([one for each in part for one in each]).mean() for part in parts]
    return torch.stack(means).mean()


def loss_by_hand(policy, critic, rollout: Rollout, rows, ppo: Ppo, size: int) -> torch.Tensor:
    """The clipped policy loss plus vf_coef times the value loss, over these sequences."""
    policy_terms = []
    value_terms = []
    for row in rows:
        query, response = LENGTHS[row]
        tokens = torch.cat([rollout.queries[row, QUERY - query :], rollout.responses[row]])
        tokens = tokens[: query + response].unsqueeze(0)  # no padding at all
        logits = policy(input_ids=tokens).logits[0] / ppo.temperature
        values = critic(input_ids=tokens).logits[0, :, 0]

        distributions = [logits[query - 1 + t].log_softmax(-1) for t in range(response)]
        logprobs = [x[tokens[0, query + t]] for t, x in enumerate(distributions)]
        terms = []
        for t in range(response):
            entropy = -(distributions[t].exp() * distributions[t]).sum()
            terms.append(policy_term(logprobs, rollout, row, t, ppo) - ppo.entropy_coef * entropy)
        policy_terms.append(terms)
        value_terms.append(
            [
                value_term(values[query - 1 + t], rollout, row, t, ppo)
                for t in range(min(response + 1, RESPONSE))
            ]
        )
    policy_loss = mean_as_asked(policy_terms, ppo.loss_mean, size)
    value_loss = mean_as_asked(value_terms, ppo.loss_mean, size)
    return policy_loss + 0.3 * value_loss


class AdamWByHand:
    def __init__(self, parameters, rate: float):
        self.parameters = list(parameters)
        self.rate = rate
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]
        self.count = 0

    @torch.no_grad()
    def step(self, loss, largest_norm: float):
        gradients = torch.autograd.grad(loss, self.parameters, retain_graph=True)
        norm = sum((one**2).sum().item() for one in gradients) ** 0.5
        scale = min(1.0, largest_norm / norm) if largest_norm else 1.0
        self.count += 1
        for parameter, gradient, (first, second) in zip(
            self.parameters, gradients, self.moments, strict=True
        ):
            first.mul_(0.9).add_(0.1 * scale * gradient)
            second.mul_(0.999).add_(0.001 * (scale * gradient) ** 2)
            mean = first / (1 - 0.9**self.count)
            deviation = (second / (1 - 0.999**self.count)).sqrt()
            parameter.mul_(1 - self.rate * 0.01).sub_(self.rate * mean / (deviation + 1e-5))


def update_by_hand(networks, optimizers, rollout, ppo: Ppo, update: int, size: int) -> None:
    """num_ppo_epochs passes; minibatches dealt by the generator that `optimize` documents."""
    generator = torch.Generator().manual_seed(update)
    for _ in range(3):
        order = torch.randperm(len(LENGTHS), generator=generator).tolist()
        share = len(order) // ppo.num_minibatches
        for at in range(0, len(order), share):
            rows = order[at : at + share]
            loss = loss_by_hand(networks.policy.model, networks.critic, rollout, rows, ppo, size)
            norms = ppo.max_grad_norm, ppo.critic_max_grad_norm
            waiting = 1 if update < ppo.critic_updates else 0  # the policy comes first
            for optimizer, norm in [*zip(optimizers, norms, strict=True)][waiting:]:
                optimizer.step(loss, norm)


def policy_and_critic(policy, critic) -> PolicyAndCritic:
    """Copies of both."""
    return PolicyAndCritic(PolicyModel(copy.deepcopy(policy)), copy.deepcopy(critic))


def trained_by(trained, optimizer, ppo: Ppo, microbatch_size: int, pad_id: int):
    """A learner of a policy and a critic that samples and scores nothing."""
    networks = Networks(
        policy=trained.policy,
        critic=trained.critic,
        ref_policy=trained.policy,
        reward_model=trained.critic,
        eos_id=0,
        pad_id=pad_id,
    )
    config = make_config("tiny")
    config = config.changed(memory=config.memory.changed(microbatch_size=microbatch_size))
    return learner_of(networks, config, optimizer, trained=trained)


@pytest.mark.parametrize("microbatch_size", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_updates_give_the_weights_of_an_independent_implementation(
    policy, reward_model, tokenizer, microbatch_size, variant
):
    ppo = Ppo(**PLAIN | VARIANTS[variant])
    pad_id = tokenizer.pad_token_id
    ours = policy_and_critic(policy, reward_model).double()
    hand = copy.deepcopy(ours)
    start = copy.deepcopy(ours)
    optimizer = make_optimizer(parameter_groups(ours, ppo), RATE, Optimizer())
    for group in optimizer.param_groups:
        group["lr"] = RATE * group["lr_scale"]
    by_hand = [
        AdamWByHand(hand.policy.parameters(), RATE),
        AdamWByHand(hand.critic.parameters(), ppo.critic_learning_rate or RATE),
    ]
    for update in range(2):
        rollout = make_rollout(update, pad_id, ppo.kl_in == "loss")
        learner = trained_by(ours, optimizer, ppo, microbatch_size, pad_id)
        learner.update = update
        optimize(learner, rollout, ppo, seed=update, kl_coef=KL_COEF)
        update_by_hand(hand, by_hand, rollout, ppo, update, microbatch_size)
    pairs = zip(ours.parameters(), hand.parameters(), strict=True)
    assert max((one - two).abs().max().item() for one, two in pairs) < 1e-6
    moved = zip(ours.parameters(), start.parameters(), strict=True)
    assert max((one - two).abs().max().item() for one, two in moved) > 1e-3


@pytest.mark.parametrize(("target_kl", "epochs"), [(0.0, 3.0), (1e-6, 1.0), (1e6, 3.0)])
def test_epochs_end_after_the_one_that_passed_the_target_kl(
    policy, reward_model, tokenizer, target_kl, epochs
):
    ppo = Ppo(**PLAIN | {"num_minibatches": 2, "target_kl": target_kl})
    networks = policy_and_critic(policy, reward_model).double()
    optimizer = make_optimizer(networks.parameters(), RATE, Optimizer())
    pad_id = tokenizer.pad_token_id
    rollout = make_rollout(1, pad_id, kl_in_loss=False)
    learner = trained_by(networks, optimizer, ppo, 4, pad_id)
    stats = optimize(learner, rollout, ppo, seed=1, kl_coef=KL_COEF)
    assert stats["policy/epochs"] == epochs
    assert optimizer.state[next(networks.parameters())]["step"] == 2 * epochs


def test_the_statistics_of_a_step_are_means_over_its_tokens_and_its_values(
    policy, reward_model, tokenizer
):
    ppo = Ppo(**PLAIN | {"num_ppo_epochs": 1})
    pad_id = tokenizer.pad_token_id
    ours = policy_and_critic(policy, reward_model).double()
    hand = copy.deepcopy(ours)
    rollout = make_rollout(2, pad_id, kl_in_loss=False)
    optimizer = make_optimizer(parameter_groups(ours, ppo), RATE, Optimizer())
    learner = trained_by(ours, optimizer, ppo, 3, pad_id)
    stats = optimize(learner, rollout, ppo, seed=1, kl_coef=KL_COEF)
    of_tokens = []
    of_values = []
    for row, (query, response) in enumerate(LENGTHS):
        tokens = torch.cat([rollout.queries[row, QUERY - query :], rollout.responses[row]])
        tokens = tokens[: query + response]
        logits = hand.policy.model(input_ids=tokens[None]).logits[0] / ppo.temperature
        distributions = [logits[query - 1 + t].log_softmax(-1) for t in range(response)]
        logprobs = [x[tokens[query + t]] for t, x in enumerate(distributions)]
        for t, distribution in enumerate(distributions):
            log_ratio = (logprobs[t] - rollout.logprobs[row, t]).item()
            term = policy_term(logprobs, rollout, row, t, ppo).item()
            unclipped = -math.exp(log_ratio) * rollout.advantages[row, t].item()
            entropy = -(distribution.exp() * distribution).sum().item()
            is_clipped = term > unclipped + 1e-9
            of_tokens.append((term, is_clipped, log_ratio**2 / 2, entropy, math.exp(log_ratio)))
        values = hand.critic(input_ids=tokens[None]).logits[0, query - 1 :, 0]
        for t, value in enumerate(values[:RESPONSE]):
            term = value_term(value, rollout, row, t, ppo).item()
            plain = value_term(value, rollout, row, t, ppo.changed(clip_values=False)).item()
            of_values.append((term, term > plain + 1e-9))
    keys_of_tokens = (
        "loss/policy_avg",
        "policy/clipfrac_avg",
        "policy/approxkl_avg",
        "policy/entropy_avg",
        "val/ratio",
    )
    keys_of_values = ("loss/value_avg", "val/clipfrac_avg")
    expected = dict(zip(keys_of_tokens, np.mean(of_tokens, axis=0), strict=True))
    expected |= dict(zip(keys_of_values, np.mean(of_values, axis=0), strict=True))
    assert {key: stats[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert not {0, 0.5, 1} & {stats["policy/clipfrac_avg"], stats["val/clipfrac_avg"]}


def test_in_critic_warm_up_the_policy_stays_to_the_bit(policy, reward_model, tokenizer):
    learned = []
    for critic_updates in (0, 1):
        changes = {"target_kl": 1e6, "critic_updates": critic_updates}
        ppo, pad_id = Ppo(**PLAIN | changes), tokenizer.pad_token_id
        ours = policy_and_critic(policy, reward_model).double()
        optimizer = make_optimizer(parameter_groups(ours, ppo), RATE, Optimizer())
        learner = trained_by(ours, optimizer, ppo, 3, pad_id)
        rollout = make_rollout(1, pad_id, kl_in_loss=False)
        stats = optimize(learner, rollout, ppo, seed=1, kl_coef=KL_COEF)
        learned.append((ours, optimizer.state, stats))
    (both, _, all_stats), (alone, state, stats) = learned
    start = policy.double().parameters()
    assert all(map(torch.equal, alone.policy.parameters(), start))
    assert not any(weight in state for weight in alone.policy.parameters())
    assert all(weight in state for weight in alone.critic.parameters())
    # The value loss is that of any update, so the critic learns the same bits.
    assert all(map(torch.equal, alone.critic.parameters(), both.critic.parameters()))
    assert not all(map(torch.equal, alone.critic.parameters(), reward_model.double().parameters()))
    of_critic = {"loss/value_avg", "val/clipfrac_avg", "critic/grad_norm", "policy/epochs"}
    assert stats == {key: all_stats[key] for key in of_critic}


def test_a_step_that_is_not_finite_is_refused_and_leaves_the_weights(before_ppo):
    config = make_config("tiny", name="mine", overrides=("ppo.batch_size=2",))
    learner = learner_of(before_ppo, config, update=6)
    rollout, _ = rolled_out(config, learner, [torch.tensor([5, 6, 7]), torch.tensor([8])])
    assert rollout.returns is not None
    rollout.returns[1, 0] = float("inf")
    learner.optimizer = torch.optim.SGD(learner.trained.parameters(), lr=1.0)
    before = [weight.detach().clone() for weight in learner.trained.parameters()]
    expected = r"ppo stopped before an optimizer step of update 7, .* not finite: loss/value_avg"
    with pytest.raises(NonFiniteError, match=expected):
        optimize(learner, rollout, config.ppo, seed=1, kl_coef=config.ppo.kl_coef)
    assert all(map(torch.equal, learner.trained.parameters(), before))
