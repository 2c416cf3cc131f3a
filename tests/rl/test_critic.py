"""Critics: how they start and warm up, and what runs and pages say of a bad one."""

import shutil

import pytest
import torch

from reports import limits
from reports.results import load_run
from stages import base, normalize, ppo, rm, sft
from stages.config.command_line import make_config
from stages.config.ppo import Ppo
from stages.models.loading import load_reward_model
from stages.rl.metrics import say_what_is_odd
from stages.rl.networks import Origins, load_critic, zero_head
from stages.runs.files import read_lines
from stages.runs.manifest import stage_folder
from tests.lib.fabricated_runs import fabricate, write_rows
from tests.lib.learners import learner_of, rolled_out
from tests.lib.make_stages import make_stages, run_module

NAMED = "--preset tiny --name small --set".split()
SMALL = """
    base.hidden_size=32 base.num_layers=1 memory.cpu_threads=1
    world.train_posts=96 world.validation_posts=8
    world.train_comparisons=64 world.validation_comparisons=32
    ppo.total_episodes=96 ppo.batch_size=32 ppo.samples_every=1 ppo.critic_updates=0
""".split()
WARM_UP_FROM_ZERO = """
    ppo.critic_init=zero ppo.critic_updates=1 ppo.target_kl=10 ppo.learning_rate=0.001
    ppo.eos_trick=off
""".split()


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """The folder of a small run that has all that PPO is made from."""
    root = tmp_path_factory.mktemp("before")
    make_stages(root, (base, sft, rm, normalize), [*NAMED, *SMALL])
    return root / "runs"


@pytest.fixture
def run_ppo(before, tmp_path, monkeypatch):
    """Runs PPO with some settings; returns its folder."""

    def run(*overrides):
        monkeypatch.chdir(tmp_path)
        shutil.copytree(before, tmp_path / "runs")
        run_module(ppo, [*NAMED, *SMALL, *overrides])
        return tmp_path / "runs/small/seed44413/ppo"

    return run


def test_a_run_with_critic_warm_up_from_a_head_of_zeros(run_ppo):
    folder = run_ppo(*WARM_UP_FROM_ZERO)
    first, second, third = read_lines(folder / "metrics.jsonl")
    values: dict[int, set[float]] = {}
    for row in read_lines(folder / "samples.jsonl"):
        values.setdefault(row["step"], set()).update(row["values"])
    assert values[1] == {0.0}
    assert len(values[2]) > 1
    assert first["val/explained_variance"] == pytest.approx(0, abs=1e-6)

    # The policy is trained from the second update on, so its KL rises in the third.
    of_policy = {"loss/policy_avg", "policy/grad_norm", "val/ratio"}
    assert not of_policy & first.keys()
    assert of_policy <= second.keys()
    assert [first["objective/kl"], second["objective/kl"]] == pytest.approx([0, 0], abs=1e-5)
    assert abs(third["objective/kl"]) > 1e-4
    assert first["lr"] == pytest.approx(1e-3)
    assert second["lr"] == pytest.approx(1e-3 * 2 / 3)


# -- what a run says -------------------------------------------------------------------------------

HEALTHY = {"policy/below_penalty": 0.2, "policy/eos_rate": 0.01, "val/explained_variance": 0.0}
EIGHT_UPDATES = Ppo(total_episodes=8 * 32, batch_size=32)


@pytest.mark.parametrize(
    ("metrics", "settings", "expected"),
    [
        (
            {"val/explained_variance": -5.123},
            {},
            "the critic is worse than a constant (explained variance -5.1): see "
            "ppo.baseline=gated or ppo.critic_init=zero",
        ),
        ({"val/explained_variance": -5.123}, {"baseline": "gated"}, ""),
        (
            {"policy/below_penalty": 0.484},
            {},
            "48% of the responses end and score below -1, the score without an EOS: see "
            "ppo.eos_trick=subtract",
        ),
        ({"policy/below_penalty": 0.5}, {"eos_trick": "subtract"}, ""),
        (
            {"policy/eos_rate": 0.0},
            {},
            "no response ends: try more sft.epochs, or a larger data.max_summary_tokens",
        ),
        ({"policy/eos_rate": 0.0}, {"eos_trick": "off"}, ""),
        ({}, {}, ""),
    ],
)
def test_what_is_odd_at_the_first_update_is_one_line(
    before_ppo, tmp_path, capsys, metrics, settings, expected
):
    learner = learner_of(before_ppo, make_config("tiny"))
    say_what_is_odd(learner, tmp_path, HEALTHY | metrics, EIGHT_UPDATES.changed(**settings))
    assert capsys.readouterr().err.rstrip("\n") == expected


