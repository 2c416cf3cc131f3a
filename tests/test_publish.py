"""Published pages are copies of finished, clean pages, and the README says what they say."""

import json
import re
import shutil
from pathlib import Path

import pytest

from eval import versus
from reports import ablations_page, calibration_page, run_page, scaling_page, versus_page
from reports.parts.page import PLOT, beside_the_runs
from reports.sharing import publish
from reports.sharing.index import in_readme, run_entries
from reports.sharing.publish import GENERATED, README, RECORD
from stages.finished import read_manifest, stage_folder
from stages.running.files import file_hash
from stages.settings import config as settings
from stages.settings.command_line import make_config
from tests import fabricated_runs
from tests.fabricated_runs import calibrated, fabricate, two_judges, write_manifest

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2)
INDEX = {"index.html", "index.md"}
MARKED = "before\n<!-- results -->\nold\n<!-- /results -->\n"


@pytest.fixture
def place(tmp_path, monkeypatch, no_drawing):
    """A folder with runs, a README with a place for its table, and no git; empty plots."""
    monkeypatch.chdir(tmp_path)
    README.write_text(MARKED)
    return tmp_path


def finished(*seeds, name="tiny", **changes):
    """Runs with their pages."""
    for seed in seeds:
        config = make_config(name, seed=seed)
        fabricate(config, **changes)
        run_page.write_report(config)


def files_below(folder):
    return {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}


def published():
    return json.loads((GENERATED / RECORD).read_text())["pages"]


def refused(capsys, *arguments):
    """The one line with which publishing is refused; nothing was written."""
    with pytest.raises(SystemExit):
        publish.main([*arguments])
    assert not GENERATED.exists()
    assert README.read_text() == MARKED
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_pages_of_every_kind_are_copied_with_true_hashes(place, capsys):
    finished(*SEEDS)
    calibrated(make_config("tiny", seed=1), flags=[])
    run_page.write_report(make_config("tiny", seed=1))
    calibration_page.main(["--seed", "1"])
    scaling_page.main(["--names", "tiny"])
    sides = ["--a", "tiny/1:sft", "--b", "tiny/1:ppo", "--set", "judge.kind=reward_model"]
    versus.main(sides)
    versus_page.main(sides)
    capsys.readouterr()
    publish.main([])
    pages = published()
    compared = "versus-tiny-1-sft-tiny-1-ppo"
    names = ["scaling-tiny", "tiny-seed1", "tiny-seed1-judge-calibration", "tiny-seed2", compared]
    assert list(pages) == names
    printed = capsys.readouterr().out.splitlines()
    assert set(names) == {line.strip() for line in printed[1:]}
    assert max(map(len, printed)) <= 80
    for page in pages.values():
        for file, hash_ in page["files"].items():
            assert file_hash(GENERATED / file) == hash_
        for manifest, hash_ in page["manifests"].items():
            assert file_hash(settings.RUNS / manifest) == hash_
        (markdown,) = [one for one in page["files"] if one.endswith(".md")]
        shown = PLOT.findall((GENERATED / markdown).read_text())
        of_numbers = [one for one in page["files"] if "-numbers/" in one]
        assert len(page["files"]) == 2 + len(shown) + len(of_numbers)
        assert {f"{markdown[:-3]}-numbers/page.json"} < set(of_numbers)
    listed = {file for page in pages.values() for file in page["files"]}
    assert files_below(GENERATED) == {*listed, RECORD, *INDEX}
    assert pages["tiny-seed1"]["runs"] == {"tiny": [1]}
    assert "tiny/seed1/calibration/facts/manifest.json" in pages["tiny-seed1"]["manifests"]
    assert pages["scaling-tiny"]["runs"] == {"tiny": [1, 2]}
    assert pages[compared]["runs"] == {"tiny": [1]}
    one = pages["tiny-seed2"]
    assert (one["judge"], one["kind"]) == ("facts", "run")
    assert "508a0d9" in one["code_versions"]
    assert one["devices"] == ["CPU, 2 cores (AMD EPYC, AVX2)"]
    assert one["numbers"]["ppo/win_rate"] == 0.63
    assert "3.11.7" in one["versions"]["python"]


