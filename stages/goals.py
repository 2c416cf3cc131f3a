"""Every goal and every variable of `make`: what it is, and what runs it. Standard library only.

A new goal is one row of GROUPS. `python -m stages` checks and runs what is typed by these tables,
and `make help` prints them.
"""

from typing import NamedTuple


class Goal(NamedTuple):
    """One thing that can be asked for."""

    what: str
    """One line for people."""
    module: str = "stages.pipeline"
    """What `python -m` runs."""
    reads: str = ""
    """The variables that it reads."""
    options: str = ""
    """What the module is always told."""
    commands: tuple[str, ...] = ()
    """For developers: what `python -m` runs instead, and the environment before it."""


class Variable(NamedTuple):
    """One `NAME=value` that can be given."""

    what: str
    """One line for people."""
    option: str = ""
    """The option of a module that takes it; empty: --name."""
    hint: str = "leave it out"
    """What to do instead where a goal does not read it."""
    several: bool = False
    """Whether it holds words, each a value of its own."""
    default: str = ""
    """What it holds where it is not given."""


REQUEST = "PRESET SEED NAME SET UPSTREAM DATA TOKENIZER POLICY REWARD_MODEL INPUT"
DEVICES = "GPUS NODES ENGINE"
RUN = f"{REQUEST} {DEVICES} LAUNCH MAX_COST REPLACE"
GRID = RUN.replace("SEED ", "SEEDS ")
PYTEST = "OMP_WAIT_POLICY=passive pytest -n 2 --dist loadfile --no-loadscope-reorder"
RECORDED = "runs have the settings that they were made with"
# Goals that need no packages: they only look, or count.
LOOKING = ("help", "settings", "status", "plan")
# A variable that so many goals read, or fewer, is refused by naming them.
FEW = 4
# Variables that switch something on where they are not empty.
FLAGS = ("CHECK", "INTERACTIVE")
# Variables that a run takes as settings.
AS_SETTINGS = {
    "POLICY": "released.policy",
    "REWARD_MODEL": "released.reward_model",
    "INPUT": "outputs.file",
}

