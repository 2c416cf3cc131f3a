"""The page about model sizes: does PPO work better with a larger model, and as in the paper?

    python -m reports.scaling --names tiny-s tiny tiny-l

takes all finished seeds of these runs and writes runs/reports/scaling-<names>.md and .html; the
built-in ladder of presets is called scaling-ladder. With one run the page is about its seeds. The
text of the page is `templates/scaling.md`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.scores import START
from reports import about_runs, paper, render
from reports.failed_seeds import FAR_BELOW, OverOptimizedSeed, over_optimized_seed
from reports.formats import percent, points, text_table
from reports.growth import FEWEST_SIZES, Growth, growth
from reports.limits import EVEN, FEW_EOS
from reports.paper_comparison import SAME, PaperComparison, compare_with_paper
from reports.plots import (
    Bar,
    Figure,
    Series,
    color_of,
    differences,
    figure,
    rates_over_parameters,
    win_rates,
)
from reports.pooled_rates import Outcome
from reports.results import JudgeResult, PolicyResult, RunResult, find_all
from reports.sizes import (
    PolicyAtSize,
    SizeResult,
    differing_settings,
    have_same_seeds,
    runs_by_label,
    size_result,
    unjudged_policies,
)
from stages.config.error_messages import Parser, in_one_line, show
from stages.pipeline.grid import LADDER


@dataclass(frozen=True, kw_only=True)
class ScalingNumbers:
    """The numbers of the page, as its JSON has them."""

    sizes: tuple[SizeResult, ...]
    growth: tuple[Growth, ...]
    over_optimized: tuple[OverOptimizedSeed, ...]
    paper: tuple[PaperComparison, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """At which sizes the trained policy beats the references."""

    trained: str
    """The title of the policy."""
    sizes: int
    beaten: tuple[str, ...]
    """The labels of the sizes at which it does."""
    holds_from: str
    """The smallest of them, if it also does at every larger size; else empty."""
    is_below_everywhere: bool
    """Whether it does not reach the references at any size."""
    others: Mapping[Outcome, tuple[str, ...]]
    """The labels of the other sizes, by what their win rates show."""
    is_same_at_equal_length: bool
    at_equal_length: Mapping[Outcome, tuple[str, ...]]
    """The labels of the sizes with a rate at equal length, by what it shows."""
    without_equal_length: tuple[str, ...]
    """The labels of the sizes without such a rate."""
    extrapolated: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class UnjudgedPolicy:
    """A policy of one seed that has posts without a verdict."""

    size: str
    seed: int
    policy: PolicyResult


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Write the page and print its answer."""
    parser = Parser(description="compare model sizes")
    parser.add_argument("--names", nargs="+", required=True, help="runs, one for each size")
    parser.add_argument("--judge", default="", help="where runs were judged by several")
    arguments = parser.parse_args(argv)
    show([write_page(arguments.names, arguments.judge)])


def write_page(run_names: Sequence[str], judge: str) -> str:
    """Write the page about some runs, and return its answer for the terminal."""
    names = list(dict.fromkeys(run_names))
    runs, left_out = find_all(names, judge)
    groups = runs_by_label(runs)
    numbers = measure(groups)
    stem = about_runs.stem_about("scaling", ladder_name(names) or names)
    path = about_runs.write_page(
        "scaling.md",
        stem=stem,
        names=names,
        runs=labelled_runs(groups),
        numbers=numbers,
        **page_values(groups, numbers, left_out),
    )
    return terminal_text(numbers, runs[0].trained, path)


def ladder_name(names: Sequence[str]) -> list[str]:
    """Return `ladder` with the name of its study if the runs are the built-in ladder, else none."""
    smallest = min(LADDER, key=len)  # the name of every other preset begins with it
    study = min(names, key=len).removeprefix(smallest)
    is_ladder = {f"{preset}{study}" for preset in LADDER} == set(names)
    return [f"ladder{study}"] if is_ladder else []


def measure(groups: Mapping[str, Sequence[RunResult]]) -> ScalingNumbers:
    """Return all numbers of the page from the seeds of each size."""
    over_optimized = [
        over_optimized_seed(run, size=label) for label, runs in groups.items() for run in runs
    ]
    return ScalingNumbers(
        sizes=tuple(size_result(label, runs) for label, runs in groups.items()),
        growth=tuple(growth(groups)),
        over_optimized=tuple(seed for seed in over_optimized if seed is not None),
        paper=tuple(compare_with_paper(groups)),
    )


