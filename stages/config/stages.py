"""The table of stages: the static description of every stage.

A new stage is one more row here. The order of the rows is the order in which stages run.
"""

from collections.abc import Set
from dataclasses import dataclass, replace

from stages.config.ppo import Ppo
from stages.config.sections import COMPARISONS, POSTS
from stages.rl.algorithms import ALGORITHMS

CARD = "README.md"  # in a model's folder; not an output of the stage


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a stage is and what its result depends on. Its function is in `stages/__main__.py`."""

    what: str
    """One line that describes it."""
    module: str
    """Its module. The code of the stage is this module and all that it imports."""
    target: str
    """The make target that runs it."""
    sections: tuple[str, ...] = ()
    """Sections of the config that its result depends on, in addition to those of its inputs."""
    inputs: tuple[str, ...] = ()
    """Stages whose outputs it reads."""
    joined_by: tuple[str, ...] = ()
    """Optional stages whose outputs it also reads, if they have finished."""
    shared: bool = False
    """Whether a run with an upstream takes it from there, unless its settings differ."""
    optional: bool = False
    """Whether a run may finish without it."""
    models: tuple[str, ...] = ()
    """Folders of the models that it trains and saves; each gets a model card."""
    makes_policy: bool = False
    """Whether its policy is summarized and judged."""
    policy_gradient: bool = False
    """Whether each of its updates samples, scores and learns, as PPO's do."""
    computes: bool = True
    """Whether it runs a model in this project's processes: GPUS starts several of them, and
    precision and threads change the numbers."""
    reads_data: bool = False
    """Whether it reads posts and comparisons from their source."""
    per_judge: bool = False
    """Whether each judge has a folder of its own."""
    reads_records: bool = False
    """Whether it shows what its inputs recorded (metrics, settings, times), as pages do."""


# What a page shows of any run: its summaries, and what the judge said about them.
JUDGED = ("summaries", "judge", "controls", "win_rate")
# Policies that a run may have in addition to SFT and PPO. They are summarized and shown next to
# the others if they were trained.
OPTIONAL_POLICIES = (*(name for name in ALGORITHMS if name != "ppo"), "dpo", "released")

# A stage for each algorithm of the table. PPO is part of every run, the others are optional.
POLICY_GRADIENT = {
    name: Stage(
        what=algorithm.summary,
        module="stages.ppo",
        target=name,
        sections=("optimizer", name, "lora"),
        inputs=("base", "sft", "normalize"),
        optional=name != "ppo",
        models=("model", "critic") if issubclass(algorithm.settings, Ppo) else ("model",),
        makes_policy=True,
        policy_gradient=True,
    )
    for name, algorithm in ALGORITHMS.items()
}
STAGES = {
    "base": Stage(
        what="posts, tokenizer and the model to start from",
        module="stages.base",
        target="data",
        sections=("base", "world", "data"),
        shared=True,
        computes=False,
        reads_data=True,
    ),
    "sft": Stage(
        what="supervised fine-tuning on the reference summaries",
        module="stages.sft",
        target="sft",
        sections=("optimizer", "sft", "lora"),
        inputs=("base",),
        shared=True,
        models=("model",),
        makes_policy=True,
    ),
    "rm": Stage(
        what="the reward model, from comparisons",
        module="stages.rm",
        target="rm",
        sections=("optimizer", "rm", "lora", "reward", "released"),
        inputs=("base", "sft"),
        shared=True,
        models=("model",),
    ),
    "normalize": Stage(
        what="shifts the reward so that references average 0",
        module="stages.normalize",
        target="rm",
        sections=("normalize",),
        inputs=("base", "rm"),
        shared=True,
        models=("model",),
    ),
    **POLICY_GRADIENT,
    "dpo": Stage(
        what="DPO on the same comparisons, to compare with PPO",
        module="stages.dpo",
        target="dpo",
        sections=("optimizer", "dpo", "lora"),
        inputs=("base", "sft"),
        optional=True,
        models=("model",),
        makes_policy=True,
    ),
    "released": Stage(
        what="a policy that others trained, and its reward model, converted to our layout",
        module="stages.released",
        target="eval",
        sections=("released",),
        inputs=("base",),
        optional=True,
        makes_policy=True,
        computes=False,
    ),
    "summaries": Stage(
        what="summaries of held-out posts by every policy",
        module="eval.summaries",
        target="eval",
        sections=("eval",),
        inputs=("base", "normalize", "sft", "ppo"),
        joined_by=OPTIONAL_POLICIES,
    ),
    "judge": Stage(
        what="verdicts on every summary, in both orders",
        module="eval.judge",
        target="eval",
        sections=("judge",),
        inputs=("summaries",),
        computes=False,
        per_judge=True,
    ),
    "controls": Stage(
        what="verdicts on negative controls, in both orders",
        module="eval.controls",
        target="eval",
        sections=("judge", "checks"),
        inputs=("summaries",),
        computes=False,
        per_judge=True,
    ),
    "win_rate": Stage(
        what="win rates with intervals",
        module="eval.win_rate",
        target="eval",
        inputs=("summaries", "judge"),
        computes=False,
        per_judge=True,
    ),
    "calibration": Stage(
        what="the judge compared with labeled comparisons",
        module="eval.calibration",
        target="judge-calibration",
        sections=("world", "data", "judge", "checks"),
        optional=True,
        computes=False,
        reads_data=True,
        per_judge=True,
    ),
    "report": Stage(
        what="the page of the run",
        module="reports.run",
        target="eval",
        inputs=("base", "sft", "rm", "normalize", "ppo", *JUDGED),
        joined_by=(*OPTIONAL_POLICIES, "calibration"),
        computes=False,
        per_judge=True,
        reads_records=True,
    ),
    "calibration_report": Stage(
        what="the page of the judge's calibration",
        module="reports.calibration",
        target="judge-calibration",
        inputs=("calibration",),
        joined_by=("controls", "win_rate"),
        optional=True,
        computes=False,
        per_judge=True,
        reads_records=True,
    ),
}
# The split that fills the batches of a stage.
TRAINING_SPLITS = {"sft": POSTS[0], "rm": COMPARISONS[0], "dpo": COMPARISONS[0]}
SHARED_STAGES = tuple(name for name, stage in STAGES.items() if stage.shared)
POLICY_STAGES = tuple(name for name, stage in STAGES.items() if stage.makes_policy)
POLICY_GRADIENT_STAGES = tuple(name for name, stage in STAGES.items() if stage.policy_gradient)
LORA_STAGES = tuple(name for name, stage in STAGES.items() if "lora" in stage.sections)

