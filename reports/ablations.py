"""The page of an ablation study: what each ablation changes about PPO, over seeds.

    python -m reports.ablations --name tiny --ablations critic-sft dropout

takes the finished seeds of run `tiny` and of runs `tiny-critic-sft`, ... and writes
runs/reports/ablations-tiny.md and .html. An ablation is compared with the default run on the same
posts and from the same SFT and reward model, seed by seed; if it changes the reward model, from the
same SFT model. The text of the page is `templates/ablations.md`.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from eval.stats.hypothesis_tests import holm
from eval.stats.intervals import mean_of_seeds, seeds_needed
from reports import about_runs, render
from reports.ablation_runs import (
    PPO,
    AblatedRun,
    AblationRuns,
    Failures,
    Oddity,
    Seeds,
    names_of_study,
    own_stages,
    p_of_failures,
    read_study,
)
from reports.formats import MISSING, p_value, points, text_table
from reports.gains import gains_of
from reports.plots import Figure, color_of, difference_bar, differences, figure
from reports.provenance import shown
from reports.results import Interval, PolicyResult, RunResult
from reports.verdicts import MARGIN, Comparison, Verdict, Word, verdicts
from stages.config.error_messages import Parser, in_one_line
from stages.config.presets import ABLATIONS, GROUPS, ablations_named
from stages.config.values import parse_override
from stages.rl.algorithms import ALGORITHMS

GAIN = 0.9  # the share of the score's gain that ends the pace
SMOOTHED = 5  # updates whose mean score counts as one
FAR_FROM_TARGET = 0.25  # of the target of an adaptive KL coefficient
HIGH_RATE = 0.9  # a win rate above which an ablation can hardly make PPO better
FEWEST_SEEDS = 3  # with fewer, a limitation says so
MOST_NAMES = 6  # that the first paragraph lists of ablations that change nothing
LABEL_WIDTH = 20  # characters of a label in the plot
# In the order in which the page lists them.
WORDS = (Word.WORSE, Word.BETTER, Word.INCONCLUSIVE, Word.NO_DIFFERENCE)


@dataclass(frozen=True, kw_only=True)
class SeedRow:
    """PPO, or another algorithm, in one seed."""

    seed: int
    difference: float | None
    """Of its win rate from the default's in the same seed."""
    win_rate: Interval | None
    kl: float | None
    tokens: float | None
    eos_rate: float


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How soon the score rose, and how much of the returns the critic explained."""

    pace: Interval | None
    """The update that ends the rise, as a mean over seeds."""
    pace_difference: Interval | None
    """Minus the default's in the same seeds."""
    first_explained: float | None
    last_explained: float | None
    below_zero: int
    """Updates in which the critic explained less than a constant."""
    updates: int
    realized: float | None
    """Mean explained variance of realized returns; None if no run has logged it."""
    realized_below_zero: float | None
    """Share of the updates in which that was below 0."""


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """The numbers of the default run or of an ablation, as means over seeds."""

    title: str
    run_name: str
    win_rate: Interval | None
    kl: Interval | None
    tokens: Interval | None
    eos_rate: Interval | None
    learning: Learning
    seconds: float | None
    """Of training the policy, as a mean over seeds."""
    seeds: tuple[SeedRow, ...]


