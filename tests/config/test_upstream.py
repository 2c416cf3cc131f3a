"""A run takes from its upstream the stages before the first one with other settings."""

import json
import shutil

import pytest

from stages.config.command_line import make_config
from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.recorded import recorded_config
from stages.config.stages import SHARED_SECTIONS, STAGES
from tests.lib.asserts import refusal_of
from tests.lib.configs import override


def write_records(runs, config: Config) -> None:
    """Write what the stages before PPO record when they start."""
    for stage in ("base", "sft", "rm", "normalize"):
        folder = runs / config.name / f"seed{config.seed}" / stage
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config.model_dump()))


def test_a_run_has_its_own_name_and_that_of_its_upstream(runs):
    write_records(runs, make_config("tiny"))

    config = override("ppo.lam=0.5", "optimizer.adam_eps=1e-6", upstream="tiny")

    assert (config.name, config.upstream) == ("mine", "tiny")


def test_a_run_with_an_upstream_needs_a_name(runs):
    write_records(runs, make_config("tiny"))

    with pytest.raises(UserError, match="NAME="):
        make_config("tiny", upstream="tiny")


@pytest.mark.parametrize("text", ["base.hidden_size=64", "data.max_query_tokens=99"])
def test_an_override_of_the_first_stage_is_refused_with_an_upstream(runs, text):
    write_records(runs, make_config("tiny"))

    line = refusal_of(override, text, upstream="tiny")

    assert "changes stage base, which UPSTREAM=tiny supplies" in line


def test_a_run_with_an_upstream_has_the_settings_that_the_upstream_recorded(runs):
    upstream = make_config(
        "tiny",
        name="another",
        overrides=(
            "sft.epochs=3",
            "world.seed=7",
            "base.hidden_size=64",
            "rm.epochs=3",
            "ppo.lam=0.9",
        ),
    )
    write_records(runs, upstream)

    config = override("ppo.lam=0.5", "sft.epochs=3", upstream="another")

    for section in SHARED_SECTIONS:
        assert getattr(config, section) == getattr(upstream, section), section
    assert config.ppo.lam == 0.5
    assert config.optimizer == make_config("tiny").optimizer


@pytest.mark.parametrize(
    ("text", "first_stage", "stages_from_upstream"),
    [
        ("ppo.lam=0.5", "", ["base", "sft", "rm", "normalize"]),
        ("rm.epochs=2", "", ["base", "sft", "rm", "normalize"]),  # the upstream's value
        ("normalize.posts=7", "normalize", ["base", "sft", "rm"]),
        ("rm.learning_rate=0.1", "rm", ["base", "sft"]),
        ("sft.epochs=3", "sft", ["base"]),
    ],
)
def test_an_upstream_supplies_the_stages_before_the_first_one_with_other_settings(
    runs, text, first_stage, stages_from_upstream
):
    write_records(runs, make_config("tiny", name="another", overrides=("rm.batch_size=4",)))

    config = override(text, upstream="another")

    assert config.own_from == first_stage
    assert [stage for stage in STAGES if config.is_from_upstream(stage)] == stages_from_upstream
    assert config.rm.batch_size == 4  # the upstream's, because no override changes it


def test_the_first_stage_with_other_settings_is_recorded(runs):
    write_records(runs, make_config("tiny", name="another", overrides=("rm.batch_size=4",)))
    config = override("rm.learning_rate=0.1", upstream="another")

    write_records(runs, config)

    assert recorded_config(runs / "mine/seed44413/rm") == config


def test_an_upstream_of_another_base_model_is_refused_and_its_preset_is_named(runs):
    write_records(runs, make_config("tiny-xs", name="small"))

    with pytest.raises(UserError, match=r"upstream small is of preset tiny-xs, .*PRESET=tiny-xs$"):
        make_config("tiny-s", name="mine", upstream="small")

    assert make_config("tiny-xs", name="mine", upstream="small").base.hidden_size == 32


def test_an_upstream_that_has_one_itself_is_refused_and_the_first_one_is_named(runs):
    write_records(runs, make_config("tiny"))
    write_records(runs, override("rm.epochs=3", upstream="tiny"))
    shutil.rmtree(runs / "mine/seed44413/base")  # it has the base stage of tiny

    with pytest.raises(UserError, match=r"mine starts from tiny: give UPSTREAM=tiny$"):
        make_config("tiny", name="other", upstream="mine")