def page_values(
    groups: Mapping[str, Sequence[RunResult]],
    numbers: ScalingNumbers,
    left_out: Sequence[str] = (),
) -> dict[str, Any]:
    """Return everything that the template of the page prints."""
    runs = labelled_runs(groups)
    trained = runs[0].trained
    return {
        "trained": trained,
        "sizes": numbers.sizes,
        "seed_count": max(len(size.seeds) for size in numbers.sizes),
        "policies": policy_titles(numbers.sizes),
        "has_single_seeds": has_single_seeds(numbers.sizes),
        "answer": answer(numbers.sizes, trained),
        "growth": numbers.growth,
        "rate_growth": next((row for row in numbers.growth if row.is_of_trained_rate), None),
        "over_optimized": numbers.over_optimized,
        "figure_of_sizes": sizes_figure(numbers, trained),
        "has_paper_diamonds": any(entry.number("ppo_win_rate") for entry in numbers.paper),
        "judges": different_judges(runs),
        "posts": sorted({run.posts for run in runs}),
        "different_settings": differing_settings(runs),
        "have_same_seeds": have_same_seeds(groups),
        "unjudged": [
            UnjudgedPolicy(size=run.name, seed=run.seed, policy=policy)
            for run in runs
            for policy in unjudged_policies(run)
        ],
        "weak_reward_models": [run for run in runs if has_weak_reward_model(run)],
        "few_eos": [run for run in runs if has_few_eos(run)],
        "left_out": left_out,
        "paper_comparisons": numbers.paper,
        "paper": paper.load(),
        "same": SAME,
        "far_below": FAR_BELOW,
        "fewest_sizes": FEWEST_SIZES,
    }


def labelled_runs(groups: Mapping[str, Sequence[RunResult]]) -> list[RunResult]:
    """Return all runs, each called as the page calls it: by its size if there are several."""
    if len(groups) == 1:
        return [run for runs in groups.values() for run in runs]
    return [replace(run, name=label) for label, runs in groups.items() for run in runs]


def answer(sizes: Sequence[SizeResult], trained: str) -> Answer:
    """Return at which sizes a policy beats the references."""
    policies = {size.label: size.policies[trained] for size in sizes}
    beaten = [label for label, row in policies.items() if row.outcome is Outcome.BEATS]
    largest = list(policies)[len(policies) - len(beaten) :]
    outcomes = {label: row.outcome for label, row in policies.items()}
    by_outcome = _labels_by_outcome(outcomes)
    # A rate at equal length of fewer seeds than the raw rate would be weaker evidence that sounds
    # stronger.
    seeds_of_rate = {label: row.win_rate.seeds for label, row in policies.items() if row.win_rate}
    at_equal_length = {
        label: row.outcome_at_equal_length
        for label, row in policies.items()
        if row.at_equal_length is not None
        and row.at_equal_length.seeds == seeds_of_rate.get(label, row.at_equal_length.seeds)
    }
    return Answer(
        trained=next(iter(policies.values())).title,
        sizes=len(sizes),
        beaten=tuple(beaten),
        holds_from=beaten[0] if beaten and beaten == largest else "",
        is_below_everywhere=set(by_outcome) == {Outcome.LOSES},
        others={word: labels for word, labels in by_outcome.items() if word is not Outcome.BEATS},
        is_same_at_equal_length=at_equal_length == outcomes,
        at_equal_length=_labels_by_outcome(at_equal_length),
        without_equal_length=tuple(label for label in policies if label not in at_equal_length),
        extrapolated=tuple(label for label, row in policies.items() if row.is_extrapolated),
    )


def _labels_by_outcome(outcomes: Mapping[str, Outcome]) -> dict[Outcome, tuple[str, ...]]:
    """Return the labels of each outcome that occurs."""
    groups = {}
    for word in Outcome:
        labels = tuple(label for label, outcome in outcomes.items() if outcome is word)
        if labels:
            groups[word] = labels
    return groups


def policy_titles(sizes: Sequence[SizeResult]) -> dict[str, str]:
    """Return the titles of all policies that any size has, in the order of the first size."""
    titles: dict[str, str] = {}
    for size in sizes:
        titles |= {name: policy.title for name, policy in size.policies.items()}
    return titles


def has_single_seeds(sizes: Sequence[SizeResult]) -> bool:
    """Whether a policy has a single seed where others of its size have several."""
    return any(
        len(size.rates_of(policy)) == 1 and len(size.seeds) > 1
        for size in sizes
        for policy in size.policies
    )


def has_weak_reward_model(run: RunResult) -> bool:
    """Whether a run's reward model is not significantly better than chance."""
    accuracy = run.training.reward_accuracy if run.training else None
    return accuracy is not None and not accuracy.is_above(EVEN)


