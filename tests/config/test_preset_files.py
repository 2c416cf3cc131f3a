"""A preset of your own is a YAML file: what it may contain, and the errors about its mistakes."""

import shutil

import pytest

from stages.base import make_base
from stages.config.command_line import make_config
from stages.config.config import Config
from stages.config.options import config_from_arguments
from stages.config.presets import preset_config
from stages.config.public import public_settings
from stages.rl.algorithms import ALGORITHMS
from stages.runs.files import write_json
from stages.runs.make_command import make_command
from stages.runs.staleness import find_problem
from tests.lib.asserts import refusal_of
from tests.lib.fabricated_runs import fabricate

SMALL = """
description: Smaller than tiny.
extends: tiny-xs
policy_gradient:
  batch_size: 32
  learning_rate: 1e-3
ppo:
  learning_rate: 5e-4
rm:
  center: 0.01
memory:
  mixed_precision: no
  microbatch_size: auto
"""


@pytest.fixture
def write(place):
    """A function that writes a preset file in the test's current folder and returns its name."""

    def write_preset(text: str, name: str = "small.yaml") -> str:
        (place / name).write_text(text, encoding="utf-8")
        return name

    return write_preset


# -- what a file may contain -----------------------------------------------------------------------


def test_a_file_changes_the_preset_that_it_extends(write):
    config = make_config(write(SMALL))

    assert (config.preset, config.name) == ("small.yaml", "small")
    assert config.base == make_config("tiny-xs").base
    assert config.rm.center == 0.01
    assert config.memory.mixed_precision == "no"
    assert config.memory.microbatch_size == 0


def test_an_algorithms_own_section_overrides_the_settings_of_all_algorithms(write):
    config = make_config(write(SMALL))

    batch_sizes = {name: getattr(config, name).batch_size for name in ALGORITHMS}
    rates = {name: getattr(config, name).learning_rate for name in ALGORITHMS}
    assert set(batch_sizes.values()) == {32}
    assert rates == {"ppo": 5e-4, "rloo": 1e-3, "grpo": 1e-3, "reinforce": 1e-3}


def test_a_file_without_extends_changes_the_papers_settings(write):
    config = make_config(write("base:\n  checkpoint: me/model\nsft:\n  epochs: 3\n"))

    assert config.sft == make_config("pythia-1b").sft.changed(epochs=3)


def test_set_overrides_the_file(write):
    name = write(SMALL)

    config = config_from_arguments(["--preset", name, "--set", "rm.center=0.5", "ppo.lam=1"])

    assert config.rm.center == 0.5
    assert config.ppo.lam == 1.0
    assert config.ppo.learning_rate == 5e-4
    assert config.overrides == ("rm.center=0.5", "ppo.lam=1")


def test_a_run_of_a_file_may_have_another_name(write):
    name = write(SMALL)

    config = config_from_arguments(["--preset", name, "--name", "mine"])

    assert config.name == "mine"


def test_a_file_may_extend_a_file_next_to_it(write, place):
    (place / "mine").mkdir()
    write(SMALL, "mine/small.yaml")
    write("extends: small.yaml\nrm:\n  center: 0.02\n", "mine/smaller.yaml")

    config = make_config("mine/smaller.yaml")

    assert config.name == "smaller"
    assert config.rm.center == 0.02
    assert config.ppo.learning_rate == 5e-4


def test_settings_of_all_algorithms_override_those_of_the_extended_file(write):
    write(SMALL)
    child = "extends: small.yaml\npolicy_gradient:\n  learning_rate: 2e-3\n"

    config = make_config(write(child, "child.yaml"))

    assert {getattr(config, name).learning_rate for name in ALGORITHMS} == {2e-3}


def test_pages_show_the_file_without_its_folders(write, place):
    (place / "anna").mkdir()

    config = make_config(write(SMALL, "anna/small.yaml"))

    assert public_settings(config)["preset"] == "small.yaml"


