"""Published pages are copies of finished, clean pages; the documents' numbers stand on them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from reports import calibration_page, compare_page, scaling_page
from reports import run as run_page
from reports.parts.page import beside_the_runs
from reports.sharing import publish
from reports.sharing.publish import GENERATED, INDEX, index
from stages.config.command_line import make_config
from stages.runs.files import file_hash
from stages.runs.manifest import read_manifest, stage_folder
from tests.lib import fabricated_runs
from tests.lib.asserts import refused_by
from tests.lib.fabricated_runs import calibrated, fabricate, two_judges, write_manifest
from tests.lib.make_stages import run_module

ROOT = Path(__file__).parents[1]


@pytest.fixture
def place(place, no_drawing):
    """A folder with runs and no git; empty plots."""
    return place


def finished(*seeds, name="tiny", **changes):
    """Runs with their pages."""
    for seed in seeds:
        config = make_config(name, seed=seed)
        fabricate(config, **changes)
        run_page.write_report(config)


def files_below(folder):
    return {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}


def refused(capsys, *stems):
    """The one line with which publishing is refused; nothing was written."""
    line = refused_by(capsys, publish.main, "--pages", *stems)
    assert not GENERATED.exists()
    return line


def test_pages_are_copied_and_listed_and_a_second_time_replaced_wholly(place, capsys):
    finished(1, 2)
    calibrated(make_config("tiny", seed=1), flags=[])
    run_page.write_report(make_config("tiny", seed=1))
    run_module(calibration_page, ["--seed", "1"])
    scaling_page.main(["--names", "tiny"])
    compare_page.main(["--runs", "tiny:ppo", "tiny:sft"])
    stems = ["scaling-tiny", "tiny-seed1", "compare-tiny-ppo-sft", "tiny-seed1-judge-calibration"]
    capsys.readouterr()
    publish.main(["--pages", *stems])
    assert {*stems} == {line.strip() for line in capsys.readouterr().out.splitlines()[1:]}
    there = files_below(GENERATED)
    assert {name.rpartition(".")[2] for name in there} == {"md", "svg", "json"}
    records = {stem: json.loads((GENERATED / f"{stem}.json").read_text()) for stem in stems}
    files = {name: hash_ for one in records.values() for name, hash_ in one["files"].items()}
    assert {name: file_hash(GENERATED / name) for name in files} == files
    assert there == {*files, *(f"{stem}.json" for stem in stems), INDEX}
    listed = (GENERATED / INDEX).read_text()
    assert re.findall(r"\]\((.*)\.md\)", listed) == stems
    questions = ["Does PPO work?", "What does the judge know?"]
    assert re.findall("^## (.*)$", listed, re.MULTILINE)[::2] == questions
    item = listed.partition("[tiny, seed 1: PPO wins 63.0% against the references, SFT 41.2%]")[2]
    made_from = "  *Made from tiny; seed 1; judge facts; CPU, 2 cores (AMD EPYC, AVX2); "
    assert item.startswith(f"(tiny-seed1.md)\n{made_from}")
    (GENERATED / "tiny-seed1.md").write_text("![Plot: old](tiny-seed1-old.svg)\n")
    (GENERATED / "tiny-seed1-old.svg").write_text("old")
    publish.main(["--pages", "tiny-seed1"])
    assert files_below(GENERATED) == there


def test_texts_of_real_data_stand_on_the_runs_own_page_and_are_not_published(place):
    config = make_config("pythia-1b", seed=1)
    fabricate(config, judge=fabricated_runs.ONLINE)
    run_page.write_report(config)
    publish.main(["--pages", "pythia-1b-seed1"])
    here = (stage_folder(config, "report") / "pythia-1b-seed1.md").read_text()
    there = (GENERATED / "pythia-1b-seed1.md").read_text()
    for of_others in ("SUBREDDIT: r/x", "the aunt"):  # of every post, of every reference
        assert of_others in here
        assert of_others not in there
    assert here.count("My aunt sold my lamp.") == there.count("My aunt sold my lamp.") > 0


def test_a_page_is_refused_where_a_stage_or_a_file_of_it_has_changed_since(place, capsys):
    finished(1)
    scaling_page.main(["--names", "tiny"])
    capsys.readouterr()
    with (beside_the_runs() / "scaling-tiny.md").open("a") as page:
        page.write("best")
    assert "scaling-tiny has changed on disk (scaling-tiny.md)" in refused(capsys, "scaling-tiny")
    config = make_config("tiny", seed=1)
    before = read_manifest(stage_folder(config, "win_rate")) or {}
    write_manifest(config, "win_rate", before["results"] | {"posts": 500})
    said = "tiny-seed1 was made from an earlier tiny/seed1/win_rate/facts: make the page again"
    assert said in refused(capsys, "tiny-seed1")


def test_code_that_was_not_committed_is_refused_unless_allowed(place, capsys, monkeypatch):
    monkeypatch.setitem(fabricated_runs.MADE, "code_version", "508a0d9-dirty")
    finished(1)
    assert "code that was not committed (508a0d9-dirty" in refused(capsys, "tiny-seed1")
    publish.main(["--pages", "tiny-seed1", "--allow-dirty"])
    assert (GENERATED / "tiny-seed1.md").exists()


def test_unknown_pages_broken_ones_and_two_judges_are_refused_in_one_line(place, capsys):
    for config in two_judges():
        run_page.write_report(config)
    assert "did you mean tiny-seed44413?" in refused(capsys, "tiny-sed44413")
    assert "choose one with JUDGE=" in refused(capsys, "tiny-seed44413")
    publish.main(["--pages", "tiny-seed44413", "--judge", "facts"])
    broken = GENERATED / "other.json"
    broken.write_text("{}")
    with pytest.raises(SystemExit):
        publish.main(["--pages", "tiny-seed44413", "--judge", "facts"])
    assert "other.json is no record of a page" in capsys.readouterr().err


# -- what is committed -----------------------------------------------------------------------------

COMMITTED = ROOT / GENERATED
FRONT = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = FRONT.split("\n## Results, and how far to trust them\n")[1].split("\n## ")[0]
FINDINGS = (ROOT / "reports/FINDINGS.md").read_text(encoding="utf-8").split("\n## ")[1:]
WITHOUT_NUMBERS = re.compile(r"!?\[[^\]]*\]\([^)]*\)|```.*?```|`[^`]*`|<!-- .*? -->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w-])")
LEVEL = 95.0  # of every interval


def record(stem):
    return json.loads((COMMITTED / f"{stem}.json").read_text(encoding="utf-8"))


def test_every_published_file_is_recorded_with_its_hash_and_the_index_lists_all():
    stems = [path.stem for path in COMMITTED.glob("*.json")]
    recorded = {k: v for stem in stems for k, v in record(stem)["files"].items()}
    there = files_below(COMMITTED) - {INDEX, *(f"{stem}.json" for stem in stems)}
    assert {one: file_hash(COMMITTED / one) for one in there} == recorded
    assert (COMMITTED / INDEX).read_text(encoding="utf-8") == index(COMMITTED)


@pytest.mark.parametrize("section", [RESULTS, *FINDINGS])
def test_every_number_of_a_result_stands_on_a_page_that_its_section_links_to(section):
    known = {LEVEL} | {
        value
        for stem in re.findall(r"\((?:reports/)?generated/([\w.-]+)\.md\)", section)
        for value in numbers_in((COMMITTED / f"{stem}.md").read_text(encoding="utf-8"))
    }
    prose = WITHOUT_NUMBERS.sub(" ", section)
    assert [one for one in NUMBER.findall(prose) if not is_known(one, known)] == []


def numbers_in(text: str) -> Iterator[float]:
    """Every number of a text, and every count as in 1.02M."""
    for digits, unit in re.findall(r"(?<![\w.])([-+]?[\d,]*\.?\d+)([KM]?)\b", text):
        number = float(digits.replace(",", ""))
        yield number
        yield number * {"": 1, "K": 1e3, "M": 1e6}[unit]


def is_known(text, known):
    """Whether a number as written is a rounding of a known one, its percentage or its millions."""
    value, digits = float(text.replace(",", "")), len(text.partition(".")[2])
    scaled = (one for v in known for one in (v, 100 * v, v / 1e6))
    return any(abs(one - value) <= 0.5 * 10**-digits + 1e-9 for one in scaled)