def has_few_eos(run: RunResult) -> bool:
    """Whether many summaries of the trained policy are cut off at the length limit."""
    eos_rate = run.main.eos_rate if run.main else None
    return eos_rate is not None and eos_rate < FEW_EOS


def different_judges(runs: Sequence[RunResult]) -> list[JudgeResult]:
    """Return the judges of some runs, each name once."""
    judges: dict[str, JudgeResult] = {}
    for run in runs:
        judges.setdefault(run.judge.name, run.judge)
    return list(judges.values())


# -- figures ---------------------------------------------------------------------------------------


def sizes_figure(numbers: ScalingNumbers, trained: str) -> Figure | None:
    """Draw win rates and the gain over SFT by size; of a single size, win rates by policy."""
    sizes = numbers.sizes
    if len(sizes) == 1:
        bars = _rate_bars(sizes[0])
        return figure("win-rate", [win_rates("Win rate", bars)] if bars else [])
    series = [_series(numbers, policy) for policy in policy_titles(sizes)]
    shown = [row for row in series if row.means]
    panels = []
    if shown:
        panels.append(rates_over_parameters("Win rate by size", shown))
    bars = _gain_bars(sizes, trained)
    if bars:
        title = f"What {sizes[0].policies[trained].title} adds to SFT"
        panels.append(differences(title, bars, x_label="points of win rate, compared with SFT"))
    return figure("sizes", panels)


def _rate_bars(size: SizeResult) -> list[Bar]:
    bars = []
    for name, policy in size.policies.items():
        if policy.win_rate is None:
            continue
        rate = policy.win_rate.interval
        rates = size.rates_of(name)
        is_single_seed = len(rates) == 1 and len(size.seeds) > 1
        bar = Bar(
            label=f"{policy.title}\n(1 seed)" if is_single_seed else policy.title,
            color=color_of(name),
            value=rate.estimate,
            interval=(rate.low, rate.high),
            seeds=tuple(rates) if len(rates) > 1 else (),
            is_of_one_seed=is_single_seed,
        )
        bars.append(bar)
    return bars


def _gain_bars(sizes: Sequence[SizeResult], trained: str) -> list[Bar]:
    bars = []
    for size in sizes:
        if size.gain is None:
            continue
        gain = size.gain.interval
        bar = Bar(
            label=size.label,
            color=color_of(trained),
            value=100 * gain.estimate,
            interval=(100 * gain.low, 100 * gain.high),
            seeds=tuple(100 * seed.gain.estimate for seed in size.seeds if seed.gain is not None),
        )
        bars.append(bar)
    return bars


def _series(numbers: ScalingNumbers, policy: str) -> Series:
    seeds = []
    means = []
    title = policy
    for size in numbers.sizes:
        row = size.policies.get(policy)
        if row is None or row.win_rate is None:
            continue
        title = row.title
        means.append((float(size.parameters), row.win_rate.interval.estimate))
        for seed in size.seeds:
            rate = seed.win_rates.get(policy)
            if rate is not None:
                seeds.append((float(size.parameters), rate.estimate))
    papers = []
    for comparison in numbers.paper:
        number = comparison.number(f"{policy}_win_rate")
        if number is not None:
            papers += [(float(comparison.parameters), value) for value in number.paper_values]
    return Series(
        label=title,
        color=color_of(policy),
        seeds=tuple(seeds),
        means=tuple(means),
        paper=tuple(papers),
    )


# -- the terminal ----------------------------------------------------------------------------------


def terminal_text(numbers: ScalingNumbers, trained: str, path: Path) -> str:
    """Return the answer for a terminal; its last line is the path of the page."""
    page = render.read_page_record(path.parent, path.stem)
    return render.fill_text(
        "scaling_terminal.txt",
        title=page["title"],
        lead=page["lead"],
        table=_terminal_table(numbers.sizes, trained),
        path=path,
    ).removesuffix("\n")


def _terminal_table(sizes: Sequence[SizeResult], trained: str) -> str:
    titles = policy_titles(sizes)
    header = ["size", f"{titles[trained]} [95%]", "SFT [95%]", "gain over SFT [95%]"]
    rows = []
    for size in sizes:
        rates = [_rate_text(size.policies.get(name)) for name in (trained, START)]
        gain = points(size.gain.interval if size.gain else None)
        rows.append([size.label, *rates, gain])
    return text_table(header, rows)


def _rate_text(policy: PolicyAtSize | None) -> str:
    if policy is None or policy.win_rate is None:
        return percent(None)
    return percent(policy.win_rate.interval)


if __name__ == "__main__":
    main()
