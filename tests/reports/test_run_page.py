"""The page of a run says what the results of its stages say; the runs are fabricated."""

import html
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from reports import limits, plots, render
from reports import run as run_page
from reports.curves import GRADIENT_GROUPS, NOT_DRAWN, gradient_figures
from reports.judging import calibration_of_run
from reports.results import Interval, load_run
from reports.scores import ScoreRow
from reports.verdicts import Word
from stages.config import paths
from stages.config.command_line import make_config
from stages.config.judge import JudgeSettings
from stages.config.sections import Base, Data
from stages.runs.files import read_lines, read_record
from stages.runs.manifest import read_manifest, stage_folder
from tests.lib import fabricated_runs
from tests.lib.asserts import refused_by
from tests.lib.fabricated_runs import (
    OFFLINE,
    ONLINE,
    STAGES,
    calibrated,
    fabricate,
    write_manifest,
    write_rows,
)
from tests.lib.make_stages import run_module

STEM = "tiny-seed44413"
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"


@pytest.fixture
def places(tmp_path, monkeypatch, no_drawing):
    """A folder for runs whose pages have empty plots."""
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    return tmp_path


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a run that several tests read, with its plots."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(paths, "RUNS", tmp_path_factory.mktemp("made") / "runs")
        results = fabricate(make_config("tiny"))
        run_page.write_report(make_config("tiny"))
        folder = stage_folder(make_config("tiny"), "report")
        yield ReadPage(folder, results)


class ReadPage:
    """The files of a page, and the results that it was written from."""

    def __init__(self, folder, results):
        self.folder = folder
        self.results = results
        self.markdown = (folder / f"{STEM}.md").read_text()
        self.html = (folder / f"{STEM}.html").read_text()
        self.headline = (folder / "headline.txt").read_text()


def write_page(config=None, **changes):
    """Fabricate a run and write its page; the page's Markdown."""
    if config is None:
        config = make_config("tiny")
    fabricate(config, **changes)
    run_page.write_report(config)
    return (stage_folder(config, "report") / f"{config.name}-seed{config.seed}.md").read_text()


def written_headline():
    """What the terminal shows about the page of the preset tiny."""
    return (stage_folder(make_config("tiny"), "report") / "headline.txt").read_text()


def in_one_line(text):
    return " ".join(text.replace(NO_BREAK_SPACE, " ").split())


def section(markdown, title):
    """The text of a folded section."""
    return markdown.split(f"## {title}\n")[1].split("\n</details>\n\n<details><summary>\n\n##")[0]


# -- the first screen ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ppo", "answer"),
    [
        (
            0.63,
            "PPO **beats** the reference summaries in this seed, with a win rate of 63.0% [60.0",
        ),
        (0.52, "PPO is **not significantly different from** the reference summaries"),
        (0.40, "PPO **does not reach** the reference summaries"),
    ],
)
def test_the_page_opens_with_the_answer_and_its_scope(places, ppo, answer):
    markdown = write_page(ppo=ppo)
    opening = in_one_line(markdown.split("\n\n")[1])
    assert opening.startswith(answer)
    assert opening.endswith(
        'Judge: the offline rule "facts", not an LLM; one seed; built-in posts; a model without'
        " pretraining."
    )


def test_the_title_gives_both_win_rates(page):
    title = page.markdown.splitlines()[0]
    assert title.endswith("PPO has a win rate of 63.0% against the references, SFT 41.2%")


def test_score_and_kl_come_before_the_table_and_limitations_before_the_folds(page):
    texts = ("-score-and-kl-1.svg", "| SFT |", "-win-rate.svg", "## Limitations", "<details>")
    places = [page.markdown.index(text) for text in texts]
    assert places == sorted(places)


@pytest.mark.parametrize("policy", ["sft", "ppo"])
def test_the_tables_show_the_numbers_of_the_manifests(page, policy):
    rate = page.results["win_rate"]["policies"][policy]
    written = page.results["summaries"]["policies"][policy]
    percent = f"{100 * rate['win_rate']:.1f}%"
    bounds = f"[{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]"
    rouge = f"{written['rougeL']:.3f}"
    tokens = f"{written['tokens']:.1f}"
    title = policy.upper()

    assert f"| {title} | {percent} {bounds} |" in page.markdown
    assert f"| {rate['wins']} / {rate['ties']} / {rate['losses']} |" in page.markdown
    assert f"| {title} | {rouge} | {tokens} |" in section(page.markdown, "The summaries")
    assert f"{percent} {bounds}" in page.headline
    assert rouge in page.headline


