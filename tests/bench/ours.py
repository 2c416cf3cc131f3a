"""Our part of `make bench`, in a process of its own, so that its peak memory is its own.

python -m tests.bench.ours prepare FOLDER pythia-14m:32:8      # weights, queries, TRL's task
python -m tests.bench.ours update FOLDER pythia-14m:32:8       # measure one update
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from stages.config.config import Config
from stages.config.error_messages import in_one_line
from stages.config.ppo import PolicyGradient
from stages.models.loading import new_reward_model
from stages.models.lora import adapt
from stages.models.sampling import Noise
from stages.planning.random_inputs import draw_weights
from stages.planning.shapes import shape_of
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
from tests.bench.case import parse_case
from tests.bench.lower_bound import update_operations
from tests.bench.meter import Meter, matrix_rate, read_weights
from tests.bench.results import OurUpdate
from tests.bench.trl_update import WARM_UP_TOKENS, Task

EOS_ID = 0  # [PAD] is the id after the last of the vocabulary
SEED = 1
# Lengths of 4,707 real posts, as fractions of the limit of 512 tokens, at these fractions of them.
FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
LENGTHS = (0.105, 0.42, 0.525, 0.68, 0.833, 0.927, 0.99, 1.0)


def prepare(config: Config, settings: PolicyGradient, folder: Path) -> None:
    """Write new weights of the shape, a reward model, the queries of a batch, and TRL's task."""
    make_accelerator(config)
    draw_weights(shape_of(config.base), config.seed, folder / "model")
    reward_model = new_reward_model(folder / "model", stream(config.seed, "reward head"))
    reward_model.save_pretrained(folder / "reward_model")

    queries = draw_queries(
        count=settings.batch_size // settings.samples_per_query,
        limit=config.data.max_query_tokens,
        vocabulary=shape_of(config.base).vocabulary,
    )
    write_json(folder / "queries.json", queries)
    write_json(folder / "task.json", asdict(task_for_trl(config, folder)))


def draw_queries(count: int, limit: int, vocabulary: int) -> list[list[int]]:
    """Draw random tokens, with lengths from the distribution of real posts."""
    rng = random.Random(SEED)
    queries = []
    for _ in range(count):
        length = limit * float(np.interp(rng.random(), FRACTIONS, LENGTHS))
        queries.append(rng.choices(range(1, vocabulary), k=max(1, round(length))))
    return queries


def task_for_trl(config: Config, folder: Path) -> Task:
    """Return the PPO update that we measure as a task for TRL."""
    return Task(
        weights=str(folder / "model"),
        queries=read_json(folder / "queries.json"),
        eos_id=EOS_ID,
        pad_id=shape_of(config.base).vocabulary,
        response_length=config.data.max_summary_tokens,
        microbatch_size=config.memory.microbatch_size,
        forward_batch_size=config.memory.forward_batch_size,
        num_ppo_epochs=config.ppo.num_ppo_epochs,
        temperature=config.ppo.temperature,
        learning_rate=config.ppo.learning_rate,
        kl_coef=config.ppo.kl_coef,
        seed=config.seed,
        is_bf16=config.memory.mixed_precision == "bf16",
        cpu_threads=config.memory.cpu_threads,
    )


def measure_update(config: Config, settings: PolicyGradient, folder: Path) -> OurUpdate:
    """Measure an update after the smallest one, in which torch loads what it needs."""
    accelerator = make_accelerator(config)
    meter = Meter(torch.device(accelerator.device))
    is_half = config.memory.mixed_precision == "bf16"
    rate_before = matrix_rate(meter, is_half)
    queries: list[list[int]] = read_json(folder / "queries.json")
    learner = load_learner(config, settings, folder, accelerator)

    # The smallest update also allocates the optimizer's moments.
    noise = Noise(seed=config.seed, purpose="bench", length=WARM_UP_TOKENS)
    fewest = max(1, config.memory.microbatch_size // settings.samples_per_query)
    one_step = settings.changed(num_ppo_epochs=1, num_minibatches=1)
    take_update(learner, queries[:fewest], one_step, noise)

    noise = replace(noise, length=config.data.max_summary_tokens)
    rollout, seconds, peak = meter.measure(lambda: take_update(learner, queries, settings, noise))
    lengths = [len(query) for query in queries]
    sampled = int((rollout.responses != learner.networks.pad_id).sum())
    return OurUpdate(
        seconds=seconds,
        peak=peak,
        tokens=sum(lengths) * settings.samples_per_query + sampled,
        threads=torch.get_num_threads(),
        operations=update_operations(config, settings, lengths),
        matrix_rate=max(rate_before, matrix_rate(meter, is_half)),
        device=device_name(),
    )


def load_learner(
    config: Config, settings: PolicyGradient, folder: Path, accelerator: Accelerator
) -> PolicyLearner:
    """Load the networks of an algorithm into memory, with their optimizer."""
    tokenizer: Any = SimpleNamespace(
        eos_token_id=EOS_ID,
        pad_token_id=shape_of(config.base).vocabulary,
    )
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
            read_weights(network)
    return learner


def take_update(
    learner: PolicyLearner,
    queries: Sequence[Sequence[int]],
    settings: PolicyGradient,
    noise: Noise,
) -> Rollout:
    """Take all six steps of an update and compute its metrics, as the stage does."""
    set_rate(learner, settings)
    rows = [torch.tensor(query) for query in queries]
    sampled = sample_responses(learner, rows, noise, settings)
    episodes = score(learner, measure(learner, sampled, settings), settings)
    shaped = assign_rewards(episodes, settings, learner.networks.pad_id, settings.kl_coef)
    algorithm = ALGORITHMS[settings.section()]
    rollout = compute_advantages(learner.accelerator, shaped, algorithm, settings)
    describe(learner, rollout, settings, settings.kl_coef)
    optimize(learner, rollout, settings, noise.seed, settings.kl_coef)
    return rollout


@in_one_line()
def main() -> None:
    """Prepare a case, or measure its update and write update.json."""
    part, folder_name, shape, *overrides = sys.argv[1:]
    folder = Path(folder_name)
    case = parse_case(shape, tuple(overrides))
    config = case.make_config()
    settings = getattr(config, case.algorithm)
    if part == "prepare":
        prepare(config, settings, folder)
    else:
        write_json(folder / "update.json", asdict(measure_update(config, settings, folder)))


if __name__ == "__main__":
    main()
