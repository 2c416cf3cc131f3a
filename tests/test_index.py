"""The index of the published pages: every page, what it says, what made it, and links that lead."""

import json
import re
from pathlib import Path
from typing import Any

from reports import scaling_page
from reports.parts.blocks import NUMBERS, Text, to_json
from reports.sharing import publish
from reports.sharing.index import (
    KINDS_IN_ORDER,
    listed_page,
    reading_order,
    results_table,
    write_index,
)
from reports.sharing.publish import GENERATED, RECORD
from stages.running.files import file_hash
from tests.test_publish import ROOT, finished, place

__all__ = ["place"]  # a fixture


def record_below(folder: Path) -> dict:
    return json.loads((folder / GENERATED / RECORD).read_text(encoding="utf-8"))


def rows_of(text: str) -> dict[str, str]:
    """The rows of the Markdown table, by the page that they link to."""
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    return {re.findall(r"\]\(([^)]*)\.md\)", row)[0]: row for row in rows}


def test_publishing_lists_every_page_with_its_first_sentence_and_record(place, capsys):
    finished(1, 2)
    scaling_page.main(["--names", "tiny"])
    publish.main([])
    record = record_below(place)
    text = (GENERATED / "index.md").read_text()
    rows = rows_of(text)
    assert list(rows) == list(record["pages"]) == ["scaling-tiny", "tiny-seed1", "tiny-seed2"]
    row = rows["tiny-seed1"]
    first = (GENERATED / "tiny-seed1.md").read_text().split("\n\n")[1].split(". ")[0]
    assert first.startswith("Of 600 held-out posts PPO's summary won ")
    assert f"| {first}. | tiny; preset tiny; seed 1; judge facts; CPU, 2 cores (AMD EPYC" in row
    assert row.endswith(f"; {record['pages']['tiny-seed1']['finished'][:10]} |")
    assert "| tiny; preset tiny; seeds 1, 2; judge facts;" in rows["scaling-tiny"]
    assert record["index"] == {
        name: file_hash(GENERATED / name) for name in ("index.md", "index.html")
    }
    assert "no page of" not in capsys.readouterr().out


def test_links_lead_and_titles_are_text(place):
    finished(1)
    publish.main([])
    shown = (GENERATED / "index.html").read_text()
    links = re.findall(r'href="([^"#]*)"', shown)
    assert links == ["tiny-seed1.html", "tiny-seed1.md"]
    assert all((GENERATED / link).is_file() for link in links)
    assert "<script" not in shown


def test_a_page_of_other_runs_and_one_without_its_json_are_listed(tmp_path):
    entry: dict[str, Any] = {
        "kind": "bench",
        "about": ["a:1", "b:2"],
        "devices": ["x", "y"],
        "finished": "2026-11",
        "manifests": {},
    }
    bare = listed_page(tmp_path, "bench", entry, {})
    assert (bare.title, bare.says, bare.made_from) == ("bench", "–", "a:1, b:2; x / y; 2026-11")
    (tmp_path / f"bench-{NUMBERS}").mkdir()
    blocks = to_json([Text("2.4 times TRL 1.9.2: fast <b>. More.")])
    kept = {"title": "T | *t*", "blocks": blocks}
    (tmp_path / f"bench-{NUMBERS}/page.json").write_text(json.dumps(kept))
    runs = {"tiny": [1], "tiny-a": [1, 2], "tiny-b": [3]}
    entry |= {"about": ["tiny"], "runs": runs, "judge": "facts", "numbers": {}}
    said = listed_page(tmp_path, "bench", entry, {"tiny": "tiny-s"})
    assert said.says == "2.4 times TRL 1.9.2: fast <b>."
    assert said.made_from.startswith("tiny and 2 more runs; preset tiny-s; seeds 1, 2, 3; judge")
    write_index(tmp_path, {"bench": entry})
    assert "&lt;b&gt;" in (tmp_path / "index.html").read_text()
    assert r"[T \| \*t\*](bench.md)" in (tmp_path / "index.md").read_text()


def test_a_page_of_stages_that_another_page_shows_made_anew_is_called_older(tmp_path):
    """A page of rivals was made on day 1 from `tiny`, which is published anew on day 2."""
    entry: dict[str, Any] = {"kind": "run", "about": ["tiny"], "devices": []}
    entry["numbers"] = {"name": "tiny", "preset": "tiny"}
    stages = {"tiny/seed1/rm/manifest.json": "a", "tiny-kl0.1/seed1/ppo/manifest.json": "b"}
    pages = {
        "tiny-seed1": {
            **entry,
            **{"finished": "2026-02", "manifests": {"tiny/seed1/rm/manifest.json": "c"}},
        },
        "rivals-tiny": {**entry, "kind": "rivals", "finished": "2026-01", "manifests": stages},
    }
    write_index(tmp_path, pages)
    rows = rows_of((tmp_path / "index.md").read_text())
    assert "OLDER than other pages: from tiny before it was made anew" in rows["rivals-tiny"]
    assert "OLDER" not in rows["tiny-seed1"]


def test_findings_stand_before_runs_and_the_readmes_run_before_others():
    """By hand: kind by kind, and a kind that nobody placed comes last."""
    entries = {
        "bench": ("bench", ["a:1"]),
        "a-seed1": ("run", ["a"]),
        "tiny-seed1": ("run", ["tiny"]),
        "new": ("new", ["tiny"]),
        "planted-tiny": ("planted", ["tiny"]),
        "scaling-tiny": ("scaling", ["tiny"]),
    }
    pages = {stem: {"kind": kind, "about": about} for stem, (kind, about) in entries.items()}
    placed = sorted(pages, key=lambda stem: reading_order(stem, pages[stem]))
    assert placed == ["scaling-tiny", "planted-tiny", "tiny-seed1", "a-seed1", "bench", "new"]


def test_the_committed_index_is_that_of_the_committed_record(tmp_path):
    record = record_below(ROOT)
    for stem in record["pages"]:
        kept = tmp_path / f"{stem}-{NUMBERS}"
        kept.symlink_to(ROOT / GENERATED / kept.name)
    assert write_index(tmp_path, record["pages"]) == record["index"]
    assert {entry["kind"] for entry in record["pages"].values()} <= {*KINDS_IN_ORDER}


def test_the_readmes_table_has_dashes_without_a_rate_and_marks_what_is_extrapolated():
    rate = {"estimate": 0.6, "low": 0.5, "high": 0.7}
    none = dict.fromkeys(rate)
    made: dict[str, Any] = {
        f"{policy}/{key}": value
        for policy in ("sft", "ppo")
        for key, value in (
            ("statistics", {"order_balanced": rate, "length_controlled": none}),
            ("tokens", 16.0),
        )
    }
    assert results_table([made, made]).endswith("| PPO at equal length | – | – |  |")
    made["ppo/statistics"] = {"order_balanced": rate, "length_controlled": rate}
    made["ppo/statistics"]["length_controlled"] = rate | {"extrapolated": True}
    assert "| 60.0% [50.0, 70.0] EXTRAPOLATED | 60.0%, 60.0% |" in results_table([made, made])
