"""Stage 4: PPO (P1 details 20 to 25; P2 section 3.4). One update, in six steps:

1. sample   responses of a fixed length for a batch of queries, cut after their first EOS
2. measure  their log-probabilities under policy and frozen ref_policy, the critic's values
3. score    each whole response with the reward model, read at EOS; -1 where EOS is missing
4. shape    rewards: -kl_coef * KL at every token, plus the score at the end
5. credit   advantages and returns by GAE; advantages whitened over the global batch
6. learn    clipped policy and value losses, num_ppo_epochs times over the batch

What an update does depends neither on the microbatch size nor on the number of processes: noise
belongs to the episode, whitening and loss means are over the global (mini)batch.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stages import functional
from stages.config import Config, Ppo, UserError, fail
from stages.data import Ragged, load_split, pad_left
from stages.invariants import KNOWN_ANSWERS, check_start
from stages.models import (
    PolicyAndCritic,
    load_policy,
    load_reward_model,
    load_tokenizer,
    response_logprobs,
    response_values,
    sample,
    save_model,
    score_responses,
)
from stages.presets import config_from_arguments
from stages.rollout import Episodes, Rollout, concatenate, describe, log_samples, trim_left
from stages.runs import Run, open_stage, progress
from stages.training import (
    NonFiniteError,
    batch_rows,
    check_batch,
    chunks,
    global_sum,
    linear_rate,
    local_share,
    make_accelerator,
    make_optimizer,
    refuse_non_finite,
    sampling_noise,
    set_learning_rate,
    stream_seed,
    synchronized_last,
    use_gradient_checkpointing,
)

FINAL_SHARE = 0.05  # of the updates: what the results average over


@dataclass(frozen=True, kw_only=True)
class Models:
    """Trained and frozen networks of a run, and the ids that their tokenizer gives EOS and PAD."""

    trained: nn.Module
    """`PolicyAndCritic`, wrapped by the accelerator; `policy` and `critic` are its parts."""
    policy: PreTrainedModel
    critic: PreTrainedModel
    ref_policy: PreTrainedModel
    reward_model: PreTrainedModel
    eos_id: int
    pad_id: int


def train_ppo(config: Config) -> None:
    """Run the stage."""
    accelerator = make_accelerator(config)
    ppo = config.ppo
    with open_stage(config, "ppo", accelerator.is_main_process) as run:
        check_batch("ppo", ppo.batch_size, ppo.batch_size, accelerator)
        queries = load_split(run.require("base") / "data", "sft_train").columns["queries"]
        tokenizer = load_tokenizer(run.require("sft") / "model")
        models, optimizer = prepare(run, accelerator, tokenizer)
        history = []
        for update in progress(range(ppo.num_updates), "ppo", ppo.num_updates):
            rate = ppo.learning_rate * linear_rate(update, ppo.num_updates)
            set_learning_rate(optimizer, rate)
            started = time.time()
            rollout, metrics = roll_out(accelerator, models, queries, config, update)
            metrics |= {"lr": rate, "seconds/rollout": time.time() - started}
            if update == 0:
                known = run.require("normalize") / KNOWN_ANSWERS
                networks = models.trained, models.reward_model
                check_start(accelerator, *networks, rollout, known, tokenizer, config)
            metrics |= learn(run, accelerator, models, optimizer, rollout, update)  # 6. learn
            metrics["seconds/update"] = time.time() - started
            history.append(metrics)
            run.log(update + 1, episode=(update + 1) * ppo.batch_size, **metrics)
            if update % ppo.samples_every == 0 or update + 1 == ppo.num_updates:
                log_samples(run, rollout, tokenizer, update + 1)
        if accelerator.is_main_process:
            save_model(models.policy, tokenizer, run.partial / "model")
            save_model(models.critic, tokenizer, run.partial / "critic")
        run.finish(summarize(history, ppo))


def prepare(
    run: Run, accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase
) -> tuple[Models, Any]:
    """Load the four networks and the optimizer.

    Policy and ref_policy start as the SFT model, critic and reward model as the normalised reward
    model (detail 22).
    """
    config, device = run.config, accelerator.device
    sft, normalized = run.require("sft") / "model", run.require("normalize") / "model"
    networks = PolicyAndCritic(load_policy(sft), load_reward_model(normalized))
    use_gradient_checkpointing(networks.policy, config.memory)
    use_gradient_checkpointing(networks.critic, config.memory)
    optimizer = make_optimizer(networks.parameters(), config.ppo.learning_rate, config.optimizer)
    trained, optimizer = accelerator.prepare(networks, optimizer)
    models = Models(
        trained=trained,
        policy=networks.policy,
        critic=networks.critic,
        ref_policy=load_policy(sft).to(device).eval().requires_grad_(False),
        reward_model=load_reward_model(normalized).to(device).eval().requires_grad_(False),
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
    )
    return models, optimizer


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
    parts = []
    with accelerator.autocast():
        pieces = zip(torch.split(batch, size), torch.split(uniforms, size), strict=True)
        for some, uniform in pieces:
            part = trim_left(some, models.pad_id)
            responses = sample(  # 1. sample
                models.policy, part, uniform, ppo.temperature, models.eos_id, models.pad_id
            )
            responses = functional.truncate_after(responses, models.eos_id, models.pad_id)
            parts.append(measure(models, part, responses, ppo))
    rollout = credit(accelerator, concatenate(parts, batch), ppo, models.pad_id)
    return rollout, describe(accelerator, rollout, ppo, models.eos_id)


def measure(models: Models, queries: Tensor, responses: Tensor, ppo: Ppo) -> Episodes:
    """Steps 2 and 3 for postprocessed responses.

    The policy's log-probabilities are recomputed by the training forward pass, so that the first
    ratio is 1. differs: P1 keeps the sampler's.

    Shapes: queries [B, Q] left-padded, responses [B, T].
    """
    query_responses = torch.cat([queries, responses], dim=1)
    mask, length = query_responses != models.pad_id, responses.shape[1]
    tokens = query_responses.masked_fill(~mask, 0)
    logprobs, ref_logprobs = (  # 2. measure
        response_logprobs(policy, tokens, mask, length, ppo.temperature)
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
        scores=functional.penalize_missing_eos(
            scores, responses, models.eos_id, ppo.missing_eos_penalty
        ),
    )


def credit(accelerator: Accelerator, episodes: Episodes, ppo: Ppo, pad_id: int) -> Rollout:
    """Steps 4 and 5: rewards, values that count, GAE, whitening."""
    response_mask, value_mask = functional.response_masks(episodes.responses, pad_id)
    kl = functional.kl_estimate(episodes.logprobs, episodes.ref_logprobs)
    rewards = functional.shape_rewards(kl, episodes.scores, response_mask, ppo.kl_coef)  # 4. shape
    if ppo.whiten_rewards:
        rewards = whiten_globally(accelerator, rewards, value_mask, shift_mean=False)
    values = torch.where(value_mask, episodes.values, 0.0)
    advantages, returns = functional.gae(rewards, values, ppo.gamma, ppo.lam)  # 5. credit
    return Rollout(
        queries=episodes.queries,
        responses=episodes.responses,
        logprobs=episodes.logprobs,
        ref_logprobs=episodes.ref_logprobs,
        values=values,
        scores=episodes.scores,
        response_mask=response_mask,
        value_mask=value_mask,
        advantages=whiten_globally(accelerator, advantages, response_mask, shift_mean=True),
        returns=returns,
    )


def whiten_globally(accelerator: Accelerator, x: Tensor, mask: Tensor, shift_mean: bool) -> Tensor:
    """`masked_whiten` over the batch of all processes; returns this process's rows, [B, T]."""
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
    update: int,
) -> dict[str, float]:
    """Step 6 for one rollout. A number that is not finite ends the stage, with the batch saved."""
    try:
        return optimize(
            accelerator,
            models.trained,
            optimizer,
            rollout,
            run.config.ppo,
            pad_id=models.pad_id,
            microbatch_size=run.config.memory.microbatch_size,
            seed=stream_seed(run.config.seed, "ppo minibatches", update),
        )
    except NonFiniteError as error:
        path = run.folder.with_name(f"ppo.failed{accelerator.process_index}.safetensors")
        save_file({name: x.cpu().contiguous() for name, x in vars(rollout).items()}, path)
        raise UserError(
            f"{error} (update {update + 1}, its batch is in {path}; the last good weights are "
            f"those in {run.require('sft')})"
        ) from None


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
) -> dict[str, float]:
    """Step 6: num_ppo_epochs passes over the rollout; returns the statistics averaged over them.

    Same weights and same rollout in, same weights out; `seed` decides how episodes are dealt into
    minibatches.
    """
    trained.train()
    generator = torch.Generator().manual_seed(seed)
    history = []
    for _ in range(ppo.num_ppo_epochs):
        order = torch.randperm(len(rollout.queries), generator=generator)
        for rows in order.to(rollout.queries.device).chunk(ppo.num_minibatches):
            minibatch = rollout.rows(rows)
            history.append(
                take_step(accelerator, trained, optimizer, minibatch, ppo, pad_id, microbatch_size)
            )
    return {key: sum(stats[key] for stats in history) / len(history) for key in history[0]}


