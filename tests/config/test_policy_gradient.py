"""Which settings of policy-gradient algorithms go together, and which are refused."""

import pytest

from stages.config.command_line import make_config
from stages.config.ppo import PAPER_QUIRKS, Ppo
from stages.rl.algorithms import Grpo, Rloo
from tests.lib.asserts import refusal_of


def test_compat_paper_sets_the_quirks_and_nothing_else():
    plain = Ppo().model_dump()
    paper = Ppo(compat="paper").model_dump()

    changed = {name: value for name, value in paper.items() if value != plain[name]}

    assert changed == {"compat": "paper", **PAPER_QUIRKS}
    assert paper["critic_init"] == "reward_model"
    assert paper["critic_updates"] == 0


def test_compat_paper_stays_when_another_setting_changes():
    paper = Ppo(compat="paper")

    assert paper.changed(lam=0.9).loss_mean == "microbatches"


def test_a_quirk_that_compat_sets_cannot_be_set_as_well():
    overrides = ("ppo.compat=paper", "ppo.loss_mean=tokens")

    line = refusal_of(make_config, "tiny", name="mine", overrides=overrides)

    assert line == "ppo.loss_mean has no effect: ppo.compat=paper sets it"


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_k2_and_k3_in_the_reward_are_refused_with_the_reason_and_both_ways_out(kind):
    line = refusal_of(Ppo, kl_estimator=kind)

    assert line.startswith("ppo.kl_estimator must be k1 with ppo.kl_in=reward")
    assert f"{kind} hardly restrains the policy, or pushes it the wrong way" in line
    assert "keep k1, or set ppo.kl_in=loss" in line


def test_k1_in_the_loss_without_a_correction_is_refused():
    line = refusal_of(Ppo, kl_in="loss")

    assert line.startswith("ppo.kl_estimator must be k2 or k3 with ppo.kl_in=loss")
    assert "ppo.kl_correction=sequence" in line


def test_k1_in_the_loss_may_be_corrected():
    assert Ppo(kl_in="loss", kl_correction="sequence").kl_estimator == "k1"


@pytest.mark.parametrize("correction", ["token", "sequence"])
def test_a_correction_of_the_reward_is_refused(correction):
    line = refusal_of(Ppo, kl_correction=correction)

    assert line.startswith("ppo.kl_correction must be off with ppo.kl_in=reward")


def test_an_adaptive_coefficient_that_starts_at_0_is_refused():
    line = refusal_of(Ppo, kl_target=6.0, kl_coef=0.0)

    assert line.startswith("ppo.kl_coef must be above 0 with ppo.kl_target")


def test_a_horizon_that_could_make_the_coefficient_negative_is_refused():
    line = refusal_of(Ppo, kl_target=6.0, batch_size=512, kl_horizon=102)

    assert line == "ppo.kl_horizon must be above 102, a fifth of ppo.batch_size"
    assert Ppo(kl_target=6.0, batch_size=512, kl_horizon=103).kl_horizon == 103


def test_critic_warm_up_without_a_critic_is_refused():
    line = refusal_of(Ppo, baseline="mean", critic_updates=1)

    assert line == "ppo.critic_updates must be 0 with ppo.baseline=mean, which trains no critic"


@pytest.mark.parametrize("lam_value", [-0.5, 1.5])
def test_a_lambda_of_the_critics_targets_outside_0_to_1_is_refused(lam_value):
    assert refusal_of(Ppo, lam_value=lam_value).startswith("ppo.lam_value must ")


def test_the_critics_targets_have_the_advantages_lambda_unless_they_have_their_own():
    assert Ppo(lam=0.9).critic_lam == 0.9
    assert Ppo(lam=0.9, lam_value=0.0).critic_lam == 0.0
    assert Ppo(lam=0.9, lam_value=1.0).critic_lam == 1.0


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"lam_length_alpha": 0.4},
            "ppo.lam_value must be set with ppo.lam_length_alpha: the critic's targets have one"
            " lambda for all lengths, 1 in VAPO and BPCO",
        ),
        (
            {"lam_length_alpha": 0.4, "lam_value": 1.0, "baseline": "mean"},
            "ppo.lam_length_alpha must be 0 with ppo.baseline=mean, which has no lambda",
        ),
        (
            {"bound_values": True, "baseline": "mean"},
            "ppo.bound_values must be false with ppo.baseline=mean, which trains no critic",
        ),
        (
            {"bound_values": True, "whiten_rewards": True},
            "ppo.bound_values must be false with ppo.whiten_rewards, which gives the rewards"
            " another scale than the scores",
        ),
    ],
    ids=str,
)
def test_critic_settings_that_would_do_nothing_or_harm_are_refused(changes, line):
    assert refusal_of(Ppo, **changes) == line


def test_an_error_names_the_section_of_the_algorithm():
    assert refusal_of(Rloo, kl_estimator="k3").startswith("rloo.kl_estimator must be k1")
    assert refusal_of(Grpo, samples_per_query=1) == "grpo.samples_per_query must be at least 2"