FEW_POSTS = """
world:
  train_posts: 8
  validation_posts: 8
  train_comparisons: 8
  validation_comparisons: 8
normalize:
  posts: 4
"""


def test_a_stage_runs_with_a_file(write, runs):
    config = make_config(write(SMALL + FEW_POSTS))

    make_base(config)

    assert (runs / "small/seed44413/base/manifest.json").exists()
    assert find_problem(config, "base") is None


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ppo:\n  kl_coeff: 1", "small.yaml: unknown setting 'ppo.kl_coeff': did you mean ppo.kl_"),
        ("pppo:\n  lam: 1", "small.yaml: unknown section 'pppo': did you mean ppo"),
        (
            "policy_gradient:\n  lam: 1",
            "small.yaml: unknown setting 'policy_gradient.lam': did you mean ",
        ),
        (
            "ppo:\n  kl_coef: high",
            "small.yaml: ppo.kl_coef must be a number, not 'high'",
        ),
        ("ppo:\n  kl_coef: -1", "small.yaml: ppo.kl_coef must be at least 0, not -1.0"),
        ("ppo:\n  kl_coef: [1, 2]", "small.yaml: ppo.kl_coef takes one value"),
        (
            "ppo:\n  whiten_rewards: yes",
            "small.yaml: ppo.whiten_rewards must be true or false",
        ),
        ("ppo: 1", "small.yaml: ppo must contain settings"),
        ("- ppo", "small.yaml must contain sections with settings"),
        ("extends: tinny", "small.yaml: extends: unknown preset 'tinny': did you mean tiny"),
        ("extends: [tiny]", "small.yaml: extends must be a text"),
        ("extends: gone.yaml", "gone.yaml: No such file or directory"),
        ("extends: small.yaml", "small.yaml extends itself"),
        ("sft:\n  epochs: 1\n  epochs: 2", "small.yaml, line 3: epochs is set twice"),
        ("sft:\n  epochs: 1\nrm: {", "small.yaml, line 3: "),
        ("sft:\n\tepochs: 1", "small.yaml, line 2: found character"),
        ("sft:\n  epochs: \x07", "small.yaml: "),
        ("? [a, b]\n: 1", "small.yaml, line 1: a key must be a word"),
    ],
)
def test_a_mistake_is_one_line_with_the_file_and_the_key(write, text, line):
    assert refusal_of(make_config, write(text)).startswith(line)


def test_files_that_extend_each_other_are_refused(write):
    write("extends: b.yaml", "a.yaml")
    write("extends: a.yaml", "b.yaml")

    assert refusal_of(make_config, "a.yaml").startswith("a.yaml extends itself")


def test_an_error_about_a_missing_file_names_it(place):
    line = refusal_of(make_config, "mine.yaml")

    assert line.startswith("mine.yaml: No such file or directory: ")


def test_an_error_about_a_file_that_is_not_text_names_it(place):
    (place / "mine.yaml").write_bytes(b"sft:\n  epochs: \xff")

    assert refusal_of(make_config, "mine.yaml").startswith("mine.yaml: ")


def test_a_file_called_like_a_preset_needs_a_run_name(write):
    name = write(SMALL, "tiny.yaml")

    line = refusal_of(make_config, name)

    assert "NAME=tiny is the folder of preset tiny" in line
    assert make_config(name, name="mine").rm.center == 0.01


# -- resuming a run of a file ----------------------------------------------------------------------


def named(name: str, *words: str) -> Config:
    """Return the config of a command with this NAME."""
    return config_from_arguments(["--name", name, *words])


@pytest.fixture
def small(write, runs):
    """A finished run of a preset file, with an override."""
    overrides = ("judge.kind=openai", "judge.model=x", "ppo.lam=1")
    config = make_config(write(SMALL), name="mine", overrides=overrides)
    fabricate(config)
    return config