def take_step(
    accelerator: Accelerator,
    trained: nn.Module,
    optimizer: Any,
    minibatch: Rollout,
    ppo: Ppo,
    pad_id: int,
    microbatch_size: int,
) -> dict[str, float]:
    """One optimizer step on a minibatch, in microbatches weighted by the tokens that they hold."""
    terms = global_sum(accelerator, minibatch.response_mask.sum(), minibatch.value_mask.sum())
    lengths = (minibatch.queries != pad_id).sum(dim=1) + minibatch.response_mask.sum(dim=1)
    summed: dict[str, float] = {}
    parts = chunks(lengths.argsort().tolist(), microbatch_size)
    for part in synchronized_last(accelerator, trained, parts):
        microbatch = minibatch.rows(torch.tensor(part, device=lengths.device))
        loss, stats = microbatch_loss(trained, microbatch, ppo, pad_id, terms)
        # Devices average their gradients; the global mean wants their sum.
        accelerator.backward(loss * accelerator.num_processes)
        summed = {key: summed.get(key, 0.0) + value for key, value in stats.items()}
    stats = dict(zip(summed, global_sum(accelerator, *summed.values()), strict=True))
    networks = accelerator.unwrap_model(trained)
    stats["policy/grad_norm"] = gradient_norm(networks.policy)
    stats["critic/grad_norm"] = gradient_norm(networks.critic)
    refuse_non_finite("ppo", stats)
    optimizer.step()
    optimizer.zero_grad()
    return stats


