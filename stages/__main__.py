"""The one door: `python -m stages sft rm ppo NAME=x` does what `make sft rm ppo NAME=x` does.

It knows what was asked for as it was typed, refuses what no goal reads, and runs the modules that
`stages/pipeline/goals.py` names. Make hands on its command line in MAKEFLAGS, where values stand as
typed: neither make nor the shell expands them. Standard library only.
"""

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from stages.config.checks import UserError, first_line, unknown
from stages.config.config import Config
from stages.config.faults import in_one_line, show
from stages.config.stages import STAGES
from stages.pipeline.goals import (
    AS_SETTINGS,
    DEFAULTS,
    GOALS,
    PIPELINE,
    VARIABLES,
    Goal,
    help_lines,
)

LOOKING = ("help", "settings", "status", "plan")  # they need no packages
LOOKING_ONLY = "Looking: nothing is made."  # the last word under `make -n`, see the Makefile
FEW = 4  # a variable that so many goals read is refused by naming them
OUTPUTS = "outputs"  # the preset of summaries that exist already
OF_MAKE = ("MAKEFILES", "MAKEFLAGS", "SHELL")
CARDS = "reports.sharing.cards"
WATCH = "reports.parts.watch"
OWN = "reports.needs.own"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?(@[\w./-]+)?")  # with configuration, revision
LOAD = Path("/proc/loadavg")
LOOKS, TAKEN = 10, 0.25  # looks at what runs; the share of the cores that others may use
Values = Mapping[str, str]


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Check and do what is asked for, up to the first goal that fails."""
    words = sys.argv[1:] if argv is None else argv
    look_only = "--check" in words
    words = [word for word in words if word not in ("--check", LOOKING_ONLY)]
    words = ["help" if word in ("-h", "--help") else word for word in words]
    flags = os.environ.get("MAKEFLAGS", "")
    typed = of_make(flags) | dict(word.split("=", 1) for word in words if "=" in word)
    goals = [word for word in words if "=" not in word] or ["help"]
    check(goals, typed)
    if look_only:
        return
    values = with_hub_rows(typed | of_environment(typed))
    reading = [goal for goal in goals if "SET" in row_of(goal).reads and goal != "help"]
    if values.get("PRESET") == "own" and reading:
        values = import_module(OWN).with_choices(values)
    dry = "n" in flags.split(" ")[0]
    if not dry and any(row_of(goal).module == PIPELINE for goal in goals):
        spare_the_cores()
    groups: dict[str, list[str]] = {}  # what the pipeline makes is made by one call
    for goal in goals:
        module = row_of(goal).module
        groups.setdefault(PIPELINE if module == PIPELINE else goal, []).append(goal)
    for group in groups.values():
        run(group, values, dry)


def spare_the_cores() -> None:
    """Have OpenMP's threads sleep, not spin, while they wait, if others use the cores.

    Beside one busy process 20 updates of PPO took 42 seconds so, and 74 without; on quiet cores 29,
    and 25. It is read when libraries are loaded, so it holds for all stages of a command.
    """
    if "OMP_WAIT_POLICY" in os.environ or not LOAD.exists():
        return
    running = 0
    for _ in range(LOOKS):
        running += int(LOAD.read_text().split()[3].partition("/")[0]) - 1  # this process runs too
        time.sleep(0.02)
    if running / LOOKS > TAKEN * (os.cpu_count() or 1):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


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


def with_hub_rows(values: Values) -> Values:
    """The variables with DATA=owner/name, where no such path is, as settings: the rows of this data
    set of the hub are all there are.
    """
    text = values.get("DATA", "")
    if not HUB_ID.fullmatch(text) or Path(text).exists() or Path(text).parent.exists():
        return values
    rows = f"data.source=hub data.sft_dataset= data.comparisons_dataset={text}"
    return {**values, "DATA": "", "SET": f"{rows} {values.get('SET', '')}".strip()}


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


def run(goals: Sequence[str], values: Values, dry: bool) -> None:
    """Do what belongs together."""
    module, arguments = row_of(goals[0]).module, options(goals, values)
    if goals[0] == "help":
        show(help_lines())
    elif module == PIPELINE:
        judged = ["eval" if goal == "judge" else goal for goal in goals]
        words = [*judged, *arguments, *["--dry-run"] * (dry and goals[0] not in LOOKING)]
        again = [name for name in values if name != "REPLACE"]
        typed = ["make", *goals, *(f"{name}={shlex.quote(values[name])}" for name in again)]
        hooks = import_module(WATCH).hooks(write_cards)
        import_module(module).main(words, goes_on_with=" ".join(typed), **hooks)
    elif dry and goals[0] not in LOOKING:
        print(f"would do {goals[0]}: {row_of(goals[0]).what}")
    elif module == "-":
        raise UserError(f"{goals[0]} is done by make alone: run `make {goals[0]}`")
    else:
        sys.argv = [module, *arguments]
        import_module(module).main(arguments)


def write_cards(config: Config, stage: str) -> None:
    """Write the cards of the models that a finished stage has saved, as pages stand above stages.

    The stage stays finished if that fails: a card is nobody's input.
    """
    if not STAGES[stage].models:
        return
    try:
        import_module(CARDS).write_cards(config, stage)
    except Exception as error:
        line = f"no model card of stage {stage}: {first_line(error)}"
        print(line, file=sys.stderr, flush=True)


def options(goals: Sequence[str], values: Values) -> list[str]:
    """What the variables that these goals read tell their module."""
    read = {name for goal in goals for name in row_of(goal).reads}
    values, words = DEFAULTS | {**values}, []
    settings = [values["SET"]] if "SET" in read and values.get("SET") else []
    for name in (name for name in VARIABLES if name in read and values.get(name)):
        option = f"--{VARIABLES[name].option}"
        if name in AS_SETTINGS and "SET" in read:
            settings.append(f"{AS_SETTINGS[name]}={values[name]}")
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
