"""The last lines of a command: the result, the path of the page, the time, and the next step."""

import json
import shlex
from collections.abc import Sequence

from stages.config.config import Config
from stages.config.sections import POSTS
from stages.config.stages import POLICY_STAGES
from stages.pipeline.plan import wanted_stages
from stages.runs.manifest import read_manifest, stage_folder
from stages.runs.text import duration


def end_lines(config: Config, targets: Sequence[str], ran: Sequence[str]) -> list[str]:
    """Return the last lines of a command that has reached its targets; `ran`: the stages it ran."""
    stages = wanted_stages(config, targets)
    lines = []
    if not ran:
        count = sum(not config.is_from_upstream(stage) for stage in stages)
        run = f"{config.name} seed {config.seed}"
        lines.append(f"{run}: nothing to do, all {count} stages have finished")

    if "report" in stages:
        headline = stage_folder(config, "report") / "headline.txt"
        lines += ["", *headline.read_text(encoding="utf-8").splitlines()]

    if ran:
        manifests = [read_manifest(stage_folder(config, stage)) or {} for stage in ran]
        seconds = sum(manifest.get("seconds", 0.0) for manifest in manifests)
        stages_text = "1 stage" if len(ran) == 1 else f"{len(ran)} stages"
        lines += ["", f"time: {duration(seconds)} for {stages_text}"]
    return [*lines, *next_lines(config)]


def next_lines(config: Config) -> list[str]:
    """Return the command that summarizes a held-out post, if there is a policy to do so."""
    is_trained = any(read_manifest(stage_folder(config, stage)) for stage in POLICY_STAGES)
    posts = stage_folder(config, "base") / "data" / f"{POSTS[1]}.jsonl"
    if not is_trained or not posts.exists():
        return []
    with posts.open(encoding="utf-8") as rows:
        post_id = json.loads(next(rows))["id"]
    variables = {"NAME": config.name, "SEED": str(config.seed), "ID": str(post_id)}
    typed = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return ["", f"next: make summarize {typed}"]
