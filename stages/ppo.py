"""Stage 4: PPO (Huang et al. 2024, details 20 to 25; Stiennon et al. 2020, section 3.4).

One update, in six steps:

1. sample   responses of a fixed length for a batch of queries, cut after their first EOS
2. measure  their log-probabilities under policy and frozen ref_policy, the critic's values
3. score    each whole response with the reward model, read at EOS; -1 where EOS is missing
4. shape    rewards: -kl_coef * KL at every token, plus the score at the end
5. credit   advantages and returns by GAE; advantages whitened over the global batch
6. learn    clipped policy and value losses, num_ppo_epochs times over the batch

An update does not depend on the microbatch size or on the number of processes: the noise belongs to
the episode, whitening and loss means are over the global (mini)batch. There is one exception: each
process deals its own episodes into minibatches, as in Huang et al. 2024 (which has one minibatch).
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages import functional
from stages.learning.batches import Order, check_batch, global_sum, stream_seed, synchronized_last
from stages.learning.fitting import in_memory
from stages.learning.loop import linear_rate, make_accelerator, refuse_non_finite, set_learning_rate
from stages.learning.models import keep_model, load_tokenizer
from stages.learning.sampling import Sampling
from stages.learning.state import State, saving_a_broken_batch
from stages.posts.ragged import Ragged, TokenizedSplit, load_split
from stages.rl.credit import credit, eos_trick
from stages.rl.episodes import Episodes, Rollout, describe, describe_texts, log_samples
from stages.rl.loss import (
    Pretraining,
    count_terms,
    logprob_formula,
    mean_statistics,
    microbatch_losses,
    pretraining_step,
    split_minibatch,
)
from stages.rl.networks import Models, clip_gradients, load_models, reward_shift
from stages.rl.rollout import roll_out
from stages.rl.start_checks import KNOWN_ANSWERS, check_start
from stages.running.files import read_lines
from stages.running.start import run_stage
from stages.runs import Run, open_stage
from stages.settings.checks import UserError
from stages.settings.config import Config
from stages.settings.ppo import Ppo
from stages.settings.sections import PPO_TRAIN

FINAL_SHARE = 0.05  # the results average over this share of the updates, the last ones


def train_ppo(config: Config) -> None:
    """Run the stage."""
    accelerator = make_accelerator(config, takes_turns=True)
    with open_stage(config, "ppo", accelerator.is_main_process) as run:
        check_batch("ppo", config.ppo.batch_size, config.ppo.batch_size, accelerator)
        check_minibatches(config.ppo, accelerator)
        splits = load_splits(run.require("base") / "data")
        queries = splits[query_split(splits)].columns["queries"]
        tokenizer = load_tokenizer(run.require("sft") / "model")
        models, optimizer = load_models(run, accelerator, tokenizer)
        state = make_state(run, accelerator, models, optimizer, len(queries))
        state.load()
        for update in state.remaining("ppo"):
            rate, started = set_rate(state), time.monotonic()
            # 1. sample, 2. measure, 3. score
            episodes, metrics = collect_episodes(state, models, queries)
            rollout = credit(  # 4. shape, 5. credit
                accelerator, episodes, config.ppo, models.pad_id, state.kl_coef
            )
            about = describe(accelerator, rollout, config.ppo, models.eos_id, state.kl_coef)
            metrics = about | metrics | describe_texts(accelerator, rollout, tokenizer)
            metrics |= {"lr": rate, "seconds/rollout": time.monotonic() - started}
            if update == 0:
                known = run.require("normalize") / KNOWN_ANSWERS, reward_shift(run)
                check_start(accelerator, models, rollout, known, tokenizer, config)
            ptx = pretraining(config, splits["sft_train"], update)
            metrics |= learn(state, models, rollout, ptx)  # 6. learn
            metrics["seconds/update"] = time.monotonic() - started
            run.log(update + 1, episode=(update + 1) * config.ppo.batch_size, **metrics)
            if update % config.ppo.samples_every == 0 or update + 1 == state.updates:
                log_samples(run, rollout, tokenizer, update + 1)
            state.kl_coef = steer_kl(config.ppo, state.kl_coef, metrics["objective/kl"])
        finish(state, tokenizer, query_split(splits))


def load_splits(data: Path) -> dict[str, TokenizedSplit]:
    """The posts with a reference and, where the data have them, posts for PPO alone."""
    names = ("sft_train", PPO_TRAIN)
    return {name: load_split(data, name) for name in names if (data / f"{name}.jsonl").exists()}


def query_split(splits: dict[str, TokenizedSplit]) -> str:
    """The split that queries are drawn from: `ppo_train` where there is one.

    Stiennon et al. 2020 had other posts for PPO; Huang et al. 2024 reuse those of SFT (detail 21).
    """
    return PPO_TRAIN if PPO_TRAIN in splits else "sft_train"


def check_minibatches(ppo: Ppo, accelerator: Accelerator) -> None:
    """Raise UserError if a process cannot deal its episodes into minibatches of equal size."""
    processes = accelerator.num_processes
    if ppo.batch_size // processes % ppo.num_minibatches:
        raise UserError(
            f"ppo.batch_size is {ppo.batch_size}: it must divide by {processes} processes times "
            f"ppo.num_minibatches={ppo.num_minibatches}"
        )


def make_state(
    run: Run, accelerator: Accelerator, models: Models, optimizer: Any, rows: int
) -> State:
    """The loop before its first update; the split that queries come from has `rows` rows."""
    ppo, seed = run.config.ppo, run.config.seed
    return State(
        run=run,
        accelerator=accelerator,
        trained=models.trained,
        optimizer=optimizer,
        updates=ppo.num_updates,
        order=Order(rows=rows, batch_size=ppo.batch_size, seed=seed, purpose="ppo"),
        kl_coef=ppo.kl_coef,
        dropout=ppo.dropout,
    )


def set_rate(state: State) -> float:
    """Set and return this update's learning rate."""
    share = linear_rate(state.update, state.updates)
    rate = state.run.config.ppo.learning_rate * share
    set_learning_rate(state.optimizer, rate)
    return rate


