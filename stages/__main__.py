"""The command line of the project: `make sft rm ppo NAME=x` calls `python -m stages sft rm ppo`.

A command such as `make ppo` takes these steps:

1. `main` reads targets and variables (pipeline/variables.py); `config_of` creates the settings.
   Given only NAME, `request_of` (config/options.py) takes the settings that the run recorded.
2. `make_plan` (pipeline/plan.py) says which stages are missing or stale, and why. A stage is stale
   if `find_problem` (runs/staleness.py) finds that its settings, inputs or outputs differ from
   those in its manifest.
3. `Runner.run` (pipeline/runner.py) runs the stages of the plan in turn. `run_stage` below calls
   the function of a stage in this process. With GPUS or LAUNCH, `launch_stage` (pipeline/launch.py)
   starts several processes for a stage instead, and each of them begins in `launched_main`.
4. The function of a stage works inside `open_stage` (runs/run.py), which locks the stage's folder
   and resumes an interrupted attempt. Training state is loaded by `begin` (training/state.py) from
   `<stage>.partial/resume`, where a signal saves it (runs/signals.py). Writing the manifest is the
   last step.

Functions are imported when they are called, so that a command with nothing to do loads neither
torch nor transformers.
"""

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from stages.config.command_line import config_of
from stages.config.config import Config
from stages.config.error_messages import Parser, in_one_line, require_packages, show
from stages.config.errors import UserError, first_line
from stages.config.listing import settings_lines
from stages.config.options import add_arguments, config_from_arguments, request_as_typed
from stages.config.stages import OUTPUTS, STAGES
from stages.pipeline import grid, variables
from stages.pipeline.launch import StageFailedError, launcher_words
from stages.pipeline.runner import PlannedRun, Runner
from stages.pipeline.start import call_stage, end_process, errors_end_process
from stages.pipeline.targets import (
    ALIASES,
    DONE_BY_MAKE,
    GRIDS,
    STANDALONE_TARGETS,
    TOOLS,
    help_lines,
)
from stages.rl.algorithms import ALGORITHMS
from stages.runs.manifest import stage_folder
from stages.runs.signals import stopping_on_signals

Values = Mapping[str, str]
"""The variables of a command: name -> value."""

# The page that is written when a grid has finished.
GRID_PAGES = {"study": "scaling", "ablations": "ablations-page", "algorithms": "algorithms-page"}


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Run the targets of a command; exit with the status of the first stage that fails."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--stage"]:
        launched_main(words)
        return

    targets, values = variables.read_command(words)
    values = variables.with_hub_rows(values)
    # PRESET=own chooses lengths, batches and rates from model and data, and adds them to SET.
    if values.get("PRESET") == "own" and variables.needs_settings(targets):
        from stages.planning.own import with_choices

        values = with_choices(values)

    # Only stages may be combined.
    standalone = [target for target in targets if target in STANDALONE_TARGETS]
    if standalone and len(targets) > 1:
        raise UserError(
            f"{standalone[0]} cannot be combined with other targets:"
            f" run `make {standalone[0]}` by itself"
        )

    target = targets[0] if targets else "help"
    if target in DONE_BY_MAKE:
        raise UserError(f"{target} is done by make itself: run `make {target}`")
    if target in GRIDS:
        run_grid(target, values)
    elif target in TOOLS:
        run_tool(target, variables.option_words(target, values))
    elif variables.is_one(values, "REHEARSE"):
        run_rehearsal(targets, values)
    else:
        run_targets(targets, values)


# -- runs and grids --------------------------------------------------------------------------------


def run_targets(targets: Sequence[str], values: Values) -> None:
    """Run the stages that a run's targets need and that are missing or stale; print the result."""
    from stages.pipeline.end import end_lines

    request = variables.request_from(values, is_judging="judge" in targets)
    config = config_of(request)
    if "judge" in targets and config.kind != OUTPUTS:
        raise UserError(
            f"judge is for existing summaries, and {config.name} has none: add INPUT=, or run"
            f" `make eval NAME={config.name}` for a run of this project"
        )
    stage_targets = tuple(ALIASES.get(target, target) for target in targets)
    planned = PlannedRun(request=request, config=config, targets=stage_targets)
    command = variables.resume_command(targets, values)
    runner = make_runner(values, command)
    if variables.is_one(values, "DRY"):
        runner.show(planned)
        return

    require_packages()
    with stopping_on_signals(command):
        try:
            ran = runner.run(planned)
        except StageFailedError as failure:
            raise SystemExit(failure.status) from None
    show(end_lines(config, stage_targets, ran))


