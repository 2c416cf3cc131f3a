"""No dead settings: every field of every section is read by a module that does not define it."""

import ast
import inspect
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from stages.settings.command_line import make_config
from stages.settings.config import SECTIONS, Config
from tests.test_house import MODULES, tree_of

WHERE_SETTINGS_LIVE = ["stages.settings.config", "stages.settings.sections"]
WHERE_SETTINGS_LIVE += ["stages.settings.ppo"]
WHERE_SETTINGS_LIVE += ["stages.settings.judge"]


def classes_of(section: str) -> tuple[type, ...]:
    """A section's class and those that it inherits from."""
    kind: Any = SECTIONS[section]
    return inspect.getmro(kind)


# The loop of SFT, reward model and DPO reads its own stage's section by name.
OF_ITS_STAGE, LEARNED = "getattr(run.config, run.stage)", ("sft", "rm", "dpo")


def receivers(tree: ast.Module, section: str) -> set[str]:
    """The names under which a module holds a section: its own, arguments of its type, aliases."""
    names, kinds = {section}, {kind.__name__ for kind in classes_of(section)}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation) in kinds:
            names.add(node.arg)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        targets, values = node.targets[:1], [node.value]
        if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            targets, values = targets[0].elts, node.value.elts
        for target, value in zip(targets, values, strict=True):
            is_section = isinstance(value, ast.Attribute) and value.attr == section
            is_section |= ast.unparse(value) == OF_ITS_STAGE and section in LEARNED
            if is_section or (isinstance(value, ast.Name) and value.id in names):
                names.add(last_name(target))
    return names


def last_name(node: ast.expr) -> str:
    return ast.unparse(node).split(".")[-1]


def attributes_read(section: str) -> set[str]:
    """Every `section.attribute` that a module reads which does not define settings.

    Of a module that defines them what it reads as `config.section.property`: the settings' hash.
    """
    found = set()
    for name, path in MODULES.items():
        if name in WHERE_SETTINGS_LIVE:
            found |= properties_read(tree_of(path), section)
            continue
        names = receivers(tree_of(path), section)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found |= {node.attr} if last_name(node.value) in names else set()
    return found


def properties_read(tree: ast.Module, section: str) -> set[str]:
    """The properties of `config.section` that a module reads, written out in full."""
    read = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return set(derived_from(section)) & {
        one.removeprefix(f"config.{section}.") for one in read if one.startswith("config.")
    }


def derived_from(section: str) -> dict[str, set[str]]:
    """The fields that each property of a section reads."""
    found = {}
    members = [member for kind in classes_of(section) for member in vars(kind).items()]
    for name, member in members:
        if isinstance(member, property) and member.fget is not None:
            found[name] = set(member.fget.__code__.co_names)
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_there_are_no_dead_settings(section):
    read = attributes_read(section)
    for name, sources in derived_from(section).items():
        assert name in read, f"{section}.{name} is computed for nobody"
        read |= sources
    assert {one.name for one in fields(SECTIONS[section])} - read == set()


def test_the_run_itself_has_no_dead_settings():
    code = "\n".join(path.read_text(encoding="utf-8") for path in MODULES.values())
    for one in fields(Config):
        assert f"config.{one.name}" in code, one.name
        assert (one.name in SECTIONS) == is_dataclass(one.type)


def test_every_section_is_frozen_and_says_what_it_is():
    config = make_config("tiny")
    for one in (config, *(getattr(config, section) for section in SECTIONS)):
        kind = type(one)
        assert kind.__dataclass_params__.frozen
        assert kind.__doc__
        assert not kind.__doc__.startswith(f"{kind.__name__}("), "dataclass wrote this docstring"
