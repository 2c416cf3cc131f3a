"""What there is and what can be asked for: `make status`, `make help`, `make settings`.

Looking only reads: it writes, locks and makes nothing. Standard library only.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from stages.finished import changed_code, lock_of, no_such_run, partial_of, read_manifest, why_not
from stages.running.files import read_record
from stages.running.machine import first_of
from stages.runs import RESUME, holder_of
from stages.settings import config as settings
from stages.settings.checks import UserError, unknown, what_to_mend
from stages.settings.command_line import recorded_config
from stages.settings.config import LINE_BREAK, SECTIONS, Config
from stages.settings.presets import PRESETS
from stages.settings.stages import STAGES

COLUMNS = 80
SHOWN = {name: stage.head for name, stage in STAGES.items() if stage.head}
LABEL = COLUMNS - 5 * len(SHOWN)  # characters of a run's name and seed
MARKS = (
    "ok done, ok* done with other code, old stale, run running, half interrupted,",
    "fail failed, - missing",
)
GOAL_LINES = {
    "data": "posts, tokenizer, checkpoint; from then on offline",
    "sft": "supervised fine-tuning on the reference summaries",
    "rm": "the reward model, and its normalization",
    "ppo": "PPO against the reward model",
    "rloo": "RLOO against the reward model, beside PPO: no critic",
    "grpo": "Dr.GRPO against the reward model, beside PPO: no critic",
    "dpo": "DPO from the same comparisons, beside PPO",
    "eval": "summaries, verdicts, win rates and the page of the run",
    "judge": "the same for summaries that exist: INPUT=outputs.jsonl",
    "summarize": "one post by a run's policies: POST='...', or ID=",
    "study": "what is missing of PRESETS x SEEDS, then the page of sizes",
    "ablations": "one switch at a time against a run, over SEEDS",
    "rivals": "PPO, RLOO, Dr.GRPO, best-of-n at equal KL, over SEEDS",
    "judge-calibration": "the judge beside labelled comparisons",
    "compare": "policies of finished runs: RUNS='tiny:ppo tiny:sft'",
    "scaling": "finished runs on one page: NAMES='tiny-s tiny tiny-l'",
    "publish": "copy PAGES to reports/generated: 'scaling-tiny bench'",
    "status": "what is done, stale, running, half done, missing, failed",
    "plan": "what a run needs, counted: memory, hours, disk, dollars",
    "rehearse": "the same measured here: two updates of every stage",
    "bench": "speed, memory beside TRL; CHECK=1: beside the published",
    "settings": "every setting of PRESET with its value",
    "smollm": "a real chat model of 135M parameters, for smollm2",
    "check": "lint and types",
    "test": "the tests, in minutes",
    "walks": "tests with servers, browsers, processes and kills",
    "chaos": "the pipeline, killed at random moments, beside a calm run",
    "fuzz": "100,000 odd inputs for each place that reads others' texts",
    "simulations": "how often 95% intervals hold the true rate",
    "install": "the environment alone",
}
VARIABLES = {
    "PRESET": "which kind of run; see below",
    "SEED": "of one run (44413)",
    "SEEDS": "for study, ablations, rivals, plan: '1 2'",
    "NAME": "the run's folder below runs/; SET needs one of its own",
    "SET": "settings: SET='ppo.kl_coef=0.1 sft.epochs=2'",
    "UPSTREAM": "run whose SFT and reward model this run starts from",
    "JUDGE": "for scaling, compare, publish: which of several judges",
    "PAGES": "for publish: pages by name, such as tiny-seed44413",
    "ABLATIONS": "which switches; else all: ABLATIONS='dropout lambda-1'",
    "PENALTIES": "kl_coef of the rivals: PENALTIES='0.02 0.1'",
    "NAMES": "runs for scaling",
    "DATA, TOKENIZER": "folders with posts and a tokenizer, for the preset posts",
    "GPUS": "cards of one machine: a process for each",
    "NODES": "machines of a Slurm job, each with GPUS cards",
    "ENGINE": "ddp: each process holds all networks; fsdp2: a part",
    "JOB": "what each run of a study makes: JOB='ppo eval'",
    "GPU": "for plan: the kind of card, such as h100-80gb",
    "PRESETS": "for study, plan: a grid, with SEEDS",
    "MFU": "for plan: the share of a card's peak that is assumed",
    "SHAPES, RUNS": "for bench: SHAPES='pythia-14m:32:8' RUNS=3",
    "RUNS": "for compare: name[/seed][:policy]",
    "PRICE_PER_HOUR": "for plan, rehearse: of one card, USD",
    "POLICY": "a released checkpoint for eval: folder or hub id[@revision]",
    "REWARD_MODEL": "what scores its summaries; without it there are no scores",
    "INPUT": "summaries to judge: JSONL, CSV, Parquet, folder, run",
    "POST, ID": "for summarize: a text, or a held-out post of the run",
    "MAX_COST": "the most that an LLM judge may cost, USD",
    "REPLACE": "1: stages of the goals anew; ppo: it and what follows",
    "LAUNCH": "a launcher of your own, in place of GPUS, NODES, ENGINE",
    "PYTHON, VENV": "interpreter; VENV= (empty) uses it without installing",
}
PRESET_LINES = {
    "tiny": "0.07 to 3 M parameters on the built-in world: minutes on 2 cores",
    "posts": "14 M parameters, new weights, on posts of your own (DATA, TOKENIZER)",
    "smollm2": "a pretrained 135 M model, people's labels (make smollm, DATA): 1 to 4 h",
    "outputs": "summaries in your own files (INPUT): nothing is trained",
    "pythia": "the paper's study on the hub's TL;DR data: a GPU, an LLM judge",
}


class Seen(NamedTuple):
    """One stage as it lies on disk."""

    mark: str
    why: str = ""


def look(config: Config, stage: str, folder: Path) -> Seen:
    """Whether a stage is done, stale, running, half done, failed or missing, and why."""
    partial = partial_of(folder)
    if holder_of(lock_of(folder)) is not None:
        return Seen("run", f"running, {_how_far(partial)}")
    finished = read_manifest(folder) is not None
    if not finished and partial.is_dir():
        failure = read_record(partial / "failed.json")
        if failure is not None:
            return Seen("fail", f"failed: {failure['error']}")
        return Seen("half", f"half done, {kept(partial)}")
    if not finished:
        return Seen("-")
    problem = why_not(config, stage)
    if problem:
        return Seen("old", str(problem))
    files = changed_code(config, stage)
    return Seen("ok*", f"was made with other code ({first_of(files)})") if files else Seen("ok")


def kept(partial: Path) -> str:
    """What an interrupted stage goes on from."""
    checkpoints = sorted((partial / RESUME).glob("checkpoint-[0-9]*[0-9]"))
    if checkpoints:
        return f"its last checkpoint is of update {int(checkpoints[-1].name.split('-')[1])}"
    measured = [*(partial / RESUME).glob("*.jsonl"), *partial.glob("judgements.jsonl")]
    return "its finished part is kept" if measured else "without a checkpoint"


def _how_far(partial: Path) -> str:
    noted = read_record(partial / "progress.json")
    if noted is None:
        return "just begun"
    left = f"{noted['seconds_left']} s left"
    return f"{noted['label']} {noted['done']} of {noted['total']}, {left}"


def _folders(seed: Path, stage: str) -> Iterator[Path]:
    """The folders of one stage of a seed, one for each judge; a stage under way has one too."""
    folders = [seed / stage]
    if STAGES[stage].per_judge:
        folders = [folder for folder in (seed / stage).glob("*") if folder.is_dir()]
    names = {folder.name.removesuffix(".partial"): folder for folder in folders}
    yield from (folder.with_name(name) for name, folder in sorted(names.items()))


def seed_lines(seed: Path) -> tuple[list[str], list[str]]:
    """A seed's row of the grid, one more for each judge if there are several, and what to say."""
    rows: dict[str, dict[str, Seen]] = {}
    for stage in SHOWN:
        for folder in _folders(seed, stage):
            there = folder if folder.is_dir() else partial_of(folder)
            judge = folder.name if STAGES[stage].per_judge else ""
            try:
                config = recorded_config(there)
                seen = look(config, stage, folder) if config else Seen("-")
            except (UserError, OSError) as error:  # of a record that a person has changed
                seen = Seen("fail", what_to_mend(error) or "")
            rows.setdefault(judge, {})[stage] = seen
    shared, number = rows.pop("", {}), seed.name.removeprefix("seed")
    label = f"{seed.parent.name[: LABEL - 1 - len(number)]} {number}"
    if len(rows) > 1:  # what all judges share first, then each judge
        lines = [
            _line(label, shared, ""),
            *(_line(f"  {judge}", rows[judge], "") for judge in sorted(rows)),
        ]
    else:
        lines = [_line(label, shared | next(iter(rows.values()), {}), "-")]
    reasons = [f"{stage}: {seen.why}" for stage, seen in shared.items() if seen.why]
    for judge, own in sorted(rows.items()):
        reasons += [
            f"{stage}, judge {judge}: {seen.why}" for stage, seen in own.items() if seen.why
        ]
    return lines, reasons


