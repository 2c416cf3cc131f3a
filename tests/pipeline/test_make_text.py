"""The command line: variables reach Python as text, and a mistake is refused in one line."""

import re
import subprocess
import sys

import pytest

from stages.config.presets import PRESETS
from stages.config.stages import STAGES
from stages.pipeline.targets import DONE_BY_MAKE, VARIABLES, help_lines, targets_by_name
from stages.pipeline.variables import variables_of_make
from tests.lib.documents import COMMANDS
from tests.lib.pipeline import EVALUATED, everything, finish, named, typed
from tests.lib.places import ROOT

TEXTS = (
    "two words",
    "it's",
    'a "b" c',
    "a;touch hacked",
    "a`touch hacked`",
    "a$(touch hacked)",
    "a$$(touch hacked)",
    "$(shell touch hacked)",
    "${HOME}",
    "a&touch hacked",
    "a|touch hacked",
    "a>hacked",
    "a\\b",
    "*",
    "~",
    "#x",
    "-x",
    "--help",
    "%",
    "grün  and spaced",
)


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_a_variable_reaches_python_as_it_was_typed(tmp_path, text):
    (tmp_path / text).mkdir()
    printed = typed(tmp_path, "settings", "PRESET=posts", f"DATA={text}", f"NAME={text}")
    assert printed.stderr == ""
    assert f"data.source={text}" in printed.stdout.splitlines()
    assert [path.name for path in tmp_path.iterdir()] == [text]


@pytest.mark.parametrize("text", ["it's", "$(shell touch hacked)", "grün  and spaced"])
def test_a_variable_of_the_environment_is_text_too(tmp_path, text):
    printed = typed(tmp_path, "settings", "PRESET=outputs", "SET=judge.kind=openai", INPUT=text)
    assert f"outputs.file={text}" in printed.stdout.splitlines()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", [text for text in TEXTS if " " not in text])
def test_each_setting_of_set_is_text(tmp_path, text):
    settings = f"SET=judge.kind=openai  judge.model={text}"
    printed = typed(tmp_path, "settings", "NAME=x", settings).stdout.splitlines()
    assert f"judge.model={text}" in printed
    assert "judge.kind=openai" in printed
    assert not list(tmp_path.iterdir())


def test_variables_are_read_from_the_flags_of_make():
    assert variables_of_make("n -- NAME=x SET=a\\ b=$$c") == {"NAME": "x", "SET": "a b=$c"}
    assert variables_of_make("ks") == {}
    assert variables_of_make("") == {}


def test_the_name_of_the_environment_is_that_of_the_run(tmp_path):
    assert "mine seed 44413" in typed(tmp_path, "sft", "DRY=1", NAME="mine").stdout


def test_under_wsl_the_name_of_the_environment_is_that_of_the_machine(tmp_path):
    wsl = {"WSL_DISTRO_NAME": "Ubuntu", "NAME": "DESKTOP-1"}
    without_name = typed(tmp_path, "sft", "DRY=1", **wsl).stdout
    with_name = typed(tmp_path, "sft", "DRY=1", "NAME=named", "SEED=5", **wsl).stdout
    assert "tiny seed 44413: would run sft" in without_name
    assert "named seed 5" in with_name


# -- what is refused -------------------------------------------------------------------------------

REFUSED: list[tuple[list[str], str]] = [  # the words after `make`, and the error
    (["sft", "SEED=one"], "SEED=one is not a whole number"),
    (["ppo", "SET=ppo.kl_coef=0.1"], "ppo.kl_coef=0.1 changes preset tiny: name the run"),
    (["sft", "SETT=1"], "unknown make variable 'SETT': did you mean SET"),
    (["sft", "NAME=it's; `a` $(b)/"], "names no run: give the name of a folder"),
    (["settings", "NAME=a\ntouch hacked #"], "NAME contains a line break: leave it out"),
    (["sft", "rm", "pppo"], "unknown target 'pppo': did you mean ppo"),
    (["eval", "MAX_COST=lots"], "MAX_COST=lots is not above 0: give US dollars"),
    (["sft", "DRY=yes"], "DRY=yes is neither 1 nor 0: give DRY=1"),
    (["sft", "GPUS=0"], "GPUS=0 is below 1: give the number of GPUs"),
    (["sft", "GPUS=2", "LAUNCH=srun"], "LAUNCH already sets the number of processes"),
    (["sft", "study"], "study cannot be combined with other targets"),
    (["sft", "NAME=x", "SET=ppo.lam=1 ppo.kl_coef=1 ppo.lam=0.9"], "ppo.lam is set twice"),
    (["publish"], "name the pages"),
    (["sft", "eval", "NAME=x", "SET=judge.kind=openai"], "without a server"),
    # What a target does not read would do nothing.
    (["ppo", "eval", "SEEDS=1"], "ppo eval does not read SEEDS: a run takes SEED"),
    (["sft", "rm", "ppo", "GPU=8"], "sft rm ppo does not read GPU: the number of GPUs is GPUS"),
    (["compare", "UPSTREAM=tiny"], "compare does not read UPSTREAM: runs keep the settings"),
    (["study", "SEED=1"], "study does not read SEED: a grid takes SEEDS"),
    (["ppo", "POST=$(shell touch hacked)"], "ppo does not read POST: it is for summarize"),
]


@pytest.mark.parametrize(("words", "line"), REFUSED, ids=[line for _, line in REFUSED])
def test_a_mistake_is_refused_in_one_line_before_anything_runs(tmp_path, words, line):
    refused = typed(tmp_path, *words)
    assert refused.returncode == 2
    assert line in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not list(tmp_path.iterdir())


