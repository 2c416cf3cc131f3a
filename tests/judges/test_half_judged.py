"""A system without a single verdict is reported without a rate, and the others keep their results.

Such a system used to be an error after everything had been paid for.
"""

import json
from pathlib import Path

import pytest

from eval import judge
from eval.controls import judge_controls
from eval.judge import judge_summaries
from eval.judges.offline import FactsJudge
from eval.judges.protocol import Reply
from eval.outputs import take_outputs
from eval.win_rate import measure_win_rates
from reports import render
from reports import run as run_page
from reports.outputs import write_report
from reports.results import load_run
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.runs.manifest import read_manifest, stage_folder
from tests.lib.existing_summaries import config_of_file, rows_of_world, write_jsonl
from tests.lib.fabricated_runs import fabricate


class PartlySilentJudge(FactsJudge):
    """The facts judge, but it gives no verdict about texts that contain a phrase."""

    def __init__(self, phrase):
        self.phrase = phrase

    def reply(self, comparison):
        if self.phrase in comparison.first or self.phrase in comparison.second:
            return Reply(choice=None, text="?")
        return super().reply(comparison)


def judge_silently_about(phrase, config, monkeypatch):
    """Run the stages up to the judgements with a judge that is silent about a phrase."""
    monkeypatch.setattr(judge, "make_judge", lambda config, policies: PartlySilentJudge(phrase))
    take_outputs(config)
    judge_summaries(config)
    judge_controls(config)


@pytest.fixture
def config_of_three_systems(runs, tmp_path):
    """Two systems of 12 posts, and the system `mute`, whose six summaries contain MUTE."""
    rows = rows_of_world(12)
    mute_rows = [
        row | {"system": "mute", "summary": f"MUTE {row['id']}"}
        for row in rows
        if row["system"] == "lead-3"
    ]
    return config_of_file(write_jsonl(tmp_path / "three.jsonl", rows + mute_rows))


@pytest.fixture
def judged_config(config_of_three_systems, monkeypatch):
    """The config of the three systems after the judge was silent about one of them."""
    judge_silently_about("MUTE", config_of_three_systems, monkeypatch)
    measure_win_rates(config_of_three_systems)
    return config_of_three_systems


def win_rates(config):
    return (read_manifest(stage_folder(config, "win_rate")) or {})["results"]


def test_a_system_without_a_verdict_has_no_rate(judged_config):
    results = win_rates(judged_config)

    mute = results["policies"]["mute"]
    assert mute["win_rate"] is None
    assert mute["p_value"] is None
    assert mute["unjudged"] == 1.0
    json.dumps(results, allow_nan=False)


def test_the_other_systems_keep_their_rates_and_their_difference(judged_config):
    results = win_rates(judged_config)

    assert results["policies"]["all-of-it"]["win_rate"] == 0.5
    [pair] = results["differences"]
    assert "mute" not in pair


def test_the_page_shows_a_system_without_a_rate(judged_config):
    write_report(judged_config)

    page = stage_folder(judged_config, "report") / "judged-three-seed44413.md"
    assert "| mute | – (100.0% unjudged) | – | 0 | 100.0% |" in page.read_text()


def test_without_any_verdict_one_line_says_so(config_of_three_systems, monkeypatch):
    judge_silently_about(" ", config_of_three_systems, monkeypatch)
    with pytest.raises(UserError, match=r"no post has a verdict in both orders.*judge again"):
        measure_win_rates(config_of_three_systems)


# -- a trained policy ------------------------------------------------------------------------------


@pytest.fixture
def unjudged_run(runs):
    """A trained run none of whose summaries has a verdict."""
    config = make_config("tiny")
    fabricate(config, unjudged=1.0, found={"win_rate": {"differences": {}}})
    return load_run(config)


def test_a_trained_policy_without_a_verdict_has_no_difference(unjudged_run):
    [difference] = unjudged_run.differences
    assert difference.interval is None
    assert difference.p_value is None


def test_a_trained_policy_without_a_verdict_has_a_page(unjudged_run):
    values = run_page.page_values(unjudged_run)
    page = render.fill("run.md", "x", **values, is_public=False)
    assert "| PPO minus SFT | – (not compared) | – |" in page.markdown


def test_a_trained_policy_without_a_verdict_is_summarized_on_the_terminal(unjudged_run):
    assert "– (100.0% unjudged)" in run_page.terminal_text(unjudged_run, Path("page"))