GROUPS: dict[str, dict[str, Goal]] = {
    "train": {
        "data": Goal("posts, tokenizer, checkpoint; from then on offline", reads=RUN),
        "sft": Goal("supervised fine-tuning on the reference summaries", reads=RUN),
        "rm": Goal("the reward model, and its normalization", reads=RUN),
        "ppo": Goal("PPO against the reward model", reads=RUN),
        "rloo": Goal("RLOO against the reward model, beside PPO: no critic", reads=RUN),
        "grpo": Goal("Dr.GRPO against the reward model, beside PPO: no critic", reads=RUN),
        "dpo": Goal("DPO from the same comparisons, beside PPO", reads=RUN),
    },
    "judge": {
        "eval": Goal("summaries, verdicts, win rates and the page of the run", reads=RUN),
        "judge": Goal("the same for summaries that exist: INPUT=outputs.jsonl", reads=RUN),
        "judge-calibration": Goal("the judge beside labelled comparisons", reads=RUN),
        "summarize": Goal(
            "one post by a run's policies: POST='...', FILE= or ID=",
            "stages.driving.start",
            "NAME PRESET SEED POLICY POST FILE ID TEMPERATURE INTERACTIVE",
            "eval.summarize",
        ),
    },
    "compare": {
        "compare": Goal(
            "policies of finished runs: RUNS='tiny:ppo tiny:sft'",
            "reports.compare_page",
            "RUNS JUDGE",
        ),
        "scaling": Goal(
            "finished runs on one page: NAMES='tiny-s tiny tiny-l'",
            "reports.scaling_page",
            "NAMES JUDGE",
        ),
        "publish": Goal(
            "copy PAGES to reports/generated: 'scaling-tiny bench'",
            "reports.sharing.publish",
            "PAGES JUDGE",
        ),
    },
    "study": {
        "study": Goal(
            "what is missing of PRESETS x SEEDS, then the page of sizes",
            reads=GRID.replace("PRESET ", "PRESETS JOB "),
        ),
        "ablations": Goal(
            "one switch at a time against a run, over SEEDS", reads=f"{GRID} ABLATIONS"
        ),
        "rivals": Goal(
            "PPO, RLOO, Dr.GRPO, best-of-n at equal KL, over SEEDS", reads=f"{GRID} PENALTIES"
        ),
        "status": Goal("what is done, stale, running, half done, missing, failed", reads="NAME"),
        "settings": Goal("every setting of PRESET with its value", reads=REQUEST),
        "plan": Goal(
            "what a run needs, counted: memory, hours, disk, dollars",
            "reports.needs.plan",
            f"{REQUEST} {DEVICES} GPU SEEDS PRESETS MFU PRICE_PER_HOUR",
        ),
        "rehearse": Goal(
            "the same measured here: two updates of every stage",
            "reports.needs.rehearse",
            f"{REQUEST} {DEVICES} LAUNCH PRICE_PER_HOUR",
        ),
    },
    "develop": {
        "help": Goal("this", reads=REQUEST),
        "install": Goal("the environment alone", ""),
        "smollm": Goal("a real chat model of 135M parameters, for smollm2", "eval.judges.smollm"),
        "check": Goal(
            "lint and types",
            commands=("ruff check .", "ruff format --check .", "mypy stages eval reports tests"),
        ),
        "test": Goal("the tests, in minutes", commands=(f"{PYTEST} -m 'not walk'",)),
        "walks": Goal(
            "tests with servers, browsers, processes and kills",
            commands=(
                f"{PYTEST} -m walk",
                # CI repeats all tests without AVX2.
                f"ATEN_CPU_CAPABILITY=avx2 {PYTEST} -m learns",
            ),
        ),
        "bench": Goal(
            "speed, memory beside TRL; CHECK=1: beside the published",
            "reports.speed.bench_page",
            "SHAPES RUNS SET CHECK",
        ),
        "chaos": Goal("the pipeline, killed at random moments, beside a calm run", "tests.chaos"),
        "fuzz": Goal("100,000 odd inputs for each place that reads others' texts", "tests.fuzz"),
        "simulations": Goal("how often 95% intervals hold the true rate", "tests.simulations"),
    },
}
GOALS = {name: goal for group in GROUPS.values() for name, goal in group.items()}
VARIABLES = {
    "PRESET": Variable("which kind of run; see below", hint="name the runs"),
    "SEED": Variable("of one run (44413)"),
    "SEEDS": Variable("for study, ablations, rivals, plan: '1 2'", "", "one run takes SEED", True),
    "NAME": Variable("the run's folder below runs/; SET needs one of its own"),
    "SET": Variable("settings: SET='ppo.kl_coef=0.1 sft.epochs=2'", hint=RECORDED),
    "UPSTREAM": Variable("run whose SFT and reward model this run starts from", hint=RECORDED),
    "JUDGE": Variable(
        "for compare, scaling, publish: which of several judges",
        hint="choose who judges by SET=judge.kind=...",
    ),
    "PAGES": Variable("for publish: pages by name, such as tiny-seed44413", several=True),
    "ABLATIONS": Variable("which switches; else all: ABLATIONS='dropout lambda-1'", several=True),
    "PENALTIES": Variable("kl_coef of the rivals: PENALTIES='0.02 0.1'", "kl-coefs", several=True),
    "NAMES": Variable(
        "runs for scaling", "", "one run takes NAME", True, default="tiny-s tiny tiny-l"
    ),
    "DATA": Variable("folder with posts, for posts and smollm2"),
    "TOKENIZER": Variable("folder with a tokenizer, for the preset posts"),
    "GPUS": Variable("cards of one machine: a process for each", hint="it is one process"),
    "NODES": Variable("machines of a Slurm job, each with GPUS cards", hint="it is one process"),
    "ENGINE": Variable(
        "ddp: each process holds all networks; fsdp2: a part", "", "it is one process"
    ),
    "JOB": Variable(
        "what each run of a study makes: JOB='ppo eval'", "", "name the goals themselves", True
    ),
    "GPU": Variable(
        "for plan: the kind of card, such as h100-80gb", "", "the number of cards is GPUS"
    ),
    "PRESETS": Variable("for study, plan: a grid, with SEEDS", "", "one run takes PRESET", True),
    "MFU": Variable("for plan: the share of a card's peak that is assumed"),
    "SHAPES": Variable(
        "for bench: SHAPES='pythia-14m:32:8' RUNS=3",
        several=True,
        default="pythia-14m:32:8 pythia-70m:16:4 pythia-14m:32:8:rloo pythia-70m:16:4:rloo"
        " pythia-14m:32:8:grpo pythia-70m:16:4:grpo",
    ),
    "RUNS": Variable(
        "for compare: name[/seed][:policy]; for bench: how many", "", "one run takes NAME", True
    ),
    "CHECK": Variable("1: bench compares with what is published"),
    "PRICE_PER_HOUR": Variable("for plan, rehearse: of one card, USD", "price-per-hour"),
    "POLICY": Variable("a released checkpoint for eval: folder or hub id[@revision]"),
    "REWARD_MODEL": Variable("what scores its summaries; without it there are no scores"),
    "INPUT": Variable("summaries to judge: JSONL, CSV, Parquet, folder, run"),
    "POST": Variable("for summarize: the text of a post"),
    "FILE": Variable("for summarize: a file with a post"),
    "ID": Variable("for summarize: a post of the run's data"),
    "TEMPERATURE": Variable("for summarize, in place of eval.temperature"),
    "INTERACTIVE": Variable("1: summarize asks for one post after another"),
    "MAX_COST": Variable("the most that an LLM judge may cost, USD", "max-cost"),
    "REPLACE": Variable("1: stages of the goals anew; ppo: it and what follows"),
    "LAUNCH": Variable("a launcher of your own, in place of GPUS, NODES, ENGINE"),
    "PYTHON": Variable("interpreter that makes the environment"),
    "VENV": Variable("the environment; VENV= (empty): PYTHON as it is"),
}
