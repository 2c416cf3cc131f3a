"""What `make ablations` turns and runs: valid switches, every seed, nothing misspelled."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from reports import compared
from stages import config as settings
from stages.ablations import ABLATIONS
from stages.presets import PRESETS, make_config, override_of

ROOT = Path(__file__).parents[1]

# -- the switches ----------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["tiny", "pythia-1b"])
@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_is_valid_and_changes_what_it_names_alone(name, preset):
    plain = make_config(preset)
    asked = tuple(ABLATIONS[name].settings.split())
    made = make_config(preset, name="mine", overrides=asked)
    before, after = (
        {
            f"{section}.{key}": value
            for section in settings.SECTIONS
            for key, value in vars(getattr(one, section)).items()
        }
        for one in (plain, made)
    )
    differing = {key: value for key, value in after.items() if value != before[key]}
    named = {f"{section}.{key}" for section, key, _ in map(override_of, asked)}
    assert named <= set(differing)
    assert differing == compared.switched(name)
    assert len(differing) == 1 or name == "compat-paper"


def test_the_issues_ablations_are_on_the_list():
    """EOS trick off, critic from SFT, no normalization, whitened rewards, dropout, score at EOS."""
    found = {one.settings for one in ABLATIONS.values()}
    asked = "eos_trick=off critic_init=sft reward_normalization=false whiten_rewards=true"
    assert {f"ppo.{one}" for one in (asked + " dropout=0.1 score_at=eos").split()} <= found
    assert not {f"tiny-{name}" for name in ABLATIONS} & set(PRESETS)


# -- make ------------------------------------------------------------------------------------------


def make(folder, *arguments):
    """What `make -n ablations` says, in a folder with nothing made."""
    (folder / "Makefile").symlink_to(ROOT / "Makefile")
    command = ["make", "-n", "ablations", "VENV=", f"PYTHON={sys.executable}", *arguments]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, check=False
    )


def commands(found):
    """Package, module and arguments of each command, in order."""
    lines = (" ".join(line.split()) for line in found.stdout.splitlines())
    matches = (re.search(r"-m (stages|eval|reports)\.(\w+) (--[^>]*)", line) for line in lines)
    return [(one[1], one[2], one[3].strip()) for one in matches if one]


def test_make_runs_a_switch_on_every_seed_from_the_presets_models(tmp_path):
    found = make(tmp_path, "SEEDS=1 2", "ABLATIONS=critic-sft", "PRESET=tiny-s")
    assert found.returncode == 0, found.stderr
    runs = commands(found)
    for seed in (1, 2):
        own = [stage for _, stage, rest in runs if rest == f"--preset tiny-s --seed {seed}"]
        assert own[:6] == ["base", "sft", "reward", "normalize", "ppo", "summaries"]
        said = f"--preset tiny-s --seed {seed} --name tiny-s-critic-sft --upstream tiny-s"
        said += " --set ppo.critic_init=sft"
        stages = [stage for _, stage, rest in runs if rest == said]
        assert stages == ["ppo", "summaries", "judge", "win_rate", "controls", "run_page"]
    assert runs[-1] == ("reports", "ablations", "--name tiny-s --ablations critic-sft")
    assert len(runs) == 2 * (10 + 6) + 1


def test_make_takes_every_ablation_and_three_seeds_where_none_is_named(tmp_path):
    # The makes within are told, not run.
    told = make(tmp_path, "MAKE=echo").stdout.splitlines()
    lines = [line for line in told if not line.startswith("echo ")]
    for seed in (44413, 55513, 66613):
        assert sum(f" SEED={seed} " in f"{line} " for line in lines) == 1 + len(ABLATIONS)
        for name, one in ABLATIONS.items():
            said = f" SEED={seed} NAME=tiny-{name} UPSTREAM=tiny SET={one.settings}"
            assert sum(line.endswith(said) for line in lines) == 1
    assert lines[-1].endswith(f"--name tiny --ablations {' '.join(ABLATIONS)}")


def test_make_ablates_another_run_than_the_presets_own(tmp_path):
    found = make(tmp_path, "SEEDS=1", "ABLATIONS=dropout", "NAME=short", "SET=ppo.lam=0.5")
    assert found.returncode == 0, found.stderr
    runs = commands(found)
    own = "--preset tiny --seed 1 --name short --set ppo.lam=0.5"
    assert [stage for _, stage, rest in runs if rest == own][:3] == ["base", "sft", "reward"]
    said = "--preset tiny --seed 1 --name short-dropout --upstream short"
    said += " --set ppo.lam=0.5 ppo.dropout=0.1"
    assert [stage for _, stage, rest in runs if rest == said][:2] == ["ppo", "summaries"]
    assert runs[-1] == ("reports", "ablations", "--name short --ablations dropout")


def test_make_ablates_a_run_that_starts_from_another_ones_models(tmp_path):
    for stage in ("base", "sft", "rm", "normalize"):
        folder = tmp_path / "runs" / "tiny" / "seed1" / stage
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    wanted = ["SEEDS=1", "ABLATIONS=dropout", "NAME=hot", "UPSTREAM=tiny", "SET=ppo.lam=0.5"]
    found = make(tmp_path, *wanted)
    assert found.returncode == 0, found.stderr
    asked = [(stage, rest) for _, stage, rest in commands(found) if stage in ("sft", "ppo")]
    own = "--preset tiny --seed 1 --name hot --upstream tiny --set ppo.lam=0.5"
    dropout = "--preset tiny --seed 1 --name hot-dropout --upstream tiny"
    assert asked == [("ppo", own), ("ppo", f"{dropout} --set ppo.lam=0.5 ppo.dropout=0.1")]


def test_make_refuses_an_unknown_ablation_before_anything_runs(tmp_path):
    found = make(tmp_path, "ABLATIONS=dropout dropuot")
    assert found.returncode != 0
    assert "no ablation 'dropuot': known are no-eos-trick" in found.stderr
    assert "-m stages" not in found.stdout
