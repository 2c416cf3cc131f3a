"""One whole update of PPO, for `make bench`: what it is made of, and its measurement.

Unlike a rehearsal, which looks at one epoch of a few rows, this is the update of a real run: all
rows of the batch as they come, all epochs. A peer is measured on the same tokens.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from reports.needs.meter import hold, matrix_rate
from reports.needs.parts import ppo_floor
from reports.needs.rehearsal_bench import Bench, RehearsalRun
from reports.needs.rehearsal_ppo import STEPS, collect, smaller, timed_steps
from reports.needs.shapes import policy_parameters, shape_of
from reports.needs.texts import read_texts, write_texts
from reports.needs.weights import draw_weights
from reports.needs.work import update_flops
from reports.speed.peers import QUERIES, cut_queries
from stages import ppo
from stages.learning.batches import stream
from stages.learning.loop import make_accelerator
from stages.learning.models import new_reward_model
from stages.learning.state import State
from stages.posts.ragged import Ragged, make_ragged
from stages.rl.episodes import Rollout
from stages.rl.metrics import describe
from stages.rl.networks import Models, load_models
from stages.running.files import write_json
from stages.running.machine import device_name
from stages.settings.config import Config

WARM_TOKENS = 2


def prepare_update(config: Config, folder: Path) -> None:
    """Write new weights of the shape, texts, a reward model, and the queries of one batch."""
    make_accelerator(config)
    shape = shape_of(config.base)
    said = write_texts(config, shape, folder / "base")
    weights, normalize = folder / "sft" / "model", folder / "normalize"
    draw_weights(config, shape, weights)
    new_reward_model(weights, stream(config.seed, "reward head")).save_pretrained(
        normalize / "model"
    )
    write_json(normalize / "manifest.json", {"results": {"mean_before": 0.0}})
    train = read_texts(folder / "base", "sft_train").columns["queries"]
    rows = [train[row].tolist() for row in range(min(config.ppo.batch_size, len(train)))]
    write_json(folder / QUERIES, rows)
    texts = "real posts" if said.startswith("real") else said  # without the folder's name
    about = {"texts": texts, "parameters": policy_parameters(shape)}
    write_json(folder / "prepare.json", about)


def measure_update(bench: Bench) -> None:
    """Seconds of an update and of its steps, peak memory, tokens; and by counting, the operations
    that it must do and the bytes that it must hold.
    """
    config, folder = bench.config, bench.folder
    rate = matrix_rate(bench.meter.device, bench.setting.half)
    rows = cut_queries(folder, config)
    run = RehearsalRun(config, "ppo", folder)
    models, optimizer = load_models(run, bench.accelerator, bench.ids)
    for network in (models.policy, models.critic, models.ref_policy, models.reward_model):
        hold(network)
    _warm_up(bench, models, optimizer, rows)
    state = bench.state(run, models.trained, optimizer, len(rows), len(rows))
    queries = make_ragged(rows)
    with timed_steps(bench):
        (made, learning), seconds, peak = bench.meter.whole(lambda: _update(state, models, queries))
    steps = {step.split()[1]: bench.found[step]["seconds"] for step in STEPS.values()}
    lengths = [len(row) for row in rows]
    longest = max(lengths) + made.responses.shape[1]
    bench.note(
        "update",
        seconds=seconds,
        peak=peak,
        learn=learning,
        **steps,
        tokens=sum(lengths) + int((made.responses != models.pad_id).sum()),
        flops=update_flops(bench.setting, lengths),
        floor=ppo_floor(bench.setting, longest),
        matrix_rate=max(rate, matrix_rate(bench.meter.device, bench.setting.half)),
        device=device_name(),
        threads=torch.get_num_threads(),
        queries={"rows": len(rows), "mean": sum(lengths) / len(rows), "longest": max(lengths)},
    )


def _warm_up(bench: Bench, models: Models, optimizer: Any, rows: list[list[int]]) -> None:
    """The smallest update, with which torch loads what it needs and the moments come to be."""
    few = rows[: bench.config.memory.microbatch_size]
    config = smaller(bench.config, len(few))
    config = replace(config, data=replace(config.data, max_summary_tokens=WARM_TOKENS))
    run = RehearsalRun(config, "ppo", bench.folder)
    state = bench.state(run, models.trained, optimizer, len(few), len(few))
    _update(state, models, make_ragged(few))


def _update(state: State, models: Models, queries: Ragged) -> tuple[Rollout, float]:
    """All six steps and their metrics, as `stages/ppo.py` takes them; the seconds of learning."""
    ppo.set_rate(state)
    rollout = collect(state, models, queries)
    describe(state.accelerator, rollout, state.run.config.ppo, models.eos_id, state.kl_coef)
    started = time.perf_counter()
    ppo.learn(state, models, rollout, None)
    return rollout, time.perf_counter() - started
