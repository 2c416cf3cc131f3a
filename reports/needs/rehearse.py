"""Every stage at its real shapes on this machine, a few steps of each: `make rehearse`.

    python -m reports.needs.rehearse --preset pythia-1b --price-per-hour 2.5

Each stage runs in a process of its own, so that its peak is its own. The table says what each part
held and how fast it was, beside the plan, and what the whole run would take. It lies, as JSON and
Markdown, in `runs/<name>/rehearsal/`.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from reports.needs.lengths import lengths_of
from reports.needs.memory import Setting
from reports.needs.rehearsal_table import (
    Found,
    card_of_device,
    hours_of,
    planned_peaks,
    table_lines,
    whole_lines,
)
from reports.needs.shapes import policy_parameters, shape_of
from stages.running.files import read_json, write_json, write_text
from stages.settings import config as settings
from stages.settings.command_line import Request, add_arguments, config_of, request_of
from stages.settings.config import Config, UserError, fail

# Process -> the parts that it measures.
PROCESSES = {
    "sft": ("sft step", "sft validation"),
    "rm": ("rm step", "rm validation"),
    "normalize": ("references",),
    "ppo": ("ppo rollout", "ppo learn"),
    "dpo": ("dpo step",),
    "summaries": ("summaries",),
}
WORK = "work"
LAST_LINE = 200


def measure(request: Request, work: Path) -> tuple[dict[str, Any], Found]:
    """Run every part; what was prepared, and what each part found, by its name.

    A part that fails says so in its row, and the others go on. Raises UserError if nothing could be
    prepared.
    """
    said = run_part("prepare", request, work)
    if said:
        raise UserError(f"the rehearsal could not be prepared: {said}")
    found: Found = {}
    for name, parts in PROCESSES.items():
        print(f"rehearsing {name}", flush=True)
        said = run_part(name, request, work)
        if said:
            found |= {part: {"failed": said} for part in parts}
        else:
            found |= read_json(work / f"{name}.json")
    return read_json(work / "prepare.json"), found


def run_part(name: str, request: Request, work: Path) -> str:
    """Run one part in a process of its own; empty, or the last line of what went wrong."""
    words = [sys.executable, "-m", "reports.needs.rehearsal_parts", name, "--folder", str(work)]
    made = subprocess.run(
        [*words, *request.arguments], stderr=subprocess.PIPE, text=True, check=False
    )
    if made.returncode == 0:
        return ""
    if made.returncode < 0:
        return f"killed by signal {-made.returncode}: most likely out of memory"
    lines = made.stderr.strip().splitlines() or ["no message"]
    return lines[-1].removeprefix("error: ")[:LAST_LINE]


def page_lines(config: Config, about: dict[str, Any], found: Found, price: float) -> list[str]:
    """The whole table."""
    on_gpu = about["device"] != "CPU"
    shape, lengths = shape_of(config.base), lengths_of(config)
    setting = Setting(config=config, shape=shape, lengths=lengths, on_gpu=on_gpu)
    known = card_of_device(about["device"]) if on_gpu else None
    peak_rate = known[1].teraflops * 1e12 if known and setting.half else about["matrix_rate"]
    of = f"the peak of {known[0]}" if known and setting.half else "a large matrix product's, here"
    threads = "" if on_gpu else f", threads: {about['threads']}"
    memory = config.memory
    return [
        f"rehearsal of {config.name}: {policy_parameters(shape):,} parameters",
        f"  {about['device']}{threads}, "
        f"{'bf16 autocast' if setting.half else 'float32'}, microbatch {memory.microbatch_size}, "
        f"without gradients {memory.forward_batch_size}",
        f"  weights: {about['weights']}"[:80],
        f"  texts: {about['texts']}"[:80],
        "",
        *table_lines(setting, found, peak_rate),
        f"ratio: planned / measured peak. share: of {of}, {peak_rate / 1e9:,.0f} Gflop/s"[:80],
        "",
        *whole_lines(setting, found, price),
    ]


def save(config: Config, folder: Path, about: dict[str, Any], found: Found) -> None:
    """Write `rehearsal.json`: everything measured, with the plan's peaks and hours by counting."""
    on_gpu = about["device"] != "CPU"
    setting = Setting(
        config=config, shape=shape_of(config.base), lengths=lengths_of(config), on_gpu=on_gpu
    )
    whole = {
        "name": config.name,
        "preset": config.preset,
        "overrides": config.overrides,
        "about": about,
        "measured": found,
        "planned_peaks": planned_peaks(setting, found),
        "hours": hours_of(setting, found),
    }
    write_json(folder / "rehearsal.json", whole)


def rehearse(request: Request, price: float) -> list[str]:
    """Measure, save and return the table. Nothing half-written stays, whenever this is stopped."""
    config = config_of(request)
    folder = settings.RUNS / config.name / "rehearsal"
    work = folder / WORK
    shutil.rmtree(work, ignore_errors=True)  # of a rehearsal that was killed
    work.mkdir(parents=True)
    try:
        about, found = measure(request, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    lines = page_lines(config, about, found, price)
    save(config, folder, about, found)
    page = "\n".join(["# Rehearsal of " + config.name, "", "```", *lines, "```", ""])
    write_text(folder / "rehearsal.md", page)
    return [*lines, "", f"saved in {folder}/rehearsal.md and rehearsal.json"]


def main(argv: list[str] | None = None) -> None:
    """Rehearse a run."""
    parser = argparse.ArgumentParser(description="every stage at its real shapes, measured here")
    add_arguments(parser)
    parser.add_argument("--price-per-hour", type=float, default=0.0, help="of this machine, USD")
    args = parser.parse_args(argv)
    try:
        print("\n".join(rehearse(request_of(args), args.price_per_hour)))
    except UserError as error:
        fail(error)
    except KeyboardInterrupt:
        print("stopped: nothing was written; the same command begins again", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
