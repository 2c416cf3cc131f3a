"""A short run that measures the memory and time of the whole run: `make sft rm ppo REHEARSE=1`.

It is a change of settings: random weights of the run's shape, rows as long as the limits allow, and
two updates of every stage. The pipeline runs it like any other run, in `runs/rehearsal-<name>`.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stages.base import read_rows
from stages.config import paths
from stages.config.command_line import Request, config_of
from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.recorded import recorded_config
from stages.config.sections import HUB, TOY
from stages.config.stages import STAGES, TRAINED, TRAINING_SPLITS
from stages.config.values import text_from_value
from stages.pipeline.plan import wanted_stages
from stages.planning.memory import GIB, Setting, setting_of
from stages.planning.parts import most_bytes, sized
from stages.planning.random_inputs import draw_weights, write_rows, write_tokenizer
from stages.planning.rows import split_rows, used_rows
from stages.rl.algorithms import ALGORITHMS
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest, stage_folder

UPDATES = 2  # In the second update the optimizer has its moments, and all libraries are loaded.
PASSES = 2  # of an optimizer step, and of a rollout


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A run, and the short run that measures it."""

    setting: Setting
    """The whole run on its devices, with numbers in place of `auto`."""
    request: Request
    """The short run."""

    @property
    def folder(self) -> Path:
        """The folder of the short run, with its weights and rows."""
        return paths.RUNS / self.request.name


# -- the short run ---------------------------------------------------------------------------------


def prepare(
    request: Request, targets: Sequence[str], processes: int = 1, sharded: bool = False
) -> Rehearsal:
    """Write the weights and rows of a rehearsal, in place of those of an earlier one.

    Raises UserError for a run without training, for targets that need a judge, and for a model of
    unknown shape.
    """
    config = config_of(request)
    if config.kind != TRAINED:
        raise UserError("REHEARSE=1 only measures training: leave out POLICY= and INPUT=")
    for target in targets:
        if any(STAGES[stage].per_judge for stage in wanted_stages(config, [target])):
            raise UserError(f"REHEARSE=1 only measures training: leave out {target}")

    on_gpu = torch.cuda.is_available()
    setting = setting_of(config, devices=processes, on_gpu=on_gpu, sharded=sharded)
    setting = sized(setting, usable=math.inf)
    name = f"rehearsal-{config.name}"
    inputs = paths.RUNS / name / "inputs"
    changes = short_settings(setting.config, processes)
    changes["base.checkpoint"] = inputs / "model"
    changes["data.source"] = inputs / "data"

    shutil.rmtree(inputs.parent, ignore_errors=True)
    draw_weights(setting.shape, config.seed, inputs / "model")
    write_tokenizer(setting.shape.vocabulary, inputs / "model")
    pairs = max(changes["rm.batch_size"], changes["dpo.batch_size"])
    held_out = processes * setting.config.memory.forward_batch_size
    counts = {
        "sft_train": UPDATES * changes["sft.batch_size"],
        "sft_validation": held_out,
        "comparisons_train": UPDATES * pairs,
        "comparisons_validation": held_out,
    }
    write_rows(inputs / "data", config.data, counts)

    overrides = [f"{key}={text_from_value(value)}" for key, value in changes.items()]
    short_request = replace(
        request,
        name=name,
        data="",
        tokenizer="",
        upstream="",
        overrides=(*request.overrides, *overrides),
    )
    return Rehearsal(setting=setting, request=short_request)


