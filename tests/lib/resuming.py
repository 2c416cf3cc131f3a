"""A stage that is interrupted and goes on: settings, kills, and what must be the same after."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from stages import rm
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest
from stages.runs.run import Run

NAMED = "--preset tiny --name resumed --set".split()
SETTINGS = """
    base.hidden_size=32 base.num_layers=2 world.train_posts=96 world.validation_posts=10
    world.train_comparisons=64 world.validation_comparisons=20
    sft.dropout=0.1 rm.dropout=0.1 ppo.samples_every=2 ppo.num_ppo_epochs=2
    ppo.total_episodes=96 ppo.batch_size=16 memory.microbatch_size=6 memory.forward_batch_size=8
    ppo.critic_updates=1 ppo.checkpoints=1 memory.cpu_threads=1
    data.max_query_tokens=160 data.max_query_summary_tokens=183 data.max_query_comparison_tokens=196
""".split()
ARGUMENTS = [*NAMED, *SETTINGS]
OFTEN = [*ARGUMENTS, "memory.save_minutes=0"]


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith("seconds/")}
        for row in read_lines(path)
    ]


def compare(whole: Path, resumed: Path, report: Path) -> float:
    """Largest difference of all weights; records and results must be equal. Writes it as JSON."""
    differences = {}
    for path in sorted(whole.rglob("*.safetensors")):
        name = str(path.relative_to(whole))
        expected, found = load_file(path), load_file(resumed / name)
        assert expected.keys() == found.keys()
        pairs = [(expected[key].double(), found[key].double()) for key in expected]
        differences[name] = max((one - two).abs().max().item() for one, two in pairs)
    report.write_text(json.dumps(differences, indent=1))
    names = [{path.name for path in folder.rglob("*")} for folder in (whole, resumed)]
    assert names[0] == names[1]
    return max(differences.values(), default=0.0)


def same(whole: Path, resumed: Path, report: Path) -> None:
    """No number, no line and no result differs."""
    assert compare(whole, resumed, report) == 0
    for path in whole.glob("*.jsonl"):
        assert rows_of(path) == rows_of(resumed / path.name), path.name
    results = [(read_manifest(folder) or {})["results"] for folder in (whole, resumed)]
    assert results[0] == results[1]


def kill_at(patch: Any, step: int) -> None:
    """Die after half a line of metrics of this step is written."""
    log = Run.log

    def log_or_die(run: Run, number: int, **metrics: float) -> None:
        if number < step:
            return log(run, number, **metrics)
        with (run.partial / "metrics.jsonl").open("a") as lines:
            lines.write('{"step": ' + str(number) + ', "lr"')
        raise Killed

    patch.setattr(Run, "log", log_or_die)


def stage_modules() -> dict[str, Any]:
    """The stages that can go on, in their order."""
    from eval import judge, summaries
    from stages import dpo, normalize, ppo, sft

    return {
        "sft": sft,
        "rm": rm,
        "normalize": normalize,
        "ppo": ppo,
        "dpo": dpo,
        "summaries": summaries,
        "judge": judge,
    }