def test_texts_of_real_data_stand_on_the_runs_own_page_and_are_not_published(place):
    config = make_config("pythia-1b", seed=1)
    fabricate(config, judge=fabricated_runs.ONLINE)
    run_page.write_report(config)
    publish.main(["--names", "pythia-1b"])
    own = stage_folder(config, "report")
    for suffix in (".md", ".html"):
        name = f"pythia-1b-seed1{suffix}"
        here, there = (own / name).read_text(), (GENERATED / name).read_text()
        for theirs in ("SUBREDDIT: r/x", "the aunt"):  # of every post, of every reference
            assert theirs in here
            assert theirs not in there
        ours = "My aunt sold my lamp."
        assert here.count(ours) == there.count(ours) > 0
        assert "are others" in there


def test_a_page_that_is_published_again_is_replaced_wholly(place):
    finished(1)
    publish.main([])
    record = published()["tiny-seed1"]
    markdown = GENERATED / "tiny-seed1.md"
    markdown.write_text(markdown.read_text() + "\n![Plot: old](tiny-seed1-old.svg)\n")
    for name in ("tiny-seed1-old.svg", "other-seed1-old.svg"):
        (GENERATED / name).write_text("old")
    publish.main([])
    assert published()["tiny-seed1"] == record
    assert not (GENERATED / "tiny-seed1-old.svg").exists()
    assert (GENERATED / "other-seed1-old.svg").exists()  # nobody's: named, not deleted


def test_pages_of_other_runs_stay_and_pages_that_need_them_wait(place):
    finished(1)
    finished(1, name="tiny-s")
    scaling_page.main(["--names", "tiny-s", "tiny"])
    publish.main(["--names", "tiny"])
    assert list(published()) == ["tiny-seed1"]
    publish.main(["--names", "tiny-s"])
    assert list(published()) == ["tiny-s-seed1", "tiny-seed1"]
    publish.main(["--names", "tiny-s", "tiny"])
    assert list(published()) == ["scaling-tiny-s-tiny", "tiny-s-seed1", "tiny-seed1"]


def test_one_kind_of_page_can_be_published_without_the_others(place, capsys):
    finished(1)
    finished(1, name="tiny-s")
    scaling_page.main(["--names", "tiny-s", "tiny"])
    runs = ["--names", "tiny-s", "tiny", "--kinds"]
    assert "did you mean scaling?" in refused(capsys, *runs, "scalin")
    publish.main([*runs, "scaling"])
    assert list(published()) == ["scaling-tiny-s-tiny"]
    finished(2)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        publish.main([*runs, "scaling"])
    assert "lacks seed 2 of tiny" in capsys.readouterr().err


def test_kinds_that_are_not_meant_are_not_looked_at(place):
    """Two judges' pages of the run ask for JUDGE; a page about its ablations does not."""
    finished(1)
    turned = make_config(
        "tiny", seed=1, name="tiny-dropout", upstream="tiny", overrides=("ppo.dropout=0.1",)
    )
    fabricate(turned, texts=[f"summary {index}" for index in range(9)])
    ablations_page.main(["--name", "tiny", "--ablations", "dropout"])
    report = settings.RUNS / "tiny" / "seed1" / "report"
    shutil.copytree(report / "facts", report / "another")
    with pytest.raises(SystemExit):
        publish.main([])
    publish.main(["--kinds", "ablations"])
    assert list(published()) == ["ablations-tiny"]


def test_ablations_of_a_run_go_with_it(place):
    finished(1)
    turned = make_config(
        "tiny", seed=1, name="tiny-dropout", upstream="tiny", overrides=("ppo.dropout=0.1",)
    )
    fabricate(turned, texts=[f"summary {index}" for index in range(9)])
    ablations_page.main(["--name", "tiny", "--ablations", "dropout"])
    publish.main([])
    page = published()["ablations-tiny"]
    assert page["runs"] == {"tiny": [1], "tiny-dropout": [1]}
    assert page["about"] == ["tiny"]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["ppo", "judge"])
def test_a_stale_run_is_refused(place, capsys, stage):
    finished(1)
    write_manifest(make_config("tiny", seed=1), stage, {"updates": 61})
    line = refused(capsys)
    assert f"was made from an earlier {stage}: run `make eval PRESET=tiny SEED=1`" in line


def test_a_page_that_lacks_a_later_calibration_is_refused(place, capsys):
    finished(1)
    calibrated(make_config("tiny", seed=1), flags=[])
    line = refused(capsys)
    assert "tiny seed1: stage report was made without calibration: run `make eval" in line