def short_settings(config: Config, processes: int) -> dict[str, Any]:
    """The settings that a rehearsal changes: batches of a few passes, and two updates."""
    memory = config.memory
    changes: dict[str, Any] = {
        "base.tokenizer": "",
        "base.bos": "never",
        "data.chat_template": False,
        "data.max_post_characters": 0,
        "data.train_posts": 0,
        "data.validation_posts": 0,
        "data.ppo_posts": 0,
        "data.train_comparisons": 0,
        "data.validation_comparisons": 0,
        "sft.evaluations": 1,
        "rm.pairs": "all",
        "ppo.critic_updates": 0,
        "ppo.checkpoints": 0,
        "eval.posts": 0,
        "checks.updates": "off",  # They would count as part of the measured time.
    }

    pairs = max(1, memory.microbatch_size // 2)
    rows_of_pass = {"sft": memory.microbatch_size, "rm": pairs, "dpo": pairs}
    for stage, rows in rows_of_pass.items():
        batch_size: int = getattr(config, stage).batch_size
        changes[f"{stage}.batch_size"] = min(batch_size, PASSES * processes * rows)
        changes[f"{stage}.epochs"] = 1

    for algorithm in ALGORITHMS:
        section = getattr(config, algorithm)
        # Every process gets whole minibatches and whole groups of samples.
        multiple = processes * section.num_minibatches * section.samples_per_query
        episodes = PASSES * processes * memory.forward_batch_size
        episodes = multiple * math.ceil(episodes / multiple)
        episodes = min(section.batch_size, episodes)
        changes[f"{algorithm}.batch_size"] = episodes
        changes[f"{algorithm}.total_episodes"] = UPDATES * episodes
    return changes


# -- what it measured ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measured memory and time of a rehearsed stage, and its memory plan."""

    stage: str
    planned: float
    """GiB."""
    peak: float
    """Peak GiB of the GPU; on a CPU, of the whole process."""
    update_seconds: float | None = None
    """Seconds of the last update. None for a stage without updates."""
    hours: float | None = None
    """Hours of all updates of the whole run. None if their number is not known."""


def measurements(rehearsal: Rehearsal) -> list[Measurement]:
    """The measurements of each finished stage of a rehearsal."""
    setting = rehearsal.setting
    short = config_of(rehearsal.request)
    updates = updates_by_stage(setting.config)
    measured = []
    for stage, row in STAGES.items():
        folder = stage_folder(short, stage)
        manifest = read_manifest(folder)
        if manifest is None or not row.computes:
            continue

        # The stage recorded its settings, with the sizes that it chose for `auto`.
        recorded = replace(setting, config=recorded_config(folder) or short)
        seconds = None
        hours = None
        if row.models and stage in updates:
            seconds = read_lines(folder / "metrics.jsonl")[-1]["seconds/update"]
            # A whole update has more passes than a short one.
            batch_size = getattr(setting.config, stage).batch_size
            batches = batch_size / getattr(short, stage).batch_size
            if updates[stage]:
                hours = updates[stage] * batches * seconds / 3600
        measured.append(
            Measurement(
                stage=stage,
                planned=most_bytes(recorded, stage) / GIB,
                peak=manifest["peak_gpu_gib" if setting.on_gpu else "peak_memory_gib"],
                update_seconds=seconds,
                hours=hours,
            )
        )
    return measured


def updates_by_stage(config: Config) -> dict[str, int]:
    """Updates of each training stage, as the stages count them. 0: not known."""
    if config.data.source in (HUB, TOY):
        rows = split_rows(config)
    else:
        splits = read_rows(config).splits
        rows = used_rows(config, {split: len(located) for split, located in splits.items()})

    updates: dict[str, int] = {name: getattr(config, name).num_updates for name in ALGORITHMS}
    for stage, split in TRAINING_SPLITS.items():
        section = getattr(config, stage)
        updates[stage] = section.epochs * rows.get(split, 0) // section.batch_size
    return updates


def table_lines(rehearsal: Rehearsal) -> list[str]:
    """The table at the end of a rehearsal; empty if no stage has finished."""
    measured = measurements(rehearsal)
    if not measured:
        return []
    titles = ["planned GiB", "peak GiB", "s/update", "hours"]
    lines = [
        "",
        f"{rehearsal.setting.config.name}, measured in {UPDATES} updates with the longest rows:",
        f"{'stage':10}" + "".join(f"{title:>13}" for title in titles),
    ]
    for row in measured:
        numbers = [row.planned, row.peak, row.update_seconds, row.hours]
        cells = ["-" if number is None else f"{number:,.2f}" for number in numbers]
        lines.append(f"{row.stage:10}" + "".join(f"{cell:>13}" for cell in cells))

    hours = sum(row.hours or 0.0 for row in measured)
    lines.append(f"These updates take at most {hours:,.2f} hours, because real rows are shorter.")
    if not rehearsal.setting.on_gpu:
        lines.append("On a CPU the peak includes Python and its libraries.")
    return lines
