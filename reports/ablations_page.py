"""One switch at a time: what each ablation does to a run, over seeds.

    python -m reports.ablations_page --name tiny --ablations critic-sft dropout

takes the finished seeds of run `tiny` and of runs `tiny-critic-sft`, ... and writes
runs/reports/ablations-tiny.md and .html. An ablation is compared with the run on the same
posts and from the same SFT and reward model, seed by seed. The page shows apart how far posts and
how far seeds could move a difference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean
from typing import Any

from reports.parts import page, words
from reports.parts.collect import MEMORY_KNOBS, Record, differing_settings, find_runs, numbers_of
from reports.parts.page import Block, Heading, Note, Table, Text
from reports.parts.paired import Entry, Paired, beside, over_seeds
from reports.parts.run_report import write_about_runs
from reports.parts.sentences import critic_note, not_judged_alike, notes_of_judges, unjudged
from reports.parts.words import MISSING, Row, bounds_in_points, number, percent, whole
from stages.settings.checks import UserError
from stages.settings.command_line import override_of
from stages.settings.config import SECTIONS
from stages.settings.presets import ABLATIONS, settings_of_ablation
from stages.settings.stages import SHARED_STAGES

POLICY = "ppo"  # what the switches turn
MEASURED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("ppo/win_rate", "win rate", percent),
    ("kl", "KL, nats", partial(number, digits=2)),
    ("ppo/tokens", "tokens", partial(number, digits=1)),
    ("eos_rate", "EOS sampled", percent),
)
DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class AblatedRun:
    """One ablation beside the default run, on the seeds of both."""

    name: str
    pair: Paired
    notes: list[str]
    """What differs from the default run, apart from the one switch."""

    @cached_property
    def rows(self) -> list[Row]:
        """Numbers by seed."""
        return [numbers(run) for run in self.pair.runs]

    @property
    def changed(self) -> int:
        """Held-out summaries that differ from the default run's, in all seeds."""
        return self.pair.written - self.pair.alike


def main(argv: list[str] | None = None) -> None:
    """Write the page and print its lines."""
    parser = page.arguments("what each switch does, over seeds")
    parser.add_argument("--name", required=True, help="the run that ablations are compared with")
    parser.add_argument("--ablations", nargs="*", default=list(ABLATIONS))
    page.print_page(lambda args: write_page(args.name, args.ablations, args.judge), parser, argv)


def write_page(name: str, ablations: Sequence[str], judge: str = "") -> str:
    """Write the page; its lines for the terminal."""
    default, others, left_out = collect(name, ablations, judge)
    records = [*default, *(run for ablation in others for run in ablation.pair.runs)]
    made = blocks(name, default, others, left_out)
    title = f"Ablations of run {name}"
    path = write_about_runs(f"ablations-{name}", title, made, [name], records)
    return page.for_terminal([summary(others), *map(conclusion, others)], path)


# -- what the runs on disk show --------------------------------------------------------------------


def collect(
    base: str, names: Sequence[str], judge: str = ""
) -> tuple[list[Record], list[AblatedRun], list[str]]:
    """The default runs, the ablations beside them, and a line on each seed that is left out.

    `judge`: the folder of one judge, if several have judged the runs.
    Raises UserError if a name is unknown, or if no seed of a run can be compared.
    """
    if not names:
        raise UserError(f"no ablation is named: known are {', '.join(ABLATIONS)}")
    for name in names:
        settings_of_ablation(name)  # an unknown name is refused
    default, left_out = rated_runs(base, judge)
    if not default:
        raise UserError(f"no seed of {base} has a win rate: {' '.join(left_out)}")
    others = []
    for name in names:
        runs, out = rated_runs(f"{base}-{name}", judge)
        left_out += out
        if runs:
            others.append(ablation_of(name, base, default, runs))
    if not others:
        raise UserError(f"no seed of an ablation has a win rate: {' '.join(left_out)}")
    return default, others, left_out


def rated_runs(name: str, judge: str = "") -> tuple[list[Record], list[str]]:
    """The finished seeds of a run whose win rate may be given, and a line on each other seed."""
    runs, left_out = find_runs(name, judge)
    unrated = [run for run in runs if numbers(run)["ppo/win_rate"] is None]
    left_out += [
        f"{name} seed{run.seed} is left out: too many of its posts have no verdict."
        for run in unrated
    ]
    return [run for run in runs if run not in unrated], left_out


