"""The page of all judges: who stands in one table, what a thousand pairs cost, what is left out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eval import calibration
from eval.calibration import calibrate
from eval.judges import protocol
from eval.judges.offline import FactsJudge
from eval.judges.protocol import About, Choice, Reply
from reports import judges_page
from reports.judges_page import (
    Calibrated,
    by_pairs,
    find_calibrations,
    lines_of,
    rows_of,
    source_of,
)
from reports.parts.words import told_apart
from reports.sharing import publish
from stages.finished import seal_of
from stages.running.files import read_json, write_json
from stages.settings.command_line import make_config
from stages.settings.config import Checks, JudgeSettings, UserError

SIZES = {"train_posts": 5, "train_comparisons": 5}
SIZES |= {"validation_posts": 60, "validation_comparisons": 120}
WORLD = tuple(f"world.{name}={size}" for name, size in SIZES.items())
PAID = JudgeSettings(kind="openai", model="another", input_price=1.0, output_price=2.0)


class Longest(protocol.Judge):
    """A judge behind a server that reads length alone; each reply has 500 and 50 tokens."""

    about = About(kind="openai", name="another", is_llm=True, note="")

    def reply(self, comparison):
        a, b = len(comparison.first.split()), len(comparison.second.split())
        choice: Choice = "A" if a > b else "B" if b > a else "tie"
        return Reply(choice=choice, text="", prompt_tokens=500, completion_tokens=50)


@pytest.fixture
def two_judges(runs, monkeypatch):
    """Two judges of the same pairs, in two runs; and the rule once more, on other pairs."""

    def judge(config, policies):
        return FactsJudge() if config.judge.kind == "facts" else Longest()

    monkeypatch.setattr(calibration, "make_judge", judge)
    config = make_config("tiny", name="rule", overrides=WORLD)
    config = replace(config, checks=Checks(calibration_pairs=60))
    calibrate(config)
    calibrate(replace(config, name="paid", judge=PAID))
    calibrate(replace(config, name="other-seed", seed=2))
    return runs


def test_judges_of_the_same_pairs_stand_in_one_table_beside_the_simple_ones(two_judges, capsys):
    judges_page.main([])
    found = find_calibrations()
    groups = by_pairs(found)
    assert [len(one) for one in groups] == [2, 1]
    rows = rows_of(groups[0])
    names = [row["judge"] for row in rows]
    assert len(names) == 5
    assert names[0] == "facts (offline rule, not an LLM)"
    estimates = [row["agreement"]["estimate"] for row in rows]
    assert estimates == sorted(estimates, reverse=True)
    by_name = {row["judge"]: row for row in rows}
    paid, longest = by_name["another"], by_name["the longest text"]
    assert paid["agreement"] == longest["agreement"] | {"pairs": 60}
    assert "too few posts (45 of 125 needed)" in paid["undecided"][0]
    # 2 orders of 1,000 pairs, each 500 tokens at 1 USD and 50 at 2 USD a million.
    assert paid["dollars_per_1000_pairs"] == pytest.approx(1.2 * paid_share(groups[0]))
    assert by_name[names[0]]["dollars_per_1000_pairs"] == 0.0
    assert paid["pairs_per_minute"] > 60
    said = capsys.readouterr().out
    assert "72% to 77%" in said
    assert max(map(len, said.splitlines()[:-1])) <= 80
    text = (two_judges / "reports" / "judges.md").read_text()
    rule = "facts (offline rule, not an LLM) reliably beats taking the longer text"
    told = [f"On 60 labelled pairs of the built-in world {rule}"]
    assert text.split("\n\n")[1] == f"{told[0]}; 1 of 2 judges cannot. {told[0]}."
    assert "people with each other | – | 72 to 77% |" in text
    assert text.count("| the label that most pairs have |") == 2
    (line,) = (line for line in text.splitlines() if line.startswith("| another |"))
    assert f"| {len(paid['flags'])}, undecided |" in line
    assert "another has neither passed nor failed its calibration, too few posts (45" in text


def test_judges_that_share_a_name_are_told_apart(two_judges):
    """One model behind a server and in this process, and asked with another budget."""
    path = two_judges / "paid/seed44413/calibration"
    for judge in (replace(PAID, kind="local"), replace(PAID, max_tokens=32)):
        again = path / judge.folder
        again.mkdir()
        for name in ("pairs.jsonl", "judgements.jsonl", "manifest.json", "config.json"):
            (again / name).write_bytes((path / PAID.folder / name).read_bytes())
        config = read_json(again / "config.json")
        config["judge"] |= {"kind": judge.kind, "max_tokens": judge.max_tokens}
        write_json(again / "config.json", config)
    (group, _) = by_pairs(find_calibrations())
    assert {row["judge"] for row in rows_of(group) if "simple" not in row} == {
        "facts (offline rule, not an LLM)",
        "another (kind=local)",
        "another (kind=openai, max_tokens=256)",
        "another (kind=openai, max_tokens=32)",
    }
    lines = [line for line in lines_of(group) if "another" in line]
    assert len({line[:48] for line in lines}) == 3
    assert max(map(len, lines)) <= 80


def test_where_what_differs_is_not_shown_the_folder_tells_judges_apart():
    here, there = (JudgeSettings(base_url=f"http://127.0.0.1:{port}/v1") for port in (8000, 8001))
    assert told_apart(["m", "m", "n"], [here, there, here]) == [here.folder, there.folder, "n"]


def paid_share(group):
    """The share of judgements for which the server was asked: all but those of identical texts."""
    (one,) = (one for one in group if one.config.name == "paid")
    lines = (one.folder / "judgements.jsonl").read_text().splitlines()
    asked = [json.loads(line)["prompt_tokens"] > 0 for line in lines]
    assert 0.8 < sum(asked) / len(asked) <= 1
    return sum(asked) / len(asked)


def test_the_page_can_be_published_with_what_it_was_made_from(two_judges):
    judges_page.main(["--names", "rule", "paid"])
    note = read_json(two_judges / "reports" / "judges.json")
    assert note["names"] == ["paid", "rule"]
    assert {len(one["judges"]) for one in note["sets"]} == {5}
    assert list(publish.several_pages(["rule"], "")) == []
    (page,) = publish.several_pages(["rule", "paid"], "")
    assert (page.kind, page.stem) == ("judges", "judges")
    assert set(page.sources) == {
        f"{name}/seed44413/calibration/{judge}"
        for name, judge in (("rule", "facts"), ("paid", PAID.folder))
    }
    (two_judges / next(iter(page.sources)) / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"run `make judges 'NAME=paid rule'`"):
        list(publish.several_pages(["rule", "paid"], ""))


def test_a_judge_that_was_calibrated_twice_stands_there_as_it_was_last(two_judges):
    path = two_judges / "rule/seed44413/calibration/facts/manifest.json"
    later = two_judges / "later/seed44413/calibration/facts"
    later.mkdir(parents=True)
    for name in ("config.json", "pairs.jsonl", "judgements.jsonl"):
        (later / name).write_bytes((path.parent / name).read_bytes())
    made = read_json(path) | {"finished": "2099"}
    write_json(later / "manifest.json", made | {"seal": seal_of(made)})
    found = find_calibrations()
    assert len(found) == 3
    assert later in {one.folder for one in found}


def test_the_documents_table_of_judges_holds_the_published_pages_figures():
    root = Path(__file__).parents[1]
    page = (root / "reports" / "generated" / "judges.md").read_text(encoding="utf-8")
    tables = [part for part in page.split("\n## ")[1:] if not part.startswith("More: ")]
    text = (root / "eval" / "README.md").read_text(encoding="utf-8")
    table = text.partition("| judge | labels by")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines()[2:]]
    assert len(rows) == 5
    for name, *cells in rows:
        for cell, section in zip(cells, tables, strict=True):
            share, interval = cell.partition(",")[0], cell[cell.index("[") : cell.index("]") + 1]
            assert f"{share.split()[0]}% {interval}" in section, name
            assert ("undecided" in cell) == ("reward model" in name and section is tables[0])


def test_labels_of_a_judged_file_are_named_after_the_file(tmp_path):
    file = tmp_path / "their outputs.jsonl"
    config = make_config("outputs", overrides=(f"outputs.file={file}", "judge.kind=facts"))
    one = Calibrated(folder=tmp_path, config=config, manifest={}, pairs=[])
    assert source_of(one) == "their outputs.jsonl"
