"""Every goal and every variable of `make`: what it is, and what runs it. Standard library only.

A new goal is one row of GROUPS. `python -m stages` checks and runs what is typed by these tables,
and `make help` prints them.
"""

import textwrap
from typing import NamedTuple

from stages.config.presets import PRESETS
from stages.rl.algorithms import ALGORITHMS


class Goal(NamedTuple):
    """One thing that can be asked for: the module that does it, what that is told and may read."""

    module: str
    reads: list[str]
    what: str


class Variable(NamedTuple):
    """One `NAME=value` that can be given.

    option: of the module that takes it. hint: what to do where a goal does not read it.
    """

    option: str
    hint: str
    what: str


REQUEST = "PRESET SEED NAME SET UPSTREAM DATA TOKENIZER POLICY REWARD_MODEL INPUT"
DEVICES = "GPUS NODES ENGINE"
RUN = f"{REQUEST} {DEVICES} MAX_COST REPLACE"
READ = {
    "request": REQUEST,
    "devices": DEVICES,
    "run": RUN,
    "runs": RUN.replace("SEED", "SEEDS"),
    "sizes": RUN.replace("PRESET SEED", "PRESETS SEEDS"),
    "of_post": "NAME PRESET SEED POST ID",
}
"""What several goals read."""
PIPELINE = "stages.pipeline.main"
# Group, then: goal | module, if it is not the pipeline | what it reads | one line for people.
TABLE = """
train
data | | run | posts, tokenizer, checkpoint; from then on offline
sft | | run | supervised fine-tuning on the reference summaries
rm | | run | the reward model, and its normalization
dpo | | run | DPO from the same comparisons, beside PPO
judge
eval | | run | summaries, verdicts, win rates and the page of the run
judge | | run | the same for summaries that exist: INPUT=outputs.jsonl
judge-calibration | | run | the judge beside labelled comparisons
summarize | eval.summarize | of_post | one post by a run's policies: POST='...' or ID=
compare
compare | reports.compare_page | RUNS JUDGE | policies of runs: RUNS='tiny:ppo tiny:sft'
scaling | reports.scaling_page | NAMES JUDGE | runs on one page: NAMES='tiny-s tiny'
publish | reports.sharing.publish | PAGES JUDGE | copy PAGES to reports/generated
study
study | | sizes JOB | what is missing of PRESETS x SEEDS, then the page of sizes
ablations | | runs ABLATIONS | one switch at a time against a run, over SEEDS
algorithms | | runs PENALTIES | all algorithms and best-of-n at equal KL, over SEEDS
look
help | | request | this
status | reports.sharing.status | NAME | what is done, stale, running, half done, missing, failed
settings | | request | every setting of PRESET with its value
plan | reports.needs.plan | request devices GPU | the memory that a run needs
rehearse | reports.needs.rehearse | request devices | the same, measured here
develop
install | - | | the environment alone
smollm | eval.judges.downloads | | a real chat model of 135M parameters, for smollm2
gemma | eval.judges.downloads | | Gemma-3-270M, a base model for base.checkpoint
check | - | | lint and types
test | - | | the tests, in minutes
walks | - | | tests with servers, browsers, processes and kills
bench | reports.speed.bench_page | SHAPES RUNS SET | speed, memory beside TRL
card | reports.sections.card | SET | what only a card can show, in nine minutes
simulations | tests.lib.simulations | | how often 95% intervals hold the true rate
"""
# Variable | option of the module: `*` takes words | what else to do | one line.
OF_VARIABLES = """
PRESET | preset | name the runs | which kind of run, see below; or your YAML file
SEED | seed | | of one run (44413)
SEEDS | seeds* | one run takes SEED | for study, ablations, algorithms: '1 2'
NAME | name | | the run's folder below runs/; SET needs one of its own
SET | set | recorded | settings: SET='ppo.kl_coef=0.1 sft.epochs=2'
UPSTREAM | upstream | recorded | run whose SFT and reward model this run starts from
JUDGE | judge | choose who judges by SET=judge.kind=... | which of several judges
PAGES | pages* | | for publish: pages by name, such as tiny-seed44413
ABLATIONS | ablations* | | which switches; else all: ABLATIONS='dropout lambda-1'
PENALTIES | kl-coefs* | | kl_coef of the algorithms: PENALTIES='0.02 0.1'
NAMES | names* | one run takes NAME | runs for scaling
DATA | data | | rows: folder, file or hub id, for own, posts, smollm2
TOKENIZER | tokenizer | | folder with a tokenizer, for PRESET=posts
GPUS | gpus | it is one process | cards of one machine: a process for each
NODES | nodes | it is one process | machines of a Slurm job, each with GPUS cards
ENGINE | engine | it is one process | ddp: each process holds all networks; fsdp2: a part
JOB | job* | name the goals themselves | what each run of a study makes: JOB='ppo eval'
GPU | gpu | the number of cards is GPUS | for plan: the kind of card, such as h100-80gb
PRESETS | presets* | one run takes PRESET | for study: a grid, with SEEDS
SHAPES | shapes* | | for bench: SHAPES='pythia-14m:32:8'
RUNS | runs* | one run takes NAME | for compare: name[/seed][:policy]; for bench: how many
POLICY | policy | | a released checkpoint for eval: folder or hub id[@revision]
REWARD_MODEL | reward-model | | a reward model of others, for POLICY or in place of ours
INPUT | input | | summaries to judge: JSONL, CSV, Parquet, folder, run
POST | post | | for summarize: the text of a post
ID | id | | for summarize: a post of the run's data
MAX_COST | max-cost | | the most that an LLM judge may cost, USD
REPLACE | replace | | 1: stages of the goals anew; ppo: it and what follows
PYTHON | python | | interpreter that makes the environment
VENV | venv | | the environment; VENV= (empty): PYTHON as it is
"""
RECORDED = "runs have the settings that they were made with"
DEFAULTS = {"NAMES": "tiny-s tiny tiny-l"}
AS_SETTINGS = {
    "POLICY": "released.policy",
    "REWARD_MODEL": "released.reward_model",
    "INPUT": "outputs.file",
}
"""Variables that a run takes as settings."""