def gradient_norm(network: nn.Module) -> float:
    """Euclidean norm of a network's gradient."""
    gradients = [one.grad for one in network.parameters() if one.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).item()


def microbatch_loss(
    trained: nn.Module, microbatch: Rollout, ppo: Ppo, pad_id: int, terms: Sequence[float]
) -> tuple[Tensor, dict[str, float]]:
    """This microbatch's part of the minibatch's loss and statistics.

    `terms` counts the minibatch's policy terms and value terms on all devices. Each mean below is
    multiplied by the microbatch's share of them: the parts add up to the minibatch's mean.
    """
    longest = int(microbatch.value_mask.sum(dim=1).max())  # what follows counts nowhere
    part = microbatch.trimmed(pad_id, longest)
    mask, value_mask = part.response_mask, part.value_mask
    query_responses = torch.cat([part.queries, part.responses], dim=1)
    real = query_responses != pad_id
    tokens = query_responses.masked_fill(~real, 0)
    logits, new_values = trained(tokens, real, longest)
    new_logprobs = functional.token_logprobs(logits, tokens[:, -longest:], ppo.temperature)
    policy_loss, clipfrac = functional.policy_loss(
        new_logprobs, part.logprobs, part.advantages, mask, ppo.cliprange
    )
    value_loss, value_clipfrac = functional.value_loss(
        new_values, part.values, part.returns, value_mask, ppo.cliprange_value
    )
    policy_share, value_share = mask.sum() / terms[0], value_mask.sum() / terms[1]
    loss = policy_loss * policy_share + ppo.vf_coef * value_loss * value_share
    with torch.no_grad():
        log_ratio = new_logprobs - part.logprobs
        entropy = functional.entropy(logits / ppo.temperature)
        by_token = {
            "loss/policy_avg": policy_loss,
            "policy/clipfrac_avg": clipfrac,
            "policy/approxkl_avg": functional.masked_mean(log_ratio.square() / 2, mask),
            "policy/entropy_avg": functional.masked_mean(entropy, mask),
            "val/ratio": functional.masked_mean(log_ratio.exp(), mask),
        }
        by_position = {"loss/value_avg": value_loss, "val/clipfrac_avg": value_clipfrac}
        stats = {key: (value * policy_share).item() for key, value in by_token.items()}
        stats |= {key: (value * value_share).item() for key, value in by_position.items()}
    return loss, stats


def summarize(history: Sequence[dict[str, float]], ppo: Ppo) -> dict[str, float]:
    """The stage's results: means over the last updates."""
    last = history[-max(1, round(FINAL_SHARE * len(history))) :]
    keys = ("objective/kl", "objective/scores", "policy/eos_rate", "policy/response_length")
    means = {key: sum(metrics[key] for metrics in last) / len(last) for key in keys}
    return means | {"updates": len(history), "episodes": len(history) * ppo.batch_size}


def main(argv: list[str] | None = None) -> None:
    """Command line of the stage."""
    try:
        train_ppo(config_from_arguments(argv, "stage 4: PPO"))
    except UserError as error:
        fail(error)


if __name__ == "__main__":
    main()
