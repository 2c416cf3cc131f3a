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

from reports.needs.inputs import draw_weights
from reports.needs.memory import Setting, setting_of
from reports.needs.shapes import Shape, block_weights, parameters, shape_of
from reports.speed.meter import Meter, hold, matrix_rate
from reports.speed.speed import EOS_ID, QUERIES
from stages.functional import leave_one_out
from stages.learning.learner import stream
from stages.learning.loop import make_accelerator
from stages.learning.lora import adapt
from stages.learning.models import new_reward_model
from stages.learning.sampling import Noise
from stages.rl import grouped
from stages.rl.credit import credit, shape
from stages.rl.episodes import Rollout
from stages.rl.metrics import describe
from stages.rl.networks import Origins, PolicyLearner, load_networks, make_learner
from stages.rl.rollout import measure, sample_responses, score
from stages.rl.update import optimize, set_rate
from stages.running.files import read_json, write_json
from stages.running.machine import device_name
from stages.settings.command_line import add_arguments, config_of, request_of
from stages.settings.config import Config, Ppo
from stages.settings.faults import Parser, in_one_line
from stages.settings.ppo import Rloo

WARM_TOKENS = 2
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
# At these shares of 4,707 real posts, as parts of the limit of 512 tokens.
QUANTILES = (0.105, 0.42, 0.525, 0.68, 0.833, 0.927, 0.99, 1.0)
SEED = 1


def prepare(config: Config, settings: Ppo | Rloo, folder: Path) -> dict[str, Any]:
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


def measure_update(config: Config, settings: Ppo | Rloo, folder: Path) -> dict[str, Any]:
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
    once = replace(settings, num_ppo_epochs=1, num_minibatches=1)
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


def update_flops(setting: Setting, settings: Ppo | Rloo, queries: Sequence[int]) -> float:
    """Operations of the matrix products that one update must do, for queries of so many tokens
    each: counted row by row, so no padding is in it, and all tokens are sampled. The samples of a
    query share a row.
    """
    response, total = setting.config.data.max_summary_tokens * settings.samples_per_query, 0.0
    # The backward pass is two forward ones, and recomputed activations are one more.
    learned = settings.num_ppo_epochs * (3 + setting.recomputed)
    scored = 2 + learned if isinstance(settings, Ppo) else 1  # passes of reward model and critic
    for query in queries:
        whole = query + response
        policy, scorer = (forward_flops(setting.shape, whole, whole, n) for n in (response, 0))
        total += forward_flops(setting.shape, query, query, 0)
        total += forward_flops(setting.shape, response, query, response)
        total += (2 + learned) * policy + scored * scorer
    return total


def forward_flops(shape: Shape, tokens: int, length: int, logits: int) -> float:
    """Operations of a forward pass: two for each weight and token, attention over whole rows of
    `length` tokens (a kernel with a mask computes the upper triangle too), and the output layer at
    the positions that have logits.
    """
    layers = 2 * shape.layers * block_weights(shape) * tokens
    attention = 4 * shape.layers * shape.attention * length * tokens
    return layers + attention + 2 * shape.hidden * shape.vocabulary * logits


def load_learner(
    config: Config, settings: Ppo | Rloo, folder: Path, accelerator: Accelerator
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
    learner: PolicyLearner, rows: list[list[int]], settings: Ppo | Rloo, noise: Noise
) -> Rollout:
    """All six steps and their metrics, as the stage takes them."""
    pad_id = learner.networks.pad_id
    set_rate(learner, settings)
    queries = [torch.tensor(row) for row in rows]
    sampled = sample_responses(learner, queries, noise, settings)
    episodes = score(learner, measure(learner, sampled, settings), settings)
    if isinstance(settings, Ppo):
        shaped = shape(episodes, settings, pad_id, settings.score_at)
        rollout = credit(learner.accelerator, shaped, settings)
    else:
        rollout = grouped.credit(shape(episodes, settings, pad_id), settings, leave_one_out)
    describe(learner, rollout, settings)
    optimize(learner, rollout, settings, noise.seed)
    return rollout


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Make one measurement and write it to a file, beside which the weights lie."""
    parser = Parser(description="one measurement of a bench")
    parser.add_argument("part", choices=["prepare", "update"])
    parser.add_argument("result", type=Path)
    parser.add_argument("--stage", choices=["ppo", "rloo"], default="ppo")
    add_arguments(parser)
    args = parser.parse_args(argv)
    config = config_of(request_of(args))
    part = {"prepare": prepare, "update": measure_update}[args.part]
    write_json(args.result, part(config, getattr(config, args.stage), args.result.parent))


if __name__ == "__main__":
    main()
