"""What betrays a known error that was planted in a run, over seeds.

    python -m reports.planted_page --name tiny --errors runs/tiny/planted-errors.json

takes the finished seeds of run `tiny` and of runs `tiny-planted-<error>`, and writes
runs/reports/planted-tiny.md and .html. The file says in plain words what each error is, and in
which stage it begins. `make planted` makes the runs and the file, and calls this.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.rates.formulas import p_of_seeds
from reports.parts import page
from reports.parts.ablated import POLICY
from reports.parts.collect import MEMORY_KNOBS, Record, differing_settings, find_runs, numbers_of
from reports.parts.page import Block, Heading, Table, Text
from reports.parts.paired import Entry, Paired, beside, picture
from reports.parts.run_report import stem_about, write_about_runs
from reports.parts.sentences import against, distrust, lead, notes_of_runs
from reports.parts.verdicts import after_holm
from reports.parts.watched import Betrayal, betrayals, false_alarms, rule
from reports.parts.words import MISSING, bounds_in_points, seeds_of
from stages.running.files import file_hash, read_record
from stages.settings import config as settings
from stages.settings.checks import UserError
from stages.settings.stages import STAGES

PLACE = re.compile(r"(step|update) \d+")  # where a check's words begin with it
REFUSED = "refused.json"  # of a run, beside its stages: the words of the check that stopped it


@dataclass(frozen=True, kw_only=True)
class PlantedRun:
    """The seeds with one error, beside those of the default run."""

    name: str
    what: str
    stage: str
    pair: Paired | None
    """None if no seed has finished."""
    refused: dict[int, str]
    """Seed -> what a check said that would have stopped it; `make planted` lets it go on."""
    betrayals: list[Betrayal]
    """The earliest first."""
    notes: list[str]

    @property
    def seeds(self) -> set[int]:
        """Those that ran to their end, or that a check refused."""
        return {*self.refused} | ({run.seed for run in self.pair.runs} if self.pair else set())

    @property
    def by_win_rate(self) -> bool:
        """Whether its win rate is reliably below the default's: a rate that rises warns nobody."""
        bounds = self.pair.over_seeds if self.pair else None
        return bounds is not None and bounds[1] < 0

    @property
    def is_found(self) -> bool:
        """Whether a check or the win rate finds it."""
        return bool(self.refused) or self.by_win_rate

    @property
    def verdict(self) -> str:
        """What finds it."""
        if self.refused:
            seeds, refused = len(self.seeds), len(self.refused)
            part = f" in {refused} of {seeds} seeds" if refused < seeds else ""
            places = [PLACE.match(words) for words in self.refused.values()]
            told = dict.fromkeys(place[0] for place in places if place)
            return f"refused by a check{part}" + (f", {' or '.join(told)}" if told else "")
        if self.by_win_rate:
            return "found by the win rate"
        if self.betrayals:
            first = self.betrayals[0]
            return f"betrayed by {first.signal.name} {first.when}"
        return "not found"


def main(argv: list[str] | None = None) -> None:
    """Write the page and print its lines."""
    parser = page.arguments("what betrays planted errors, over seeds")
    parser.add_argument("--name", required=True, help="the run without an error")
    parser.add_argument("--errors", required=True, help="JSON: name -> stage and what it is")
    page.print_page(lambda args: write_page(args.name, Path(args.errors), args.judge), parser, argv)


def write_page(name: str, errors: Path, judge: str) -> str:
    """Write the page; its lines for the terminal."""
    default, planted, left_out = collect(name, read_record(errors) or {}, judge)
    made = blocks(default, planted, left_out)
    records = [*default, *finished(planted)]
    title = f"Known errors, planted in run {name}"
    stem = stem_about("planted", [name])
    path = write_about_runs(stem, title, made, [name], records, behind(default[0], planted))
    return page.for_terminal([summary(planted), *map(sentence, planted)], path)


def finished(planted: Sequence[PlantedRun]) -> list[Record]:
    """The seeds with an error."""
    return [run for wrong in planted if wrong.pair for run in wrong.pair.runs]


def behind(run: Record, planted: Sequence[PlantedRun]) -> dict[str, Any]:
    """What the page rests on beside the stages of runs that finished, and what makes it again."""
    files = [
        f"{run.name}-planted-{wrong.name}/seed{seed}/{REFUSED}"
        for wrong in planted
        for seed in wrong.refused
    ]
    return {
        "command": f"make planted PRESET={run.preset} NAME={run.name}",
        "refusals": {name: file_hash(settings.RUNS / name) for name in files},
    }


# -- what the runs on disk show --------------------------------------------------------------------


