"""The table of stages: everything that is known of a stage before it runs.

A new stage is one more row here. The order of the rows is the order in which stages run.
"""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

from stages.config.ppo import Ppo
from stages.rl.algorithms import ALGORITHMS

CARD = "README.md"  # of a model, in its folder; no output of the stage


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a stage is and what its result depends on; `stages/__main__.py` has its function."""

    what: str
    """One line for people."""
    head: str = ""
    """Of its column in `make status`; empty: not shown."""
    module: str
    """Its module; the code that this one imports is the code of the stage."""
    goal: str
    """The target of `make` that reaches it."""
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
    """Folders of the models that it trains and saves; each gets a card."""
    makes_policy: bool = False
    """Whether its policy is summarised and judged."""
    policy_gradient: bool = False
    """Whether it samples, scores and learns update by update, as PPO does."""
    computes: bool = True
    """Whether it runs a model here: GPUS starts several, precision and threads change numbers."""
    reads_data: bool = False
    """Whether it reads posts and comparisons from their source."""
    per_judge: bool = False
    """Whether each judge has a folder of its own."""
    reads_records: bool = False
    """Whether it shows what its inputs recorded (metrics, settings, times), not their outputs."""


def learned(what: str, name: str, **more: Any) -> Stage:
    """A stage that learns; module, section and goal have its name unless `more` says otherwise."""
    # `make status` has room for four letters.
    row: dict[str, Any] = {"head": name[:4], "module": f"stages.{name}", "goal": name}
    row |= {"sections": ("optimizer", name, "lora"), "models": ("model",)}
    return Stage(what=what, **row | more)


def judged(what: str, module: str, head: str = "", **more: Any) -> Stage:
    """A stage that runs no model here and has a folder for each judge."""
    row: dict[str, Any] = {"goal": "eval", "computes": False, "per_judge": True}
    return Stage(what=what, module=module, head=head, **row | more)


# What a page shows of any run: its summaries, and what was said of them.
JUDGED = ("summaries", "judge", "controls", "win_rate")
# A stage for each algorithm of the table. PPO is part of every run, the others are optional.
POLICY_GRADIENT = {
    name: learned(
        algorithm.summary,
        name,
        module="stages.ppo",
        inputs=("base", "sft", "normalize"),
        makes_policy=True,
        policy_gradient=True,
        optional=name != "ppo",
        models=("model", "critic") if issubclass(algorithm.settings, Ppo) else ("model",),
    )
    for name, algorithm in ALGORITHMS.items()
}
ROWS = {
    "base": Stage(
        what="posts, tokenizer and the model to start from",
        head="base",
        module="stages.base",
        goal="data",
        sections=("base", "world", "data"),
        shared=True,
        computes=False,
        reads_data=True,
    ),
    "sft": learned(
        "supervised fine-tuning on the reference summaries",
        "sft",
        inputs=("base",),
        shared=True,
        makes_policy=True,
    ),
    "rm": learned(
        "the reward model, from comparisons",
        "rm",
        module="stages.rm",
        sections=("optimizer", "rm", "lora", "reward", "released"),
        inputs=("base", "sft"),
        shared=True,
    ),
    "normalize": Stage(
        what="the reward of a human summary becomes 0",
        head="norm",
        module="stages.normalize",
        goal="rm",
        sections=("normalize",),
        inputs=("base", "rm"),
        models=("model",),
        shared=True,
    ),
    **POLICY_GRADIENT,
    "dpo": learned(
        "DPO on the same comparisons, to compare with PPO",
        "dpo",
        inputs=("base", "sft"),
        optional=True,
        makes_policy=True,
    ),
    "released": Stage(
        what="a released policy, and its reward model in our layout",
        module="stages.released",
        goal="eval",
        sections=("released",),
        inputs=("base",),
        optional=True,
        makes_policy=True,
        computes=False,
    ),
    "summaries": Stage(
        what="summaries of held-out posts by every policy",
        head="summ",
        module="eval.summaries",
        goal="eval",
        sections=("eval",),
        inputs=("base", "normalize", "sft", "ppo"),
    ),
    "judge": judged(
        "verdicts on every summary, in both orders",
        "eval.judge",
        "judg",
        sections=("judge",),
        inputs=("summaries",),
    ),
    "controls": judged(
        "negative controls: verdicts on texts that must lose",
        "eval.controls",
        "ctrl",
        sections=("judge", "checks"),
        inputs=("summaries",),
    ),
    "win_rate": judged(
        "win rates with intervals", "eval.win_rate", "rate", inputs=("summaries", "judge")
    ),
    "calibration": judged(
        "the judge compared with labelled comparisons",
        "eval.calibration",
        goal="judge-calibration",
        sections=("world", "data", "judge", "checks"),
        optional=True,
        reads_data=True,
    ),
    "report": judged(
        "the page of the run",
        "reports.run",
        "page",
        inputs=("base", "sft", "rm", "normalize", "ppo", *JUDGED),
        joined_by=("calibration",),
        reads_records=True,
    ),
    "calibration_report": judged(
        "the page of the judge's calibration",
        "reports.calibration",
        goal="judge-calibration",
        inputs=("calibration",),
        joined_by=("controls", "win_rate"),
        optional=True,
        reads_records=True,
    ),
}
# Optional policies are summarised and shown beside the others, where they were made.
BESIDE = tuple(name for name, stage in ROWS.items() if stage.optional and stage.makes_policy)
STAGES = {
    name: replace(stage, joined_by=(*BESIDE, *stage.joined_by))
    if name in ("summaries", "report")
    else stage
    for name, stage in ROWS.items()
}
SHARED_STAGES = tuple(name for name, stage in STAGES.items() if stage.shared)
POLICY_STAGES = tuple(name for name, stage in STAGES.items() if stage.makes_policy)
POLICY_GRADIENT_STAGES = tuple(name for name, stage in STAGES.items() if stage.policy_gradient)
LORA_STAGES = tuple(name for name, stage in STAGES.items() if "lora" in stage.sections)
# A run with an upstream has these sections as the upstream has them, but for its overrides.
SHARED_SECTIONS = ("base", "world", "data", "sft", "reward", "released", "rm", "normalize")


def shared_before(stage: str) -> tuple[str, ...]:
    """The shared stages before one of them; all of them if none is named."""
    return SHARED_STAGES[: SHARED_STAGES.index(stage)] if stage else SHARED_STAGES


def first_changed(sections: Set[str]) -> str:
    """The first shared stage that reads one of some shared sections; empty if none does."""
    changed = sections & set(SHARED_SECTIONS)
    return next((name for name in SHARED_STAGES if changed & set(STAGES[name].sections)), "")


# What kind of run it is: it trains policies, or judges one of others, or summaries that exist.
TRAINED, RELEASED, OUTPUTS = "trained", "released", "outputs"
GIVEN_BY = {RELEASED: "POLICY=", OUTPUTS: "INPUT="}  # the make variable of a kind
TRAINING_STAGES = tuple(name for name, row in STAGES.items() if row.models)
# Kind of run -> the stages that do not occur in it.
NO_PART = {TRAINED: ("released",), RELEASED: TRAINING_STAGES}
NO_PART[OUTPUTS] = ("base", *TRAINING_STAGES, "released")
# Kind of run -> stage -> its row there, where it is another one.
OTHER_ROWS = {
    TRAINED: {},
    RELEASED: {
        "summaries": replace(STAGES["summaries"], inputs=("base", "released")),
        "report": replace(STAGES["report"], inputs=("base", "released", *JUDGED)),
    },
    OUTPUTS: {
        "summaries": Stage(
            what="summaries that exist already, read from files",
            module="eval.outputs",
            goal="eval",
            sections=("outputs", "eval"),
            computes=False,
        ),
        "calibration": replace(STAGES["calibration"], inputs=("summaries",)),
        "report": replace(STAGES["report"], module="reports.outputs", inputs=JUDGED),
    },
}


def row_of(stage: str, kind: str) -> Stage:
    """What a stage is in a kind of run."""
    return OTHER_ROWS[kind].get(stage, STAGES[stage])


def is_part(stage: str, kind: str) -> bool:
    """Whether a stage occurs in a kind of run at all."""
    return stage not in NO_PART[kind]


def with_inputs(wanted: set[str], kind: str = TRAINED) -> list[str]:
    """The wanted stages and all that they are made from, in the order in which they run."""
    needed = set(wanted)
    for name in reversed(STAGES):  # inputs come before what reads them
        if name in needed:
            needed |= {*row_of(name, kind).inputs}
    return [name for name in STAGES if name in needed]
