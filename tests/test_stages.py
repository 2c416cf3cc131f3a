"""The whole pipeline on a miniature of the built-in world: every stage runs and learns."""

import math
import shutil
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from eval import controls, judge, summaries, win_rate
from eval.scores import with_statistics
from reports import run as run_page
from stages import base, dpo, normalize, ppo, rm, sft
from stages.config.command_line import make_config
from stages.config.stages import SHARED_STAGES
from stages.data.ragged import load_split
from stages.models.loading import load_policy, load_reward_model
from stages.rl import networks
from stages.rl.networks import PolicyLearner
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest
from tests.lib.learners import ppo_learner
from tests.lib.make_stages import run_module

# Three layers and four epochs, because smaller ones leave the reward model at chance for hundreds
# of updates. The bounds on what is learned are far from what 5 to 11 roundings gave: SFT loss to
# 0.86, ROUGE-L at least 0.54; reward model 0.70 right, loss at most 0.53; score up by 1.09 or more;
# DPO 0.79 right, loss at most 0.49, margin at least 0.63. The mean score before normalization may
# be 0.
MINI = [
    "base.hidden_size=64",
    "base.num_layers=3",
    "world.train_posts=1600",
    "world.validation_posts=40",
    "world.train_comparisons=2400",
    "world.validation_comparisons=200",
    "sft.epochs=4",
    "memory.cpu_threads=1",
    "ppo.total_episodes=512",
    "ppo.batch_size=64",
    "ppo.learning_rate=0.001",
    "ppo.samples_every=4",
    "ppo.critic_updates=0",
    "dpo.learning_rate=0.0005",
]
ARGUMENTS = ["--preset", "tiny", "--name", "mini", "--set", *MINI]
MAX_SUMMARY_TOKENS = make_config("tiny").data.max_summary_tokens
STAGE_MODULES = (
    base,
    sft,
    rm,
    normalize,
    ppo,
    dpo,
    summaries,
    judge,
    controls,
    win_rate,
    run_page,
)
GROUPS_OF_PAIRS = ("by_split", "by_batch", "by_strength", "by_policies")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The folder of a finished miniature run, trained by the stages' own command lines."""
    root = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for module in STAGE_MODULES:
            run_module(module, ARGUMENTS)
        yield root / "runs" / "mini" / "seed44413"


def manifest(study: Path, stage: str) -> dict[str, Any]:
    content = read_manifest(study / stage)
    assert content is not None
    return content


def results(study: Path, stage: str) -> dict[str, Any]:
    return manifest(study, stage)["results"]


def column(study: Path, stage: str, key: str) -> list[float]:
    """The values of a metric, in the updates that log it."""
    rows = read_lines(study / stage / "metrics.jsonl")
    return [row[key] for row in rows if key in row]


@pytest.mark.parametrize(
    ("stage", "needed_stage"),
    [
        ("sft", "base"),
        ("rm", "sft"),
        ("normalize", "rm"),
        ("ppo", "normalize"),
        ("dpo", "sft"),
        ("summaries", "ppo"),
        ("summaries", "dpo"),
        ("judge/facts", "summaries"),
        ("win_rate/facts", "judge"),
    ],
)
def test_every_stage_leaves_a_manifest_with_its_inputs(study, stage, needed_stage):
    assert needed_stage in manifest(study, stage)["inputs"]
    assert manifest(study, stage)["outputs"]


def test_finished_stages_leave_no_partial_folder(study):
    assert not list(study.glob("*.partial"))


@pytest.mark.learns
def test_sft_learns(study):
    losses = column(study, "sft", "loss/validation")
    assert losses[0] == pytest.approx(math.log(results(study, "base")["vocabulary"]), rel=0.2)
    assert all(later < earlier for earlier, later in pairwise(losses))
    assert losses[-1] < 1.3
    assert results(study, "sft")["rougeL"] > 0.4


@pytest.mark.learns
def test_the_reward_model_learns(study):
    assert results(study, "rm")["accuracy"] > 0.55
    assert results(study, "rm")["loss"] < math.log(2)
    statistics = with_statistics(results(study, "rm"), study / "rm")
    accuracy = results(study, "rm")["accuracy"]
    assert statistics["accuracy_low"] < accuracy < statistics["accuracy_high"]


def test_the_groups_of_pairs_are_all_pairs_together(study):
    statistics = with_statistics(results(study, "rm"), study / "rm")
    for key in GROUPS_OF_PAIRS:
        pairs = [group["pairs"] for group in statistics[key].values()]
        assert sum(pairs) == statistics["pairs"], key