def ablation_of(name: str, base: str, default: list[Record], runs: list[Record]) -> AblatedRun:
    """An ablation beside the default run, on the seeds of both. Raises UserError without one."""
    by_seed = {run.seed: run for run in default}
    shared = [run for run in runs if run.seed in by_seed]
    if not shared:
        raise UserError(
            f"ablation {name} has no seed in common with the default run: run make ablations"
        )
    pair = beside(
        Entry(name=f"{base}-{name}", policy=POLICY, runs=shared),
        Entry(name=base, policy=POLICY, runs=default),
    )
    notes = [note for run in shared for note in oddities(name, run, by_seed[run.seed])]
    return AblatedRun(name=name, pair=pair, notes=notes)


def numbers(record: Record) -> Row:
    """One run's row, with what ablations look at beside it."""
    ppo = record.results(POLICY)
    return numbers_of(record) | {"eos_rate": ppo["policy/eos_rate"], "kl": ppo["objective/kl_k1"]}


def oddities(name: str, run: Record, default: Record) -> list[str]:
    """What a run differs in from the default, apart from this one switch."""
    wanted = switched(name)
    differing = differing_settings([default, run], free=MEMORY_KNOBS)
    wrong = [key for key in differing if key not in wanted]
    wrong += [key for key, value in wanted.items() if _value(run, key) != value]
    notes = []
    if wrong:
        values = ", ".join(f"{key} ({words.shown(key, _value(run, key))})" for key in wrong)
        notes.append(
            f"{name}, seed {run.seed}, is not the default with this switch alone: {values}."
        )
    inputs = [
        {stage: record.manifests[POLICY]["inputs"].get(stage) for stage in SHARED_STAGES}
        for record in (default, run)
    ]
    if inputs[0] != inputs[1]:
        notes.append(f"{name}, seed {run.seed}: its SFT or reward model is not the default's.")
    return notes


def _value(run: Record, key: str) -> Any:
    section, field = key.split(".")
    return run.settings[section].get(field)


def switched(name: str) -> dict[str, Any]:
    """The settings that an ablation changes, `section.field` -> value."""
    overrides: dict[str, dict[str, Any]] = {}
    for override in ABLATIONS[name].settings.split():
        section, field, value = override_of(override)
        overrides.setdefault(section, {})[field] = value
    changed: dict[str, Any] = {}
    for section, values in overrides.items():
        made: Any = SECTIONS[section]
        plain, turned = made(), made(**values)
        changed |= {
            f"{section}.{field}": value
            for field, value in vars(turned).items()
            if value != getattr(plain, field)
        }
    return changed


# -- the page --------------------------------------------------------------------------------------


def blocks(
    name: str, default: list[Record], others: list[AblatedRun], left_out: Sequence[str]
) -> list[Block]:
    """The page: conclusions, means, each seed, the switches, what it does and does not show."""
    rows = [numbers(record) for record in default]
    return [
        Text(summary(others), lead=True),
        *(Text(conclusion(ablation)) for ablation in others),
        *(Note(note) for note in (*caveats(rows, others), *left_out)),
        Heading("Means over seeds"),
        means_table(rows, others),
        Heading("Each seed"),
        seeds_table(rows, others),
        Heading("The switches"),
        switches_table(others),
        Heading("What this does and does not show"),
        *(Text(limit) for limit in limits(name, default, others)),
    ]


def summary(others: list[AblatedRun]) -> str:
    """How many switches make a difference that seeds cannot explain, and which change nothing."""
    clear = [ablation.name for ablation in others if ablation.pair.is_clear]
    if clear:
        told = f"{len(clear)} of {len(others)} switches moved the win rate by more than seeds could"
        told += f" explain: {', '.join(clear)}."
    elif all(len(ablation.pair.each) == 1 for ablation in others):
        told = f"One seed only: whether a switch matters ({len(others)} were tried) is not known."
    else:
        told = f"No switch of {len(others)} moved the win rate by more than seeds could explain."
    same = [ablation.name for ablation in others if not ablation.changed]
    return f"{told} No summary at all was changed by {' or '.join(same)}." if same else told


def conclusion(ablation: AblatedRun) -> str:
    """One ablation in a sentence."""
    pair = ablation.pair
    if not ablation.changed:
        return (
            f"{ablation.name}: changed no summary; all {whole(pair.written)} are the default's,"
            " word for word."
        )
    if not pair.each:
        return f"{ablation.name}: too many posts have no verdict for a difference."
    each = ", ".join(f"{100 * value:+.1f}" for value in pair.each)
    told = f"{ablation.name}: {100 * fmean(pair.each):+.1f} points of win rate (seeds: {each})"
    if len(pair.each) == 1:
        return f"{told}; one seed only, which says nothing about seeds."
    doubt = "more than seeds could explain" if pair.is_clear else "no difference is established"
    return f"{told}; {doubt}."


