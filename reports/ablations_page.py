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
from typing import Any

from eval.rates.formulas import holm, mean_of_seeds, p_of_seeds
from reports.parts import gained, page, words
from reports.parts.ablated import POLICY, AblatedRun, SeedsOfRun, collect, taken_stages, there
from reports.parts.cells import MISSING, Number
from reports.parts.collect import Record
from reports.parts.page import Block, Heading, Table, Text
from reports.parts.paired import Entry, picture
from reports.parts.reached import GAIN, SMOOTHED, update_of_gain
from reports.parts.run_report import write_about_runs
from reports.parts.sentences import against, distrust, lead, notes_of_runs, unjudged
from reports.parts.verdicts import FEWEST, SURE, WITHIN, in_brief, remaining, sentence, summary
from reports.parts.words import Row, bounds_in_points, number, percent, seeds_mean
from reports.sections import critic
from stages.settings.presets import ABLATIONS, GROUPS, ablations_named
from stages.settings.stages import SHARED_STAGES

MEASURED: tuple[tuple[str, str, Callable[[float], Number]], ...] = (
    ("ppo/win_rate", "win rate", percent),
    ("kl", "KL, nats", partial(number, digits=2)),
    ("ppo/tokens", "tokens", partial(number, digits=1)),
    ("eos_rate", "EOS sampled", percent),
)
DEFAULT = "default"
# Of switches that are named on the first screen.
MOST_NAMES, MOST_FAILING, MOST_PACED = 6, 2, 3


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
    content = blocks(name, default, others, left_out)
    group = next((key for key, members in GROUPS.items() if set(names) <= set(members)), "")
    title = f"Ablations of run {name}" + (f": the {group}" if group else "")
    records, stem = compared(default, others), "-".join(["ablations", name, *filter(None, [group])])
    path = write_about_runs(stem, title, content, [name], records)
    return page.for_terminal([summary(others), *map(sentence, others)], path)


def compared(default: SeedsOfRun, others: list[AblatedRun]) -> list[Record]:
    """All runs that the page compares."""
    turned = (run for ablation in others if ablation.pair for run in ablation.pair.runs)
    return [*default.runs, *turned]


def by_switch(default: SeedsOfRun, others: list[AblatedRun]) -> dict[str, list[Record]]:
    """The runs of the default and of each switch; a switch may have none."""
    return {DEFAULT: default.runs} | {x.name: x.pair.runs if x.pair else [] for x in others}


def entries_of(default: SeedsOfRun, others: list[AblatedRun]) -> list[Entry]:
    """SFT's successors by switch, as `gained` reads them."""
    runs = by_switch(default, others)
    return [Entry(name=name, policy=POLICY, runs=each) for name, each in runs.items() if each]


# -- the page --------------------------------------------------------------------------------------


def blocks(
    name: str, default: SeedsOfRun, others: list[AblatedRun], left_out: Sequence[str]
) -> list[Block]:
    """The page: verdicts, means; folded, each seed and the switches; what it does not show."""
    rows = [*default.rows, *(run for ablation in others for run in ablation.rows)]
    most, fewest = len(default.runs), min(len(ablation.rows) for ablation in others)
    seeds = f"{fewest} to {most} seeds" if 0 < fewest < most else words.seeds_of(most)
    late = delays(default, others)
    return [
        lead(f"{answer(others)} {pace_told(late)}".rstrip(), distrust(rows, seeds)),
        means_table(default, others),
        *picture("switches", "switch - default", {x.name: x.each for x in others}),
        Heading("Each switch"),
        Text(columns(others)),
        *(Text(sentence(ablation)) for ablation in others),
        switches_table(others),
        *against([*caveats(default.rows, others), *left_out]),
        *gained.table(entries_of(default, others)),
        Heading("How fast PPO learns"),
        pace_table(default, others, late),
        Heading("The critic"),
        critic.table(by_switch(default, others)),
        Heading("Each seed"),
        seeds_table(default.rows, others),
        Heading("What this does and does not show"),
        *(Text(limit) for limit in limits(name, seeds, default, others)),
    ]


def answer(others: Sequence[AblatedRun]) -> str:
    """Which switches matter, also after Holm, and how many seeds failed; names of few."""
    failing = sorted((x for x in others if in_brief(x)), key=lambda x: -x.turned.failed)
    failed = (f"{x.name}: {in_brief(x)}." for x in failing[:MOST_FAILING])
    return " ".join(filter(None, [summary(others, MOST_NAMES), remaining(others), *failed]))


def switches_table(others: list[AblatedRun]) -> Table:
    """What each switch is and which setting it turns."""
    switches = {ablation.name: ABLATIONS[ablation.name] for ablation in others}
    rows = [[name, switch.settings, switch.what] for name, switch in switches.items()]
    return Table(("switch", "setting", "what it does; details as the paper numbers them"), rows)


