"""The page of a judge's calibration says how far the judge can be trusted."""

import json

import pytest

from reports import calibration
from reports.judging import calibration_result
from reports.plots import Bar, agreements, draw
from reports.results import Interval
from stages.config import paths
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.runs.manifest import read_manifest, stage_folder
from tests.lib.fabricated_runs import calibrated, fabricate, interval, write_manifest
from tests.lib.make_stages import run_module

STEM = "tiny-seed44413-judge-calibration"
FLAG = "it is not shown to agree more often than the longest text: +1.5% [-2.2%, +5.2%]"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, no_drawing):
    """A runs folder of the test's own, and pages with empty plots."""
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")


def page_of(flags=(), **changes):
    """The Markdown of the page of a calibration whose results have these changes."""
    config = make_config("tiny")
    fabricate(config)
    calibrated(config, flags=list(flags))
    manifest = read_manifest(stage_folder(config, "calibration"))
    assert manifest is not None
    write_manifest(config, "calibration", manifest["results"] | changes)
    return write_page()


def write_page():
    """Write the page of the calibration on disk; its Markdown."""
    run_module(calibration, ["--preset", "tiny"])
    return (stage_folder(make_config("tiny"), "calibration_report") / f"{STEM}.md").read_text()


def compared(**differences):
    """Results in which the judge agrees more often than simple rules by these intervals."""
    simple = {}
    for name, (low, high) in differences.items():
        estimate = (low + high) / 2
        simple[name] = {
            "agreement": interval(0.75 - estimate),
            "kappa": None,
            "difference": {"estimate": estimate, "low": low, "high": high, "posts": 180},
        }
    return {"simple": simple}


def title_of(page):
    return page.splitlines()[0].removeprefix("# tiny: ")


# -- the title -------------------------------------------------------------------------------------


def test_a_judge_that_beats_all_rules_is_compared_with_the_best_of_them():
    page = page_of(**compared(longest=(0.10, 0.14), majority=(0.20, 0.24), overlap=(0.05, 0.07)))
    assert title_of(page) == (
        "the judge agrees with the labels on 75.0% of the pairs, 6.0 points more often than the"
        " best simple rule"
    )
    assert "choosing the text that repeats more of the post, which agrees on 69.0%" in page


def test_a_judge_that_is_not_shown_to_beat_the_longer_text_says_so():
    page = page_of(**compared(majority=(-0.01, 0.05), longest=(-0.02, 0.05)))
    assert title_of(page) == "the judge is not significantly better than choosing the longer text"


def test_a_judge_that_beats_no_rule_is_compared_with_the_best_of_them():
    page = page_of(**compared(longest=(-0.02, 0.12), overlap=(-0.08, 0.02)))
    text = " ".join(page.split())
    best = "The best simple rule is choosing the text that repeats more of the post"
    assert f"{best}, which agrees on 78.0%" in text
    assert "the judge is not significantly different (-3.0 points [-8.0, +2.0])" in text


def test_a_judge_that_loses_to_a_rule_says_so():
    page = page_of(**compared(longest=(0.01, 0.05), overlap=(-0.08, -0.02)))
    assert title_of(page) == (
        "the judge is worse than choosing the text that repeats more of the post"
    )


def test_too_few_posts_decide_nothing():
    undecided = "its calibration, too few posts (3 of 125 needed)"
    page = page_of(**compared(longest=(-0.3, 0.4)), posts=3, undecided=undecided)
    assert title_of(page) == "3 posts are too few to tell how well the judge agrees with the labels"
    assert f"neither passed nor failed a check: {undecided}." in page


def test_a_judge_without_verdicts_says_so():
    page = page_of(agreement=None, simple={}, flags=["no pair has a verdict in both orders"])
    assert title_of(page) == "the judge gave no usable verdict on the labeled pairs"
    assert "<img" not in page


# -- the page --------------------------------------------------------------------------------------


