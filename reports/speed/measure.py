"""One measurement of ours, in a process of its own: `make bench` starts it.

    python -m reports.speed.measure update folder/update.json --preset pythia-14m

`prepare` writes weights, and queries: random tokens with the lengths of real posts. `update` is one
whole update of PPO or RLOO: all rows of the batch as they come, all epochs; TRL is measured on the
same tokens.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from reports.speed.meter import Meter, hold, matrix_rate
from reports.speed.speed import EOS_ID, QUERIES
from stages.config.command_line import add_arguments, config_of, request_of
from stages.config.config import Config
from stages.config.faults import Parser, in_one_line
from stages.config.ppo import PolicyGradient
from stages.data.ragged import pad_left
from stages.models.forward import ResponseBatch, response_logprobs, score_responses
from stages.models.loading import load_policy, load_reward_model, new_reward_model
from stages.models.lora import adapt
from stages.models.policy import PolicyModel
from stages.models.sampling import Noise
from stages.planning.memory import Setting, setting_of
from stages.planning.random_inputs import draw_weights
from stages.planning.shapes import Shape, block_weights, parameters, shape_of
from stages.rl.advantages import assign_rewards, compute_advantages
from stages.rl.algorithms import ALGORITHMS
from stages.rl.episodes import Rollout
from stages.rl.metrics import describe
from stages.rl.networks import Origins, PolicyLearner, load_networks, make_learner
from stages.rl.rollout import measure, sample_responses, score
from stages.rl.update import optimize, set_rate
from stages.runs.files import read_json, write_json
from stages.runs.machine import device_name
from stages.training.accelerator import make_accelerator
from stages.training.random_streams import stream

WARM_TOKENS = 2
TOP = 10  # kernels of a profile
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
# At these shares of 4,707 real posts, as parts of the limit of 512 tokens.
QUANTILES = (0.105, 0.42, 0.525, 0.68, 0.833, 0.927, 0.99, 1.0)
SEED = 1


def prepare(config: Config, settings: PolicyGradient, folder: Path) -> dict[str, Any]:
    """Write new weights of the shape, a reward model, and the queries of one batch."""
    make_accelerator(config)
    published = shape_of(config.base)
    limit, count = config.data.max_query_tokens, settings.batch_size // settings.samples_per_query
    write_json(folder / QUERIES, synthetic_queries(published, limit, count))
    draw_weights(published, config.seed, folder / "model")
    scorer = new_reward_model(folder / "model", stream(config.seed, "reward head"))
    scorer.save_pretrained(folder / "reward_model")
    return {"parameters": parameters(published)}


def synthetic_queries(published: Shape, limit: int, count: int) -> list[list[int]]:
    """Random tokens; lengths are from the distribution that `QUANTILES` give."""
    rng, queries = random.Random(SEED), []
    for _ in range(count):
        length = max(1, round(limit * float(np.interp(rng.random(), SHARES, QUANTILES))))
        queries.append(rng.choices(range(1, published.vocabulary), k=length))
    return queries


def measure_update(config: Config, settings: PolicyGradient, folder: Path) -> dict[str, Any]:
    """Seconds of an update, peak memory, tokens; and by counting, the operations of the matrix
    products that it must do.
    """
    accelerator = make_accelerator(config)
    meter = Meter(torch.device(accelerator.device))
    setting = setting_of(config, on_gpu=meter.on_gpu)
    rate = matrix_rate(meter, setting.half)
    rows: list[list[int]] = read_json(folder / QUERIES)
    lengths = [len(row) for row in rows]
    learner = load_learner(config, settings, folder, accelerator)
    # The smallest update, with which torch loads what it needs and the moments come to be.
    once = settings.changed(num_ppo_epochs=1, num_minibatches=1)
    noise = Noise(seed=config.seed, purpose="bench", length=WARM_TOKENS)
    few = max(1, config.memory.microbatch_size // settings.samples_per_query)
    take_update(learner, rows[:few], once, noise)
    noise = replace(noise, length=config.data.max_summary_tokens)
    rollout, measured = meter.whole(lambda: take_update(learner, rows, settings, noise))
    sampled = int((rollout.responses != learner.networks.pad_id).sum())
    return {
        **measured,
        "tokens": sum(lengths) * settings.samples_per_query + sampled,
        "flops": update_flops(setting, settings, lengths),
        "matrix_rate": max(rate, matrix_rate(meter, setting.half)),
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "queries": {"mean": sum(lengths) / len(lengths), "longest": max(lengths)},
    }


def update_flops(setting: Setting, settings: PolicyGradient, queries: Sequence[int]) -> float:
    """Operations of the matrix products that one update must do, for queries of so many tokens
    each: counted row by row, so no padding is in it, and all tokens are sampled. The samples of a
    query share a row.
    """
    response, total = setting.config.data.max_summary_tokens * settings.samples_per_query, 0.0
    # The backward pass is two forward ones, and recomputed activations are one more.
    learned = settings.num_ppo_epochs * (3 + setting.recomputed)
    scored = 2 + learned if settings.uses_critic else 1  # passes of reward model and critic
    for query in queries:
        whole = query + response
        policy, scorer = (forward_flops(setting.shape, whole, whole, n) for n in (response, 0))
        total += forward_flops(setting.shape, query, query, 0)
        total += forward_flops(setting.shape, response, query, response)
        total += (2 + learned) * policy + scored * scorer
    return total


def forward_flops(shape: Shape, tokens: int, length: int, logits: int) -> float:
    """Operations of a forward pass: two for each weight and token, attention over whole rows of
    `length` tokens (with a mask a kernel computes the upper triangle, too), and the output layer at
    the positions that have logits.
    """
    layers = 2 * shape.layers * block_weights(shape) * tokens
    attention = 4 * shape.layers * shape.attention * length * tokens
    return layers + attention + 2 * shape.hidden * shape.vocabulary * logits


def load_learner(
    config: Config, settings: PolicyGradient, folder: Path, accelerator: Accelerator
) -> PolicyLearner:
    """The networks of PPO or RLOO, all held in memory, with their optimizer."""
    pad_id = shape_of(config.base).vocabulary
    tokenizer: Any = SimpleNamespace(eos_token_id=EOS_ID, pad_token_id=pad_id)
    origins = Origins(
        policy=folder / "model",
        reward_model=folder / "reward_model",
        seed=config.seed,
        adapt=partial(adapt, config=config, stage=settings.section()),
    )
    networks = load_networks(origins, tokenizer, settings, config.memory.frozen_dtype)
    learner = make_learner(accelerator, networks, settings, config.optimizer, config.memory)
    for network in (networks.policy, networks.critic, networks.ref_policy, networks.reward_model):
        if network is not None:
            hold(network)
    return learner


def take_update(
    learner: PolicyLearner, rows: list[list[int]], settings: PolicyGradient, noise: Noise
) -> Rollout:
    """All six steps and their metrics, as the stage takes them."""
    pad_id = learner.networks.pad_id
    set_rate(learner, settings)
    queries = [torch.tensor(row) for row in rows]
    sampled = sample_responses(learner, queries, noise, settings)
    episodes = score(learner, measure(learner, sampled, settings), settings)
    shaped = assign_rewards(episodes, settings, pad_id, settings.kl_coef)
    algorithm = ALGORITHMS[settings.section()]
    rollout = compute_advantages(learner.accelerator, shaped, algorithm, settings)
    describe(learner, rollout, settings, settings.kl_coef)
    optimize(learner, rollout, settings, noise.seed, settings.kl_coef)
    return rollout


# -- what only a card can show ---------------------------------------------------------------------


def profile_update(config: Config, settings: PolicyGradient, folder: Path) -> dict[str, Any]:
    """The kernels (on a CPU: operators) of an update with one epoch that take the most time."""
    once = settings.changed(num_ppo_epochs=1)
    learner = load_learner(config, once, folder, make_accelerator(config))
    noise = Noise(seed=config.seed, purpose="bench", length=config.data.max_summary_tokens)
    queries = read_json(folder / QUERIES)
    take_update(learner, queries, once, noise)  # loads and compiles what it needs
    with torch.profiler.profile() as profiler:
        take_update(learner, queries, once, noise)
    events = profiler.key_averages()
    kernels = [event for event in events if event.device_type.name == "CUDA"] or events
    spent = {event: event.self_device_time_total or event.self_cpu_time_total for event in kernels}
    first = sorted(spent, key=lambda event: -spent[event])[:TOP]
    rows = [
        {"kernel": event.key[:80], "seconds": spent[event] / 1e6, "calls": event.count}
        for event in first
    ]
    total = sum(spent.values()) / 1e6
    return {"rows": [row | {"share of time": row["seconds"] / total} for row in rows]}


def compare_precision(config: Config, settings: PolicyGradient, folder: Path) -> dict[str, Any]:
    """bf16 - float32 on one microbatch: log-probabilities, scores, the policy's gradient."""
    device = make_accelerator(config).device
    policy = PolicyModel(load_policy(folder / "model").to(device))
    scorer = load_reward_model(folder / "reward_model").to(device)
    length, pad_id = config.data.max_summary_tokens, shape_of(config.base).vocabulary
    few = read_json(folder / QUERIES)[: config.memory.microbatch_size]
    queries = pad_left([torch.tensor(row) for row in few], pad_id).to(device)
    responses = torch.randint(1, pad_id, (len(few), length)).to(device)
    texts = ResponseBatch(queries=queries, responses=responses, pad_id=pad_id)

    def outputs(half: bool) -> dict[str, torch.Tensor]:
        policy.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            logprobs, _ = response_logprobs(policy, texts)
            scores = score_responses(scorer, texts)
        torch.autograd.backward(logprobs.mean())
        gradients = [weight.grad for weight in policy.parameters() if weight.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        return {"log-probabilities": logprobs.detach(), "scores": scores.detach(), "gradient": flat}

    rows, half = [], outputs(half=True)
    for name, exact in outputs(half=False).items():
        gaps, size = (half[name] - exact).abs(), exact.abs().mean()
        numbers = {"largest difference": gaps.max(), "mean": gaps.mean(), "mean size": size}
        rows.append({"of": name} | {key: number.item() for key, number in numbers.items()})
    return {"rows": rows}


PARTS = {
    "prepare": prepare,
    "update": measure_update,
    "profile": profile_update,
    "precision": compare_precision,
}


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Make one measurement and write it to a file, beside which the weights lie."""
    parser = Parser(description="one measurement of a bench")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("result", type=Path)
    parser.add_argument("--stage", choices=["ppo", "rloo"], default="ppo")
    add_arguments(parser)
    args = parser.parse_args(argv)
    config = config_of(request_of(args))
    measured = PARTS[args.part](config, getattr(config, args.stage), args.result.parent)
    write_json(args.result, measured)


if __name__ == "__main__":
    main()
