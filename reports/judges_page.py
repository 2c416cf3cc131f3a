"""The page of all judges that were calibrated on the same labelled pairs, side by side.

    python -m reports.judges_page
    python -m reports.judges_page --names tiny smollm-human

reads every finished calibration below runs/ and writes judges.html, .md and .json to runs/reports.
Judges stand in one table exactly if they answered the same pairs with the same labels. Beside them
stand three that need no judgement, and how far people agree with each other.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.calibration import HUMAN_CEILING
from eval.judges.openai.budget import cost
from eval.judges.protocol import VERDICTS
from eval.rates.simple_judges import NAMES, simple_judges_on
from reports.parts import page
from reports.parts.page import Block, Heading, Note, Table, Text
from reports.parts.run_report import note_sources
from reports.parts.sentences import checks_of_judge
from reports.parts.words import (
    MISSING,
    Row,
    briefly,
    estimate,
    in_points,
    number,
    percent,
    plain,
    shown,
    told_apart,
    whole,
)
from stages.finished import check_run, read_manifest
from stages.running.files import read_lines
from stages.running.progress import shortened
from stages.settings import config as settings
from stages.settings.checks import Parser, UserError
from stages.settings.command_line import recorded_config
from stages.settings.config import TOY, Config, hash_of
from stages.settings.stages import OUTPUTS

STEM = "judges"
WIDTH = 46  # of a judge's name in the terminal
SAME = ("id", "post", "label", "words", "overlap")  # what makes two pairs the same
HEADER = (
    "judge|Cohen's kappa [95%]|agreement [95%]|more than the longest text, by|prefers the longer"
    "|picks the first shown|unjudged|flags|USD per 1,000 pairs|pairs a minute"
).split("|")


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """One finished calibration."""

    folder: Path
    config: Config
    manifest: Row
    pairs: list[Row]

    @property
    def results(self) -> Row:
        """What it found."""
        results: Row = self.manifest["results"]
        return results

    @property
    def same_pairs(self) -> str:
        """Names the labelled pairs, without the judge's answers."""
        return hash_of([[pair[key] for key in SAME] for pair in self.pairs])

    @property
    def dollars(self) -> float | None:
        """USD for 1,000 pairs in both orders; 0 for a judge here, None if it is not known.

        It is counted from the replies that were used: replies that were asked for again cost more.
        """
        rows = read_lines(self.folder / "judgements.jsonl")
        if self.config.judge.kind == "openai" and not any(row["prompt_tokens"] for row in rows):
            return None  # a server that counts no tokens
        paid = cost(self.config.judge, rows)
        return None if paid is None else paid * 1000 / len(self.pairs)

    @property
    def pairs_per_minute(self) -> float | None:
        """Pairs judged in both orders in a minute; None where nothing was asked in the last try."""
        asking = self.results["asking"]
        if not asking["questions"]:
            return None
        return 60 * asking["questions"] / len(VERDICTS) / max(asking["seconds"], 1e-9)


def find_calibrations(names: Sequence[str] = ()) -> list[Calibrated]:
    """The finished calibrations of some runs (of all, if none is named).

    A judge that was calibrated twice on the same pairs stands there once, as it was calibrated
    last. Raises UserError for an unknown run, and if no judge was calibrated.
    """
    for name in names:
        check_run(name)
    calibrations: dict[tuple[str, str], Calibrated] = {}
    for folder in sorted(settings.RUNS.glob("*/seed*/calibration/*")):
        manifest, config = read_manifest(folder), recorded_config(folder)
        if manifest is None or config is None or folder.suffix == ".partial":
            continue
        if names and config.name not in names:
            continue
        pairs = read_lines(folder / "pairs.jsonl")
        calibrated = Calibrated(folder=folder, config=config, manifest=manifest, pairs=pairs)
        key = calibrated.same_pairs, folder.name
        before = calibrations.get(key, calibrated)
        if before.manifest["finished"] <= manifest["finished"]:
            calibrations[key] = calibrated
    if not calibrations:
        raise UserError("no judge was calibrated yet: run `make judge-calibration`")
    return list(calibrations.values())


def by_pairs(calibrations: Sequence[Calibrated]) -> list[list[Calibrated]]:
    """The calibrations in groups of the same pairs; the group with most judges first."""
    groups: dict[str, list[Calibrated]] = {}
    for calibrated in calibrations:
        groups.setdefault(calibrated.same_pairs, []).append(calibrated)
    return [groups[key] for key in sorted(groups, key=lambda key: (-len(groups[key]), key))]


def rows_of(group: Sequence[Calibrated]) -> list[Row]:
    """The judges of one group and the simple ones, by agreement, highest first."""
    rows = []
    names = [calibrated.results["judge"]["name"] for calibrated in group]
    labels = told_apart(names, [calibrated.config.judge for calibrated in group])
    for calibrated, label in zip(group, labels, strict=True):
        results = calibrated.results
        longer = results["prefers_longer"] or {"judge": None}
        longest = results["simple"].get("longest")
        rows.append(
            {
                "judge": label,
                "is_llm": results["judge"]["is_llm"],
                "run": f"{calibrated.config.name}/seed{calibrated.config.seed}",
                "agreement": results["agreement"],
                "kappa": results["kappa_interval"],
                "more_than_longest": longest["difference"] if longest else None,
                "prefers_longer": longer["judge"],
                "share_first": results["statistics"]["share_first"],
                "unjudged": results["statistics"]["unjudged"],
                "flags": results["flags"],
                "undecided": [results["undecided"]] if results.get("undecided") else [],
                "dollars_per_1000_pairs": calibrated.dollars,
                "pairs_per_minute": calibrated.pairs_per_minute,
            }
        )
    for name, simple in simple_judges_on(group[0].pairs).items():
        rows.append({"judge": NAMES[name], "simple": True, **simple})
    return sorted(
        rows,
        key=lambda row: row["agreement"]["estimate"] if row["agreement"] else -1.0,
        reverse=True,
    )


