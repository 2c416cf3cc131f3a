"""The pages in a real browser: nothing scrolls sideways, nothing planted runs, all can be read.

The pages are those of fabricated runs. axe-core, which checks contrast and names, comes with the
developers' packages.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from reports import ablations, about_runs, calibration, compare, scaling
from reports import run as run_page
from stages.config import paths
from stages.config.command_line import make_config
from stages.runs.manifest import stage_folder
from tests.lib.fabricated_runs import calibrated, fabricate

AXE = find_spec("axe_core_python")
WIDTHS = (360, 390, 768, 1400)
KINDS = ("run", "calibration", "compare", "ablations", "scaling")
PLANTED = "<script>document.title = 'planted'</script><img src=x onerror=document.title='planted'>"
RULES = [
    "aria-allowed-attr",
    "color-contrast",
    "document-title",
    "duplicate-id-aria",
    "html-has-lang",
    "image-alt",
    "link-name",
    "list",
    "region",
    "role-img-alt",
    "scrollable-region-focusable",
    "svg-img-alt",
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Kind -> the page of fabricated runs, in whose posts and summaries scripts are planted."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(paths, "RUNS", tmp_path_factory.mktemp("pages") / "runs")
        texts = [f"{PLANTED} summary {index}" for index in range(9)]
        for seed in (1, 2):
            fabricate(make_config("tiny", seed=seed), texts=texts)
            fabricate(make_config("tiny-s", seed=seed), size=350_000)
        dropout = {"name": "tiny-dropout", "upstream": "tiny", "overrides": ("ppo.dropout=0.1",)}
        fabricate(make_config("tiny", seed=1, **dropout), ppo=0.6, texts=texts[::-1])
        config = make_config("tiny", seed=1)
        calibrated(config, flags=["it agrees with the labels on 51.0%"])
        run_page.write_report(config)
        calibration.write_report(config)
        compare.main(["--runs", "tiny:ppo", "tiny:sft", "tiny-s:ppo"])
        ablations.main(["--name", "tiny", "--ablations", "dropout"])
        scaling.main(["--names", "tiny-s", "tiny"])
        folder = about_runs.folder()
        report = stage_folder(config, "calibration_report")
        yield {
            "run": stage_folder(config, "report") / "tiny-seed1.html",
            "calibration": report / "tiny-seed1-judge-calibration.html",
            "compare": folder / "compare-tiny-ppo-tiny-sft-tiny-s-ppo.html",
            "ablations": folder / "ablations-tiny.html",
            "scaling": folder / "scaling-tiny-s-tiny.html",
        }


def look(browser, path, width):
    """Open a page in a window so wide."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.seen.clear()
    browser.open(path)


OPEN_ALL = "document.querySelectorAll('details').forEach(one => one.open = true)"
# What is beyond the window's edge and in no box that scrolls by itself.
BEYOND = """
JSON.stringify([...document.querySelectorAll("main *")]
  .filter(one => !one.closest("svg, .scroll, blockquote") || one.matches("svg, .scroll"))
  .filter(one => one.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .slice(0, 5).map(one => one.outerHTML.slice(0, 80)))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_no_page_scrolls_sideways_or_loads_anything(browser, pages, kind):
    for width in WIDTHS:
        look(browser, pages[kind], width)
        browser.value(OPEN_ALL)
        assert json.loads(browser.value(BEYOND)) == [], width
        assert browser.wrong() == []
        asked = {address for address in browser.asked() if not address.startswith("data:")}
        assert asked == {pages[kind].as_uri()}


def test_sections_are_closed_on_the_screen_and_open_on_paper(browser, pages):
    look(browser, pages["run"], 1400)
    sections = "document.querySelectorAll('main > details')"
    assert browser.value(f"{sections}.length") > 5
    assert browser.value(f"[...{sections}].filter(one => one.open).length") == 0
    browser.call("Emulation.setEmulatedMedia", media="print")
    height = f"{sections}[2].getBoundingClientRect().height"
    assert browser.value(f"{height} > 150")
    browser.call("Emulation.setEmulatedMedia", media="")
    assert browser.value(f"{height} < 150")


def test_a_script_planted_in_a_post_or_a_summary_does_not_run(browser, pages):
    assert "planted" in pages["run"].read_text(encoding="utf-8")
    look(browser, pages["run"], 1400)
    assert browser.value("document.title").startswith("tiny, seed 1: PPO has a win rate of ")
    assert browser.value("document.querySelectorAll('img[src=x], script').length") == 0


@pytest.mark.parametrize("policy", ["Content-Security-Policy", "none"])
def test_where_markup_came_through_the_policy_of_a_page_stops_a_script(
    browser, pages, tmp_path, policy
):
    text = pages["scaling"].read_text(encoding="utf-8").replace("<h1>", f"{PLANTED}<h1>")
    path = tmp_path / "page.html"
    path.write_text(text.replace("Content-Security-Policy", policy), encoding="utf-8")
    look(browser, path, 1400)
    assert (browser.value("document.title") == "planted") == (policy == "none")


def faults(browser, before="0"):
    """What axe-core finds wrong with the open page; `before` is run first."""
    browser.value(f"{OPEN_ALL}; {before}")
    (folder,) = (AXE and AXE.submodule_search_locations) or []
    browser.value((Path(folder) / "axe.min.js").read_text(encoding="utf-8") + ";0")
    asked = f"axe.run(document, {{runOnly: {json.dumps(RULES)}, resultTypes: ['violations']}})"
    listed = "found => JSON.stringify(found.violations.map(one => [one.id,"
    listed += " one.nodes.slice(0, 3).map(node => node.html.slice(0, 160) + node.failureSummary)]))"
    found = browser.call(
        "Runtime.evaluate",
        expression=f"{asked}.then({listed})",
        awaitPromise=True,
        returnByValue=True,
    )
    return json.loads(found["result"]["value"])


@pytest.mark.skipif(AXE is None, reason="axe-core-python is not installed")
def test_axe_finds_no_fault_of_contrast_names_or_regions_but_one_that_is_there(browser, pages):
    for kind in KINDS:
        look(browser, pages[kind], 768)
        assert faults(browser) == []
    look(browser, pages["run"], 768)
    faint = "document.querySelector('p').style.color = 'rgb(200, 200, 200)'"
    silent = "document.querySelector('.panel').removeAttribute('aria-label')"
    found = faults(browser, f"{faint}; {silent}; 0")
    assert sorted(name for name, _ in found) == ["color-contrast", "role-img-alt"]
