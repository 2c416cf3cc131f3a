"""One switch at a time: what each ablation does to a run, over seeds.

    python -m reports.ablations_page --name tiny --ablations critic-sft dropout

takes the finished seeds of run `tiny` and of runs `tiny-critic-sft`, ... and writes
runs/reports/ablations-tiny.md and .html. An ablation is compared with the run on the same
posts and from the same SFT and reward model, seed by seed; where the switch is the reward model's,
from the same SFT model. Each switch gets one verdict (`reports.parts.verdicts`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from eval.stats.formulas import mean_of_seeds
from reports.parts import gained, page, plots, verdicts, words
from reports.parts.ablated import POLICY, AblatedRun, SeedsOfRun, collect, taken_stages, there
from reports.parts.blocks import Block, Heading, Table, Text
from reports.parts.cells import MISSING, Number
from reports.parts.collect import Record, explained_by_critic
from reports.parts.paired import Entry
from reports.parts.run_report import write_about_runs
from reports.parts.sentences import against, distrust, lead, notes_of_runs, unjudged
from reports.parts.verdicts import FEWEST, WITHIN, in_brief, sentence, verdicts_of
from reports.parts.words import Row, bounds_in_points, number, percent, seeds_mean
from stages.config.presets import ABLATIONS, GROUPS, ablations_named
from stages.config.stages import SHARED_STAGES

MEASURED: tuple[tuple[str, str, Callable[[float | None], Number]], ...] = (
    ("ppo/win_rate", "win rate", percent),
    ("kl", "KL, nats", partial(number, digits=2)),
    ("ppo/tokens", "tokens", partial(number, digits=1)),
    ("eos_rate", "EOS sampled", percent),
)
DEFAULT = "default"
SIGNED = partial(Number, digits=1, signed=True)
# Of switches that are named on the first screen.
MOST_NAMES, MOST_FAILING = 6, 2


def main(argv: list[str] | None = None) -> None:
    """Write the page and print its lines."""
    parser = page.arguments("what each switch does, over seeds")
    parser.add_argument("--name", required=True, help="the run that ablations are compared with")
    parser.add_argument("--ablations", nargs="*", help="all that have been run, if not given")
    page.print_page(lambda args: write_page(args.name, args.ablations, args.judge), parser, argv)


def write_page(name: str, ablations: Sequence[str] | None = None, judge: str = "") -> str:
    """Write the page; its lines for the terminal. `ablations`: None for all that have been run."""
    names = (there(name) or list(ABLATIONS)) if ablations is None else ablations_named(ablations)
    default, others, left_out = collect(name, names, judge)
    group = next((key for key, members in GROUPS.items() if set(names) <= set(members)), "")
    heading = f"{name}{', the ' * bool(group)}{group}: {verdicts.title(verdicts_of(others))}"
    records = [run for runs in by_switch(default, others).values() for run in runs]
    stem = "-".join(filter(None, ["ablations", name, group]))
    path = write_about_runs(stem, heading, blocks(default, others, left_out), [name], records)
    return page.for_terminal([f"{heading}.", *sentences_of(others)], path)


def by_switch(default: SeedsOfRun, others: list[AblatedRun]) -> dict[str, list[Record]]:
    """The runs of the default and of each switch; a switch may have none."""
    return {DEFAULT: default.runs} | {x.name: x.pair.runs if x.pair else [] for x in others}


def blocks(default: SeedsOfRun, others: list[AblatedRun], left_out: Sequence[str]) -> list[Block]:
    """The page: verdicts and effects; folded, why, each seed, and what it does not show."""
    rows = [*default.rows, *(run for ablation in others for run in ablation.rows)]
    most, fewest = len(default.runs), min(len(ablation.rows) for ablation in others)
    seeds = f"{fewest} to {most} seeds" if 0 < fewest < most else words.seeds_of(most)
    runs = by_switch(default, others)
    entries = [Entry(name=key, policy=POLICY, runs=each) for key, each in runs.items() if each]
    return [
        lead(answer(others), distrust(rows, seeds)),
        verdicts_table(default, others),
        *picture(others),
        Heading("Each switch"),
        *map(Text, sentences_of(others)),
        switches_table(others),
        *against([*caveats(default.rows, others), *left_out]),
        *gained.table(entries),
        Heading("Pace and critic"),
        learning_table(runs),
        Heading("Each seed"),
        means_table(default, others),
        seeds_table(default.rows, others),
        Heading("What this does and does not show"),
        *(Text(limit) for limit in limits(seeds, others)),
    ]


def answer(others: Sequence[AblatedRun]) -> str:
    """Each verdict with its switches, and how many seeds failed; names of few."""
    failing = sorted((x for x in others if in_brief(x)), key=lambda x: -x.turned.failed)
    failed = (f"{x.name}: {in_brief(x)}." for x in failing[:MOST_FAILING])
    return " ".join([verdicts.summary(verdicts_of(others), MOST_NAMES), *failed])


def sentences_of(others: Sequence[AblatedRun]) -> list[str]:
    """A sentence on each switch."""
    kinds = verdicts_of(others)
    return [sentence(ablation, kinds[ablation.name]) for ablation in others]


def picture(others: Sequence[AblatedRun]) -> list[Block]:
    """The mean difference of each switch with its interval over seeds; none without a rate."""
    rows = []
    for ablation in others:
        if each := [100 * gap for gap in ablation.each]:
            rows.append((ablation.name, fmean(each), *(mean_of_seeds(each) or (None, None))))
    caption = "Mean over seeds; bars are 95% t intervals over seeds, where seeds differ."
    panel = plots.differences("Win rate, switch - default", rows)
    return [plots.figure("switches", caption, [panel], 1.75, plots.tall(rows))] if rows else []


def switches_table(others: list[AblatedRun]) -> Table:
    """What each switch is and which setting it turns."""
    switches = {ablation.name: ABLATIONS[ablation.name] for ablation in others}
    rows = [[name, " ".join(switch.settings), switch.what] for name, switch in switches.items()]
    return Table(("switch", "setting", "what it does; details as the paper numbers them"), rows)


def verdicts_table(default: SeedsOfRun, others: list[AblatedRun]) -> Table:
    """A row a switch, the largest effect first: its verdict, its effect, the seeds that failed."""
    kinds = verdicts_of(others)
    rows = [
        [
            f"{x.name} ({ABLATIONS[x.name].what.partition(' (')[0]})",
            kinds[x.name].kind,
            seeds_mean([100 * gap for gap in x.each] if x.changed else [], SIGNED),
            _failed(x.turned),
        ]
        for x in others
    ]
    caption = (
        f"Effect: win rate, switch - default (which wins {_means(default.rows)[0]}), on the same"
        " posts and seeds; means with 95% intervals over seeds (Student's t). Verdicts are"
        " corrected for the number of switches (Holm), intervals are not. Failed: seeds whose PPO"
        " ended in an error or is not above its own SFT by the interval over posts; by default"
        f" {_failed(default)}."
    )
    header = ["switch", "verdict", "effect, points", "failed"]
    return Table(header, rows, caption, strong=True, name="verdicts")


def means_table(default: SeedsOfRun, others: list[AblatedRun]) -> Table:
    """A row a switch: how many texts it changed, the interval over posts, and means over seeds."""
    header = ["switch", "changed", "over posts", *(title for _, title, _ in MEASURED)]
    rows = [[DEFAULT, MISSING, MISSING, *_means(default.rows)]]
    for ablation in others:
        pair, over_posts, changed = ablation.pair, MISSING, "none" if ablation.pair else MISSING
        if pair and ablation.changed and pair.together:
            over_posts = bounds_in_points((pair.together.low, pair.together.high))
            changed = percent(ablation.changed / pair.written)
        rows.append([ablation.name, changed, over_posts, *_means(ablation.rows)])
    caption = (
        "Changed: held-out summaries that are not the default's, word for word. Over posts: the 95%"
        " interval of the effect in points, with the seeds held fixed. Then means over seeds with"
        " 95% intervals, none where all seeds give one number; shares are cut at 0 and 100%. EOS"
        " sampled, and KL: in the last 5% of PPO's updates."
    )
    return Table(header, rows, caption, name="means")


def _failed(seeds: SeedsOfRun) -> object:
    return f"{seeds.failed} of {seeds.tried}" if seeds.tried else MISSING


def _means(rows: list[Row]) -> list[Number]:
    cells = []
    for key, _, form in MEASURED:
        cell = seeds_mean([row[key] for row in rows if row[key] is not None], form)
        if cell.unit == "%" and cell.low is not None and cell.high is not None:  # a share
            cell = replace(cell, low=max(0.0, cell.low), high=min(100.0, cell.high))
        cells.append(cell)
    return cells


def seeds_table(default: list[Row], others: list[AblatedRun]) -> Table:
    """One row a run, with its interval over posts."""
    groups = [(DEFAULT, default), *((ablation.name, ablation.rows) for ablation in others)]
    rows = [
        [
            name,
            str(run["seed"]),
            words.rate(run, POLICY),
            *(form(run[key]) for key, _, form in MEASURED[1:]),
        ]
        for name, runs in groups
        for run in runs
    ]
    header = ["switch", "seed", *(title for _, title, _ in MEASURED)]
    return Table(header, rows, "In brackets: 95% intervals over the posts.", name="seeds")


def caveats(default: list[Row], others: list[AblatedRun]) -> list[str]:
    """What to hold against the comparison."""
    rows = [*default, *(run for ablation in others for run in ablation.rows)]
    notes = notes_of_runs(rows)
    seeds = {run["seed"] for run in default}
    fewer = {x.name: len(x.rows) for x in others if seeds - {run["seed"] for run in x.rows}}
    if fewer:
        counts = ", ".join(f"{name} {count}" for name, count in fewer.items())
        notes.append(
            f"Fewer than the default's {len(seeds)} seeds have: {counts}. Each is compared with the"
            " default on its own seeds alone, so not with the default's means, which are of all."
        )
    lines = [
        f"{run['name']} seed {run['seed']}: {line}"
        for run in rows
        for line in unjudged({**run, "policies": [POLICY]})
    ]
    return [*notes, *lines, *(note for ablation in others for note in ablation.notes)]


def limits(seeds: str, others: list[AblatedRun]) -> list[str]:
    """How far the conclusions reach."""
    own = {x.name: [s for s in SHARED_STAGES if s not in taken_stages(x.name)] for x in others}
    return [
        "A switch matters where the 95% t interval over seeds leaves out 0, or where Fisher's exact"
        " test on the seeds that failed has p < 0.05, and where one of the two still does after"
        " Holm's correction for all switches of the page (of twice the smaller p-value). It does"
        " not matter where two one-sided tests at 5%, each by itself, show that the difference lies"
        f" {WITHIN} (the 90% interval over seeds). Else it is inconclusive; fewer than {FEWEST}"
        " seeds get no verdict.",
        "It shows what one switch does to this run with everything else at its setting, over"
        f" {seeds}. It shows no interaction of switches, and nothing about other learning rates,"
        " models or data.",
        *(
            f"{name} makes {' and '.join(stages)} itself. So, unlike those of other switches, its"
            " differences also hold what training another reward model changes by chance."
            for name, stages in own.items()
            if stages
        ),
    ]


def learning_table(groups: Mapping[str, Sequence[Record]]) -> Table:
    """A row a group: how soon the score rose, and how much of the returns the critic explained.

    `groups`: name -> its runs, the default first; another may be empty.
    """
    rows: list[list[object]] = []
    updates = {x: {run.seed: gained.update_of_gain(run) for run in groups[x]} for x in groups}
    for name, runs in groups.items():
        known = {seed: n for seed, n in updates[name].items() if n is not None}
        later = [n - was for seed, n in known.items() if (was := updates[DEFAULT].get(seed))]
        from_default = MISSING if name == DEFAULT else seeds_mean(later, SIGNED)
        critics = [critic for critic in map(explained_by_critic, runs) if critic]
        first, last = ([critic[key] for critic in critics] for key in ("first", "last"))
        means = [number(fmean(each)) if each else MISSING for each in (first, last)]
        below = f"{sum(x['below'] for x in critics)} of {sum(x['updates'] for x in critics)}"
        pace = seeds_mean([*known.values()], partial(Number, digits=1))
        rows.append([name, pace, from_default, *means, below if critics else MISSING])
    caption = (
        f"Pace: the update that ends the first {gained.SMOOTHED} whose mean score holds"
        f" {gained.GAIN:.0%} of the run's gain, from the first update to the mean of the last"
        " fifth. The critic: explained variance of the returns (1: all, below 0: less than a"
        " constant), without updates in which the critic learned alone. Means over seeds."
    )
    header = ("switch", "pace, updates", "from default", "critic at first", "at last", "below 0")
    return Table(header, rows, caption)


if __name__ == "__main__":
    main()