def _line(label: str, row: dict[str, Seen], missing: str) -> str:
    marks = [row[stage].mark if stage in row else missing for stage in SHOWN]
    return _columns(label, marks)


def _columns(label: str, cells: Sequence[str]) -> str:
    return f"{label[:LABEL]:{LABEL}} " + "".join(f"{cell:5}" for cell in cells).rstrip()


def status(name: str = "") -> list[str]:
    """The grid of runs, seeds and stages, at most 80 columns wide.

    Raises UserError if `name` is given and there is no such run.
    """
    root = settings.RUNS
    seeds = sorted(
        root.glob("*/seed*"), key=lambda seed: (seed.parent.name, len(seed.name), seed.name)
    )
    names = [seed.parent.name for seed in seeds]
    if name and name not in names:
        raise no_such_run(name) if names else unknown("run", name, (), "there is no run yet")
    if not seeds:
        return ["no runs yet: make sft rm ppo eval"]
    lines = [_columns("run and seed", list(SHOWN.values()))]
    for seed in seeds:
        if name in ("", seed.parent.name):
            rows, reasons = seed_lines(seed)
            lines += rows
            lines += [part for reason in reasons for part in _wrapped(reason)]
    return [*lines, "", *MARKS]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent="  ", subsequent_indent="      ")


def help_lines() -> list[str]:
    """Goals, variables and presets, one line each, at most 80 columns wide."""
    lines = ["make sft rm ppo eval        one run, from data to page: minutes on 2 cores"]
    lines += ["", "goals"]
    lines += [f"  {goal:18} {what}" for goal, what in GOAL_LINES.items()]
    lines += ["", "variables"]
    lines += [f"  {variable:18} {what}" for variable, what in VARIABLES.items()]
    lines += ["", "presets (PRESET=...)"]
    for family, what in PRESET_LINES.items():
        members = " ".join(name for name in PRESETS if name.split("-")[0] == family)
        lines += textwrap.wrap(f"{members}", COLUMNS, initial_indent="  ", subsequent_indent="  ")
        lines.append(f"      {what}")
    return lines


def settings_lines(config: Config) -> list[str]:
    """Every setting with its value, as `--set` takes it."""
    lines = [
        f"{section}.{setting.name}={_shown(getattr(getattr(config, section), setting.name))}"
        for section, kind in SECTIONS.items()
        for setting in fields(kind)
    ]
    return [line.rstrip() for line in lines]


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text.replace("\n", LINE_BREAK)