def test_the_headline_fits_a_terminal_and_ends_with_the_path(page):
    *lines, path = page.headline.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert path == str(page.folder / f"{STEM}.html")


def test_the_headline_has_the_gain_over_sft(page):
    line = "PPO compared with SFT: better (+21.8 points [+17.8, +25.8] of win rate)."
    assert line in page.headline


def test_the_gain_over_sft_is_a_verdict(places):
    fabricate(make_config("tiny"), sft=0.6, ppo=0.4)
    verdict = run_page.verdict_on_gain(load_run(make_config("tiny")))
    assert verdict is not None
    assert verdict.word is Word.WORSE


def test_no_difference_from_sft_is_a_sentence(places, monkeypatch):
    measured = run_page.verdict_on_gain

    def no_difference(run):
        verdict = measured(run)
        assert verdict is not None
        return replace(verdict, word=Word.NO_DIFFERENCE)

    monkeypatch.setattr(run_page, "verdict_on_gain", no_difference)
    answer = in_one_line(write_page(sft=0.6, ppo=0.6))
    assert "Compared with SFT it makes **no difference of 3 points**: +0.0 points" in answer


# -- limitations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"unjudged": 0.015}, "1.5% of PPO's posts have no verdict"),
        ({"unjudged": 0.015}, "between 62.1% and 63.6%"),
        ({"unjudged": 0.05}, "Too many comparisons had no verdict"),
        ({"sft": 0.6, "ppo": 0.62}, "Compared with SFT it is **inconclusive**: +2.0 points"),
        ({"sft": 0.6, "ppo": 0.4}, "Compared with SFT it is **worse**"),
        ({"sft": 0.6, "ppo": 0.4}, "PPO over-optimized its reward"),
        ({"at_length": 0.52}, "at equal length that is not significant: 52.0%"),
        ({"first": 0.584}, "picks the text shown first in 58.4% [55.4, 61.4]"),
        ({"accuracy": 0.51}, "The reward model is not significantly better than chance"),
        ({"accuracy": 0.3}, "the labels of one split may be reversed"),
        (
            {"accuracy": 0.3, "found": {"rm": {"function": "mine:asks"}}},
            "mine:asks ranks held-out pairs worse than chance",
        ),
    ],
)
def test_disappointing_numbers_are_stated_plainly(places, changes, text):
    assert text in in_one_line(write_page(**changes))


def test_the_terminal_shows_the_same_limitations_as_the_page(places):
    markdown = write_page(unjudged=0.015, first=0.584)
    headline = in_one_line(written_headline())

    limitations = markdown.split("## Limitations")[1].split("\n## ")[0]
    items = [line for line in limitations.splitlines() if line.startswith("- ")]
    assert len(items) >= 4
    for item in items:
        text = item.removeprefix("- ").replace("**", "")
        assert in_one_line(text) in headline


def test_a_rate_with_too_much_unjudged_is_shown_nowhere(places):
    markdown = write_page(unjudged=0.05)
    html_page = (stage_folder(make_config("tiny"), "report") / f"{STEM}.html").read_text()
    for text in (markdown, html_page, written_headline()):
        assert "(5.0% unjudged)" in text
        assert "63.0%" not in text
        assert "+21.8" not in text
        assert "That is too many to give a win rate" in in_one_line(text)


def test_a_judge_that_fails_a_control_is_flagged_on_the_first_screen(places):
    markdown = write_page(controls_pass=False)
    opening = markdown.split("\n\n")[1]
    reason = "it does not reliably prefer the reference to the post's"
    assert "**The judge failed its checks.**" in opening
    assert f"**The judge failed its checks:** {reason}" in in_one_line(markdown)
    assert f"The judge failed its checks: {reason}" in in_one_line(written_headline())


def test_a_model_without_pretraining_on_real_posts_is_called_poor(places):
    markdown = write_page(make_config("tiny").changed(data=Data(source="../posts")))
    assert "the model was not pretrained, so its summaries are poor" in in_one_line(markdown)


