"""PPO's part of a rehearsal: rollout, start checks, one epoch of learning, a checkpoint."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from reports.needs.memory import Setting
from reports.needs.meter import hold
from reports.needs.rehearsal_bench import Bench, RehearsalRun
from reports.needs.texts import longest_rows, typical_rows
from reports.needs.work import work_of
from stages import ppo
from stages.learning.state import State
from stages.posts.ragged import Ragged, rows_of
from stages.rl import rollout as rollout_module
from stages.rl.credit import credit
from stages.rl.episodes import Rollout
from stages.rl.networks import Models, load_models, reward_shift
from stages.rl.start_checks import KNOWN_ANSWERS, check_start
from stages.settings.config import Config, UserError

# Functions of a rollout -> what their time counts as.
STEPS = {
    "sample": "ppo sample",
    "response_logprobs": "ppo measure",
    "response_values": "ppo score",  # the plan counts both scalar networks there
    "score_responses": "ppo score",
}


def rehearse_ppo(bench: Bench) -> None:
    """Three updates of one epoch: the first sets up and is checked, the second is made of the
    longest queries, the third of typical ones.
    """
    train = bench.split("sft_train")
    lengths = train.columns["queries"].lengths().tolist()
    size = min(2 * bench.config.memory.forward_batch_size, bench.config.ppo.batch_size)
    config = smaller(bench.config, size)
    run = RehearsalRun(config, "ppo", bench.folder)
    models, optimizer = load_models(run, bench.accelerator, bench.ids)
    for frozen in (models.ref_policy, models.reward_model):
        hold(frozen)
    state = bench.state(run, models.trained, optimizer, size, size)
    worst = rows_of(train, longest_rows(lengths, size)).columns["queries"]
    few = rows_of(train, typical_rows(lengths, size, 1)).columns["queries"]
    _check(bench, state, models, few)
    made, peak = bench.meter.peak(lambda: collect(state, models, worst))
    longest = int(worst.lengths().max())
    bench.note("ppo rollout", peak=peak, longest=longest)
    _, peak = bench.meter.peak(lambda: ppo.learn(state, models, made, None))
    bench.note("ppo learn", peak=peak, longest=longest)
    with timed_steps(bench):
        made, seconds = bench.meter.timed(lambda: collect(state, models, few))
    tokens = int(few.lengths().sum()) + int((made.responses != models.pad_id).sum())
    bench.note("ppo rollout", seconds=seconds, tokens=tokens)
    _, seconds = bench.meter.timed(lambda: ppo.learn(state, models, made, None))
    bench.note("ppo learn", seconds=seconds, tokens=tokens)
    _note_work(bench, config, tokens, size)
    _save_and_load(bench, state)


def smaller(config: Config, size: int) -> Config:
    """One epoch and one minibatch of a small batch; nothing else changes."""
    small = replace(
        config.ppo, batch_size=size, total_episodes=10 * size, num_ppo_epochs=1, num_minibatches=1
    )
    return replace(config, ppo=small)


def collect(state: State, models: Models, queries: Ragged) -> Rollout:
    """Steps 1 to 5 of an update."""
    episodes, _ = ppo.collect_episodes(state, models, queries)
    settings = state.run.config.ppo
    return credit(state.accelerator, episodes, settings, models.pad_id, state.kl_coef)


def _check(bench: Bench, state: State, models: Models, queries: Ragged) -> None:
    """The first update, with all start checks in this precision; what they say is noted."""
    run = state.run
    made = collect(state, models, queries)
    known = run.require("normalize") / KNOWN_ANSWERS, reward_shift(run)
    said = "passed"
    try:
        check_start(bench.accelerator, models, made, known, bench.ids, run.config)
    except UserError as error:
        said = str(error)
    bench.note("start checks", said=said)
    ppo.learn(state, models, made, None)


@contextmanager
def timed_steps(bench: Bench) -> Iterator[None]:
    """While this lasts, the time of each step of a rollout is noted too."""
    spent = dict.fromkeys(STEPS.values(), 0.0)

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            bench.meter.wait()
            started = time.perf_counter()
            result = function(*args, **kwargs)
            bench.meter.wait()
            spent[part] += time.perf_counter() - started
            return result

        return call

    before = {name: getattr(rollout_module, name) for name in STEPS}
    for name, part in STEPS.items():
        setattr(rollout_module, name, timed(before[name], part))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(rollout_module, name, function)
    for part, seconds in spent.items():
        bench.note(part, seconds=seconds)


def _note_work(bench: Bench, config: Config, tokens: int, size: int) -> None:
    """Operations of the timed steps, counted as the plan counts those of a whole run."""
    response = bench.setting.lengths.longest_summary
    lengths = replace(bench.setting.lengths, query=max(1.0, tokens / size - response))
    once = replace(config, ppo=replace(config.ppo, total_episodes=size))
    counted: Setting = replace(bench.setting, config=once, lengths=lengths)
    works = {one.label: one for one in work_of(counted) if one.stage == "ppo"}
    for label in ("sample", "measure", "score"):
        bench.note(f"ppo {label}", flops=works[label].flops, tokens=works[label].tokens)
    learned = works["learn policy"].flops + works["learn critic"].flops
    bench.note("ppo learn", flops=learned)


def _save_and_load(bench: Bench, state: State) -> None:
    """A checkpoint of policy, critic and optimizer, written, checked and read back."""
    _, peak = bench.meter.peak(state.save)
    files = [one for one in state.run.resume.rglob("*") if one.is_file()]
    if not files:
        bench.note("checkpoint", failed="not written, is the disk full?")
        return
    size = sum(one.stat().st_size for one in files)
    _, seconds = bench.meter.timed(state.load)
    bench.note(
        "checkpoint", peak=peak, seconds=state.save_seconds, load_seconds=seconds, bytes=size
    )