def means_table(default: SeedsOfRun, others: list[AblatedRun]) -> Table:
    """A row a switch: the difference in win rate, failures, and means with intervals over seeds."""
    titles = [title for _, title, _ in MEASURED]
    header = ["switch", "from default", "over seeds", "over posts", "failed", "changed", *titles]
    rows = [[DEFAULT, *[MISSING] * 3, _failed(default), MISSING, *_means(default.rows)]]
    for ablation in others:
        pair, cells, changed = ablation.pair, [MISSING] * 3, "none" if ablation.pair else MISSING
        if pair and ablation.changed and pair.together:
            cells = [
                Number(100 * fmean(pair.each), 1, signed=True),
                bounds_in_points(pair.over_seeds),
                bounds_in_points((pair.together.low, pair.together.high)),
            ]
            changed = percent(ablation.changed / pair.written)
        means = _means(ablation.rows)
        rows.append([ablation.name, *cells, _failed(ablation.turned), changed, *means])
    caption = (
        "Points of win rate from the default (this run with no switch turned), means over seeds,"
        " 95% intervals in brackets."
    )
    return Table(header, rows, caption, strong=True)


def columns(others: Sequence[AblatedRun]) -> str:
    """What the columns of the first table mean."""
    own = [ablation.name for ablation in others if own_stages(ablation)]
    but_for = f" ({', '.join(own)}: a reward model of its own)" if own else ""
    return (
        "In brackets 95% intervals (Student's t over the seeds; shares cut at 0 and 100%), none"
        " where all seeds give one number. From default: points of win rate, on the same posts and"
        f" from the same SFT and reward model{but_for}; its interval over seeds, and over posts"
        " with the seeds held fixed. Failed: seeds whose PPO ended in an error or is not above its"
        " own SFT by the interval over posts. Changed: held-out summaries that are not the"
        " default's, word for word. EOS sampled, and KL: in the last 5% of PPO's updates."
    )


def _failed(seeds: SeedsOfRun) -> object:
    return f"{seeds.failed} of {seeds.tried}" if seeds.tried else MISSING


def pace_table(
    default: SeedsOfRun, others: list[AblatedRun], late: Mapping[str, list[float]]
) -> Table:
    """A row a switch: at which update a run's gain in reward is there, and how much later."""
    form = partial(number, digits=1)

    def row(name: str, runs: Sequence[Record], later: Sequence[float]) -> list[object]:
        own = paces(runs)
        mean = Number(fmean(later), 1, signed=True) if later else MISSING
        counted = f"{len(own)} of {len(runs)}"
        return [name, counted, seeds_mean([*own.values()], form), mean, _bounds(later)]

    pairs = {x.name: x.pair.runs if x.pair else [] for x in others}
    rows = [row(DEFAULT, default.runs, [])]
    rows += [row(name, runs, late[name]) for name, runs in pairs.items()]
    caption = (
        f"The update that ends the first {SMOOTHED} whose mean reward has {GAIN:.0%} of the run's"
        " own gain, from the first update to the mean of the last fifth, counted from the policy's"
        " first update on: those of the critic alone do not count. Seeds: where there is one,"
        " because the reward rose. Means over these with 95% intervals, which are not corrected;"
        " from default: on the seeds of both, above 0 is slower. The first paragraph names the"
        " switches whose difference remains after Holm's correction for all switches."
    )
    head = ["switch", "seeds", "update", "from default", "over seeds"]
    return Table(head, rows, caption, name="pace")


def paces(runs: Sequence[Record]) -> dict[int, int]:
    """The policy's update at which each seed's gain in reward is there, without seeds that gained
    none. Updates of the critic alone do not count: without them a run would be faster by them.
    """
    reached = {run.seed: (run, update_of_gain(run.rows(POLICY))) for run in runs}
    return {
        seed: update - run.settings[POLICY]["critic_updates"]
        for seed, (run, update) in reached.items()
        if update is not None
    }


def delays(default: SeedsOfRun, others: Sequence[AblatedRun]) -> dict[str, list[float]]:
    """Switch -> how many updates later than in the default each seed's gain is there."""
    before = paces(default.runs)
    owns = {x.name: paces(x.pair.runs if x.pair else []) for x in others}
    return {
        name: [float(own[seed] - before[seed]) for seed in own if seed in before]
        for name, own in owns.items()
    }


def pace_told(late: Mapping[str, list[float]]) -> str:
    """With which switches PPO learns slower or faster; may be empty.

    By the t test over seeds after Holm's correction for all switches with FEWEST seeds or more. Of
    more than MOST_PACED names on a side only their number is told.
    """
    tested = {name: later for name, later in late.items() if len(later) >= FEWEST}
    corrected = holm([p_of_seeds(later) for later in tested.values()])
    clear = [name for name, p in zip(tested, corrected, strict=True) if p < SURE]
    slower = [name for name in clear if fmean(tested[name]) > 0]
    faster = [name for name in clear if name not in slower]
    few = {
        how: ", ".join(names) if len(names) <= MOST_PACED else f"{len(names)} switches"
        for how, names in (("slower", slower), ("faster", faster))
        if names
    }
    paced = [f"{how} with {names}" for how, names in few.items()]
    corrected_for = " (after Holm's correction)" if len(tested) > 1 else ""
    return f"PPO learns {'; '.join(paced)}{corrected_for}." if paced else ""


