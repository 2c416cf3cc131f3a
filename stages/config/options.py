"""The options of a command line, and the request that they make.

make gives them as variables (pipeline/variables.py): `NAME=x` is `--name=x`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from stages.config.command_line import Request, config_of
from stages.config.config import Config
from stages.config.error_messages import Parser
from stages.config.errors import UserError
from stages.config.named_runs import as_recorded
from stages.config.presets import EXISTING_SUMMARIES
from stages.config.stages import SAME_RUN_SECTIONS
from stages.config.values import key_of, section_of, split_overrides


class SplitOverrides(argparse.Action):
    """Splits words that contain several overrides."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Called by argparse with the words of one option."""
        overrides: list[str] = []
        for word in values:
            parts = split_overrides(word)
            keys = [key_of(part) for part in parts]
            twice = [key for key in keys if keys.count(key) > 1]
            if twice:
                raise UserError(f"{twice[0]} is set twice: leave one out")
            overrides += parts
        setattr(namespace, self.dest, overrides)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the option `--set`, stored as `overrides`."""
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        nargs="*",
        default=[],
        action=SplitOverrides,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every stage takes."""
    parser.add_argument("--preset", default="", help="a preset or a file; default: tiny")
    parser.add_argument("--seed", type=int, default=44413)
    parser.add_argument("--name", default="", help="the run's folder below runs/")
    parser.add_argument("--data", default="", help="folder with posts and comparisons")
    parser.add_argument("--tokenizer", default="", help="tokenizer folder or hub id")
    parser.add_argument(
        "--upstream", default="", help="run that supplies stages with equal settings"
    )
    parser.add_argument("--recorded", nargs="*", default=[], help=argparse.SUPPRESS)
    add_overrides(parser)


def request_as_typed(args: argparse.Namespace) -> Request:
    """Return the request that parsed options make, whatever the named run has recorded."""
    values = {option.name: getattr(args, option.name) for option in fields(Request)}
    values["preset"] = args.preset or Request.preset
    values["recorded"] = tuple(args.recorded)
    values["overrides"] = tuple(args.overrides)
    return Request(**values)


def names_only_a_run(args: argparse.Namespace) -> bool:
    """Return whether parsed options name a run without saying which settings it has.

    Options that leave a run the same run, such as another judge, may accompany the name.
    """
    # `make judge` gives the preset `outputs` if no preset is named; it needs a file.
    has_preset = args.preset not in ("", EXISTING_SUMMARIES)
    has_sources = bool(args.data or args.tokenizer or args.upstream)
    changes_run = any(section_of(text) not in SAME_RUN_SECTIONS for text in args.overrides)
    return bool(args.name) and not (has_preset or has_sources or changes_run)


def request_of(args: argparse.Namespace) -> Request:
    """Return the request of parsed options. Given only a name, it has the run's recorded settings.

    So `make eval NAME=x` continues run x, whatever preset and settings it was started with.
    """
    request = request_as_typed(args)
    if names_only_a_run(args):
        return as_recorded(request)
    return request


def config_from_arguments(
    argv: Sequence[str] | None, description: str = "", require_data: bool = True
) -> Config:
    """Return the config that a command line asks for. Raises UserError as `config_of` does."""
    parser = Parser(description=description)
    add_arguments(parser)
    return config_of(request_of(parser.parse_args(argv)), require_data=require_data)
