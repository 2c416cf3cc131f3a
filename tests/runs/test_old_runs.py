"""Runs that an earlier version of this project recorded load, and count as finished."""

from pathlib import Path

import pytest

from stages.config.command_line import make_config
from stages.config.recorded import recorded_config
from stages.pipeline.plan import code_warnings, make_plan
from stages.rl.algorithms import ALGORITHMS
from stages.runs.files import read_json, write_json
from stages.runs.manifest import read_manifest
from stages.runs.staleness import changed_code, find_problem, has_same_code
from tests.lib.fabricated_runs import fabricate
from tests.lib.fake_stages import finish, run_stages, status_lines

TINY = make_config("tiny")


# -- manifests with a seal -------------------------------------------------------------------------


@pytest.fixture
def old_manifests(runs):
    """A finished run whose manifests have a seal, and hashes of syntax trees for the code."""
    run_stages(TINY, "ppo", "eval")
    for path in runs.rglob("manifest.json"):
        manifest = read_json(path)
        manifest["seal"] = "0123456789abcdef"
        manifest["code"] = {"module": "stages.ppo", "files": {"stages/gone.py": "0123456789ab"}}
        write_json(path, manifest)


def test_an_old_manifest_is_read_whatever_its_seal_says(runs):
    folder = finish(TINY, "base")
    manifest = read_json(folder / "manifest.json")
    write_json(folder / "manifest.json", manifest | {"seal": "0e1f", "results": {"rows": 1}})

    assert (read_manifest(folder) or {})["results"] == {"rows": 1}


def test_no_warning_is_printed_about_old_code_because_its_hashes_are_of_another_kind(
    old_manifests,
):
    assert changed_code(TINY, "ppo") == []
    assert code_warnings(TINY, ["sft", "ppo"]) == []
    assert "done, code changed" not in " ".join(status_lines())


def test_old_code_is_not_known_to_be_the_same(old_manifests):
    assert not has_same_code(TINY, "ppo")


def test_the_stages_of_an_old_run_are_done(old_manifests):
    """Pages show manifests, which the fixture has edited, so they may be written again."""
    assert set(make_plan(TINY, ["ppo", "eval"]).reasons) <= {"report"}


# -- settings that were added later ----------------------------------------------------------------

NEWER_PPO_SETTINGS = (
    "kl_correction",
    "kl_target",
    "kl_horizon",
    "entropy_coef",
    "critic_max_grad_norm",
    "lam_value",
    "ptx_coef",
)


def remove_settings(folder: Path, section: str, *names: str) -> None:
    """Rewrite a finished stage as a version did that did not have these settings."""
    manifest = read_json(folder / "manifest.json")
    config_record = read_json(folder / "config.json")
    for name in names:
        del manifest["settings"][section][name]
        del config_record[section][name]
    manifest["settings_hash"] = "older"
    write_json(folder / "manifest.json", manifest)
    write_json(folder / "config.json", config_record)


@pytest.fixture
def old_ppo(runs):
    """PPO's folder of a finished run that was recorded without the newer settings."""
    fabricate(TINY)
    folder = runs / "tiny/seed44413/ppo"
    remove_settings(folder, "ppo", *NEWER_PPO_SETTINGS)
    return folder


def test_a_run_recorded_without_newer_settings_loads_and_counts_as_the_same(old_ppo):
    assert recorded_config(old_ppo) == TINY
    assert find_problem(TINY, "ppo") is None


def test_a_newer_setting_that_has_an_effect_makes_another_run(old_ppo):
    config = TINY.changed(ppo=TINY.ppo.changed(kl_target=6.0))
    assert "ppo.kl_target: ran with nothing, now 6.0" in str(find_problem(config, "ppo"))


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "ppo"])
def test_a_run_recorded_before_an_algorithm_was_added_has_its_defaults(runs, algorithm):
    fabricate(TINY)
    folder = runs / "tiny/seed44413/ppo"
    config_record = read_json(folder / "config.json")
    del config_record[algorithm]
    write_json(folder / "config.json", config_record)

    config = recorded_config(folder)

    assert config is not None
    assert getattr(config, algorithm) == ALGORITHMS[algorithm].settings()
    assert config.ppo == TINY.ppo


@pytest.fixture
def old_lora_sft(runs):
    """SFT's folder of a finished run with LoRA, recorded before its modules were a setting."""
    fabricate(make_config("tiny", name="older", overrides=("lora.rank=2",)))
    folder = runs / "older/seed44413/sft"
    remove_settings(folder, "lora", "target_modules")
    return folder


def test_a_setting_that_a_record_lacks_had_its_default(old_lora_sft):
    config = make_config("tiny", name="older", overrides=("lora.rank=2",))
    assert recorded_config(old_lora_sft) == config
    assert find_problem(config, "sft") is None


def test_another_value_of_a_setting_that_a_record_lacks_is_a_difference(old_lora_sft):
    overrides = ("lora.rank=2", "lora.target_modules=dense")
    config = make_config("tiny", name="older", overrides=overrides)
    problem = str(find_problem(config, "sft"))
    assert "lora.target_modules: ran with nothing, now dense" in problem
