"""The pipeline, killed at seeded random moments, beside a calm run: `make chaos`.

    python -m tests.chaos --kills 30 --seed 1             on small settings: minutes
    python -m tests.chaos --set                           on the preset as it is

Two folders get the same run. In the second one the pipeline and its stage are killed with SIGKILL
again and again, in every stage and in the middle of saves, and started again with the same command.
Both runs must end with the same weights, summaries, verdicts, metrics and report numbers, to the
bit; times are left out. Prints the kills, writes them to `chaos.json`, and exits with status 1
where anything differs.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.finished import read_manifest
from stages.running.files import read_lines, write_json
from stages.runs import RECORDS, holder_of

ROOT = Path(__file__).parents[1]
GOALS = ("sft", "rm", "ppo", "rloo", "dpo", "eval")
SMALL = """
    base.hidden_size=32 base.num_layers=2 world.train_posts=320 world.validation_posts=10
    world.train_comparisons=96 world.validation_comparisons=20
    ppo.total_episodes=96 ppo.batch_size=16 ppo.critic_updates=1
    rloo.total_episodes=96 rloo.batch_size=16
    memory.cpu_threads=1 checks.control_posts=3
""".split()
# How many of every 30 kills fall into each stage, and how many of these into a save.
SHARES = {
    "base": (2, 0),
    "sft": (5, 2),
    "rm": (5, 2),
    "normalize": (2, 0),
    "ppo": (6, 3),
    "rloo": (4, 2),
    "dpo": (2, 1),
    "summaries": (2, 0),
    "judge": (1, 0),
    "report": (1, 0),
}
POLL_SECONDS = 0.002
STUCK_SECONDS = 1800
SAVE_MINUTES = 0  # after every update


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill: where it was meant to fall, and where it fell."""

    stage: str
    during_save: bool = False
    fell_in: str = ""
    seconds: float = 0.0
    """Since that stage's process took its lock."""
    updates: int = 0
    """Lines of its metrics by then."""
    found_save: bool = False
    """Whether a save was half written at that moment."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is run, twice."""

    folder: Path
    arguments: tuple[str, ...]
    overrides: tuple[str, ...]
    goals: tuple[str, ...] = GOALS

    def command(self, *overrides: str) -> list[str]:
        """The pipeline's command line."""
        words = [sys.executable, "-m", "stages.pipeline", *self.goals, *self.arguments]
        return [*words, "--name", "chaos", "--set", *self.overrides, *overrides]

    def start(self, place: str, *overrides: str) -> "subprocess.Popen[bytes]":
        """The pipeline in a process group of its own."""
        cwd = self.folder / place
        cwd.mkdir(parents=True, exist_ok=True)
        with (cwd / "log.txt").open("ab") as log:
            return subprocess.Popen(
                self.command(*overrides),
                cwd=cwd,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )

    def seed_folder(self, place: str) -> Path:
        """Where the stages of this study's run lie."""
        return next(iter((self.folder / place / "runs/chaos").glob("seed*")))


def plan(kills: int, rng: random.Random, stages: Sequence[str]) -> list[Kill]:
    """As many kills as asked for, spread as `SHARES` says, in the stages' order."""
    pool = [
        Kill(stage=stage, during_save=number < saves)
        for stage, (count, saves) in SHARES.items()
        for number in range(count)
        if stage in stages
    ]
    chosen = [pool[number % len(pool)] for number in range(kills)]
    if kills < len(pool):
        chosen = rng.sample(pool, kills)
    order = {stage: number for number, stage in enumerate(SHARES)}
    return sorted(chosen, key=lambda kill: (order[kill.stage], rng.random()))


def working(folder: Path) -> Iterator[tuple[str, Path, int]]:
    """Name, partial folder and process of each stage that is under way."""
    locks: list[Path] = []
    with suppress(FileNotFoundError):  # a folder that is renamed while this looks into it
        for pattern in ("runs/*/seed*/.*.lock", "runs/*/seed*/*/.*.lock"):
            locks += folder.glob(pattern)
    for lock in locks:
        holder = holder_of(lock)
        if holder is not None:
            name = lock.name[1:-5]
            stage = name if lock.parent.name.startswith("seed") else lock.parent.name
            yield stage, lock.with_name(f"{name}.partial"), holder["pid"]


def kill_when_due(
    process: "subprocess.Popen[bytes]", folder: Path, kill: Kill, delay: float
) -> Kill | None:
    """Kill the pipeline and its stage once the moment has come; None where it ended before.

    The moment is `delay` seconds into the stage, or the next half-written save after that.
    """
    began: dict[int, float] = {}
    deadline = time.monotonic() + STUCK_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        for stage, partial, pid in working(folder):
            since = time.monotonic() - began.setdefault(pid, time.monotonic())
            saving = is_saving(partial)
            due = stage == kill.stage and since >= delay and (saving or not kill.during_save)
            if not due and not _has_passed(stage, kill.stage):
                continue
            metrics = partial / "metrics.jsonl"
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            fell: dict[str, Any] = {"fell_in": stage, "seconds": round(since, 2), "updates": lines}
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STUCK_SECONDS)
            while is_running(pid):  # the next pipeline must not meet it
                time.sleep(POLL_SECONDS)
            return Kill(**{**asdict(kill), **fell, "found_save": saving})
        time.sleep(POLL_SECONDS)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        raise SystemExit(f"nothing came to its end within {STUCK_SECONDS} s: see log.txt")
    return None