def switches_table(others: list[AblatedRun]) -> Table:
    """What each switch is and which setting it turns."""
    switches = {ablation.name: ABLATIONS[ablation.name] for ablation in others}
    rows = [[name, switch.settings, switch.what] for name, switch in switches.items()]
    return Table(("switch", "setting", "what it does; details as the paper numbers them"), rows)


def means_table(default: list[Row], others: list[AblatedRun]) -> Table:
    """A row a switch: means with 95% intervals over seeds, and the difference in win rate."""
    titles = [title for _, title, _ in MEASURED]
    header = ["switch", "from default", "over posts", "over seeds", "changed", *titles]
    rows = [[DEFAULT, *[MISSING] * 4, *_means(default)]]
    for ablation in others:
        pair, cells = ablation.pair, [*[MISSING] * 3, "none"]
        if ablation.changed and pair.together:
            cells = [
                f"{100 * fmean(pair.each):+.1f}",
                bounds_in_points((pair.together.low, pair.together.high)),
                bounds_in_points(pair.over_seeds),
                percent(ablation.changed / pair.written),
            ]
        rows.append([ablation.name, *cells, *_means(ablation.rows)])
    caption = (
        "Means over seeds; in brackets 95% intervals (Student's t over the seeds; wide, for there"
        " are few; shares cut at 0 and 100%), none where all seeds give one number: that is no"
        " sign of precision. EOS sampled: responses that ended in the last 5% of PPO's updates, at"
        " least one; KL is of these too. Changed: held-out summaries that are not the default's,"
        " word for word. From default: difference in points of win rate, on the same posts and from"
        " the same SFT and reward model; its interval over posts with the seeds held fixed, and"
        " over seeds."
    )
    return Table(header, rows, caption, strong=True)


def _means(rows: list[Row]) -> list[str]:
    cells = []
    for key, _, form in MEASURED:
        values = [row[key] for row in rows]
        seeds, mean = over_seeds(values), form(fmean(values))
        if seeds and form is percent:  # a share
            seeds = max(0.0, seeds[0]), min(1.0, seeds[1])
        cells.append(f"{mean} [{form(seeds[0])}, {form(seeds[1])}]" if seeds else mean)
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
    critic = critic_note(rows)
    notes = [*notes_of_judges(rows), *not_judged_alike(rows), *([critic] if critic else [])]
    seeds = {run["seed"] for run in default}
    for ablation in others:
        lacking = sorted(seeds - {run["seed"] for run in ablation.rows})
        if lacking:
            names = ", ".join(map(str, lacking))
            notes.append(f"{ablation.name} lacks seed {names}, which the default has.")
    lines = [
        f"{run['name']} seed {run['seed']}: {line}"
        for run in rows
        for line in unjudged({**run, "policies": [POLICY]})
    ]
    return [*notes, *lines, *(note for ablation in others for note in ablation.notes)]


def limits(name: str, default: list[Record], others: list[AblatedRun]) -> list[str]:
    """How far the conclusions reach."""
    rows = [numbers(record) for record in default]
    sentences = [
        "It shows what one switch does to this run with everything else at its setting, over"
        f" {len(default)} seeds. It shows no interaction of switches, nothing about other learning"
        " rates, and no difference smaller than its intervals. Each switch is judged by itself at"
        " 95%: the more of them, the likelier that one stands out by chance.",
        eos_limit(default, rows),
    ]
    names = {ablation.name for ablation in others}
    if "no-normalization" in names and shift_cancels(default[0].settings[POLICY]):
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


def eos_limit(default: list[Record], rows: list[Row]) -> str:
    """How often EOS was missing at all; the EOS trick acts on no other summary."""
    sft, ppo = (fmean(run[f"{policy}/eos_rate"] for run in rows) for policy in ("sft", POLICY))
    learned = [update["policy/eos_rate"] for record in default for update in record.rows(POLICY)]
    return (
        "A missing EOS can only matter where it is missing: of the default's summaries while it"
        f" learned, at least {percent(min(learned))} of every update's end with EOS; of the"
        f" held-out posts', {percent(sft)} by SFT and {percent(ppo)} by PPO."
    )


def shift_cancels(ppo: dict[str, Any]) -> bool:
    """Whether a constant added to all scores and all of the critic's values changes no advantage.

    The score must stand where the critic has a value of the same text, and nothing may scale
    rewards that now have another mean.
    """
    same_start = ppo["critic_init"] == "reward_model" and ppo["gamma"] == 1
    return same_start and ppo["score_at"] == "after_eos" and not ppo["whiten_rewards"]


if __name__ == "__main__":
    main()
