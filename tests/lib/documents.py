"""The documents of the repository, and the commands in them."""

import re
import shlex
from dataclasses import dataclass

from tests.lib.places import ROOT

DOCUMENTS = (
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "docs/quickstart.md",
    "docs/ppo-walkthrough.md",
    "docs/own-data.md",
    "docs/change-it.md",
    "docs/judges.md",
    "docs/gpus.md",
    "docs/troubleshooting.md",
    "docs/paper-details.md",
    "docs/reproduce.md",
    "stages/README.md",
    "eval/README.md",
    "reports/README.md",
    "reports/FINDINGS.md",
)
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS}
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAKE = re.compile(r"(?:[A-Z_]+=\S+ )*make ")  # variables of the environment may come first


@dataclass(frozen=True, kw_only=True)
class MakeCommand:
    """A command as `make` reads it."""

    words: list[str]
    """Everything after `make`."""

    @property
    def targets(self) -> list[str]:
        """The words that are neither variables nor options."""
        return [word for word in self.words if "=" not in word and not word.startswith("-")]

    @property
    def variables(self) -> dict[str, str]:
        """The text of each variable."""
        return dict(word.split("=", 1) for word in self.words if "=" in word)

    def __str__(self) -> str:
        """The command on one line."""
        return shlex.join(["make", *self.words])


def code_spans(text: str) -> list[str]:
    """The code between single backticks, outside fences."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def fenced_lines(text: str) -> list[str]:
    """The lines between fences of any language."""
    lines = []
    for block in FENCE.findall(text):
        lines += block.splitlines()
    return lines


def make_commands(text: str) -> list[MakeCommand]:
    """Every `make ...` in code and fences, without comments."""
    joined = text.replace("\\\n", " ")
    commands = []
    for code in [*code_spans(joined), *fenced_lines(joined)]:
        start = MAKE.match(code)
        if start is not None:
            words = shlex.split(code[start.end() :], comments=True)
            commands.append(MakeCommand(words=[word for word in words if word != "&"]))
    return commands


# The algorithm that docs/change-it.md adds, so there is no such target without the change.
ADDED_TARGET = "raft"


def documented_commands() -> list[MakeCommand]:
    """Every `make` command of the documents that works without a change of the code."""
    commands = []
    for text in TEXTS.values():
        for command in make_commands(text):
            if ADDED_TARGET not in command.targets:
                commands.append(command)
    return commands


COMMANDS = documented_commands()


def section(document: str, heading: str) -> str:
    """The text of a document below one of its second-level headings, up to the next one."""
    _, _, after = TEXTS[document].partition(f"\n## {heading}\n")
    assert after, f"{document} has no heading {heading!r}"
    return after.partition("\n## ")[0]


def code_blocks(text: str, language: str) -> list[str]:
    """What is between the fences of a language, such as `python`, in a part of a document."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, text, re.MULTILINE | re.DOTALL)
