"""The parts of `make card`, each in a process of its own.

    python -m reports.card.parts profile result.json --shape pythia-1b:64:16

A part yields rows of numbers by name, and each is written when it is known. Weights are random, of
the published shapes, so nothing is fetched.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, autograd

from reports.needs import rehearse
from reports.needs.memory import GIB, Setting, setting_of
from reports.needs.shapes import shape_of
from reports.parts import page
from reports.speed import bench_page, measure, speed
from stages.learning.loop import make_accelerator
from stages.learning.models import load_policy, load_reward_model
from stages.learning.passes import response_logprobs, score_responses
from stages.learning.sampling import Noise
from stages.posts.ragged import pad_left
from stages.running.files import read_json, write_json
from stages.running.machine import device_name
from stages.settings import config as settings
from stages.settings.command_line import add_overrides, config_of
from stages.settings.config import UserError
from stages.settings.faults import Parser, in_one_line

TESTS = "tests/test_on_card.py"
OF_BENCH = ("shape", "who", "seconds", "speedup", "bound", "share")
TOP = 10  # kernels of a profile
SIGNAL = 128  # a status above it is a signal's
Row = dict[str, Any]


def placement(args: argparse.Namespace) -> Iterator[Row]:
    """The tests that need a card."""
    words = [sys.executable, "-m", "pytest", "-q", "-m", "card", TESTS]
    done = subprocess.run(words, capture_output=True, text=True, cwd=rehearse.ROOT, check=False)
    yield {"tests": TESTS, "came to": speed.last_line(done.stdout or done.stderr)}
    if done.returncode:
        raise UserError(f"pytest ended with status {done.returncode}")


def stages(args: argparse.Namespace) -> Iterator[Row]:
    """Two updates of each stage: plan and peak in GiB, seconds, share of the card's peak."""
    failed = 0
    for preset in args.presets:
        request = replace(speed.case_of(f"{preset}:1:1").request, name=f"card-{preset}")
        request = replace(request, overrides=tuple(args.overrides))
        folder, setting = settings.RUNS / request.name, setting_of(config_of(request))
        try:
            rehearse.main(request.arguments)
        except SystemExit as ended:
            failed = failed or int(ended.code or 0)
        record = read_json(folder / "rehearsal" / "rehearsal.json") or {"stages": {}}
        shutil.rmtree(folder, ignore_errors=True)
        for stage, row in record["stages"].items():
            if stage in rehearse.LEARNED:
                rate = work_of(setting, stage) / row["update"]
                row["share"] = rate / speed.peak_of(device_name())
            yield {"model": preset, "stage": stage, **row}
        if failed > SIGNAL:
            break
    if failed:
        raise SystemExit(failed)


def work_of(setting: Setting, stage: str) -> float:
    """Operations of the matrix products of an update of the rehearsal, with the longest rows."""
    config, data = setting.config, setting.config.data
    rows = rehearse.counts_of(config, processes=1)[f"{stage}.batch_size"]
    if stage == "ppo":
        return measure.update_flops(setting, config.ppo, [data.max_query_tokens] * rows)
    length, logits = data.max_query_summary_tokens, data.max_summary_tokens
    if stage == "rm":
        length, logits = data.max_query_comparison_tokens + data.max_comparison_tokens, 0
    passed = measure.forward_flops(setting.shape, length, length, logits)
    return rows * (3 + setting.recomputed) * passed


def bench(args: argparse.Namespace) -> Iterator[Row]:
    """One update of ours, and of TRL's where its environment is there."""
    overrides = ["--set", *args.overrides] if args.overrides else []
    try:
        bench_page.main(["--shapes", args.shape, "--runs=1", "--offline", *overrides])
    except SystemExit as ended:
        if int(ended.code or 0) < SIGNAL:  # else it is late, and some may be known
            raise
    stem = bench_page.stem_of(speed.card_name())
    record = page.record_of(settings.RUNS / bench_page.STEM, stem)["made_from"]["measured"]
    for row in bench_page.figures(record).reset_index().to_dict("records"):
        known = {name: row[name] for name in OF_BENCH if row[name] == row[name]}
        yield known | {"GiB": row["peak"] / GIB}


def prepared(args: argparse.Namespace) -> Any:
    """The config of the bench's shape in bf16, and a folder with its weights and queries."""
    config = config_of(speed.case_of(args.shape, (bench_page.HALF, *args.overrides)).request)
    folder = args.result.parent
    if not (folder / speed.QUERIES).exists():
        measure.prepare(config, config.ppo, folder)
    return config, folder, read_json(folder / speed.QUERIES)


def profile(args: argparse.Namespace) -> Iterator[Row]:
    """The kernels that take the most time of an update of PPO with one epoch."""
    config, folder, queries = prepared(args)
    once = replace(config.ppo, num_ppo_epochs=1)
    learner = measure.load_learner(config, once, folder, make_accelerator(config))
    noise = Noise(seed=config.seed, purpose="bench", length=config.data.max_summary_tokens)
    measure.take_update(learner, queries, once, noise)  # loads and compiles what it needs
    with torch.profiler.profile() as profiler:
        measure.take_update(learner, queries, once, noise)
    events = profiler.key_averages()
    kernels = [event for event in events if event.device_type.name == "CUDA"] or events
    rows = [
        {
            "kernel": event.key[:80],
            "seconds": (event.self_device_time_total or event.self_cpu_time_total) / 1e6,
            "calls": event.count,
        }
        for event in kernels
    ]
    whole = sum(row["seconds"] for row in rows)
    for row in sorted(rows, key=lambda row: -row["seconds"])[:TOP]:
        yield row | {"share of time": row["seconds"] / whole}


def precision(args: argparse.Namespace) -> Iterator[Row]:
    """bf16 beside float32 on one microbatch: the differences of what is computed."""
    config, folder, rows = prepared(args)
    device, length = make_accelerator(config).device, config.data.max_summary_tokens
    policy = load_policy(folder / "model").to(device)
    scorer = load_reward_model(folder / "reward_model").to(device)
    pad_id = shape_of(config.base).vocabulary
    some = [torch.tensor(row) for row in rows[: config.memory.microbatch_size]]
    queries = pad_left(some, pad_id).to(device)
    responses = torch.randint(1, pad_id, (len(some), length)).to(device)
    texts = torch.cat([queries, responses], dim=1)

    def outputs(half: bool) -> dict[str, Tensor]:
        policy.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            logprobs = response_logprobs(policy, texts, texts != pad_id, length, 1.0)
            scores = score_responses(scorer, queries, responses, pad_id)
        autograd.backward(logprobs.mean())
        gradients = [weight.grad for weight in policy.parameters() if weight.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        return {"log-probabilities": logprobs.detach(), "scores": scores.detach(), "gradient": flat}

    computed = outputs(half=True)
    for name, exact in outputs(half=False).items():
        gaps = (computed[name] - exact).abs()
        numbers = {"largest": gaps.max(), "mean": gaps.mean(), "mean size": exact.abs().mean()}
        yield {"of": name, **{key: number.item() for key, number in numbers.items()}}


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    part.__name__: part for part in (placement, stages, bench, profile, precision)
}


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Write the rows of one part to a file, beside which weights may lie."""
    parser = Parser(description="one part of make card")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("result", type=Path)
    parser.add_argument("--presets", nargs="+", default=["smollm2-full", "pythia-1b"])
    parser.add_argument("--shape", default=speed.ON_CARD[0], help="preset:batch:microbatch")
    add_overrides(parser)
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for row in PARTS[args.part](args):
        rows.append(row)
        write_json(args.result, rows)


if __name__ == "__main__":
    main()
