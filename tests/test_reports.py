"""The reports say what the manifests say, about fabricated runs."""

import dataclasses
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from reports import collect, page, run_page, scaling, verdict
from stages import config as settings
from stages.config import Data, Judge
from stages.presets import make_config
from stages.runs import file_hash

STAGES = ("base", "sft", "rm", "normalize", "ppo", "summaries", "judge", "win_rate")
NASTY = "SUBREDDIT: r/x\n\nTITLE: <script>alert(1)</script>\n\nPOST: a | b\n# no heading\n\nTL;DR:"
OFFLINE = {"kind": "facts", "name": "facts rule", "is_llm": False, "note": "counts right facts"}
ONLINE = {"kind": "openai", "name": "gpt-4o-mini", "is_llm": True, "note": "temperature 0"}


def curves(stage):
    noise = random.Random(stage)
    keys = {
        "sft": ["loss/train"],
        "rm": ["loss/train", "accuracy/train"],
        "ppo": [key for key, _ in run_page.PPO_PANELS],
    }[stage]
    rows = [{"step": s, **{key: s / 60 + noise.random() for key in keys}} for s in range(1, 61)]
    return [{"step": 0, "loss/validation": 6.0}, *rows] if stage == "sft" else rows


WRITTEN = {"rouge1": 0.5, "rouge2": 0.3, "eos_rate": 0.991, "reference_score": 0.017}
GROUPS = {"6": {"accuracy": 0.75, "pairs": 1500}, "9": {"accuracy": 0.83, "pairs": 500}}
POSTS = {"rows": 16000, "longest_query": 101, "longest_summary": 21, "longest_query_summary": 117}
PAIRS = {"rows": 15000, "longest_query": 101, "longest_chosen": 30, "longest_query_chosen": 120}
RESULTS: dict[str, Any] = {
    "base": {"vocabulary": 700, "tokens": {"sft_train": POSTS, "comparisons_train": PAIRS}},
    "sft": {"loss/validation": 1.5, "rougeL": 0.4, "updates": 60},
    "rm": {
        "pairs": 2000,
        "loss": 0.47,
        **dict.fromkeys(("by_split", "by_batch", "by_confidence", "by_policies"), GROUPS),
        "cnndm": None,
        "calibration": [[0.25, 0.55, 900], [0.75, 0.66, 600], [1.25, 0.8, 300], [1.75, 0.9, 80]],
    },
    "normalize": dict.fromkeys(("mean_before", "std", "minimum", "maximum", "mean_after"), 0.5)
    | {"padding_difference_mean": 1e-7, "padding_difference_over_0.01": 0.0},
    "ppo": {"objective/kl": 7.31, "objective/scores": 1.52, "updates": 60, "episodes": 7680},
    "summaries": {
        "policies": {
            "sft": WRITTEN | {"rougeL": 0.412, "tokens": 17.23, "score": -0.351},
            "ppo": WRITTEN | {"rougeL": 0.433, "tokens": 19.84, "score": 1.287},
        },
        "reference_tokens": 18.61,
        "posts": 600,
    },
    "judge": {"judgements": 2400, "share_first": 0.523},
}
MADE: dict[str, Any] = {"upstream": "", "code_version": "508a0d9", "versions": {"python": "3.11.7"}}
MADE |= {"seconds": 83.0, "peak_memory_gib": 1.2, "device": "CPU, 2 cores", "finished": "2026"}


def rate(value, unjudged):
    counts = {"wins": round(600 * value), "ties": 0, "losses": 600 - round(600 * value)}
    judged = value * (1 - unjudged)
    bounds = {"low": value - 0.03, "high": value + 0.03, "worst_case": [judged, judged + unjudged]}
    return {"win_rate": value, "unjudged": unjudged, "swap_consistency": 0.97} | counts | bounds


def make_results(judge, sft, ppo, accuracy, unjudged, size):
    gap = {"estimate": ppo - sft, "low": ppo - sft - 0.04, "high": ppo - sft + 0.04, "posts": 600}
    win_rate = {
        "judge": judge,
        "posts": 600,
        "policies": {"sft": rate(sft, 0.0), "ppo": rate(ppo, unjudged)},
        "differences": {"ppo-sft": gap},
    }
    spread = {"accuracy_low": accuracy - 0.02, "accuracy_high": accuracy + 0.02}
    return RESULTS | {
        "base": RESULTS["base"] | {"parameters": size},
        "rm": RESULTS["rm"] | {"accuracy": accuracy} | spread,
        "judge": RESULTS["judge"] | {"judge": judge, "unjudged": unjudged / 2},
        "win_rate": win_rate,
    }


