"""Learners, training states and PPO updates for tests, in one process on the CPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator

from stages.config.ppo import PolicyGradient
from stages.data.ragged import load_split
from stages.models.sampling import Noise
from stages.models.tokenizers import load_tokenizer
from stages.rl.advantages import assign_rewards, compute_advantages
from stages.rl.algorithms import ALGORITHMS
from stages.rl.episodes import Episodes, Rollout
from stages.rl.metrics import describe
from stages.rl.networks import (
    PolicyAndCritic,
    PolicyLearner,
    load_networks,
    make_learner,
    origins_of,
)
from stages.rl.rollout import measure, sample_responses, score
from stages.rl.update import optimize
from stages.runs.run import Run
from stages.training.memory import MemoryBudget
from stages.training.state import Order, State
from stages.training.step import Learner


def flat(network: Any) -> torch.Tensor:
    """A copy of all weights of a network, as one vector."""
    return torch.cat([weight.detach().flatten() for weight in network.parameters()])


def state_of(config: Any, network: Any, optimizer: Any = None, **others: Any) -> Any:
    """A training loop's state for a test's network, without a run on disk."""
    learner = Learner(
        stage="test",
        accelerator=others.pop("accelerator", None) or Accelerator(cpu=True),
        trained=network,
        optimizer=optimizer,
        budget=MemoryBudget.from_settings(config.memory),
        update=others.pop("update", 0),
    )
    given: dict[str, Any] = {
        "run": SimpleNamespace(config=config),
        "learner": learner,
        "updates": 10,
        "order": Order(rows=1, batch_size=1, seed=config.seed, purpose="test"),
    }
    return State(**given | others)


def learner_of(networks: Any, config: Any, optimizer: Any = None, **others: Any) -> Any:
    """A learner of policy-gradient networks; `trained` is their module, not wrapped."""
    given = {
        "stage": "ppo",
        "accelerator": Accelerator(cpu=True),
        "networks": networks,
        "optimizer": optimizer,
        "budget": MemoryBudget.from_settings(config.memory),
    }
    if "trained" not in others:
        given["trained"] = PolicyAndCritic(networks.policy, networks.critic)
    return PolicyLearner(**given | others)


def rollout_from(
    episodes: Episodes,
    settings: PolicyGradient,
    pad_id: int,
    algorithm: str = "ppo",
    accelerator: Any = None,
) -> Rollout:
    """Steps 4 and 5 of an update: scored episodes with rewards, advantages and returns."""
    shaped = assign_rewards(episodes, settings, pad_id, settings.kl_coef)
    accelerator = accelerator or Accelerator(cpu=True)
    return compute_advantages(accelerator, shaped, ALGORITHMS[algorithm], settings)


def rolled_out(
    config: Any, learner: Any, queries: Any, update: int = 0
) -> tuple[Rollout, dict[str, float]]:
    """Steps 1 to 5 of a PPO update: the rollout, and what is reported of it."""
    ppo = config.ppo
    order = Order(rows=len(queries), batch_size=ppo.batch_size, seed=config.seed, purpose="ppo")
    noise = Noise(
        seed=config.seed, purpose="ppo", step=update, length=config.data.max_summary_tokens
    )
    query_batch = [queries[row] for row in order.batch(update)]

    sampled = sample_responses(learner, query_batch, noise, ppo)
    episodes = score(learner, measure(learner, sampled, ppo), ppo)
    rollout = rollout_from(episodes, ppo, learner.networks.pad_id, accelerator=learner.accelerator)
    return rollout, describe(learner, rollout, ppo, ppo.kl_coef)


def ppo_learner(study: Path, config: Any) -> Any:
    """The learner with which PPO starts from a finished run's models."""
    ppo = config.ppo
    origins = origins_of(Run(config, "ppo"), ppo)
    tokenizer = load_tokenizer(study / "sft" / "model")
    networks = load_networks(origins, tokenizer, ppo, config.memory.frozen_dtype)
    return make_learner(Accelerator(cpu=True), networks, ppo, config.optimizer, config.memory)


def two_updates_of_ppo(study: Path, config: Any) -> tuple[Any, Rollout]:
    """The learner and the second rollout after two updates from a finished run's models."""
    learner = ppo_learner(study, config)
    queries = load_split(study / "base" / "data", "sft_train").columns["queries"]
    for update in range(2):
        rollout, _ = rolled_out(config, learner, queries, update)
        optimize(learner, rollout, config.ppo, update, config.ppo.kl_coef)
    return learner, rollout
