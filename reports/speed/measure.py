"""One measurement of ours, in a process of its own: `make bench` starts it.

    python -m reports.speed.measure ppo --folder FOLDER --preset pythia-14m

`prepare` writes weights, texts and queries. `ppo`, `rloo` and `grpo` are one whole update: all rows
of the batch as they come, all epochs; a peer is measured on the same tokens. `sft`, `rm` and `dpo`
are optimizer steps: one sets up what stays (the optimizer's moments), then one on the longest rows,
whose peak counts, and then one on typical rows, whose time counts.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from eval.rates.formulas import clustered_logit, wilson
from reports.needs.inputs import draw_weights
from reports.needs.lengths import lengths_of
from reports.needs.memory import Setting
from reports.needs.parts import update_floor
from reports.needs.shapes import policy_parameters, shape_of
from reports.needs.work import forward_flops, training_factor, update_flops
from reports.speed.meter import Meter, hold, matrix_rate
from reports.speed.speed import IDS, LABELS, QUERIES
from reports.speed.texts import longest_rows, typical_rows, write_texts
from stages import dpo, reward, sft
from stages.functional import leave_one_out, minus_group_mean
from stages.learning.batches import Order, stream
from stages.learning.learner import Learner
from stages.learning.likelihood import sequence_length
from stages.learning.loop import make_accelerator, make_optimizer, use_gradient_checkpointing
from stages.learning.lora import adapt
from stages.learning.models import load_policy, new_reward_model
from stages.learning.preferences import pair_length
from stages.learning.sampling import Noise
from stages.learning.state import State
from stages.posts.ragged import TokenizedSplit, load_split, rows_of
from stages.rl import grouped
from stages.rl import rollout as rollout_module
from stages.rl.credit import credit, shape
from stages.rl.episodes import Episodes, Rollout
from stages.rl.metrics import describe
from stages.rl.networks import Origins, PolicyLearner, load_networks, make_learner
from stages.rl.rollout import measure, sample_responses, score
from stages.rl.update import optimize, set_rate
from stages.running.files import read_json, write_json
from stages.running.machine import device_name
from stages.runs import Run
from stages.settings.checks import UserError
from stages.settings.command_line import add_arguments, config_of, request_of
from stages.settings.config import Config, Ppo, fail
from stages.settings.families import SHARING
from stages.settings.ppo import PolicyGradient
from stages.settings.rloo import Grouped

PARTS_TIMED = 3
"""Microbatches of a timed step, spread over short and long rows."""
WARM_TOKENS = 2
# Functions of a rollout -> the step that their time counts as.
STEPS = {
    "sample": "sample",
    "response_statistics": "measure",
    "response_values": "score",  # a peer counts both scalar networks there
    "score_responses": "score",
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """What every measurement needs: settings, device, meter and the prepared folder."""

    config: Config
    folder: Path
    accelerator: Accelerator
    meter: Meter
    setting: Setting

    @property
    def weights(self) -> Path:
        """The folder of the policy that everything starts from."""
        return self.folder / "model"

    @property
    def scorer(self) -> Path:
        """The folder of the reward model."""
        return self.folder / "reward_model"

    def split(self, name: str) -> TokenizedSplit:
        """A split of the bench's texts."""
        return load_split(self.folder / "base" / "data", name)


def make_place(config: Config, folder: Path) -> Place:
    """The place of this process. Weights are not loaded yet: memory is counted from here."""
    accelerator = make_accelerator(config)
    load_statistics()
    setting = Setting(
        config=config,
        shape=shape_of(config.base),
        lengths=lengths_of(config),
        on_gpu=accelerator.device.type == "cuda",
    )
    meter = Meter(torch.device(accelerator.device))
    return Place(
        config=config, folder=folder, accelerator=accelerator, meter=meter, setting=setting
    )


def load_statistics() -> None:
    """Have a stage's libraries of statistics in memory, so that they are not counted as tensors.

    A peer has no such stage, and none of these libraries.
    """
    wilson(1, 2)
    clustered_logit(np.array([1.0, 0.0, 1.0, 0.0]), np.ones((4, 1)), np.arange(4))


