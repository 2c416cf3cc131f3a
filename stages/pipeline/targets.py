"""Every target and every variable of `make`, and the text of `make help`.

`make help` runs this file before anything is installed, so it imports only the standard library at
the top. Algorithms and presets need more, so the help lists them only after the installation.
"""

import signal
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One `NAME=value` of the command line."""

    name: str
    help: str
    hint: str = ""
    """What to do instead if a target does not read it; empty: the error names the targets that do.
    """
    setting: str = ""
    """The setting that it is short for, if there is one."""
    option: str = ""
    """The command-line option that takes it; empty: the name in lower case."""
    is_list: bool = False
    """Whether the value may be several words."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One target of `make`, with the variables that it reads."""

    name: str
    help: str
    variables: tuple[str, ...] = ()


# Variables that several targets read.
REQUEST = (
    "PRESET",
    "SEED",
    "NAME",
    "SET",
    "UPSTREAM",
    "DATA",
    "TOKENIZER",
    "POLICY",
    "REWARD_MODEL",
    "INPUT",
)
DEVICES = ("GPUS", "ENGINE", "LAUNCH")
EXECUTION = (*DEVICES, "MAX_COST", "REPLACE", "DRY")
RUN = (*REQUEST, *EXECUTION)
TRAINING_RUN = (*RUN, "REHEARSE")
# A grid takes SEEDS in place of SEED, and a study also PRESETS in place of PRESET.
RUN_OVER_SEEDS = ("SEEDS", *(name for name in RUN if name != "SEED"))
RUN_OVER_PRESETS = ("PRESETS", *(name for name in RUN_OVER_SEEDS if name != "PRESET"))

GROUPS: dict[str, list[Target]] = {
    "train": [
        Target(
            name="data",
            help="posts, tokenizer and checkpoint; later stages work offline",
            variables=RUN,
        ),
        Target(
            name="sft",
            help="supervised fine-tuning on the reference summaries",
            variables=TRAINING_RUN,
        ),
        Target(
            name="rm",
            help="the reward model and its normalization",
            variables=TRAINING_RUN,
        ),
        Target(
            name="dpo",
            help="DPO on the same comparisons, as a baseline for PPO",
            variables=TRAINING_RUN,
        ),
    ],
    "evaluate": [
        Target(
            name="eval",
            help="summaries, verdicts, win rates and the page of the run",
            variables=RUN,
        ),
        Target(
            name="judge",
            help="the same for existing summaries: INPUT=outputs.jsonl",
            variables=RUN,
        ),
        Target(
            name="judge-calibration",
            help="the judge compared with labeled comparisons",
            variables=RUN,
        ),
        Target(
            name="summarize",
            help="one post summarized by a run's policies: POST='...' or ID=",
            variables=("NAME", "PRESET", "SEED", "POST", "ID"),
        ),
    ],
    "compare": [
        Target(
            name="compare",
            help="policies of runs: RUNS='tiny:ppo tiny:sft'",
            variables=("RUNS", "JUDGE"),
        ),
        Target(
            name="scaling",
            help="runs of several sizes: NAMES='tiny-s tiny'",
            variables=("NAMES", "JUDGE"),
        ),
        Target(
            name="publish",
            help="copy PAGES to reports/generated",
            variables=("PAGES", "JUDGE"),
        ),
    ],
    "run a grid": [
        Target(
            name="study",
            help="PRESETS x SEEDS, and a page that compares sizes",
            variables=(*RUN_OVER_PRESETS, "JOB"),
        ),
        Target(
            name="ablations",
            help="a run, and variants with one setting changed, over SEEDS",
            variables=(*RUN_OVER_SEEDS, "ABLATIONS"),
        ),
        Target(
            name="algorithms",
            help="all algorithms and best-of-n at equal KL, over SEEDS",
            variables=(*RUN_OVER_SEEDS, "PENALTIES"),
        ),
    ],
    "look": [
        Target(name="help", help="this text", variables=REQUEST),
        Target(
            name="status",
            help="the state of each stage of each run",
            variables=("NAME",),
        ),
        Target(
            name="settings",
            help="every setting of PRESET with its value",
            variables=REQUEST,
        ),
        Target(
            name="plan",
            help="the memory that a run needs, before any download",
            variables=(*REQUEST, "GPUS", "ENGINE", "GPU"),
        ),
    ],
    "develop (done by make itself)": [
        Target(name="install", help="only install the environment"),
        Target(name="check", help="lint and types"),
        Target(name="test", help="the tests: 15 to 30 minutes"),
        Target(name="walks", help="slow tests with servers, browsers and killed processes"),
        Target(name="simulations", help="check how often 95% intervals cover the true rate"),
        Target(
            name="bench",
            help="speed and memory compared with TRL",
            variables=("SHAPES", "RUNS", "SET"),
        ),
    ],
}
# Targets that are not stages: each of them must be the only target.
GRIDS = tuple(target.name for target in GROUPS["run a grid"])
TOOLS = ("summarize", *(target.name for group in ("compare", "look") for target in GROUPS[group]))
DONE_BY_MAKE = tuple(target.name for target in GROUPS["develop (done by make itself)"])
STANDALONE_TARGETS = (*GRIDS, *TOOLS, *DONE_BY_MAKE)
# Targets with the stages of another target: `judge` is `eval` of existing summaries.
ALIASES = {"judge": "eval"}

