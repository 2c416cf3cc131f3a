"""Stage 4: the training loop of PPO and of the other policy-gradient algorithms.

Source: Huang et al. 2024, details 20 to 25; Stiennon et al. 2020, section 3.4.

One update has six steps:

1. sample       responses of a fixed length for a batch of queries, cut after their first EOS
2. measure      their log-probabilities under the policy and the frozen ref_policy, and the critic's
                values
3. score        each whole response with the reward model, read at EOS; -1 where EOS is missing
4. shape        rewards: -kl_coef * KL at every token, plus the score at the end
5. advantages   PPO: GAE with the critic; advantages whitened over the global batch
6. optimize     clipped policy and value losses, num_ppo_epochs passes over the batch

RLOO, Dr.GRPO and REINFORCE++ differ from PPO in step 5 and in the defaults of their settings, and
have no critic. `stages/rl/algorithms.py` is the table of algorithms, `stages/rl` has the steps, and
`stages/functional.py` the formulas.

An update does not depend on the microbatch size or on the number of processes: each episode has its
own random numbers for sampling, and whitening and loss means are over the global (mini)batch. The
exceptions:

- Each process splits its own episodes into minibatches, as in Huang et al. 2024, which has one.
- `whiten_over=process` and `loss_mean=microbatches` reproduce what the paper's code does.
- Each process and pass draws its own dropout masks. Dropout is off by default.
"""

from itertools import accumulate
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from stages.config.config import Config
from stages.config.ppo import PolicyGradient, Ppo
from stages.models.loading import save_model
from stages.models.lora import adapter_layers
from stages.models.reward_function import TextReward
from stages.models.tokenizers import load_tokenizer
from stages.rl.advantages import assign_rewards, compute_advantages
from stages.rl.algorithms import Algorithm
from stages.rl.metrics import describe, describe_texts, samples, say_what_is_odd, summarize
from stages.rl.networks import PolicyLearner, load_networks, make_learner, origins_of, save_networks
from stages.rl.pretraining import load_pretraining_mix
from stages.rl.rollout import (
    load_queries,
    load_references,
    measure,
    sample_responses,
    score,
    score_references,
)
from stages.rl.start_checks import check_start
from stages.rl.update import check_episodes, first_kl_coef, next_kl_coef, optimize, set_rate
from stages.rl.update_checks import check_statistics, check_update
from stages.rl.value_range import find_range, in_range, logged_range
from stages.runs.files import read_lines, sync
from stages.runs.run import open_stage
from stages.training.accelerator import make_accelerator
from stages.training.sharding import gathered
from stages.training.state import begin


