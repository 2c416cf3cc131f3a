"""What is made from the record of the published pages: their index, and the README's table.

The index has one row a page, with what it says first and what made it. It is made from the record
and from each page's own JSON, and from nothing else: no run need be there. The README's table
stands between `<!-- results -->` and `<!-- /results -->`. Nobody writes it by hand.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from reports.parts import page
from reports.parts.blocks import NUMBERS, Block, Text, escape, link
from reports.parts.words import MISSING, number, percent, share
from reports.scaling.measures import pool
from stages.running.files import file_hash, read_record
from stages.settings.checks import UserError

STEM = "index"
TITLE = "Published pages"
LEAD = "What was measured and published: what each page says first, and what it was made from."
# A sentence ends at a full stop before a new word: none inside "1.9.2" or "p = 0.07" does.
SENTENCE = re.compile(r".*?[.!?](?=\s|$)", re.DOTALL)
README_RUN = "tiny"
ENTRY = {
    **{"kind": str, "finished": str, "about": list, "devices": list},
    **{"files": dict, "manifests": dict, "numbers": dict},
}
HEADER = ("page", "what it says", "made from")
# A reader looks for findings over seeds first, then for single runs, judges and speed.
KINDS_IN_ORDER = (
    *("scaling", "compare", "rivals", "overoptimisation", "ablations", "planted"),
    *("run", "versus", "judges", "calibration", "leaderboard", "bench"),
)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A published page as the index shows it."""

    stem: str
    title: str
    says: str
    made_from: str


@dataclass(frozen=True)
class PageList(Block):
    """Published pages with links to them."""

    template = "page_list.html"
    style = "page_list.css"
    pages: tuple[Listed, ...]

    @property
    def header(self) -> tuple[str, ...]:
        """Of the three columns."""
        return HEADER

    def markdown(self, stem: str) -> str:
        """A table whose first column links to both forms of each page."""
        lines = [f"| {' | '.join(HEADER)} |", "|---|---|---|"]
        for entry in self.pages:
            links = f"{link(entry.title, f'{entry.stem}.md')} {link('HTML', f'{entry.stem}.html')}"
            lines.append(f"| {links} | {escape(entry.says)} | {escape(entry.made_from)} |")
        return "\n".join(lines)


