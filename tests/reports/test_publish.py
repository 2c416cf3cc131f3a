"""Published pages are copies of finished pages; the documents' numbers are on them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from reports import about_runs, publish, render, scaling
from reports.publish import GENERATED, index
from stages.config.command_line import make_config
from stages.runs.files import file_hash
from stages.runs.manifest import read_manifest, stage_folder
from tests.lib import fabricated_runs
from tests.lib.asserts import refused_by
from tests.lib.fabricated_runs import fabricate, write_manifest

ROOT = Path(__file__).parents[2]
INDEX = "index.md"


@pytest.fixture
def place(place, no_drawing):
    """A folder with runs and no git; empty plots."""
    return place


def write_scaling_page() -> Path:
    """The Markdown of a page about two seeds of one run."""
    for seed in (1, 2):
        fabricate(make_config("tiny", seed=seed), ppo=0.9)
    scaling.write_page(["tiny"], judge="")
    return about_runs.folder() / "scaling-tiny.md"


def write_page(folder: Path, stem: str, **origin) -> None:
    """Write a small page without any run."""
    text = "# Title\n\nThe answer.\n"
    page = render.Page(stem=stem, markdown=text, figures={})
    made_from = {
        "kind": "run",
        "names": ["tiny"],
        "judges": ["facts"],
        "code_versions": ["abc"],
        "devices": ["CPU"],
        "finished": "2026-11-30T10:00:00",
        "stages": {},
        **origin,
    }
    render.write(folder, page, numbers={}, made_from=made_from)


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def refused(capsys, *words) -> str:
    """The one line with which publishing is refused; nothing was written."""
    line = refused_by(capsys, publish.main, "--pages", *words)
    assert not GENERATED.exists()
    return line


# -- copying ---------------------------------------------------------------------------------------


def test_a_page_is_copied_with_its_figures_and_its_json_but_not_its_html(place, capsys):
    write_scaling_page()
    publish.main(["--pages", "scaling-tiny"])
    assert capsys.readouterr().out == f"published in {GENERATED}:\n  scaling-tiny\n"
    record = json.loads((GENERATED / "scaling-tiny.json").read_text(encoding="utf-8"))
    assert files_below(GENERATED) == {*record["files"], "scaling-tiny.json", INDEX}
    for name, recorded_hash in record["files"].items():
        assert file_hash(GENERATED / name) == recorded_hash


def test_a_page_is_replaced_together_with_its_figures(place):
    write_scaling_page()
    publish.main(["--pages", "scaling-tiny"])
    published = files_below(GENERATED)
    old_page = "![Plot: old](scaling-tiny-old.svg)\n"
    (GENERATED / "scaling-tiny.md").write_text(old_page, encoding="utf-8")
    (GENERATED / "scaling-tiny-old.svg").write_text("old", encoding="utf-8")
    publish.main(["--pages", "scaling-tiny"])
    assert files_below(GENERATED) == published


def test_the_version_without_other_peoples_texts_is_published(place):
    folder = about_runs.folder()
    write_page(folder, "real")
    write_page(folder / render.PUBLIC, "real", finished="2026-11-29")
    publish.main(["--pages", "real"])
    public = (folder / render.PUBLIC / "real.json").read_text(encoding="utf-8")
    assert (GENERATED / "real.json").read_text(encoding="utf-8") == public


# -- refusals --------------------------------------------------------------------------------------


def test_a_page_that_was_edited_is_refused(place, capsys):
    path = write_scaling_page()
    path.write_text(path.read_text(encoding="utf-8") + "best", encoding="utf-8")
    line = refused(capsys, "scaling-tiny")
    assert f"scaling-tiny is outdated: {path} has changed; write the page again" in line


def test_a_page_of_a_stage_that_ran_again_is_refused(place, capsys):
    write_scaling_page()
    config = make_config("tiny", seed=1)
    manifest = read_manifest(stage_folder(config, "win_rate")) or {}
    write_manifest(config, "win_rate", manifest["results"] | {"posts": 500})
    line = refused(capsys, "scaling-tiny")
    assert "runs/tiny/seed1/win_rate/facts/manifest.json has changed" in line


def test_code_that_was_not_committed_is_refused(place, capsys, monkeypatch):
    monkeypatch.setitem(fabricated_runs.MADE, "code_version", "508a0d9-dirty")
    write_scaling_page()
    line = refused(capsys, "scaling-tiny")
    assert "code that was not committed (508a0d9-dirty)" in line


def test_an_unknown_page_gets_the_nearest_name(place, capsys):
    write_scaling_page()
    assert "did you mean scaling-tiny?" in refused(capsys, "scaling-tny")


def test_if_two_judges_have_a_page_of_this_name_one_has_to_be_chosen(place, capsys):
    for judge in ("facts", "other"):
        write_page(Path("runs/tiny/seed1/report") / judge, "tiny-seed1", judges=[judge])
    line = refused(capsys, "tiny-seed1")
    assert "tiny-seed1 was written for the judges facts, other: choose one with JUDGE=" in line


def test_the_page_of_the_chosen_judge_is_published(place):
    for judge in ("facts", "other"):
        write_page(Path("runs/tiny/seed1/report") / judge, "tiny-seed1", judges=[judge])
    publish.main(["--pages", "tiny-seed1", "--judge", "other"])
    assert render.read_page_record(GENERATED, "tiny-seed1")["made_from"]["judges"] == ["other"]


def test_a_json_that_is_no_page_is_named(place, capsys):
    write_scaling_page()
    GENERATED.mkdir(parents=True)
    (GENERATED / "other.json").write_text("{}", encoding="utf-8")
    line = refused_by(capsys, publish.main, "--pages", "scaling-tiny")
    assert "other.json is not the record of a page" in line


# -- the index -------------------------------------------------------------------------------------


def test_pages_are_listed_by_question_with_their_answer(place):
    write_page(GENERATED, "tiny-seed1")
    write_page(GENERATED, "scaling-tiny", kind="scaling", names=["tiny"])
    write_page(GENERATED, "scaling-a-b", kind="scaling", names=["a", "b"])
    write_page(GENERATED, "calibration-x", kind="calibration")
    text = index(GENERATED)
    assert re.findall(r"^(?:## |\*\*\[Title\]\()([^)\n]*)", text, re.MULTILINE) == [
        "Does PPO work?",
        "scaling-tiny.md",
        "tiny-seed1.md",
        "Does size matter?",
        "scaling-a-b.md",
        "What does the judge know?",
        "calibration-x.md",
        "Provenance",
    ]
    assert "**[Title](tiny-seed1.md)**  \nThe answer.\n" in text


def test_a_page_of_an_unknown_kind_is_listed_at_the_end(place):
    write_page(GENERATED, "new", kind="new")
    assert "## Other pages\n\n**[Title](new.md)**" in index(GENERATED)


def test_the_table_says_what_a_page_was_made_from(place):
    write_page(GENERATED, "tiny-seed1", code_versions=["abc", "def"])
    row = "| [tiny-seed1](tiny-seed1.md) | tiny | facts | CPU | 2026-11-30 | abc, def |"
    assert row in index(GENERATED)


def test_a_page_by_an_earlier_version_is_marked_with_its_commit(place):
    write_page(GENERATED, "old", code_versions=["abc"])
    path = GENERATED / "old.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    record["tables"] = record.pop("numbers")
    path.write_text(json.dumps(record), encoding="utf-8")
    text = index(GENERATED)
    assert "**[Title](old.md)** (written by an earlier version)" in text
    assert "| 2026-11-30 | abc (earlier version) |" in text


# -- what is committed -----------------------------------------------------------------------------

COMMITTED = ROOT / GENERATED
FRONT = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = FRONT.split("\n## Results, and how far to trust them\n")[1].split("\n## ")[0]
FINDINGS = (ROOT / "reports/FINDINGS.md").read_text(encoding="utf-8").split("\n## ")[1:]
NOT_PROSE = re.compile(r"!?\[[^\]]*\]\([^)]*\)|```.*?```|`[^`]*`|<!-- .*? -->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w-])")
LEVEL = 95.0  # of every interval


def test_every_published_file_is_recorded_with_its_hash():
    recorded: dict[str, str] = {}
    for path in COMMITTED.glob("*.json"):
        recorded.update(json.loads(path.read_text(encoding="utf-8"))["files"])

    published = {}
    for path in COMMITTED.iterdir():
        if path.suffix in (".md", ".svg") and path.name != INDEX:
            published[path.name] = file_hash(path)

    assert published == recorded


def test_the_published_index_lists_the_published_pages():
    assert (COMMITTED / INDEX).read_text(encoding="utf-8") == index(COMMITTED)


@pytest.mark.parametrize("section", [RESULTS, *FINDINGS])
def test_every_number_of_a_result_is_on_a_page_that_its_section_links_to(section):
    on_pages = {LEVEL}
    for stem in re.findall(r"\((?:reports/)?generated/([\w.-]+)\.md\)", section):
        on_pages.update(numbers_in((COMMITTED / f"{stem}.md").read_text(encoding="utf-8")))
    prose = NOT_PROSE.sub(" ", section)
    missing = [number for number in NUMBER.findall(prose) if not is_rounding(number, on_pages)]
    assert missing == []


def numbers_in(text: str) -> Iterator[float]:
    """Every number of a text, and every count as in 1.02M."""
    for digits, unit in re.findall(r"(?<![\w.])([-+]?[\d,]*\.?\d+)([KM]?)\b", text):
        number = float(digits.replace(",", ""))
        yield number
        yield number * {"": 1, "K": 1e3, "M": 1e6}[unit]


def is_rounding(text: str, numbers: set[float]) -> bool:
    """Whether a number as written is a rounding of one of the numbers, in percent or millions."""
    value = float(text.replace(",", ""))
    digits = len(text.partition(".")[2])
    tolerance = 0.5 * 10**-digits + 1e-9
    for number in numbers:
        for scaled in (number, 100 * number, number / 1e6):
            if abs(scaled - value) <= tolerance:
                return True
    return False
