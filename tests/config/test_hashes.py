"""Which settings a stage's result depends on: its hash, and the judge's folder."""

import re
from typing import Any

import pytest

from stages.config.command_line import make_config
from stages.config.identity import is_same_setting, settings_hash, settings_of
from stages.config.judge import JudgeSettings
from stages.config.stages import STAGES
from tests.lib.configs import override

COMPUTING = {name for name, stage in STAGES.items() if stage.computes}


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("base.hidden_size=64", {"base"}),
        ("data.max_query_tokens=99", {"base", "calibration"}),
        ("world.seed=2", {"base", "calibration"}),
        ("sft.epochs=9", {"sft"}),
        ("rm.epochs=9", {"rm"}),
        ("ppo.kl_coef=0.01", {"ppo"}),
        ("dpo.beta=0.5", {"dpo"}),
        ("optimizer.adam_eps=1e-6", {"sft", "rm", "ppo", "rloo", "grpo", "reinforce", "dpo"}),
        ("eval.posts=9", {"summaries"}),
        ("judge.kind=openai", {"judge", "controls", "calibration"}),
        ("judge.max_cost=9", set()),
        ("memory.microbatch_size=3", set()),
        ("memory.forward_batch_size=5", set()),
        ("memory.gradient_checkpointing=true", set()),
        ("memory.cpu_threads=1", COMPUTING),
        ("memory.mixed_precision=bf16", COMPUTING),
        ("checks.control_posts=9", {"controls", "calibration"}),
    ],
)
def test_a_setting_changes_the_hash_of_the_stages_that_read_it(text, stages):
    before = make_config("tiny")

    after = override(text)

    stages_with_other_settings = set()
    stages_with_another_hash = set()
    for stage in STAGES:
        if settings_of(before, stage) != settings_of(after, stage):
            stages_with_other_settings.add(stage)
        if settings_hash(before, stage) != settings_hash(after, stage):
            stages_with_another_hash.add(stage)
    assert stages_with_other_settings == stages
    assert stages_with_another_hash == stages


def test_data_from_the_hub_do_not_depend_on_the_built_in_world():
    before = make_config("pythia-70m")

    after = override("world.seed=2", preset="pythia-70m")

    assert settings_hash(before, "base") == settings_hash(after, "base")


@pytest.mark.parametrize(
    ("loss_setting", "depends_on_size"),
    [
        ("ppo.compat=paper", True),  # the mean of the means of microbatches
        ("ppo.loss_mean=tokens", False),
    ],
)
def test_a_result_depends_on_the_microbatch_size_only_if_the_loss_does(
    loss_setting, depends_on_size
):
    small = override(loss_setting, "memory.microbatch_size=2")
    large = override(loss_setting, "memory.microbatch_size=4")

    has_other_hash = settings_hash(small, "ppo") != settings_hash(large, "ppo")

    assert has_other_hash == depends_on_size


@pytest.mark.parametrize(
    ("name", "recorded", "requested", "is_same"),
    [
        ("ppo.kl_coef", 0.1, 0.1, True),
        ("ppo.kl_coef", 0.1, 0.2, False),
        ("ppo.kl_target", None, 0.0, True),  # newer than the record, with its default
        ("ppo.kl_target", None, 6.0, False),
        ("ppo.of_a_branch", 3, None, True),  # this version has no such setting
        ("reward.function", "a:b", None, False),
        ("data.source", "folder/../posts", "posts", True),
        ("data.source", "toy", "hub", False),
    ],
)
def test_a_recorded_setting_is_compared_with_the_requested_one(name, recorded, requested, is_same):
    assert is_same_setting(name, recorded, requested) == is_same


# -- judges ----------------------------------------------------------------------------------------


def judge_folder(**settings: Any) -> str:
    """Return the folder of a judge that is an LLM, changed by these settings."""
    return JudgeSettings(**{"model": "org/gpt-4o mini", **settings}).folder


def test_a_judge_that_asks_no_model_has_the_folder_of_its_kind():
    assert judge_folder(kind="facts") == "facts"
    assert judge_folder(kind="facts", model="x") == "facts"


def test_a_judges_folder_names_its_model():
    assert re.fullmatch(r"gpt-4o-mini-[0-9a-f]{6}", judge_folder())


@pytest.mark.parametrize(
    "settings", [{"concurrency": 3}, {"max_cost": 2.0}, {"input_price": 1.0}], ids=str
)
def test_a_setting_that_changes_no_verdict_keeps_the_folder(settings):
    assert judge_folder(**settings) == judge_folder()


def test_each_setting_that_changes_verdicts_has_another_folder():
    folders = [
        judge_folder(),
        judge_folder(temperature=1.0),
        judge_folder(max_tokens=9),
        judge_folder(structured="on"),
        judge_folder(base_url="http://x"),
    ]
    assert len(set(folders)) == len(folders)