def test_proxy_up_and_gold_down_is_called_over_optimization():
    row = ScoreRow(
        name="ppo",
        title="PPO",
        proxy=None,
        gold=None,
        proxy_gain=Interval(estimate=1.0, low=0.5, high=1.5),
        gold_gain=Interval(estimate=-1.0, low=-1.5, high=-0.5),
    )
    assert row.proxy_moved == "rose"
    assert row.gold_moved == "fell"
    assert row.is_over_optimized


def test_each_difference_is_minus_the_policy_that_comes_first(places):
    fabricate(make_config("tiny"))
    run = load_run(make_config("tiny"))
    (difference,) = run.differences
    assert difference.policy == "ppo"
    assert difference.other == "sft"
    assert run.ordered_differences == [difference]

    reversed_run = replace(run, differences=(difference.turned,))
    assert reversed_run.ordered_differences == [difference]


# -- what is folded --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["raw", "order_balanced", "length_controlled", "shown_first", "shown_second"]
)
def test_every_kind_of_win_rate_is_shown(page, key):
    rate = page.results["win_rate"]["policies"]["ppo"]["statistics"][key]
    bounds = f"[{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]"
    assert f"{100 * rate['estimate']:.1f}% {bounds}" in section(page.markdown, "The judge")


def test_the_judges_consistency_is_shown(page):
    same_verdict_after_a_swap = "91.2%"
    assert same_verdict_after_a_swap in section(page.markdown, "The judge")


def test_the_difference_from_sft_is_shown_with_its_p_value(page):
    row = "| PPO minus SFT | +21.8 [+17.8, +25.8] | &lt; 0.001 |"
    assert row in section(page.markdown, "The judge")


def test_each_control_is_shown_with_its_result(page):
    controls = section(page.markdown, "Controls of the judge")
    assert "| the post's title | 50 | 8.1% [3.0, 19.0] | 0.0% | passed |" in controls
    assert "not available: none" in controls


def test_an_uncalibrated_judge_is_said_to_be_so(page):
    assert "`make judge-calibration`" in section(page.markdown, "Calibration of the judge")


def test_a_calibration_of_another_judge_is_not_shown(places):
    config = make_config("tiny")
    fabricate(config)
    other_judge = config.changed(judge=JudgeSettings(kind="openai", model="another"))
    calibrated(other_judge, flags=["no"])
    assert load_run(config).calibration is None


@pytest.fixture
def calibrated_page(places):
    """The Markdown of a page whose judge was calibrated and failed a check."""
    config = make_config("tiny")
    fabricate(config)
    other_judge = config.changed(judge=JudgeSettings(kind="openai", model="another"))
    calibrated(other_judge, flags=["no"])
    calibrated(config, flags=["it agrees with the labels on 51.0%"])
    run_page.write_report(config)
    return (stage_folder(config, "report") / f"{STEM}.md").read_text()


def test_a_judge_that_failed_its_calibration_is_a_limitation(calibrated_page):
    line = "**The judge failed its checks:** it agrees with the labels on 51.0%"
    assert line in calibrated_page


def test_the_calibration_of_the_judge_is_shown_with_the_agreement_of_people(calibrated_page):
    calibration = section(calibrated_page, "Calibration of the judge")
    assert "| agreement where it decides | 75.0% [72.0, 78.0] |" in calibration
    assert "72 to 77%" in calibration


def test_the_calibration_of_another_judge_is_a_row_next_to_it(calibrated_page):
    calibration = section(calibrated_page, "Calibration of the judge")
    start = f"| {OFFLINE['name']} |"
    (row,) = [line for line in calibration.splitlines() if line.startswith(start)]
    estimates = re.findall(r"([-+\d.]+)%? \[", row)
    assert estimates == ["90.0", "+0.0", "0.80", "100.0", "90.0"]


def test_a_win_rate_is_corrected_for_the_judges_errors(calibrated_page):
    """Of a judge that is right on 9 of 10 labels of each kind, a raw 0.5 stays 0.5."""
    calibration = section(calibrated_page, "Calibration of the judge")
    _, _, corrected = calibration.partition("corrected win rate")
    assert "| SFT | 41.2% | 50.0% [" in corrected


def corrected_rates(config) -> dict[str, Any]:
    """Title of a policy -> its corrected win rate."""
    calibration = calibration_of_run(load_run(config))
    assert calibration is not None
    return {row.title: row for row in calibration.corrected}