def run_rehearsal(targets: Sequence[str], values: Values) -> None:
    """Print the memory and time that a run needs, measured in a short run that is then removed."""
    from stages.planning import rehearsal

    if variables.is_one(values, "DRY"):
        raise UserError("REHEARSE=1 and DRY=1 cannot be combined: leave out one of them")
    if values.get("LAUNCH"):
        raise UserError("REHEARSE=1 starts its own processes: give GPUS= in place of LAUNCH=")
    require_packages()
    runner = make_runner(values, variables.resume_command(targets, values))
    rehearsed = rehearsal.prepare(
        variables.request_from(values),
        targets,
        processes=runner.processes,
        sharded=values.get("ENGINE") == "fsdp2",
    )
    short = PlannedRun(
        request=rehearsed.request,
        config=config_of(rehearsed.request),
        targets=tuple(targets),
    )
    print("rehearsal with random weights: ignore losses and scores, and warnings about them")
    try:
        with stopping_on_signals(""):
            runner.run(short)
    except StageFailedError as failure:
        raise SystemExit(failure.status) from None
    finally:
        show(rehearsal.table_lines(rehearsed))
        shutil.rmtree(rehearsed.folder)


def run_grid(target: str, values: Values) -> None:
    """Run a study, the ablations or the algorithms, and write the page about them."""
    check_for_grid(target, values)
    if target == "study":
        # Its NAME is only a suffix, so a run of that name has nothing to do with it.
        request = variables.request_from({**values, "NAME": ""})
        request = replace(request, name=values.get("NAME", ""))
    else:
        request = variables.request_from(values)
    seeds = [variables.whole_number("SEEDS", word) for word in variables.words_of(values, "SEEDS")]
    defaults = grid.GridOptions()
    options = grid.GridOptions(
        seeds=seeds or defaults.seeds,
        presets=variables.words_of(values, "PRESETS") or defaults.presets,
        targets=variables.words_of(values, "JOB") or defaults.targets,
        ablations=variables.words_of(values, "ABLATIONS") or defaults.ablations,
        kl_coefs=variables.words_of(values, "PENALTIES") or defaults.kl_coefs,
    )
    if target == "study":
        planned = grid.study(request, options)
    elif target == "ablations":
        planned = grid.ablations(request, options)
    else:
        planned = grid.algorithms(request, options)

    command = variables.resume_command([target], values)
    runner = make_runner(values, command)
    if variables.is_one(values, "DRY"):
        grid.show_grid(runner, planned)
        return
    require_packages()
    with stopping_on_signals(command):
        status = grid.run_grid(
            runner, planned, write_page=lambda options: run_tool(GRID_PAGES[target], options)
        )
    if status:
        raise SystemExit(status)


def check_for_grid(target: str, values: Values) -> None:
    """Raise UserError for a MAX_COST or REPLACE that has no meaning for all runs of a grid."""
    if values.get("MAX_COST"):
        raise UserError(
            "MAX_COST caps the cost of one run, not of a grid: cap each run by"
            f" SET=judge.max_cost={values['MAX_COST']}"
        )
    # The runs of a study have the same stages; those of other grids do not.
    stages = values.get("REPLACE", "")
    if stages not in ("", "1") and target != "study":
        raise UserError(
            f"REPLACE={stages} is for one run, not for {target}: run `make {stages} NAME=..."
            f" REPLACE={shlex.quote(stages)}`, then this command without REPLACE"
        )


def make_runner(values: Values, command: str) -> Runner:
    """Return the runner of a command, which starts stages as GPUS, ENGINE and LAUNCH say."""
    gpus = variables.whole_number("GPUS", values.get("GPUS") or "1")
    launcher = launcher_words(gpus, values.get("ENGINE", ""), values.get("LAUNCH", ""))
    return Runner(
        run_stage=partial(run_stage, resume_command=command),
        launcher=launcher,
        processes=gpus,
        max_cost=variables.dollars(values.get("MAX_COST", "")),
        replace=values.get("REPLACE", ""),
        resume_command=command,
        on_finished=write_cards,
    )