def collect(
    name: str, errors: Mapping[str, Mapping[str, str]], judge: str = ""
) -> tuple[list[Record], list[PlantedRun], list[str]]:
    """The default's seeds, the errors beside them, and a line on each seed that is left out.

    Raises UserError if the default has not finished, or if no error was tried.
    """
    default, left_out = find_runs(name, judge)
    planted = []
    for error, about in errors.items():
        refused = refusals(f"{name}-planted-{error}")
        try:
            runs, lines = find_runs(f"{name}-planted-{error}", judge)
        except UserError as problem:
            runs, lines = [], [] if refused else [f"{error} is left out: {problem}."]
        stopped = tuple(f"{name}-planted-{error} seed{seed} is left out" for seed in refused)
        left_out += [line for line in lines if not line.startswith(stopped)] if stopped else lines
        seeds = {run.seed for run in default}
        runs = [run for run in runs if run.seed in seeds]
        if runs or refused:
            planted.append(planted_run((error, about), name, runs, refused, default))
    if not planted:
        raise UserError(f"no error has a finished run: run make planted. {' '.join(left_out)}")
    return default, planted, left_out


def refusals(run: str) -> dict[int, str]:
    """What checks said of the seeds of a run that they would have stopped."""
    told = {}
    for path in sorted((settings.RUNS / run).glob(f"seed*/{REFUSED}")):
        record = read_record(path) or {}
        told[int(path.parent.name.removeprefix("seed"))] = str(record["message"])
    return told


def planted_run(
    error: tuple[str, Mapping[str, str]],
    base: str,
    runs: list[Record],
    refused: dict[int, str],
    default: list[Record],
) -> PlantedRun:
    """The seeds with one error, named and described, beside the default's."""
    name, about = error
    entry = Entry(name=f"{base}-planted-{name}", policy=POLICY, runs=runs)
    first = Entry(name=base, policy=POLICY, runs=default)
    by_seed = {run.seed: run for run in default}
    return PlantedRun(
        name=name,
        what=about["what"],
        stage=about["stage"],
        pair=beside(entry, first) if runs else None,
        refused=refused,
        betrayals=betrayals(runs, default) if runs else [],
        notes=[note for run in runs for note in oddities(name, about, run, by_seed[run.seed])],
    )


def oddities(error: str, about: Mapping[str, str], run: Record, default: Record) -> list[str]:
    """What a run differs in from the default, apart from the error."""
    differing = differing_settings([default, run], free=MEMORY_KNOBS)
    notes = [f"{error}, seed {run.seed}, has other settings: {', '.join(differing)}."]
    notes = notes if differing else []
    before = list(STAGES)[: list(STAGES).index(about["stage"])]
    other = [
        stage
        for stage, manifest in run.manifests.items()
        if stage in before and manifest["content"] != default.manifests[stage]["content"]
    ]
    if other:
        notes.append(f"{error}, seed {run.seed}: stage {other[0]} is not the default's.")
    return notes


# -- the page --------------------------------------------------------------------------------------


def blocks(
    default: list[Record], planted: list[PlantedRun], left_out: Sequence[str]
) -> list[Block]:
    """The page: the count, a row an error, checks' words, the rule, what it does not show."""
    rows = [numbers_of(run) for run in (*default, *finished(planted))]
    own = rows[: len(default)]  # an error may mean to break the critic
    notes = [*notes_of_runs(rows, own), *left_out]
    notes += [note for wrong in planted for note in wrong.notes]
    each = {wrong.name: wrong.pair.each if wrong.pair else [] for wrong in planted}
    stopped = [Heading("What checks said"), refusals_table(planted)]
    seeds = seeds_of(max(len(wrong.seeds) for wrong in planted))
    seen = [[wrong.name, *_betrayal_cells(seen)] for wrong in planted for seen in wrong.betrayals]
    header = ("error", "number", "seen", "value", "default's")
    return [
        lead(summary(planted), distrust(rows, seeds)),
        errors_table(planted),
        *picture("errors", "error - default", each),
        *against([whose(default), *notes]),
        *(stopped if any(wrong.refused for wrong in planted) else []),
        Heading("Every number that betrays"),
        Table(header, seen or [[MISSING] * len(header)]),
        Heading("The rule"),
        *(Text(text) for text in (COLUMNS, rule(), alarms(default, planted))),
        Heading("What this does and does not show"),
        Text(limits(default[0].name, seeds)),
    ]


