"""`make chaos` in short: killed in the middle of stages and saves, the pipeline ends the same."""

import json
import random

import pytest

from stages.finished import seal_of
from tests import chaos
from tests.chaos import SHARES, SMALL, Kill, Study, differences, plan

KILLS = (
    Kill(stage="sft", during_save=True),
    Kill(stage="rm", during_save=False),
    Kill(stage="ppo", during_save=True),
    Kill(stage="ppo", during_save=False),
)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A calm and a killed run, the kills that fell, and in what the runs differ."""
    study = Study(
        folder=tmp_path_factory.mktemp("chaos"),
        arguments=("--preset", "tiny"),
        overrides=tuple(SMALL),
        goals=("sft", "rm", "ppo"),
    )
    seconds = chaos.seconds_of(chaos.calm_run(study))
    fallen = chaos.chaotic_run(study, KILLS, seconds, seed=5)
    return study, fallen


@pytest.mark.walk
def test_a_pipeline_that_was_killed_again_and_again_ends_with_the_same_weights(killed, tmp_path):
    study, fallen = killed
    assert len(fallen) >= 2  # on a busy machine a stage may end before its kill
    assert {kill.fell_in for kill in fallen} & {"sft", "rm", "ppo"}
    found = differences(study.seed_folder("calm"), study.seed_folder("chaos"))
    (tmp_path / "differences.json").write_text(json.dumps(found))
    assert found == []


@pytest.mark.walk
def test_a_difference_in_weights_metrics_or_results_is_found(killed, tmp_path):
    """The comparison itself can fail: one changed number is named with its stage and file."""
    calm = killed[0].seed_folder("calm")
    other = tmp_path / "seed44413"
    for stage in ("sft", "ppo"):
        (other / stage).mkdir(parents=True)
        for path in (calm / stage).glob("*.json*"):
            (other / stage / path.name).write_text(path.read_text())
    missing = differences(calm, other)
    assert {line.split()[0] for line in missing} == {"base", "rm", "normalize"}
    metrics = (other / "ppo/metrics.jsonl").read_text()
    (other / "ppo/metrics.jsonl").write_text(metrics.replace('"step": 2', '"step": 3'))
    assert "ppo: metrics.jsonl" in differences(calm, other)
    manifest = json.loads((other / "sft/manifest.json").read_text())
    manifest["outputs"]["model/model.safetensors"] = "other"
    manifest["results"]["rougeL"] = 0.0
    sealed = manifest | {"seal": seal_of(manifest)}
    (other / "sft/manifest.json").write_text(json.dumps(sealed))
    assert {"sft: results", "sft: model/model.safetensors"} <= set(differences(calm, other))


def test_thirty_kills_reach_every_stage_that_takes_its_time_and_a_third_of_them_a_save():
    kills = plan(30, random.Random(1), list(SHARES))
    assert len(kills) == 30
    assert {kill.stage for kill in kills} == set(SHARES)
    assert sum(kill.during_save for kill in kills) == 10
    stages = [kill.stage for kill in kills]
    assert stages == sorted(stages, key=list(SHARES).index)