def test_each_failed_check_is_listed_once():
    page = page_of(flags=[FLAG])
    assert page.count("than the longest text") == 1
    assert f"- **The judge failed a check:** {FLAG}." in page
    assert "**The judge failed 1 check**" in page


def test_the_numbers_are_those_of_the_calibration():
    page = page_of()
    assert "| this judge | 75.0% [72.0, 78.0] | – | 0.50 [0.40, 0.60] |" in page
    row = "| choose the longer text | 63.0% [60.0, 66.0] | +12.0 [+7.0, +17.0] |"
    assert row in page
    assert "| agreement where it decides | 75.0% [72.0, 78.0] |" in page
    assert "200 pairs of summaries of 180 posts" in page


def test_win_rates_of_an_evaluated_run_are_corrected():
    # Judged right on 9 of 10 labels of each kind, a raw 0.5 stays 0.5.
    page = page_of()
    assert "| PPO | 63.0% | 50.0% [" in page.partition("corrected win rate")[2]
    assert "(clipped)" not in page


def test_labels_of_the_judges_own_rule_test_only_their_noise():
    judge = {"kind": "facts", "name": "facts rule", "is_llm": False, "note": "a rule"}
    differences = compared(longest=(0.10, 0.14))
    page = page_of(source="built-in world", judge=judge, **differences)
    assert title_of(page).endswith("the built-in labels, which are its own rule with noise")
    assert "Win rates are not corrected here" in page
    assert "corrected win rate [95%]" not in page


def test_without_an_evaluated_run_nothing_is_corrected():
    calibrated(make_config("tiny"), flags=[])
    assert "there is no win rate to correct" in write_page()


def test_the_json_has_the_numbers():
    page_of()
    folder = stage_folder(make_config("tiny"), "calibration_report")
    record = json.loads((folder / f"{STEM}.json").read_text())
    assert record["numbers"]["agreement"]["estimate"] == 0.75
    assert record["title"].startswith("tiny: the judge agrees")


# -- the plot --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "band"),
    [("labelled comparisons", (0.72, 0.77)), ("built-in world", None)],
    ids=["people", "built-in world"],
)
def test_peoples_agreement_is_a_band_only_for_labels_by_people(monkeypatch, source, band):
    bands = []

    def record_band(title, bars, ceiling):
        bands.append(ceiling)

    monkeypatch.setattr(calibration, "agreements", record_band)
    monkeypatch.setattr(calibration, "figure", lambda name, panels: None)
    config = make_config("tiny")
    calibrated(config, flags=[])
    results = calibration.find_calibration(config) | {"source": source}
    result = calibration_result(results, corrected={})
    assert result is not None

    calibration.agreement_figure(result)

    assert bands == [band]


BAR = Bar(label="this judge", color="#4f8f92", value=0.75, interval=(0.72, 0.78))


def test_the_plot_names_chance_and_people():
    svg = draw(agreements("Agreement", [BAR], ceiling=(0.72, 0.77)))
    for text in ("this judge", "75.0%", "chance", "people"):
        assert f">{text}<" in svg


def test_the_plot_without_a_band_does_not_name_people():
    assert ">people<" not in draw(agreements("Agreement", [BAR], ceiling=None))


def test_the_plot_has_the_judge_the_rules_and_other_judges():
    config = make_config("tiny")
    calibrated(config, flags=[])
    results = calibration.find_calibration(config)
    longest = results["simple"]["longest"]
    results["simple"] = {"longest": longest, "another judge": longest}

    result = calibration_result(results, corrected={})

    assert result is not None
    assert [row.title for row in result.others] == ["choose the longer text", "another judge"]
    assert [row.is_rule for row in result.others] == [True, False]
    assert result.agreement == Interval(estimate=0.75, low=0.72, high=0.78)


# -- errors ----------------------------------------------------------------------------------------


def test_a_judge_that_was_not_calibrated_is_refused_with_the_command():
    fabricate(make_config("tiny"))
    with pytest.raises(UserError, match="was not calibrated for tiny: run `make judge-calibration"):
        calibration.write_report(make_config("tiny"))
