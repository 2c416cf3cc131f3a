"""Two updates of every stage at its real shapes, on this machine: `make rehearse`.

It is a run like any other, through the pipeline and in as many processes, with fewer rows and
smaller batches, on random weights of the shape and rows as long as the limits allow (`inputs.py`).
What the stages recorded of memory and time stands beside the plan, and from the seconds of an
update follow the hours of the whole run, at most: its rows are shorter. The numbers stay, as JSON,
in `runs/<name>/rehearsal/`; the run itself is removed.
"""

import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from torch.cuda import is_available

from stages.config import command_line
from stages.config import config as settings
from stages.config.checks import UserError
from stages.config.command_line import Request, add_arguments, config_of, request_of
from stages.config.config import Config
from stages.config.faults import Parser, show
from stages.config.sections import COMPARISONS, POSTS
from stages.config.stages import TRAINED
from stages.planning.memory import GIB, Setting, setting_of
from stages.planning.plan import most_bytes, sized
from stages.planning.random_inputs import draw_weights, write_rows, write_tokenizer
from stages.planning.shapes import rows_of, shape_of
from stages.runs.files import read_lines, write_json
from stages.runs.manifest import read_manifest, stage_folder

GOALS = ("ppo", "summaries")  # with all that they are made from
REHEARSED = ("sft", "rm", "normalize", "ppo", "summaries")
LEARNED = ("sft", "rm", "ppo")
UPDATES = 2  # the second has the optimizer's moments, and libraries are loaded
PASSES = 2  # of an optimizer step, and of a rollout
ROOT = Path(__file__).parents[2]

RunTargets = Callable[[Request, Sequence[str], int, str], int]
"""Runs some targets in a number of processes of an engine; returns the exit status."""