def collect_episodes(
    state: State, models: Models, queries: Ragged
) -> tuple[Episodes, dict[str, float]]:
    """Steps 1 to 3 for this process's share of the batch, as the settings of PPO say."""
    config, ppo = state.run.config, state.run.config.ppo
    sampling = Sampling(
        seed=config.seed,
        purpose="ppo",
        step=state.update,
        length=config.data.max_summary_tokens,
        temperature=ppo.temperature,
        forward_batch_size=config.memory.forward_batch_size,
    )
    batch = [queries[row] for row in state.order.batch(state.update)]
    formula, keep_sampled = logprob_formula(ppo), ppo.logprobs == "sampled"
    episodes, metrics = roll_out(state.accelerator, models, batch, sampling, formula, keep_sampled)
    scores = eos_trick(episodes.scores, episodes.responses, models.eos_id, ppo)
    return replace(episodes, scores=scores), metrics


def pretraining(config: Config, train: TokenizedSplit, update: int) -> Pretraining | None:
    """The pretraining mix of one update; None if the settings have none."""
    ppo = config.ppo
    if not ppo.ptx_coef:
        return None
    return Pretraining(
        split=train,
        loss_on_query=config.sft.loss_on_query,
        batch_size=ppo.batch_size // ppo.num_minibatches,
        seed=config.seed,
        first_step=update * ppo.num_ppo_epochs * ppo.num_minibatches,
    )


def learn(
    state: State, models: Models, rollout: Rollout, ptx: Pretraining | None
) -> dict[str, float]:
    """Step 6 for one rollout. If a number is not finite, the batch is saved and the stage ends."""
    seed = stream_seed(state.run.config.seed, "ppo minibatches", state.update)
    with saving_a_broken_batch(state, "sft", lambda: vars(rollout)):
        return optimize(state, rollout, models.pad_id, seed, ptx)