# Three groups of sections, by what an override in them does to a run.
SHARED_SECTIONS = ("base", "world", "data", "sft", "reward", "released", "rm", "normalize")
"""Sections that only shared stages read (other stages read `optimizer` and `lora`, too). A run with
an upstream takes them from the upstream, except for its overrides."""
TRAINING_SECTIONS = ("base", "optimizer", "sft", "rm", "normalize", "dpo", "lora", *ALGORITHMS)
"""Sections without effect on a run that trains nothing."""
SAME_RUN_SECTIONS = ("judge", "checks", "memory")
"""Sections whose overrides need no name of their own: another judge is another opinion of the same
run."""


def shared_before(stage: str) -> tuple[str, ...]:
    """Return the shared stages before one of them; all of them if none is named."""
    return SHARED_STAGES[: SHARED_STAGES.index(stage)] if stage else SHARED_STAGES


def first_changed(sections: Set[str]) -> str:
    """Return the first shared stage that reads one of these sections; empty if none does."""
    changed = sections & set(SHARED_SECTIONS)
    for name in SHARED_STAGES:
        if changed & set(STAGES[name].sections):
            return name
    return ""


# The kinds of runs: they train policies, judge a released policy, or judge existing summaries.
TRAINED = "trained"
RELEASED = "released"
OUTPUTS = "outputs"
GIVEN_BY = {RELEASED: "POLICY=", OUTPUTS: "INPUT="}  # the make variable of a kind
TRAINING_STAGES = tuple(name for name, row in STAGES.items() if row.models)
# Kind of run -> the stages that it does not have.
LEFT_OUT = {
    TRAINED: ("released",),
    RELEASED: TRAINING_STAGES,
    OUTPUTS: ("base", *TRAINING_STAGES, "released"),
}
# Kind of run -> stage -> its row there, if it differs.
ROWS_OF_KIND = {
    TRAINED: {},
    RELEASED: {
        "summaries": replace(STAGES["summaries"], inputs=("base", "released")),
        "report": replace(STAGES["report"], inputs=("base", "released", *JUDGED)),
    },
    OUTPUTS: {
        "summaries": Stage(
            what="summaries that exist already, read from files",
            module="eval.outputs",
            target="eval",
            sections=("outputs", "eval"),
            computes=False,
        ),
        "calibration": replace(STAGES["calibration"], inputs=("summaries",)),
        "report": replace(STAGES["report"], module="reports.outputs", inputs=JUDGED),
    },
}


def stage_row(stage: str, kind: str) -> Stage:
    """Return what a stage is in a kind of run."""
    return ROWS_OF_KIND[kind].get(stage, STAGES[stage])


def is_part(stage: str, kind: str) -> bool:
    """Return whether a kind of run has a stage."""
    return stage not in LEFT_OUT[kind]


def with_inputs(wanted: set[str], kind: str = TRAINED) -> list[str]:
    """Return the wanted stages and all that they depend on, in the order in which they run."""
    needed = set(wanted)
    for name in reversed(STAGES):  # inputs come before what reads them
        if name in needed:
            needed |= set(stage_row(name, kind).inputs)
    return [name for name in STAGES if name in needed]
