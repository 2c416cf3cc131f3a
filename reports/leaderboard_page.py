"""All systems of a run side by side, by every judge that has judged it, and by their majority.

    python -m reports.leaderboard_page --preset outputs --set outputs.file=outputs.jsonl

writes leaderboard-<name>-seed<k>.md, .html and .json to runs/reports/. It reads what the judges of
the run left on disk: `make leaderboard` asks them. `--judges` names the folders of those that are
shown; without it, all are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from eval.judges.openai.budget import cost
from eval.standings import agreement, has_rate, panel, standings
from eval.win_rate import summary_texts
from reports.parts import page
from reports.parts.collect import (
    Record,
    explained_by_critic,
    judge_flags,
    judge_undecided,
    load_run,
)
from reports.parts.page import Block, Heading, Table, Text
from reports.parts.run_report import write_about_runs
from reports.parts.sentences import against, checks_of_judge, critic_notes, notes_of_systems
from reports.parts.words import (
    MISSING,
    Row,
    briefly,
    estimate,
    percent,
    plain,
    posts_of,
    told_apart,
    whole,
)
from reports.sections import systems
from stages.finished import read_manifest, stage_folder, why_not
from stages.running.files import read_lines
from stages.settings.checks import Parser, in_one_line
from stages.settings.command_line import config_from_arguments, recorded_config
from stages.settings.config import Config, JudgeSettings, UserError
from stages.settings.judge import AXES

PANEL = "panel"


@dataclass(frozen=True, kw_only=True)
class JudgedRun:
    """What one judge said of a run."""

    label: str
    settings: JudgeSettings
    record: Record
    pairs: list[Row]
    """Its judgements on all pairs of systems; none where nobody asked."""

    @cached_property
    def judgements(self) -> list[Row]:
        """Its judgements on each summary beside the reference."""
        return self.record.rows("judge", "judgements.jsonl")

    @cached_property
    def standing(self) -> Row:
        """The systems by this judge."""
        texts = summary_texts(self.record.folders["summaries"])
        return standings(self.judgements, texts, self.pairs)

    @property
    def about(self) -> Row:
        """Who it is."""
        about: Row = self.record.results("judge")["judge"]
        return about


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Write the page; print who leads by each judge, and the page's path."""
    own = Parser(add_help=False)
    own.add_argument("--judges", nargs="+", default=[])
    given, others = own.parse_known_args(argv)
    config = config_from_arguments(others, "all systems of a run side by side")
    print(write_page(config, given.judges))


def write_page(config: Config, folders: Sequence[str]) -> str:
    """Write the page of a run's judges, or of those that are named; its lines for the terminal."""
    judges, left_out = read_judges(config, folders)
    by_panel = panel_standing(judges)
    stem = f"leaderboard-{config.name}-seed{config.seed}"
    shown, records = blocks(judges, by_panel, left_out), [judged.record for judged in judges]
    path = write_about_runs(stem, f"Leaderboard of {config.name}", shown, [config.name], records)
    standings = standings_of(judges, by_panel)
    lines = [f"{name}: {systems.leads(standing)}" for name, standing in standings.items()]
    return page.for_terminal(lines, path)


def read_judges(config: Config, folders: Sequence[str]) -> tuple[list[JudgedRun], list[str]]:
    """Every judge whose verdicts on the run still hold, and a line on each other one.

    `folders` names those that are shown, in the place of all. Raises UserError where there is
    none.
    """
    runs: list[tuple[Config, Record]] = []
    left_out = []
    root = stage_folder(config, "win_rate").parent
    for folder in [root / name for name in sorted(set(folders))] or sorted(root.glob("*")):
        made = recorded_config(folder) if read_manifest(folder) is not None else None
        if made is None:
            if folders:
                left_out.append(f"Judge {folder.name} is left out: it has no finished win rates.")
            continue
        try:
            runs.append((made, load_run(made)))
        except UserError as error:
            left_out.append(f"Judge {folder.name} is left out: {error}.")
    if not runs:
        raise UserError(f"no judge has judged {config.name}: run `make leaderboard` or `make eval`")
    runs.sort(key=lambda run: run[1].results("judge")["judge"]["name"])
    return _labelled(runs), left_out


