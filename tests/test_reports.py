"""The reports say what the manifests say, about fabricated runs."""

import html
import re
from functools import partial

import pytest

from reports import calibration_page, run_page
from reports.parts import collect, page, sentences, words
from reports.sections import calibration
from stages.config import config as settings
from stages.config.command_line import make_config
from stages.config.config import Base, Data, JudgeSettings
from stages.runs.manifest import read_manifest, stage_folder
from tests.lib.asserts import refused_by
from tests.lib.fabricated_runs import OFFLINE, STAGES, calibrated, fabricate, write_manifest
from tests.lib.make_stages import run_module

CALIBRATION_PAGE = "tiny-seed44413-judge-calibration.md"


@pytest.fixture
def places(tmp_path, monkeypatch, no_drawing):
    """A folder for runs whose pages have empty plots."""
    return lay_out(tmp_path, monkeypatch)


def lay_out(folder, monkeypatch):
    monkeypatch.setattr(settings, "RUNS", folder / "runs")
    return folder


def tiny_row():
    return collect.numbers_of(collect.load_run(make_config("tiny")))


def report(places, **changes):
    """The Markdown, the HTML, the headline and the results of a fabricated run."""
    results = fabricate(make_config("tiny"), **changes)
    run_module(run_page, ["--preset", "tiny"])
    names = ("tiny-seed44413.md", "tiny-seed44413.html", "headline.txt")
    texts = [(folder_of() / name).read_text().replace("\N{NO-BREAK SPACE}", " ") for name in names]
    return (*texts, results)


def folder_of(stage="report", config=None):
    return stage_folder(config or make_config("tiny"), stage)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A report that several tests read: its folder and what `report` returns."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = lay_out(tmp_path_factory.mktemp("made"), monkeypatch)
        return folder_of(), *report(folder)


def test_the_result_table_shows_the_numbers_of_the_manifests(made):
    _, markdown, html, headline, results = made
    written, wins = results["summaries"], results["win_rate"]["policies"]
    expected = {"reference": [f"{written['reference_tokens']:.1f}", "0.02"]}
    for policy, kl in (("sft", 0.0), ("ppo", results["ppo"]["objective/kl"])):
        row, one = wins[policy], written["policies"][policy]
        bounds = f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
        rate = f"{100 * row['win_rate']:.1f}% {bounds}"
        counts = "".join(f" {row[key]:,} |" for key in ("wins", "ties", "losses"))
        assert f"| {policy.upper()} |{counts} {rate} |" in markdown
        numbers = [rate, f"{one['rougeL']:.3f}"]
        numbers += [f"{one['tokens']:.1f}", f"{100 * one['eos_rate']:.1f}%"]
        expected[policy.upper()] = [*numbers, f"{one['score']:.2f}", f"{kl:.1f}"]
    for name, numbers in expected.items():
        below = markdown.split("## The summaries")[1].splitlines()
        in_markdown = next(x for x in below if x.startswith(f"| {name} |"))
        found = [cell.strip() for cell in in_markdown.split("|")[2:-1] if cell.strip() != "–"]
        assert found == [number for number in numbers if "[" not in number]
        in_headline = next(x for x in headline.splitlines() if x.startswith(name))
        assert re.sub(r"[–\s]+", " ", in_headline).split() == [name, *" ".join(numbers).split()]
        assert all(number in html for number in numbers)
    assert "+21.8 points [+17.8, +25.8]" in headline


def test_the_html_loads_nothing(made):
    html = made[2]
    loads, ids = (re.findall(rf'<[^>]* {key}="([^"]*)"', html) for key in ("(?:src|href)", "id"))
    assert len(loads) == html.count("<img") == 7
    assert all(link.startswith("data:image/svg+xml;base64,") for link in loads)
    assert not re.search(r"<(link|iframe|object|script)\b", html)
    assert """content="default-src 'none'; style-src 'unsafe-inline'; img-src data:;""" in html
    assert len(ids) == len(set(ids)) > 5
    assert not re.search(r"@import|https?://", html)


def test_a_post_cannot_put_markup_on_the_page(made):
    _, markdown, html, _, _ = made
    for text in (markdown, html):
        assert "<script>alert" not in text
        assert "<b>" not in text
        assert "&lt;script&gt;alert(1)" in text
    assert "> \\# no heading" in markdown
    assert "the aunt \\| lamp" in markdown


def test_the_headline_fits_a_terminal_and_ends_with_the_path(places):
    headline = report(places)[2]
    *lines, path = headline.splitlines()
    assert max(map(len, lines)) <= 80
    assert path == str(folder_of() / "tiny-seed44413.html")


