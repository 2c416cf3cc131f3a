"""Settings: what a preset says, what the command line may change, and what is refused."""

import dataclasses
import re
from dataclasses import fields
from typing import Any

import pytest

from stages.config.command_line import config_from_arguments, make_config
from stages.config.config import (
    SECTIONS,
    Config,
    JudgeSettings,
    UserError,
    settings_hash,
    settings_of,
)
from stages.config.presets import PRESETS
from stages.config.stages import STAGES
from tests.lib.asserts import refusal_of


def override(*texts: str, preset: str = "tiny", upstream: str = "") -> Config:
    return make_config(preset, name="mine", overrides=texts, upstream=upstream)


# -- presets ---------------------------------------------------------------------------------------


def test_the_papers_settings_are_the_defaults():
    config = make_config("pythia-1b")
    assert config.base.checkpoint == "EleutherAI/pythia-1b-deduped"
    assert config.seed == 44413
    expected: dict[str, dict[str, Any]] = {  # Huang et al. 2024, B.0 to B.4
        "sft": {"learning_rate": 3e-6, "batch_size": 128, "epochs": 1, "loss_on_query": True},
        "rm": {"learning_rate": 3e-6, "batch_size": 64, "epochs": 1},
        "ppo": {
            "learning_rate": 3e-6,
            "total_episodes": 1_000_000,
            "batch_size": 512,
            "num_ppo_epochs": 4,
            "num_minibatches": 1,
            "kl_coef": 0.05,
            "cliprange": 0.2,
            "cliprange_value": 0.2,
            "vf_coef": 0.1,
            "gamma": 1.0,
            "lam": 0.95,
            "temperature": 0.7,
            "missing_eos_penalty": -1.0,
            "whiten_rewards": False,
        },
        "optimizer": {
            "adam_eps": 1e-5,
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "weight_decay": 0.01,
            "warmup_fraction": 0.0,
        },
        "data": {
            "max_query_tokens": 512,
            "max_summary_tokens": 53,
            "max_query_summary_tokens": 562,
            "max_comparison_tokens": 169,
            "max_query_comparison_tokens": 638,
        },
        "dpo": {"beta": 0.05, "learning_rate": 3e-6, "batch_size": 64, "epochs": 1},
        "eval": {"temperature": 0.01, "posts": 0, "dpo_summary_tokens": 128},
    }
    for section, values in expected.items():
        found = dataclasses.asdict(getattr(config, section))
        assert {key: found[key] for key in values} == values, section
    assert config.ppo.num_updates == 1953


@pytest.mark.parametrize("family", ["pythia-", "tiny"])
def test_sizes_of_a_family_differ_in_nothing_but_base_and_memory(family):
    names = [name for name in PRESETS if name.startswith(family)]
    members = [one for one in map(make_config, names) if not one.lora.rank]
    assert len(members) >= 3
    first = members[0]
    for one in members[1:]:
        assert (one.preset, one.name) != (first.preset, first.name)
        for section in set(SECTIONS) - {"base", "memory"} | {"seed", "upstream"}:
            assert getattr(one, section) == getattr(first, section), section
        size = {"checkpoint"} if family == "pythia-" else {"hidden_size", "num_layers"}
        differing = {
            item.name
            for item in fields(one.base)
            if getattr(one.base, item.name) != getattr(first.base, item.name)
        }
        assert differing <= size


def test_the_posts_preset_asks_for_posts_and_a_tokenizer(tmp_path):
    with pytest.raises(UserError, match="TOKENIZER="):
        make_config("posts", data=str(tmp_path))
    config = make_config("posts", data=str(tmp_path), tokenizer="t")
    assert (config.data.source, config.base.tokenizer) == (str(tmp_path), "t")


# -- overrides -------------------------------------------------------------------------------------


def test_an_override_is_parsed_by_the_type_of_its_field():
    config = override("ppo.kl_coef=1e-1", "ppo.batch_size=32", "ppo.whiten_rewards=True")
    assert (config.ppo.kl_coef, config.ppo.batch_size, config.ppo.whiten_rewards) == (0.1, 32, True)
    assert (config.name, config.preset) == ("mine", "tiny")
    assert override("judge.kind=openai", "judge.model=a=b").judge.model == "a=b"
    assert config.sft == make_config("tiny").sft