def test_without_a_critic_nothing_is_said_of_one(before_ppo, tmp_path, capsys):
    metrics = {key: HEALTHY[key] for key in ("policy/below_penalty", "policy/eos_rate")}
    learner = learner_of(before_ppo, make_config("tiny"))
    say_what_is_odd(learner, tmp_path, metrics, EIGHT_UPDATES.changed(baseline="mean"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("scores", "is_said"),
    [
        ([1.0, 0.9, 0.8], True),
        ([1.0, 1.1, 1.2], False),  # it rose
        ([1.0, 0.9], False),  # too early
        ([1.0, 0.9, 0.9, 0.9], False),  # said before
    ],
)
def test_a_run_says_after_a_quarter_that_its_score_has_not_risen(
    before_ppo, tmp_path, capsys, scores, is_said
):
    metrics_file = tmp_path / "metrics.jsonl"
    write_rows(metrics_file, [{"objective/scores": score} for score in scores[:-1]])
    learner = learner_of(before_ppo, make_config("tiny"), update=len(scores) - 1)
    metrics = HEALTHY | {"objective/scores": scores[-1]}
    say_what_is_odd(learner, metrics_file, metrics, EIGHT_UPDATES)
    line = capsys.readouterr().err
    expected = "after a quarter of the updates the score has not risen (1.00, 0.85): see "
    assert line == (f"{expected}learning_rate, critic\n" if is_said else "")


# -- heads of zeros --------------------------------------------------------------------------------


def test_a_critic_that_starts_at_0_has_the_backbone_of_the_reward_model(before):
    folder = before / "small/seed44413"
    origins = Origins(policy=folder / "sft/model", reward_model=folder / "normalize/model")
    critic = load_critic(origins, Ppo(critic_init="zero"))
    scorer = load_reward_model(origins.reward_model)
    pairs = zip(critic.base_model.parameters(), scorer.base_model.parameters(), strict=True)
    assert all(torch.equal(own, theirs) for own, theirs in pairs)
    assert not critic.classifier.weight.any()
    assert not critic.classifier.bias.any()
    assert all(weight.requires_grad for weight in critic.parameters())


def test_a_head_of_zeros_gives_values_of_0_and_leaves_the_backbone(before_ppo, policy_folder):
    config = make_config("tiny", name="mine", overrides=("ppo.batch_size=2",))
    learner = learner_of(before_ppo, config)
    backbone = [weight.clone() for weight in before_ppo.critic.base_model.parameters()]
    zero_head(before_ppo.critic)
    rollout, metrics = rolled_out(config, learner, [torch.tensor([5, 6, 7]), torch.tensor([8])])
    assert rollout.values is not None
    assert not rollout.values.any()
    assert metrics["val/explained_variance"] == pytest.approx(0, abs=1e-6)
    assert all(map(torch.equal, backbone, before_ppo.critic.base_model.parameters()))


# -- what pages say --------------------------------------------------------------------------------


def run_with(explained, in_warm_up=()):
    """A fabricated run with the explained variances of its policy's updates.

    `in_warm_up`: those of critic warm-up, if it has another length than the preset's.
    """
    overrides = (f"ppo.critic_updates={len(in_warm_up)}",) if in_warm_up else ()
    config = make_config("tiny", name="run" if in_warm_up else "", seed=1, overrides=overrides)
    fabricate(config)
    metrics_file = stage_folder(config, "ppo") / "metrics.jsonl"
    before = in_warm_up or [-9.0] * config.ppo.critic_updates
    rows = []
    for row, variance in zip(read_lines(metrics_file), [*before, *explained], strict=False):
        rows.append(row | {"policy/critic_used": 1.0, "val/explained_variance": variance})
    write_rows(metrics_file, rows)
    return load_run(config)


def test_a_page_counts_the_updates_in_which_the_critic_was_worse_than_a_constant(runs):
    (row,) = limits.poor_critics([run_with([-5.12, -0.7, 0.0, 0.2])])
    assert (row.below_zero, row.updates) == (2, 4)


def test_updates_of_critic_warm_up_do_not_count(runs):
    critic = run_with([0.1, -0.2], in_warm_up=(-5.0, -3.0)).critic
    assert critic is not None
    assert (critic.updates, critic.below_zero, critic.used) == (2, 1, 2)
    assert (critic.first, critic.last) == (0.1, -0.2)
