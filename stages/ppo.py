"""Stage 4: PPO (P1 details 20 to 25; P2 section 3.4). One update, in six steps:

1. sample   responses of a fixed length for a batch of queries, cut after their first EOS
2. measure  their log-probabilities under policy and frozen ref_policy, the critic's values
3. score    each whole response with the reward model, read at EOS; -1 where EOS is missing
4. shape    rewards: -kl_coef * KL at every token, plus the score at the end
5. credit   advantages and returns by GAE; advantages whitened over the global batch
6. learn    clipped policy and value losses, num_ppo_epochs times over the batch

What an update does depends neither on the microbatch size nor on the number of processes: noise
belongs to the episode, whitening and loss means are over the global (mini)batch. Only which
episodes meet in one of several minibatches is each process's own matter, as in P1 (which has one).
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from stages import functional
from stages.config import Config, Ppo, UserError, fail
from stages.data import Ragged, TokenizedSplit, load_split, pad_left
from stages.invariants import KNOWN_ANSWERS, check_start
from stages.lora import merge
from stages.models import (
    load_tokenizer,
    response_logprobs,
    response_values,
    sample,
    save_model,
    score_responses,
)
from stages.ppo_loss import (
    Pretraining,
    count_terms,
    logprob_formula,
    mean_statistics,
    microbatch_loss,
    pretraining_step,
    split_minibatch,
)
from stages.ppo_models import Models, clip_gradients, load_models, reward_shift
from stages.presets import config_from_arguments
from stages.progress import progress
from stages.rollout import (
    Episodes,
    Rollout,
    concatenate,
    describe,
    describe_texts,
    log_samples,
    trim_left,
)
from stages.runs import Run, open_stage
from stages.training import (
    batch_rows,
    check_batch,
    global_sum,
    linear_rate,
    local_share,
    make_accelerator,
    refuse_non_finite,
    sampling_noise,
    saving_a_broken_batch,
    set_learning_rate,
    stream_seed,
    synchronized_last,
)

FINAL_SHARE = 0.05  # of the updates: what the results average over


def train_ppo(config: Config) -> None:
    """Run the stage."""
    accelerator = make_accelerator(config)
    with open_stage(config, "ppo", accelerator.is_main_process) as run:
        check_batch("ppo", config.ppo.batch_size, config.ppo.batch_size, accelerator)
        check_minibatches(config.ppo, accelerator)
        train = load_split(run.require("base") / "data", "sft_train")
        tokenizer = load_tokenizer(run.require("sft") / "model")
        models, optimizer = load_models(run, accelerator, tokenizer)
        history, updates = [], config.ppo.num_updates
        for update in progress(range(updates), "ppo", updates):
            rate = config.ppo.learning_rate * linear_rate(update, updates)
            set_learning_rate(optimizer, rate)
            started = time.time()
            queries = train.columns["queries"]
            rollout, metrics = roll_out(accelerator, models, queries, config, update)
            metrics |= describe_texts(accelerator, rollout, tokenizer)
            metrics |= {"lr": rate, "seconds/rollout": time.time() - started}
            if update == 0:
                known = run.require("normalize") / KNOWN_ANSWERS, reward_shift(run)
                networks = models.trained, models.reward_model
                check_start(accelerator, *networks, rollout, known, tokenizer, config)
            ptx = pretraining(config, train, update)
            metrics |= learn(run, accelerator, models, optimizer, rollout, config, update, ptx)
            metrics["seconds/update"] = time.time() - started
            history.append(metrics)
            run.log(update + 1, episode=(update + 1) * config.ppo.batch_size, **metrics)
            if update % config.ppo.samples_every == 0 or update + 1 == updates:
                log_samples(run, rollout, tokenizer, update + 1)
            config = replace(config, ppo=steer_kl(config.ppo, metrics["objective/kl"]))
        merge(models.policy)
        merge(models.critic)
        if accelerator.is_main_process:
            save_model(models.policy, tokenizer, run.partial / "model")
            save_model(models.critic, tokenizer, run.partial / "critic")
        run.finish(summarize(history, config.ppo))


def check_minibatches(ppo: Ppo, accelerator: Accelerator) -> None:
    """Raise UserError where a process's episodes cannot be dealt into minibatches of one size."""
    processes = accelerator.num_processes
    if ppo.batch_size // processes % ppo.num_minibatches:
        raise UserError(
            f"ppo.batch_size is {ppo.batch_size}: it must divide by {processes} processes times "
            f"ppo.num_minibatches={ppo.num_minibatches}"
        )


def steer_kl(ppo: Ppo, kl: float) -> Ppo:
    """The settings of the next update: the same, but for an adaptive kl_coef."""
    if not ppo.kl_target:
        return ppo
    kl_coef = functional.adapt_kl_coef(
        ppo.kl_coef, kl, ppo.kl_target, ppo.batch_size, ppo.kl_horizon
    )
    return replace(ppo, kl_coef=kl_coef)


def pretraining(config: Config, train: TokenizedSplit, update: int) -> Pretraining | None:
    """The pretraining mix of one update; None where the settings have none."""
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