RECORDED = "runs keep the settings that they were started with"
ONE_PROCESS = "it runs in one process"
VARIABLES = {
    variable.name: variable
    for variable in [
        Variable(
            name="PRESET",
            help="preset of the run's settings, see below",
            hint="a study takes PRESETS, and a page names its runs",
        ),
        Variable(name="SEED", help="seed of a run (44413)", hint="a grid takes SEEDS"),
        Variable(
            name="SEEDS",
            help="for study, ablations, algorithms: '1 2'",
            hint="a run takes SEED",
            is_list=True,
        ),
        Variable(name="NAME", help="the run's folder below runs/; most settings in SET need one"),
        Variable(
            name="SET",
            help="settings: SET='ppo.kl_coef=0.1 sft.epochs=2'",
            hint=RECORDED,
        ),
        Variable(
            name="UPSTREAM",
            help="run that supplies the SFT and reward model",
            hint=RECORDED,
        ),
        Variable(
            name="JUDGE",
            help="which judge, if a run has several",
            hint="choose the judge by SET=judge.kind=...",
        ),
        Variable(
            name="PAGES",
            help="for publish: names of pages, such as tiny-seed44413",
            is_list=True,
        ),
        Variable(
            name="ABLATIONS",
            help="ablations or groups (default: all): 'dropout lambda-1'",
            is_list=True,
        ),
        Variable(
            name="PENALTIES",
            help="for algorithms: values of kl_coef, PENALTIES='0.02 0.1'",
            option="kl-coefs",
            is_list=True,
        ),
        Variable(
            name="NAMES",
            help="runs for scaling (tiny-s tiny tiny-l)",
            hint="a run takes NAME",
            is_list=True,
        ),
        Variable(name="DATA", help="posts: folder, file or hub id, for own, posts, smollm2"),
        Variable(name="TOKENIZER", help="folder with a tokenizer, for PRESET=posts"),
        Variable(
            name="GPUS",
            help="GPUS=8 starts 8 processes on this machine, one for each GPU",
            hint=ONE_PROCESS,
        ),
        Variable(
            name="ENGINE",
            help="ddp: each process holds all weights; fsdp2: only a share",
            hint=ONE_PROCESS,
        ),
        Variable(
            name="LAUNCH",
            help="your launcher: LAUNCH='srun ... accelerate launch ...'",
            hint=ONE_PROCESS,
        ),
        Variable(
            name="JOB",
            help="for study: targets of each run, JOB='ppo eval'",
            hint="name the targets themselves",
            is_list=True,
        ),
        Variable(
            name="GPU",
            help="for plan: the GPU model, such as h100-80gb",
            hint="the number of GPUs is GPUS",
        ),
        Variable(
            name="PRESETS",
            help="for study: the presets",
            hint="a run takes PRESET",
            is_list=True,
        ),
        Variable(name="SHAPES", help="for bench: SHAPES='pythia-14m:32:8'", is_list=True),
        Variable(
            name="RUNS",
            help="for compare: name[/seed][:policy]; for bench: a number",
            hint="a run takes NAME",
            is_list=True,
        ),
        Variable(
            name="POLICY",
            help="a released checkpoint for eval: folder or hub id",
            setting="released.policy",
        ),
        Variable(
            name="REWARD_MODEL",
            help="someone else's reward model, for POLICY or in place of rm",
            setting="released.reward_model",
        ),
        Variable(
            name="INPUT",
            help="summaries to judge: JSONL, CSV, Parquet, folder or run",
            setting="outputs.file",
        ),
        Variable(name="POST", help="for summarize: the text of a post"),
        Variable(name="ID", help="for summarize: a held-out post of the run"),
        Variable(name="MAX_COST", help="maximum cost of an LLM judge, in USD"),
        Variable(
            name="REPLACE",
            help="1: rerun the named stages; REPLACE=ppo: and all later ones",
        ),
        Variable(
            name="REHEARSE",
            help="1: measure memory and time in two updates of each stage",
            hint="name sft rm ppo, or other training targets",
        ),
        Variable(name="DRY", help="1: print what would run, without running it"),
        Variable(name="PYTHON", help="interpreter that creates the environment (python3)"),
        Variable(name="VENV", help="the environment (.venv); VENV= uses PYTHON directly"),
    ]
}

