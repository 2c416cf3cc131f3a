"""Step 6 of an update: passes over the rollout, minibatches, optimizer steps."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from stages import functional
from stages.rl import loss
from stages.rl.episodes import Rollout
from stages.rl.networks import PolicyLearner, clip_gradients
from stages.running.files import read_lines
from stages.settings.checks import check_dealt
from stages.settings.ppo import PolicyGradient
from stages.training.learner import optimizer_step
from stages.training.loop import set_learning_rate


def check_episodes(section: str, settings: PolicyGradient, accelerator: Accelerator) -> None:
    """Raise UserError if a process cannot deal its episodes, the samples of a query together, into
    minibatches of equal size. `section` is how settings name it.
    """
    minibatches, samples = settings.num_minibatches, settings.samples_per_query
    check_dealt(section, settings.batch_size, accelerator.num_processes, minibatches, samples)


def linear_rate(update: int, updates: int) -> float:
    """Share of the learning rate at an update counted from 0; the last one has 1 / updates."""
    return 1 - update / updates


def set_rate(learner: PolicyLearner, settings: PolicyGradient) -> float:
    """Set and return the learning rate of the learner's next update, which decays linearly."""
    rate = settings.learning_rate * linear_rate(learner.update, settings.num_updates)
    set_learning_rate(learner.optimizer, rate)
    return rate


def first_kl_coef(settings: PolicyGradient, metrics_file: Path, update: int) -> float:
    """The KL coefficient of the next update, counted from 0, when a stage starts or resumes.

    An adaptive coefficient follows from what the update before it has logged.
    """
    if update == 0 or not settings.kl_target:
        return settings.kl_coef
    logged = next(row for row in read_lines(metrics_file) if row["step"] == update)
    return next_kl_coef(settings, logged["objective/kl_coef"], logged["objective/kl"], update - 1)


def next_kl_coef(settings: PolicyGradient, kl_coef: float, kl: float, update: int) -> float:
    """The KL coefficient after an update, counted from 0, with the given mean KL.

    It is constant unless kl_target is set. In critic warm-up the policy is still the SFT model:
    its KL of 0 says nothing about the coefficient, which waits.
    """
    if not settings.kl_target or not settings.policy_learns(update):
        return kl_coef
    return functional.adapt_kl_coef(
        kl_coef,
        kl,
        target=settings.kl_target,
        episodes=settings.batch_size,
        horizon=settings.kl_horizon,
    )


def optimize(
    learner: PolicyLearner, rollout: Rollout, settings: PolicyGradient, seed: int, kl_coef: float
) -> dict[str, float]:
    """Step 6: num_ppo_epochs passes over the rollout; returns the statistics averaged over them.

    The same weights, rollout and `seed` give the same new weights; `seed` decides how episodes are
    dealt into minibatches. `kl_coef` is this update's. An epoch whose mean approxkl is above
    target_kl is the last one; a step measures it before it changes the weights, so with one
    minibatch the epoch's own step is not part of it. In critic warm-up only the critic is trained.
    Raises NonFiniteError before a step that is not finite.
    """
    learner.trained.train()
    generator = torch.Generator().manual_seed(seed)
    steps: list[dict[str, float]] = []
    for _ in range(settings.num_ppo_epochs):
        for rows in deal(rollout, settings, generator):
            steps.append(take_step(learner, rollout.rows(rows), settings, kl_coef))
        epoch = mean_statistics(steps[-settings.num_minibatches :])
        if settings.target_kl and epoch.get("policy/approxkl_avg", 0.0) > settings.target_kl:
            break
    epochs = len(steps) / settings.num_minibatches
    return mean_statistics(steps) | {"policy/epochs": epochs}


def deal(
    rollout: Rollout, settings: PolicyGradient, generator: torch.Generator
) -> Iterator[Tensor]:
    """The episodes of each minibatch, in random order; the samples of a query stay neighbours."""
    group, device = rollout.samples_per_query, rollout.queries.device
    order = torch.randperm(len(rollout.queries) // group, generator=generator)
    for queries in order.to(device).chunk(settings.num_minibatches):
        yield (queries.unsqueeze(1) * group + torch.arange(group, device=device)).flatten()


def take_step(
    learner: PolicyLearner, minibatch: Rollout, settings: PolicyGradient, kl_coef: float
) -> dict[str, float]:
    """One optimizer step on a minibatch, in microbatches weighted by their number of tokens."""
    accelerator = learner.accelerator

    def parts(size: int) -> list[tuple[Rollout, loss.Divisors]]:
        microbatches = loss.split_minibatch(minibatch, settings, size)
        divisors = loss.count_divisors(accelerator, minibatch, settings, len(microbatches))
        return [(microbatch, divisors) for microbatch in microbatches]

    def losses(part: tuple[Rollout, loss.Divisors]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        microbatch, divisors = part
        return loss.microbatch_losses(learner, microbatch, divisors, settings, kl_coef)

    def clip() -> dict[str, float]:
        return clip_gradients(accelerator.unwrap_model(learner.trained), settings)

    return optimizer_step(learner, parts, losses, least=minibatch.samples_per_query, clip=clip)


def mean_statistics(history: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of every statistic over some optimizer steps."""
    return {key: sum(stats[key] for stats in history) / len(history) for key in history[0]}