@torch.no_grad()
def roll_out(
    accelerator: Accelerator, models: Models, queries: Ragged, config: Config, update: int
) -> tuple[Rollout, dict[str, float]]:
    """Steps 1 to 5 for this process's share of the batch, and what the batch looked like."""
    models.trained.eval()
    ppo, size = config.ppo, config.memory.forward_batch_size
    rows = batch_rows(len(queries), ppo.batch_size, update, config.seed, "ppo")
    noise = sampling_noise(
        config.seed, "ppo", update, ppo.batch_size, config.data.max_summary_tokens
    )
    # Neighbours in length share a forward pass, so that little of it is padding.
    mine = local_share(range(ppo.batch_size), accelerator)
    mine.sort(key=lambda position: len(queries[rows[position]]))
    batch = pad_left([queries[rows[position]] for position in mine], models.pad_id)
    batch, uniforms = batch.to(accelerator.device), noise[mine].to(accelerator.device)
    parts, gaps = [], []
    with accelerator.autocast():
        pieces = zip(torch.split(batch, size), torch.split(uniforms, size), strict=True)
        for some, uniform in pieces:
            part = trim_left(some, models.pad_id)
            responses, sampled = sample(  # 1. sample
                models.policy,
                part,
                uniform,
                ppo.temperature,
                models.eos_id,
                models.pad_id,
                logprob_formula(ppo),
            )
            responses = functional.truncate_after(responses, models.eos_id, models.pad_id)
            episodes = measure(models, part, responses, ppo)
            real = responses != models.pad_id
            gaps.append(torch.where(real, (episodes.logprobs - sampled).abs(), 0.0).sum())
            parts.append(replace(episodes, logprobs=sampled) if use_sampled(ppo) else episodes)
    rollout = credit(accelerator, concatenate(parts, batch), ppo, models.pad_id)
    metrics = describe(accelerator, rollout, ppo, models.eos_id)
    gap, tokens = global_sum(accelerator, sum(gaps), rollout.response_mask.sum())
    return rollout, metrics | {"val/sampler_mismatch": gap / tokens}


def use_sampled(ppo: Ppo) -> bool:
    """Whether the rollout keeps the sampler's log-probabilities, as P1 does."""
    return ppo.logprobs == "sampled"


def measure(models: Models, queries: Tensor, responses: Tensor, ppo: Ppo) -> Episodes:
    """Steps 2 and 3 for postprocessed responses.

    The policy's log-probabilities are recomputed by the training forward pass, so that the first
    ratio is 1. differs: P1 keeps the sampler's (ppo.logprobs).

    Shapes: queries [B, Q] left-padded, responses [B, T].
    """
    query_responses = torch.cat([queries, responses], dim=1)
    mask, length = query_responses != models.pad_id, responses.shape[1]
    tokens = query_responses.masked_fill(~mask, 0)
    logprobs, ref_logprobs = (  # 2. measure
        response_logprobs(policy, tokens, mask, length, ppo.temperature, logprob_formula(ppo))
        for policy in (models.policy, models.ref_policy)
    )
    values = response_values(models.critic, tokens, mask, length)
    scores = score_responses(models.reward_model, queries, responses, models.pad_id)  # 3. score
    return Episodes(
        queries=queries,
        responses=responses,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        scores=eos_trick(scores, responses, models.eos_id, ppo),
    )


def eos_trick(scores: Tensor, responses: Tensor, eos_id: int, ppo: Ppo) -> Tensor:
    """Scores [B] with what a missing EOS costs (detail 23; TRL subtracts)."""
    if ppo.eos_trick == "off":
        return scores
    replaced = ppo.eos_trick == "replace"
    formula = functional.penalize_missing_eos if replaced else functional.subtract_missing_eos
    return formula(scores, responses, eos_id, ppo.missing_eos_penalty)


def credit(accelerator: Accelerator, episodes: Episodes, ppo: Ppo, pad_id: int) -> Rollout:
    """Steps 4 and 5: rewards, values that count, GAE, whitening."""
    response_mask, value_mask = functional.response_masks(episodes.responses, pad_id)
    kl = functional.kl_estimate(episodes.logprobs, episodes.ref_logprobs, ppo.kl_estimator)
    kl_coef = ppo.kl_coef if ppo.kl_in == "reward" else 0.0
    rewards = functional.shape_rewards(  # 4. shape
        kl, episodes.scores, response_mask, kl_coef, ppo.score_at
    )
    if ppo.whiten_rewards:
        rewards = whiten(accelerator, rewards, value_mask, ppo, shift_mean=False)
    values = torch.where(value_mask, episodes.values, 0.0)
    advantages, returns = functional.gae(rewards, values, ppo.gamma, ppo.lam)  # 5. credit
    if ppo.whiten_advantages:
        advantages = whiten(accelerator, advantages, response_mask, ppo, shift_mean=True)
    return Rollout(
        queries=episodes.queries,
        responses=episodes.responses,
        logprobs=episodes.logprobs,
        ref_logprobs=episodes.ref_logprobs,
        values=values,
        scores=episodes.scores,
        response_mask=response_mask,
        value_mask=value_mask,
        advantages=advantages,
        returns=returns,
    )