def test_a_page_that_was_changed_by_hand_is_refused(place, capsys):
    finished(1)
    page = stage_folder(make_config("tiny", seed=1), "report") / "tiny-seed1.md"
    page.write_text(page.read_text().replace("63.0%", "64.0%"))
    said = "stage report has changed on disk (tiny-seed1.md): run `make eval PRESET=tiny SEED=1`"
    assert said in refused(capsys)


def test_pages_about_several_runs_are_refused_where_a_run_changed_or_a_seed_joined(place, capsys):
    finished(1)
    scaling_page.main(["--names", "tiny"])
    finished(2)
    assert "scaling-tiny lacks seed 2 of tiny: run `make scaling`" in refused(capsys)
    scaling_page.main(["--names", "tiny"])
    config = make_config("tiny", seed=2)
    before = read_manifest(stage_folder(config, "win_rate")) or {}
    write_manifest(config, "win_rate", before["results"] | {"posts": 500})
    run_page.write_report(config)
    said = "scaling-tiny was made from an earlier tiny/seed2/win_rate/facts: run `make scaling"
    assert said in refused(capsys)
    scaling_page.main(["--names", "tiny"])
    with (beside_the_runs() / "scaling-tiny.md").open("a") as page:
        page.write("best")
    assert "scaling-tiny has changed on disk" in refused(capsys)


def test_a_comparison_is_refused_where_its_verdicts_changed(place, capsys):
    finished(1)
    sides = ["--a", "tiny/1:sft", "--b", "tiny/1:ppo", "--set", "judge.kind=reward_model"]
    versus.main(sides)
    versus_page.main(sides)
    path = settings.RUNS / "versus-tiny-1-sft-tiny-1-ppo/seed1/versus/reward_model/manifest.json"
    path.write_text(path.read_text() + "\n")
    capsys.readouterr()
    assert "run `make versus A=tiny/1:sft B=tiny/1:ppo`" in refused(capsys)
    assert publish.as_typed("tiny-2-44413-best-of-4") == "tiny-2/44413:best-of-4"


def test_code_that_was_not_committed_is_refused_unless_allowed(place, capsys, monkeypatch):
    monkeypatch.setitem(fabricated_runs.MADE, "code_version", "508a0d9-dirty")
    finished(1)
    line = refused(capsys)
    assert "tiny-seed1 was made with code that was not committed (508a0d9-dirty)" in line
    publish.main(["--allow-dirty"])
    assert "508a0d9-dirty" in published()["tiny-seed1"]["code_versions"]


def test_a_published_page_of_the_same_name_about_other_runs_is_not_replaced(place, capsys):
    finished(1)
    scaling_page.main(["--names", "tiny"])
    publish.main([])
    record = json.loads((GENERATED / RECORD).read_text())
    record["pages"]["scaling-tiny"]["about"] = ["other"]
    (GENERATED / RECORD).write_text(json.dumps(record))
    capsys.readouterr()
    with pytest.raises(SystemExit):
        publish.main([])
    said = "scaling-tiny in reports/generated is about other, not tiny: remove it from published"
    assert said in capsys.readouterr().err
    assert published() == record["pages"]


def test_unknown_runs_runs_without_a_page_and_two_judges_are_refused(place, capsys):
    both = two_judges()
    assert "run tiny has no page: run `make eval`" in refused(capsys)
    assert "unknown run 'tiyn': did you mean tiny?" in refused(capsys, "--names", "tiyn")
    for config in both:
        run_page.write_report(config)
    assert "choose one with JUDGE=" in refused(capsys)
    publish.main(["--judge", "facts"])
    assert published()["tiny-seed44413"]["judge"] == "facts"


# -- the README ------------------------------------------------------------------------------------


def test_the_table_of_the_readme_is_written_and_a_second_time_changes_nothing(place):
    finished(*SEEDS)
    publish.main([])
    text = README.read_text()
    assert text.startswith(f"before\n<!-- results -->\n|  | win rate, mean of {len(SEEDS)} seeds |")
    assert text.endswith("|\n<!-- /results -->\n")
    assert "| PPO at equal length | 59.0% " in text
    publish.main([])
    assert README.read_text() == text


def test_a_readme_without_markers_or_of_another_run_stays(place):
    finished(1, name="tiny-s")
    publish.main(["--names", "tiny-s"])
    assert README.read_text() == MARKED
    README.write_text("plain")
    finished(1)
    publish.main([])
    assert README.read_text() == "plain"


# -- what is committed -----------------------------------------------------------------------------