def read_goals(table: str) -> dict[str, dict[str, Goal]]:
    """The rows of TABLE by group and goal."""
    groups: dict[str, dict[str, Goal]] = {}
    for line in table.strip().splitlines():
        name, *cells = (cell.strip() for cell in line.split("|"))
        if not cells:
            group = groups.setdefault(name, {})
            continue
        module, reads, what = cells
        names = [each for word in reads.split() for each in READ.get(word, word).split()]
        group[name] = Goal(module or PIPELINE, names, what)
        if name == "rm":  # then the policies that are trained against it
            for algorithm_name, algorithm in ALGORITHMS.items():
                group[algorithm_name] = Goal(PIPELINE, names, algorithm.summary)
    return groups


def read_variables(table: str) -> dict[str, Variable]:
    """The rows of OF_VARIABLES by name."""
    rows = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
    hints = {"": "leave it out", "recorded": RECORDED}
    return {row[0]: Variable(row[1], hints.get(row[2], row[2]), row[3]) for row in rows}


GROUPS = read_goals(TABLE)
GOALS = {name: goal for group in GROUPS.values() for name, goal in group.items()}
VARIABLES = read_variables(OF_VARIABLES)
PRESET_LINES = {
    "tiny": "0.07 to 3 M parameters on the built-in world: minutes on 2 cores",
    "own": "a model and pairs of your own (SET=base.checkpoint=..., DATA)",
    "posts": "14 M parameters, new weights, on posts of your own (DATA, TOKENIZER)",
    "smollm2": "a pretrained 135 M model, people's labels (make smollm, DATA): 1 to 4 h",
    "outputs": "summaries in your own files (INPUT): nothing is trained",
    "pythia": "the paper's study on the hub's TL;DR data: a GPU, an LLM judge",
}


def help_lines() -> list[str]:
    """Goals, variables and presets, at most 80 columns wide."""
    lines = ["make sft rm ppo eval        one run, from data to page: minutes on 2 cores"]
    for group, goals in GROUPS.items():
        lines += ["", group, *(f"  {name:18} {goal.what}" for name, goal in goals.items())]
    lines += ["", "variables"]
    lines += [f"  {name:18} {variable.what}" for name, variable in VARIABLES.items()]
    lines += ["", "presets (PRESET=...)"]
    for family, what in PRESET_LINES.items():
        members = " ".join(name for name in PRESETS if name.split("-")[0] == family)
        lines += [*textwrap.wrap(members, 78, initial_indent="  ", subsequent_indent="  ")]
        lines.append(f"      {what}")
    return lines
