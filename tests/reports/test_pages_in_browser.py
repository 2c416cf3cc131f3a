"""In a real browser no page scrolls sideways, no planted script runs, and everything is readable.

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
PAGES = ("run", "calibration", "compare", "ablations", "scaling")
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
    """The path of each page of fabricated runs; scripts are planted in posts and summaries."""
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
    """Open a page in a window of this width."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.seen.clear()
    browser.open(path)


OPEN_ALL = "document.querySelectorAll('details').forEach(details => details.open = true)"
# Elements beyond the window's edge that are in no box that scrolls by itself.
ELEMENTS_BEYOND = """
JSON.stringify([...document.querySelectorAll("main *")]
  .filter(element => !element.closest("svg, .scroll, blockquote")
    || element.matches("svg, .scroll"))
  .filter(element => element.getBoundingClientRect().right
    > document.documentElement.clientWidth + 1)
  .slice(0, 5).map(element => element.outerHTML.slice(0, 80)))
"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_no_page_scrolls_sideways_or_loads_anything(browser, pages, name, width):
    look(browser, pages[name], width)
    browser.value(OPEN_ALL)
    assert json.loads(browser.value(ELEMENTS_BEYOND)) == []
    assert browser.wrong() == []
    addresses = {address for address in browser.asked() if not address.startswith("data:")}
    assert addresses == {pages[name].as_uri()}


def test_sections_are_closed_on_the_screen_and_open_on_paper(browser, pages):
    look(browser, pages["run"], 1400)
    sections = "document.querySelectorAll('main > details')"
    assert browser.value(f"{sections}.length") > 5
    assert browser.value(f"[...{sections}].filter(section => section.open).length") == 0

    height = f"{sections}[2].getBoundingClientRect().height"
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.value(height) > 150
    browser.call("Emulation.setEmulatedMedia", media="")
    assert browser.value(height) < 150


def test_a_script_planted_in_a_post_or_a_summary_does_not_run(browser, pages):
    assert "planted" in pages["run"].read_text(encoding="utf-8")
    look(browser, pages["run"], 1400)
    assert browser.value("document.title").startswith("tiny, seed 1: PPO has a win rate of ")
    assert browser.value("document.querySelectorAll('img[src=x], script').length") == 0


@pytest.fixture
def page_with_script(pages, tmp_path):
    """A page into whose markup a script came."""
    text = pages["scaling"].read_text(encoding="utf-8").replace("<h1>", f"{PLANTED}<h1>")
    path = tmp_path / "page.html"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_policy_of_a_page_stops_a_script_in_its_markup(browser, page_with_script):
    look(browser, page_with_script, 1400)
    assert browser.value("document.title") != "planted"


def test_without_the_policy_the_script_would_run(browser, page_with_script):
    text = page_with_script.read_text(encoding="utf-8")
    page_with_script.write_text(text.replace("Content-Security-Policy", "none"), encoding="utf-8")
    look(browser, page_with_script, 1400)
    assert browser.value("document.title") == "planted"


needs_axe = pytest.mark.skipif(AXE is None, reason="axe-core-python is not installed")
RUN_AXE = """
axe.run(document, {runOnly: RULES, resultTypes: ["violations"]}).then(results =>
  JSON.stringify(results.violations.map(violation => ({
    rule: violation.id,
    elements: violation.nodes.slice(0, 3).map(
      node => node.html.slice(0, 160) + node.failureSummary),
  }))))
"""


def axe_violations(browser):
    """What axe-core finds wrong with the open page: rules, and the elements that violate them."""
    assert AXE is not None
    assert AXE.submodule_search_locations is not None
    (folder,) = AXE.submodule_search_locations
    library = (Path(folder) / "axe.min.js").read_text(encoding="utf-8")
    browser.value(f"{OPEN_ALL}; 0")
    browser.value(f"{library};0")
    answer = browser.call(
        "Runtime.evaluate",
        expression=RUN_AXE.replace("RULES", json.dumps(RULES)),
        awaitPromise=True,
        returnByValue=True,
    )
    return json.loads(answer["result"]["value"])


@needs_axe
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_fault_of_contrast_names_or_regions(browser, pages, name):
    look(browser, pages[name], 768)
    assert axe_violations(browser) == []


@needs_axe
def test_axe_would_find_faint_text_and_a_plot_without_a_name(browser, pages):
    look(browser, pages["run"], 768)
    browser.value("document.querySelector('p').style.color = 'rgb(200, 200, 200)'; 0")
    browser.value("document.querySelector('.panel').removeAttribute('aria-label'); 0")
    rules = [violation["rule"] for violation in axe_violations(browser)]
    assert sorted(rules) == ["color-contrast", "role-img-alt"]
