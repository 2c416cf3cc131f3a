"""The sections of the settings: which values they refuse, and that each setting is used."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from stages.config.config import SECTIONS, Config
from stages.config.ppo import PolicyGradient, Ppo
from stages.config.section import Section
from stages.config.sections import USED_ROWS, Sft
from stages.config.values import DEFAULTS, TYPES
from stages.rl.algorithms import ALGORITHMS, Rloo
from tests.lib.asserts import refusal_of
from tests.lib.places import ROOT

DEFINED_IN = {Path("stages/config") / name for name in ("sections.py", "ppo.py", "judge.py")}
FILES = [path for folder in ("stages", "eval", "reports") for path in (ROOT / folder).rglob("*.py")]
CODE = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in FILES}
READERS = "\n".join(code for path, code in CODE.items() if path not in DEFINED_IN)
FLOATS = [key for key, kind in TYPES.items() if kind is float]


class Shape(Section):
    """A section of this test."""

    width: int = Field(default=3, gt=0, le=10)
    """Its width, in meters."""
    ratio: float = Field(default=0.5, ge=0, le=1)
    """Its ratio."""


class Wide(Shape):
    """A section with another default."""

    width: int = 9


class Narrow(Shape):
    """A section with another range."""

    width: int = Field(default=1, gt=0, le=2)


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"width": 0}, "shape.width must be above 0, not 0"),
        ({"width": 11}, "shape.width must be at most 10, not 11"),
        ({"width": "3"}, "shape.width must be a whole number, not '3'"),
        ({"width": True}, "shape.width must be a whole number, not True"),
        ({"ratio": 1.5}, "shape.ratio must be at most 1, not 1.5"),
        ({"ratio": float("nan")}, "shape.ratio must be a finite number, not nan"),
        ({"widht": 3}, "unknown setting 'shape.widht': did you mean shape.width or shape.ratio?"),
        ({"width": 0, "ratio": 2.0}, "shape.width must be above 0, not 0; and 1 more"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_setting(values, line):
    assert refusal_of(Shape, **values) == line


def test_an_error_about_a_choice_lists_all_values():
    line = refusal_of(Ppo, score_at="before")

    assert line == "ppo.score_at must be 'after_eos' or 'eos', not 'before'"


def test_a_whole_number_may_stand_for_a_float():
    assert Shape(ratio=1).ratio == 1.0


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Shape().width = 4


def test_changed_settings_are_checked():
    assert Shape(width=4).changed(ratio=0.25) == Shape(width=4, ratio=0.25)
    assert refusal_of(Shape().changed, width=11) == "shape.width must be at most 10, not 11"
    assert refusal_of(Shape().changed, height=1).startswith("unknown setting 'shape.height'")


def test_a_config_is_checked_when_a_section_is_changed():
    config = Config(preset="tiny", name="mine")

    assert config.changed(ppo=Ppo(lam=0.5)).ppo.lam == 0.5

    line = refusal_of(config.changed, eval=config.eval.changed(best_of="4"), seed=-1)
    assert line == "seed must be at least 0, not -1"


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e300, -1e300])
def test_no_setting_takes_an_absurd_number(key, value):
    section, _, field = key.partition(".")
    assert refusal_of(SECTIONS[section], **{field: value}).startswith(f"{key} must ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("judge.requests_per_minute", 1e-300),
        ("judge.request_seconds", 1e-300),
        ("ppo.temperature", 1e-300),
        ("eval.temperature", 1e-300),
    ],
)
def test_a_number_that_others_are_divided_by_is_not_absurdly_small(key, value):
    section, _, field = key.partition(".")
    assert refusal_of(SECTIONS[section], **{field: value}).startswith(f"{key} must be at least ")


# -- defaults of subclasses ------------------------------------------------------------------------


def test_a_subclass_that_changes_a_default_keeps_range_and_description():
    assert Wide().width == 9
    assert Wide.model_fields["width"].description == "Its width, in meters."
    assert refusal_of(Wide, width=11) == "wide.width must be at most 10, not 11"
    assert Shape().width == 3


def test_a_subclass_that_changes_a_range_keeps_the_description():
    assert refusal_of(Narrow, width=3) == "narrow.width must be at most 2, not 3"
    assert Narrow.model_fields["width"].description == "Its width, in meters."


def test_sections_with_other_defaults_keep_the_ranges():
    assert Sft().batch_size == 128
    assert refusal_of(Sft, batch_size=0) == "sft.batch_size must be above 0, not 0"
    assert Rloo().loss_mean == "episodes"
    assert refusal_of(Rloo, loss_mean="mean").startswith("rloo.loss_mean must be 'tokens', ")


@pytest.mark.parametrize("key", DEFAULTS)
def test_every_default_is_a_value_that_the_setting_takes(key):
    section, _, field = key.partition(".")

    settings = SECTIONS[section](**{field: DEFAULTS[key]})

    assert getattr(settings, field) == DEFAULTS[key]


# -- descriptions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Config, PolicyGradient, *SECTIONS.values()])
def test_every_setting_is_described_in_full_sentences(kind):
    assert kind.__doc__
    for name, field in kind.model_fields.items():
        assert field.description, name
        if kind is not Config:
            assert field.description.rstrip().endswith("."), name


# -- no dead settings ------------------------------------------------------------------------------


def names_read_by_properties(section: Any) -> dict[str, set[str]]:
    """Return property -> the names that it reads, for the properties of a section."""
    names_read = {}
    for name in set(dir(section)) - set(dir(BaseModel)):
        member = getattr(section, name)
        if isinstance(member, property) and member.fget is not None:
            names_read[name] = set(member.fget.__code__.co_names)
    return names_read


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_read_by_a_module_that_does_not_define_it(section):
    """An attribute of the same name in any other object counts as read, too."""
    attributes_read = set(re.findall(r"\.(\w+)", READERS))
    attributes_read |= set(USED_ROWS.values())  # `Data.rows` has their names
    properties = names_read_by_properties(SECTIONS[section])

    assert set(properties) <= attributes_read, "a property that nothing reads"
    settings = SECTIONS[section].model_fields.keys()
    assert settings <= attributes_read.union(*properties.values())


def test_every_field_of_a_config_is_read():
    code = "\n".join(CODE.values())
    for name in Config.model_fields:
        if name in ALGORITHMS:  # read as getattr(config, algorithm.name)
            continue
        assert re.search(rf"\b(config|self)\.{name}\b", code), name