def _bounds(values: Sequence[float]) -> Number:
    low, high = mean_of_seeds(values) or (None, None)
    return Number(None, 1, low=low, high=high, signed=True)


def _means(rows: list[Row]) -> list[Number]:
    cells = []
    for key, _, form in MEASURED:
        cell = seeds_mean([row[key] for row in rows], form)
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
    return Table(header, rows, "In brackets: 95% intervals over the posts.")


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


def limits(name: str, seeds: str, default: SeedsOfRun, others: list[AblatedRun]) -> list[str]:
    """How far the conclusions reach."""
    rows = default.rows
    sentences = [
        "A switch matters where the 95% t interval over seeds leaves out 0, or where Fisher's exact"
        " test on the seeds that failed has p < 0.05. It does not matter where two one-sided tests"
        f" at 5% show that the difference lies {WITHIN} (the 90% interval over seeds). Else it is"
        f" inconclusive; fewer than {FEWEST} seeds get no verdict. Each switch is judged by itself:"
        " the more of them, the likelier that one stands out by chance. Where one matters, the"
        " first paragraph says whether it still does after Holm's correction (twice the smaller"
        " p-value of the two tests).",
        "It shows what one switch does to this run with everything else at its setting, over"
        f" {seeds}. It shows no interaction of switches, and nothing about other"
        " learning rates.",
        eos_limit(default),
        *(own_limit(default, ablation) for ablation in others if own_stages(ablation)),
    ]
    names = {ablation.name for ablation in others}
    if "no-normalization" in names and shift_cancels(default.runs[0].settings[POLICY]):
        sentences.append(
            "Without reward normalization (no-normalization) one constant is added to every score"
            " and, as the critic starts as the reward model, to every value. With gamma 1 it"
            " cancels in each TD error, reward + next value - value: within a summary next value"
            " and value both carry it, at the end score and value. So it can matter only where EOS"
            " is missing and a fixed number takes the score's place."
        )
    if not all(run["pretrained"] and run["real_posts"] for run in rows):
        sentences.append(
            f"Run {name} is not a language model on real posts: that a detail makes no"
            " difference here does not say that it makes none at the paper's sizes, nor the"
            " other way round."
        )
    return sentences


def own_stages(ablation: AblatedRun) -> list[str]:
    """The stages before PPO that the runs of an ablation make themselves; none for PPO's own."""
    taken = taken_stages(ablation.name)
    return [stage for stage in SHARED_STAGES if stage not in taken]


def own_limit(default: SeedsOfRun, ablation: AblatedRun) -> str:
    """What a switch that begins before PPO shares with the default, and what it does not."""
    own, taken = (" and ".join(x) for x in (own_stages(ablation), taken_stages(ablation.name)))
    sharing = (
        f"{ablation.name} shares {taken} with the default and makes {own} itself. So, unlike those"
        " of other switches, its differences also hold what training another reward model changes"
        " by chance."
    )
    if not ablation.rows:
        return sharing
    seeds = {row["seed"] for row in ablation.rows}
    both = ablation.rows, [row for row in default.rows if row["seed"] in seeds]
    accuracy, default_accuracy = (percent(fmean(row["accuracy"] for row in rows)) for rows in both)
    return (
        f"{sharing} Its reward models rank {accuracy} of held-out pairs right, the default's"
        f" {default_accuracy}."
    )


def eos_limit(default: SeedsOfRun) -> str:
    """How often EOS was missing at all; the EOS trick acts on no other summary."""
    policies = ("sft", POLICY)
    sft, ppo = (fmean(run[f"{policy}/eos_rate"] for run in default.rows) for policy in policies)
    updates = [update for record in default.runs for update in record.rows(POLICY)]
    learned = [update["policy/eos_rate"] for update in updates]
    return (
        "A missing EOS can only matter where it is missing: of the default's summaries while it"
        f" learned, at least {percent(min(learned))} of every update's end with EOS; of the"
        f" held-out posts', {percent(sft)} by SFT and {percent(ppo)} by PPO."
    )


def shift_cancels(ppo: dict[str, Any]) -> bool:
    """Whether a constant added to all scores and all of the critic's values changes no advantage.

    Nothing may discount, or scale rewards that now have another mean.
    """
    same_start = ppo["critic_init"] == "reward_model" and ppo["gamma"] == 1
    return same_start and not ppo["whiten_rewards"]


if __name__ == "__main__":
    main()
