"""Two updates of every stage at its real shapes, on this machine: `make rehearse`.

    python -m reports.needs.rehearse --preset pythia-1b --price-per-hour 2.5

It is a run like any other, through the pipeline and in as many processes, with fewer rows and
smaller batches, on rows as long as the limits allow (`inputs.py`). What the stages recorded of
memory and time stands beside the plan, and from their speed follow the hours of the whole run. The
table stays, as JSON and Markdown, in `runs/<name>/rehearsal/`; the run itself is removed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from reports.needs.gpus import GIB, gpu_of_device
from reports.needs.memory import Setting
from reports.needs.parts import STAGE_OF_PART, part_bytes
from reports.needs.shapes import lengths_of, policy_parameters, shape_of
from reports.needs.work import OPTIONAL, Work, totals, updates_of, work_of
from stages import pipeline
from stages.finished import read_manifest, stage_folder
from stages.running.files import read_json, read_lines, write_json, write_text
from stages.running.launch import add_launch_arguments, processes_of
from stages.running.signals import CALLER_SAYS_STOP
from stages.settings import config as settings
from stages.settings.checks import Parser, UserError, in_one_line, require
from stages.settings.command_line import Request, add_arguments, config_of, request_of
from stages.settings.config import Config
from stages.settings.sections import COMPARISONS, POSTS
from stages.settings.stages import TRAINED

GOALS = ("dpo", "summaries")  # with all that they are made from
REHEARSED = ("sft", "rm", "normalize", "ppo", "dpo", "summaries")
UPDATES = 2  # the second has the optimizer's moments, and libraries are loaded
PASSES = 2  # of an optimizer step, and of a rollout
STOPPED = (129, 130, 143)
ROLLOUT = "rollout"
LIBRARIES = """
import eval.summaries, stages.ppo
from stages.running.machine import peak_memory_gib
print(peak_memory_gib())
"""
ROOT = Path(__file__).parents[2]
Row = dict[str, float]
Manifests = dict[str, dict[str, Any]]


# -- the run ---------------------------------------------------------------------------------------


def counts_of(config: Config, processes: int) -> dict[str, int]:
    """The settings that a rehearsal changes: batches of a few passes, and two updates of them."""
    small, large = config.memory.microbatch_size, config.memory.forward_batch_size
    pairs, even = max(1, small // 2), processes * config.ppo.num_minibatches
    most = {"sft": small, "rm": pairs, "dpo": pairs, "ppo": -(-large // even) * even}
    sizes = {
        f"{stage}.batch_size": min(getattr(config, stage).batch_size, PASSES * processes * size)
        for stage, size in most.items()
    }
    limits = "train_posts validation_posts ppo_posts train_comparisons validation_comparisons"
    return {
        **sizes,
        **dict.fromkeys((f"{stage}.epochs" for stage in ("sft", "rm", "dpo")), 1),
        **dict.fromkeys((f"data.{name}" for name in limits.split()), 0),
        "ppo.total_episodes": UPDATES * sizes["ppo.batch_size"],
        "ppo.critic_updates": 0,
        "sft.evaluations": 1,
        "eval.posts": 0,
    }


def make_inputs(request: Request, folder: Path, counts: dict[str, int], held_out: int) -> Any:
    """Write rows and weights in a process of its own: two batches to learn, `held_out` rows to
    validate; what `inputs.json` says of them. Raises UserError if they cannot be had.
    """
    posts = UPDATES * counts["sft.batch_size"]
    pairs = UPDATES * max(counts["rm.batch_size"], counts["dpo.batch_size"])
    rows = dict(zip((*POSTS, *COMPARISONS), (posts, held_out, pairs, held_out), strict=True))
    words = [sys.executable, "-m", "reports.needs.inputs", str(folder), "--rows", json.dumps(rows)]
    if subprocess.run([*words, *request.arguments], check=False).returncode:
        raise UserError("the rehearsal's rows and weights could not be made: see above")
    return read_json(folder / "inputs.json")


def rehearse(request: Request, args: argparse.Namespace) -> tuple[list[str], int]:
    """Run the rehearsal; the table, and the exit status of a stage that failed or was stopped.

    Nothing but the table of the stages that have finished stays, whenever this is stopped. Raises
    UserError for a run that trains nothing, and for rows and weights that cannot be had.
    """
    config, processes = config_of(request), processes_of(args.gpus, args.nodes, args.launch)
    if config.kind != TRAINED:
        raise UserError("a rehearsal trains: leave out POLICY= and INPUT=")
    folder = (settings.RUNS / config.name / "rehearsal").absolute()
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)  # of a rehearsal that was killed
    work.mkdir(parents=True)
    try:
        counts = counts_of(config, processes)
        held_out = config.memory.forward_batch_size * processes
        inputs = make_inputs(request, work, counts, held_out)
        changes = (f"{key}={value}" for key, value in counts.items())
        overrides = (*request.overrides, *changes, *inputs["settings"])
        short_request = replace(
            request, name="rehearsal", data=str(work / "data"), tokenizer="", overrides=overrides
        )
        options = f"--gpus {args.gpus} --nodes {args.nodes} --engine {args.engine}".split()
        options += ["--launch", args.launch] if args.launch else []
        with below(work):
            code = pipeline_code([*GOALS, *short_request.arguments, *options])
            short, sharded = config_of(short_request), args.engine == "fsdp2"
            finished = finished_stages(short)
            if code in STOPPED and not finished:
                raise SystemExit(code)
            record = record_of((config, short), finished, processes, sharded)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    record["weights"] = inputs["weights"]
    lines = table_lines(record, args.price_per_hour)
    write_json(folder / "rehearsal.json", record)
    page = "\n".join([f"# Rehearsal of {config.name}", "", "```", *lines, "```", ""])
    write_text(folder / "rehearsal.md", page)
    return [*lines, "", f"saved in {settings.RUNS / config.name}/rehearsal, .md and .json"], code


@contextmanager
def below(folder: Path) -> Iterator[None]:
    """Work in a folder, where a run has its own `runs/`; modules are found from there too, and no
    stage says how it goes on after a signal: the folder is removed.
    """
    names = ("PYTHONPATH", CALLER_SAYS_STOP)
    here, before = Path.cwd(), {name: os.environ.get(name) for name in names}
    paths = [str(ROOT), *([before["PYTHONPATH"]] if before["PYTHONPATH"] else [])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), CALLER_SAYS_STOP: "1"}
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)
        for name, value in before.items():
            os.environ.pop(name)
            os.environ |= {} if value is None else {name: value}


def pipeline_code(words: list[str]) -> int:
    """Run the pipeline's command; its exit status."""
    try:
        pipeline.main(words)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