def optimize(
    state: State, rollout: Rollout, pad_id: int, seed: int, ptx: Pretraining | None = None
) -> dict[str, float]:
    """Step 6: num_ppo_epochs passes over the rollout; returns the statistics averaged over them.

    The same weights, rollout and `seed` give the same new weights; `seed` decides how episodes are
    dealt into minibatches. An epoch that moved the policy by more than target_kl is the last one.
    """
    ppo = state.run.config.ppo
    state.trained.train()
    generator = torch.Generator().manual_seed(seed)
    history: list[dict[str, float]] = []
    for _ in range(ppo.num_ppo_epochs):
        order = torch.randperm(len(rollout.queries), generator=generator)
        for rows in order.to(rollout.queries.device).chunk(ppo.num_minibatches):
            history.append(take_step(state, rollout.rows(rows), pad_id, ptx, len(history)))
        epoch = mean_statistics(history[-ppo.num_minibatches :])
        if ppo.target_kl and epoch["policy/approxkl_avg"] > ppo.target_kl:
            break
    epochs = len(history) / ppo.num_minibatches
    return mean_statistics(history) | {"policy/epochs": epochs}


def take_step(
    state: State, minibatch: Rollout, pad_id: int, ptx: Pretraining | None = None, step: int = 0
) -> dict[str, float]:
    """One optimizer step on a minibatch, in microbatches weighted by the tokens that they hold."""
    accelerator, ppo = state.accelerator, state.run.config.ppo

    def gradients(size: int) -> dict[str, float]:
        stats: dict[str, float] = {}
        if ptx is not None:
            stats["loss/ptx"] = pretraining_step(state, ptx, step)
        parts = split_minibatch(minibatch, ppo, pad_id, size)
        terms = count_terms(accelerator, minibatch, ppo, len(parts))
        summed: dict[str, Tensor | float] = {}
        for part, longest in synchronized_last(accelerator, state.trained, parts):
            rows = torch.tensor(part, device=minibatch.queries.device)
            microbatch = minibatch.rows(rows).trimmed(*longest)
            for loss, some in microbatch_losses(state, microbatch, pad_id, terms):
                # Devices average their gradients; the global mean needs their sum.
                accelerator.backward(loss * accelerator.num_processes)
                summed |= {key: summed.get(key, 0.0) + x.double() for key, x in some.items()}
        return stats | dict(zip(summed, global_sum(accelerator, *summed.values()), strict=True))

    stats = in_memory(state, gradients)
    stats |= clip_gradients(accelerator.unwrap_model(state.trained), ppo)
    refuse_non_finite("ppo", stats)
    state.optimizer.step()
    state.optimizer.zero_grad()
    return stats


def steer_kl(ppo: Ppo, kl_coef: float, kl: float) -> float:
    """The kl_coef of the next update, reward units per nat; it changes only if it is adaptive."""
    if not ppo.kl_target:
        return kl_coef
    return functional.adapt_kl_coef(kl_coef, kl, ppo.kl_target, ppo.batch_size, ppo.kl_horizon)


def finish(state: State, tokenizer: PreTrainedTokenizerBase, queries_from: str) -> None:
    """Save both networks as plain models and close the stage."""
    run, networks = state.run, state.accelerator.unwrap_model(state.trained)
    for network, folder in ((networks.policy, "model"), (networks.critic, "critic")):
        keep_model(state.accelerator, network, tokenizer, run.partial / folder)
    if run.main:
        results = summarize(read_lines(run.partial / "metrics.jsonl"), run.config.ppo)
        run.finish(results | {"queries_from": queries_from})


def summarize(history: Sequence[dict[str, Any]], ppo: Ppo) -> dict[str, float]:
    """The stage's results: means over the last updates."""
    last = history[-max(1, round(FINAL_SHARE * len(history))) :]
    keys = "objective/kl objective/kl_k1 objective/scores policy/eos_rate policy/response_length"
    keys += " text/copied_title_words text/distinct_2"
    means = {key: sum(metrics[key] for metrics in last) / len(last) for key in keys.split()}
    return means | {"updates": len(history), "episodes": len(history) * ppo.batch_size}


def main(argv: list[str] | None = None) -> None:
    """Command line of the stage."""
    run_stage("ppo", train_ppo, argv, "stage 4: PPO")


if __name__ == "__main__":
    main()
