"""Recipes for PPO's critic: bounded values, a lambda by length, rewards bounded by references."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from stages import base, normalize, ppo, rm, sft
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.ppo import Ppo
from stages.data.ragged import TokenizedSplit, make_ragged
from stages.models.forward import ResponseBatch, score_responses
from stages.models.sampling import Noise
from stages.rl.algorithms import Rloo
from stages.rl.episodes import ValueRange
from stages.rl.networks import Origins, reference_scores
from stages.rl.rollout import (
    load_references,
    measure,
    sample_responses,
    score,
    score_references,
)
from stages.rl.update import optimize
from stages.rl.value_range import find_range, in_range, logged_range
from stages.runs.files import read_lines, write_json
from tests.lib.asserts import close
from tests.lib.episodes import two_episodes
from tests.lib.fabricated_runs import write_rows
from tests.lib.learners import learner_of, rollout_from
from tests.lib.make_stages import make_stages, run_module
from tests.lib.resuming import Killed, kill_at, same

QUERIES = [torch.tensor(tokens) for tokens in ([5, 6, 7], [8, 9], [3, 4, 5, 6])]
REFERENCES = [torch.tensor(tokens) for tokens in ([4, 3, 0], [7, 0], [6, 6, 5, 0])]
NOISE = Noise(seed=1, purpose="ppo", length=6)

# -- the range of bounded values -------------------------------------------------------------------


def two_processes(other: torch.Tensor) -> Any:
    """An accelerator that gathers this process's scores with those of another one."""
    return SimpleNamespace(gather=lambda scores: torch.cat([scores, other]))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Ppo(eos_trick="off"), ValueRange(low=-3.0, high=4.0)),
        (Ppo(missing_eos_penalty=-5.0), ValueRange(low=-5.0, high=4.0)),
        (Ppo(eos_trick="off", score_shaping="preference"), ValueRange(low=-3.0, high=3.0)),
    ],
    ids=["scores", "a missing EOS", "preferences"],
)
def test_the_range_is_that_of_all_scores_of_all_processes(settings, expected):
    origins = Origins(policy=Path(), reward_model=Path(), reference_scores=(-2.5, 4.0))
    episodes = two_episodes()  # scores 2 and 3
    found = find_range(two_processes(torch.tensor([-3.0, 1.0])), episodes, origins, settings)
    assert found == expected


def test_bounded_rewards_have_a_range_that_is_known():
    episodes = two_episodes(shaped_scores=torch.tensor([0.3, 0.4]))
    origins = Origins(policy=Path(), reward_model=Path(), reference_scores=(-2.5, 4.0))
    settings = Ppo(score_shaping="preference")
    found = find_range(two_processes(torch.tensor([0.5])), episodes, origins, settings)
    assert found == ValueRange(low=-1.0, high=1.0)  # a missing EOS gets -1


def test_scores_that_do_not_differ_have_no_range():
    episodes = two_episodes(scores=torch.tensor([2.0, 2.0]))
    origins = Origins(policy=Path(), reward_model=Path())
    with pytest.raises(UserError, match="all of the first update are 2: set"):
        find_range(two_processes(torch.tensor([2.0])), episodes, origins, Ppo(eos_trick="off"))


def test_the_scores_of_references_are_those_after_normalization(tmp_path):
    results = {"minimum": -1.0, "maximum": 5.0, "mean_before": 2.0}
    write_json(tmp_path / "manifest.json", {"results": results})
    assert reference_scores(tmp_path, shift=0.0) == (-3.0, 3.0)
    assert reference_scores(tmp_path, shift=2.0) == (-1.0, 5.0)  # without normalization
    assert reference_scores(tmp_path / "nothing", shift=0.0) == ()


def test_a_resumed_run_has_the_range_that_was_logged(tmp_path):
    metrics_file = tmp_path / "metrics.jsonl"
    row = {"step": 1, "val/value_low": -1.0999999046325684, "val/value_high": 4.0}
    write_rows(metrics_file, [row])
    settings = Ppo(bound_values=True)
    expected = ValueRange(low=-1.0999999046325684, high=4.0)
    assert logged_range(settings, metrics_file, update=1) == expected
    assert logged_range(settings, metrics_file, update=0) is None
    assert logged_range(Ppo(), metrics_file, update=1) is None


def test_values_of_a_rollout_and_of_a_step_are_bounded_alike(before_ppo):
    settings = Ppo(batch_size=3, num_ppo_epochs=1, eos_trick="off", bound_values=True)
    learner = learner_of(before_ppo, make_config("tiny"))
    learner.optimizer = torch.optim.SGD(learner.trained.parameters(), lr=1e-3)
    measured = measure(learner, sample_responses(learner, QUERIES, NOISE, settings), settings)
    episodes = in_range(score(learner, measured, settings), ValueRange(low=-1.0, high=3.0))
    assert measured.values is not None
    assert episodes.values is not None
    close(episodes.values, 1 + 4 * measured.values.atan() / torch.pi, 1e-5)

    rollout = rollout_from(episodes, settings, before_ppo.pad_id)
    statistics = optimize(learner, rollout, settings, seed=1, kl_coef=settings.kl_coef)

    assert rollout.returns is not None
    squared_errors = (episodes.values - rollout.returns)[rollout.value_mask].square()
    expected = 0.5 * squared_errors.mean().item()
    assert statistics["loss/value_avg"] == pytest.approx(expected, rel=1e-4)
    assert statistics["val/clipfrac_avg"] == 0


