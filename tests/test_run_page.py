"""A run's page: four sentences, curves of all that was logged, spreads."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval.win_rate import of_reward_model
from reports import run_page
from reports.parts import collect, page, plots, sentences
from reports.sections import calibration, curves, judging, made_with, scores
from stages.finished import stage_folder
from stages.posts.toy import facts_of
from stages.settings.command_line import make_config
from stages.settings.judge import JudgeSettings
from tests.fabricated_runs import ONLINE, calibrated, fabricate, interval, statistics, write_rows


@pytest.fixture
def places(runs, no_drawing):
    """A folder for runs, and empty plots."""


def record_of(seed=1, **changes):
    config = make_config("tiny", seed=seed)
    fabricate(config, **changes)
    return collect.load_run(config)


# -- the first screen ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ppo", "said"),
    [
        (0.63, "It BEATS the references; PPO beats SFT: +21.8 points"),
        (0.52, "Against the references it is INCONCLUSIVE; PPO beats SFT: +10.8 points"),
        (0.40, "It does NOT reach the references; PPO did not significantly beat SFT"),
    ],
)
def test_sixty_words_say_who_won_beside_sft_at_equal_length_and_what_to_distrust(places, ppo, said):
    row = collect.numbers_of(record_of(ppo=ppo))
    counts, stands, length, caveat = sentences.opening(row)
    wins, ties, losses = (row[f"ppo/{key}"] for key in ("wins", "ties", "losses"))
    theirs = ", ".join(str(row[f"sft/{key}"]) for key in ("wins", "ties", "losses"))
    assert counts == (
        f"Of 600 held-out posts PPO's summary won {wins}, tied {ties}, lost {losses} against the"
        f" reference, SFT's {theirs}."
    )
    assert stands.startswith(said)
    equal = 100 * (ppo - 0.04)  # as it is fabricated
    assert length.startswith(
        f"At equal length: PPO {equal:.1f}% [{equal - 3:.1f}, {equal + 3:.1f}]"
    )
    assert caveat == "Caveats: Not an LLM judged (facts rule); one seed; toy world; no pretraining."
    assert len(sentences.lead(*sentences.opening(row)).text.split()) <= 60


def test_not_an_llm_is_bold_and_stands_once(places):
    text = page.to_html("x", run_page.blocks(record_of()))
    assert text.count("<strong>Not an LLM</strong>") == 1


# -- curves ----------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch):
    """The panels that are drawn, with their lines."""
    found = {}

    def lines(title, curves, x="update", share=False):
        found[title] = list(curves)
        return plots.Panel(title, lambda axes: None)

    monkeypatch.setattr(plots, "lines", lines)
    return found


def test_every_number_that_ppo_logs_has_a_curve(places, drawn):
    record = record_of()
    rows = [row | {"mine/new_metric": row["step"] / 2} for row in record.rows("ppo")]
    write_rows(record.folders["ppo"] / "metrics.jsonl", rows)
    curves.blocks(record)
    logged = set(rows[0]) - curves.COUNTS - curves.SAME
    assert len(logged) > 20
    shown = {
        key
        for key in logged
        for lines in drawn.values()
        for one in lines
        if one.values == [row[key] for row in rows]
    }
    assert shown == logged
    assert "Mine: new metric" in drawn
    wanted = {"Explained variance", "Ratio of new to old probability", "Title words copied"}
    wanted |= {"Gradient norm of the policy", "KL from SFT, nats per summary"}
    assert wanted <= drawn.keys()


def test_an_axis_of_shares_ends_at_100_percent():
    ones = [{"step": step, "eos": 1.0 - 0.02 * (step == 3)} for step in range(9)]
    panel = plots.lines("EOS", [plots.curve(ones, "eos", "eos", plots.PPO)], share=True)
    svg = plots.drawn([panel], 1, 1, "")
    shown = {float(one) for one in re.findall(r">(\d+(?:\.\d+)?)%</text>", svg)}
    assert 100.0 in shown
    assert max(shown) == 100.0


def test_the_frontier_names_its_start_and_its_end():
    kl, score = [0.0, 1.0, 2.0, 4.0], [0.1, 0.9, 1.4, 1.2]
    line = plots.Curve("seed 1", plots.PPO, kl, score)
    panel = curves.frontier("Score against distance", [line], "KL")
    svg = plots.drawn([panel], 1, 1, "")
    assert ">start</text>" in svg
    assert ">end</text>" in svg


@pytest.mark.parametrize(
    ("policy", "kind", "note", "said"),
    [
        ("ppo", "facts", "", "which labelled, with noise, what the proxy learned from."),
        ("ppo", "reward_model", "no policy was optimised against it", "which PPO was trained to"),
        ("", "reward_model", "whether a policy was optimised against it is NOT KNOWN", "if any."),
        ("", "facts", "", "The gold score is that of gold seed 7. The proxy is a reward"),
    ],
)
def test_of_proxy_and_gold_only_what_is_known_is_said(policy, kind, note, said):
    """A released policy's page called the proxy the run's own, and the gold model unused."""
    results = {"gold": {"label": "gold seed 7"}, "judge": {"kind": kind, "note": note}}
    record: Any = SimpleNamespace(policy=policy, results=lambda _: results)
    text = scores._what(record)
    assert said in text
    assert note in text
    assert "which no policy here was trained on" not in text
    assert ("run's own" in text) == ("trained to raise" in text) == (policy == "ppo")


# -- what was unexplained --------------------------------------------------------------------------


def test_a_rate_that_changes_sides_at_equal_length_is_explained():
    said = judging.turned_by_length(statistics(0.341, 0.0, at_length=0.555))
    assert "other side of 50% than the raw rate, 34.1%" in said
    assert "deficit" in said
    assert "1.07 times the words" in said
    assert judging.turned_by_length(statistics(0.63, 0.0, at_length=0.555)) == ""


def test_a_corrected_rate_at_the_edge_is_marked_as_clipped(places):
    record = record_of(scores=(1.0,) * 40)
    calibrated(make_config("tiny", seed=1), flags=[])
    record = collect.load_run(make_config("tiny", seed=1))
    text = "\n".join(block.markdown("x") for block in calibration.blocks(record))
    # All 40 posts won, and a judge right on 9 of 10: (1 + 0.9 - 1) / 0.8 is beyond 100%.
    assert re.search(r"\| PPO \| 100\.0% \[[\d.]+, 100\.0\] CLIPPED \|", text)
    assert not calibration.is_clipped(interval(0.5))


def test_policies_stand_in_one_order_everywhere(places):
    record = record_of()
    rows = record.rows("win_rate", "post_scores.jsonl")
    write_rows(record.folders["win_rate"] / "post_scores.jsonl", rows[::-1])
    calibrated(make_config("tiny", seed=1), flags=[])
    record = collect.load_run(make_config("tiny", seed=1))
    assert list(calibration.corrected_rates(record)) == ["sft", "ppo"]
    numbers = collect.numbers_of(record)
    gap = numbers["differences"]["ppo-sft"]
    pairs = ("dpo-sft", "ppo-dpo", "ppo-sft")
    numbers |= {"policies": ["sft", "ppo", "dpo"], "differences": dict.fromkeys(pairs, gap)}
    table = judging._differences(numbers)
    assert [row[0] for row in table.rows] == ["PPO - SFT", "DPO - SFT", "PPO - DPO"]


# -- drawings --------------------------------------------------------------------------------------


def test_a_picture_for_markdown_has_colours_for_the_dark_and_words_for_who_cannot_see():
    rows = [{"step": step, "a": step} for step in range(4)]
    panel = plots.lines("A & B", [plots.curve(rows, "a", "a", plots.PPO)])
    figure = plots.figure("x", "c", [panel, replace(panel, title="Other")])
    svg = figure.svg
    assert "prefers-color-scheme: dark" in svg
    style = Path(plots.__file__).with_name("style.css").read_text()
    dark = style.split("prefers-color-scheme: dark")[1]
    for color in plots.DARK_COLORS.values():
        assert color in dark
    assert "<title>A &amp; B; Other</title>" in svg
    assert figure.about == "A & B; Other"


def test_accuracy_by_strength_stands_beside_the_papers_points_6_to_9(places):
    config = make_config("pythia-1b")
    fabricate(config, judge=ONLINE)
    run_page.main(["--preset", "pythia-1b"])
    folder = stage_folder(config, "report")
    text = (folder / "pythia-1b-seed44413.md").read_text()
    assert "| pairs by |  | accuracy [95%] | pairs | paper 1B |" in text
    # Huang et al. 2024: 0.563 where the second was slightly better (6), 0.694 far better (9).
    assert (
        "| strength of the label | 1 | 75.0% [73.0, 77.0] | 1,500 | 56.3% |\n"
        "| strength of the label | 4 | 83.0% [81.0, 85.0] | 500 | 69.4% |"
    ) in text


# -- settings and price ----------------------------------------------------------------------------


def settings_of(**changes):
    config = make_config("tiny", seed=1, **changes)
    fabricate(config)
    record = collect.load_run(config)
    return made_with.settings_tables(record.settings, record.preset)


def test_settings_stand_beside_the_presets_and_the_papers(places):
    _, said, changed, _ = settings_of(name="mine", overrides=("ppo.kl_coef=0.1",))
    assert said.text == "Set beside the preset tiny: ppo.kl_coef=0.1."
    assert changed.header == ("setting", "this run", "preset tiny", "default")
    rows = {row[0]: row[1:] for row in changed.rows}
    assert rows["ppo.kl_coef"] == ["0.1", "0.05", "0.05"]
    assert rows["rm.learning_rate"][:2] == ["0.0005", "0.0005"]  # the preset's, not the paper's
    assert "ppo.gamma" not in rows
    _, plain, *_ = settings_of()
    assert plain.text == "All settings are those of the preset tiny."


def test_a_judge_that_is_paid_has_its_bill_and_another_none(places):
    said = [made_with.judges_price(record_of(seed=1))]
    config = replace(
        make_config("tiny", seed=2),
        judge=JudgeSettings(kind="openai", model="m", input_price=2.0, output_price=10.0),
    )
    fabricate(config, judge=ONLINE)
    rows = [{"prompt_tokens": 500_000, "completion_tokens": 10_000}] * 3
    write_rows(stage_folder(config, "judge") / "judgements.jsonl", rows)
    said.append(made_with.judges_price(collect.load_run(config)))
    assert said == [
        "The judge ran here and was asked nothing that costs money.",
        # 1.5 M read at 2 USD and 30,000 written at 10 USD a million.
        "The judge gave 3 verdicts for 3.30 USD, by the price of its tokens now.",
    ]


# -- the built-in world's facts --------------------------------------------------------------------


def test_shares_of_facts_told_right_are_those_counted_by_hand(places):
    """Three posts, of which the second's summary garbles the age and tells the day right."""
    posts = [f"toy1-validation-{number}" for number in range(40)]
    wanting = [post for post in posts if "age" in facts_of(post).wanted][:2]
    (other,) = [post for post in posts if "when" in facts_of(post).wanted][:1]
    first, second, third = (facts_of(post).words for post in (*wanting, other))
    wrong = "twelve" if second["age"] != "twelve" else "nineteen"
    texts = (f"aged {first['age']}", f"aged {wrong}, on {second['when']}", f"aged {third['age']}")
    rows = [{"id": post, "summary": t} for post, t in zip((*wanting, other), texts, strict=True)]
    shares = scores.told_shares(rows)
    assert shares["age"] == (1 / 2, 1)
    assert shares["when"] == (0, 1 / 2)
    assert shares["feeling"] == (0, 0)
    assert scores.told_shares([rows[2]])["age"] == (None, 1)


