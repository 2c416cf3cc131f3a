"""One measurement of ours, in a process of its own: `make bench` starts it.

    python -m reports.speed.measure ppo --folder FOLDER --preset pythia-14m

`prepare` writes weights, texts and queries. `ppo`, `rloo` and `grpo` are one whole update: all rows
of the batch as they come, all epochs; a peer is measured on the same tokens. `rloo-apart` computes
a query anew for each of its samples. `sft`, `rm` and `dpo` are optimizer steps: one sets up what
stays (the optimizer's moments), then one on the longest rows, whose peak counts, and then one on
typical rows, whose time counts.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reports.needs.inputs import draw_weights
from reports.needs.shapes import policy_parameters, shape_of
from reports.needs.work import forward_flops, training_factor
from reports.speed.place import Place, make_place
from reports.speed.speed import APART, LABELS, PPO, QUERIES
from reports.speed.texts import longest_rows, typical_rows, write_texts
from reports.speed.update import measure_apart, measure_update
from stages import dpo, reward, sft
from stages.learning.batches import Order, stream
from stages.learning.learner import Learner
from stages.learning.likelihood import sequence_length
from stages.learning.loop import make_accelerator, make_optimizer, use_gradient_checkpointing
from stages.learning.lora import adapt
from stages.learning.models import load_policy, new_reward_model
from stages.learning.preferences import pair_length
from stages.learning.state import State
from stages.posts.ragged import TokenizedSplit, load_split, rows_of
from stages.running.files import write_json
from stages.runs import Run
from stages.settings.checks import in_one_line
from stages.settings.command_line import add_arguments, config_of, request_of
from stages.settings.config import Config
from stages.settings.families import SHARING

PARTS_TIMED = 3
"""Microbatches of a timed step, spread over short and long rows."""


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
    **{f"{stage}{APART}": partial(measure_apart, stage=stage) for stage in LABELS if stage != PPO},
    "sft": measure_sft,
    "rm": measure_rm,
    "dpo": measure_dpo,
}


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Make one measurement and write it to a file of its name in the folder."""
    parser = argparse.ArgumentParser(description="one measurement of a bench")
    parser.add_argument("part", choices=["prepare", *MEASUREMENTS])
    parser.add_argument("--folder", required=True, type=Path)
    add_arguments(parser)
    args = parser.parse_args(argv)
    config = config_of(request_of(args))
    if args.part == "prepare":
        result = prepare(config, args.folder)
    else:
        result = MEASUREMENTS[args.part](make_place(config, args.folder))
    write_json(args.folder / f"{args.part}.json", result)


if __name__ == "__main__":
    main()