@dataclass(frozen=True, kw_only=True)
class AblationRow:
    """One ablation, or another algorithm, compared with the default."""

    numbers: StudyRow
    name: str
    """How the command line calls it."""
    is_algorithm: bool
    """Whether it is another algorithm of the default's runs."""
    what: str
    settings: tuple[str, ...]
    """What its runs set: the settings of the ablation, with the values that ran."""
    kl_target: float | None
    """The KL that an adaptive coefficient steers to."""
    verdict: Verdict | None
    """None if no seed has a win rate."""
    comparison: Comparison | None
    failures: Failures
    changed_summaries: float | None
    """The share of the held-out summaries that are not the default's, word for word."""
    has_same_summaries: bool
    """Whether it changed no held-out summary."""
    has_fewer_seeds: bool
    """Whether the default has seeds that this ablation does not have."""
    hides_errors: bool
    """Whether seeds that ended in an error make it inconclusive."""
    own_stages: tuple[str, ...]
    """The stages before PPO that it does not share with the default."""
    seeds_needed: int | None
    """With which the interval over seeds would reach no further than the margin, at their spread.

    Only of an inconclusive ablation.
    """
    oddities: tuple[Oddity, ...]

    @property
    def title(self) -> str:
        """How the page calls the ablation."""
        return self.numbers.title

    @property
    def missed_target(self) -> bool:
        """Whether an adaptive KL coefficient left the KL far from its target."""
        if self.kl_target is None or self.numbers.kl is None:
            return False
        return abs(self.numbers.kl.estimate - self.kl_target) > FAR_FROM_TARGET * self.kl_target


@dataclass(frozen=True, kw_only=True)
class Study:
    """All numbers of the page."""

    name: str
    group: str
    """The group of ablations that the page is about; empty for others."""
    default: StudyRow
    default_failed: int
    default_tried: int
    ablations: tuple[AblationRow, ...]
    """And other algorithms; in the order of their verdicts, the largest difference first."""

    def titles(self, word: str) -> list[str]:
        """Return the titles of the ablations whose verdict is this word, without algorithms."""
        return [row.title for row in self.rows_with(word) if not row.is_algorithm]

    def rows_with(self, word: str) -> list[AblationRow]:
        """Return the ablations and algorithms whose verdict is this word."""
        return [row for row in self.ablations if row.verdict and row.verdict.word.value == word]

    @property
    def has_failures(self) -> bool:
        """Whether any seed failed, with an ablation or without one."""
        return any(row.failures.any for row in self.ablations)

    @property
    def failing(self) -> list[AblationRow]:
        """The ablations that change how many seeds fail."""
        return [row for row in self.ablations if row.failures.are_different]

    @property
    def failing_more(self) -> list[AblationRow]:
        """The ablations with which more seeds failed, but not significantly more."""
        default_share = self.default_failed / max(1, self.default_tried)
        return [
            row
            for row in self.ablations
            if not row.failures.are_different
            and row.failures.failed > default_share * row.failures.tried
        ]

    @property
    def rows(self) -> list[StudyRow]:
        """The default, then the ablations."""
        return [self.default, *(row.numbers for row in self.ablations)]


def main(argv: list[str] | None = None) -> None:
    """Write the page and print its verdicts."""
    parser = Parser(description="what each ablation changes, over seeds")
    parser.add_argument("--name", required=True, help="the run that ablations are compared with")
    parser.add_argument("--ablations", nargs="*", help="all that have been run, if not given")
    parser.add_argument("--judge", default="", help="if runs were judged by several")
    with in_one_line():
        arguments = parser.parse_args(argv)
        print(write_page(arguments.name, arguments.ablations, arguments.judge), end="")


def write_page(name: str, ablations: Sequence[str] | None = None, judge: str = "") -> str:
    """Write the page, and return its verdicts for the terminal.

    `ablations` may name groups; None stands for all that have been run.
    """
    if ablations is None:
        names = names_of_study(name) or list(ABLATIONS)
    else:
        names = ablations_named(ablations)
    group = group_of(names)
    algorithms = GROUPS[group].algorithms if group else ()
    runs = read_study(name, names, algorithms, judge)
    study = study_of(name, group, runs)
    compared = [ablation.paired.entry for ablation in runs.ablations if ablation.paired]
    path = about_runs.write_page(
        "ablations.md",
        stem="-".join(part for part in ("ablations", name, study.group) if part),
        names=[name],
        runs=runs.all_runs,
        numbers=study,
        study=study,
        group=GROUPS.get(group),
        has_real_texts=any(run.has_real_texts for run in runs.all_runs),
        is_pretrained=any(run.training and run.training.is_pretrained for run in runs.all_runs),
        differences=differences_figure(study),
        gains=gains_of([runs.default.entry, *compared]),
        left_out=runs.left_out,
        seeds_by_run=seeds_by_run(runs),
        unjudged=unjudged_seeds(runs),
        fewest_seeds=FEWEST_SEEDS,
        most_names=MOST_NAMES,
        high_rate=HIGH_RATE,
        gain_percent=100 * GAIN,
        smoothed=SMOOTHED,
    )
    return terminal_text(study, path)