def test_facts_told_stand_on_pages_of_the_built_in_world_alone(places):
    record = record_of()
    (table,) = scores.told_blocks(record)
    assert isinstance(table, page.Table)
    assert table.header == [
        "",
        *(f"{who}, {how}" for who in ("SFT", "PPO") for how in ("wanted", "not wanted")),
    ]
    record.settings["data"]["source"] = "hub"
    assert scores.told_blocks(record) == []


def test_what_lies_below_the_penalty_is_that_of_the_first_update(runs):
    config = make_config("tiny")
    fabricate(config)
    rows = [{"step": step, "policy/below_penalty": step / 8} for step in (1, 2, 3)]
    write_rows(stage_folder(config, "ppo") / "metrics.jsonl", rows)
    record = collect.load_run(config)
    assert collect.below_penalty(record, "ppo") == 1 / 8
    assert collect.below_penalty(record, "sft") is None


@pytest.mark.parametrize(("kind", "share"), [("facts", 1.0), ("reward_model", None)])
def test_a_reward_model_that_judges_is_not_said_to_agree_with_the_judge(kind, share):
    written = {"ppo": [{"id": "a", "score": 2.0, "reference_score": 1.0}]}
    agrees = of_reward_model("ppo", written, {"a": 1.0}, None, kind)["rm_agrees"]
    assert (agrees and agrees["estimate"]) == share


def test_scores_that_padding_moves_in_bf16_are_called_rounding(places):
    record = record_of()
    assert "by rounding alone." in run_page._normalization(record).caption
    half = {**record.settings, "memory": {**record.settings["memory"], "mixed_precision": "bf16"}}
    caption = run_page._normalization(replace(record, settings=half)).caption
    assert caption.endswith("by rounding alone, which is coarse in bf16.")