def counts_of(config: Config, processes: int) -> dict[str, int]:
    """The settings that a rehearsal changes: batches of a few passes, and two updates of them."""
    small, large = config.memory.microbatch_size, config.memory.forward_batch_size
    pairs, even = max(1, small // 2), processes * config.ppo.num_minibatches
    most = {"sft": small, "rm": pairs, "ppo": -(-large // even) * even}
    sizes = {
        f"{stage}.batch_size": min(getattr(config, stage).batch_size, PASSES * processes * size)
        for stage, size in most.items()
    }
    limits = "train_posts validation_posts ppo_posts train_comparisons validation_comparisons"
    return {
        **sizes,
        **dict.fromkeys(("sft.epochs", "rm.epochs"), 1),
        **dict.fromkeys((f"data.{name}" for name in limits.split()), 0),
        "ppo.total_episodes": UPDATES * sizes["ppo.batch_size"],
        "ppo.critic_updates": 0,
        "sft.evaluations": 1,
        "eval.posts": 0,
    }


def short_request(request: Request, processes: int, folder: Path) -> Request:
    """The run that is made: its weights and rows are written to a folder."""
    whole = setting_of(config_of(request), on_gpu=is_available())
    config = sized(whole, math.inf).config  # `auto` is at most as many rows
    counts, shape = counts_of(config, processes), shape_of(config.base)
    draw_weights(shape, config.seed, folder / "model")
    write_tokenizer(shape.vocabulary, folder / "model")
    posts, pairs = (UPDATES * counts[f"{stage}.batch_size"] for stage in ("sft", "rm"))
    held_out = config.memory.forward_batch_size * processes
    rows = dict(zip((*POSTS, *COMPARISONS), (posts, held_out, pairs, held_out), strict=True))
    write_rows(folder / "data", config.data, rows)
    changes = counts | {"base.checkpoint": folder / "model", "base.tokenizer": ""}
    overrides = (*request.overrides, *(f"{key}={value}" for key, value in changes.items()))
    data = str(folder / "data")
    return replace(request, name="rehearsal", data=data, tokenizer="", overrides=overrides)


def rehearse(request: Request, gpus: int, engine: str, run: RunTargets) -> int:
    """Run the rehearsal, and print and save its table; the pipeline's exit status.

    Nothing but the table of the stages that have finished stays, whenever this is stopped. Raises
    UserError for a run that trains nothing.
    """
    config = config_of(request)
    if config.kind != TRAINED:
        raise UserError("a rehearsal trains: leave out POLICY= and INPUT=")
    folder = (settings.RUNS / config.name / "rehearsal").absolute()
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)  # of a rehearsal that was killed
    work.mkdir(parents=True)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    code = 0
    try:
        short = short_request(request, gpus, work)
        with chdir(work), mock.patch.dict(os.environ, {"PYTHONPATH": paths}):
            try:
                code = run(short, GOALS, gpus, engine)
            except SystemExit as ended:
                code = int(ended.code or 0)
            record = record_of(config, config_of(short), gpus, engine == "fsdp2")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if record["stages"]:
        lines = table_lines(record)
        write_json(folder / "rehearsal.json", record)
        show([*lines, "", f"saved in {settings.RUNS / config.name}/rehearsal/rehearsal.json"])
    return code


def record_of(config: Config, short: Config, processes: int, sharded: bool) -> dict[str, Any]:
    """What the stages that have finished recorded, beside the plan, and the hours of the whole run,
    for the settings of the whole run and of the short one.
    """
    read = {stage: read_manifest(stage_folder(short, stage)) for stage in REHEARSED}
    manifests = {stage: manifest for stage, manifest in read.items() if manifest is not None}
    device = next((manifest["device"] for manifest in manifests.values()), "")
    how = {"devices": processes, "on_gpu": not device.startswith("CPU"), "sharded": sharded}
    setting = setting_of(short, **how)
    rows = {stage: row_of(setting, stage, manifest) for stage, manifest in manifests.items()}
    for stage in [stage for stage in LEARNED if stage in rows]:
        rows[stage]["hours"] = hours_of(config, short, stage, rows[stage]["update"])
    return {"name": config.name, "device": device, "half": setting.half, "stages": rows}


def row_of(setting: Setting, stage: str, manifest: dict[str, Any]) -> dict[str, float]:
    """What a stage of the rehearsal recorded: peak and plan in GiB (on a CPU the peak of the whole
    process); seconds of the stage, and of its last update.
    """
    peak = manifest["peak_gpu_gib" if setting.on_gpu else "peak_memory_gib"]
    config = command_line.recorded_config(stage_folder(setting.config, stage)) or setting.config
    plan = most_bytes(replace(setting, config=config), stage) / GIB
    row = {"plan": plan, "peak": peak, "seconds": manifest["seconds"]}
    if stage in LEARNED:
        last = read_lines(stage_folder(setting.config, stage) / "metrics.jsonl")[-1]
        row["update"] = last["seconds/update"]
    return row


def hours_of(config: Config, short: Config, stage: str, update: float) -> float:
    """Hours of all updates of a stage, from the seconds of an update of the short run, whose rows
    are the longest.
    """
    larger = getattr(config, stage).batch_size / getattr(short, stage).batch_size
    return updates_of(config)[stage] * update * larger / 3600


def updates_of(config: Config) -> dict[str, int]:
    """Updates of each training stage, as the stages count them."""
    rows = rows_of(config)
    return {
        "sft": config.sft.epochs * rows["sft_train"] // config.sft.batch_size,
        "rm": config.rm.epochs * rows["comparisons_train"] // config.rm.batch_size,
        "ppo": config.ppo.num_updates,
    }


def table_lines(record: dict[str, Any]) -> list[str]:
    """The whole table, in lines of at most 80 columns."""
    columns = ("plan", "peak", "seconds", "update", "hours")
    lines = [
        f"rehearsal of {record['name']} on {record['device']},"
        f" {'bf16 autocast' if record['half'] else 'float32'}",
        "GiB on one device (of a CPU's peak: with libraries); seconds of a stage and of its",
        "last update; hours of all updates at this speed, at most: real rows are shorter",
        f"{'stage':12}" + "".join(f"{name:>10}" for name in columns),
    ]
    for stage, row in record["stages"].items():
        cells = (f"{row[name]:>10,.2f}" if name in row else f"{'-':>10}" for name in columns)
        lines.append(f"{stage:12}{''.join(cells)}")
    needed = sum(row.get("hours", 0.0) for row in record["stages"].values())
    return [line[:80] for line in [*lines, f"together {needed:,.2f} hours"]]


def main(argv: list[str], run: RunTargets) -> None:
    """Rehearse a run; `run` runs the stages of the short one."""
    parser = Parser(description="two updates of every stage, measured here")
    add_arguments(parser)
    parser.add_argument("--gpus", type=int, default=1, help="processes on this machine")
    parser.add_argument("--engine", default="ddp", help="what several processes share")
    args = parser.parse_args(argv)
    raise SystemExit(rehearse(request_of(args), args.gpus, args.engine, run))
