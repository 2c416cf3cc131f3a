"""What the terminal says of a command's stages, beside what each says itself.

How long the rest takes, where a finished run tells; at the end the minutes of each stage, and the
next step. Standard library only.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from stages.config import config as settings
from stages.config.config import SECTIONS, Config, UserError
from stages.config.faults import show
from stages.config.sections import POSTS
from stages.config.stages import POLICY_STAGES
from stages.pipeline.maker import Cell
from stages.pipeline.wanted import wanted_stages
from stages.runs.files import read_record
from stages.runs.machine import cpu_model
from stages.runs.manifest import partial_of, read_manifest, stage_folder


def hooks(write_cards: Callable[[Config, str], None]) -> dict[str, Any]:
    """What a `Maker` is to call, by its fields."""
    done: list[str] = []

    def ended(config: Config, stage: str) -> None:
        done.append(stage)
        write_cards(config, stage)

    return {"ended": ended, "end": lambda cell: show(end_lines(cell, done)), "time_left": time_left}


@cache
def seconds_before(config: Config) -> dict[str, float]:
    """Stage -> the seconds that it took last, with these settings on this processor, in a run of
    any name and seed.
    """
    now, latest = json.loads(json.dumps(config.model_dump())), dict[str, tuple[str, float]]()
    # A stage, a judge's stage, or one that was replaced, which lies in aside/.
    places = (f"*/seed*/{depth}/manifest.json" for depth in ("*", "*/*"))
    for path in (path for place in places for path in settings.RUNS.glob(place)):
        # What is of another version, changed by hand or being replaced tells nothing.
        with suppress(UserError, OSError, LookupError, TypeError, AttributeError, ValueError):
            manifest, before = read_record(path), read_record(path.with_name("config.json"))
            same = all(now[name] == before[name] for name in ("preset", *SECTIONS))
            alone = manifest["device"].startswith(("CPU", "1 x"))
            if same and alone and manifest["processor"]["model"] == cpu_model():
                took = manifest["finished"], float(manifest["seconds"])
                stage = manifest["stage"]
                latest[stage] = max(took, latest.get(stage, took))
    return {stage: seconds for stage, (_, seconds) in latest.items()}


def time_left(config: Config, stages: Sequence[str]) -> str:
    """What the heading of the first of some stages says of the time that they take; empty where no
    finished run tells, and where the stage goes on.
    """
    known = seconds_before(config)
    if not known.keys() >= {*stages} or partial_of(stage_folder(config, stages[0])).exists():
        return ""
    minutes = sum(known[stage] for stage in stages) / 60
    return f"; {f'about {minutes:.0f} min' if minutes > 1 else 'under a minute'} left in all"


def end_lines(cell: Cell, done: Sequence[str]) -> list[str]:
    """What a command ends with: the minutes of the stages that it has made, or else the headline
    of the page; and how to see what the policies write.
    """
    config = cell.config
    own = [name for name in wanted_stages(config, cell.goals) if not config.is_upstreams(name)]
    if done:
        manifests = {name: read_manifest(stage_folder(config, name)) or {} for name in done}
        minutes = {name: manifests[name]["seconds"] / 60 for name in done}
        minutes["in all"] = sum(minutes.values())
        lines = ["", "minutes", *(f"  {name:18}{minutes[name]:6.1f}" for name in minutes)]
    else:
        lines = [f"{cell.label}: nothing to do, {len(own)} stages are done"]
        if "report" in own:
            lines += (stage_folder(config, "report") / "headline.txt").read_text().splitlines()
    posts = stage_folder(config, "base") / "data" / f"{POSTS[1]}.jsonl"
    if posts.exists() and any(read_manifest(stage_folder(config, name)) for name in POLICY_STAGES):
        with posts.open(encoding="utf-8") as rows:
            words = {"NAME": config.name, "SEED": config.seed, "ID": json.loads(next(rows))["id"]}
        typed = " ".join(f"{name}={shlex.quote(str(words[name]))}" for name in words)
        lines += ["", f"next: make summarize {typed}"]
    return lines
