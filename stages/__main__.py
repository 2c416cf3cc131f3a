"""The one door: `python -m stages sft rm ppo NAME=x` does what `make sft rm ppo NAME=x` does.

It knows what was asked for as it was typed, refuses what no goal reads, and runs the modules that
`stages/goals.py` names. Make hands on its command line in MAKEFLAGS, where values stand as typed:
neither make nor the shell expands them. Standard library only.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from stages.goals import (
    AS_SETTINGS,
    COMMANDS,
    DEFAULTS,
    GOALS,
    PIPELINE,
    VARIABLES,
    Goal,
    help_lines,
)
from stages.settings.checks import UserError, unknown
from stages.settings.config import Config
from stages.settings.faults import in_one_line, show
from stages.settings.stages import STAGES

LOOKING = ("help", "settings", "status", "plan")  # they need no packages
FEW = 4  # a variable that so many goals read is refused by naming them
OUTPUTS = "outputs"  # the preset of summaries that exist already
OF_MAKE = ("MAKEFILES", "MAKEFLAGS", "SHELL")
CARDS = "reports.sharing.cards"
OWN = "reports.needs.own"
Values = Mapping[str, str]


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Check and do what is asked for; exits with the status of the first goal that fails."""
    words = sys.argv[1:] if argv is None else argv
    look_only = "--check" in words
    words = ["help" if word in ("-h", "--help") else word for word in words if word != "--check"]
    flags = os.environ.get("MAKEFLAGS", "")
    typed = of_make(flags) | dict(word.split("=", 1) for word in words if "=" in word)
    goals = [word for word in words if "=" not in word] or ["help"]
    check(goals, typed)
    if look_only:
        return
    values = typed | of_environment(typed)
    reading = [goal for goal in goals if "SET" in row_of(goal).reads and goal != "help"]
    if values.get("PRESET") == "own" and reading:
        values = import_module(OWN).with_choices(values)
    dry = "n" in flags.split(" ")[0]
    groups: dict[str, list[str]] = {}  # what the pipeline makes is made by one call
    for goal in goals:
        groups.setdefault(PIPELINE if is_staged(goal) else goal, []).append(goal)
    for group in groups.values():
        code = run(group, values, dry)
        if code:
            raise SystemExit(code)


def of_make(flags: str) -> dict[str, str]:
    """The variables of make's command line, from MAKEFLAGS: blanks and backslashes are escaped."""
    values = {}
    assignments = f" {flags}".partition(" -- ")[2]
    for word in re.findall(r"(?:\\.|[^ \\])+", assignments, re.DOTALL):
        name, _, value = re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL).partition("=")
        values[name.rstrip(":?+!")] = value.replace("$$", "$")
    return values


def of_environment(typed: Values) -> dict[str, str]:
    """The variables that the environment holds and nobody has typed."""
    names = [name for name in VARIABLES if name not in typed and os.environ.get(name)]
    if "WSL_DISTRO_NAME" in os.environ:  # there NAME is the machine's
        names = [name for name in names if name != "NAME"]
    return {name: os.environ[name] for name in names}


def check(goals: Sequence[str], typed: Values) -> None:
    """Raise UserError for a goal or variable that does not exist, and for one that is not read."""
    for goal in goals:
        if goal not in GOALS and goal not in STAGES:
            raise unknown("goal", goal, [*GOALS, *STAGES], "see make help")
    read = {name for goal in goals for name in row_of(goal).reads} | {"PYTHON", "VENV"}
    for name, value in typed.items():
        if name in OF_MAKE:
            continue
        if name not in VARIABLES:
            mend = "settings stand in SET, see make help"
            raise unknown("make variable", name, VARIABLES, mend)
        if "\n" in value and name != "POST":
            raise UserError(f"{name} holds a line break: leave it out")
        if value and name not in read:
            raise UserError(refusal(name, goals))