def test_every_plot_of_the_markdown_page_is_a_file_beside_it(made):
    folder, markdown, *_ = made
    named = re.findall(r"\]\(([^)]+\.svg)\)", markdown)
    assert len(named) == 7
    assert all((folder / name).exists() for name in named)
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("stage", STAGES)
def test_a_missing_stage_is_refused_with_the_command_to_run(places, capsys, stage):
    fabricate(make_config("tiny"))
    (folder_of(stage) / "manifest.json").unlink()
    line = refused_by(capsys, partial(run_module, run_page), "--preset", "tiny")
    assert line.startswith(f"error: stage {stage} is missing: run `make ")
    assert "PRESET=tiny SEED=44413`" in line
    assert not folder_of().parent.exists()


def test_a_stage_from_an_earlier_one_is_refused(places, capsys):
    fabricate(make_config("tiny"))
    write_manifest(make_config("tiny"), "ppo", {"updates": 61})
    with pytest.raises(SystemExit):
        run_module(run_page, ["--preset", "tiny"])
    assert "stage summaries ran with an earlier ppo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unjudged": 0.015}, "PPO: 1.5% of the posts have no verdict"),
        ({"unjudged": 0.015}, "between 62.1% and 63.6%"),
        ({"unjudged": 0.05}, "Too many comparisons had no verdict"),
        ({"sft": 0.6, "ppo": 0.62}, "PPO did not significantly beat SFT: +2.0 points"),
        ({"sft": 0.6, "ppo": 0.4}, "PPO is WORSE than SFT"),
        ({"sft": 0.6, "ppo": 0.4}, "PPO over-optimised its reward"),
        ({"at_length": 0.52}, "PPO's lead over the references is not shown at equal length: 52.0%"),
        ({"first": 0.584}, "picks the text shown first in 58.4% [55.4, 61.4]"),
        ({"accuracy": 0.51}, "The reward model is not shown to be better than chance"),
        ({"sft": 0.1, "ppo": 0.3}, "does NOT reach the references"),
    ],
)
def test_numbers_that_disappoint_are_said_plainly(places, changes, said):
    fabricate(make_config("tiny"), **changes)
    row = tiny_row()
    told = " ".join([sentences.opening(row).text, *sentences.caveats(row)])
    assert said in told
    headline = run_page.headline(row, folder_of() / "x.html")
    assert all(note in " ".join(headline.split()) for note in sentences.caveats(row))


def test_a_rate_with_too_much_unjudged_stands_nowhere(places):
    markdown, html, headline, results = report(places, unjudged=0.05)
    wins = results["win_rate"]["policies"]["ppo"]
    for text in (markdown, html, headline):
        assert "(5.0% unjudged)" in text
        assert "63.0%" not in text
        assert "+21.8" not in text
        assert "beats SFT" not in text
        assert "no win rate is given" in " ".join(text.split())
    assert "has no rate, so it is not drawn" in markdown
    assert f"between {100 * wins['worst_case'][0]:.1f}%" in markdown


def test_every_rate_stands_beside_the_raw_one(made):
    _, markdown, html, headline, results = made
    found = results["win_rate"]["policies"]["ppo"]["statistics"]
    for text in (markdown, html, headline):
        for key in ("raw", "length_controlled"):
            assert str(words.estimate(found[key])) in text
        assert "91.2%" in text  # same verdict after a swap
    for key in ("order_balanced", "shown_first", "shown_second"):
        assert str(words.estimate(found[key])) in markdown
    assert "+21.8 points [+17.8, +25.8] | p &lt; 0.001" in markdown
    assert "the post's title | 50 | 8.1% [3.0, 19.0] | 0.0% | passed" in markdown
    assert "labelled comparisons: make judge-calibration (with" in markdown  # no escaped marks


def test_a_judge_that_fails_a_control_is_flagged_on_every_page(places):
    *texts, _ = report(places, controls_pass=False)
    said = "THE JUDGE FAILED ITS CHECKS: it does not reliably prefer the reference to the post's"
    assert all(said in " ".join(html.unescape(text).split()) for text in texts)
    row = {"is_llm": True, "judge": "x", "policies": []}
    rows = [row | {"judge_flags": flags} for flags in (["a"], ["a", "b"])]
    assert sentences.notes_of_judges(rows) == ["THE JUDGE FAILED ITS CHECKS: a; b."]


