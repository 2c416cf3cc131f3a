"""The presets and the ablations: what their files say."""

from typing import Any

import pytest

from stages.config.command_line import make_config
from stages.config.config import SECTIONS, hash_of, override_of, settings_of
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
from stages.rl.algorithms import ALGORITHMS
from tests.lib.asserts import refusal_of

PARENTS = {"pythia", "smollm2-common"}  # presets extend them; they are none themselves


def test_every_file_is_a_preset_or_extended_by_one():
    files = {path.stem for path in (FOLDER / "presets").iterdir()}
    assert files == {*PRESETS, *PARENTS}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_what_it_is_for(name):
    preset = read_preset(name)
    assert preset.description.endswith(".")
    assert (preset.config.preset, preset.config.name) == (name, name)


def test_an_unknown_preset_is_answered_with_the_nearest():
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
    """The settings in which two presets differ."""
    first = preset_config(name)
    second = preset_config(other)
    return {
        f"{section}.{field}"
        for section in SECTIONS
        for field, value in getattr(first, section)
        if value != getattr(getattr(second, section), field)
    }


@pytest.mark.parametrize("size", ["14m", "70m", "160m", "410m", "1.4b", "2.8b", "6.9b"])
def test_pythia_sizes_differ_in_checkpoint_and_memory_only(size):
    differing = differences("pythia-1b", f"pythia-{size}")
    assert "base.checkpoint" in differing
    others = differing - {"base.checkpoint"}
    assert {key.split(".")[0] for key in others} <= {"memory"}


@pytest.mark.parametrize("size", ["xs", "s", "l", "xl"])
def test_tiny_sizes_differ_in_the_shape_of_the_model_only(size):
    assert differences("tiny", f"tiny-{size}") == {"base.hidden_size", "base.num_layers"}


def test_an_algorithms_own_section_comes_after_what_all_have_in_common():
    config = make_config("tiny")
    algorithms = {name: getattr(config, name) for name in ALGORITHMS}
    rates = {name: settings.learning_rate for name, settings in algorithms.items()}
    assert rates == {"ppo": 2e-4, "rloo": 8e-4, "grpo": 8e-4, "reinforce": 8e-4}
    assert {settings.batch_size for settings in algorithms.values()} == {64}


def test_the_posts_preset_asks_for_posts_and_a_tokenizer(tmp_path):
    assert "TOKENIZER=" in refusal_of(make_config, "posts", data=str(tmp_path))
    config = make_config("posts", data=str(tmp_path), tokenizer="t")
    assert (config.data.source, config.base.tokenizer) == (str(tmp_path), "t")


# -- hashes of runs that exist ---------------------------------------------------------------------

# Recorded before data.chat_template was added. Another hash would make every finished run stale; a
# setting that is newer than a record counts as its default (`is_same`).
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
        recorded = settings_of(config, stage)
        sections = [values for values in recorded.values() if isinstance(values, dict)]
        for values in sections:
            for name in LATER_SETTINGS.keys() & values.keys():
                assert values.pop(name) == LATER_SETTINGS[name]
        hashes[stage] = hash_of(recorded)
    assert hashes == HASHES_OF_TINY


# -- ablations -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_changes_settings_of_tiny(name):
    assert ABLATIONS[name].what
    for text in settings_of_ablation(name):
        override_of(text)


def test_a_group_stands_for_its_ablations():
    assert ablations_named(["dropout", "critic-start", "lambda-1"]) == [
        "dropout",
        *GROUPS["critic-start"].ablations,
    ]
    for group in GROUPS.values():
        assert set(group.ablations) <= ABLATIONS.keys()
        assert set(group.algorithms) <= ALGORITHMS.keys()


def test_an_unknown_ablation_is_answered_with_the_nearest():
    line = refusal_of(settings_of_ablation, "dropuot")
    assert line == "unknown ablation 'dropuot': did you mean dropout?"