def group_of(names: Sequence[str]) -> str:
    """Return the group to which all the ablations belong; empty if there is none."""
    for name, group in GROUPS.items():
        if set(names) <= set(group.ablations):
            return name
    return ""


# -- numbers ---------------------------------------------------------------------------------------


def study_of(name: str, group: str, runs: AblationRuns) -> Study:
    """Return the numbers of a study, with verdicts that are corrected for all its ablations."""
    compared = [ablation for ablation in runs.ablations if ablation.paired]
    comparisons = [ablation.paired.comparison for ablation in compared if ablation.paired]
    verdict_of = dict(zip([row.name for row in compared], verdicts(comparisons), strict=True))
    p_values = [p_of_failures(ablation.seeds, runs.default) for ablation in runs.ablations]
    corrected = holm(p_values)
    rows = []
    for place, ablation in enumerate(runs.ablations):
        failures = Failures(
            failed=ablation.seeds.failed,
            tried=ablation.seeds.tried,
            default_failed=runs.default.failed,
            default_tried=runs.default.tried,
            p_value=p_values[place],
            corrected_p_value=corrected[place],
        )
        rows.append(_ablation_row(ablation, runs.default, verdict_of.get(ablation.name), failures))
    return Study(
        name=name,
        group=group,
        default=_study_row(runs.default, runs.default.runs, (), runs.default),
        default_failed=runs.default.failed,
        default_tried=runs.default.tried,
        ablations=tuple(sorted(rows, key=_place)),
    )


def _place(row: AblationRow) -> tuple[int, float]:
    """The key that sorts ablations by verdict, and by the size of the difference."""
    if row.verdict is None or row.verdict.interval is None:
        return -1, 0.0
    return WORDS.index(row.verdict.word), -abs(row.verdict.interval.estimate)


def _ablation_row(
    ablation: AblatedRun, default: Seeds, verdict: Verdict | None, failures: Failures
) -> AblationRow:
    # What is known of the seeds that have a result may not hold for those that have none.
    ended = len(ablation.seeds.ended_in_error) + len(default.ended_in_error)
    hides_errors = verdict is not None and verdict.word is Word.NO_DIFFERENCE and ended > 0
    if verdict is not None and hides_errors:
        verdict = replace(verdict, word=Word.INCONCLUSIVE)

    paired = ablation.paired
    changed_summaries = None
    if paired is not None and paired.changes.summaries:
        changed_summaries = 1 - paired.changes.identical / paired.changes.summaries
    is_algorithm = ablation.seeds.policy != PPO
    if is_algorithm:
        what = ALGORITHMS[ablation.name].summary
        settings = []
        stages_run_again = []
    else:
        listed = ABLATIONS[ablation.name]
        what = listed.what
        settings = settings_that_ran(listed.settings, ablation.seeds.runs)
        stages_run_again = own_stages(ablation.name)
    by_seed = paired.comparison.by_seed if paired else ()
    return AblationRow(
        numbers=_study_row(ablation.seeds, ablation.compared_runs, by_seed, default),
        name=ablation.name,
        is_algorithm=is_algorithm,
        what=what,
        settings=tuple(settings),
        kl_target=None if is_algorithm else _kl_target(ablation.seeds.runs),
        verdict=verdict,
        comparison=paired.comparison if paired else None,
        has_same_summaries=paired is not None and paired.changes.are_none,
        failures=failures,
        changed_summaries=changed_summaries,
        has_fewer_seeds=len(ablation.compared_runs) < len(default.runs),
        hides_errors=hides_errors,
        seeds_needed=_seeds_needed(verdict, by_seed),
        own_stages=tuple(stages_run_again),
        oddities=ablation.oddities,
    )