def test_no_rate_is_corrected_if_too_much_is_unjudged(places):
    config = make_config("tiny")
    fabricate(config, unjudged=0.05)
    calibrated(config, flags=[])
    rates = corrected_rates(config)
    assert rates["PPO"].rate is None
    assert rates["SFT"].rate.estimate == pytest.approx(0.5)


def test_a_corrected_rate_at_the_edge_is_clipped(places):
    config = make_config("tiny")
    fabricate(config, scores=(1.0,) * 40)
    calibrated(config, flags=[])
    rates = corrected_rates(config)
    # All 40 posts won, and a judge right on 9 of 10: (1 + 0.9 - 1) / 0.8 is more than 100%.
    assert rates["PPO"].rate.estimate == 1.0
    assert rates["PPO"].is_clipped


def test_policies_are_in_the_order_of_the_stages(places):
    fabricate(make_config("tiny"))
    assert list(load_run(make_config("tiny")).policies) == ["sft", "ppo"]


def test_every_number_that_ppo_logs_has_a_curve(places, monkeypatch):
    fabricate(make_config("tiny"))
    metrics_file = stage_folder(make_config("tiny"), "ppo") / "metrics.jsonl"
    rows = read_lines(metrics_file)
    for row in rows:
        row["mine/new_metric"] = row["step"] / 2
    write_rows(metrics_file, rows)

    drawn: set[str] = set()
    draw_lines = plots.lines

    def record_lines(title, unit, lines, is_share=False):
        drawn.update(line.curve.key for line in lines)
        return draw_lines(title, unit, lines, is_share)

    monkeypatch.setattr("reports.curves.lines", record_lines)
    gradient_figures(load_run(make_config("tiny")), "ppo")

    logged = set(rows[0]) - NOT_DRAWN
    assert len(logged) > 20
    assert drawn == logged


def remove_critic_metrics(metrics_file):
    """Leave out of each row what only an algorithm with a critic logs."""
    (critic,) = [group for group in GRADIENT_GROUPS if group.name == "critic"]
    critic_keys = {key for metric in critic.metrics for key in metric.keys}
    rows = read_lines(metrics_file)
    for row in rows:
        for key in critic_keys & row.keys():
            del row[key]
    write_rows(metrics_file, rows)


@pytest.fixture
def rloo_run(places):
    """A finished run whose policy was trained with RLOO instead of PPO."""
    from reports import results

    config = make_config("tiny")
    fabricate(config)
    rloo = stage_folder(config, "ppo").with_name("rloo")
    shutil.copytree(stage_folder(config, "ppo"), rloo)
    remove_critic_metrics(rloo / "metrics.jsonl")

    summaries = stage_folder(config, "summaries")
    win_rate = stage_folder(config, "win_rate")
    shutil.move(summaries / "ppo.jsonl", summaries / "rloo.jsonl")
    replace_text(win_rate / "post_scores.jsonl", '"ppo"', '"rloo"')
    replace_text(summaries / "manifest.json", '"ppo', '"rloo')
    replace_text(win_rate / "manifest.json", '"ppo', '"rloo')

    folders = {stage: stage_folder(config, stage) for stage in STAGES if stage != "ppo"}
    folders["rloo"] = rloo
    return results._read_run(config, folders)


