"""The command line of the project: `make sft rm ppo NAME=x` calls `python -m stages sft rm ppo`.

All stages of a command run in this process, one after the other. The tables below say which
function each stage and each tool is; they import it when it runs, so that a command with nothing to
do loads neither torch nor transformers.
"""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from stages.config.checks import UserError, first_line
from stages.config.command_line import Request, add_arguments, config_of, request_of
from stages.config.config import Config
from stages.config.faults import Parser, in_one_line, is_above_0, require_packages, show
from stages.config.listing import settings_lines
from stages.config.stages import OUTPUTS, STAGES
from stages.pipeline import grid, variables
from stages.pipeline.launch import launcher_words
from stages.pipeline.runner import PlannedRun, Runner, StageFailedError
from stages.pipeline.start import end_process, errors_end_process, run_stage
from stages.pipeline.targets import DONE_BY_MAKE, GRIDS, help_lines
from stages.rl.algorithms import ALGORITHMS
from stages.runs.signals import stopping_on_signals

Values = Mapping[str, str]

TOOLS = (
    "help",
    "status",
    "settings",
    "plan",
    "rehearse",
    "summarize",
    "compare",
    "scaling",
    "publish",
    "bench",
    "card",
)
# The page that is written when a grid has finished.
GRID_PAGES = {"study": "scaling", "ablations": "ablations-page", "algorithms": "algorithms-page"}
GRID_OPTIONS = {
    "SEEDS": "seeds",
    "PRESETS": "presets",
    "JOB": "targets",
    "ABLATIONS": "ablations",
    "PENALTIES": "kl_coefs",
}


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Do what a command asks for; exit with the status of the first stage that fails."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--stage"]:
        run_launched_stage(words)
        return

    targets, values = variables.read_command(words)
    values = variables.with_hub_rows(values)
    if values.get("PRESET") == "own" and needs_settings(targets):
        from reports.needs.own import with_choices

        values = with_choices(values)

    first = targets[0] if targets else "help"
    alone = [target for target in targets if target in (*GRIDS, *TOOLS, *DONE_BY_MAKE)]
    if alone and len(targets) > 1:
        raise UserError(f"{alone[0]} is a command of its own: give the other targets separately")
    if first in DONE_BY_MAKE:
        raise UserError(f"{first} is done by make itself: run `make {first}`")
    if first in GRIDS:
        run_grid(first, values)
    elif first in TOOLS:
        run_tool(first, variables.options(first, values))
    else:
        run_targets(targets, values)


# -- runs and grids --------------------------------------------------------------------------------


def run_targets(targets: Sequence[str], values: Values) -> None:
    """Run what one run lacks to reach some targets, and print how it came out."""
    from reports.parts.watch import end_lines

    request = variables.request_from(values, is_judging="judge" in targets)
    config = config_of(request)
    reached = tuple("eval" if target == "judge" else target for target in targets)
    planned = PlannedRun(request=request, config=config, targets=reached)
    command = resume_command(targets, values)
    runner = make_runner(values, command)
    if is_dry(values):
        grid.show_plan(runner, planned)
        return

    require_packages()
    with stopping_on_signals(command):
        try:
            ran = runner.run(planned)
        except StageFailedError as failure:
            raise SystemExit(failure.status) from None
    show(end_lines(config, reached, ran))


def run_grid(target: str, values: Values) -> None:
    """Run a study, the ablations or the algorithms, and write the page about them."""
    chosen: dict[str, Any] = {}
    for name, option in GRID_OPTIONS.items():
        if values.get(name):
            chosen[option] = values[name].split()
    if "seeds" in chosen:
        chosen["seeds"] = [whole_number("SEEDS", text) for text in chosen["seeds"]]
    options = grid.GridOptions(**chosen)
    request = variables.request_from(values)
    if target == "study":
        planned = grid.study(request, options)
    elif target == "ablations":
        planned = grid.ablations(request, options)
    else:
        planned = grid.algorithms(request, options)

    command = resume_command([target], values)
    runner = make_runner(values, command)
    if is_dry(values):
        grid.show_grid(runner, planned)
        return
    require_packages()
    with stopping_on_signals(command):
        status = grid.run_grid(runner, planned, partial(run_tool, GRID_PAGES[target]))
    if status:
        raise SystemExit(status)


def make_runner(values: Values, command: str) -> Runner:
    """Return what runs stages, in this process or as GPUS, ENGINE and LAUNCH say."""
    gpus = whole_number("GPUS", values.get("GPUS") or "1")
    launcher = launcher_words(gpus, values.get("ENGINE") or "ddp", values.get("LAUNCH", ""))
    return Runner(
        run_stage=partial(run_stage_here, resume_command=command),
        launcher=launcher,
        processes=gpus,
        max_cost=dollars(values.get("MAX_COST", "")),
        replace=values.get("REPLACE", ""),
        resume_command=command,
        on_finished=write_cards,
    )


def run_stage_here(config: Config, stage: str, resume_command: str) -> Any:
    """Run a stage in this process, with its batches fitted into memory if they are automatic."""
    memory = config.memory
    if 0 in (memory.microbatch_size, memory.forward_batch_size):
        from reports.sizes import with_sizes

        config = with_sizes(config, stage)
    return run_stage(stage, stage_function(config, stage), config, resume_command)