PRESET_HELP = {
    "tiny": "0.07 to 3 M parameters on built-in posts: minutes on 2 cores",
    "own": "your model and your pairs (SET=base.checkpoint=..., DATA)",
    "posts": "14 M parameters from scratch, on your posts (DATA, TOKENIZER)",
    "smollm2": "a pretrained 135 M model and human labels (DATA): 1 to 4 h",
    "outputs": "summaries in your files (INPUT), without training",
    "pythia": "the paper's study on TL;DR data from the hub: needs a GPU and an LLM judge",
}


def groups_of_targets() -> dict[str, list[Target]]:
    """Return all targets by group: those of this file, and one for each algorithm."""
    try:
        from stages.rl.algorithms import ALGORITHMS
    except ImportError:  # before installation
        return GROUPS
    algorithms = [
        Target(name=name, help=algorithm.summary, variables=TRAINING_RUN)
        for name, algorithm in ALGORITHMS.items()
    ]
    # DPO, which is compared with them, stays the last one.
    *others, dpo = GROUPS["train"]
    return {**GROUPS, "train": [*others, *algorithms, dpo]}


def targets_by_name() -> dict[str, Target]:
    """Return all targets by name."""
    groups = groups_of_targets()
    return {target.name: target for targets in groups.values() for target in targets}


def preset_lines() -> list[str]:
    """Return the presets by family, with one line about each."""
    try:
        from stages.config.presets import PRESETS
    except ImportError:  # before installation
        return ["  (listed after `make install`)"]
    lines = []
    for family, text in PRESET_HELP.items():
        members = " ".join(name for name in PRESETS if name.split("-")[0] == family)
        lines += textwrap.wrap(members, 78, initial_indent="  ", subsequent_indent="  ")
        lines.append(f"      {text}")
    return lines


def help_lines() -> list[str]:
    """Return targets, variables and presets, at most 80 columns wide."""
    lines = ["make sft rm ppo eval        one run, from data to page: minutes on 2 cores"]
    for group, targets in groups_of_targets().items():
        lines += ["", group, *(f"  {target.name:18} {target.help}" for target in targets)]
    lines += ["", "variables"]
    lines += [f"  {name:18} {variable.help}" for name, variable in VARIABLES.items()]
    return [*lines, "", "presets (PRESET=...)", *preset_lines()]


def main(argv: list[str] | None = None) -> None:
    """Print the help. A closed pipe, as in `make help | head`, is not an error."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print("\n".join(help_lines()))


if __name__ == "__main__":
    main()
