"""The index of the published pages: one row a page, with what it says first and what made it.

It is made from the record of what is published and from each page's own JSON, and from nothing
else: no run need be there.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.parts import page
from reports.parts.blocks import NUMBERS, Block, Text, escape, link
from reports.parts.words import MISSING
from stages.running.files import file_hash, read_record

STEM = "index"
TITLE = "Published pages"
LEAD = "What was measured and published: what each page says first, and what it was made from."
# A sentence ends at a full stop before a new word: none inside "1.9.2" or "p = 0.07" does.
SENTENCE = re.compile(r".*?[.!?](?=\s|$)", re.DOTALL)
HEADER = ("page", "what it says", "made from")


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
    listed = tuple(listed_page(folder, stem, pages[stem], presets) for stem in sorted(pages))
    page.write(folder, STEM, TITLE, [Text(LEAD, lead=True), PageList(listed)])
    return {path.name: file_hash(path) for path in page.files_of(folder, STEM)}


def listed_page(
    folder: Path, stem: str, entry: Mapping[str, Any], presets: Mapping[str, str]
) -> Listed:
    """A page's row: its title and first sentence as its JSON has them, and its record in words."""
    kept = read_record(folder / f"{stem}-{NUMBERS}" / "page.json") or {}
    texts = [block["text"] for block in kept.get("blocks", ()) if block["kind"] == "Text"]
    sentence = SENTENCE.match(texts[0]) if texts else None
    return Listed(
        stem=stem,
        title=kept.get("title", stem),
        says=" ".join(sentence[0].split()) if sentence else MISSING,
        made_from="; ".join(filter(None, made_from(entry, presets))),
    )


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