def is_running(pid: int) -> bool:
    """Whether a process has not ended, and is no zombie either."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def is_saving(partial: Path) -> bool:
    """Whether a checkpoint is half written."""
    try:
        return any(name.endswith(".tmp") for name in os.listdir(partial / "resume"))
    except FileNotFoundError:
        return False


def _has_passed(stage: str, meant: str) -> bool:
    """Whether the stage that a kill was meant for is over."""
    order = [*SHARES]
    return stage in order and order.index(stage) > order.index(meant)


def calm_run(study: Study) -> Path:
    """The run without a kill; its seed's folder."""
    if study.start("calm").wait():
        raise SystemExit(f"the calm run failed: see {study.folder / 'calm/log.txt'}")
    return study.seed_folder("calm")


def seconds_of(seed: Path) -> dict[str, float]:
    """How long each stage of a finished seed took."""
    return {name.split("/")[0]: one["seconds"] for name, one in manifests_of(seed).items()}


def chaotic_run(study: Study, kills: Sequence[Kill], seconds: dict[str, float], seed: int):
    """The run with its kills; what fell where. The last try runs to its end."""
    rng = random.Random(seed)
    saves = f"memory.save_minutes={SAVE_MINUTES}"
    fallen = []
    for kill in kills:
        process = study.start("chaos", saves)
        share = SHARES[kill.stage][0]
        delay = rng.uniform(0, 0.9 * seconds.get(kill.stage, 1.0) / share)
        found = kill_when_due(process, study.folder / "chaos", kill, delay)
        if found is None:
            break
        fallen.append(found)
        print(_line(found), flush=True)
    status = study.start("chaos", saves).wait()
    if status:
        raise SystemExit(f"the killed run did not end: see {study.folder / 'chaos/log.txt'}")
    return fallen


def _line(kill: Kill) -> str:
    during = "  during a save" if kill.found_save else ""
    return f"killed in {kill.fell_in:10} {kill.seconds:8.2f} s  {kill.updates:5} lines{during}"


# -- what both must agree on -----------------------------------------------------------------------


def manifests_of(seed: Path) -> dict[str, dict[str, Any]]:
    """The manifests of a seed's finished stages, by their folders' relative names."""
    paths = sorted(path for path in seed.rglob("manifest.json") if "aside" not in path.parts)
    return {str(path.parent.relative_to(seed)): read_manifest(path.parent) or {} for path in paths}


def differences(calm: Path, chaos: Path) -> list[str]:
    """Everything in which two seeds differ that is no time; empty where they are one result."""
    ours, theirs = manifests_of(calm), manifests_of(chaos)
    found = [f"{name} is in one run only" for name in ours.keys() ^ theirs.keys()]
    for name in ours.keys() & theirs.keys():
        one, other = ours[name], theirs[name]
        found += [f"{name}: results"] if one["results"] != other["results"] else []
        report = name.startswith(("report", "calibration_report"))
        files = {*one["outputs"], *other["outputs"]} - {*RECORDS}
        for file in sorted(files) if not report else ["numbers.json", "headline.txt"]:
            equal = one["outputs"].get(file) == other["outputs"].get(file)
            found += [] if equal else [f"{name}: {file}"]
        for file in RECORDS[1:]:
            rows = [_rows(folder / name / file) for folder in (calm, chaos)]
            found += [] if rows[0] == rows[1] else [f"{name}: {file}"]
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = read_lines(path) if path.exists() else []
    return [{k: v for k, v in row.items() if not k.startswith("seconds/")} for row in rows]


def main(argv: list[str] | None = None) -> None:
    """Run it and say what came out."""
    parser = argparse.ArgumentParser(description="the pipeline, killed, beside a calm run")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--folder", type=Path, default=None, help="keeps both runs")
    parser.add_argument("--set", nargs="*", dest="overrides", help="in place of small settings")
    args = parser.parse_args(argv)
    study = Study(
        folder=(args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))).resolve(),
        arguments=("--preset", args.preset),
        overrides=tuple(SMALL if args.overrides is None else args.overrides),
    )
    calm = calm_run(study)
    seconds = seconds_of(calm)
    print(f"calm run: {sum(seconds.values()):.0f} s in {len(seconds)} stages", flush=True)
    kills = plan(args.kills, random.Random(args.seed), list(seconds))
    fallen = chaotic_run(study, kills, seconds, args.seed)
    differing = differences(calm, study.seed_folder("chaos"))
    table = {"kills": [asdict(kill) for kill in fallen], "differences": differing}
    write_json(study.folder / "chaos.json", table)
    during = sum(kill.found_save for kill in fallen)
    stages = len({kill.fell_in for kill in fallen})
    print(f"{len(fallen)} kills in {stages} stages, {during} of them during a save: {study.folder}")
    print("\n".join(differing) if differing else "weights, verdicts and numbers are the same")
    raise SystemExit(1 if differing else 0)


if __name__ == "__main__":
    main()
