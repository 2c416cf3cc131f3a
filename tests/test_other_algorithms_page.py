"""The page of a policy-gradient stage of another name and without a critic, about fabricated runs.

The table of stages gets a row `rloo`; nothing else of the pages knows that name.
"""

import json
import shutil
from dataclasses import replace

import pytest

from reports import run_page
from reports.parts import collect, page, words
from reports.sections import curves
from stages.settings import stages
from stages.settings.command_line import make_config
from tests.lib.fabricated_runs import fabricate, write_rows

OF_A_CRITIC = (
    *("loss/value_avg", "val/explained_variance", "val/clipfrac_avg", "critic/grad_norm"),
    *("val/advantage_score_correlation", "policy/advantage_at_eos", "policy/critic_used"),
    *("val/advantage_variance_critic", "val/advantage_variance_mean"),
)


@pytest.fixture(autouse=True)
def rloo(runs, no_drawing, monkeypatch):
    """A table of stages with one rival, and empty plots."""
    row = replace(stages.STAGES["ppo"], optional=True)
    monkeypatch.setitem(stages.STAGES, "rloo", row)
    monkeypatch.setattr(collect, "POLICY_GRADIENT_STAGES", ("ppo", "rloo"))
    monkeypatch.setattr(collect, "STAGES", (*collect.STAGES, "rloo"))
    monkeypatch.setattr(words, "POLICY_STAGES", ("sft", "ppo", "dpo", "rloo"))


def renamed(results):
    """Results of an evaluation in which the policy of PPO is called `rloo`."""
    return json.loads(json.dumps(results).replace('"ppo', '"rloo'))


def rival():
    """A finished run whose policy RLOO made, in the place of PPO's."""
    fabricate(make_config("tiny"))
    record = collect.load_run(make_config("tiny"))
    own = record.folders["ppo"]
    folder = own.with_name("rloo")
    shutil.copytree(own, folder)
    rows = [
        {key: value for key, value in row.items() if key not in OF_A_CRITIC}
        for row in record.rows("ppo")
    ]
    write_rows(folder / "metrics.jsonl", rows)
    summaries, rates = record.folders["summaries"], record.folders["win_rate"]
    shutil.copy(summaries / "ppo.jsonl", summaries / "rloo.jsonl")
    scores = record.rows("win_rate", "post_scores.jsonl")
    manifests = record.manifests | {"rloo": record.manifests["ppo"]}
    folders = record.folders | {"rloo": folder}
    del manifests["ppo"], folders["ppo"]
    for stage in ("summaries", "win_rate"):
        manifests[stage] = manifests[stage] | {"results": renamed(record.results(stage))}
    write_rows(rates / "post_scores.jsonl", [*scores, *map(renamed, scores)])
    settings = {key: own for key, own in record.settings.items() if key != "ppo"}
    return replace(record, manifests=manifests, folders=folders, settings=settings, _results={})


def test_a_run_without_ppo_and_critic_has_a_whole_page_with_curves_and_kl():
    record = rival()
    text = page.to_markdown("x", "x", run_page.blocks(record))
    assert "RLOO BEATS the references: 63.0%" in text
    assert "optimised the summariser against it with RLOO for 7,680 episodes" in text
    assert "RLOO beats SFT: +21.8 points [+17.8, +25.8]" in text
    below = text.split("## The summaries")[1].splitlines()
    result = next(line for line in below if line.startswith("| RLOO |"))
    assert result.endswith("| 7.3 |")  # KL
    assert "What RLOO optimised, update by update" in text
    assert "x-rloo.svg" in text
    assert "PPO" not in text.split("## Settings")[0].replace("treat another", "")
    panels = curves.GRADIENT_GROUPS["-critic"][1]
    assert "How the critic learned" not in text
    assert {key for keys in panels.values() for key in keys} == set(OF_A_CRITIC)
    assert "RLOO" in run_page.headline(
        collect.numbers_of(record), record.folders["rloo"] / "x.html"
    )