def settings_that_ran(listed: Sequence[str], runs: Sequence[RunResult]) -> list[str]:
    """Return the settings that an ablation lists, such as `ppo.dropout=0.1`, as its runs had them.

    A setting stays as it is listed if all runs had that value, and else has the values of the runs.
    """
    texts = []
    for text in listed:
        section, field, value = parse_override(text)
        name = f"{section}.{field}"
        values = [run.settings.get(section, {}).get(field) for run in runs]
        if any(ran != value for ran in values):
            different = dict.fromkeys(shown(name, ran) for ran in values)
            text = f"{name}={', '.join(different)}"
        texts.append(text)
    return texts


def _kl_target(runs: Sequence[RunResult]) -> float | None:
    """Return the KL that an adaptive coefficient steers to; None if it does not adapt."""
    for run in runs:
        target = run.settings.get(PPO, {}).get("kl_target")
        if target:
            return float(target)
    return None


def _seeds_needed(verdict: Verdict | None, by_seed: Sequence[float]) -> int | None:
    is_inconclusive = verdict is not None and verdict.word is Word.INCONCLUSIVE
    if not is_inconclusive or mean_of_seeds(by_seed) is None:
        return None
    needed = seeds_needed(by_seed, MARGIN)
    return needed if needed > len(by_seed) else None


def _study_row(
    seeds: Seeds, runs: Sequence[RunResult], differences_by_seed: Sequence[float], default: Seeds
) -> StudyRow:
    rows = []
    for place, run in enumerate(runs):
        policy = run.policies[seeds.policy]
        rows.append(
            SeedRow(
                seed=run.seed,
                difference=differences_by_seed[place] if differences_by_seed else None,
                win_rate=policy.win_rate,
                kl=policy.kl,
                tokens=policy.tokens,
                eos_rate=run.stages[seeds.policy].results["policy/eos_rate"],
            )
        )
    return StudyRow(
        title=seeds.title,
        run_name=seeds.run_name,
        win_rate=_share(mean_over_seeds([row.win_rate.estimate for row in rows if row.win_rate])),
        kl=mean_over_seeds([row.kl for row in rows]),
        tokens=mean_over_seeds([row.tokens for row in rows]),
        eos_rate=_share(mean_over_seeds([row.eos_rate for row in rows])),
        learning=_learning(runs, seeds.policy, default),
        seconds=fmean(run.stages[seeds.policy].manifest["seconds"] for run in runs)
        if runs
        else None,
        seeds=tuple(rows),
    )


