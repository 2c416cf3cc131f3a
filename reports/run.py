"""The page of one run: what it found, compared with what, how sure that is, and how it was made.

It is the stage `report` of a run, and writes into runs/<name>/seed<k>/report/<judge>/: the page
<name>-seed<k>.md and .html with its plots, headline.txt (the result for the terminal), and
numbers.json (the run's numbers). The text of the page is `templates/run.md`. `public/` holds the
page once more without other people's texts: `make publish` copies that one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.scores import START
from reports import render
from reports.curves import dpo_figure, gradient_figures, score_and_kl, supervised_figure
from reports.data import data_section
from reports.formats import MISSING, number, percent, text_table
from reports.judging import calibration_of_run, control_rows, judge_prompt
from reports.plots import BAND_CAPTION, Figure, bars_of, figure, win_rates
from reports.provenance import folders_of, made_from, provenance, settings_table, shown
from reports.results import (
    RELEASED,
    PolicyResult,
    RunResult,
    load_run,
    title_of,
)
from reports.reward_model import MOST_GROUPS, reward_model
from reports.samples import (
    NUMBER_OF_SAMPLES,
    example_of,
    samples_of,
    wanted_facts,
)
from reports.scores import (
    best_of_training,
    best_of_training_figure,
    gains_by_cut_off,
    gains_by_question,
    gold_scores,
)
from reports.verdicts import Comparison, Verdict, verdict
from stages.config.config import Config
from stages.runs.files import write_json, write_text
from stages.runs.inputs import inputs_now
from stages.runs.run import open_stage

NEARLY_THE_SAME = 0.05  # of the reward model's score


@dataclass(frozen=True, kw_only=True)
class StageCurves:
    """The curves of one policy-gradient stage."""

    title: str
    queries: str
    """Where its queries came from."""
    figures: list[tuple[str, Figure]]


@dataclass(frozen=True, kw_only=True)
class ReleasedPolicy:
    """A policy that others trained, and the reward model that was given with it."""

    policy: str
    reward_model: str
    is_converted: bool
    mean: float


@dataclass(frozen=True, kw_only=True)
class SameScores:
    """Policies whose mean scores by the reward model are nearly the same."""

    titles: tuple[str, ...]
    low: float
    high: float


def write_report(config: Config) -> str:
    """Write the page of a finished run, and return the result for the terminal.

    Raises UserError, with the command to run, if a stage is missing or stale.
    """
    run = load_run(config)
    return write_stage(
        config,
        run,
        template="run.md",
        values=page_values(run),
        has_public_page=run.has_real_texts,
        terminal_text=terminal_text,
    )


def write_stage(
    config: Config,
    run: RunResult,
    template: str,
    values: dict[str, Any],
    has_public_page: bool,
    terminal_text: Callable[[RunResult, Path], str],
) -> str:
    """Run the stage `report`: write page, headline.txt and numbers.json; return the headline.

    `has_public_page` asks for the page once more, without other people's texts.
    """
    stem = f"{run.name}-seed{run.seed}"
    with open_stage(config, "report") as stage:
        stage.inputs = inputs_now(config, "report")
        origin = made_from("run", [run.name], folders_of([run]))
        page = render.fill(template, stem, **values, is_public=False)
        if has_public_page:
            public_page = render.fill(template, stem, **values, is_public=True)
            render.write(stage.partial / render.PUBLIC, public_page, numbers(run), origin)
        render.write(stage.partial, page, numbers(run), origin)
        headline = terminal_text(run, stage.folder / f"{stem}.html")
        write_text(stage.partial / "headline.txt", headline)
        write_json(stage.partial / "numbers.json", render.plain(numbers(run)))
        stage.finish({})
    return headline


def numbers(run: RunResult) -> RunResult:
    """Return the numbers of a run as its JSON has them: without raw records and settings."""
    return replace(run, stages={}, settings={}, calibration_pairs=())


def page_values(run: RunResult) -> dict[str, Any]:
    """Return everything that the template of a run's page prints."""
    samples = samples_of(run, list(run.policies))
    example = example_of(run)
    gold = gold_scores(run)
    best = best_of_training(run)
    controls = run.stages["controls"].results
    prompt = judge_prompt(run.settings["judge"])
    return {
        "run": run,
        "same_scores": same_scores(run),
        "gain": verdict_on_gain(run),
        "released": _released(run),
        "score_and_kl": score_and_kl(run),
        "win_rates": win_rates_figure(run),
        "example": example,
        "facts": wanted_facts(example, run.has_real_texts),
        "question_gains": gains_by_question(run),
        "cut_off_gains": gains_by_cut_off(run),
        "gold": gold,
        "best": best,
        "best_figure": best_of_training_figure(best),
        "samples": samples[:NUMBER_OF_SAMPLES],
        "sample_count": len(samples),
        "controls": control_rows(controls),
        "control_posts": controls["posts"],
        "failed_controls": [controls["controls"][name]["what"] for name in controls["failed"]],
        "undecided_controls": controls.get("undecided", ""),
        "judge_prompts": [prompt] if prompt else [],
        "calibration": calibration_of_run(run),
        "band_caption": BAND_CAPTION,
        "supervised": supervised_figure(run),
        "curves": _stage_curves(run),
        "dpo": dpo_figure(run),
        "reward": reward_model(run),
        "most_groups": MOST_GROUPS,
        "data": data_section(run),
        "settings": settings_table(run),
        "provenance": provenance([run]),
    }


