"""Runs that an earlier version of this project recorded: they load, and count as finished."""

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


@pytest.fixture
def sealed(runs):
    """A finished run whose manifests have a seal, and hashes of syntax trees for the code."""
    run_stages(TINY, "ppo", "eval")
    for path in runs.rglob("manifest.json"):
        manifest = read_json(path)
        manifest["seal"] = "0123456789abcdef"
        manifest["code"] = {"module": "stages.ppo", "files": {"stages/gone.py": "0123456789ab"}}
        write_json(path, manifest)


def test_its_manifests_are_read_whatever_their_seal_says(sealed):
    folder = finish(make_config("tiny", seed=2), "base")
    manifest = read_json(folder / "manifest.json")
    write_json(folder / "manifest.json", manifest | {"seal": "0e1f", "results": {"rows": 1}})
    assert (read_manifest(folder) or {})["results"] == {"rows": 1}


def test_nothing_is_said_about_its_code_because_the_hashes_are_of_another_kind(sealed):
    assert changed_code(TINY, "ppo") == []
    assert code_warnings(TINY, ["sft", "ppo"]) == []
    assert "done, code changed" not in " ".join(status_lines())
    assert not has_same_code(TINY, "ppo")  # It is unknown.


def test_its_stages_are_done(sealed):
    """Pages show manifests, which the fixture has edited."""
    assert {*make_plan(TINY, ["ppo", "eval"]).reasons} <= {"report"}


# Settings that PPO got after runs had been recorded.
NEWER = (
    "kl_correction",
    "kl_target",
    "kl_horizon",
    "entropy_coef",
    "critic_max_grad_norm",
    "lam_value",
    "ptx_coef",
)


@pytest.fixture
def older_ppo(runs):
    """PPO's folder of a finished run that was recorded without the newer settings."""
    fabricate(make_config("tiny"))
    folder = runs / "tiny/seed44413/ppo"
    manifest = read_json(folder / "manifest.json")
    record = read_json(folder / "config.json")
    for name in NEWER:
        del manifest["settings"]["ppo"][name], record["ppo"][name]
    manifest["settings_hash"] = "older"
    write_json(folder / "manifest.json", manifest)
    write_json(folder / "config.json", record)
    return folder


def test_a_run_recorded_without_newer_settings_loads_and_counts_as_the_same(older_ppo):
    config = make_config("tiny")
    assert recorded_config(older_ppo) == config
    assert find_problem(config, "ppo") is None


def test_a_newer_setting_that_has_an_effect_makes_another_run(older_ppo):
    config = make_config("tiny").changed(ppo=make_config("tiny").ppo.changed(kl_target=6.0))
    assert "ppo.kl_target: ran with nothing, now 6.0" in str(find_problem(config, "ppo"))


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "ppo"])
def test_a_run_recorded_before_an_algorithm_was_added_has_its_defaults(runs, algorithm):
    fabricate(make_config("tiny"))
    folder = runs / "tiny/seed44413/ppo"
    record = read_json(folder / "config.json")
    del record[algorithm]
    write_json(folder / "config.json", record)
    read = recorded_config(folder)
    assert getattr(read, algorithm) == ALGORITHMS[algorithm].settings()
    assert read is not None
    assert read.ppo == make_config("tiny").ppo


def test_a_setting_that_a_record_lacks_had_its_default(runs):
    config = make_config("tiny", name="older", overrides=("lora.rank=2",))
    fabricate(config)
    folder = runs / "older/seed44413/sft"
    manifest, record = read_json(folder / "manifest.json"), read_json(folder / "config.json")
    del manifest["settings"]["lora"]["target_modules"], record["lora"]["target_modules"]
    manifest["settings_hash"] = "older"
    write_json(folder / "manifest.json", manifest)
    write_json(folder / "config.json", record)

    assert recorded_config(folder) == config
    assert find_problem(config, "sft") is None

    overrides = ("lora.rank=2", "lora.target_modules=dense")
    other = make_config("tiny", name="older", overrides=overrides)
    assert "lora.target_modules: ran with nothing, now dense" in str(find_problem(other, "sft"))
