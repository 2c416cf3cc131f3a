"""What stands in a make variable is text: neither make nor the shell expands it or splits it."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.test_pipeline import typed
from tests.test_readme import COMMANDS

ROOT = Path(__file__).parents[1]
TEXTS = (
    *("two words", "it's", 'a "b" c', "a;touch hacked", "a`touch hacked`", "a$(touch hacked)"),
    *("a$$(touch hacked)", "$(shell touch hacked)", "${HOME}", "a&touch hacked", "a|touch hacked"),
    *("a>hacked", "a\\b", "*", "~", "#x", "-x", "--help", "%", "grün  and spaced"),
)


def test_tools_for_developers_are_installed_by_the_goals_that_use_them_alone():
    def needed(goal):
        words = ["make", "-np", "VENV=no-such-folder", goal]
        made = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        return re.findall(r"^NEEDED := (?:no-such-folder/)?(\w*)$", made.stdout, re.MULTILINE)

    for goal in ("sft", "rehearse", "bench", "scaling", "summarize"):
        assert needed(goal) == ["installed"], goal
    for goal in ("check", "test", "simulations"):
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
    given = [f"{name}={hostile}" for name in ("DATA", "JUDGE", "REPLACE", "NAME")]
    for goal in ("compare", "publish", "summarize", "sft"):
        typed(tmp_path, "-n", goal, *given)
        typed(tmp_path, goal, *given)
    assert not (tmp_path / "hacked").exists()


REFUSED: list[tuple[str, str]] = [  # words after `make`, the line
    ("sft|SEED=one", "invalid int value: 'one'"),
    ("ppo|SET=ppo.kl_coef=0.1", "ppo.kl_coef=0.1 needs a run name of its own"),
    ("sft|SETT=1", "unknown make variable 'SETT': did you mean SET"),
    ("sft|NAME=it's; `a` $(b)/", "name must be the name of a folder"),
    ("settings|NAME=a\ntouch hacked #", "NAME holds a line break: leave it out"),
    ("sft|rm|pppo", "unknown goal 'pppo'"),
    ("eval|MAX_COST=lots", "MAX_COST=lots: give dollars above 0"),
    ("sft|GPUS=0", "GPUS=0 NODES=1: give the numbers"),
    ("sft|study", "study stands alone"),
    ("sft|NAME=x|SET=ppo.lam=1 ppo.kl_coef=1 ppo.lam=0.9", "ppo.lam is set twice: leave one out"),
    ("publish", "name the pages"),
    ("sft|eval|NAME=x|SET=judge.kind=openai", "without a server: SET=judge.kind=reward_model"),
    ("ppo|PRESET=smollm2|DATA=.", "is not there: run `make smollm`"),
    # What a goal does not read would do nothing.
    ("ppo|eval|SEEDS=1", "SEEDS is for study ablations algorithms: one run takes SEED"),
    ("sft|rm|ppo|GPU=8", "GPU is for plan: the number of cards is GPUS"),
    ("compare|UPSTREAM=tiny", "compare takes no UPSTREAM: runs have the settings"),
    ("study|SEED=1", "study takes no SEED: give SEEDS"),
    ("check|test|NAME=x", "check test takes no NAME: it reads none"),
    ("ppo|POST=$(shell touch hacked)", "POST is for summarize: leave it out"),
]


@pytest.mark.parametrize(("words", "line"), REFUSED)
def test_what_is_typed_wrong_is_one_line_before_anything_runs(tmp_path, words, line):
    refused = typed(tmp_path, *words.split("|"))
    assert refused.returncode == 2
    assert line in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    ["sft SEED=1 SEEDS=", "study SEEDS=1 PRESETS=tiny JOB=sft", "plan PRESET=tiny", "help NAME=x"],
)
def test_what_the_goal_reads_is_taken_and_so_is_what_is_empty(tmp_path, monkeypatch, words):
    monkeypatch.setenv("JOB", "nightly")  # what the environment happens to hold
    taken = typed(tmp_path, "-n", *words.split())
    assert taken.returncode == 0, taken.stderr


def test_the_name_of_a_machine_under_wsl_is_not_that_of_a_run(tmp_path):
    wsl = {"WSL_DISTRO_NAME": "Ubuntu", "NAME": "DESKTOP-1"}
    assert "tiny seed 44413: would make sft" in typed(tmp_path, "-n", "sft", **wsl).stdout
    assert "named seed 5" in typed(tmp_path, "-n", "sft", "NAME=named", "SEED=5", **wsl).stdout
    assert "mine seed 44413" in typed(tmp_path, "-n", "sft", NAME="mine").stdout


def test_no_command_of_the_documents_gives_what_its_goal_does_not_read(tmp_path):
    for _, *words in COMMANDS:
        if any(re.match("[A-Z_]+=", word) for word in words):
            checked = typed(tmp_path, "-n", *words, "PYTHON=true")
            assert "error" not in checked.stderr, (words, checked.stderr)