# -- what was measured -----------------------------------------------------------------------------


def finished_stages(config: Config) -> Manifests:
    """The manifests of the stages that have finished, by stage."""
    manifests = {stage: read_manifest(stage_folder(config, stage)) for stage in REHEARSED}
    return {stage: manifest for stage, manifest in manifests.items() if manifest is not None}


def record_of(
    configs: tuple[Config, Config], finished: Manifests, processes: int, sharded: bool
) -> dict[str, Any]:
    """What the stages recorded beside the plan, and the hours of the whole run, for the settings
    of the whole run and of the short one. Raises UserError if no stage has finished.
    """
    config, short_config = configs
    if not finished:
        raise UserError("no stage of the rehearsal has finished: see above")
    device = next(iter(finished.values()))["device"]
    short = Setting(
        config=short_config,
        shape=shape_of(config.base),
        lengths=lengths_of(short_config),
        devices=processes,
        on_gpu=not device.startswith("CPU"),
        sharded=sharded,
    )
    whole = replace(short, config=config, lengths=lengths_of(config))
    rows = {stage: row_of(short, stage, manifest) for stage, manifest in finished.items()}
    gpu = gpu_of_device(device) if short.half else None
    learned = ("sft", "rm", "ppo", "dpo")
    return {
        "name": config.name,
        "preset": config.preset,
        "overrides": config.overrides,
        "parameters": policy_parameters(short.shape),
        "device": device,
        "half": short.half,
        "memory": vars(config.memory),
        "batches": {stage: getattr(short_config, stage).batch_size for stage in learned},
        "peak_speed": gpu.teraflops * 1e12 * processes if gpu else None,
        "stages": rows,
        "hours": hours_of(whole, rows) if len(rows) == len(REHEARSED) else {},
    }


def row_of(setting: Setting, stage: str, manifest: dict[str, Any]) -> Row:
    """What a stage of the rehearsal recorded: peak and plan in GiB; seconds of the stage, of its
    last optimizer steps and of PPO's last rollout; operations per second of both.
    """
    metrics = stage_folder(setting.config, stage) / "metrics.jsonl"
    last = read_lines(metrics)[-1] if metrics.exists() else {}
    on_gpu, rollout = setting.on_gpu, last.get("seconds/rollout", 0.0)
    peak = manifest["peak_gpu_gib"] if on_gpu else manifest["peak_memory_gib"] - libraries_gib()
    parts = part_bytes(setting).items()
    plan = max(held.total for part, held in parts if STAGE_OF_PART[part] == stage) / GIB
    row = {"plan": plan, "peak": max(0.0, peak), "seconds": manifest["seconds"]}
    if "seconds/update" not in last:
        return row
    works = [work for work in work_of(at_limits(setting, stage)) if work.stage == stage]
    updates, steps = updates_of(setting)[stage], last["seconds/update"] - rollout
    learned = sum(work.flops for work in works if work.learns) / updates
    row |= {"steps": steps, ROLLOUT: rollout, "steps_speed": learned / steps}
    if rollout:
        flops = sum(work.flops for work in works) / updates
        row["rollout_speed"] = (flops - learned) / rollout
    return row