def test_the_command_line_gives_the_same_config_as_the_call():
    argv = "--preset tiny-s --seed 3 --name x --set ppo.lam=0.5 ppo.gamma=0.9".split()
    expected = make_config("tiny-s", seed=3, name="x", overrides=("ppo.lam=0.5", "ppo.gamma=0.9"))
    assert config_from_arguments(argv, "") == expected
    assert config_from_arguments([], "") == make_config("tiny")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ppo.kl_coeff=1", "unknown setting 'ppo.kl_coeff': did you mean ppo.kl_coef"),
        ("xyzzy=1", "unknown setting 'xyzzy': `make settings` lists all of them"),
        ("ppo.kl_coef", "section.key=value"),
        ("ppo.batch_size=1.5", "ppo.batch_size takes a value of type int"),
        ("ppo.whiten_rewards=1", "ppo.whiten_rewards takes a value of type bool"),
        ("ppo.batch_size=0", "ppo.batch_size must be above 0"),
        ("ppo.kl_coef=-0.1", "ppo.kl_coef must be at least 0"),
        ("ppo.missing_eos_penalty=1", "ppo.missing_eos_penalty must be at most 0"),
        ("ppo.gamma=1.01", "ppo.gamma must lie in [0, 1]"),
        ("ppo.critic_updates=56", "ppo.critic_updates must be fewer than the 56 updates"),
        ("ppo.checkpoints=40", "ppo.checkpoints must be fewer than the 40 updates of the policy"),
        ("ppo.num_minibatches=7", "times ppo.num_minibatches, 7"),
        ("ppo.total_episodes=3", "ppo.total_episodes must fill one batch"),
        ("base.num_heads=5", "base.hidden_size must be an even multiple"),
        ("base.checkpoint=me/model", "base.tokenizer must be empty (its own) or name one"),
        ("memory.mixed_precision=fp16", "memory.mixed_precision must be one of no, bf16"),
    ],
)
def test_a_bad_override_is_refused_with_one_line_that_names_it(text, named):
    assert named in refusal_of(override, text)


FLOATS = [
    f"{section}.{one.name}"
    for section, kind in SECTIONS.items()
    for one in fields(kind)
    if one.type is float
]


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", ["nan", "-inf"])
def test_no_setting_takes_a_number_that_is_not_finite(key, value):
    assert key in refusal_of(override, f"{key}={value}")


def test_an_override_needs_a_name_of_its_own():
    for name in ("", "tiny", "pythia-1b"):
        with pytest.raises(UserError, match="--name"):
            make_config("tiny", name=name, overrides=("ppo.lam=0.5",))


@pytest.mark.parametrize("name", ["a/b", "..", ".", "cache", "judge_cache", "models", "reports"])
def test_a_name_is_one_folder_that_nothing_else_uses(name):
    with pytest.raises(UserError, match=r"^name must be the name of a folder, and none of bench"):
        make_config("tiny", name=name)
    with pytest.raises(UserError, match=r"^upstream must be the name of a folder"):
        make_config("tiny", name="mine", upstream=name)


def test_the_judge_and_memory_may_change_within_a_run():
    config = make_config("tiny", overrides=("judge.max_cost=2", "memory.microbatch_size=3"))
    assert (config.name, config.judge.max_cost, config.memory.microbatch_size) == ("tiny", 2, 3)
    with pytest.raises(UserError, match="--name"):
        make_config("tiny", overrides=("judge.max_cost=2", "eval.posts=3"))


# -- hashes ----------------------------------------------------------------------------------------


def test_a_judges_folder_names_its_model_and_all_that_its_verdicts_depend_on():
    def folder(**changes: Any) -> str:
        return JudgeSettings(**changes).folder

    assert (folder(kind="facts"), folder(kind="facts", model="x")) == ("facts", "facts")
    plain = folder(model="org/gpt-4o mini")
    assert re.fullmatch(r"gpt-4o-mini-[0-9a-f]{6}", plain)
    same = {"concurrency": 3, "max_cost": 2.0, "input_price": 1.0}
    assert all(folder(model="org/gpt-4o mini", **{k: v}) == plain for k, v in same.items())
    other = {"temperature": 1.0, "max_tokens": 9, "structured": "on", "base_url": "http://x"}
    found = {folder(**{"model": "org/gpt-4o mini", key: value}) for key, value in other.items()}
    assert len(found | {plain}) == 5


def test_the_microbatch_is_a_setting_where_the_loss_is_a_mean_of_microbatches():
    for quirk, matters in (("ppo.compat=paper", True), ("ppo.loss_mean=tokens", False)):
        hashes = {
            settings_hash(override(quirk, f"memory.microbatch_size={size}"), "ppo")
            for size in (2, 4)
        }
        assert (len(hashes) == 2) == matters


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
        ("memory.cpu_threads=1", {name for name, one in STAGES.items() if one.computes}),
        ("memory.mixed_precision=bf16", {name for name, one in STAGES.items() if one.computes}),
        ("checks.control_posts=9", {"controls", "calibration"}),
    ],
)
def test_a_setting_changes_the_hash_of_the_stages_that_read_it(text, stages):
    before, after = make_config("tiny"), override(text)
    every = STAGES
    changed = {one for one in every if settings_of(before, one) != settings_of(after, one)}
    assert changed == stages
    hashed = {one for one in every if settings_hash(before, one) != settings_hash(after, one)}
    assert hashed == stages


def test_the_built_in_world_is_no_setting_of_real_posts():
    before = make_config("pythia-70m")
    after = override("world.seed=2", preset="pythia-70m")
    assert settings_hash(before, "base") == settings_hash(after, "base")
