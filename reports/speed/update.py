"""One whole update of PPO or of a rival, measured.

`measure_apart` is one of a rival whose samples share nothing: a query is computed anew for each of
its samples.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator

from reports.needs.parts import update_floor
from reports.needs.work import update_flops
from reports.speed.meter import Meter, hold, matrix_rate
from reports.speed.place import Place
from reports.speed.speed import IDS, QUERIES
from stages.functional import leave_one_out, minus_group_mean
from stages.learning.lora import adapt
from stages.learning.sampling import Noise
from stages.rl import grouped
from stages.rl import rollout as rollout_module
from stages.rl.credit import credit, shape
from stages.rl.episodes import Episodes, Rollout
from stages.rl.metrics import describe
from stages.rl.networks import Origins, PolicyLearner, load_networks, make_learner
from stages.rl.rollout import measure, sample_responses, score
from stages.rl.update import optimize, set_rate
from stages.running.files import read_json
from stages.running.machine import device_name
from stages.settings.config import Config, Ppo
from stages.settings.ppo import PolicyGradient
from stages.settings.rloo import Grouped

WARM_TOKENS = 2
# Functions of a rollout -> the step that their time counts as.
STEPS = {
    "sample": "sample",
    "response_statistics": "measure",
    "response_values": "score",  # a peer counts both scalar networks there
    "score_responses": "score",
}


BASELINES = {"rloo": leave_one_out, "grpo": minus_group_mean}


def measure_update(place: Place, stage: str, apart: bool = False) -> dict[str, Any]:
    """Seconds of an update and of its steps, peak memory, tokens; and by counting, the operations
    that it must do and the bytes that it must hold.
    """
    config, meter, setting = place.config, place.meter, place.setting
    settings: PolicyGradient = getattr(config, stage)
    samples = settings.samples_per_query
    rate = matrix_rate(meter, setting.half)
    rows: list[list[int]] = read_json(place.folder / QUERIES)[: settings.batch_size // samples]
    lengths = [len(row) for row in rows]
    ways = Ways(credited=settings, passes=settings)
    if apart:
        rows = [row for row in rows for _ in range(samples)]
        ways = replace(ways, passes=alone(settings))
    ids = read_json(place.folder / IDS)
    tokenizer: Any = SimpleNamespace(eos_token_id=ids["eos"], pad_token_id=ids["pad"])
    origins = Origins(
        policy=place.weights,
        reward_model=place.scorer,
        seed=config.seed,
        adapt=partial(adapt, config=config, stage=stage),
    )
    networks = load_networks(origins, tokenizer, settings, config.memory.frozen_dtype)
    learner = make_learner(
        place.accelerator, networks, settings, config.optimizer, config.memory, stage
    )
    for network in (networks.policy, networks.critic, networks.ref_policy, networks.reward_model):
        if network is not None:
            hold(network)
    # The smallest update, with which torch loads what it needs and the moments come to be.
    few = rows[: config.memory.microbatch_size // ways.passes.samples_per_query]
    take_update(learner, few, ways.once, noise_of(config, WARM_TOKENS))
    sampling = noise_of(config, config.data.max_summary_tokens)
    with timed_steps(meter) as spent:
        (rollout, learning), seconds, peak = meter.whole(
            lambda: take_update(learner, rows, ways, sampling)
        )
    return {
        "seconds": seconds,
        "peak": peak,
        "learn": learning,
        **spent,
        "tokens": samples * sum(lengths) + int((rollout.responses != networks.pad_id).sum()),
        "flops": update_flops(setting, lengths, stage),
        "floor": update_floor(setting, max(lengths), rollout.responses.shape[1], stage),
        "matrix_rate": max(rate, matrix_rate(meter, setting.half)),
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "queries": about(lengths),
    }


def about(lengths: list[int]) -> dict[str, float]:
    """How many queries there are, and their tokens."""
    mean = sum(lengths) / len(lengths)
    return {"rows": len(lengths), "mean": mean, "longest": max(lengths)}


@dataclass(frozen=True, kw_only=True)
class Ways:
    """The settings of an update: those of its advantages, and those of its passes."""

    credited: PolicyGradient
    passes: PolicyGradient

    @property
    def once(self) -> "Ways":
        """One step on the episodes."""
        return replace(self, passes=replace(self.passes, num_ppo_epochs=1, num_minibatches=1))


def alone(settings: PolicyGradient) -> PolicyGradient:
    """The same passes for episodes that share no query."""
    same = {field.name: getattr(settings, field.name) for field in fields(PolicyGradient)}
    return PolicyGradient(**same | {"samples_per_query": 1})


def noise_of(config: Config, length: int) -> Noise:
    """What responses of so many tokens are drawn with."""
    return Noise(seed=config.seed, purpose="bench", length=length)


def take_update(
    learner: PolicyLearner, rows: list[list[int]], ways: Ways, noise: Noise
) -> tuple[Rollout, float]:
    """All six steps and their metrics, as the stage takes them; the seconds of learning."""
    settings, kl_coef = ways.passes, ways.passes.kl_coef
    set_rate(learner, settings)
    queries = [torch.tensor(row) for row in rows]
    measured = measure(learner, sample_responses(learner, queries, noise, settings), settings)
    episodes = score(learner, measured, settings)
    rollout = credited(learner.accelerator, episodes, ways.credited, learner.networks.pad_id)
    describe(learner, rollout, settings, kl_coef)
    started = time.perf_counter()
    optimize(learner, rollout, settings, noise.seed, kl_coef)
    return rollout, time.perf_counter() - started


def credited(
    accelerator: Accelerator, episodes: Episodes, settings: PolicyGradient, pad_id: int
) -> Rollout:
    """Steps 4 and 5: GAE, or the baseline of a stage without a critic."""
    if isinstance(settings, Ppo):
        shaped = shape(episodes, settings, pad_id, settings.kl_coef, settings.score_at)
        return credit(accelerator, shaped, settings)
    assert isinstance(settings, Grouped)
    shaped = shape(episodes, settings, pad_id, settings.kl_coef)
    return grouped.credit(shaped, settings, BASELINES[settings.section])


@contextmanager
def timed_steps(meter: Meter) -> Iterator[dict[str, float]]:
    """While this lasts, the seconds of each step of a rollout are summed in what it yields."""
    spent = dict.fromkeys(STEPS.values(), 0.0)

    def timed(function: Callable[..., Any], step: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            meter.wait()
            started = time.perf_counter()
            result = function(*args, **kwargs)
            meter.wait()
            spent[step] += time.perf_counter() - started
            return result

        return call

    before = {name: getattr(rollout_module, name) for name in STEPS}
    for name, step in STEPS.items():
        setattr(rollout_module, name, timed(before[name], step))
    try:
        yield spent
    finally:
        for name, function in before.items():
            setattr(rollout_module, name, function)


def measure_apart(place: Place, stage: str) -> dict[str, Any]:
    """As `measure_update`, with a row of its own for each sample of a query."""
    return measure_update(place, stage, apart=True)
