"""The loop of PPO's rivals without a critic: the samples of a query are each other's baseline.

Steps 1 to 4 and 6 are PPO's. A batch holds `samples_per_query` responses to each of its queries.
5. credit: an episode's advantage is the same at each of its tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stages.models.loading import load_tokenizer
from stages.rl.advantages import shape
from stages.rl.episodes import Rollout, Shaped
from stages.rl.metrics import describe, describe_texts, samples, say_what_is_odd, summarize
from stages.rl.networks import load_networks, make_learner, origins_of, save_networks
from stages.rl.rollout import load_queries, measure, sample_responses, score
from stages.rl.start_checks import check_start
from stages.rl.update import check_episodes, optimize, set_rate
from stages.rl.update_checks import check_update
from stages.running.files import read_lines
from stages.runs import open_stage
from stages.settings.config import Config
from stages.settings.ppo import Grouped
from stages.training.accelerator import make_accelerator
from stages.training.state import begin

Baseline = Callable[[Tensor, int], Tensor]
"""Rewards [B] of groups of some size -> advantages [B]."""


def train_grouped(config: Config, settings: Grouped, baseline: Baseline) -> None:
    """Run the stage; `baseline` makes an episode's advantage of its group's rewards."""
    accelerator, stage = make_accelerator(config), settings.section()
    with open_stage(config, stage, accelerator.is_main_process) as run:
        check_episodes(stage, settings, accelerator)
        split, queries = load_queries(run.require("base") / "data")
        tokenizer = load_tokenizer(run.require("sft") / "model")
        origins = origins_of(run, settings)
        networks = load_networks(origins, tokenizer, settings, config.memory.frozen_dtype)
        learner = make_learner(accelerator, networks, settings, config.optimizer, config.memory)
        state = begin(run, learner, settings, len(queries))
        history = run.partial / "metrics.jsonl"
        for update in state.remaining(stage):
            rate = set_rate(learner, settings)
            batch = [queries[row] for row in state.order.batch(update)]
            sampled = sample_responses(learner, batch, state.noise, settings)
            episodes = score(learner, measure(learner, sampled, settings), settings)
            rollout = credit(shape(episodes, settings, networks.pad_id), settings, baseline)
            metrics = describe(learner, rollout, settings)
            metrics |= describe_texts(learner, rollout, tokenizer)
            metrics |= {"lr": rate, "seconds/rollout": state.seconds}
            if update == 0:
                check_start(learner, rollout, origins, settings, config.memory, score)
            say_what_is_odd(learner, history, metrics, settings)
            check_update(learner, rollout, settings)
            metrics |= optimize(learner, rollout, settings, state.minibatch_seed)
            metrics["seconds/update"] = state.seconds
            run.log(update + 1, episode=(update + 1) * settings.batch_size, **metrics)
            if update % settings.samples_every == 0 or update + 1 == state.updates:
                for row in samples(rollout, tokenizer, update + 1):
                    run.append("samples.jsonl", row)
        save_networks(learner, tokenizer, run.partial)
        if run.main:
            results = summarize(read_lines(history), settings) | {"queries_from": split}
            run.finish(results, learner.budget.halvings)


def credit(shaped: Shaped, settings: Grouped, baseline: Baseline) -> Rollout:
    """Step 5: advantages [B, T] without a critic; the episodes of a query are neighbours."""
    rewards = shaped.rewards.sum(dim=1)
    advantages = baseline(rewards, settings.samples_per_query).unsqueeze(1)
    by_token = torch.where(shaped.response_mask, advantages, 0.0)
    return Rollout(**vars(shaped), advantages=by_token, returns=None)
