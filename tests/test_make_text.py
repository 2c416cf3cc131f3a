"""What stands in a make variable is text: neither make nor the shell expands it or splits it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXTS = (
    *("two words", "it's", 'a "b" c', "a;touch hacked", "a`touch hacked`", "a$(touch hacked)"),
    *("a$$(touch hacked)", "$(shell touch hacked)", "${HOME}", "a&touch hacked", "a|touch hacked"),
    *("a>hacked", "a\\b", "*", "~", "#x", "-x", "--help", "%", "grün  and spaced"),
)


def typed(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "-f", str(ROOT / "Makefile"), "VENV=", f"PYTHON={sys.executable}", *words]
    surroundings = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=surroundings | environment
    )


def test_tools_for_developers_are_installed_by_the_goals_that_use_them_alone():
    def needed(goal):
        words = ["make", "-np", "VENV=no-such-folder", goal]
        made = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        return re.findall(r"^NEEDED := (?:no-such-folder/)?(\w*)$", made.stdout, re.MULTILINE)

    for goal in ("sft", "rehearse", "bench", "scaling", "summarize"):
        assert needed(goal) == ["installed"], goal
    for goal in ("check", "test", "chaos"):
        assert needed(goal) == ["developed"], goal
    for goal in ("help", "settings", "status", "plan"):
        assert needed(goal) == [""], goal


def test_two_commands_at_once_install_once(tmp_path):
    """Where `python -m venv` and pip only say that they were called, and take their time."""
    fake, calls, place = tmp_path / "python", tmp_path / "calls", tmp_path / "new/env"
    fake.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\nsleep 0.3\n'
        f'[ "$2" = venv ] && mkdir -p "$3/bin" && cp {fake} "$3/bin/python"\nexit 0\n'
    )
    fake.chmod(0o755)
    command = ["make", "install", f"PYTHON={fake}", f"VENV={place}"]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    made = [line.split()[1] for line in calls.read_text().splitlines() if line[:2] != "-B"]
    assert made == ["venv", "pip", "pip"]
    assert (place / "installed").exists()


@pytest.mark.parametrize("text", TEXTS)
def test_a_variable_is_text(tmp_path, text):
    (tmp_path / text).mkdir()
    same = [f"{variable}={text}" for variable in ("NAME", "DATA", "TOKENIZER")]
    printed = typed(tmp_path, "settings", "PRESET=posts", *same)
    assert printed.stderr == ""
    assert {f"data.source={text}", f"base.tokenizer={text}"} <= {*printed.stdout.splitlines()}
    one_judge = "SET=judge.kind=openai"
    printed = typed(tmp_path, "settings", f"NAME={text}", f"POLICY={text}", one_judge)
    assert f"base.checkpoint={text}" in printed.stdout.splitlines()
    printed = typed(tmp_path, "settings", "PRESET=outputs", one_judge, INPUT=text)  # environment
    assert f"outputs.file={text}" in printed.stdout.splitlines()
    assert [path.name for path in tmp_path.iterdir()] == [text]


@pytest.mark.parametrize("preset", ["posts", "smollm2", "outputs"])
def test_settings_are_shown_of_a_preset_whose_posts_are_not_given_yet(tmp_path, preset):
    printed = typed(tmp_path, "settings", f"PRESET={preset}")
    assert printed.stderr == ""
    assert "data.source=" in printed.stdout.splitlines()


@pytest.mark.parametrize("text", [text for text in TEXTS if " " not in text])
def test_a_word_of_set_is_text_and_words_are_apart(tmp_path, text):
    words = f"SET=judge.kind=openai  judge.model={text}"
    printed = typed(tmp_path, "settings", "NAME=x", words).stdout.splitlines()
    assert {f"judge.model={text}", "judge.kind=openai"} <= {*printed}
    assert not list(tmp_path.iterdir())


def test_a_dry_run_and_other_goals_quote_what_they_pass_on(tmp_path):
    hostile = "a'b;touch hacked $(touch hacked) `touch hacked`"
    names = (
        "A",
        "B",
        "DATA",
        "HUB",
        "JUDGE",
        "DIFFERENCE",
        "MAX_COST",
        "REPLACE",
        "NAME",
        "LAUNCH",
    )
    given = [f"{name}={hostile}" for name in names]
    for goal in ("compare", "publish", "summarize", "sft"):
        typed(tmp_path, "-n", goal, *given)
        typed(tmp_path, goal, *given)
    assert not (tmp_path / "hacked").exists()


def test_a_line_break_is_refused(tmp_path):
    refused = typed(tmp_path, "settings", "NAME=a\ntouch hacked #")
    assert refused.returncode == 2
    assert "NAME holds a line break: leave it out" in refused.stderr
    assert not list(tmp_path.iterdir())