@cache
def libraries_gib() -> float:
    """What a stage's process holds before it loads anything of the run."""
    return float(subprocess.check_output([sys.executable, "-c", LIBRARIES], text=True))


def at_limits(setting: Setting, stage: str) -> Setting:
    """The setting with the lengths of the rehearsal's rows in place of mean ones."""
    lengths = setting.lengths
    query = lengths.longest_sft - lengths.longest_summary
    if stage in ("rm", "dpo"):
        query = lengths.longest_pair - lengths.longest_compared
    summary, compared = lengths.longest_summary, lengths.longest_compared
    query = min(query, lengths.longest_query)
    return replace(
        setting, lengths=replace(lengths, query=query, summary=summary, compared=compared)
    )


def hours_of(setting: Setting, rows: dict[str, Row]) -> dict[str, float]:
    """Hours of each stage of a whole run, by counting, at the speed of each stage's own steps;
    sampling, and what PPO and summaries do without learning, at that of PPO's rollout.
    """

    def speed(work: Work) -> float:
        of_ppo = work.stage == "ppo" and not work.learns
        if of_ppo or work.label == "sample" or work.stage == "summaries":
            return rows["ppo"]["rollout_speed"]
        return rows["rm" if work.stage == "normalize" else work.stage]["steps_speed"]

    return totals((work.stage, work.flops / speed(work) / 3600) for work in work_of(setting))


# -- what is printed -------------------------------------------------------------------------------


def table_lines(record: dict[str, Any], price: float) -> list[str]:
    """The whole table, in lines of at most 80 columns."""
    memory = record["memory"]
    batches = ", ".join(f"{stage} {size}" for stage, size in record["batches"].items())
    libraries = ", without the libraries" if record["device"].startswith("CPU") else ""
    lines = [
        f"rehearsal of {record['name']}: {record['parameters']:,} parameters",
        f"  {record['device']}, {'bf16 autocast' if record['half'] else 'float32'}",
        f"  microbatch {memory['microbatch_size']}, without gradients "
        f"{memory['forward_batch_size']}; weights: {record['weights']}",
        f"  rows as long as the limits allow; batches: {batches}",
        "",
        f"GiB on one device{libraries}; seconds of a stage and of its last update",
        f"{'stage':12}{'plan':>7}{'peak':>7}{'ratio':>7}{'seconds':>9}{'an update':>11}"
        f"{'Gflop/s':>10}{'share':>7}",
        *(_row_line(stage, row, record["peak_speed"]) for stage, row in record["stages"].items()),
        "ratio: plan / peak. Gflop/s, and share of the GPU's peak: of optimizer steps",
        "",
        *hours_lines(record, price),
    ]
    return [line[:80] for line in lines]


def _row_line(stage: str, row: Row, most: float | None) -> str:
    ratio = f"{row['plan'] / row['peak']:.2f}" if row["peak"] else "-"
    line = f"{stage:12}{row['plan']:>7.2f}{row['peak']:>7.2f}{ratio:>7}{row['seconds']:>9.1f}"
    if "steps" not in row:
        return line
    share = f"{row['steps_speed'] / most:.0%}" if most else "-"
    speed = f"{row['steps_speed'] / 1e9:,.0f}"
    return f"{line}{row['steps'] + row[ROLLOUT]:>11.2f}{speed:>10}{share:>7}"


def hours_lines(record: dict[str, Any], price: float) -> Sequence[str]:
    """The hours of the whole run, and its price."""
    hours = record["hours"]
    if not hours:
        return ["hours of the whole run: not known, because a stage has not finished"]
    needed = sum(spent for stage, spent in hours.items() if stage != OPTIONAL)
    paid = f", ${needed * price:,.0f} at ${price:g} an hour" if price else ""
    ppo = record["stages"]["ppo"]
    rollout = ppo[ROLLOUT] / (ppo[ROLLOUT] + ppo["steps"])
    return [
        f"an update of PPO: {rollout:.0%} sample, measure, score; {1 - rollout:.0%} learn",
        "hours of the whole run at these speeds, by counting",
        *(f"  {stage:12}{spent:>12,.2f}" for stage, spent in hours.items() if stage != OPTIONAL),
        f"  {'together':12}{needed:>12,.2f}{paid}",
        f"  {OPTIONAL:12}{hours[OPTIONAL]:>12,.2f}  (optional)",
    ]


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Rehearse a run."""
    parser = Parser(description="two updates of every stage, measured here")
    add_arguments(parser)
    add_launch_arguments(parser)
    parser.add_argument("--launch", default="", help="starts the stages that run models")
    parser.add_argument("--price-per-hour", type=float, default=0.0, help="of this machine, USD")
    args = parser.parse_args(argv)
    require(args.price_per_hour >= 0, "PRICE_PER_HOUR", "be at least 0")
    lines, code = rehearse(request_of(args), args)
    if code in STOPPED:
        print("stopped: the table holds the stages that had finished", file=sys.stderr, flush=True)
    print("\n".join(lines))
    raise SystemExit(code)


if __name__ == "__main__":
    main()
