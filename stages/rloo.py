"""RLOO, a rival of PPO without a critic (Ahmadian et al. 2024).

Steps 1 to 4 and 6 are PPO's. A batch holds `samples_per_query` responses to each of its queries.
5. credit: an episode's advantage, the same at each of its tokens, is its summed reward minus the
mean of the other episodes of its query.
"""

from functools import partial

import torch

from stages.driving.start import run_stage
from stages.functional import leave_one_out
from stages.learning.loop import make_accelerator
from stages.learning.lora import adapt
from stages.learning.models import load_tokenizer
from stages.learning.state import begin, saving_a_broken_batch
from stages.rl.credit import shape
from stages.rl.episodes import Rollout, Shaped
from stages.rl.metrics import describe, describe_texts, samples, summarize
from stages.rl.networks import Origins, load_networks, make_learner, save_networks, score_shift
from stages.rl.rollout import load_queries, measure, sample_responses, score
from stages.rl.start_checks import check_start
from stages.rl.update import check_episodes, optimize, set_rate, steer_kl
from stages.running.files import read_lines
from stages.runs import open_stage
from stages.settings.config import Config


def train_rloo(config: Config) -> None:
    """Run the stage."""
    accelerator, rloo = make_accelerator(config), config.rloo
    with open_stage(config, "rloo", accelerator.is_main_process) as run:
        group = rloo.samples_per_query
        check_episodes("rloo", rloo, accelerator, group)
        split, queries = load_queries(run.require("base") / "data")
        tokenizer = load_tokenizer(run.require("sft") / "model")
        normalized = run.require("normalize")
        origins = Origins(
            policy=run.require("sft") / "model",
            reward_model=normalized / "model",
            score_shift=score_shift(normalized, rloo),
            adapt=partial(adapt, config=config, stage="rloo"),
        )
        networks = load_networks(origins, tokenizer, rloo, config.memory.frozen_dtype)
        learner = make_learner(accelerator, networks, rloo, config.optimizer, config.memory, "rloo")
        state = begin(run, learner, rloo, len(queries), group)
        for update in state.remaining("rloo"):
            rate, kl_coef = set_rate(learner, rloo), state.kl_coef
            batch = [queries[row] for row in state.order.batch(update)]
            sampled = sample_responses(learner, batch, state.noise, rloo, group)
            episodes = score(learner, measure(learner, sampled, rloo), rloo)
            rollout = credit(shape(episodes, rloo, networks.pad_id, kl_coef), group)
            metrics = {"lr": rate} | describe(learner, rollout, rloo, kl_coef)
            metrics |= describe_texts(learner, rollout, tokenizer)
            if update == 0:
                check_start(learner, rollout, origins, rloo, config.memory)
            with saving_a_broken_batch(state, "sft", rollout.tensors):
                metrics |= optimize(learner, rollout, rloo, state.minibatch_seed, kl_coef)
            metrics["seconds/update"] = state.seconds
            run.log(update + 1, episode=(update + 1) * rloo.batch_size, **metrics)
            if update % rloo.samples_every == 0 or update + 1 == state.updates:
                for row in samples(rollout, tokenizer, update + 1):
                    run.append("samples.jsonl", row)
            state.kl_coef = steer_kl(rloo, kl_coef, metrics["objective/kl"])
        save_networks(learner, tokenizer, run.partial)
        if run.main:
            results = summarize(read_lines(run.partial / "metrics.jsonl"), rloo)
            run.finish(results | {"queries_from": split})


def credit(shaped: Shaped, group_size: int) -> Rollout:
    """Step 5: leave-one-out advantages, [B, T]; the episodes of a query are neighbours."""
    advantages = leave_one_out(shaped.rewards.sum(dim=1), group_size).unsqueeze(1)
    by_token = torch.where(shaped.response_mask, advantages, 0.0)
    return Rollout(**vars(shaped), advantages=by_token, returns=None)


def main(argv: list[str] | None = None) -> None:
    """Command line of the stage."""
    run_stage("rloo", train_rloo, argv, "RLOO, beside PPO")


if __name__ == "__main__":
    main()