def run_launched_stage(words: Sequence[str]) -> None:
    """Run a stage in a process that a launcher has started for the pipeline.

    The pipeline prints what happens on a signal.
    """
    parser = Parser()
    parser.add_argument("--stage", required=True)
    parser.add_argument("--resume-command", required=True)
    add_arguments(parser)
    with errors_end_process(), stopping_on_signals(""):
        arguments = parser.parse_args(words)
        config = config_of(request_of(arguments))
        run_stage_here(config, arguments.stage, arguments.resume_command)
    end_process()


def config_from(options: Sequence[str], whole: bool = True) -> Config:
    """Return the config that options ask for; without `whole` its data need not be named yet."""
    parser = Parser()
    add_arguments(parser)
    return config_of(request_of(parser.parse_args(options)), whole=whole)


def run_rehearsal(request: Request, targets: Sequence[str], gpus: int, engine: str) -> int:
    """Run a short run for `make rehearse`; return the status of the stage that failed, or 0."""
    runner = make_runner({"GPUS": str(gpus), "ENGINE": engine}, "make rehearse")
    planned = PlannedRun(request=request, config=config_of(request), targets=tuple(targets))
    with stopping_on_signals(""):
        try:
            runner.run(planned)
        except StageFailedError as failure:
            return failure.status
    return 0


def write_cards(config: Config, stage: str) -> None:
    """Write the model cards of a finished stage; it stays finished if that fails."""
    if not STAGES[stage].models:
        return
    try:
        from reports.sharing import cards

        cards.write_cards(config, stage)
    except Exception as error:
        line = f"no model card of stage {stage}: {first_line(error)}"
        print(line, file=sys.stderr, flush=True)


def dollars(text: str) -> float:
    """Return the amount in MAX_COST, 0 if it is empty. Raises UserError if it is not above 0."""
    if not text:
        return 0
    if not is_above_0(text):
        raise UserError(f"MAX_COST={text}: give dollars above 0, such as MAX_COST=20")
    return float(text)


def is_dry(values: Values) -> bool:
    """Return whether the command only looks. Raises UserError for another value than 1 or 0."""
    text = values.get("DRY", "")
    if text not in ("", "0", "1"):
        raise UserError(f"DRY={text}: give DRY=1, or leave it out")
    return text == "1"


def resume_command(targets: Sequence[str], values: Values) -> str:
    """Return the command that resumes this one: all of it but REPLACE."""
    typed = [f"{name}={shlex.quote(values[name])}" for name in values if name != "REPLACE"]
    return " ".join(["make", *targets, *typed])


def whole_number(name: str, text: str) -> int:
    """Return the number in a variable. Raises UserError if it is none."""
    if not text.isdecimal():
        raise UserError(f"{name}={text}: give whole numbers")
    return int(text)


def needs_settings(targets: Sequence[str]) -> bool:
    """Return whether one of some targets reads settings."""
    return any("SET" in variables.target_of(target).variables for target in targets)


# -- the function of each stage and tool -----------------------------------------------------------


def stage_function(config: Config, stage: str) -> Callable[[Config], Any]:
    """Import and return the function of a stage, which takes the config."""
    is_existing = config.kind == OUTPUTS
    if stage == "base":
        from stages.base import make_base

        return make_base
    if stage == "sft":
        from stages.sft import train_sft

        return train_sft
    if stage == "rm":
        from stages.rm import train_reward_model

        return train_reward_model
    if stage == "normalize":
        from stages.normalize import normalize

        return normalize
    if stage in ALGORITHMS:
        from stages.ppo import train_policy

        return partial(train_policy, algorithm=ALGORITHMS[stage])
    if stage == "dpo":
        from stages.dpo import train_dpo

        return train_dpo
    if stage == "released":
        from stages.released import take_released

        return take_released
    if stage == "summaries" and is_existing:
        from eval.outputs import take_outputs

        return take_outputs
    if stage == "summaries":
        from eval.summaries import write_summaries

        return write_summaries
    if stage == "judge":
        from eval.judge import judge_summaries

        return judge_summaries
    if stage == "controls":
        from eval.controls import judge_controls

        return judge_controls
    if stage == "win_rate":
        from eval.win_rate import measure_win_rates

        return measure_win_rates
    if stage == "calibration":
        from eval.calibration import calibrate

        return calibrate
    if stage == "calibration_report":
        from reports.calibration import write_report

        return write_report
    if is_existing:
        from reports import outputs

        return outputs.write_report
    from reports import run

    return run.write_report


def run_tool(name: str, options: list[str]) -> None:
    """Import the module of a tool, and call it with the options of its command line."""
    if name == "help":
        show(help_lines())
    elif name == "settings":
        show(settings_lines(config_from(options, whole=False)))
    elif name == "status":
        from reports.sharing import status

        status.main(options)
    elif name == "plan":
        from reports.needs import plan

        plan.main(options)
    elif name == "rehearse":
        from reports.needs import rehearse

        rehearse.main(options, run=run_rehearsal)
    elif name == "summarize":
        from eval import summarize

        summarize.main(options)
    elif name == "compare":
        from reports import compare

        compare.main(options)
    elif name == "scaling":
        from reports import scaling_page

        scaling_page.main(options or ["--names", "tiny-s", "tiny", "tiny-l"])
    elif name == "ablations-page":
        from reports import ablations

        ablations.main(options)
    elif name == "algorithms-page":
        from reports import algorithms_page

        algorithms_page.main(options)
    elif name == "publish":
        from reports.sharing import publish

        publish.main(options)
    elif name == "bench":
        from reports.speed import bench_page

        bench_page.main(options)
    elif name == "card":
        from reports.sections import card

        card.main(options)


if __name__ == "__main__":
    main()