# -- scores of references --------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [Ppo(), Rloo(samples_per_query=2)], ids=lambda x: x.section())
def test_each_response_is_compared_with_the_reference_of_its_query(before_ppo, settings):
    networks = replace(before_ppo, critic=None)
    learner = learner_of(networks, make_config("tiny"))
    sampled = sample_responses(learner, QUERIES, NOISE, settings)
    measured = measure(learner, sampled, settings)

    found = score_references(learner, QUERIES, REFERENCES, settings)
    settings = settings.changed(eos_trick="off", score_shaping="preference")
    episodes = score(learner, measured, settings, reference_scores=found)

    # One text at a time, without padding.
    expected = []
    for row in sampled.queries:
        query = row[row != sampled.pad_id]
        reference = next(
            reference
            for known_query, reference in zip(QUERIES, REFERENCES, strict=True)
            if torch.equal(known_query, query)
        )
        text = ResponseBatch(
            queries=query.unsqueeze(0), responses=reference.unsqueeze(0), pad_id=sampled.pad_id
        )
        expected.append(score_responses(networks.reward_model, text).item())
    close(found, expected, 1e-5)
    assert episodes.shaped_scores is not None
    close(episodes.shaped_scores, torch.sigmoid(episodes.scores - torch.tensor(expected)), 1e-5)


def test_a_missing_eos_gets_the_penalty_after_shaping(before_ppo):
    learner = learner_of(before_ppo, make_config("tiny"))
    settings = Ppo(score_shaping="preference")
    sampled = sample_responses(learner, QUERIES, NOISE, settings)
    unended = replace(sampled, responses=torch.full_like(sampled.responses, 5))
    measured = measure(learner, unended, settings)
    episodes = score(learner, measured, settings, reference_scores=torch.zeros(3))
    close(episodes.rewarded_scores, [-1.0] * 3)


def test_queries_without_references_are_refused_with_both_ways_out():
    posts = TokenizedSplit(columns={"queries": make_ragged([[5, 6]])}, rows=[{}])
    assert load_references("ppo_train", posts, Ppo()) is None
    with pytest.raises(UserError) as refused:
        load_references("ppo_train", posts, Rloo(score_shaping="preference"))
    assert str(refused.value) == (
        "rloo.score_shaping=preference needs a reference for each query, and the posts of ppo_train"
        " have none: set rloo.score_shaping=off, or remove ppo_train from the data to take queries"
        " from sft_train"
    )


# -- whole runs ------------------------------------------------------------------------------------

REWARD = '''
def short(queries, responses, rows):
    """The fewer characters, the better."""
    return [-len(text) / 10 for text in responses]
'''
NAMED = "--preset tiny --name short --set".split()
SETTINGS = """
    base.hidden_size=32 base.num_layers=1 base.vocab_size=1024
    world.train_posts=64 world.validation_posts=4
    world.train_comparisons=8 world.validation_comparisons=4
    sft.epochs=2 normalize.posts=16 memory.cpu_threads=1
    reward.function=short_texts:short ppo.critic_init=zero ppo.critic_updates=2 eval.posts=4
    ppo.total_episodes=640 ppo.batch_size=32 ppo.learning_rate=2e-3 ppo.kl_coef=0.01
    ppo.eos_trick=off checks.updates=stop
""".split()
DECOUPLED = ["ppo.lam_value=1"]
BOUNDED = [*DECOUPLED, "ppo.bound_values=true"]
ADAPTIVE = [*BOUNDED, "ppo.lam_length_alpha=0.4"]
PREFERENCE = ["ppo.score_shaping=preference"]


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """A folder with a small run that has all that PPO starts from, and its reward function."""
    root = tmp_path_factory.mktemp("before")
    (root / "short_texts.py").write_text(REWARD)
    make_stages(root, (base, sft, rm, normalize), [*NAMED, *SETTINGS])
    return root


@pytest.fixture
def run_ppo(before, tmp_path, monkeypatch):
    """Runs PPO in a copy of that folder with some settings; returns PPO's folder."""

    def run(*overrides: str, place: str = "place") -> Path:
        folder = tmp_path / place
        if not folder.exists():
            shutil.copytree(before, folder)
        monkeypatch.chdir(folder)
        run_module(ppo, [*NAMED, *SETTINGS, *overrides])
        return folder / "runs/short/seed44413/ppo"

    return run


@pytest.mark.learns
@pytest.mark.parametrize(
    "overrides",
    [DECOUPLED, BOUNDED, ADAPTIVE, PREFERENCE],
    ids=["decoupled", "bounded", "adaptive", "preference"],
)
def test_ppo_learns_with_each_recipe_and_no_check_stops_it(run_ppo, overrides):
    scores = [row["objective/scores"] for row in read_lines(run_ppo(*overrides) / "metrics.jsonl")]
    assert len(scores) == 20
    # The first three are the SFT model's: the critic warms up in two updates.
    assert fmean(scores[-5:]) > fmean(scores[:3]) + 0.3


def test_a_killed_run_with_bounded_values_resumes_to_the_same_weights(run_ppo, tmp_path):
    overrides = [*BOUNDED, "ppo.total_episodes=128", "memory.save_minutes=0"]
    whole = run_ppo(*overrides, place="whole")
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, 3)
        with pytest.raises(Killed):
            run_ppo(*overrides)

    resumed = run_ppo(*overrides)

    same(whole, resumed, tmp_path / "differences.json")
    rows = read_lines(resumed / "metrics.jsonl")
    assert len({(row["val/value_low"], row["val/value_high"]) for row in rows}) == 1


def test_the_saved_critic_is_a_plain_model_that_records_its_range(run_ppo):
    folder = run_ppo(*BOUNDED, "ppo.total_episodes=96")
    logged = read_lines(folder / "metrics.jsonl")[-1]
    critic = AutoModelForTokenClassification.from_pretrained(folder / "critic")
    assert critic.config.value_range == [logged["val/value_low"], logged["val/value_high"]]
    policy_config = json.loads((folder / "model/config.json").read_text())
    assert "value_range" not in policy_config