def whiten(accelerator: Accelerator, x: Tensor, mask: Tensor, ppo: Ppo, shift_mean: bool) -> Tensor:
    """`masked_whiten` over the batch of all processes, or over this one's as P1 does.

    Returns this process's rows, [B, T].
    """
    if ppo.whiten_over == "process":
        return functional.masked_whiten(x, mask, shift_mean=shift_mean)
    everything, counted = accelerator.gather(x), accelerator.gather(mask)
    whitened = functional.masked_whiten(everything, counted, shift_mean=shift_mean)
    start = accelerator.process_index * len(x)
    return whitened[start : start + len(x)]


def learn(
    run: Run,
    accelerator: Accelerator,
    models: Models,
    optimizer: Any,
    rollout: Rollout,
    config: Config,
    update: int,
    ptx: Pretraining | None,
) -> dict[str, float]:
    """Step 6 for one rollout. A number that is not finite ends the stage, with the batch saved."""
    with saving_a_broken_batch(run, accelerator, update, "sft", lambda: vars(rollout)):
        return optimize(  # 6. learn
            accelerator,
            models.trained,
            optimizer,
            rollout,
            config.ppo,
            pad_id=models.pad_id,
            microbatch_size=config.memory.microbatch_size,
            seed=stream_seed(config.seed, "ppo minibatches", update),
            ptx=ptx,
        )


def optimize(
    accelerator: Accelerator,
    trained: nn.Module,
    optimizer: Any,
    rollout: Rollout,
    ppo: Ppo,
    *,
    pad_id: int,
    microbatch_size: int,
    seed: int,
    ptx: Pretraining | None = None,
) -> dict[str, float]:
    """Step 6: num_ppo_epochs passes over the rollout; returns the statistics averaged over them.

    Same weights and same rollout in, same weights out; `seed` decides how episodes are dealt into
    minibatches. An epoch that moved the policy by more than target_kl is the last one.
    """
    trained.train()
    generator = torch.Generator().manual_seed(seed)
    history: list[dict[str, float]] = []
    for _ in range(ppo.num_ppo_epochs):
        order = torch.randperm(len(rollout.queries), generator=generator)
        for rows in order.to(rollout.queries.device).chunk(ppo.num_minibatches):
            minibatch, sizes = rollout.rows(rows), (pad_id, microbatch_size)
            stats = take_step(
                accelerator, trained, optimizer, minibatch, ppo, *sizes, ptx, len(history)
            )
            history.append(stats)
        epoch = mean_statistics(history[-ppo.num_minibatches :])
        if ppo.target_kl and epoch["policy/approxkl_avg"] > ppo.target_kl:
            break
    epochs = len(history) / ppo.num_minibatches
    return mean_statistics(history) | {"policy/epochs": epochs}


def take_step(
    accelerator: Accelerator,
    trained: nn.Module,
    optimizer: Any,
    minibatch: Rollout,
    ppo: Ppo,
    pad_id: int,
    microbatch_size: int,
    ptx: Pretraining | None = None,
    step: int = 0,
) -> dict[str, float]:
    """One optimizer step on a minibatch, in microbatches weighted by the tokens that they hold."""
    networks = accelerator.unwrap_model(trained)
    stats: dict[str, float] = {}
    if ptx is not None:
        stats["loss/ptx"] = pretraining_step(
            accelerator, networks.policy, trained, ptx, step, ppo, microbatch_size
        )
    parts = split_minibatch(minibatch, ppo, pad_id, microbatch_size)
    terms = count_terms(accelerator, minibatch, ppo, len(parts))
    summed: dict[str, float] = {}
    for part in synchronized_last(accelerator, trained, parts):
        microbatch = minibatch.rows(torch.tensor(part, device=minibatch.queries.device))
        loss, some = microbatch_loss(trained, microbatch, ppo, pad_id, terms)
        # Devices average their gradients; the global mean wants their sum.
        accelerator.backward(loss * accelerator.num_processes)
        summed = {key: summed.get(key, 0.0) + value for key, value in some.items()}
    stats |= dict(zip(summed, global_sum(accelerator, *summed.values()), strict=True))
    stats |= clip_gradients(networks, ppo)
    refuse_non_finite("ppo", stats)
    optimizer.step()
    optimizer.zero_grad()
    return stats


def summarize(history: Sequence[dict[str, float]], ppo: Ppo) -> dict[str, float]:
    """The stage's results: means over the last updates."""
    last = history[-max(1, round(FINAL_SHARE * len(history))) :]
    keys = "objective/kl objective/kl_k1 objective/scores policy/eos_rate policy/response_length"
    keys += " text/copied_title_words text/distinct_2"
    means = {key: sum(metrics[key] for metrics in last) / len(last) for key in keys.split()}
    return means | {"updates": len(history), "episodes": len(history) * ppo.batch_size}


def main(argv: list[str] | None = None) -> None:
    """Command line of the stage."""
    try:
        train_ppo(config_from_arguments(argv, "stage 4: PPO"))
    except UserError as error:
        fail(error)


if __name__ == "__main__":
    main()
