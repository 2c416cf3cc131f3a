"""The presets and the ablations: what their files say."""

from typing import Any

import pytest

from stages.config.command_line import make_config
from stages.config.identity import hash_of, settings_of
from stages.config.presets import (
    ABLATIONS,
    FOLDER,
    GROUPS,
    PRESETS,
    ablations_named,
    preset_config,
    read_preset,
    settings_of_ablation,
)
from stages.config.stages import STAGES
from stages.config.values import TYPES, parse_override, section_of, value_of
from stages.rl.algorithms import ALGORITHMS
from tests.lib.asserts import refusal_of

PARENTS = {"pythia", "smollm2-common"}  # files that presets extend


def test_every_file_is_a_preset_or_extended_by_one():
    files = {path.stem for path in (FOLDER / "presets").iterdir()}
    assert files == {*PRESETS, *PARENTS}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_description(name):
    preset = read_preset(name)

    assert preset.description.endswith(".")
    assert (preset.config.preset, preset.config.name) == (name, name)


def test_an_error_about_an_unknown_preset_names_the_nearest():
    assert refusal_of(make_config, "tinny").startswith("unknown preset 'tinny': did you mean tiny")
    assert refusal_of(make_config, "pythia").startswith("unknown preset 'pythia'")


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
        actual = getattr(config, section).model_dump()
        assert {key: actual[key] for key in values} == values, section
    assert config.ppo.num_updates == 1953


# -- families --------------------------------------------------------------------------------------


def differences(name: str, other: str) -> set[str]:
    """Return the settings in which two presets differ."""
    config = preset_config(name)
    other_config = preset_config(other)
    return {key for key in TYPES if value_of(config, key) != value_of(other_config, key)}


@pytest.mark.parametrize("size", ["14m", "70m", "160m", "410m", "1.4b", "2.8b", "6.9b"])
def test_pythia_sizes_differ_only_in_checkpoint_and_memory(size):
    differing = differences("pythia-1b", f"pythia-{size}")

    assert "base.checkpoint" in differing
    for key in differing - {"base.checkpoint"}:
        assert section_of(key) == "memory"


@pytest.mark.parametrize("size", ["xs", "s", "l", "xl"])
def test_tiny_sizes_differ_only_in_the_shape_of_the_model(size):
    assert differences("tiny", f"tiny-{size}") == {"base.hidden_size", "base.num_layers"}


def test_an_algorithms_own_section_overrides_the_settings_of_all_algorithms():
    config = make_config("tiny")

    rates = {name: getattr(config, name).learning_rate for name in ALGORITHMS}
    batch_sizes = {getattr(config, name).batch_size for name in ALGORITHMS}
    assert rates == {"ppo": 2e-4, "rloo": 8e-4, "grpo": 8e-4, "reinforce": 8e-4}
    assert batch_sizes == {64}


def test_the_posts_preset_needs_a_tokenizer(tmp_path):
    assert "TOKENIZER=" in refusal_of(make_config, "posts", data=str(tmp_path))


def test_the_posts_preset_takes_posts_and_a_tokenizer(tmp_path):
    config = make_config("posts", data=str(tmp_path), tokenizer="t")

    assert config.data.source == str(tmp_path)
    assert config.base.tokenizer == "t"


# -- hashes of runs that exist ---------------------------------------------------------------------

# Recorded before data.chat_template was added. Another hash would make every finished run stale; a
# setting that is newer than a record counts as its default (`is_same_setting`).
HASHES_OF_TINY = {
    "base": "694564595d641d3e",
    "sft": "91b15c7c9e4a0009",
    "rm": "e9a81e245ec07211",
    "normalize": "59bdbcc719332346",
    "ppo": "a7cf538dba9f8d16",
    "rloo": "acc02fa65c149b9f",
    "grpo": "b6d9eae44603bd4e",
    "reinforce": "efff84553352a409",
    "dpo": "4f1e9e180fac67eb",
    "released": "67f8e294565d6400",
    "summaries": "77efa743a1ccfb7e",
    "judge": "0b1ee75f6c001042",
    "controls": "b524fd397b462388",
    "win_rate": "bd85a21da90424a9",
    "calibration": "df7776cd19ac0bc3",
    "report": "bd85a21da90424a9",
    "calibration_report": "bd85a21da90424a9",
}


# Settings that came later, with their defaults. A record without them has these values.
LATER_SETTINGS = {
    "chat_template": False,
    "score_shaping": "off",
    "bound_values": False,
    "lam_length_alpha": 0.0,
}


def test_settings_have_the_hashes_that_runs_have_recorded():
    config = make_config("tiny")

    hashes = {}
    for stage in STAGES:
        settings = settings_of(config, stage)
        sections = [section for section in settings.values() if isinstance(section, dict)]
        for section in sections:
            for name, default in LATER_SETTINGS.items():
                assert section.pop(name, default) == default
        hashes[stage] = hash_of(settings)

    assert hashes == HASHES_OF_TINY


# -- ablations -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_changes_settings_of_tiny(name):
    assert ABLATIONS[name].what
    for override in settings_of_ablation(name):
        parse_override(override)


def test_a_group_stands_for_its_ablations():
    names = ablations_named(["dropout", "critic-start", "lambda-1"])

    assert names == ["dropout", *GROUPS["critic-start"].ablations]


def test_the_members_of_groups_exist():
    for group in GROUPS.values():
        assert set(group.ablations) <= ABLATIONS.keys()
        assert set(group.algorithms) <= ALGORITHMS.keys()


def test_an_error_about_an_unknown_ablation_names_the_nearest():
    line = refusal_of(settings_of_ablation, "dropuot")

    assert line == "unknown ablation 'dropuot': did you mean dropout?"
