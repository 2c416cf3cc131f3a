"""The variables of a command: read from make or the command line, checked, and turned into options.

Make passes its command line to Python in MAKEFLAGS, where nothing has expanded a value.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from stages.config.checks import UserError, unknown
from stages.config.command_line import Request, add_arguments, request_of
from stages.config.faults import Parser
from stages.config.stages import STAGES
from stages.pipeline.targets import VARIABLES, Target, targets_by_name

USED_BY_MAKE = ("MAKEFILES", "MAKEFLAGS", "SHELL")
USED_BY_MAKEFILE = ("PYTHON", "VENV")
MOST_TARGETS_NAMED = 4
EXISTING_SUMMARIES = "outputs"  # the preset of `make judge`
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?(@[\w./-]+)?")  # with configuration, revision


def read_command(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the targets and the variables of a command.

    A variable comes from the words, from make's command line, or from the environment. Raises
    UserError for a target or variable that does not exist, or that no target reads.
    """
    targets = [word for word in words if "=" not in word]
    typed = variables_of_make(os.environ.get("MAKEFLAGS", ""))
    typed |= dict(word.split("=", 1) for word in words if "=" in word)
    check(targets, typed)

    variables = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if "WSL_DISTRO_NAME" in os.environ:  # there NAME is the name of the machine
        variables.pop("NAME", None)
    return targets, {**variables, **typed}


def variables_of_make(flags: str) -> dict[str, str]:
    """Return the variables in MAKEFLAGS: `s -- NAME=x SET=a\\ b`, with `$` written as `$$`."""
    assignments = f" {flags}".partition(" -- ")[2]
    variables = {}
    for word in re.findall(r"(?:\\.|[^ \\])+", assignments, re.DOTALL):
        text = re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL)
        name, _, value = text.partition("=")
        variables[name.rstrip(":?+!")] = value.replace("$$", "$")
    return variables


def target_of(name: str) -> Target:
    """Return a target. A stage that is no target by itself reads what `sft` reads."""
    targets = targets_by_name()
    if name not in targets and name not in STAGES:
        raise unknown("target", name, [*targets, *STAGES], "see make help")
    return targets.get(name, targets["sft"])


def check(targets: Sequence[str], typed: Mapping[str, str]) -> None:
    """Raise UserError for a target or variable that does not exist, or that no target reads."""
    is_read = {name for target in targets for name in target_of(target).variables}
    for name, value in typed.items():
        if name in (*USED_BY_MAKE, *USED_BY_MAKEFILE):
            continue
        if name not in VARIABLES:
            raise unknown("make variable", name, VARIABLES, "settings go in SET, see make help")
        if "\n" in value and name != "POST":
            raise UserError(f"{name} contains a line break: leave it out")
        if value and name not in is_read:
            raise UserError(why_unread(name, targets))


def why_unread(name: str, targets: Sequence[str]) -> str:
    """Return why some targets do not take a variable, and what to give instead."""
    typed = " ".join(targets)
    read = [name for target in targets for name in target_of(target).variables]
    if name in ("SEED", "PRESET") and f"{name}S" in read:
        return f"{typed} takes no {name}: give {name}S"

    readers = [target.name for target in targets_by_name().values() if name in target.variables]
    hint = VARIABLES[name].hint
    if len(readers) <= MOST_TARGETS_NAMED:
        return f"{name} is for {' '.join(readers)}: {hint}"
    if not read:
        return f"{typed} takes no variables: leave {name} out"
    if hint == "leave it out":
        hint = f"it reads {' '.join(dict.fromkeys(read))}"
    return f"{typed} takes no {name}: {hint}"


def with_hub_rows(variables: Mapping[str, str]) -> dict[str, str]:
    """Replace DATA=owner/name, where no such path exists, by settings that read it from the hub."""
    text = variables.get("DATA", "")
    is_path = Path(text).exists() or Path(text).parent.exists()
    if not HUB_ID.fullmatch(text) or is_path:
        return dict(variables)
    rows = f"data.source=hub data.sft_dataset= data.comparisons_dataset={text}"
    return {**variables, "DATA": "", "SET": f"{rows} {variables.get('SET', '')}".strip()}


def options(target: str, variables: Mapping[str, str]) -> list[str]:
    """Return the variables that a target reads, as options of a command line."""
    read = target_of(target).variables
    words: list[str] = []
    settings: list[str] = []
    for name in VARIABLES:
        value = variables.get(name, "")
        variable = VARIABLES[name]
        option = f"--{variable.option or name.lower().replace('_', '-')}"
        if not value or name not in read or name == "DRY":
            continue
        if name == "SET":
            settings.insert(0, value)
        elif variable.setting:
            settings.append(f"{variable.setting}={value}")
        elif variable.is_list:
            words += [option, *value.split()]
        else:
            words.append(f"{option}={value}")  # joined, so that a value may begin with a dash
    return [*words, "--set", *settings] if settings else words


def request_from(variables: Mapping[str, str], is_judging: bool = False) -> Request:
    """Return the run that some variables ask for.

    `is_judging`: the target is `judge`, which judges existing summaries if no preset is named.
    """
    parser = Parser()
    add_arguments(parser)
    known = {name: variables.get(name, "") for name in target_of("settings").variables}
    if not known["PRESET"] and (is_judging or known["INPUT"]):
        known["PRESET"] = EXISTING_SUMMARIES
    return request_of(parser.parse_args(options("settings", known)))
