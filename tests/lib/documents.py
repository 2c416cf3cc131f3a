"""The documents of the repository, and the commands in them."""

import re
import shlex

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


def make_commands(text: str) -> list[list[str]]:
    """Every `make ...` in code and fences, as words from `make` on; comments are left out."""
    joined = text.replace("\\\n", " ")
    spans = re.findall(r"`([^`]+)`", FENCE.sub("", joined))
    lines = [line for block in FENCE.findall(joined) for line in block.splitlines()]
    commands = []
    for code in (*spans, *lines):
        started = re.match(r"(?:[A-Z_]+=\S+ )*make ", code)
        if started:
            words = shlex.split(code[started.end() - len("make ") :], comments=True)
            commands.append([word for word in words if word != "&"])
    return commands


# The algorithm that docs/change-it.md adds, so there is no such target without the change.
ADDED_TARGET = "raft"
COMMANDS = [
    command
    for text in TEXTS.values()
    for command in make_commands(text)
    if ADDED_TARGET not in command
]


def section(document: str, heading: str) -> str:
    """The text of a document below one of its second-level headings, up to the next one."""
    _, _, after = TEXTS[document].partition(f"\n## {heading}\n")
    assert after, f"{document} has no heading {heading!r}"
    return after.partition("\n## ")[0]


def code_blocks(text: str, language: str) -> list[str]:
    """What is between the fences of a language, such as `python`, in a part of a document."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, text, re.MULTILINE | re.DOTALL)
