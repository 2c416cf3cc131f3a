"""The variables of a command: read from make or the command line, checked, and turned into options.

Make passes its command line to Python in MAKEFLAGS, in which no value has been expanded.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from stages.config.command_line import Request
from stages.config.error_messages import Parser, is_above_0
from stages.config.errors import UserError, unknown
from stages.config.options import add_arguments, request_of
from stages.config.presets import EXISTING_SUMMARIES
from stages.config.stages import STAGES
from stages.pipeline.targets import VARIABLES, Target, targets_by_name

USED_BY_MAKE = ("MAKEFILES", "MAKEFLAGS", "SHELL")
USED_BY_MAKEFILE = ("PYTHON", "VENV")
MOST_TARGETS_NAMED = 4
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?(@[\w./-]+)?")  # with configuration, revision


def read_command(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the targets and the variables of a command.

    A variable comes from the words, from make's command line, or, if a target reads it, from the
    environment. Raises UserError for a target or variable that does not exist, or that no target
    reads.
    """
    targets = [word for word in words if "=" not in word]
    typed = variables_of_make(os.environ.get("MAKEFLAGS", ""))
    typed |= dict(word.split("=", 1) for word in words if "=" in word)
    check_variables(targets, typed)

    # The environment may contain variables for other targets, such as those of a job script.
    names_read = {name for target in targets for name in target_of(target).variables}
    variables = {
        name: os.environ[name] for name in VARIABLES if name in names_read and os.environ.get(name)
    }
    if "WSL_DISTRO_NAME" in os.environ:  # there, NAME may be the name of the machine
        variables.pop("NAME", None)
    return targets, {**variables, **typed}


def variables_of_make(flags: str) -> dict[str, str]:
    r"""Return the variables in MAKEFLAGS, which follow the options of make and two dashes.

    s -- NAME=x SET=a\ b     a space in a value has a backslash: SET is `a b`
    s -- NAME=$$x            a dollar is written twice: NAME is `$x`
    s -- NAME:=x             make also knows := ?= += !=
    """
    _, _, assignments = f" {flags}".partition(" -- ")
    variables = {}
    for word in re.findall(r"(?:\\.|[^ \\])+", assignments, re.DOTALL):
        text = re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL)
        name, _, value = text.partition("=")
        variables[name.rstrip(":?+!")] = value.replace("$$", "$")
    return variables


def target_of(name: str) -> Target:
    """Return the target of a name. A stage without a target reads the same variables as `sft`.

    Raises UserError for a name that is neither.
    """
    targets = targets_by_name()
    if name not in targets and name not in STAGES:
        raise unknown("target", name, [*targets, *STAGES], "see make help")
    return targets.get(name, targets["sft"])


def check_variables(targets: Sequence[str], typed: Mapping[str, str]) -> None:
    """Raise UserError for a target or variable that does not exist, or that no target reads."""
    names_read = {name for target in targets for name in target_of(target).variables}
    for name, value in typed.items():
        if name in (*USED_BY_MAKE, *USED_BY_MAKEFILE):
            continue
        if name not in VARIABLES:
            raise unknown("make variable", name, VARIABLES, "settings go in SET, see make help")
        if "\n" in value and name != "POST":
            raise UserError(f"{name} contains a line break: leave it out")
        if value and name not in names_read:
            raise UserError(
                f"{' '.join(targets)} does not read {name}: {hint_for_unread(name, targets)}"
            )


def hint_for_unread(name: str, targets: Sequence[str]) -> str:
    """Return what to do instead of setting a variable that these targets do not read."""
    if VARIABLES[name].hint:
        return VARIABLES[name].hint
    readers = [target.name for target in targets_by_name().values() if name in target.variables]
    if len(readers) <= MOST_TARGETS_NAMED:
        return f"it is for {' '.join(readers)}"
    names_read = [name for target in targets for name in target_of(target).variables]
    if not names_read:
        return "leave it out"
    return f"leave it out, or give some of {' '.join(dict.fromkeys(names_read))}"


