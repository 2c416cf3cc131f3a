"""Step 6 of an update: passes over the rollout, minibatches, optimizer steps."""

from collections.abc import Iterator, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from stages.rl import loss
from stages.rl.episodes import Rollout
from stages.rl.networks import PolicyLearner, clip_gradients
from stages.settings.checks import check_dealt
from stages.settings.ppo import PolicyGradient
from stages.training.optimizer import set_learning_rate
from stages.training.step import optimizer_step


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


def optimize(
    learner: PolicyLearner, rollout: Rollout, settings: PolicyGradient, seed: int
) -> dict[str, float]:
    """Step 6: num_ppo_epochs passes over the rollout; returns the statistics averaged over them.

    The same weights, rollout and `seed` give the same new weights; `seed` decides how episodes are
    dealt into minibatches. An epoch whose mean approxkl is above target_kl is the last one. A step
    measures approxkl before it learns: with one minibatch, the epoch's own step is left out.
    In the learner's first critic_updates updates the critic alone learns. Raises NonFiniteError
    before a step that is not finite.
    """
    learner.trained.train()
    generator = torch.Generator().manual_seed(seed)
    history: list[dict[str, float]] = []
    for _ in range(settings.num_ppo_epochs):
        for rows in deal(rollout, settings, generator):
            history.append(take_step(learner, rollout.rows(rows), settings))
        epoch = mean_statistics(history[-settings.num_minibatches :])
        if settings.target_kl and epoch.get("policy/approxkl_avg", 0.0) > settings.target_kl:
            break
    epochs = len(history) / settings.num_minibatches
    return mean_statistics(history) | {"policy/epochs": epochs}


def deal(
    rollout: Rollout, settings: PolicyGradient, generator: torch.Generator
) -> Iterator[Tensor]:
    """The episodes of each minibatch, in random order; the samples of a query stay neighbours."""
    group, device = settings.samples_per_query, rollout.queries.device
    order = torch.randperm(len(rollout.queries) // group, generator=generator)
    for queries in order.to(device).chunk(settings.num_minibatches):
        yield (queries.unsqueeze(1) * group + torch.arange(group, device=device)).flatten()


def take_step(
    learner: PolicyLearner, minibatch: Rollout, settings: PolicyGradient
) -> dict[str, float]:
    """One optimizer step on a minibatch, in microbatches weighted by the tokens that they hold."""
    accelerator, pad_id = learner.accelerator, learner.networks.pad_id

    def parts(size: int) -> list[tuple[Rollout, loss.Divisors]]:
        places = loss.split_minibatch(minibatch, settings, pad_id, size)
        divisors = loss.count_divisors(accelerator, minibatch, settings, len(places))
        device = minibatch.queries.device
        rows = [(torch.tensor(part, device=device), longest) for part, longest in places]
        return [(minibatch.rows(row).trimmed(*longest), divisors) for row, longest in rows]

    def losses(part: tuple[Rollout, loss.Divisors]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        return loss.microbatch_losses(learner, *part, settings, pad_id)

    def clip() -> dict[str, float]:
        return clip_gradients(accelerator.unwrap_model(learner.trained), settings)

    return optimizer_step(learner, parts, losses, smallest=settings.samples_per_query, clip=clip)


def mean_statistics(history: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of every statistic over some optimizer steps."""
    return {key: sum(stats[key] for stats in history) / len(history) for key in history[0]}