def run_stage(config: Config, stage: str, resume_command: str) -> Any:
    """Run a stage in this process, with its batches fitted into memory if they are automatic."""
    memory = config.memory
    if memory.microbatch_size == 0 or memory.forward_batch_size == 0:
        from stages.planning.batch_sizes import with_sizes

        config = with_sizes(config, stage)
    return call_stage(stage, stage_function(config, stage), config, resume_command)


def launched_main(words: Sequence[str]) -> None:
    """Run one stage in one of the processes that a launcher has started: `--stage ppo ...`.

    On a signal, the pipeline's process prints how to resume, so this one prints nothing.
    """
    parser = Parser()
    parser.add_argument("--stage", required=True)
    parser.add_argument("--resume-command", required=True)
    add_arguments(parser)
    with errors_end_process(), stopping_on_signals(""):
        arguments = parser.parse_args(words)
        # The pipeline's process has already read what the run recorded.
        config = config_of(request_as_typed(arguments))
        run_stage(config, arguments.stage, arguments.resume_command)
    end_process()


def write_cards(config: Config, stage: str) -> None:
    """Write the model cards of a finished stage; it stays finished if that fails."""
    if not STAGES[stage].models:
        return
    try:
        from eval.scores import held_out_accuracy
        from stages.pipeline import model_cards

        accuracy = held_out_accuracy(stage_folder(config, stage))
        model_cards.write_cards(config, stage, accuracy)
    except Exception as error:
        line = f"no model card of stage {stage}: {first_line(error)}"
        print(line, file=sys.stderr, flush=True)


# -- the function of each stage and tool -----------------------------------------------------------


def stage_function(config: Config, stage: str) -> Callable[[Config], Any]:
    """Import and return the function of a stage, which takes the config.

    Raises ValueError for a stage without a function.
    """
    match stage:
        case "base":
            from stages.base import make_base

            return make_base
        case "sft":
            from stages.sft import train_sft

            return train_sft
        case "rm":
            from stages.rm import train_reward_model

            return train_reward_model
        case "normalize":
            from stages.normalize import normalize

            return normalize
        case algorithm if algorithm in ALGORITHMS:
            from stages.ppo import train_policy

            return partial(train_policy, algorithm=ALGORITHMS[algorithm])
        case "dpo":
            from stages.dpo import train_dpo

            return train_dpo
        case "released":
            from stages.released import take_released

            return take_released
        case "summaries" if config.kind == OUTPUTS:
            from eval.outputs import take_outputs

            return take_outputs
        case "summaries":
            from eval.summaries import write_summaries

            return write_summaries
        case "judge":
            from eval.judge import judge_summaries

            return judge_summaries
        case "controls":
            from eval.controls import judge_controls

            return judge_controls
        case "win_rate":
            from eval.win_rate import measure_win_rates

            return measure_win_rates
        case "calibration":
            from eval.calibration import calibrate

            return calibrate
        case "calibration_report":
            from reports.calibration import write_report

            return write_report
        case "report" if config.kind == OUTPUTS:
            from reports import outputs

            return outputs.write_report
        case "report":
            from reports import run

            return run.write_report
        case _:
            raise ValueError(f"there is no stage {stage}")


def run_tool(name: str, options: list[str]) -> None:
    """Import the module of a tool, and call it with the options of its command line.

    Raises ValueError for an unknown tool.
    """
    if name == "help":
        show(help_lines())
    elif name == "settings":
        show(settings_lines(config_from_arguments(options, require_data=False)))
    elif name == "status":
        from stages.pipeline import status

        status.main(options)
    elif name == "plan":
        from stages.planning import plan

        plan.main(options)
    elif name == "summarize":
        from eval import summarize

        summarize.main(options)
    elif name == "compare":
        from reports import compare

        compare.main(options)
    elif name == "scaling":
        from reports import scaling

        scaling.main(options or ["--names", "tiny-s", "tiny", "tiny-l"])
    elif name == "ablations-page":
        from reports import ablations

        ablations.main(options)
    elif name == "algorithms-page":
        from reports import algorithms

        algorithms.main(options)
    elif name == "publish":
        from reports import publish

        publish.main(options)
    else:
        raise ValueError(f"there is no tool {name}")


if __name__ == "__main__":
    main()