def test_a_named_run_keeps_its_settings(small, capsys):
    assert named("mine") == small
    assert capsys.readouterr().err == ""


def test_a_run_keeps_its_settings_if_the_file_is_gone(small, place, capsys):
    (place / "small.yaml").unlink()

    config = named("mine")

    assert config == small
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: run mine keeps the settings that it recorded, because its ")
    assert "small.yaml: No such file or directory" in line


def test_a_run_keeps_its_settings_if_the_file_has_changed(small, write, capsys):
    write(SMALL.replace("center: 0.01", "center: 0.5"))

    config = named("mine")

    assert config == small
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: small.yaml has changed (rm.center: 0.01, now 0.5): run mine")


def test_max_cost_of_one_command_is_not_a_setting_of_the_next(small, runs, capsys):
    with_max_cost = small.changed(judge=small.judge.changed(max_cost=20.0))
    for path in (runs / "mine").rglob("config.json"):
        write_json(path, with_max_cost.model_dump())

    config = named("mine")

    assert config == small
    assert capsys.readouterr().err == ""


def test_a_named_run_keeps_the_max_cost_of_its_file(write, runs):
    config = make_config(write(f"{SMALL}judge:\n  max_cost: 5\n"), name="mine")
    fabricate(config)

    assert named("mine").judge.max_cost == 5


def test_a_changed_file_is_used_if_the_command_names_it(small, write):
    write(SMALL.replace("center: 0.01", "center: 0.5"))

    config = named("mine", "--preset", "small.yaml", "--set", "ppo.lam=1")

    assert config.rm.center == 0.5


def test_a_suggested_command_keeps_the_settings_of_a_run_whose_file_has_changed(small, write):
    write(SMALL.replace("center: 0.01", "center: 0.5"))

    command = make_command(named("mine"), "ppo")

    assert command == "make ppo SEED=44413 NAME=mine SET='judge.kind=openai judge.model=x'"


def test_a_suggested_command_names_a_changed_file_if_you_named_it(small, write):
    write(SMALL.replace("center: 0.01", "center: 0.5"))
    config = named("mine", "--preset", "small.yaml", "--set", "ppo.lam=1")
    with_max_cost = config.changed(judge=config.judge.changed(max_cost=2.0))

    command = make_command(with_max_cost, "judge")

    expected = "make eval PRESET=small.yaml SEED=44413 NAME=mine SET=ppo.lam=1 MAX_COST=2"
    assert command == expected


def test_another_judge_of_a_run_leaves_its_other_settings(small, place):
    (place / "small.yaml").unlink()

    config = named("mine", "--set", "judge.kind=reward_model")

    assert config.judge.kind == "reward_model"
    assert config.judge.model == "gpt-6-luna"
    assert config.changed(judge=small.judge, overrides=small.overrides) == small


def test_a_run_keeps_its_data_and_tokenizer_if_the_file_is_gone(
    write, runs, place, tokenizer_folder
):
    shutil.copytree(tokenizer_folder, place / "tokens")
    name = write("extends: posts\nsft:\n  epochs: 7\n")
    config = make_config(name, name="mine", data=str(place), tokenizer="tokens")
    fabricate(config)

    (place / name).unlink()

    assert named("mine") == config


def test_a_run_with_an_upstream_keeps_its_settings(write, runs, place):
    fabricate(make_config(write(SMALL), name="another"))
    config = make_config("small.yaml", name="mine", upstream="another", overrides=("ppo.lam=1",))
    fabricate(config)

    (place / "small.yaml").unlink()

    assert named("mine") == config


def test_the_folder_of_the_preset_does_not_matter_for_its_values(write, place):
    write(SMALL)
    (place / "other").mkdir()
    (place / "small.yaml").rename(place / "other/small.yaml")

    config = preset_config("other/small.yaml")

    assert config.name == "small"
    assert config.rm.center == 0.01
