"""What a run takes from its upstream: the stages before the first one with other settings."""

import json

import pytest

from stages.config.command_line import make_config
from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.recorded import recorded_config
from stages.config.stages import SHARED_SECTIONS, STAGES
from tests.lib.asserts import refusal_of
from tests.lib.configs import override


def recorded(runs, config: Config) -> None:
    """The settings that the stages of a run have left on disk."""
    for stage in ("base", "sft", "rm", "normalize"):
        folder = runs / config.name / f"seed{config.seed}" / stage
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config.model_dump()))


def test_upstream_needs_a_name_and_the_same_posts_and_checkpoint(runs):
    recorded(runs, make_config("tiny"))
    config = override("ppo.lam=0.5", "optimizer.adam_eps=1e-6", upstream="tiny")
    assert (config.name, config.upstream) == ("mine", "tiny")
    with pytest.raises(UserError, match="NAME="):
        make_config("tiny", upstream="tiny")
    for text in ("base.hidden_size=64", "data.max_query_tokens=99"):
        assert "changes stage base, which UPSTREAM=tiny supplies" in refusal_of(
            override, text, upstream="tiny"
        )


def test_a_run_with_an_upstream_has_the_settings_that_the_upstream_recorded(runs):
    texts = ("sft.epochs=3", "world.seed=7", "base.hidden_size=64", "rm.epochs=3", "ppo.lam=0.9")
    theirs = make_config("tiny", name="theirs", overrides=texts)
    recorded(runs, theirs)
    config = override("ppo.lam=0.5", "sft.epochs=3", upstream="theirs")
    for section in SHARED_SECTIONS:
        assert getattr(config, section) == getattr(theirs, section), section
    assert (config.ppo.lam, config.optimizer) == (0.5, make_config("tiny").optimizer)


@pytest.mark.parametrize(
    ("text", "first", "taken"),
    [
        ("ppo.lam=0.5", "", ["base", "sft", "rm", "normalize"]),
        ("rm.epochs=2", "", ["base", "sft", "rm", "normalize"]),  # as it is there
        ("normalize.posts=7", "normalize", ["base", "sft", "rm"]),
        ("rm.learning_rate=0.1", "rm", ["base", "sft"]),
        ("sft.epochs=3", "sft", ["base"]),
    ],
)
def test_an_upstream_supplies_what_comes_before_the_first_stage_of_other_settings(
    runs, text, first, taken
):
    recorded(runs, make_config("tiny", name="theirs", overrides=("rm.batch_size=4",)))
    config = override(text, upstream="theirs")
    assert config.own_from == first
    assert [stage for stage in STAGES if config.is_upstreams(stage)] == taken
    assert config.rm.batch_size == 4  # what the override leaves alone is the upstream's
    recorded(runs, config)
    assert recorded_config(runs / "mine/seed44413/rm") == config


def test_an_upstream_of_another_base_model_is_refused_and_its_own_preset_is_named(runs):
    """The small model was trained, and the larger preset recorded."""
    recorded(runs, make_config("tiny-xs", name="small"))
    with pytest.raises(UserError, match=r"upstream small is of preset tiny-xs, .*PRESET=tiny-xs$"):
        make_config("tiny-s", name="mine", upstream="small")
    assert make_config("tiny-xs", name="mine", upstream="small").base.hidden_size == 32


def test_an_upstream_that_has_one_itself_is_refused_and_the_first_one_is_named(runs):
    recorded(runs, make_config("tiny"))
    recorded(runs, override("rm.epochs=3", upstream="tiny"))
    (runs / "mine/seed44413/base").rename(runs / "base")  # which it took from tiny
    with pytest.raises(UserError, match=r"mine starts from tiny: give UPSTREAM=tiny$"):
        make_config("tiny", name="other", upstream="mine")