def replace_text(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def test_the_page_of_a_run_without_a_critic_does_not_mention_one(rloo_run):
    values = run_page.page_values(rloo_run)
    markdown = render.fill("run.md", "x", **values, is_public=False).markdown
    assert "RLOO **beats** the reference summaries" in markdown
    assert "optimized the policy with RLOO for 7,680 episodes" in markdown
    assert "| RLOO |" in section(markdown, "The summaries")
    assert "x-rloo-reward-1.svg" in markdown
    assert "critic" not in section(markdown, "Learning curves")
    before_settings, _, _ = markdown.partition("## Settings")
    assert "PPO" not in before_settings.replace("PPO amplifies", "")


def test_the_terminal_names_the_algorithm_of_the_run(rloo_run):
    page_path = rloo_run.stages["rloo"].folder / "x.html"
    assert "RLOO" in run_page.terminal_text(rloo_run, page_path)


def test_settings_are_next_to_the_presets_and_the_defaults(places):
    config = make_config("tiny", seed=1, name="mine", overrides=("ppo.kl_coef=0.1",))
    markdown = section(write_page(config), "Settings")
    assert "Set in addition to the preset tiny: ppo.kl_coef=0.1." in markdown
    assert "| ppo.kl_coef | 0.1 | 0.05 | 0.05 |" in markdown
    assert "| rm.learning_rate | 0.0005 | 0.0005 |" in markdown  # the preset's, not the paper's
    assert "ppo.gamma" not in markdown.split("All other settings")[0]


def test_a_run_without_changes_has_all_settings_of_its_preset(page):
    markdown = section(page.markdown, "Settings")
    assert "All settings are those of the preset tiny." in markdown
    different = markdown.split("All other settings")[0]
    assert "| memory.cpu_threads | 2 | 2 | 0 |" in different
    assert "| memory.mixed_precision | no | no | bf16 |" in different
    assert "microbatch" not in different


def test_devices_threads_and_precision_are_on_the_page(page):
    text = in_one_line(section(page.markdown, "Time, memory and versions"))
    assert "Computed on CPU, 2 cores (AMD EPYC, AVX2); `memory.cpu_threads`: 2" in text


def test_odd_and_skipped_rows_are_on_the_page(page):
    rows = {line.split(" | ")[0]: line for line in page.markdown.splitlines()}
    assert rows["| sft train"].endswith("| 0 | 0 | – | – | – | 0 |")
    assert rows["| comparisons train"].startswith("| comparisons train | 15,000 | ")
    assert rows["| comparisons train"].endswith("| 27 | 4 | 14 | 3 | 158 | 2 |")
    assert "sft train: 16,000 rows, as published (16,000)." in page.markdown
    assert "comparisons train: 15,002 rows, not as published (15,009)." in page.markdown


def test_accuracy_by_strength_is_next_to_the_papers(places):
    config = make_config("pythia-1b")
    markdown = write_page(config, judge=ONLINE)
    # Huang et al. 2024: 0.563 where the second was slightly better (6), 0.694 far better (9).
    assert "| strength of the label | 1 | 75.0% [73.0, 77.0] | 1,500 | 56.3% |" in markdown
    assert "| strength of the label | 4 | 83.0% [81.0, 85.0] | 500 | 69.4% |" in markdown


def test_scores_below_the_penalty_are_those_of_the_first_update(places):
    config = make_config("tiny")
    fabricate(config)
    rows = [{"step": step, "policy/below_penalty": step / 8} for step in (1, 2, 3)]
    write_rows(stage_folder(config, "ppo") / "metrics.jsonl", rows)
    policies = load_run(config).policies
    assert policies["ppo"].below_penalty == 1 / 8
    assert policies["sft"].below_penalty is None


def test_a_critic_below_a_constant_is_a_limitation(places):
    config = make_config("tiny")
    fabricate(config)
    warm_up = config.ppo.critic_updates
    rows = [
        {"step": warm_up + 1, "val/explained_variance": -0.5},
        {"step": warm_up + 2, "val/explained_variance": 0.25},
        {"step": warm_up + 3, "val/explained_variance": 0.5},
    ]
    write_rows(stage_folder(config, "ppo") / "metrics.jsonl", rows)

    (critic,) = limits.poor_critics([load_run(config)])

    assert critic.name == "tiny"
    assert critic.below_zero == 1
    assert critic.updates == 3


# -- what the page is made of ----------------------------------------------------------------------


def test_the_html_loads_nothing_and_has_no_script(page):
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page.html
    assert not re.search(r"<(link|iframe|object|script|img)\b", page.html)
    assert not re.search(r"@import|https?://(?!www\.w3\.org)", page.html)


def test_no_two_elements_of_the_html_have_the_same_id(page):
    without_definitions = re.sub(r"<defs>.*?</defs>", "", page.html, flags=re.DOTALL)
    ids = re.findall(r'<[^>]* id="([^"]*)"', without_definitions)
    assert len(ids) == len(set(ids))


def test_a_post_cannot_put_markup_on_the_page(page):
    for text in (page.markdown, page.html):
        assert "<script>alert" not in text
        assert "<b>" not in text
        assert "&lt;script&gt;alert(1)" in text
    assert "> \\# no heading" in page.markdown
    assert "the aunt \\| lamp" in page.markdown


def test_control_characters_of_a_post_are_on_no_page(places, monkeypatch):
    steering = "\x1b[31mred\x1b]0;title\x07nul\x9b2J\u202eright to left"
    monkeypatch.setattr(fabricated_runs, "NASTY", f"TITLE: {steering}\n\nPOST: x\n\nTL;DR:")
    write_page()
    folder = stage_folder(make_config("tiny"), "report")
    for path in (folder / f"{STEM}.md", folder / f"{STEM}.html", folder / "headline.txt"):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", path.read_text())


def test_every_figure_of_the_markdown_page_is_a_file_next_to_it(page):
    names = re.findall(r'src="([^"]+\.svg)"', page.markdown)
    assert len(names) > 20
    assert len(names) == len(set(names))
    for name in names:
        assert (page.folder / name).exists()
    assert not list(page.folder.glob("*.partial"))


def test_numbers_json_has_the_typed_results_in_full_precision(page):
    numbers = json.loads((page.folder / "numbers.json").read_text())
    assert numbers["policies"]["ppo"]["win_rate"]["estimate"] == 0.63
    assert numbers["training"]["episodes"] == 7680
    assert numbers["judge"]["name"] == "facts rule"
    assert numbers == read_record(page.folder / f"{STEM}.json")["numbers"]


def test_two_pages_of_the_same_run_are_equal_byte_for_byte(page, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    fabricate(make_config("tiny"))

    def hashes_of_page():
        run_page.write_report(make_config("tiny"))
        manifest = read_manifest(stage_folder(make_config("tiny"), "report"))
        assert manifest is not None
        return manifest["outputs"]

    assert hashes_of_page() == hashes_of_page()


def test_folders_and_servers_of_the_user_are_not_on_the_page(places):
    config = make_config("tiny").changed(
        base=Base(checkpoint="/srv/anna/model"),
        data=Data(source="/srv/anna/posts"),
        judge=JudgeSettings(base_url="http://machine.internal:8000"),
    )
    markdown = write_page(config)
    folder = stage_folder(config, "report")
    for text in (markdown, (folder / "numbers.json").read_text()):
        assert "anna" not in text
        assert "machine.internal" not in text
    assert "folder posts" in markdown


def test_the_public_page_is_without_other_peoples_texts(places):
    config = make_config("tiny").changed(data=Data(source="../posts"))
    private = write_page(config)
    public = (stage_folder(config, "report") / "public" / f"{STEM}.md").read_text()
    assert "the aunt" in private
    assert "the aunt" not in public
    assert "no heading" not in public
    assert "My aunt sold my lamp." in public  # the policy's own words


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_missing_stage_is_refused_with_the_command_to_run(places, capsys, stage):
    fabricate(make_config("tiny"))
    (stage_folder(make_config("tiny"), stage) / "manifest.json").unlink()
    line = refused_by(capsys, partial(run_module, run_page), "--preset", "tiny")
    assert line.startswith(f"error: stage {stage} is missing: run `make ")
    assert "PRESET=tiny SEED=44413`" in line
    assert not stage_folder(make_config("tiny"), "report").parent.exists()


def test_a_stage_from_an_earlier_one_is_refused(places, capsys):
    fabricate(make_config("tiny"))
    write_manifest(make_config("tiny"), "ppo", {"updates": 61})
    with pytest.raises(SystemExit):
        run_module(run_page, ["--preset", "tiny"])
    assert "stage summaries ran with an earlier ppo" in capsys.readouterr().err


def test_the_html_shows_what_the_markdown_says(page):
    assert "63.0% [60.0, 66.0]" in in_one_line(html.unescape(page.html))
    assert page.html.count("<details>") == page.markdown.count("<details>") > 8


def test_differences_are_read_in_the_direction_in_which_they_were_measured(places):
    config = make_config("tiny")
    results = fabricate(config)
    gain = results["win_rate"]["differences"]["ppo-sft"]
    loss = gain | {"estimate": -gain["estimate"], "low": -gain["high"], "high": -gain["low"]}
    path = stage_folder(config, "win_rate") / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["results"]["differences"] = {"sft-ppo": loss}
    path.write_text(json.dumps(manifest))

    (difference,) = load_run(config).differences

    assert difference.policy == "sft"
    assert difference.other == "ppo"
    assert difference.interval is not None
    assert difference.interval.estimate == -gain["estimate"]