def test_references_score_zero_on_average_after_normalization(study):
    """The stage checks some references. Here every one is scored, without padding, by the saved
    model.
    """
    model = AutoModelForTokenClassification.from_pretrained(study / "normalize/model").eval()
    columns = load_split(study / "base/data", "sft_train").columns
    scores = []
    for row in range(len(columns["queries"])):
        text = torch.cat([columns["queries"][row], columns["summaries"][row]])
        with torch.no_grad():
            logits = model(text.unsqueeze(0)).logits
        scores.append(logits[0, -1, 0].item())

    recorded = results(study, "normalize")
    assert abs(recorded["mean_after"]) < 1e-5
    assert sum(scores) / len(scores) == pytest.approx(0, abs=1e-3)
    assert recorded["std"] == pytest.approx(torch.tensor(scores).std().item(), rel=1e-3)


@pytest.mark.learns
def test_ppo_raises_the_score_and_moves_away_from_the_sft_model(study):
    scores = column(study, "ppo", "objective/scores")
    kl = column(study, "ppo", "objective/kl")
    assert len(scores) == 8
    assert mean(scores[-3:]) > scores[0] + 0.3
    assert kl[0] == pytest.approx(0, abs=1e-5)
    assert kl[-1] > 0.05


@pytest.mark.learns
def test_dpo_begins_at_ln_2_learns_and_ranks_held_out_pairs(study):
    losses = column(study, "dpo", "loss/train")
    margins = column(study, "dpo", "rewards/margins")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert margins[0] == pytest.approx(0, abs=1e-5)
    assert mean(losses[-5:]) < math.log(2)
    assert mean(margins[-5:]) > 0.2
    assert results(study, "dpo")["accuracy"] > 0.65
    assert results(study, "dpo")["loss"] < math.log(2)
    load_policy(study / "dpo" / "model")  # fails if a weight is missing or unexpected


def test_dpo_is_measured_on_the_pairs_of_the_reward_model(study):
    of_rm = with_statistics(results(study, "rm"), study / "rm")
    of_dpo = with_statistics(results(study, "dpo"), study / "dpo")
    for key in GROUPS_OF_PAIRS:
        pairs_of_rm = {name: group["pairs"] for name, group in of_rm[key].items()}
        pairs_of_dpo = {name: group["pairs"] for name, group in of_dpo[key].items()}
        assert pairs_of_dpo == pairs_of_rm, key


def test_dpo_needs_no_reward_model(study):
    assert "normalize" not in manifest(study, "dpo")["inputs"]


def test_samples_are_written_every_few_updates_and_after_the_last(study):
    rows = read_lines(study / "ppo" / "samples.jsonl")
    assert {row["step"] for row in rows} == {1, 5, 8}


def test_a_sample_has_its_texts_its_score_and_its_numbers_by_token(study):
    for row in read_lines(study / "ppo" / "samples.jsonl"):
        assert row.keys() == {
            "step",
            "query",
            "response",
            "score",
            "kl",
            "tokens",
            "log_ratios",
            "values",
            "advantages",
            "rewards",
        }
        assert row["query"].startswith("SUBREDDIT")
        assert "".join(row["tokens"]) == row["response"]
        assert sum(row["log_ratios"]) == pytest.approx(row["kl"], abs=0.01)
        assert len(row["advantages"]) == len(row["tokens"])
        assert len(row["values"]) == len(row["rewards"])


def test_the_rewards_of_a_sample_are_its_kl_penalty_and_its_score(study):
    for row in read_lines(study / "ppo" / "samples.jsonl"):
        expected = [-0.05 * log_ratio for log_ratio in row["log_ratios"]]
        has_eos = row["response"].endswith("<|endoftext|>")
        if has_eos and len(row["tokens"]) < MAX_SUMMARY_TOKENS:
            expected.append(row["score"])  # one token after EOS
        else:
            expected[-1] += row["score"]
        assert row["rewards"] == pytest.approx(expected, rel=0.002, abs=1e-4)


def learner_from(study: Path, **changes: Any) -> PolicyLearner:
    settings = make_config("tiny", name="mini", overrides=tuple(MINI))
    return ppo_learner(study, settings.changed(ppo=settings.ppo.changed(**changes)))