def test_an_empty_variable_counts_as_not_given(tmp_path):
    assert typed(tmp_path, "sft", "DRY=1", "SEED=1", "SEEDS=").returncode == 0


def test_unrelated_variables_of_the_environment_are_ignored(tmp_path):
    assert typed(tmp_path, "sft", "DRY=1", JOB="nightly", SETT="1").returncode == 0


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_command_of_the_documents_sets_only_what_its_targets_read(command):
    from stages.pipeline.variables import check_variables

    check_variables(command.targets, command.variables)


# -- what would run --------------------------------------------------------------------------------


@pytest.fixture
def finished_run(runs):
    """A folder in which the run `mine`, with another number of epochs, has finished."""
    for stage in EVALUATED:
        finish(named("sft.epochs=3"), stage)
    return runs.parent


def test_dry_says_what_would_run_and_writes_nothing(finished_run):
    before = everything(finished_run)

    done = typed(finished_run, "dpo", "eval", "NAME=mine", "SET=sft.epochs=3", "DRY=1")

    plan = done.stdout.splitlines()
    assert len(plan) == 6
    assert plan[0].startswith("mine seed 44413: would run dpo (not ")
    assert plan[1].startswith("mine seed 44413: would run summaries (if the result of dpo ")
    assert everything(finished_run) == before


def test_dry_refuses_what_the_command_would_refuse(finished_run):
    before = everything(finished_run)

    refused = typed(finished_run, "ppo", "NAME=mine", "SET=sft.epochs=3 ppo.lam=0.5", "DRY=1")

    assert refused.returncode == 2
    assert "ppo.lam: ran with 0.95, now 0.5" in refused.stderr
    assert everything(finished_run) == before


def test_a_command_with_nothing_to_do_says_so_and_writes_nothing(finished_run):
    before = everything(finished_run)

    done = typed(finished_run, "sft", "rm", "ppo", "eval", "NAME=mine")  # with its own settings

    assert "mine seed 44413: nothing to do, all 10 stages have finished" in done.stdout
    assert everything(finished_run) == before


LOADS_NO_TORCH = """
import sys
from stages.__main__ import main
main(sys.argv[1:])
loaded = [name for name in ("torch", "transformers", "accelerate") if name in sys.modules]
assert not loaded, loaded
"""


@pytest.mark.parametrize(
    "words",
    [
        ["help"],
        ["status", "NAME=mine"],
        ["settings", "NAME=mine"],
        ["sft", "NAME=mine", "DRY=1"],
        ["sft", "rm", "ppo", "eval", "NAME=mine"],
    ],
    ids=["help", "status", "settings", "dry", "nothing to do"],
)
def test_a_command_that_runs_no_stage_loads_no_torch(finished_run, words):
    done = subprocess.run(
        [sys.executable, "-c", LOADS_NO_TORCH, *words],
        cwd=finished_run,
        env={"PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_help_is_80_columns_wide():
    assert max(len(line) for line in help_lines()) <= 80


def test_help_names_every_target_variable_and_preset():
    text = "\n".join(help_lines())
    stage_targets = {stage.target for stage in STAGES.values()}
    for target in targets_by_name().keys() | stage_targets:
        assert f"\n  {target} " in text, target
    for variable in VARIABLES:
        assert f"\n  {variable} " in text, variable
    _, _, presets = text.partition("presets (")
    for name in PRESETS:
        assert name in presets.split()


def test_help_needs_only_the_standard_library():
    without_packages = [sys.executable, "-S", "-m", "stages.pipeline.targets"]
    done = subprocess.run(without_packages, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "make sft rm ppo eval" in done.stdout
    assert "\n  MAX_COST " in done.stdout


# -- make ------------------------------------------------------------------------------------------


def test_the_makefile_lists_the_targets_that_make_does_itself():
    lines = (ROOT / "Makefile").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("MAKE_TARGETS := ")]
    targets = line.removeprefix("MAKE_TARGETS := ").split()
    assert set(targets) == {"help", *DONE_BY_MAKE}


def test_make_starts_one_process_for_all_targets(tmp_path):
    printed = typed(tmp_path, "-n", "sft", "rm", "ppo", "eval", "NAME=x").stdout
    commands = [line for line in printed.splitlines() if "stages" in line]
    assert commands == [f"{sys.executable} -m stages sft rm ppo eval"]


@pytest.mark.parametrize(
    ("target", "installed"),
    [
        ("help", set()),
        ("sft", {"installed"}),
        ("scaling", {"installed"}),
        ("status", {"installed"}),
        ("check", {"installed", "developed"}),
        ("test", {"installed", "developed"}),
        ("simulations", {"installed", "developed"}),
    ],
)
def test_make_installs_first_and_the_developers_tools_only_for_developers(target, installed):
    command = ["make", "-n", "VENV=no-such-folder", target]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert set(re.findall(r"touch no-such-folder/(\w+)", printed)) == installed


# Notes its arguments, takes its time, and copies itself into a new virtual environment.
FAKE_PYTHON = """#!/bin/sh
echo "$@" >> {calls}
sleep 0.3
[ "$2" = venv ] && mkdir -p "$3/bin" && cp {python} "$3/bin/python"
exit 0
"""


def test_two_commands_at_the_same_time_install_once(tmp_path):
    python = tmp_path / "python"
    calls = tmp_path / "calls"
    environment = tmp_path / "env"
    python.write_text(FAKE_PYTHON.format(calls=calls, python=python))
    python.chmod(0o755)
    command = ["make", "install", f"PYTHON={python}", f"VENV={environment}"]

    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    second = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)

    assert first.wait() == 0
    assert second.wait() == 0
    modules = [line.split()[1] for line in calls.read_text().splitlines()]
    assert modules == ["venv", "pip", "pip"]
    assert (environment / "installed").exists()