def test_a_calibration_is_shown_and_its_flags_warn_for_the_judge_it_was_made_with(places):
    config = make_config("tiny")
    fabricate(config)
    calibrated(config.changed(judge=JudgeSettings(kind="openai", model="another")), flags=["no"])
    record = collect.load_run(config)
    assert record.calibration is None
    assert collect.judged_row(record)["judge_flags"] == []
    calibrated(config, flags=["it agrees with the labels on 51.0%"])
    run_module(run_page, ["--preset", "tiny"])
    markdown = (folder_of() / "tiny-seed44413.md").read_text()
    assert "THE JUDGE FAILED ITS CHECKS: it agrees with the labels on 51.0%" in markdown
    assert "| agreement where it decides | 75.0% [72.0, 78.0] |" in markdown
    beside = next(row for row in markdown.splitlines() if row.startswith(f"| {OFFLINE['name']} |"))
    shown = re.findall(r"([-+\d.]+%?) \[", beside)
    assert shown == ["0.80", "90.0%", "100.0%", "90.0%"]  # a difference of 0 has no bounds
    assert "72 to 77%" in markdown
    # Judged right on 9 of 10 labels of each kind, a raw 0.5 stays 0.5.
    assert "| SFT | 50.0% [" in markdown.split("corrected win rate")[1]
    run_module(calibration_page, ["--preset", "tiny"])
    alone = (folder_of("calibration_report") / CALIBRATION_PAGE).read_text()
    assert "FAILED ITS CHECKS: it agrees with the labels on 51.0%" in alone
    assert "| PPO | 50.0% [" in alone
    assert "CLIPPED |" not in alone
    assert "the post's title" not in alone


def test_no_rate_is_corrected_where_too_much_is_unjudged(places):
    config = make_config("tiny")
    fabricate(config, unjudged=0.05)
    calibrated(config, flags=[])
    assert calibration.corrected_rates(collect.load_run(config))["ppo"] is None
    text = page.to_markdown("x", "x", run_page.blocks(collect.load_run(config)))
    corrected = text.split("corrected win rate")[1]
    assert "| SFT | 50.0% [" in corrected
    assert "| PPO | – |" in corrected


def test_two_renders_are_byte_for_byte_the_same(tmp_path, monkeypatch):
    report(lay_out(tmp_path, monkeypatch))
    first = (read_manifest(folder_of()) or {})["outputs"]
    run_module(run_page, ["--preset", "tiny"])
    assert first == (read_manifest(folder_of()) or {})["outputs"]
    assert len(first) == 13  # md, html, json, seven plots, headline, numbers, settings


def test_a_model_without_pretraining_on_real_posts_is_called_poor(places):
    config = make_config("tiny").changed(data=Data(source="../posts"))
    fabricate(config)
    row = collect.numbers_of(collect.load_run(config))
    assert any("NEVER PRETRAINED" in note and "poor" in note for note in sentences.caveats(row))
    assert "summaries of real posts, trained" in sentences.what_was_trained(row)  # anybody's


def test_folders_and_servers_of_the_user_stay_off_the_page(places):
    config = make_config("tiny").changed(
        base=Base(checkpoint="/srv/anna/model"),
        data=Data(source="/srv/anna/posts"),
        judge=JudgeSettings(base_url="http://machine.internal:8000"),
    )
    fabricate(config)
    text = page.to_html("", run_page.blocks(collect.load_run(config)))
    assert "folder posts" in text
    assert "anna" not in text
    assert "anna" not in str(collect.numbers_of(collect.load_run(config)))
    assert "machine.internal" not in text


def test_built_in_posts_are_not_compared_with_the_paper(made):
    assert "Beside the paper" not in made[1]
    assert "not comparable with this run" in made[1]


def test_threads_precision_and_device_stand_on_the_page(made):
    markdown = made[1]
    settings_that_differ = markdown.split("## Settings")[1].split("<details>")[0]
    assert "| memory.cpu_threads | 2 | 2 | 0 |" in settings_that_differ
    assert "| memory.mixed_precision | no | no | bf16 |" in settings_that_differ
    assert "microbatch" not in settings_that_differ
    assert "change no result" not in markdown
    assert "Computed on: CPU, 2 cores (AMD EPYC, AVX2); memory.cpu_threads: 2" in markdown


def test_rows_that_are_odd_or_skipped_stand_on_the_page(made):
    _, text, *_ = made
    rows = {line.split(" | ")[0]: line for line in text.splitlines()}
    assert rows["| sft train"].endswith("| 0 | 0 | – | – | – | 0 |")
    assert rows["| comparisons train"].startswith("| comparisons train | 15,000 | ")
    assert rows["| comparisons train"].endswith("| 27 | 4 | 14 | 3 | 158 | 2 |")
    assert "sft train: 16,000 rows, as published (16,000)." in text
    assert "comparisons train: 15,002 rows, not as published (15,009)." in text