def summary(planted: Sequence[PlantedRun]) -> str:
    """How many errors are found, how many only a number betrays, and which nothing finds."""
    seen = [wrong.name for wrong in planted if not wrong.is_found and wrong.betrayals]
    lost = [wrong.name for wrong in planted if not wrong.is_found and not wrong.betrayals]
    count = sum(wrong.is_found for wrong in planted)
    told = f"{count} of {len(planted)} {'is' if count == 1 else 'are'} found by the win rate or"
    told += " refused by a check"
    told += f"; betrayed by a number alone: {', '.join(seen)}" if seen else ""
    told += f"; not found: {', '.join(lost)}." if lost else "."
    if all(wrong.pair for wrong in planted):
        costly = [wrong.name for wrong in planted if wrong.by_win_rate]
        each = {wrong.name: p_of_seeds(wrong.pair.each) for wrong in planted if wrong.pair}
        some = f"{len(costly)} of {len(planted)}"
        told += f" With no check in the way {some} lower{'s' * (len(costly) == 1)} the win rate"
        told += " reliably."
        told = " ".join(filter(None, (told, after_holm(each, costly, "errors"))))
    return told


def sentence(wrong: PlantedRun) -> str:
    """One error in a sentence."""
    cells = win_rate_cells(wrong)
    rate = f" ({cells[0]} points of win rate, over seeds {cells[1]})" if wrong.pair else ""
    return f"{wrong.name}: {wrong.verdict}{rate}."


def whose(default: Sequence[Record]) -> str:
    """Whose runs these are."""
    run, seeds = default[0], ", ".join(str(record.seed) for record in default)
    return f"Run {run.name}, preset {run.preset}, seeds {seeds}."


def win_rate_cells(wrong: PlantedRun) -> list[str]:
    """The difference in win rate, its interval over seeds, and each seed's, in points."""
    if wrong.pair is None or not wrong.pair.each:
        return [MISSING] * 3
    each = ", ".join(f"{100 * value:+.1f}" for value in wrong.pair.each)
    mean = f"{100 * fmean(wrong.pair.each):+.1f}"
    return [mean, bounds_in_points(wrong.pair.over_seeds), each]


COLUMNS = (
    "In: the first stage that the error changes. Over seeds: Student's t interval; none for one"
    " seed, or where all seeds give one number. First number: the earliest of those that leave the"
    " default's range, its mean over seeds there, and the default's."
)


def errors_table(planted: Sequence[PlantedRun]) -> Table:
    """A row an error."""
    header = ("error", "what it is", "in", "verdict", "win rate", "over seeds", "each seed")
    rows = []
    for wrong in planted:
        first = MISSING
        if wrong.betrayals:
            name, when, value, usual = _betrayal_cells(wrong.betrayals[0])
            first = f"{name} {when}: {value}, default's {usual}"
        cells = [wrong.name, wrong.what, wrong.stage, wrong.verdict, *win_rate_cells(wrong)]
        rows.append([*cells, first])
    caption = (
        "Win rate: PPO's - the default run's, in points, paired over seeds, with no check in the"
        " way; a dash: not run to its end."
    )
    return Table((*header, "first number"), rows, caption, strong=True)


def _betrayal_cells(seen: Betrayal) -> list[str]:
    form = seen.signal.form
    return [seen.signal.name, seen.when, form(seen.value), form(seen.default)]


def refusals_table(planted: Sequence[PlantedRun]) -> Table:
    """The words of checks."""
    rows = [
        [wrong.name, str(seed), message]
        for wrong in planted
        for seed, message in wrong.refused.items()
    ]
    return Table(("error", "seed", "what the check said"), rows)


def alarms(default: Sequence[Record], planted: Sequence[PlantedRun]) -> str:
    """How often the rule raises a false alarm, as far as the default's seeds tell."""
    seeds = len(default)
    if seeds < 3:
        return "Too few seeds without an error to say how often the rule raises a false alarm."
    tested = (wrong.pair.runs for wrong in planted if wrong.pair)
    held = min([seeds // 2, *map(len, tested)])  # the fewest seeds are accused the most easily
    tried = false_alarms(default, held)
    raised = [names for names in tried if names]
    named = ", ".join(dict.fromkeys(name for names in raised for name in names))
    return (
        f"False alarms: of the {len(tried)} ways to hold {held} of the default's {seeds} seeds"
        f" against the other {seeds - held}, as if with an error, {len(raised)} raise"
        f" one{f' ({named})' if named else ''}. The rule asks more, that every seed of an error"
        f" leaves the range of all {seeds}, on one side: it accuses an error that does no more than"
        f" another seed less often than this, as far as {seeds} seeds tell."
    )


def limits(name: str, seeds: str) -> str:
    """How far the page reaches."""
    return (
        f"It shows what a watcher of run {name} would have seen, over {seeds}, of"
        " errors planted one at a time. It shows nothing about other sizes, other errors"
        " or two at once. An error that nothing finds here may do harm elsewhere. Each error is"
        " tested by itself at 95%: among many errors one can stand out by chance. Where every error"
        " has a finished run, the first paragraph says how many remain after Holm's correction."
    )


if __name__ == "__main__":
    main()