def make_files(folder, stage):
    if stage in ("sft", "rm", "ppo"):
        write_rows(folder / "metrics.jsonl", curves(stage))
    if stage == "summaries":
        for policy, text in (("sft", "my aunt lost <b>it</b>"), ("ppo", "My aunt sold my lamp.")):
            row = {"query": NASTY, "reference": "the aunt | lamp", "summary": text, "tokens": 7}
            row |= {"has_eos": True, "score": 0.512, "reference_score": 0.25, "reference_tokens": 6}
            rows = [{"id": f"post{index}"} | row for index in range(9)]
            write_rows(folder / f"{policy}.jsonl", rows)
    if stage == "win_rate":
        scores = [(p, i, s) for p in ("sft", "ppo") for i, s in enumerate((1.0, 0.5, 0.0, None))]
        rows = [{"policy": p, "id": f"post{i}", "score": s} for p, i, s in scores]
        write_rows(folder / "post_scores.jsonl", rows)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def fabricate(
    config, judge=OFFLINE, sft=0.412, ppo=0.63, accuracy=0.781, unjudged=0.0, size=930_432
):
    """A finished run on disk; returns its results by stage."""
    results = make_results(judge, sft, ppo, accuracy, unjudged, size)
    inputs: dict[str, str] = {}
    for stage in STAGES:
        folder = settings.RUNS / config.name / f"seed{config.seed}" / stage
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
        make_files(folder, stage)
        manifest = MADE | {
            "stage": stage,
            "name": config.name,
            "preset": config.preset,
            "seed": config.seed,
            "settings_hash": settings.settings_hash(config, stage),
            "inputs": dict(inputs),
            "results": results[stage],
        }
        (folder / "manifest.json").write_text(json.dumps(manifest))
        inputs[stage] = file_hash(folder / "manifest.json")
    return results


@pytest.fixture
def places(tmp_path, monkeypatch):
    return lay_out(tmp_path, monkeypatch)


def lay_out(folder, monkeypatch):
    monkeypatch.setattr(settings, "RUNS", folder / "runs")
    monkeypatch.setattr(page, "GENERATED", folder / "generated")
    return folder


def tiny_row():
    return collect.row(collect.load_run(make_config("tiny")))


def report(places, **changes):
    """The Markdown, the HTML, the headline and the results of a fabricated run."""
    results = fabricate(make_config("tiny"), **changes)
    run_page.main(["--preset", "tiny"])
    made = [
        (places / "generated" / f"tiny-seed44413.{kind}").read_text() for kind in ("md", "html")
    ]
    return (*made, (places / "runs/tiny/seed44413/headline.txt").read_text(), results)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A report that several tests read: its folder and what `report` returns."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = lay_out(tmp_path_factory.mktemp("made"), monkeypatch)
        return folder, *report(folder)