def prepare(config: Config, folder: Path) -> dict[str, Any]:
    """Write new weights of the shape, texts, a reward model, and the queries of one batch."""
    make_accelerator(config)
    published = shape_of(config.base)
    texts = write_texts(config, published, folder / "base")
    draw_weights(published, config.seed, folder / "model")
    scorer = new_reward_model(folder / "model", stream(config.seed, "reward head"))
    scorer.save_pretrained(folder / "reward_model")
    train = load_split(folder / "base" / "data", "sft_train").columns["queries"]
    rows = [train[row].tolist() for row in range(min(config.ppo.batch_size, len(train)))]
    write_json(folder / QUERIES, rows)
    return {"texts": texts, "parameters": policy_parameters(published)}


# -- an update of PPO or of a rival ----------------------------------------------------------------


def measure_update(place: Place, stage: str) -> dict[str, Any]:
    """Seconds of an update and of its steps, peak memory, tokens; and by counting, the operations
    that it must do and the bytes that it must hold.
    """
    config, meter, setting = place.config, place.meter, place.setting
    settings: PolicyGradient = getattr(config, stage)
    group = settings.samples_per_query
    rate = matrix_rate(meter, setting.half)
    rows: list[list[int]] = read_json(place.folder / QUERIES)[: settings.batch_size // group]
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
    once = replace(settings, num_ppo_epochs=1, num_minibatches=1)
    few = rows[: config.memory.microbatch_size // group]
    take_update(learner, few, once, noise_of(config, WARM_TOKENS))
    sampling = noise_of(config, config.data.max_summary_tokens)
    with timed_steps(meter) as spent:
        (rollout, learning), seconds, peak = meter.whole(
            lambda: take_update(learner, rows, settings, sampling)
        )
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    return {
        "seconds": seconds,
        "peak": peak,
        "learn": learning,
        **spent,
        "tokens": group * sum(lengths) + int((rollout.responses != networks.pad_id).sum()),
        "flops": update_flops(setting, lengths, stage),
        "floor": update_floor(setting, longest, rollout.responses.shape[1], stage),
        "matrix_rate": max(rate, matrix_rate(meter, setting.half)),
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "queries": {"rows": len(rows), "mean": sum(lengths) / len(rows), "longest": longest},
    }


def noise_of(config: Config, length: int) -> Noise:
    """What responses of so many tokens are drawn with."""
    return Noise(seed=config.seed, purpose="bench", length=length)


def take_update(
    learner: PolicyLearner, rows: list[list[int]], settings: PolicyGradient, noise: Noise
) -> tuple[Rollout, float]:
    """All six steps and their metrics, as the stage takes them; the seconds of learning."""
    accelerator, kl_coef = learner.accelerator, settings.kl_coef
    set_rate(learner, settings)
    queries = [torch.tensor(row) for row in rows]
    measured = measure(learner, sample_responses(learner, queries, noise, settings), settings)
    episodes = score(learner, measured, settings)
    rollout = credited(accelerator, episodes, settings, learner.networks.pad_id)
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
    baseline = {"rloo": leave_one_out, "grpo": minus_group_mean}[settings.section]
    shaped = shape(episodes, settings, pad_id, settings.kl_coef)
    return grouped.credit(shaped, settings, baseline)


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


# -- optimizer steps of the other stages -----------------------------------------------------------


def measure_sft(place: Place) -> dict[str, Any]:
    """An optimizer step of SFT."""
    config, train = place.config, place.split("sft_train")
    policy = load_policy(place.weights, config.sft.dropout)
    state = make_state(place, "sft", policy, len(train))
    size = config.memory.microbatch_size
    lengths = [sequence_length(train, row) for row in range(len(train))]
    typical = typical_rows(lengths, size, PARTS_TIMED)
    tokens = [lengths[row] for row in typical]
    logits = sum(tokens) / len(tokens)
    if not config.sft.loss_on_query:
        logits = place.setting.lengths.summary
    return measure_step(
        place,
        "sft",
        partial(sft.take_step, state, train),
        (typical, longest_rows(lengths, 2 * size)),
        (tokens, logits),
    )


def measure_rm(place: Place) -> dict[str, Any]:
    """An optimizer step of the reward model."""
    config, train = place.config, place.split("comparisons_train")
    head = stream(config.seed, "reward head")
    network = new_reward_model(place.weights, head, config.rm.dropout)
    state = make_state(place, "rm", network, len(train))
    typical, worst = pair_rows(place, train)
    tokens = pass_lengths(place, train, typical)
    take_step = partial(reward.take_step, state, train)
    return measure_step(place, "rm", take_step, (typical, worst), (tokens, 0))


def measure_dpo(place: Place) -> dict[str, Any]:
    """An optimizer step of DPO; the reference's log-probabilities are there."""
    config, train = place.config, place.split("comparisons_train")
    policy = load_policy(place.weights).to(place.accelerator.device)
    typical, worst = pair_rows(place, train)
    split = rows_of(train, [*typical, *worst])
    reference = dpo.split_logprobs(place.accelerator, policy, split, config, "bench")
    state = make_state(place, "dpo", policy, len(split))
    rows = list(range(len(split)))
    first, last = rows[: len(typical)], rows[len(typical) :]
    tokens = pass_lengths(place, split, first)
    logits = place.setting.lengths.compared * 2 * len(first) / len(tokens)
    take_step = partial(dpo.take_step, state, split, reference)
    return measure_step(place, "dpo", take_step, (first, last), (tokens, logits))


def make_state(place: Place, stage: str, network: Any, rows: int) -> State:
    """A stage's training loop about to take its first update."""
    config, section = place.config, getattr(place.config, stage)
    adapt(network, config, stage)
    use_gradient_checkpointing(network, config.memory)
    optimizer = make_optimizer(network.parameters(), section.learning_rate, config.optimizer)
    network, optimizer = place.accelerator.prepare(network, optimizer)
    learner = Learner(
        stage=stage,
        accelerator=place.accelerator,
        trained=network,
        optimizer=optimizer,
        microbatch_size=config.memory.microbatch_size,
    )
    order = Order(rows=rows, batch_size=section.batch_size, seed=config.seed, purpose="bench")
    return State(run=Run(config, stage), learner=learner, updates=1, order=order)


def pair_rows(place: Place, train: TokenizedSplit) -> tuple[list[int], list[int]]:
    """Typical and longest pairs of a step; a pair counts as two sequences."""
    lengths = [pair_length(train, row) for row in range(len(train))]
    size = max(1, place.config.memory.microbatch_size // 2)
    return typical_rows(lengths, size, PARTS_TIMED), longest_rows(lengths, 2 * size)


def pass_lengths(place: Place, split: TokenizedSplit, rows: Sequence[int]) -> list[int]:
    """Tokens of every row that a pass computes for some pairs: one a pair where the summaries share
    their query, else two.
    """
    if place.setting.shape.family in SHARING:
        return [pair_length(split, row) for row in rows]
    queries, *summaries = (split.columns[name] for name in ("queries", "chosen", "rejected"))
    return [len(queries[row]) + len(texts[row]) for row in rows for texts in summaries]


def measure_step(
    place: Place,
    stage: str,
    take_step: Callable[[list[int]], Any],
    rows: tuple[list[int], list[int]],
    counted: tuple[list[int], float],
) -> dict[str, Any]:
    """Peak of a step on the longest rows, seconds of one on typical rows.

    `rows` are typical and longest ones; `counted` the tokens of each row that a pass over typical
    ones computes, and the positions with logits of each.
    """
    typical, worst = rows
    tokens, logits = counted
    take_step(typical[:1])
    _, peak = place.meter.peak(lambda: take_step(worst))
    _, seconds, _ = place.meter.whole(lambda: take_step(typical))
    mean = sum(tokens) / len(tokens)
    once = forward_flops(place.setting, sum(tokens), mean, logits * len(tokens))
    flops = training_factor(place.setting, stage) * once
    return {"seconds": seconds, "peak": peak, "tokens": sum(tokens), "flops": flops}


MEASUREMENTS: dict[str, Callable[[Place], dict[str, Any]]] = {
    **{stage: partial(measure_update, stage=stage) for stage in LABELS},
    "sft": measure_sft,
    "rm": measure_rm,
    "dpo": measure_dpo,
}


def main(argv: list[str] | None = None) -> None:
    """Make one measurement and write it to a file of its name in the folder."""
    parser = argparse.ArgumentParser(description="one measurement of a bench")
    parser.add_argument("part", choices=["prepare", *MEASUREMENTS])
    parser.add_argument("--folder", required=True, type=Path)
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        config = config_of(request_of(args))
        if args.part == "prepare":
            result = prepare(config, args.folder)
        else:
            result = MEASUREMENTS[args.part](make_place(config, args.folder))
    except UserError as error:
        fail(error)
    write_json(args.folder / f"{args.part}.json", result)


if __name__ == "__main__":
    main()
