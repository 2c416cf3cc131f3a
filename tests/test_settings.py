"""No dead settings: a module that does not define settings reads every field of every section."""

import re
from typing import Any

import pytest
from pydantic import BaseModel

from stages.config.command_line import make_config
from stages.config.config import SECTIONS, Config
from stages.rl.algorithms import ALGORITHMS
from tests.test_house import MODULES

DEFINED_IN = tuple(f"stages.config.{name}" for name in ("sections", "ppo", "judge"))
CODE = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
READ = "\n".join(code for name, code in CODE.items() if name not in DEFINED_IN)


def properties_of(section: str) -> dict[str, set[str]]:
    """The fields that each property of a section reads."""
    kind: Any = SECTIONS[section]
    members = [(name, getattr(kind, name)) for name in dir(kind) if name not in dir(BaseModel)]
    return {
        name: set(member.fget.__code__.co_names)
        for name, member in members
        if isinstance(member, property) and member.fget is not None
    }


@pytest.mark.parametrize("section", SECTIONS)
def test_there_are_no_dead_settings(section):
    """A name that another object has too is not told apart."""
    read = set(re.findall(r"\.(\w+)", READ))
    derived = properties_of(section)
    assert set(derived) <= read, "a property is computed for nobody"
    names = SECTIONS[section].model_fields.keys()
    assert names <= read.union(*derived.values())


def test_the_run_itself_has_no_dead_settings():
    for name in Config.model_fields:
        is_algorithm = name in ALGORITHMS  # read as getattr(config, algorithm.name)
        is_read = re.search(rf"\b(config|self)\.{name}\b", "\n".join(CODE.values()))
        assert is_algorithm or is_read, name


def test_every_section_is_frozen_and_says_what_it_is():
    config = make_config("tiny")
    for one in (config, *(getattr(config, section) for section in SECTIONS)):
        assert one.model_config["frozen"]
        assert type(one).__doc__
