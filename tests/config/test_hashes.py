"""Which settings a stage's result depends on: its hash, and the judge's folder."""

import re
from typing import Any

import pytest

from stages.config.command_line import make_config
from stages.config.identity import is_same, settings_hash, settings_of
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
    changed = {name for name in STAGES if settings_of(before, name) != settings_of(after, name)}
    assert changed == stages
    hashed = {name for name in STAGES if settings_hash(before, name) != settings_hash(after, name)}
    assert hashed == stages


def test_the_built_in_world_is_no_setting_of_real_posts():
    before = make_config("pythia-70m")
    after = override("world.seed=2", preset="pythia-70m")
    assert settings_hash(before, "base") == settings_hash(after, "base")


@pytest.mark.parametrize(
    ("quirk", "matters"), [("ppo.compat=paper", True), ("ppo.loss_mean=tokens", False)]
)
def test_the_microbatch_is_a_setting_where_the_loss_is_a_mean_of_microbatches(quirk, matters):
    hashes = {
        settings_hash(override(quirk, f"memory.microbatch_size={size}"), "ppo") for size in (2, 4)
    }
    assert (len(hashes) == 2) == matters


@pytest.mark.parametrize(
    ("name", "recorded", "requested", "same"),
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
def test_a_recorded_setting_is_the_requested_one(name, recorded, requested, same):
    assert is_same(name, recorded, requested) == same


# -- judges ----------------------------------------------------------------------------------------


def folder(**changes: Any) -> str:
    return JudgeSettings(**{"model": "org/gpt-4o mini", **changes}).folder


def test_a_judge_that_asks_no_model_has_the_folder_of_its_kind():
    assert folder(kind="facts") == folder(kind="facts", model="x") == "facts"


def test_a_judges_folder_names_its_model():
    assert re.fullmatch(r"gpt-4o-mini-[0-9a-f]{6}", folder())


@pytest.mark.parametrize(
    "changes", [{"concurrency": 3}, {"max_cost": 2.0}, {"input_price": 1.0}], ids=str
)
def test_what_no_verdict_depends_on_leaves_the_folder(changes):
    assert folder(**changes) == folder()


def test_what_verdicts_depend_on_changes_the_folder():
    folders = {
        folder(),
        folder(temperature=1.0),
        folder(max_tokens=9),
        folder(structured="on"),
        folder(base_url="http://x"),
    }
    assert len(folders) == 5
