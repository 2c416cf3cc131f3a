"""One part of a rehearsal, in a process of its own: the pipeline's own functions, measured.

    python -m reports.needs.rehearsal_parts sft --folder FOLDER --preset pythia-1b

Each part takes a first step to set up what stays (the optimizer's moments, the libraries' own
memory), then a step on the longest rows, whose peak counts, and then a step on typical rows, whose
time counts.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from eval.summaries import longest
from reports.needs.meter import hold, matrix_rate
from reports.needs.rehearsal_bench import PARTS_TIMED, Bench, RehearsalRun, make_bench
from reports.needs.rehearsal_ppo import rehearse_ppo
from reports.needs.shapes import shape_of
from reports.needs.texts import longest_rows, typical_rows, write_texts
from reports.needs.weights import weights_for
from reports.needs.work import training_factor
from reports.speed.update import measure_update, prepare_update
from stages import dpo, reward, sft
from stages.learning.batches import stream
from stages.learning.heads import shift_scores
from stages.learning.likelihood import sequence_length
from stages.learning.loop import make_optimizer, use_gradient_checkpointing
from stages.learning.lora import adapt, merge
from stages.learning.models import load_policy, load_reward_model, new_reward_model
from stages.learning.preferences import pair_length
from stages.learning.sampling import Sampling, respond
from stages.normalize import keep_known_answers, reference_scores, score_rows
from stages.posts.ragged import TokenizedSplit, rows_of
from stages.running.files import write_json
from stages.settings.command_line import add_arguments, config_of, request_of
from stages.settings.config import Config, UserError, fail
from stages.settings.families import SHARING


def rehearse_sft(bench: Bench) -> None:
    """A step, and a pass over validation rows."""
    config, accelerator, meter = bench.config, bench.accelerator, bench.meter
    train = bench.split("sft_train")
    policy = load_policy(bench.weights, config.sft.dropout)
    adapt(policy, config, "sft")
    use_gradient_checkpointing(policy, config.memory)
    optimizer = make_optimizer(policy.parameters(), config.sft.learning_rate, config.optimizer)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    run = RehearsalRun(config, "sft", bench.folder)
    state = bench.state(run, policy, optimizer, len(train), config.sft.batch_size)
    size = config.memory.microbatch_size
    lengths = [sequence_length(train, row) for row in range(len(train))]
    worst, typical = longest_rows(lengths, 2 * size), typical_rows(lengths, size, PARTS_TIMED)
    sft.take_step(state, train, typical[:1])
    held_out = rows_of(train, worst[:size]), rows_of(train, typical)
    _, peak = meter.peak(lambda: sft.take_step(state, train, worst))
    bench.note("sft step", peak=peak, longest=lengths[worst[0]])
    _, peak = meter.peak(lambda: sft.validation_loss(accelerator, policy, held_out[0], config))
    bench.note("sft validation", peak=peak, longest=lengths[worst[0]])
    some = [lengths[row] for row in typical]
    logits = sum(some) / len(some) if config.sft.loss_on_query else bench.setting.lengths.summary
    once = bench.flops(some, logits)
    _, seconds = meter.timed(lambda: sft.take_step(state, train, typical))
    flops = training_factor(bench.setting, "sft") * once
    bench.note("sft step", seconds=seconds, tokens=sum(some), flops=flops)
    _, seconds = meter.timed(lambda: sft.validation_loss(accelerator, policy, held_out[1], config))
    bench.note("sft validation", seconds=seconds, tokens=sum(some), flops=once)


def _one_typical(lengths: list[int], size: int) -> list[int]:
    """The rows of one forward pass of middle length."""
    return typical_rows(lengths, size, 1)


def pass_lengths(bench: Bench, split: TokenizedSplit, rows: Sequence[int]) -> list[int]:
    """Tokens of every row that a pass computes for some pairs: one a pair where the summaries share
    their query, else two.
    """
    if bench.setting.shape.family in SHARING:
        return [pair_length(split, row) for row in rows]
    queries, *summaries = (split.columns[name] for name in ("queries", "chosen", "rejected"))
    return [len(queries[row]) + len(one[row]) for row in rows for one in summaries]


def rehearse_rm(bench: Bench) -> None:
    """A step, scores of held-out pairs, and the reward model that later parts load."""
    config, meter = bench.config, bench.meter
    train = bench.split("comparisons_train")
    network = new_reward_model(bench.weights, stream(config.seed, "reward head"), config.rm.dropout)
    adapt(network, config, "rm")
    use_gradient_checkpointing(network, config.memory)
    optimizer = make_optimizer(network.parameters(), config.rm.learning_rate, config.optimizer)
    network, optimizer = bench.accelerator.prepare(network, optimizer)
    run = RehearsalRun(config, "rm", bench.folder)
    state = bench.state(run, network, optimizer, len(train), config.rm.batch_size)
    lengths = [pair_length(train, row) for row in range(len(train))]
    size = max(1, config.memory.microbatch_size // 2)
    worst, typical = longest_rows(lengths, 2 * size), typical_rows(lengths, size, PARTS_TIMED)
    reward.take_step(state, train, typical[:1])
    _, peak = meter.peak(lambda: reward.take_step(state, train, worst))
    bench.note("rm step", peak=peak, longest=max(pass_lengths(bench, train, worst)))
    trained = bench.accelerator.unwrap_model(network)
    size = max(1, config.memory.forward_batch_size // 2)
    split, few = (rows_of(train, kind(lengths, size)) for kind in (longest_rows, _one_typical))
    _, peak = meter.peak(lambda: reward.evaluate(state, trained, split, "longest"))
    bench.note("rm validation", peak=peak, longest=max(pass_lengths(bench, train, worst)))
    _, seconds = meter.timed(lambda: reward.take_step(state, train, typical))
    some = pass_lengths(bench, train, typical)
    flops = training_factor(bench.setting, "rm") * bench.flops(some, 0)
    bench.note("rm step", seconds=seconds, tokens=sum(some), flops=flops)
    _, seconds = meter.timed(lambda: reward.evaluate(state, trained, few, "typical"))
    some = pass_lengths(bench, few, range(len(few)))
    flops = bench.flops(some, 0)
    bench.note("rm validation", seconds=seconds, tokens=sum(some), flops=flops)
    merge(trained)
    trained.save_pretrained(bench.folder / "rm" / "model")


def rehearse_normalize(bench: Bench) -> None:
    """Scores of reference summaries, and the normalised reward model that PPO loads."""
    config, accelerator = bench.config, bench.accelerator
    train = bench.split("sft_train")
    scorer = load_reward_model(bench.folder / "rm" / "model").to(accelerator.device).eval()
    size, keep = config.memory.forward_batch_size, bench.folder / "kept"
    lengths = [sequence_length(train, row) for row in range(len(train))]
    worst, typical = longest_rows(lengths, size), typical_rows(lengths, size, 1)
    some, few = rows_of(train, worst), rows_of(train, typical)

    def measure(split: TokenizedSplit, label: str) -> Tensor:
        score = partial(score_rows, accelerator, scorer, split)
        return reference_scores(accelerator, score, split, size, label, keep)

    measure(rows_of(train, typical[:1]), "first")
    _, peak = bench.meter.peak(lambda: measure(some, "longest"))
    scores, seconds = bench.meter.timed(lambda: measure(few, "typical"))
    tokens = [lengths[row] for row in typical]
    bench.note("references", peak=peak, seconds=seconds, tokens=sum(tokens))
    bench.note("references", flops=bench.flops(tokens, 0), longest=lengths[worst[0]])
    shift_scores(scorer, -scores.mean().item())
    folder = bench.folder / "normalize"
    scorer.save_pretrained(folder / "model")
    keep_known_answers(folder, scorer, few)
    write_json(folder / "manifest.json", {"results": {"mean_before": scores.mean().item()}})


def rehearse_dpo(bench: Bench) -> None:
    """The reference's log-probabilities, and a step."""
    config, accelerator, meter = bench.config, bench.accelerator, bench.meter
    train = bench.split("comparisons_train")
    policy = load_policy(bench.weights).to(accelerator.device)
    lengths = [pair_length(train, row) for row in range(len(train))]
    size = max(1, config.memory.microbatch_size // 2)
    worst, typical = longest_rows(lengths, 2 * size), typical_rows(lengths, size, PARTS_TIMED)
    split = rows_of(train, [*typical, *worst])
    measured, seconds = meter.timed(
        lambda: dpo.split_logprobs(accelerator, policy, split, config, "rehearsal"), last=False
    )
    tokens = pass_lengths(bench, split, range(len(split)))
    logits = 2 * bench.setting.lengths.compared * len(split) / len(tokens)
    flops = bench.flops(tokens, logits)
    bench.note("dpo reference", seconds=seconds, tokens=sum(tokens), flops=flops)
    adapt(policy, config, "dpo")
    use_gradient_checkpointing(policy, config.memory)
    optimizer = make_optimizer(policy.parameters(), config.dpo.learning_rate, config.optimizer)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    run = RehearsalRun(config, "dpo", bench.folder)
    state = bench.state(run, policy, optimizer, len(split), config.dpo.batch_size)
    first = list(range(len(typical)))
    stats = dpo.take_step(state, split, measured, first)
    dpo.check_start(stats, dpo.TOLERANCES[config.memory.mixed_precision])
    last = list(range(len(typical), len(split)))
    _, peak = meter.peak(lambda: dpo.take_step(state, split, measured, last))
    _, seconds = meter.timed(lambda: dpo.take_step(state, split, measured, first))
    tokens = pass_lengths(bench, split, first)
    flops = training_factor(bench.setting, "dpo") * bench.flops(tokens, logits)
    bench.note("dpo step", peak=peak, seconds=seconds, tokens=sum(tokens), flops=flops)
    bench.note("dpo step", longest=max(pass_lengths(bench, train, worst)))


def rehearse_summaries(bench: Bench) -> None:
    """Sampling as `eval/summaries.py` does it, with the reward model beside the policy."""
    config, accelerator = bench.config, bench.accelerator
    train = bench.split("sft_train")
    scorer = load_reward_model(bench.folder / "normalize" / "model").to(accelerator.device).eval()
    policy = load_policy(bench.weights).to(accelerator.device).eval()
    hold(scorer)
    size = config.memory.forward_batch_size
    lengths = train.columns["queries"].lengths().tolist()
    worst, typical = longest_rows(lengths, size), typical_rows(lengths, size, 1)
    sampling = Sampling(
        seed=config.seed,
        purpose="rehearsal",
        length=longest(config, "ppo"),
        temperature=config.eval.temperature,
        forward_batch_size=size,
    )

    def draw(rows: list[int]) -> list[list[int]]:
        queries = rows_of(train, rows).columns["queries"]
        return respond(accelerator, policy, queries, bench.ids, sampling)

    _, peak = bench.meter.peak(lambda: draw(worst))
    drawn, seconds = bench.meter.timed(lambda: draw(typical))
    tokens = [lengths[row] + len(one) for row, one in zip(typical, drawn, strict=True)]
    flops = bench.flops(tokens, sum(map(len, drawn)) / len(drawn))
    bench.note("summaries", peak=peak, seconds=seconds, tokens=sum(tokens), flops=flops)
    bench.note("summaries", longest=lengths[worst[0]], drawn=sum(map(len, drawn)))


REHEARSALS: dict[str, Callable[[Bench], None]] = {
    "sft": rehearse_sft,
    "rm": rehearse_rm,
    "normalize": rehearse_normalize,
    "ppo": rehearse_ppo,
    "dpo": rehearse_dpo,
    "summaries": rehearse_summaries,
}
BENCHMARKS: dict[str, Callable[[Bench], None]] = {"update": measure_update}


def prepare_rehearsal(config: Config, folder: Path) -> None:
    """Texts and weights for all parts, and how fast a plain matrix product is here."""
    shape = shape_of(config.base)
    texts = write_texts(config, shape, folder / "base")
    (folder / "sft").mkdir()
    source, weights = weights_for(config, shape, folder / "weights")
    (folder / "sft" / "model").symlink_to(source.resolve())
    bench = make_bench(config, folder)
    rate = matrix_rate(bench.meter.device, bench.setting.half)
    device = "CPU"
    if bench.meter.on_gpu:
        device = torch.cuda.get_device_name(bench.meter.device)
    about = {"texts": texts, "weights": weights, "device": device, "matrix_rate": rate}
    write_json(folder / "prepare.json", about | {"threads": torch.get_num_threads()})


PREPARATIONS: dict[str, Callable[[Config, Path], None]] = {
    "prepare": prepare_rehearsal,
    "prepare-update": prepare_update,
}


def main(argv: list[str] | None = None) -> None:
    """Run one part and write what it found beside the others."""
    parser = argparse.ArgumentParser(description="one part of a rehearsal")
    parser.add_argument("part", choices=[*PREPARATIONS, *REHEARSALS, *BENCHMARKS])
    parser.add_argument("--folder", required=True, type=Path)
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        config = config_of(request_of(args))
        if args.part in PREPARATIONS:
            PREPARATIONS[args.part](config, args.folder)
            return
        bench = make_bench(config, args.folder)
        (REHEARSALS | BENCHMARKS)[args.part](bench)
    except UserError as error:
        fail(error)
    except torch.OutOfMemoryError as error:
        fail(UserError(f"out of memory: {str(error).splitlines()[0]}"))
    write_json(args.folder / f"{args.part}.json", bench.found)


if __name__ == "__main__":
    main()