def with_hub_rows(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with DATA=owner/name replaced by settings that read it from the hub.

    A path keeps its meaning. If it does not exist but its folder does, it is a typo, not a hub id.
    """
    text = variables.get("DATA", "")
    is_path = Path(text).exists() or Path(text).parent.exists()
    if not HUB_ID.fullmatch(text) or is_path:
        return dict(variables)
    rows = f"data.source=hub data.sft_dataset= data.comparisons_dataset={text}"
    return {**variables, "DATA": "", "SET": f"{rows} {variables.get('SET', '')}".strip()}


def option_words(target: str, variables: Mapping[str, str]) -> list[str]:
    """Return the variables that a target reads, as options of a command line.

    Variables that stand for a setting, such as POLICY, follow the settings of SET.
    """
    words: list[str] = []
    settings: list[str] = []
    for name, variable in VARIABLES.items():
        value = variables.get(name, "")
        # DRY is no option of a tool, and SET comes last, below.
        is_read = name in target_of(target).variables and name not in ("DRY", "SET")
        if not value or not is_read:
            continue
        option = f"--{variable.option or name.lower().replace('_', '-')}"
        if variable.setting:
            settings.append(f"{variable.setting}={value}")
        elif variable.is_list:
            if value.split():
                words += [option, *value.split()]
        else:
            words.append(f"{option}={value}")  # joined, so that a value may begin with a dash

    if variables.get("SET") and "SET" in target_of(target).variables:
        settings = [variables["SET"], *settings]
    if settings:
        # One word, so that a setting in it twice is refused: POLICY=a SET=released.policy=b.
        words += ["--set", " ".join(settings)]
    return words


def request_from(variables: Mapping[str, str], is_judging: bool = False) -> Request:
    """Return the request for a run that the variables of a command describe.

    `is_judging`: the target is `judge`, which judges existing summaries if no preset is named.
    """
    parser = Parser()
    add_arguments(parser)
    values = {name: variables.get(name, "") for name in target_of("settings").variables}
    if values["SEED"]:
        whole_number("SEED", values["SEED"])  # argparse would name the option --seed
    if not values["PRESET"] and (is_judging or values["INPUT"]):
        values["PRESET"] = EXISTING_SUMMARIES
    return request_of(parser.parse_args(option_words("settings", values)))


# -- the value of a variable -----------------------------------------------------------------------


def words_of(values: Mapping[str, str], name: str) -> list[str]:
    """Return the words of a variable; none if it is missing or blank."""
    return values.get(name, "").split()


def whole_number(name: str, text: str) -> int:
    """Return the value of a variable, or one of its words, as a number.

    Raises UserError if it is not one.
    """
    if not text.isdecimal():
        raise UserError(f"{name}={text} is not a whole number: correct it")
    return int(text)


def dollars(text: str) -> float:
    """Return the amount in MAX_COST; 0 if it is not set. Raises UserError unless it is above 0."""
    if not text:
        return 0
    if not is_above_0(text):
        raise UserError(f"MAX_COST={text} is not above 0: give US dollars, such as MAX_COST=20")
    return float(text)


def is_one(values: Mapping[str, str], name: str) -> bool:
    """Return whether a variable is 1. Raises UserError for any value other than 1 or 0."""
    text = values.get(name, "")
    if text not in ("", "0", "1"):
        raise UserError(f"{name}={text} is neither 1 nor 0: give {name}=1, or leave it out")
    return text == "1"


def needs_settings(targets: Sequence[str]) -> bool:
    """Return whether one of these targets reads settings."""
    return any("SET" in target_of(target).variables for target in targets)


def resume_command(targets: Sequence[str], values: Mapping[str, str]) -> str:
    """Return the command that resumes this one: the same without REPLACE."""
    typed = [f"{name}={shlex.quote(values[name])}" for name in values if name != "REPLACE"]
    return " ".join(["make", *targets, *typed])