class Page(HTMLParser):
    """What a page opens, loads and leaves open."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.loads, self.ids = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for key, value in attrs if key == "id"]
        self.loads += [v for k, v in attrs if k in ("src", "href", "xlink:href", "srcset")]
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_result_table_shows_the_numbers_of_the_manifests(made):
    _, markdown, html, headline, results = made
    written, wins = results["summaries"], results["win_rate"]["policies"]
    expected = {"reference": [f"{written['reference_tokens']:.1f}", "0.02"]}
    for policy, kl in (("sft", 0.0), ("ppo", results["ppo"]["objective/kl"])):
        row, one = wins[policy], written["policies"][policy]
        bounds = f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
        numbers = [f"{100 * row['win_rate']:.1f}% {bounds}", f"{one['rougeL']:.3f}"]
        numbers += [f"{one['tokens']:.1f}", f"{100 * one['eos_rate']:.1f}%"]
        expected[policy.upper()] = [*numbers, f"{one['score']:.2f}", f"{kl:.1f}"]
    for name, numbers in expected.items():
        in_markdown = next(x for x in markdown.splitlines() if x.startswith(f"| {name} |"))
        found = [cell.strip() for cell in in_markdown.split("|")[2:-1] if cell.strip() != "–"]
        assert found == numbers
        in_headline = next(x for x in headline.splitlines() if x.startswith(name))
        assert re.sub(r"[–\s]+", " ", in_headline).split() == [name, *" ".join(numbers).split()]
        assert all(number in html for number in numbers)
    assert "+21.8 points [+17.8, +25.8]" in headline


def test_the_html_loads_nothing_and_is_well_formed(made):
    html = made[2]
    found = Page(html)
    assert found.open == []
    assert {link[:1] for link in found.loads} == {"#"}
    assert {link[1:] for link in found.loads} <= set(found.ids)
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert len(found.ids) == len(set(found.ids))
    assert not re.search(r"@import|https?://", html)
    assert found.tags.count("svg") >= 12


def test_a_post_cannot_put_markup_on_the_page(made):
    _, markdown, html, _, _ = made
    for text in (markdown, html):
        assert "<script" not in text
        assert "<b>" not in text
        assert "&lt;script&gt;alert(1)" in text
    assert "> \\# no heading" in markdown
    assert "the aunt \\| lamp" in markdown


def test_the_headline_fits_a_terminal_and_ends_with_the_path(places, capsys):
    headline = report(places)[2]
    *lines, path = headline.splitlines()
    assert max(map(len, lines)) <= 80
    assert path == str(places / "generated" / "tiny-seed44413.html")
    assert capsys.readouterr().out == headline


def test_every_plot_of_the_markdown_page_is_a_file_beside_it(made):
    places, markdown, *_ = made
    named = re.findall(r"\]\(([^)]+\.svg)\)", markdown)
    assert len(named) == 4
    assert all((places / "generated" / name).exists() for name in named)
    assert not list((places / "generated").glob("*.partial"))


def test_a_judge_that_is_no_llm_is_named_as_such_everywhere(made):
    assert all("NOT an LLM" in text for text in made[1:4])


@pytest.mark.parametrize("stage", STAGES)
def test_a_missing_stage_is_refused_with_the_command_to_run(places, capsys, stage):
    fabricate(make_config("tiny"))
    (settings.RUNS / "tiny/seed44413" / stage / "manifest.json").unlink()
    with pytest.raises(SystemExit):
        run_page.main(["--preset", "tiny"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: stage {stage} is missing: run `make ")
    assert "PRESET=tiny SEED=44413`" in line
    assert not (places / "generated").exists()


def test_a_stage_from_an_earlier_one_is_refused(places, capsys):
    fabricate(make_config("tiny"))
    manifest = settings.RUNS / "tiny/seed44413/ppo/manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    with pytest.raises(SystemExit):
        run_page.main(["--preset", "tiny"])
    assert "stage summaries was made from an earlier ppo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unjudged": 0.015}, "PPO: 1.5% of the posts have no verdict"),
        ({"unjudged": 0.015}, "between 62.1% and 63.6%"),
        ({"sft": 0.6, "ppo": 0.62}, "PPO did not significantly beat SFT: +2.0 points"),
        ({"sft": 0.6, "ppo": 0.4}, "PPO is WORSE than SFT"),
        ({"sft": 0.6, "ppo": 0.4}, "PPO over-optimised its reward"),
        ({"accuracy": 0.51}, "The reward model is not better than chance"),
        ({"sft": 0.1, "ppo": 0.3}, "does not reach the references"),
    ],
)
def test_numbers_that_disappoint_are_said_plainly(places, changes, said):
    fabricate(make_config("tiny"), **changes)
    row = tiny_row()
    told = " ".join([verdict.summary(row), *verdict.caveats(row)])
    assert said in told
    headline = run_page.headline(row, page.GENERATED / "x.html")
    assert all(note in " ".join(headline.split()) for note in verdict.caveats(row))


def test_too_many_posts_without_a_verdict_forbid_a_conclusion(places):
    fabricate(make_config("tiny"), unjudged=0.05)
    row = tiny_row()
    assert "Too many comparisons had no verdict" in verdict.summary(row)
    assert "beats SFT" not in verdict.summary(row) + run_page.headline(row, page.GENERATED)


def test_two_renders_are_byte_for_byte_the_same(places):
    report(places)
    first = {path.name: path.read_bytes() for path in (places / "generated").iterdir()}
    run_page.main(["--preset", "tiny"])
    assert first == {path.name: path.read_bytes() for path in (places / "generated").iterdir()}
    assert len(first) == 6


def test_a_model_without_pretraining_on_real_posts_is_called_poor(places):
    config = replace(make_config("tiny"), data=Data(source="../posts"))
    fabricate(config)
    row = collect.row(collect.load_run(config))
    assert any("NEVER PRETRAINED" in note and "poor" in note for note in verdict.caveats(row))


def test_folders_and_servers_of_the_user_stay_off_the_page(places):
    config = replace(
        make_config("tiny"),
        data=Data(source="/srv/anna/posts"),
        judge=Judge(base_url="http://machine.internal:8000"),
    )
    fabricate(config)
    text = page.to_html("", run_page.blocks(collect.load_run(config)))
    assert "folder posts" in text
    assert "anna" not in text
    assert "machine.internal" not in text


def test_the_papers_numbers_stand_beside_pythia_only(places, made):
    config = make_config("pythia-1b")
    fabricate(config, judge=ONLINE)
    text = page.to_markdown("x", "x", run_page.blocks(collect.load_run(config)))
    assert "39.4%" in text
    assert "not an llm" not in text.lower()
    assert "39.4%" not in made[1]
    assert "not comparable with this run" in made[1]


def four_runs(**changes):
    """Two sizes with two seeds each; `changes` go to the larger one's config."""
    for preset, size, rates in (("tiny-s", 10**5, (0.3, 0.4)), ("tiny", 10**6, (0.6, 0.64))):
        for seed, ppo in zip((1, 2), rates, strict=True):
            config = replace(
                make_config(preset, seed=seed), **(changes if preset == "tiny" else {})
            )
            fabricate(config, ppo=ppo, sft=0.25, accuracy=ppo + 0.2, size=size)
    return scaling.collect(["tiny", "tiny-s"])