def write_index(folder: Path, pages: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Write the index of the recorded pages of a folder; each file of it with its SHA-256."""
    presets = {
        entry["numbers"]["name"]: entry["numbers"]["preset"]
        for entry in pages.values()
        if entry["kind"] == "run"
    }
    stems = sorted(pages, key=lambda stem: reading_order(stem, pages[stem]))
    older = made_from_older(pages)
    listed = tuple(listed_page(folder, stem, pages[stem], presets, older[stem]) for stem in stems)
    page.write(folder, STEM, TITLE, [Text(LEAD, lead=True), PageList(listed)])
    return {path.name: file_hash(path) for path in page.files_of(folder, STEM)}


def made_from_older(pages: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Page -> the runs of which a page that was finished later shows stages made anew since."""
    newest: dict[str, str] = {}
    for entry in sorted(pages.values(), key=lambda entry: str(entry["finished"])):
        newest |= entry["manifests"]
    changed = {
        stem: {
            source.split("/")[0]
            for source, hash_ in entry["manifests"].items()
            if newest[source] != hash_
        }
        for stem, entry in pages.items()
    }
    return {stem: sorted(runs) for stem, runs in changed.items()}


def reading_order(stem: str, entry: Mapping[str, Any]) -> tuple[int, bool, str]:
    """A page's place in the index: by kind, the README's run first, then by name."""
    kind, last = entry["kind"], len(KINDS_IN_ORDER)
    place = KINDS_IN_ORDER.index(kind) if kind in KINDS_IN_ORDER else last
    return place, README_RUN not in entry["about"], stem


def read_published(path: Path) -> dict[str, Any]:
    """The record of all published pages; one without pages where there is none yet.

    Raises UserError where a person has put something else into it.
    """
    record: dict[str, Any] = read_record(path) or {"pages": {}, "index": {}}
    pages = record["pages"]
    entries = list(pages.values()) if isinstance(pages, dict) else [None]
    if not all(isinstance(entry, dict) and _is_entry(entry) for entry in entries):
        raise UserError(
            f"{path} is no record of published pages: `git checkout {path}` restores it"
        )
    return record


def _is_entry(entry: dict[str, Any]) -> bool:
    return all(isinstance(entry.get(key), kind) for key, kind in ENTRY.items())


def listed_page(
    folder: Path,
    stem: str,
    entry: Mapping[str, Any],
    presets: Mapping[str, str],
    older: Sequence[str] = (),
) -> Listed:
    """A page's row: its title and first sentence as its JSON has them, and its record in words.

    `older`: the runs that other pages show in a newer version.
    """
    kept = read_record(folder / f"{stem}-{NUMBERS}" / "page.json") or {}
    texts = [block["text"] for block in kept.get("blocks", ()) if block["kind"] == "Text"]
    sentence = SENTENCE.match(texts[0]) if texts else None
    return Listed(
        stem=stem,
        title=kept.get("title", stem),
        says=" ".join(sentence[0].split()) if sentence else MISSING,
        made_from="; ".join(filter(None, (*made_from(entry, presets), _warning(older)))),
    )


def _warning(older: Sequence[str]) -> str:
    return f"OLDER than other pages: from {', '.join(older)} before it was made anew" * bool(older)


def made_from(entry: Mapping[str, Any], presets: Mapping[str, str]) -> list[str]:
    """What the record says of a page: runs, preset, seeds, judge, machine, date."""
    runs: Mapping[str, list[int]] = entry.get("runs", {})
    about = list(entry["about"])
    others = len(runs.keys() - {*about})
    seeds = sorted({seed for of_run in runs.values() for seed in of_run})
    known = dict.fromkeys(presets[name] for name in about if name in presets)
    more = f" and {others} more run{'s' * (others > 1)}" if others else ""
    return [
        ", ".join(about) + more,
        f"preset {', '.join(known)}" if known else "",
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if seeds else "",
        f"judge {entry['judge']}" if entry.get("judge") else "",
        " / ".join(entry["devices"]),
        entry["finished"][:10],
    ]


# -- the README's table ----------------------------------------------------------------------------


def run_entries(published: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was published of each seed of the run that the README shows, in the order of seeds."""
    entries = published["pages"].values()
    shown = [entry for entry in entries if entry["numbers"].get("name") == README_RUN]
    return sorted(shown, key=lambda entry: int(entry["numbers"]["seed"]))


def in_readme(text: str, published: Mapping[str, Any]) -> str:
    """The README with its block as it should be; a text without markers stays as it is."""
    entries = run_entries(published)
    if not entries:
        return text
    marked = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)
    table = results_table([entry["numbers"] for entry in entries])
    return marked.sub(lambda marker: f"{marker[1]}{table}\n{marker[2]}", text)


def results_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """SFT, PPO, and PPO at equal length: means over the seeds, with the intervals of `pool`."""

    def rates(policy: str, kind: str) -> list[Mapping[str, float] | None]:
        return [row[f"{policy}/statistics"][kind] for row in rows]

    cells = [
        ["", f"win rate, mean of {len(rows)} seeds", "lowest and highest seed", "tokens"],
        ["---"] * 4,
        _cells("SFT", rates("sft", "order_balanced"), [row["sft/tokens"] for row in rows]),
        _cells("PPO", rates("ppo", "order_balanced"), [row["ppo/tokens"] for row in rows]),
        _cells("PPO at equal length", rates("ppo", "length_controlled"), []),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _cells(
    name: str, rates: Sequence[Mapping[str, float] | None], tokens: Sequence[float]
) -> list[str]:
    """A policy's row; dashes where a seed has no rate."""
    length = number(fmean(tokens), 1) if tokens else ""
    known = [rate for rate in rates if rate and rate["estimate"] is not None]
    values = [rate["estimate"] for rate in known]
    mean = pool(values, [(rate["low"], rate["high"]) for rate in known])
    if mean is None or len(values) < len(rates):
        return [name, MISSING, MISSING, length]
    rate = share(mean.estimate, mean.low, mean.high)
    rate += " EXTRAPOLATED" * any(rate.get("extrapolated") for rate in known)
    return [name, rate, f"{percent(min(values))}, {percent(max(values))}", length]
