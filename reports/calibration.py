"""The page of a judge's calibration: its agreement with labels, and what the win rates become.

It is the stage `calibration_report` of a run, and writes <name>-seed<k>-judge-calibration.html and
.md into runs/<name>/seed<k>/calibration_report/<judge>/. The corrected rates are shown if this
judge has evaluated the run. The text of the page is `templates/calibration.md`.
"""

import textwrap
from dataclasses import dataclass
from enum import Enum
from typing import Any

from eval.calibration import HUMAN_CEILING, calibration_of
from eval.judges.protocol import About
from reports import render
from reports.judging import (
    LONGEST,
    RULES,
    CalibrationResult,
    SimpleJudge,
    calibration_of_run,
    calibration_result,
    judge_prompt,
)
from reports.plots import INK, JUDGE_COLOR, OTHER_COLORS, Bar, Figure, agreements, figure
from reports.provenance import made_from, stage_row
from reports.results import CALIBRATION, Interval, Json, failed_checks, load_run
from stages.config.config import Config
from stages.config.errors import UserError
from stages.runs.inputs import inputs_now
from stages.runs.make_command import make_command
from stages.runs.manifest import read_manifest, stage_folder
from stages.runs.run import open_stage
from stages.runs.staleness import find_problem, refusal

LABEL_WIDTH = 18  # characters of a plot's label


class Word(Enum):
    """How a judge compares with the simple rules."""

    NO_VERDICT = "no verdict"
    TOO_FEW_POSTS = "too few posts"
    WORSE = "worse"
    NOT_BETTER = "not better"
    BETTER = "better"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How a judge compares with the simple rules, and with which of them."""

    word: Word
    rule: SimpleJudge | None
    """The rule that it does not beat, the longer text before others; else the best rule."""

    @property
    def phrase(self) -> str:
        """What the rule does, in the middle of a sentence."""
        return RULES[self.rule.name].phrase if self.rule else ""


def write_report(config: Config) -> None:
    """Write the page and print its path.

    Raises UserError, with the command to run, if this judge was not calibrated, or if its
    calibration is stale.
    """
    results = find_calibration(config)
    calibration = calibration_of_config(config, results)
    stem = f"{config.name}-seed{config.seed}-judge-calibration"
    with open_stage(config, "calibration_report") as stage:
        stage.inputs = inputs_now(config, "calibration_report")
        folders = [stage_folder(config, name) for name in stage.inputs]
        page = render.fill("calibration.md", stem, **page_values(config, results, calibration))
        origin = made_from("calibration", [config.name], folders)
        path = render.write(stage.partial, page, calibration, origin)
        stage.finish({})
    print(f"report: {stage.folder / path.name}")


def find_calibration(config: Config) -> Json:
    """Return what the calibration of a config's judge found.

    Raises UserError, with the make command to run, if this judge has none, or a stale one.
    """
    results = calibration_of(stage_folder(config, CALIBRATION))
    if results is None:
        command = make_command(config, CALIBRATION)
        raise UserError(f"this judge was not calibrated for {config.name}: run `{command}`")
    problem = find_problem(config, CALIBRATION)
    if problem:
        raise refusal(config, CALIBRATION, problem)
    return results


def calibration_of_config(config: Config, results: Json) -> CalibrationResult:
    """Return a calibration with types, and with corrected win rates if the run was evaluated."""
    if read_manifest(stage_folder(config, "win_rate")) is None:
        calibration = calibration_result(results, corrected={})
    else:
        calibration = calibration_of_run(load_run(config))
    assert calibration is not None
    return calibration


def page_values(config: Config, results: Json, calibration: CalibrationResult) -> dict[str, Any]:
    """Return everything that the template of the page prints."""
    controls = read_manifest(stage_folder(config, "controls"))
    control_results = controls["results"] if controls else None
    undecided = []
    for check in (control_results, results):
        if check and check.get("undecided"):
            undecided.append(check["undecided"])
    stages = []
    for name in inputs_now(config, "calibration_report"):
        folder = stage_folder(config, name)
        row = stage_row(
            run=f"{config.name}, seed {config.seed}",
            name=name,
            folder=folder,
            manifest=read_manifest(folder) or {},
        )
        stages.append(row)
    return {
        "config": config,
        "judge": About(**results["judge"]),
        "calibration": calibration,
        "standing": standing_of(calibration),
        "best_rule": best_rule(calibration),
        "failures": failed_checks(control_results, results),
        "undecided": undecided,
        "has_controls": control_results is not None,
        "agreement_figure": agreement_figure(calibration),
        "prompt": judge_prompt(config.judge.model_dump()),
        "stages": stages,
    }


def standing_of(calibration: CalibrationResult) -> Standing:
    """Return how the judge compares with the simple rules.

    It is worse, or not better, if that is so for any one rule.
    """
    rules = [other for other in calibration.others if other.is_rule and other.difference]
    if calibration.agreement is None or not rules:
        return Standing(word=Word.NO_VERDICT, rule=None)
    rules.sort(key=lambda rule: rule.name != LONGEST)
    for rule in rules:
        if rule.difference and rule.difference.is_below(0):
            return Standing(word=Word.WORSE, rule=rule)
    for rule in rules:
        if rule.difference and not rule.difference.is_above(0):
            word = Word.TOO_FEW_POSTS if calibration.undecided else Word.NOT_BETTER
            return Standing(word=word, rule=rule)
    return Standing(word=Word.BETTER, rule=best_rule(calibration))


def best_rule(calibration: CalibrationResult) -> SimpleJudge | None:
    """Return the simple rule that agrees most often with the labels; None without any."""
    rules = [other for other in calibration.others if other.is_rule and other.agreement]
    if not rules:
        return None
    return max(rules, key=lambda rule: rule.agreement.estimate if rule.agreement else 0.0)


def agreement_figure(calibration: CalibrationResult) -> Figure | None:
    """Draw how often the judge, the simple rules and other judges agree; None without verdicts."""
    if calibration.agreement is None:
        return None
    bars = [_bar("this judge", JUDGE_COLOR, calibration.agreement)]
    for other in calibration.others:
        if other.agreement is None:
            continue
        color = INK if other.is_rule else OTHER_COLORS[1]
        bars.append(_bar(other.title, color, other.agreement))
    ceiling = None if calibration.is_built_in else HUMAN_CEILING
    return figure("agreement", [agreements("Agreement with the labels", bars, ceiling)])


def _bar(label: str, color: str, agreement: Interval) -> Bar:
    return Bar(
        label=_wrapped(label),
        color=color,
        value=agreement.estimate,
        interval=(agreement.low, agreement.high),
    )


def _wrapped(label: str) -> str:
    """Break a long label, such as the name of a server's model, into at most three lines."""
    lines = textwrap.wrap(label, LABEL_WIDTH, max_lines=3, placeholder=" ...")
    return "\n".join(lines)
