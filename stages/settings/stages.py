"""The table of stages: everything that is known of a stage before it runs. Standard library only.

Settings, runs, reports and the pipeline read it, so that a new stage is one more row here. The
order of the rows is the order in which stages run.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a stage is, what its result depends on, and what makes it."""

    what: str
    """One line for people."""
    head: str = ""
    """Of its column in `make status`; empty: not shown."""
    module: str
    """What `python -m` runs."""
    goal: str
    """What people ask `make` for."""
    sections: tuple[str, ...] = ()
    """Sections of the config that its result depends on, beside what its inputs depend on."""
    inputs: tuple[str, ...] = ()
    """Stages whose outputs it reads."""
    of_released: tuple[str, ...] | None = None
    """Its inputs in a run that judges a released policy; None: the same."""
    joined_by: tuple[str, ...] = ()
    """Optional stages whose outputs it reads too, if they are there."""
    shared: bool = False
    """Whether a run with an upstream takes it from there."""
    optional: bool = False
    """Whether a run may finish without it."""
    makes_policy: bool = False
    """Whether its policy is summarised and judged."""
    computes: bool = True
    """Whether it runs a model here. If so, LAUNCH starts it, and its numbers depend on precision
    and threads."""
    reads_data: bool = False
    """Whether it reads posts and comparisons from their source."""
    per_judge: bool = False
    """Whether each judge has a folder of its own."""
    method: str = ""
    """Names how it is done. What an earlier method has finished is stale and is made again."""
    reads_records: bool = False
    """Whether it shows what its inputs recorded (metrics, settings, times), not their outputs."""


STAGES = {
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
    "sft": Stage(
        what="supervised fine-tuning on the reference summaries",
        head="sft",
        module="stages.sft",
        goal="sft",
        sections=("optimizer", "sft", "lora"),
        inputs=("base",),
        shared=True,
        makes_policy=True,
    ),
    "rm": Stage(
        what="the reward model, from comparisons",
        head="rm",
        module="stages.reward",
        goal="rm",
        sections=("optimizer", "rm", "lora"),
        inputs=("base", "sft"),
        shared=True,
    ),
    "normalize": Stage(
        what="the reward of a human summary becomes 0",
        head="norm",
        module="stages.normalize",
        goal="rm",
        inputs=("base", "rm"),
        shared=True,
    ),
    "ppo": Stage(
        what="PPO against the reward model",
        head="ppo",
        module="stages.ppo",
        goal="ppo",
        sections=("optimizer", "ppo", "lora"),
        inputs=("base", "sft", "normalize"),
        makes_policy=True,
    ),
    "dpo": Stage(
        what="DPO from the same comparisons, beside PPO",
        head="dpo",
        module="stages.dpo",
        goal="dpo",
        sections=("optimizer", "dpo", "lora"),
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
        of_released=("base", "released"),
        joined_by=("dpo",),
    ),
    "judge": Stage(
        what="verdicts on every summary, in both orders",
        head="judg",
        module="eval.judge",
        goal="eval",
        sections=("judge",),
        inputs=("summaries",),
        computes=False,
        per_judge=True,
    ),
    "controls": Stage(
        what="verdicts on texts that must lose: checks of the judge",
        head="ctrl",
        module="eval.controls",
        goal="eval",
        sections=("judge", "checks"),
        inputs=("summaries",),
        computes=False,
        per_judge=True,
        method="length, topic and facts",
    ),
    "win_rate": Stage(
        what="win rates with intervals",
        head="rate",
        module="eval.win_rate",
        goal="eval",
        inputs=("summaries", "judge"),
        computes=False,
        per_judge=True,
    ),
    "calibration": Stage(
        what="the judge beside labelled comparisons",
        module="eval.calibration",
        goal="judge-calibration",
        sections=("world", "data", "judge", "checks"),
        optional=True,
        computes=False,
        reads_data=True,
        per_judge=True,
        method="beside simple judges",
    ),
    "report": Stage(
        what="the page of the run",
        head="page",
        module="reports.run_page",
        goal="eval",
        inputs=(
            *("base", "sft", "rm", "normalize", "ppo"),
            *("summaries", "judge", "controls", "win_rate"),
        ),
        of_released=("base", "released", "summaries", "judge", "controls", "win_rate"),
        joined_by=("dpo", "calibration"),
        computes=False,
        per_judge=True,
        reads_records=True,
    ),
    "calibration_report": Stage(
        what="the page of the judge's calibration",
        module="reports.calibration_page",
        goal="judge-calibration",
        inputs=("calibration",),
        joined_by=("controls", "win_rate"),
        optional=True,
        computes=False,
        per_judge=True,
        reads_records=True,
    ),
    "versus": Stage(
        what="two policies against each other on the same posts",
        module="eval.versus",
        goal="versus",
        sections=("judge", "checks"),
        optional=True,
        computes=False,
        per_judge=True,
    ),
}
SHARED_STAGES = tuple(name for name, stage in STAGES.items() if stage.shared)
POLICY_STAGES = tuple(name for name, stage in STAGES.items() if stage.makes_policy)
LORA_STAGES = tuple(name for name, stage in STAGES.items() if "lora" in stage.sections)
# A run with an upstream takes these sections from it. Later stages depend on them only through the
# outputs of the shared stages.
SHARED_SECTIONS = ("base", "world", "data", "sft", "rm")


# They train, and are no part of a run that judges a released policy.
TRAINING_STAGES = ("sft", "rm", "normalize", "ppo", "dpo")


def inputs_of(stage: str, released: bool) -> tuple[str, ...]:
    """The inputs of a stage, in a run that judges a `released` policy or in one that trains."""
    row = STAGES[stage]
    return row.of_released if released and row.of_released is not None else row.inputs


def is_part(stage: str, released: bool) -> bool:
    """Whether a stage occurs in such a run at all."""
    return stage not in TRAINING_STAGES if released else stage != "released"


def with_inputs(wanted: set[str], released: bool = False) -> list[str]:
    """The wanted stages and all that they are made from, in the order in which they run."""
    needed: set[str] = set()
    todo = list(wanted)
    while todo:
        name = todo.pop()
        if name not in needed:
            needed.add(name)
            todo += inputs_of(name, released)
    return [name for name in STAGES if name in needed]