def mean_over_seeds(values: Sequence[float | None]) -> Interval | None:
    """Return the mean with its 95% t interval, without the seeds that have no such number.

    The interval has no width if there is one seed, or if all seeds have one number.
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = fmean(known)
    bounds = mean_of_seeds(known)
    if bounds is None:
        return Interval(estimate=mean, low=mean, high=mean)
    return Interval(estimate=mean, low=bounds[0], high=bounds[1])


def _share(interval: Interval | None) -> Interval | None:
    """Cut the t interval of a share at 0 and 1."""
    if interval is None:
        return None
    return replace(interval, low=max(0.0, interval.low), high=min(1.0, interval.high))


# -- learning --------------------------------------------------------------------------------------


def _learning(runs: Sequence[RunResult], policy: str, default: Seeds) -> Learning:
    default_paces = {run.seed: pace_of(run, PPO) for run in default.runs}
    paces = []
    differences_of_seeds = []
    for run in runs:
        pace = pace_of(run, policy)
        default_pace = default_paces[run.seed]
        if pace is not None:
            paces.append(pace)
            if default_pace is not None:
                differences_of_seeds.append(pace - default_pace)
    critics = [run.critic for run in runs if run.critic and policy == PPO]
    # With realized returns: runs of older versions have not logged it.
    means = [critic.realized_mean for critic in critics if critic.realized_mean is not None]
    shares = [
        critic.realized_below_zero for critic in critics if critic.realized_below_zero is not None
    ]
    return Learning(
        pace=mean_over_seeds(paces),
        pace_difference=mean_over_seeds(differences_of_seeds),
        first_explained=fmean(critic.first for critic in critics) if critics else None,
        last_explained=fmean(critic.last for critic in critics) if critics else None,
        below_zero=sum(critic.below_zero for critic in critics),
        updates=sum(critic.updates for critic in critics),
        realized=fmean(means) if means else None,
        realized_below_zero=fmean(shares) if shares else None,
    )


def pace_of(run: RunResult, policy: str) -> int | None:
    """Return the update by which a policy's score has made most of its gain; None without a gain.

    It is the update that ends the first `SMOOTHED` ones whose mean score has reached `GAIN` of the
    way from the first update's score to the mean of the last fifth.
    """
    scores = [row["objective/scores"] for row in run.stages[policy].metrics]
    start = scores[0]
    last_fifth = max(1, len(scores) // 5)
    end = fmean(scores[-last_fifth:])
    if end <= start:
        return None
    goal = start + GAIN * (end - start)
    for update in range(SMOOTHED, len(scores) + 1):
        if fmean(scores[update - SMOOTHED : update]) >= goal:
            return update
    return None


# -- what the page shows ---------------------------------------------------------------------------


def differences_figure(study: Study) -> Figure | None:
    """Draw each ablation's difference with the interval that decides; None without a win rate."""
    bars = []
    for row in study.ablations:
        label = "\n".join(textwrap.wrap(row.title, LABEL_WIDTH))
        gaps = [seed.difference for seed in row.numbers.seeds if seed.difference is not None]
        color = color_of(row.name if row.is_algorithm else PPO)
        bar = difference_bar(label, color, row.verdict, by_seed=gaps)
        if bar is not None:
            bars.append(bar)
    if not bars:
        return None
    panel = differences("Win rate minus the default's", bars, "percentage points")
    return figure("differences", [panel])


def seeds_by_run(runs: AblationRuns) -> dict[str, list[int]]:
    """Return the seeds of each run that the page is about."""
    by_run = {runs.default.run_name: [run.seed for run in runs.default.runs]}
    for ablation in runs.ablations:
        by_run.setdefault(ablation.seeds.run_name, [run.seed for run in ablation.compared_runs])
    return by_run


def unjudged_seeds(runs: AblationRuns) -> list[tuple[str, int, PolicyResult]]:
    """Return title, seed and policy of each seed in which posts have no verdict."""
    rows = []
    groups = [(runs.default, runs.default.runs)]
    groups += [(ablation.seeds, ablation.compared_runs) for ablation in runs.ablations]
    for seeds, runs_of_group in groups:
        for run in runs_of_group:
            policy = run.policies[seeds.policy]
            if policy.unjudged:
                rows.append((seeds.title, run.seed, policy))
    return rows


def terminal_text(study: Study, path: Path) -> str:
    """Return the verdicts for a terminal; the last line is the path of the page."""
    header = ("ablation", "verdict", "win rate, change", "corrected p", "failed seeds")
    rows = []
    for row in study.ablations:
        verdict = row.verdict
        rows.append(
            (
                row.title,
                verdict.word.value if verdict else MISSING,
                points(verdict.interval if verdict else None),
                p_value(verdict.p_value if verdict else None).removeprefix("p = "),
                f"{row.failures.failed} of {row.failures.tried}",
            )
        )
    return render.fill_text(
        "ablations_terminal.txt", study=study, verdicts=text_table(header, rows), path=path
    )


if __name__ == "__main__":
    main()
