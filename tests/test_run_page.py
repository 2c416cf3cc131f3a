"""A run's page: four sentences, curves of all that was logged, spreads."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from eval.win_rate import of_reward_model
from reports import run_page
from reports.parts import collect, plots, sentences
from reports.sections import calibration, curves, judging, made_with, scores
from stages.config.command_line import make_config
from stages.runs.manifest import stage_folder
from tests.lib.fabricated_runs import ONLINE, calibrated, fabricate, write_rows
from tests.lib.make_stages import run_module


@pytest.fixture
def places(runs, no_drawing):
    """A folder for runs, and empty plots."""


def record_of(seed=1, **changes):
    config = make_config("tiny", seed=seed)
    fabricate(config, **changes)
    return collect.load_run(config)


# -- the first screen ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ppo", "verdict"),
    [
        (0.63, "PPO BEATS the references: 63.0% [60.0, 66.0]. PPO beats SFT: +21.8 points"),
        (0.52, "PPO is INCONCLUSIVE against the references: 52.0% [49.0, 55.0]. PPO beats SFT:"),
        (0.40, "PPO does NOT reach the references: 40.0% [37.0, 43.0]. PPO did not significantly"),
    ],
)
def test_the_page_begins_with_a_verdict_and_what_to_distrust(places, ppo, verdict):
    lead = sentences.opening(collect.numbers_of(record_of(ppo=ppo)))
    assert lead.text.startswith(verdict)
    caveat = "Caveats: Not an LLM judged (facts rule); one seed; toy world; no pretraining."
    assert lead.text.endswith(caveat)


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
    assert "mine/new_metric" in drawn
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


@pytest.mark.parametrize(
    ("policy", "kind", "note", "said"),
    [
        ("ppo", "facts", "", "which labelled, with noise, what the proxy learned from."),
        ("ppo", "reward_model", "no policy was optimized against it", "which PPO was trained to"),
        ("", "reward_model", "whether a policy was optimized against it is NOT KNOWN", "if any."),
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


# -- rates and orders ------------------------------------------------------------------------------


def test_a_corrected_rate_at_the_edge_is_marked_as_clipped(places):
    record = record_of(scores=(1.0,) * 40)
    calibrated(make_config("tiny", seed=1), flags=[])
    record = collect.load_run(make_config("tiny", seed=1))
    text = "\n".join(block.markdown("x") for block in calibration.blocks(record))
    # All 40 posts won, and a judge right on 9 of 10: (1 + 0.9 - 1) / 0.8 is beyond 100%.
    assert re.search(r"\| PPO \| 100\.0% \[[\d.]+, 100\.0\] CLIPPED \|", text)


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


def test_accuracy_by_strength_stands_beside_the_papers_points_6_to_9(places):
    config = make_config("pythia-1b")
    fabricate(config, judge=ONLINE)
    run_module(run_page, ["--preset", "pythia-1b"])
    folder = stage_folder(config, "report")
    text = (folder / "pythia-1b-seed44413.md").read_text()
    assert "| pairs by |  | accuracy [95%] | pairs | paper 1B |" in text
    # Huang et al. 2024: 0.563 where the second was slightly better (6), 0.694 far better (9).
    assert (
        "| strength of the label | 1 | 75.0% [73.0, 77.0] | 1,500 | 56.3% |\n"
        "| strength of the label | 4 | 83.0% [81.0, 85.0] | 500 | 69.4% |"
    ) in text


# -- settings --------------------------------------------------------------------------------------


def settings_of(**changes):
    config = make_config("tiny", seed=1, **changes)
    fabricate(config)
    record = collect.load_run(config)
    return made_with.settings_tables(record.settings, record.preset)


def test_settings_stand_beside_the_presets_and_the_papers(places):
    _, said, changed, _ = settings_of(name="mine", overrides=("ppo.kl_coef=0.1",))
    assert said.text == "Set in addition to the preset tiny: ppo.kl_coef=0.1."
    assert changed.header == ("setting", "this run", "preset tiny", "default")
    rows = {row[0]: row[1:] for row in changed.rows}
    assert rows["ppo.kl_coef"] == ["0.1", "0.05", "0.05"]
    assert rows["rm.learning_rate"][:2] == ["0.0005", "0.0005"]  # the preset's, not the paper's
    assert "ppo.gamma" not in rows
    _, plain, *_ = settings_of()
    assert plain.text == "All settings are those of the preset tiny."


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
