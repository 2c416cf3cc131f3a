"""The page of a judge's calibration: its agreement with labels, and what the win rates become.

    python -m reports.calibration_page --preset tiny

writes <name>-seed<k>-judge-calibration.html and .md to
runs/<name>/seed<k>/calibration_report/<judge>/. The corrected rates are shown if this judge has
evaluated the run.
"""

from eval.calibration import calibration_of
from reports.parts import page
from reports.parts.blocks import Block, Text
from reports.parts.collect import SIDE, flags_of, load_run, results_of
from reports.parts.run_report import made_from
from reports.parts.sentences import checks_of_judge
from reports.parts.words import Row, estimate, in_points, percent, side
from reports.sections.calibration import calibration, corrected_rates
from stages.config.checks import UserError
from stages.config.config import Config
from stages.runs.inputs import inputs_now
from stages.runs.make_command import make_command
from stages.runs.manifest import stage_folder
from stages.runs.run import open_stage
from stages.runs.staleness import find_problem, refusal


def write_report(config: Config) -> None:
    """Write the page and print its path."""
    results = find_calibration(config)
    stem = f"{config.name}-seed{config.seed}-judge-calibration"
    with open_stage(config, "calibration_report") as run:
        run.inputs = inputs_now(config, "calibration_report")
        page_blocks = blocks(config, results)
        folders = [stage_folder(config, stage) for stage in run.inputs]
        origin = made_from("calibration", [config.name], folders)
        share = percent(results["agreement"]["estimate"])
        title = f"{config.name}: the judge agrees with the labels on {share} of the pairs"
        path = page.write(run.partial, stem, title, page_blocks, origin)
        run.finish({})
    print(f"report: {run.folder / path.name}")


def find_calibration(config: Config) -> Row:
    """What the calibration of a config's judge found.

    Raises UserError, with the make command to run, if this judge has none, or a stale one.
    """
    results = calibration_of(stage_folder(config, SIDE))
    if results is None:
        command = make_command(config, SIDE)
        raise UserError(f"this judge was not calibrated for {config.name}: run `{command}`")
    problem = find_problem(config, SIDE)
    if problem:
        raise refusal(config, SIDE, problem)
    return results


def blocks(config: Config, results: Row) -> list[Block]:
    """The page: verdict, numbers, corrected rates if there is a run."""
    name = results["judge"]["name"]
    controls = results_of(stage_folder(config, "controls"))
    undecided = [results["undecided"]] if results.get("undecided") else []
    verdict = checks_of_judge(f"The judge {name}", flags_of(controls, results), undecided)
    verdict = verdict or f"The judge {name} passed every check against the labels."
    about = f"It is: {note}." if (note := results["judge"]["note"]) else None
    verdict = " ".join(filter(None, [beside_the_longer(results), verdict, about]))
    evaluated = results_of(stage_folder(config, "win_rate")) is not None
    corrected = corrected_rates(load_run(config)) if evaluated else {}
    return [
        Text(verdict, lead=True),
        *calibration(results, corrected),
        *([] if corrected else [Text("No run was evaluated with it yet: nothing to correct.")]),
    ]


def beside_the_longer(results: Row) -> str:
    """How often it agrees with the labels, and whether taking the longer text does as well."""
    if results["agreement"] is None or "longest" not in results["simple"]:
        return ""
    gap = results["simple"]["longest"]["difference"]
    how_often = {1: "reliably more often", -1: "LESS often", 0: "NOT reliably more often"}
    return (
        f"It agrees with the labels on {estimate(results['agreement'])} of the pairs,"
        f" {how_often[side(gap['low'], gap['high'])]} than the longer text does ({in_points(gap)})."
    )
