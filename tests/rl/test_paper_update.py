"""A whole update under compat=paper against a transcription of the paper's loop, from samples on.

The transcription follows `../shared/paper.md`, "Masking and GAE, exactly", in its own notation:
padding masks that are True where nothing counts, INVALID_LOGPROB, whitening by rsqrt. It shares no
code with `stages`. Steps are plain gradient descent, so that weights compare gradients; AdamW by
hand is in test_parity.py.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXForTokenClassification

from stages.config.command_line import make_config
from stages.data.ragged import make_ragged
from stages.models.heads import reset_head, use_float32_head
from stages.models.policy import PolicyModel
from stages.rl.networks import Networks, PolicyAndCritic
from stages.rl.update import optimize
from tests.lib.learners import learner_of, rolled_out

EOS, PAD, LENGTH, RATE, SEED = 0, 7, 6, 0.05, 44413
QUERIES = [[1, 2, 3], [4, 5], [6, 1, 2, 4], [3], [2, 6], [5, 5, 1]]
SETTINGS = (
    "ppo.compat=paper",
    f"ppo.batch_size={len(QUERIES)}",
    f"ppo.total_episodes={len(QUERIES)}",
    "ppo.num_ppo_epochs=2",
    "ppo.critic_updates=0",
    f"data.max_summary_tokens={LENGTH}",
    "memory.microbatch_size=2",
    "memory.forward_batch_size=3",
)
INVALID_LOGPROB = 1.0


@pytest.fixture
def networks():
    """Policy, a reference a little away from it, reward model; 7 tokens, 0 is EOS."""
    torch.manual_seed(3)
    config = GPTNeoXConfig(
        vocab_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.15,
        num_labels=1,
        classifier_dropout=0.0,
    )
    policy = GPTNeoXForCausalLM(config).eval()
    reference = copy.deepcopy(policy).requires_grad_(False)
    with torch.no_grad():
        reference.get_output_embeddings().weight.mul_(0.8)
    reward_model = GPTNeoXForTokenClassification(config).eval()
    reset_head(reward_model, torch.Generator().manual_seed(4))
    use_float32_head(reward_model)
    return policy, reference, reward_model


def positions(policy, tokens: Tensor, context: int, temperature: float) -> Tensor:
    """The paper's log-probabilities of a row's response, in bf16; no padding in the input."""
    logits = policy(tokens[None]).logits[0, context - 1 : -1].to(torch.bfloat16)
    # The type is named, for autocast would compute a softmax in float32.
    everything = F.log_softmax(logits / (temperature + 1e-7), dim=-1, dtype=torch.bfloat16)
    return everything.gather(1, tokens[context:, None])[:, 0].float()


def whiten(values: Tensor, padding: Tensor) -> Tensor:
    mean = values[~padding].mean()
    variance = values[~padding].var(unbiased=False)
    return ((values - mean) * torch.rsqrt(variance + 1e-8)).masked_fill(padding, 0)


class Transcription:
    """One update of Huang et al. 2024 for given samples."""

    def __init__(self, networks: Any, queries: list[list[int]], responses: Tensor) -> None:
        self.policy, reference, reward_model = networks
        self.critic = copy.deepcopy(reward_model)
        self.contexts = [len(query) for query in queries]
        rows = range(len(responses))
        self.rows = [torch.tensor([*queries[row], *responses[row].tolist()]) for row in rows]
        ends = [row.tolist().index(PAD) if PAD in row else LENGTH for row in responses]
        self.last = torch.tensor(ends) - 1  # index of the last real token
        index = torch.arange(LENGTH).expand(len(rows), -1)
        self.padding = index > self.last[:, None]
        self.padding_p1 = index > self.last[:, None] + 1
        with torch.no_grad():
            self.old = self.logprobs(self.policy, rows)
            self.values = self.critic_values(rows).masked_fill(self.padding_p1, 0)
            rewards = -0.05 * (self.old - self.logprobs(reference, rows))
            scores = torch.stack([self.score(reward_model, row, responses) for row in rows])
            where = torch.where(self.last + 1 < LENGTH, self.last + 1, self.last)
            rewards[torch.arange(len(rows)), where] += scores
            advantages = torch.zeros(len(rows), LENGTH + 1)
            after = F.pad(self.values, (0, 1))
            for t in reversed(range(LENGTH)):
                delta = rewards[:, t] + after[:, t + 1] - after[:, t]
                advantages[:, t] = delta + 0.95 * advantages[:, t + 1]
            self.returns = advantages[:, :LENGTH] + self.values
            self.advantages = whiten(advantages[:, :LENGTH], self.padding)

    def logprobs(self, policy, rows) -> Tensor:
        """[rows, LENGTH], INVALID_LOGPROB beyond the last real token."""
        found = torch.full((len(rows), LENGTH), INVALID_LOGPROB)
        for place, row in enumerate(rows):
            real = self.contexts[row] + int(self.last[row]) + 1
            one = positions(policy, self.rows[row][:real], self.contexts[row], 0.7)
            found = found.index_put((torch.tensor(place), torch.arange(len(one))), one)
        return found

    def critic_values(self, rows) -> Tensor:
        """At the positions before each response token; what follows EOS is of no account."""
        found = torch.zeros(len(rows), LENGTH)
        for place, row in enumerate(rows):
            context = self.contexts[row]
            real = min(context + int(self.last[row]) + 1, context + LENGTH - 1)
            one = self.critic(self.rows[row][None, :real]).logits[0, context - 1 :, 0]
            found = found.index_put((torch.tensor(place), torch.arange(len(one))), one)
        return found

    def score(self, reward_model, row: int, responses: Tensor) -> Tensor:
        if EOS not in responses[row]:
            return torch.tensor(-1.0)
        real = self.contexts[row] + int(self.last[row]) + 1
        return reward_model(self.rows[row][None, :real]).logits[0, -1, 0]

    def loss(self, rows: list[int]) -> Tensor:
        """Of one microbatch: means over its own tokens."""
        padding, padding_p1 = self.padding[rows], self.padding_p1[rows]
        new, values = self.logprobs(self.policy, rows), self.critic_values(rows)
        ratio = torch.exp(new - self.old[rows])
        advantages = self.advantages[rows]
        unclipped = -advantages * ratio
        clipped = -advantages * torch.clamp(ratio, 0.8, 1.2)
        policy_loss = torch.max(unclipped, clipped)[~padding].mean()
        old = self.values[rows]
        near = torch.clamp(values, old - 0.2, old + 0.2)
        squares = [torch.square(one - self.returns[rows]) for one in (values, near)]
        value_loss = 0.5 * torch.max(*squares)[~padding_p1].mean()
        return policy_loss + 0.1 * value_loss

    def learn(self, seed: int) -> None:
        parameters = [*self.policy.parameters(), *self.critic.parameters()]
        generator = torch.Generator().manual_seed(seed)
        for _ in range(2):
            order = torch.randperm(len(self.rows), generator=generator).tolist()
            parts = [order[at : at + 2] for at in range(0, len(order), 2)]
            loss = torch.stack([self.loss(part) for part in parts]).mean()
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= RATE * gradient


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-4), ("bf16", 1e-2)])
def test_an_update_under_compat_paper_is_the_papers(networks, precision, tolerance):
    policy, reference, reward_model = networks
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    critic = copy.deepcopy(reward_model)
    ours = PolicyModel(copy.deepcopy(policy))
    models = Networks(
        policy=ours,
        critic=critic,
        ref_policy=PolicyModel(reference),
        reward_model=reward_model,
        eos_id=EOS,
        pad_id=PAD,
    )
    config = make_config("tiny", name="mine", overrides=SETTINGS)
    trained = accelerator.prepare(PolicyAndCritic(ours, critic))
    optimizer = torch.optim.SGD(trained.parameters(), lr=RATE)
    learner = learner_of(models, config, optimizer, trained=trained, accelerator=accelerator)
    rollout, _ = rolled_out(config, learner, make_ragged(QUERIES))
    ended = (rollout.responses == EOS).any(dim=1)
    assert ended.any(), "this seed has to show an EOS"
    assert not ended.all(), "this seed has to show a response without one"
    optimize(learner, rollout, config.ppo, seed=9, kl_coef=config.ppo.kl_coef)

    queries = [row[row != PAD].tolist() for row in rollout.queries]
    # The cache would hold the weights of before the first step.
    bf16 = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)
    with bf16:
        theirs = copy.deepcopy(policy), reference, reward_model
        paper = Transcription(theirs, queries, rollout.responses)
        paper.learn(seed=9)
    for start, found, expected in (
        (policy, ours, paper.policy),
        (reward_model, critic, paper.critic),
    ):
        moved = flat(expected) - flat(start)
        assert moved.norm() > 1e-3
        distance = (flat(found) - flat(expected)).norm() / moved.norm()
        assert distance < tolerance
    AcceleratorState._reset_state(reset_partial_state=True)


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])
