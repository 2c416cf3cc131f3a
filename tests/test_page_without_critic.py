"""The page of a run in which RLOO took the place of PPO: everything but what a critic has."""

import json
import shutil
from dataclasses import replace

from reports import run_page
from reports.parts import collect, page
from reports.sections import curves
from stages.config.command_line import make_config
from tests.lib.fabricated_runs import fabricate, write_rows

OF_A_CRITIC = {
    "loss/value_avg",
    "val/explained_variance",
    "val/clipfrac_avg",
    "critic/grad_norm",
    "val/advantage_score_correlation",
    "policy/advantage_at_eos",
    "policy/critic_used",
    "val/advantage_variance_critic",
    "val/advantage_variance_mean",
}


def renamed(results):
    """Results of an evaluation in which the policy of PPO is called `rloo`."""
    return json.loads(json.dumps(results).replace('"ppo', '"rloo'))


def rloo_record():
    """A finished run whose policy RLOO trained in PPO's place."""
    fabricate(make_config("tiny"))
    record = collect.load_run(make_config("tiny"))

    # PPO's folder, under RLOO's name and without the critic's metrics.
    ppo_folder = record.folders["ppo"]
    folder = ppo_folder.with_name("rloo")
    shutil.copytree(ppo_folder, folder)
    metrics = [
        {key: value for key, value in row.items() if key not in OF_A_CRITIC}
        for row in record.rows("ppo")
    ]
    write_rows(folder / "metrics.jsonl", metrics)

    # What was sampled and judged.
    summaries_folder = record.folders["summaries"]
    shutil.copy(summaries_folder / "ppo.jsonl", summaries_folder / "rloo.jsonl")
    scores = record.rows("win_rate", "post_scores.jsonl")
    scores_of_rloo = [renamed(row) for row in scores]
    write_rows(record.folders["win_rate"] / "post_scores.jsonl", [*scores, *scores_of_rloo])

    manifests = record.manifests | {"rloo": record.manifests["ppo"]}
    folders = record.folders | {"rloo": folder}
    del manifests["ppo"], folders["ppo"]
    for stage in ("summaries", "win_rate"):
        manifests[stage] = manifests[stage] | {"results": renamed(record.results(stage))}
    settings = {name: section for name, section in record.settings.items() if name != "ppo"}
    return replace(record, manifests=manifests, folders=folders, settings=settings, _results={})


def test_a_run_without_ppo_and_critic_has_a_whole_page_with_curves_and_kl(runs, no_drawing):
    record = rloo_record()
    text = page.to_markdown("x", "x", run_page.blocks(record))
    assert "RLOO BEATS the references: 63.0%" in text
    assert "optimised the summariser against it with RLOO for 7,680 episodes" in text
    assert "RLOO beats SFT: +21.8 points [+17.8, +25.8]" in text
    table = text.split("## The summaries")[1].splitlines()
    row = next(line for line in table if line.startswith("| RLOO |"))
    assert row.endswith("| 7.3 |")  # KL
    assert "What RLOO optimised, update by update" in text
    assert "x-rloo.svg" in text
    assert "PPO" not in text.split("## Settings")[0].replace("treat another", "")
    panels = curves.GRADIENT_GROUPS["-critic"][1]
    assert "How the critic learned" not in text
    assert {key for keys in panels.values() for key in keys} == OF_A_CRITIC
    headline = run_page.headline(collect.numbers_of(record), record.folders["rloo"] / "x.html")
    assert "RLOO" in headline
