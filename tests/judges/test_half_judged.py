"""Systems that the judge said nothing usable about: the others keep their results."""

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


class Choosy(FactsJudge):
    """The rule of the built-in world, which says nothing usable of some texts."""

    def __init__(self, *unheard):
        self.unheard = unheard

    def reply(self, comparison):
        texts = (comparison.first, comparison.second)
        if any(word in text for word in self.unheard for text in texts):
            return Reply(choice=None, text="?")
        return super().reply(comparison)


def judged_by(monkeypatch, config, *unheard):
    monkeypatch.setattr(judge, "make_judge", lambda config, policies: Choosy(*unheard))
    for stage in (take_outputs, judge_summaries, judge_controls):
        stage(config)


@pytest.fixture
def three(tmp_path):
    """Two systems that are judged and one that is not, whose texts say MUTE."""
    rows = rows_of_world(12)
    mute = [row | {"system": "mute", "summary": f"MUTE {row['id']}"} for row in rows[::2]]
    return config_of_file(write_jsonl(tmp_path / "three.jsonl", [*rows, *mute]))


def test_a_system_without_a_verdict_is_a_row_without_a_rate_beside_the_others(
    runs, three, monkeypatch
):
    """It was an error after everything had been paid for, and no system had a result."""
    judged_by(monkeypatch, three, "MUTE")
    measure_win_rates(three)
    results = (read_manifest(stage_folder(three, "win_rate")) or {})["results"]
    json.dumps(results, allow_nan=False)
    mute = results["policies"]["mute"]
    assert (mute["win_rate"], mute["p_value"], mute["unjudged"]) == (None, None, 1.0)
    assert results["policies"]["all-of-it"]["win_rate"] == 0.5
    (pair,) = results["differences"]  # that of the two that are judged
    assert "mute" not in pair
    write_report(three)
    page = (stage_folder(three, "report") / "judged-three-seed44413.md").read_text()
    assert "| mute | – (100.0% unjudged) | – | 0 | 100.0% |" in page


def test_where_no_system_has_any_verdict_one_line_says_so(runs, three, monkeypatch, capsys):
    judged_by(monkeypatch, three, " ")
    with pytest.raises(UserError, match=r"no post has a verdict in both orders.*judge again"):
        measure_win_rates(three)


def test_a_trained_policy_without_a_verdict_still_has_a_page(runs):
    config = make_config("tiny")
    fabricate(config, unjudged=1.0, found={"win_rate": {"differences": {}}})
    run = load_run(config)
    (difference,) = run.differences
    assert (difference.interval, difference.p_value) == (None, None)
    assert "– (100.0% unjudged)" in run_page.terminal_text(run, Path("page"))
    page = render.fill("run.md", "x", **run_page.page_values(run), is_public=False)
    assert "| PPO minus SFT | – (not compared) | – |" in page.markdown
