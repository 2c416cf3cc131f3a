"""A page's JSON holds all that its Markdown says: written from it, the Markdown is the same."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from reports.parts import page
from reports.parts.blocks import KINDS, Block, Details, Heading, Note, Sample, Table, Text, to_json
from reports.parts.sample_views import SampleBrowser, TokenView
from reports.sharing.publish import GENERATED
from tests.test_publish import ROOT, finished

PUBLISHED = ROOT / GENERATED
STEMS = sorted(path.stem for path in PUBLISHED.glob("*.json"))


def from_json(rows: Sequence[Mapping[str, Any]]) -> list[Block]:
    """The blocks again, plots without their drawings."""
    return [block(KINDS[row["kind"]], row) for row in rows]


def block(kind: type[Block], row: Mapping[str, Any]) -> Block:
    values = {attribute.name: row.get(attribute.name, "") for attribute in fields(kind)}
    if kind is Details:
        values["blocks"] = from_json(row["blocks"])
    return kind(**values)


def record_of(folder: Path, stem: str) -> dict:
    return json.loads((folder / f"{stem}.json").read_text())


def again(folder: Path, stem: str) -> str:
    """The page's Markdown, written from its JSON."""
    found = record_of(folder, stem)
    return page.to_markdown(stem, found["title"], from_json(found["blocks"]))


def content(markdown: str) -> list[str]:
    """Its lines without layout: what is folded, and whether contents are listed, may change."""
    layout = re.compile(r"</?(details|summary|a)\b[^>]*>|^Contents: .*|^## More: .*")
    lines = (layout.sub("", line).strip() for line in markdown.splitlines())
    return [line for line in lines if line]


def test_every_kind_of_block_comes_back():
    few = [Sample("t3_1", "a <post>", [("the reference", "r | s", ""), ("PPO", "p", "won")])]
    rows = [{"id": "t3_1"}]
    blocks = page.placed(
        [
            Text("A lead.", lead=True),
            Heading("First"),
            Note("Not *all* of it."),
            Details("More", [Heading("Inner"), Table(("a", "b"), [["c", "1"]], "says")]),
            SampleBrowser("samples", ["PPO"], rows, few),
            TokenView("tokens", [], Table(("update", "b"), [["c", "1"]])),
        ]
    )
    kept = json.loads(json.dumps(to_json(blocks)))
    back = from_json(kept)
    assert page.to_markdown("p", "T", back) == page.to_markdown("p", "T", blocks)
    assert [type(one).__name__ for one in back] == [
        *("Text", "Heading", "Note", "Details", "Sample", "Table")
    ]
    assert isinstance(back[-1], Table)
    assert back[-1].name == "first-update"
    assert to_json(back) == kept


def test_a_runs_page_comes_back_from_its_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finished(1)
    (path,) = tmp_path.rglob("tiny-seed1.md")
    text = path.read_text()
    assert "![Plot: " in text
    assert again(path.parent, "tiny-seed1") == text
    # A number that somebody changed in the one is not in the other.
    path = path.with_suffix(".json")
    path.write_text(path.read_text().replace("63.0%", "64.0%"))
    assert again(path.parent, "tiny-seed1") != text


@pytest.mark.parametrize("stem", STEMS)
def test_a_published_page_says_what_its_json_says(stem):
    published = (PUBLISHED / f"{stem}.md").read_text()
    assert content(again(PUBLISHED, stem)) == content(published)