COMMITTED = ROOT / GENERATED / RECORD
WITHOUT_NUMBERS = re.compile(r"!?\[[^\]]*\]\([^)]*\)|`[^`]*`|<!-- .*? -->")
NUMBER = re.compile(r"(?<![\w.-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w-])")
CORES = re.compile(r"\d+(?= cores)|(?<=threads: )\d+")  # not the numbers in a processor's name
LEVEL = 95.0  # of every interval


def committed():
    return json.loads(COMMITTED.read_text(encoding="utf-8"))


def readme():
    return (ROOT / README).read_text(encoding="utf-8")


def test_every_published_file_is_recorded_with_its_hash():
    recorded = {k: v for page in committed()["pages"].values() for k, v in page["files"].items()}
    there = {one: file_hash(ROOT / GENERATED / one) for one in files_below(ROOT / GENERATED)}
    del there[RECORD]
    assert there == recorded | committed()["index"]


def test_the_table_of_the_readme_is_that_of_the_published_numbers():
    text = readme()
    assert "<!-- results -->\n" in text
    assert "<!-- /results -->" in text
    assert in_readme(text, committed()) == text


def test_every_number_in_the_prose_beside_the_results_is_a_published_one():
    prose = prose_beside_the_results(readme())
    assert prose.strip()
    known = numbers_of(committed()) | numbers_of_linked_tables(readme())
    assert [one for one in NUMBER.findall(prose) if not is_known(one, known)] == []


def prose_beside_the_results(text):
    """The section of the README that holds the result table, without table, links and code."""
    before, table, after = re.split(r"(?s)(<!-- results -->.*<!-- /results -->)", text)
    section = before.rpartition("\n## ")[2].partition("\n")[2] + after.partition("\n## ")[0]
    assert table
    return WITHOUT_NUMBERS.sub(" ", section)


def numbers_of(record):
    """Every number of the rows of the README's runs, of their seeds and of their devices."""
    entries = run_entries(record)
    found = {LEVEL, float(len(entries))}
    for entry in entries:
        row = entry["numbers"]
        nested = [row["differences"], *(row[f"{one}/statistics"] for one in row["policies"])]
        parts = [row, *(one for each in nested for one in each.values() if isinstance(one, dict))]
        found |= {float(v) for part in parts for v in part.values() if isinstance(v, int | float)}
        found |= {float(one) for text in entry["devices"] for one in CORES.findall(text)}
    return found


def numbers_of_linked_tables(text):
    """Every number, and every count as in 1.02M, of the tables of some pages that it links to."""
    found = set()
    names = {"ablations": ("page-switch", "each-seed-switch", "pace"), "planted": ("page-error",)}
    linked = r"\(reports/generated/((ablations|planted|compare|rivals|smollm2)-[\w-]+)\.md\)"
    for stem, kind in re.findall(linked, text):
        folder = ROOT / GENERATED / f"{stem}-numbers"
        files = (one for name in names.get(kind, ("*",)) for one in folder.glob(f"{name}.csv"))
        cells = "".join(file.read_text(encoding="utf-8") for file in files)
        found |= {float(one) for one in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?\b", cells)}
    for stem in re.findall(r"\(reports/generated/(scaling-[\w-]+)\.md\)", text):
        for name in ("sizes.csv", "measured.csv"):
            cells = (ROOT / GENERATED / f"{stem}-numbers" / name).read_text(encoding="utf-8")
            written = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)([KM]?)\b", cells)
            found |= {float(one) * {"": 1, "K": 1e3, "M": 1e6}[unit] for one, unit in written}
            found |= {float(one) for one, unit in written if unit == "K"}
    return found


def is_known(text, known):
    """Whether a number as written is a rounding of a known one, its percentage or its millions."""
    value, digits = float(text.replace(",", "")), len(text.partition(".")[2])
    scaled = (one for v in known for one in (v, 100 * v, v / 1e6))
    return any(abs(one - value) <= 0.5 * 10**-digits + 1e-9 for one in scaled)


def test_a_number_that_nobody_published_is_found():
    text = "\n## Came out\n0.93 million, PPO 63.0 and `7` on 600 posts; 64.5 not.\n"
    text += "<!-- results -->\n| 1 |\n<!-- /results -->\nLength [12](x-13.svg) 59 %.\n\n## More\n8"
    known = {930_432.0, 0.63, 600.0, 0.59}
    written = NUMBER.findall(prose_beside_the_results(text))
    assert written == ["0.93", "63.0", "600", "64.5", "59"]
    assert [one for one in written if not is_known(one, known)] == ["64.5"]