def source_of(calibrated: Calibrated) -> str:
    """Where the labelled pairs come from: the world, a data set, a folder, or a judged file."""
    if calibrated.config.kind == OUTPUTS:
        return Path(calibrated.config.outputs.file).name
    source = calibrated.config.data.source
    return "the built-in world" if source == TOY else shown("data.source", source)


def answer(group: Sequence[Calibrated]) -> str:
    """Which judges of one group are worth asking: those that reliably beat the longer text."""
    judges = [row for row in rows_of(group) if row.get("more_than_longest")]
    above = [row["judge"] for row in judges if row["more_than_longest"]["low"] > 0]
    pairs = f"On {whole(len(group[0].pairs))} labelled pairs of {source_of(group[0])}"
    if not judges:
        return f"{pairs} no judge was compared with taking the longer text."
    if not above:
        none = {1: "the judge cannot", 2: "neither judge can"}
        who = none.get(len(judges), f"none of the {len(judges)} judges can")
        return f"{pairs} {who} reliably beat taking the longer text."
    rest = len(judges) - len(above)
    others = f"; {rest} of {len(judges)} judges cannot" if rest else ""
    verb = "beats" if len(above) == 1 else "beat"
    return f"{pairs} {', '.join(above)} reliably {verb} taking the longer text{others}."


def section(group: Sequence[Calibrated]) -> list[Block]:
    """The table of one group, and why judges are flagged."""
    rows = rows_of(group)
    low, high = HUMAN_CEILING
    people = ["people with each other", MISSING, f"{100 * low:.0f} to {100 * high:.0f}%"]
    cells = [[*people, *[MISSING] * (len(HEADER) - len(people))], *map(_cells, rows)]
    caption = (
        "Agreement with the labels, a tie counting half; simple judges count on all pairs. Kappa:"
        " of the pairs that a judge decides. People: Stiennon et al. 2020, of real pairs, the"
        " ceiling for any judge of labels by people. The price is that of the replies used; 0: it"
        " runs here. The speed is that of the last calibration; a dash where every reply was kept"
        " from before."
    )
    checks = [
        checks_of_judge(briefly(row["judge"]), row["flags"], row["undecided"])
        for row in rows
        if not row.get("simple")
    ]
    flagged = [Note(check) for check in checks if check]
    count, posts = len(group[0].pairs), len({pair["post"] for pair in group[0].pairs})
    title = f"{whole(count)} labelled pairs about {whole(posts)} posts, of {source_of(group[0])}"
    return [Heading(title), Table(HEADER, cells, caption, strong=True), *flagged]


def _cells(row: Row) -> list[str]:
    start = [row["judge"], plain(row["kappa"]), estimate(row["agreement"])]
    if row.get("simple"):
        return [*start, MISSING, estimate(row["prefers_longer"]), *[MISSING] * 5]
    more, dollars = row["more_than_longest"], row["dollars_per_1000_pairs"]
    return [
        *start,
        in_points(more) if more else MISSING,
        estimate(row["prefers_longer"]),
        estimate(row["share_first"]),
        percent(row["unjudged"]),
        f"{len(row['flags'])}{', undecided' if row['undecided'] else ''}",
        number(dollars, 2) if dollars is not None else MISSING,
        number(row["pairs_per_minute"], 1),
    ]


def lines_of(group: Sequence[Calibrated]) -> list[str]:
    """One group for a terminal of 80 columns."""
    low, high = HUMAN_CEILING
    lines = [f"{len(group[0].pairs)} labelled pairs of {source_of(group[0])}"]
    lines.append(f"  {'people with each other':{WIDTH}} {low:.0%} to {high:.0%}")
    rows = rows_of(group)
    names = shortened([row["judge"] for row in rows], WIDTH)
    for name, row in zip(names, rows, strict=True):
        flags = f"  {len(row['flags'])} flags" if row.get("flags") else ""
        lines.append(f"  {name:{WIDTH}} {estimate(row['agreement'])}{flags}")
    return lines


def write_page(calibrations: Sequence[Calibrated]) -> Path:
    """Write the page, and its numbers with what it was made from; returns the HTML's path."""
    groups = by_pairs(calibrations)
    lead = Text(" ".join(map(answer, groups)), lead=True)
    blocks = [lead, *(block for group in groups for block in section(group))]
    path = page.write(page.beside_the_runs(), STEM, "Judges beside the same labels", blocks)
    note_sources(
        path,
        sorted({calibrated.config.name for calibrated in calibrations}),
        {calibrated.folder.name for calibrated in calibrations},
        [calibrated.folder for calibrated in calibrations],
        {
            "human_ceiling": list(HUMAN_CEILING),
            "sets": [
                {
                    "source": source_of(group[0]),
                    "pairs": len(group[0].pairs),
                    "judges": rows_of(group),
                }
                for group in groups
            ],
        },
    )
    return path


def main(argv: list[str] | None = None) -> None:
    """Write the page and print its tables."""
    parser = Parser(description="all judges beside the same labelled pairs")
    parser.add_argument("--names", nargs="*", default=[], help="runs; none: all of them")

    def write(args: argparse.Namespace) -> str:
        calibrations = find_calibrations(args.names)
        path = write_page(calibrations)
        lines = [line for group in by_pairs(calibrations) for line in lines_of(group)]
        return "\n".join([*lines, page.for_terminal([], path)])

    page.print_page(write, parser, argv)


if __name__ == "__main__":
    main()