def row_of(goal: str) -> Goal:
    """What the table says of a goal; the pipeline knows more stages, which read what SFT reads."""
    return GOALS.get(goal, GOALS["sft"])


def refusal(name: str, goals: Sequence[str]) -> str:
    """Why a variable is refused beside some goals, and what to give instead."""
    readers = [goal for goal in GOALS if name in row_of(goal).reads]
    hint, typed = VARIABLES[name].hint, " ".join(goals)
    if name in ("SEED", "PRESET") and any(f"{name}S" in row_of(goal).reads for goal in goals):
        return f"{typed} takes no {name}: give {name}S"
    if len(readers) <= FEW:
        return f"{name} is for {' '.join(readers)}: {hint}"
    if hint == "leave it out" or not any(row_of(goal).reads for goal in goals):
        known = " ".join(dict.fromkeys(name for goal in goals for name in row_of(goal).reads))
        hint = f"it reads {known or 'none'}"
    return f"{typed} takes no {name}: {hint}"


def is_staged(goal: str) -> bool:
    """Whether the pipeline makes it."""
    return row_of(goal).module == PIPELINE


def run(goals: Sequence[str], values: Values, dry: bool) -> int:
    """Do what belongs together; its exit status."""
    module, arguments = row_of(goals[0]).module, options(goals, values)
    if goals[0] == "help":
        show(help_lines())
    elif goals[0] in COMMANDS:
        return next(filter(None, (call(command, dry) for command in COMMANDS[goals[0]])), 0)
    elif is_staged(goals[0]):
        judged = ["eval" if goal == "judge" else goal for goal in goals]
        words = [*judged, *arguments, *["--dry-run"] * (dry and goals[0] not in LOOKING)]
        import_module(module).main(words, write_cards)
    elif dry and goals[0] not in LOOKING:
        print(f"would run {module} {' '.join(arguments)}".rstrip())
    elif module != "-":
        sys.argv = [module, *arguments]
        import_module(module).main(arguments)
    return 0


def write_cards(config: Config, stage: str) -> None:
    """Write the cards of the models that a finished stage has saved, as pages stand above stages.

    The stage stays finished if that fails: a card is nobody's input.
    """
    if not STAGES[stage].models:
        return
    try:
        import_module(CARDS).write_cards(config, stage)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        print(f"no model card of stage {stage}: {reason}", file=sys.stderr, flush=True)


def call(command: str, dry: bool) -> int:
    """Run a developer's tool of this environment; its exit status."""
    words = shlex.split(command)
    own = [word for word in words if re.match(r"[A-Z_]+=", word)]
    words = [sys.executable, "-m", *words[len(own) :]]
    print(command, flush=True)
    environment = os.environ | dict(word.split("=", 1) for word in own)
    environment.pop("MAKEFLAGS", None)  # make in a test has a command line of its own
    return 0 if dry else subprocess.run(words, env=environment).returncode


def options(goals: Sequence[str], values: Values) -> list[str]:
    """What the variables that these goals read tell their module."""
    read = {name for goal in goals for name in row_of(goal).reads}
    values, words = DEFAULTS | {**values}, []
    settings = [values["SET"]] if "SET" in read and values.get("SET") else []
    for name in (name for name in VARIABLES if name in read and values.get(name)):
        option = f"--{VARIABLES[name].option}"
        if name in AS_SETTINGS and "SET" in read:
            settings.append(f"{AS_SETTINGS[name]}={values[name]}")
        elif option.endswith("!"):
            words.append(option[:-1])
        elif option.endswith("*"):
            words += [option[:-1], *values[name].split()]
        elif name != "SET":
            words.append(f"{option}={values[name]}")
    judged = "judge" in goals or ("INPUT" in read and values.get("INPUT"))
    if judged and not values.get("PRESET"):
        words.append(f"--preset={OUTPUTS}")
    return [*words, "--set", *settings] if settings else words


if __name__ == "__main__":
    main()
