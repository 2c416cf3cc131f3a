"""YAML files whose scalars stay strings, so that settings are read as on the command line.

YAML itself would read `no` as a boolean and `3e-6` as a string.
"""

from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, ScalarNode

from stages.config.errors import UserError, first_line


class TextLoader(yaml.BaseLoader):
    """Reads every scalar as a string, and refuses a key that is set twice."""

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The pairs of a mapping. PyYAML itself would silently keep the last of two equal keys."""
        keys = set()
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                raise ConstructorError(problem="a key must be a word", problem_mark=key.start_mark)
            if key.value in keys:
                raise ConstructorError(
                    problem=f"{key.value} is set twice", problem_mark=key.start_mark
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, name: str) -> dict[str, Any]:
    """A YAML file of keys and values. Raises UserError, with `name` and the line, if it is none."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=TextLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{name}: {reason}: give a preset, or a YAML file that exists") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{name}, line {line}: {error.problem}: correct the YAML") from None
    except yaml.YAMLError as error:
        raise UserError(f"{name}: {first_line(error)}: correct the YAML") from None

    if document is None or document == "":
        return {}
    if not isinstance(document, dict):
        raise UserError(f"{name} must contain sections with settings, such as `ppo:`")
    return document