def test_without_reward_normalization_both_scorers_have_the_reward_models_own_bias(
    study, monkeypatch
):
    raw_bias = load_reward_model(study / "rm/model").classifier.bias.item()
    bias = load_reward_model(study / "normalize/model").classifier.bias.item()
    mean_before = results(study, "normalize")["mean_before"]  # it may be as small as rounding
    assert raw_bias - bias == pytest.approx(mean_before, abs=1e-6)

    # A mean that is larger than rounding.
    monkeypatch.setattr(networks, "read_record", lambda _: {"results": {"mean_before": 0.5}})
    normalized = learner_from(study, reward_normalization=True).networks
    raw = learner_from(study, reward_normalization=False).networks

    for network in (normalized.critic, normalized.reward_model):
        assert network.classifier.bias.item() == pytest.approx(bias, abs=1e-5)
    for network in (raw.critic, raw.reward_model):
        assert network.classifier.bias.item() == pytest.approx(bias + 0.5, abs=1e-5)


def test_a_critic_from_the_sft_model_has_its_backbone_and_a_new_head(study):
    models = learner_from(study, critic_init="sft").networks
    sft_model = load_policy(study / "sft" / "model")

    critic_weights = models.critic.base_model.parameters()
    for weight, expected in zip(critic_weights, sft_model.base_model.parameters(), strict=True):
        assert torch.equal(weight, expected)

    head = models.critic.classifier.weight
    assert not torch.equal(head, models.reward_model.classifier.weight)
    assert head.std().item() == pytest.approx(65**-0.5, rel=0.5)  # 64 wide


def test_the_critic_may_have_a_learning_rate_of_its_own(study):
    optimizer = learner_from(study, critic_learning_rate=3e-3).optimizer
    policy_group, critic_group = optimizer.param_groups
    assert policy_group["lr_scale"] == 1.0
    assert critic_group["lr_scale"] == pytest.approx(3.0)


def test_only_the_trained_networks_have_dropout(study):
    models = learner_from(study, dropout=0.2).networks
    assert dropout_rates(models.policy) == {0.2}
    assert dropout_rates(models.critic) == {0.2}
    assert dropout_rates(models.ref_policy) == {0.0}
    assert dropout_rates(models.reward_model) == {0.0}


def dropout_rates(network: torch.nn.Module) -> set[float]:
    layers = [layer for layer in network.modules() if isinstance(layer, torch.nn.Dropout)]
    return {layer.p for layer in layers}


@pytest.mark.parametrize(
    "settings",
    [
        [
            "ppo.dropout=0.1",
            "ppo.critic_init=sft",
            "ppo.eos_trick=subtract",
            "ppo.kl_in=loss",
            "ppo.kl_estimator=k3",
            "ppo.loss_mean=sequences",
        ],
        [
            "ppo.compat=paper",
            "ppo.reward_normalization=false",
            "ppo.score_at=eos",
            "ppo.whiten_rewards=true",
            "ppo.target_kl=0.01",
            "ppo.clip_values=false",
            "ppo.max_grad_norm=1",
        ],
    ],
    ids=["kl in the loss", "as in the paper's code"],
)
def test_ppo_runs_with_other_settings_and_its_checks_on(study, settings):
    folder = study.parents[1] / "switched" / "seed44413"
    for stage in SHARED_STAGES:
        shutil.copytree(study / stage, folder / stage, dirs_exist_ok=True)
    overrides = [*MINI, "ppo.total_episodes=32", "ppo.batch_size=16", *settings]

    run_module(ppo, ["--preset", "tiny", "--name", "switched", "--set", *overrides])

    assert len(read_lines(folder / "ppo" / "metrics.jsonl")) == 2


@pytest.mark.parametrize("stage", ["sft", "rm", "ppo", "dpo"])
def test_all_metrics_are_finite(study, stage):
    for row in read_lines(study / stage / "metrics.jsonl"):
        for name, value in row.items():
            assert math.isfinite(value), f"{name} in step {row['step']}"


@pytest.mark.parametrize(
    ("module", "stage", "stages_before"),
    [
        (sft, "sft", ["base"]),
        (rm, "rm", ["base", "sft"]),
        (dpo, "dpo", ["base", "sft"]),
    ],
    ids=["sft", "rm", "dpo"],
)
def test_a_stage_that_diverges_stops_before_the_step(
    study, place, capsys, module, stage, stages_before
):
    run = place / "runs" / "mini" / "seed44413"
    for name in stages_before:
        shutil.copytree(study / name, run / name)

    with pytest.raises(SystemExit):
        run_module(module, [*ARGUMENTS, f"{stage}.learning_rate=1e9"])

    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{stage} stopped before an optimizer step of update " in message
    assert not (run / stage / "manifest.json").exists()