def test_the_mean_over_seeds_is_the_mean(places):
    records, left_out = four_runs()
    found = scaling.means(collect.table(records))
    assert found["tiny-s"]["ppo/win_rate"] == pytest.approx(0.35)
    assert found["tiny"]["ppo/win_rate"] == pytest.approx(0.62)
    assert found["tiny"]["difference"] == pytest.approx(0.37)
    assert (list(found), left_out) == (["tiny-s", "tiny"], [])
    text = page.to_markdown("x", "x", scaling.blocks(records))
    assert "| 35.0% (30.0% to 40.0%) |" in text
    assert "64.0% [61.0, 67.0]" in text


def test_sizes_that_differ_in_the_model_only_are_found_alike(places):
    records, _ = four_runs()
    assert not any("NOT alike" in note for note in scaling.alike(records, collect.table(records)))
    assert "nothing but the base model" in page.to_markdown("x", "x", scaling.blocks(records))


def test_a_setting_that_differs_between_sizes_is_flagged(places):
    tiny = make_config("tiny")
    records, _ = four_runs(ppo=replace(tiny.ppo, kl_coef=0.1))
    (note,) = scaling.alike(records, collect.table(records))
    assert "ppo.kl_coef differs (0.05 / 0.1)" in note
    assert "nothing but the base model" not in page.to_html("", scaling.blocks(records))


def test_the_verdict_rises_where_the_numbers_rise_and_says_where_intervals_overlap(places):
    frame = collect.table(four_runs()[0])
    rising, flat = (scaling.conclusion(frame, key) for key in ("ppo/win_rate", "sft/win_rate"))
    assert "rises with every step in size (35.0% to 62.0%)" in rising
    assert "do not overlap" in rising
    assert "does NOT rise" in flat
    frame.loc[frame["name"] == "tiny", "sft/win_rate"] += 0.01
    assert "overlap, so the rise is not established" in scaling.conclusion(frame, "sft/win_rate")


def test_an_unfinished_seed_is_left_out_and_named(places, capsys):
    four_runs()
    (settings.RUNS / "tiny/seed2/judge/manifest.json").unlink()
    scaling.main(["--names", "tiny-s", "tiny"])
    html = (places / "generated/scaling-tiny-s-tiny.html").read_text()
    assert "tiny seed2 is left out: stage judge is missing" in html
    assert "One seed only: tiny." in html
    assert "scaling-tiny-s-tiny.html" in capsys.readouterr().out


def test_a_run_that_is_not_there_is_refused_in_one_line(places, capsys):
    with pytest.raises(SystemExit):
        scaling.main(["--names", "nobody"])
    assert "no finished run in" in capsys.readouterr().err
