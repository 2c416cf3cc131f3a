"""`ppo.optimize` against an independent implementation that shares no code with functional.py.

Loops over tokens, the losses as written in the papers, AdamW by hand; in float64.
"""

import copy
import math

import pytest
import torch
from accelerate import Accelerator

from stages.config import Optimizer, Ppo
from stages.models import PolicyAndCritic
from stages.ppo import optimize
from stages.rollout import Rollout
from stages.training import make_optimizer

PPO = Ppo(cliprange=0.1, cliprange_value=0.15, vf_coef=0.3, num_ppo_epochs=3, temperature=0.7)
RATE = 2e-3
LENGTHS = [(3, 4), (2, 6), (5, 1), (4, 3)]  # real tokens of query and response
QUERY, RESPONSE = 5, 6


def make_rollout(seed: int, pad_id: int) -> Rollout:
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
        logprobs=torch.where(mask, -3.4 + 0.3 * noise(), nan),
        ref_logprobs=noise() * nan,
        values=torch.where(value_mask, 0.2 * noise(), nan),
        scores=noise()[:, 0] * nan,
        response_mask=mask,
        value_mask=value_mask,
        advantages=torch.where(mask, noise(), nan),
        returns=torch.where(value_mask, noise(), nan),
    )


def loss_by_hand(policy, critic, rollout: Rollout, pad_id: int) -> torch.Tensor:
    """Mean over tokens of the clipped policy loss, plus vf_coef times the clipped value loss."""
    policy_terms, value_terms = [], []
    for row, (query, response) in enumerate(LENGTHS):
        tokens = torch.cat([rollout.queries[row, QUERY - query :], rollout.responses[row]])
        tokens = tokens[: query + response].unsqueeze(0)  # no padding at all
        logits = policy(input_ids=tokens).logits[0] / PPO.temperature
        values = critic(input_ids=tokens).logits[0, :, 0]
        for t in range(response):
            logprob = logits[query - 1 + t].log_softmax(-1)[tokens[0, query + t]]
            ratio = math.e ** (logprob - rollout.logprobs[row, t])
            advantage = rollout.advantages[row, t]
            clipped = min(max(ratio.item(), 0.9), 1.1)
            inside = ratio if clipped == ratio.item() else torch.tensor(clipped)
            policy_terms.append(-torch.min(ratio * advantage, inside * advantage))
        for t in range(min(response + 1, RESPONSE)):
            value, old = values[query - 1 + t], rollout.values[row, t]
            near = old + torch.clip(value - old, -0.15, 0.15)
            error = torch.max(
                (value - rollout.returns[row, t]) ** 2, (near - rollout.returns[row, t]) ** 2
            )
            value_terms.append(error / 2)
    return torch.stack(policy_terms).mean() + 0.3 * torch.stack(value_terms).mean()


class AdamWByHand:
    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]
        self.count = 0

    @torch.no_grad()
    def step(self, gradients):
        self.count += 1
        for parameter, gradient, (first, second) in zip(
            self.parameters, gradients, self.moments, strict=True
        ):
            first.mul_(0.9).add_(0.1 * gradient)
            second.mul_(0.999).add_(0.001 * gradient**2)
            mean = first / (1 - 0.9**self.count)
            deviation = (second / (1 - 0.999**self.count)).sqrt()
            parameter.mul_(1 - RATE * 0.01).sub_(RATE * mean / (deviation + 1e-5))


@pytest.mark.parametrize("microbatch_size", [1, 3, 4])
def test_two_updates_give_the_weights_of_an_independent_implementation(
    policy, reward_model, tokenizer, microbatch_size
):
    pad_id = tokenizer.pad_token_id
    ours = PolicyAndCritic(copy.deepcopy(policy), copy.deepcopy(reward_model)).double()
    hand = copy.deepcopy(ours)
    start = copy.deepcopy(ours)
    optimizer = make_optimizer(ours.parameters(), RATE, Optimizer())
    by_hand = AdamWByHand(hand.parameters())
    for update in range(2):
        rollout = make_rollout(update, pad_id)
        optimize(
            Accelerator(cpu=True),
            ours,
            optimizer,
            rollout,
            PPO,
            pad_id=pad_id,
            microbatch_size=microbatch_size,
            seed=update,
        )
        for _ in range(3):
            loss = loss_by_hand(hand.policy, hand.critic, rollout, pad_id)
            by_hand.step(torch.autograd.grad(loss, by_hand.parameters))
    pairs = zip(ours.parameters(), hand.parameters(), strict=True)
    assert max((one - two).abs().max().item() for one, two in pairs) < 1e-6
    moved = zip(ours.parameters(), start.parameters(), strict=True)
    assert max((one - two).abs().max().item() for one, two in moved) > 1e-3