def _labelled(runs: Sequence[tuple[Config, Record]]) -> list[JudgedRun]:
    """The judges by their names; where two share one, with what tells them apart."""
    names = [record.results("judge")["judge"]["name"] for _, record in runs]
    labels = told_apart(names, [config.judge for config, _ in runs])
    return [
        JudgedRun(label=label, settings=config.judge, record=record, pairs=_pairs(config))
        for (config, record), label in zip(runs, labels, strict=True)
    ]


def _pairs(config: Config) -> list[Row]:
    if why_not(config, "pairs") is not None:
        return []
    return read_lines(stage_folder(config, "pairs") / "judgements.jsonl")


def members(judges: Sequence[JudgedRun]) -> list[JudgedRun]:
    """The judges of the panel: those that were asked which summary is better as a whole."""
    return [judged for judged in judges if judged.settings.axis == AXES[0]]


def without_pairs(judges: Sequence[JudgedRun]) -> list[str]:
    """The judges that were not asked about all pairs of systems."""
    return [judged.label for judged in judges if not judged.pairs]


def panel_standing(judges: Sequence[JudgedRun]) -> Row | None:
    """The systems by the majority of the panel; None for fewer than two judges."""
    voters = members(judges)
    if len(voters) < 2:
        return None
    texts = summary_texts(voters[0].record.folders["summaries"])
    pairs = [] if without_pairs(voters) else panel([judged.pairs for judged in voters])
    return standings(panel([judged.judgements for judged in voters]), texts, pairs)


def standings_of(judges: Sequence[JudgedRun], by_panel: Row | None) -> dict[str, Row]:
    """What each judge says, and the panel if there is one."""
    standings = {judged.label: judged.standing for judged in judges}
    return standings | ({PANEL: by_panel} if by_panel else {})


def blocks(
    judges: Sequence[JudgedRun], by_panel: Row | None, left_out: Sequence[str]
) -> list[Block]:
    """The page: warnings, all judges side by side, each by itself, and their agreement."""
    standings = standings_of(judges, by_panel)
    first = next(iter(standings.values()))
    lead = (
        f"{_counted(first)}, judged by"
        f" {len(judges)} judge{'s' if len(judges) > 1 else ''} against the reference, in both"
        f" orders. By {f'the {PANEL}' if by_panel else briefly(judges[0].label)}:"
        f" {systems.leads(by_panel or first)}{_none_passed(judges)}"
    )
    main = PANEL if by_panel else next(iter(standings))
    others = [name for name in standings if name != main]
    beside = [*systems.left_out(first), *systems.differences(standings[main])]
    beside += [systems.side_by_side(standings)] if others else []
    return [
        Text(lead, lead=True),
        systems.table(standings[main]),
        *systems.figure(standings[main]),
        *against([*notes(judges), *left_out]),
        *([Heading("Systems beside each other"), *beside] if beside else []),
        Heading("The judges"),
        _judges_table(judges),
        *(_agreement(judges) if len(members(judges)) > 1 else []),
        *(
            block
            for place, name in enumerate(others, start=1)
            for block in _standing(name, standings[name], f"win-rate-{place}")
        ),
    ]


def _counted(standing: Row) -> str:
    """How many systems there are, and on how many posts."""
    count = len(standing["systems"])
    return f"{count} system{'s' * (count > 1)} on the same {posts_of(standing['posts'])}"


def _none_passed(judges: Sequence[JudgedRun]) -> str:
    if not all(judge_flags(judged.record) for judged in judges):
        return ""
    who = "The judge" if len(judges) == 1 else "Every judge"
    return f" {who} FAILED checks, so this is no evidence of quality."