def verdict_on_gain(run: RunResult) -> Verdict | None:
    """Return the verdict on the trained policy compared with SFT; None if nothing was trained."""
    difference = run.difference(run.trained, START)
    if difference is None:
        return None
    by_seed = (difference.interval.estimate,) if difference.interval else ()
    comparison = Comparison(
        over_posts=difference.interval,
        p_over_posts=1.0 if difference.p_value is None else difference.p_value,
        by_seed=by_seed,
    )
    return verdict(comparison)


def same_scores(run: RunResult) -> SameScores | None:
    """Return the policy-gradient policies if all end at nearly the same score; else None."""
    policies = [run.policies[name] for name in run.gradient_stages if name in run.policies]
    scores = [policy.score for policy in policies if policy.score is not None]
    if len(scores) < 2 or len(scores) < len(policies):
        return None
    if max(scores) - min(scores) > NEARLY_THE_SAME:
        return None
    titles = tuple(policy.title for policy in policies)
    return SameScores(titles=titles, low=min(scores), high=max(scores))


def win_rates_figure(run: RunResult) -> Figure | None:
    """Draw each policy's win rate with its interval; None if there is no rate."""
    bars = bars_of({name: (row.title, row.win_rate) for name, row in run.policies.items()})
    if not bars:
        return None
    return figure("win-rate", [win_rates("Win rate", bars)])


def terminal_text(run: RunResult, path: Path) -> str:
    """Return the result for a terminal; its last line is the path of the page."""
    return render.fill_text(
        "run_terminal.txt",
        run=run,
        gain=verdict_on_gain(run),
        result_table=_result_table(run),
        judge_table=_judge_table(run),
        path=path,
    )


def _result_table(run: RunResult) -> str:
    header = ("", "win rate [95%]", "ROUGE-L", "tokens", "EOS", "RM score", "KL")
    reference = (
        "reference",
        MISSING,
        MISSING,
        number(run.reference_tokens, digits=1),
        MISSING,
        number(run.reference_score),
        MISSING,
    )
    rows = [reference]
    for policy in run.policies.values():
        rows.append(
            (
                policy.title,
                _rate(policy),
                number(policy.rouge_l, digits=3),
                number(policy.tokens, digits=1),
                percent(policy.eos_rate),
                number(policy.score),
                number(policy.kl, digits=1),
            )
        )
    return text_table(header, rows)


def _judge_table(run: RunResult) -> str:
    header = ("", "at equal length [95%]", "picks first", "same if swapped")
    rows = []
    for policy in run.policies.values():
        at_length = policy.at_equal_length
        picks_first = policy.picks_first
        same = policy.same_after_swap
        rows.append(
            (
                policy.title,
                percent(at_length.rate if at_length else None),
                percent(picks_first.estimate if picks_first else None),
                percent(same.estimate if same else None),
            )
        )
    return text_table(header, rows)


def _rate(policy: PolicyResult) -> str:
    if policy.win_rate is None:
        return f"{MISSING} ({percent(policy.unjudged)} unjudged)"
    return percent(policy.win_rate)


def _released(run: RunResult) -> ReleasedPolicy | None:
    if not run.is_released:
        return None
    reward = run.stages[RELEASED].results["reward_model"]
    settings = run.settings[RELEASED]
    reward_model_name = ""
    if reward is not None:
        reward_model_name = shown("released.reward_model", settings["reward_model"])
    return ReleasedPolicy(
        policy=shown("released.policy", settings["policy"]),
        reward_model=reward_model_name,
        is_converted=bool(reward and reward["converted"]),
        mean=reward["mean_in_config"] if reward and reward["converted"] else 0.0,
    )


def _stage_curves(run: RunResult) -> list[StageCurves]:
    return [
        StageCurves(
            title=title_of(stage),
            queries=run.stages[stage].results["queries_from"].replace("_", " "),
            figures=gradient_figures(run, stage),
        )
        for stage in run.gradient_stages
    ]
