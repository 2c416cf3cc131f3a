"""Stage 4: PPO (Huang et al. 2024, details 20 to 25; Stiennon et al. 2020, section 3.4).

One update, in six steps:

1. sample   responses of a fixed length for a batch of queries, cut after their first EOS
2. measure  their log-probabilities under policy and frozen ref_policy, the critic's values
3. score    each whole response with the reward model, read at EOS; -1 where EOS is missing
4. shape    rewards: -kl_coef * KL at every token, plus the score at the end
5. credit   advantages and returns by GAE; advantages whitened over the global batch
6. learn    clipped policy and value losses, num_ppo_epochs times over the batch

An update does not depend on the microbatch size or on the number of processes: the noise belongs to
the episode, whitening and loss means are over the global (mini)batch. Exceptions: each process
deals its own episodes into minibatches, as in Huang et al. 2024 (which has one minibatch), and
`whiten_over=process` and `loss_mean=microbatches` do as its code does.
The steps are in `stages/rl`.
"""

from itertools import accumulate
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from stages.models.loading import load_tokenizer, save_model
from stages.models.lora import adapter_layers
from stages.rl.advantages import credit, shape
from stages.rl.metrics import describe, describe_texts, samples, say_what_is_odd, summarize
from stages.rl.networks import PolicyLearner, load_networks, make_learner, origins_of, save_networks
from stages.rl.rollout import load_queries, measure, sample_responses, score
from stages.rl.start_checks import check_start
from stages.rl.update import check_episodes, optimize, set_rate
from stages.rl.update_checks import check_update
from stages.running.files import read_lines, sync
from stages.runs import open_stage
from stages.settings.config import Config
from stages.settings.ppo import Ppo
from stages.training.accelerator import make_accelerator
from stages.training.sharding import gathered
from stages.training.state import begin


def train_ppo(config: Config) -> None:
    """Run the stage."""
    accelerator = make_accelerator(config, find_unused_parameters=True)
    with open_stage(config, "ppo", accelerator.is_main_process) as run:
        ppo = config.ppo
        check_episodes("ppo", ppo, accelerator)
        split, queries = load_queries(run.require("base") / "data")
        tokenizer = load_tokenizer(run.require("sft") / "model")
        origins = origins_of(run, ppo)
        networks = load_networks(origins, tokenizer, ppo, config.memory.frozen_dtype)
        learner = make_learner(accelerator, networks, ppo, config.optimizer, config.memory)
        state = begin(run, learner, ppo, len(queries))
        history, kept = run.partial / "metrics.jsonl", kept_models(ppo)
        for update in state.remaining("ppo"):
            rate = set_rate(learner, ppo)
            batch = [queries[row] for row in state.order.batch(update)]
            sampled = sample_responses(learner, batch, state.noise, ppo)  # 1.
            measured = measure(learner, sampled, ppo)  # 2.
            episodes = score(learner, measured, ppo)  # 3.
            shaped = shape(episodes, ppo, tokenizer.pad_token_id, ppo.score_at)  # 4.
            rollout = credit(accelerator, shaped, ppo)  # 5.
            metrics = describe(learner, rollout, ppo)
            metrics |= describe_texts(learner, rollout, tokenizer)
            metrics |= {"lr": rate, "seconds/rollout": state.seconds}
            if update == 0:
                check_start(learner, rollout, origins, ppo, config.memory, score)
            say_what_is_odd(learner, history, metrics, ppo)
            check_update(learner, rollout, ppo)
            metrics |= optimize(learner, rollout, ppo, state.minibatch_seed)  # 6.
            metrics["seconds/update"] = state.seconds
            run.log(update + 1, episode=(update + 1) * ppo.batch_size, **metrics)
            if update % ppo.samples_every == 0 or update + 1 == state.updates:
                for row in samples(rollout, tokenizer, update + 1):
                    run.append("samples.jsonl", row)
            if update in kept:
                keep_policy(learner, tokenizer, run.partial / kept[update])
        save_networks(learner, tokenizer, run.partial)
        if run.main:
            results = summarize(read_lines(history), ppo) | {"queries_from": split}
            run.finish(results, learner.budget.halvings)


def kept_models(ppo: Ppo) -> dict[int, str]:
    """The updates, from 0, after which the policy is kept, and its folder: `model-24` after 24.

    They are equal steps of the learning rate's sum while it learns: of what is known beforehand,
    that comes nearest to equal steps of KL. A page shows each at the KL that was measured.
    """
    updates, steps = ppo.num_updates, ppo.checkpoints + 1
    rates = {update: updates - update for update in range(updates) if ppo.policy_learns(update)}
    ends: dict[int, int] = {}  # the update that completes each step
    for update, passed in zip(rates, accumulate(rates.values()), strict=True):
        ends.setdefault(passed * steps // sum(rates.values()), update)
    width = len(str(updates))  # so that names sort
    return {n: f"model-{n + 1:0{width}}" for step, n in ends.items() if 0 < step < steps}


def keep_policy(learner: PolicyLearner, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the policy as it is now, adapters merged, as a plain model; the main process writes.

    The learner stays as it was, to the bit. All processes must call this.
    """
    policy = learner.accelerator.unwrap_model(learner.trained).policy
    with gathered(policy), torch.no_grad():
        own = {name: x for name, x in policy.named_parameters() if ".lora_" not in name}
        weights = {name.replace(".base_layer.", "."): x.detach() for name, x in own.items()}
        for name, layer in adapter_layers(policy):
            weights[f"{name}.weight"] = layer.weight + layer.get_delta_weight("default")
        if not learner.accelerator.is_main_process:
            return
        save_model(policy, tokenizer, folder, weights)
    for path in [*folder.iterdir(), folder]:  # before a checkpoint goes on from here
        sync(path)