def notes(judges: Sequence[JudgedRun]) -> list[str]:
    """What to hold against each judge, and against PPO's critic."""
    lines = []
    for judged in judges:
        who, record = f"THE JUDGE {briefly(judged.label)}", judged.record
        checks = checks_of_judge(who, judge_flags(record), judge_undecided(record))
        lines += [checks] if checks else []
        if not judged.about["is_llm"]:
            note = judged.about["note"].replace(", not an LLM", "", 1)
            lines.append(f"The judge {briefly(judged.label)} is NOT an LLM: {note}.")
        about = "" if len(judges) == 1 else f"By {briefly(judged.label)}: "
        rated = {
            name: system for name, system in judged.standing["systems"].items() if has_rate(system)
        }
        lines += [f"{about}{note}" for note in notes_of_systems(rated)]
    if len(members(judges)) > 1:
        failed = [judged.label for judged in members(judges) if judge_flags(judged.record)]
        weak = (
            f" {len(failed)} of them failed checks, so it is no better evidence." if failed else ""
        )
        lines.append(
            f"The panel is the majority of {len(members(judges))} judges, order by order: what more"
            f" than half of them say, else a tie.{weak}{_panel_without_pairs(members(judges))}"
        )
    record = judges[0].record  # all judged the same run
    explained = explained_by_critic(record.folders.get("ppo"))
    return lines + critic_notes([{"name": record.name, "explained_by_critic": explained}])


def _panel_without_pairs(panel_of: Sequence[JudgedRun]) -> str:
    """Why direct comparisons that some judges made do not count for the panel."""
    lacking = without_pairs(panel_of)
    if len(lacking) in (0, len(panel_of)):
        return ""
    names = ", ".join(briefly(name) for name in lacking)
    return (
        f" It rests on comparisons with the reference alone: {names} did not compare all"
        " pairs of systems. Ask all judges with DIRECT=1, or leave some out by JUDGES=."
    )


def _standing(name: str, standing: Row, figure: str) -> list[Block]:
    """The systems by one more judge; `figure` names the plot."""
    return [
        Heading(f"By {name}"),
        systems.table(standing, False),
        *systems.figure(standing, figure),
        *systems.differences(standing, False),
    ]


def _judges_table(judges: Sequence[JudgedRun]) -> Table:
    rows = []
    for judged in judges:
        about, results = judged.about, judged.record.results("judge")
        answers = [*judged.judgements, *judged.pairs]
        usd = cost(judged.settings, answers)
        calibration = judged.record.calibration
        rows.append(
            [
                judged.label,
                "yes" if about["is_llm"] else "NO",
                whole(len(answers)),
                percent(results["unjudged"]),
                percent(results["share_first"]),
                estimate(calibration["agreement"]) if calibration else MISSING,
                whole(len(judged.record.results("controls")["failed"])),
                MISSING if usd is None else f"{usd:.4f}",
                MISSING if usd is None else f"{2000 * usd / len(answers):.2f}",
            ]
        )
    header = "judge|LLM|judgements|unjudged|picks the first|agrees with labels|controls failed|USD"
    caption = (
        "USD: list price of the replies that were used; a pair is two judgements, one in each"
        " order. A dash: not known, or not calibrated."
    )
    return Table((*header.split("|"), "USD per 1,000 pairs"), rows, caption)


def _agreement(judges: Sequence[JudgedRun]) -> list[Block]:
    agreements = agreement({judged.label: judged.judgements for judged in members(judges)})
    rows = [
        [
            " and ".join(pair["judges"]),
            whole(pair["summaries"]),
            plain(pair["kappa"]),
            estimate(pair["share"]),
        ]
        for pair in agreements["pairs"]
    ]
    caption = (
        "How often two judges say the same of a post after both orders: win, tie or loss, on the"
        " summaries that both have judged. Kappas have a bootstrap over posts; 0 without an"
        " interval: one judge always says the same."
    )
    if len(members(judges)) > 2:  # of two, Cohen's stands in the table
        caption += (
            f" Fleiss' kappa of all together, on the {whole(agreements['shared'])} summaries"
            f" that all have judged: {plain(agreements['fleiss'])}."
        )
    return [
        Heading("Do the judges agree?"),
        Table(("judges", "summaries", "Cohen's kappa [95%]", "same verdict [95%]"), rows, caption),
    ]


if __name__ == "__main__":
    main()
