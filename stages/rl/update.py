"""Step 6 of an update: passes over the rollout, minibatches, optimizer steps."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from stages import functional
from stages.config.fitting import check_batch_divides
from stages.config.ppo import PolicyGradient
from stages.rl import loss
from stages.rl.episodes import Rollout
from stages.rl.networks import PolicyLearner, clip_gradients
from stages.rl.pretraining import PretrainingMix, pretraining_losses
from stages.runs.files import read_lines
from stages.training.memory import chunks
from stages.training.optimizer import set_learning_rate
from stages.training.processes import global_sum
from stages.training.step import optimizer_step


def check_episodes(section: str, settings: PolicyGradient, accelerator: Accelerator) -> None:
    """Raise UserError if a process cannot divide its episodes into minibatches of equal size.

    The samples of a query stay together. `section` is the name of the settings.
    """
    check_batch_divides(
        section,
        settings.batch_size,
        processes=accelerator.num_processes,
        num_minibatches=settings.num_minibatches,
        samples=settings.samples_per_query,
    )


def linear_rate(update: int, updates: int) -> float:
    """Share of the learning rate at an update, counted from 0; the last one has 1 / updates."""
    return 1 - update / updates


def set_rate(learner: PolicyLearner, settings: PolicyGradient) -> float:
    """Set and return the learning rate of the next update, which decays linearly."""
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

    It is constant unless kl_target is set. In critic warm-up it does not change either, because the
    policy is still the SFT model: its KL of 0 says nothing about the coefficient.
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
    learner: PolicyLearner,
    rollout: Rollout,
    settings: PolicyGradient,
    seed: int,
    kl_coef: float,
    mix: PretrainingMix | None = None,
) -> dict[str, float]:
    """Step 6: num_ppo_epochs passes over the rollout; returns the statistics averaged over them.

    The same weights, rollout and `seed` give the same new weights; `seed` decides how episodes are
    divided into minibatches. `kl_coef` is this update's, `mix` the pretraining term if there is
    one. An epoch whose mean approxkl is above target_kl is the last one; each step measures it
    before it changes the weights, so with one minibatch the effect of the epoch's own step is not
    included. In critic warm-up only the critic is trained. Raises NonFiniteError before a step that
    is not finite.
    """
    learner.trained.train()
    generator = torch.Generator().manual_seed(seed)
    steps: list[dict[str, float]] = []
    for _ in range(settings.num_ppo_epochs):
        for rows in minibatch_rows(rollout, settings.num_minibatches, generator):
            statistics = take_step(
                learner,
                minibatch=rollout.rows(rows),
                settings=settings,
                kl_coef=kl_coef,
                mix=mix if settings.policy_learns(learner.update) else None,
                step=len(steps),
            )
            steps.append(statistics)
        epoch = mean_statistics(steps[-settings.num_minibatches :])
        if settings.target_kl and epoch.get("policy/approxkl_avg", 0.0) > settings.target_kl:
            break
    epochs = len(steps) / settings.num_minibatches
    return mean_statistics(steps) | {"policy/epochs": epochs}


def minibatch_rows(
    rollout: Rollout, num_minibatches: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """The episodes of each minibatch, in random order; the samples of a query stay neighbors."""
    samples = rollout.samples_per_query
    device = rollout.queries.device
    query_order = torch.randperm(len(rollout.queries) // samples, generator=generator).to(device)
    for queries in query_order.chunk(num_minibatches):
        first_rows = queries.unsqueeze(1) * samples
        yield (first_rows + torch.arange(samples, device=device)).flatten()


Microbatch = Callable[[], Iterator[tuple[Tensor, dict[str, Tensor]]]]
"""Computes the losses of one microbatch, each with its statistics."""


def take_step(
    learner: PolicyLearner,
    minibatch: Rollout,
    settings: PolicyGradient,
    kl_coef: float,
    mix: PretrainingMix | None = None,
    step: int = 0,
) -> dict[str, float]:
    """One optimizer step on a minibatch, and on as many references if there is a pretraining mix.

    `step` counts the optimizer steps of this update, from 0.
    """
    accelerator = learner.accelerator
    references: list[int] = []
    reference_tokens = 0.0
    if mix is not None:
        references = mix.share(learner, step)
        (reference_tokens,) = global_sum(accelerator, mix.count_tokens(references))

    def microbatches(size: int) -> list[Microbatch]:
        """The microbatches of at most `size` sequences: references first, then episodes."""
        computations: list[Microbatch] = []
        if mix is not None:
            for rows in chunks(references, size):
                computations.append(
                    partial(pretraining_losses, learner, mix, rows, reference_tokens)
                )
        parts = loss.split_minibatch(minibatch, settings, size)
        divisors = loss.count_divisors(accelerator, minibatch, settings, len(parts))
        for part in parts:
            computations.append(
                partial(loss.microbatch_losses, learner, part, divisors, settings, kl_coef)
            )
        return computations

    def clip() -> dict[str, float]:
        return clip_gradients(accelerator.unwrap_model(learner.trained), settings)

    return optimizer_step(
        learner,
        split=microbatches,
        losses=lambda microbatch: microbatch(),
        smallest=minibatch.samples_per_query,
        clip=clip,
    )


def mean_statistics(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of every statistic over the given optimizer steps."""
    return {key: sum(step[key] for step in steps) / len(steps) for key in steps[0]}