def train_policy(config: Config, algorithm: Algorithm) -> None:
    """Run the stage of one algorithm: load, take the six steps of each update, save."""
    stage = algorithm.name
    settings: PolicyGradient = getattr(config, stage)
    # With a critic, a pass runs one of the two networks, and the other's weights get no gradient.
    accelerator = make_accelerator(config, find_unused_parameters=settings.uses_critic)
    with open_stage(config, stage, accelerator.is_main_process) as run:
        check_episodes(stage, settings, accelerator)

        data = run.require("base") / "data"
        split, posts = load_queries(data)
        queries = posts.columns["queries"]
        references = load_references(split, posts, settings)
        mix = load_pretraining_mix(config, settings, data)
        tokenizer = load_tokenizer(run.require("sft") / "model")

        # The policy starts as the SFT model, the critic as the reward model (detail 22).
        origins = origins_of(run, settings)
        networks = load_networks(origins, tokenizer, settings, config.memory.frozen_dtype)
        learner = make_learner(accelerator, networks, settings, config.optimizer, config.memory)

        # Resume after the last saved update, if there is one. An adaptive KL coefficient and the
        # range of bounded values follow from what was logged.
        state = begin(run, learner, settings, len(queries))
        metrics_file = run.partial / "metrics.jsonl"
        kl_coef = first_kl_coef(settings, metrics_file, state.update)
        value_range = logged_range(settings, metrics_file, state.update)
        folders_to_keep = kept_models(settings)

        # Only a reward function reads what the data say about a query, besides its text.
        facts = posts.rows if isinstance(networks.reward_model, TextReward) else []

        for update in state.remaining(stage):
            learning_rate = set_rate(learner, settings)
            batch = state.order.batch(update)
            query_batch = [queries[row] for row in batch]
            facts_of_batch = [facts[row] for row in batch] if facts else []

            # 1. to 3. Sample episodes, compute their log-probabilities and values, score them.
            sampled = sample_responses(
                learner, query_batch, state.noise, settings, facts=facts_of_batch
            )
            measured = measure(learner, sampled, settings)
            reference_scores = None
            if references is not None:
                reference_scores = score_references(
                    learner,
                    query_batch,
                    references=[references[row] for row in batch],
                    settings=settings,
                    facts=facts_of_batch,
                )
            episodes = score(learner, measured, settings, reference_scores=reference_scores)

            # With ppo.bound_values, the scores of the first update decide the range of the values.
            if isinstance(settings, Ppo) and settings.bound_values:
                if value_range is None:
                    value_range = find_range(accelerator, episodes, origins, settings)
                episodes = in_range(episodes, value_range)

            # 4. and 5. Compute rewards per token, then advantages and the critic's targets.
            shaped = assign_rewards(episodes, settings, tokenizer.pad_token_id, kl_coef)
            rollout = compute_advantages(accelerator, shaped, algorithm, settings)

            # Describe and check the rollout before anything is learned from it.
            metrics = describe(learner, rollout, settings, kl_coef)
            metrics |= describe_texts(learner, rollout, tokenizer)
            metrics |= {"lr": learning_rate, "seconds/rollout": state.seconds}
            if update == 0:
                check_start(learner, rollout, origins, settings, config, score)
            say_what_is_odd(learner, metrics_file, metrics, settings)
            check_update(learner, rollout, settings, kl_coef, config.checks.updates)

            # 6. Optimize over the episodes.
            metrics |= optimize(learner, rollout, settings, state.minibatch_seed, kl_coef, mix)
            check_statistics(learner, metrics, settings, config.checks.updates)

            # Write metrics and samples, and keep some policies on the way.
            metrics["seconds/update"] = state.seconds
            run.log(update + 1, episode=(update + 1) * settings.batch_size, **metrics)
            is_last = update + 1 == state.updates
            if update % settings.samples_every == 0 or is_last:
                for row in samples(rollout, tokenizer, update + 1):
                    run.append("samples.jsonl", row)
            if update in folders_to_keep:
                keep_policy(learner, tokenizer, run.partial / folders_to_keep[update])

            kl_coef = next_kl_coef(settings, kl_coef, metrics["objective/kl"], update)

        save_networks(learner, tokenizer, run.partial, value_range)
        if run.is_main:
            results = summarize(read_lines(metrics_file), settings) | {"queries_from": split}
            run.finish(results, learner.budget.halvings)


def kept_models(settings: PolicyGradient) -> dict[int, str]:
    """Maps each update, counted from 0, after which the policy is kept, to the folder it goes to.

    `model-24` is the policy after 24 updates, so its key is 23. The updates divide the policy's
    cumulative learning rate into equal steps, which is the best stand-in for equal steps of KL that
    is known in advance. The page shows each policy at its measured KL.
    """
    if not isinstance(settings, Ppo) or not settings.checkpoints:
        return {}
    updates = settings.num_updates
    steps = settings.checkpoints + 1
    # Proportional to the learning rate, which decays linearly (`linear_rate`).
    rates = {
        update: updates - update for update in range(updates) if settings.policy_learns(update)
    }
    total_rate = sum(rates.values())

    first_update: dict[int, int] = {}  # number of completed steps -> the first update with it
    for update, rate_so_far in zip(rates, accumulate(rates.values()), strict=True):
        steps_done = rate_so_far * steps // total_rate
        first_update.setdefault(steps_done, update)

    width = len(str(updates))  # so that the folders' names sort
    # After the last step comes the stage's own model, which is saved anyway.
    return {
        update: f"model-{update + 1:0{width}}"
        for steps_done, update in first_update.items()
        if 0 < steps_done < steps
    }


def keep_policy(learner: PolicyLearner, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the policy as it is now, adapters merged, as a plain model; the main process writes.

    The learner is unchanged, bit for bit. All processes must call this.
    """
    policy = learner.accelerator.unwrap_model(learner.trained).policy
    with gathered(policy), torch.no_grad():
        # peft calls an adapted layer's own weight base_layer.weight, and its adapters lora_*.
        weights = {
            name.replace(".base_layer.", "."): weight.detach()
            for name, weight in policy.model.named_parameters()
            if ".lora_" not in name
        }
        for name, layer in adapter_layers(policy.model):
            weights[f"{name}.weight"] = layer.weight + layer.get_delta_weight("default")
        if not learner.accelerator.is_main_process:
            return
        save_model(policy.model, tokenizer, folder, weights)
    # Flush to disk before the next checkpoint: a resumed run does not write this folder again.
    for path in [*folder.iterdir(), folder]:
        sync(path)
