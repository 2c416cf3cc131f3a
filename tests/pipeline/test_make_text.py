"""The command line: variables reach Python as text, and what is typed wrong is one line."""

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
def test_words_of_set_are_text_and_separate(tmp_path, text):
    words = f"SET=judge.kind=openai  judge.model={text}"
    printed = typed(tmp_path, "settings", "NAME=x", words).stdout.splitlines()
    assert {f"judge.model={text}", "judge.kind=openai"} <= {*printed}
    assert not list(tmp_path.iterdir())


def test_variables_are_read_from_the_flags_of_make():
    assert variables_of_make("n -- NAME=x SET=a\\ b=$$c") == {"NAME": "x", "SET": "a b=$c"}
    assert variables_of_make("") == variables_of_make("ks") == {}


def test_the_name_of_a_machine_under_wsl_is_not_that_of_a_run(tmp_path):
    wsl = {"WSL_DISTRO_NAME": "Ubuntu", "NAME": "DESKTOP-1"}
    assert "tiny seed 44413: would run sft" in typed(tmp_path, "sft", "DRY=1", **wsl).stdout
    ours = typed(tmp_path, "sft", "DRY=1", "NAME=named", "SEED=5", **wsl).stdout
    assert "named seed 5" in ours
    assert "mine seed 44413" in typed(tmp_path, "sft", "DRY=1", NAME="mine").stdout


# -- what is refused -------------------------------------------------------------------------------

REFUSED: list[tuple[list[str], str]] = [  # words after `make`, the line
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


@pytest.mark.parametrize(("words", "line"), REFUSED)
def test_what_is_typed_wrong_is_one_line_before_anything_runs(tmp_path, words, line):
    refused = typed(tmp_path, *words)
    assert refused.returncode == 2
    assert line in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not list(tmp_path.iterdir())


def test_an_empty_variable_is_none(tmp_path):
    assert typed(tmp_path, "sft", "DRY=1", "SEED=1", "SEEDS=").returncode == 0


def test_what_the_environment_happens_to_contain_is_no_mistake(tmp_path):
    assert typed(tmp_path, "sft", "DRY=1", JOB="nightly", SETT="1").returncode == 0


def test_every_command_of_the_documents_gives_what_its_target_reads():
    from stages.pipeline.variables import check_variables

    for _, *words in COMMANDS:
        targets = [word for word in words if "=" not in word and not word.startswith("-")]
        check_variables(targets, dict(word.split("=", 1) for word in words if "=" in word))


# -- looking ---------------------------------------------------------------------------------------


def test_dry_says_what_would_run_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("stages.config.paths.RUNS", tmp_path / "runs")
    config = named("sft.epochs=3")
    for stage in EVALUATED:
        finish(config, stage)
    before = everything(tmp_path)
    done = typed(tmp_path, "dpo", "eval", "NAME=mine", "SET=sft.epochs=3", "DRY=1")
    planned = done.stdout.splitlines()
    assert len(planned) == 6
    assert planned[0].startswith("mine seed 44413: would run dpo (not ")
    assert planned[1].startswith("mine seed 44413: would run summaries (if the result of dpo ")
    refused = typed(tmp_path, "ppo", "NAME=mine", "SET=sft.epochs=3 ppo.lam=0.5", "DRY=1")
    assert refused.returncode == 2
    assert "ppo.lam: ran with 0.95, now 0.5" in refused.stderr
    assert everything(tmp_path) == before


def test_a_command_with_nothing_to_do_says_so_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("stages.config.paths.RUNS", tmp_path / "runs")
    for stage in EVALUATED:
        finish(named("sft.epochs=3"), stage)
    before = everything(tmp_path)
    again = typed(tmp_path, "sft", "rm", "ppo", "eval", "NAME=mine")  # with its own settings
    assert "mine seed 44413: nothing to do, all 10 stages have finished" in again.stdout
    assert everything(tmp_path) == before


LOADS = """
import sys
from stages.__main__ import main
main(sys.argv[1:])
loaded = [name for name in ("torch", "transformers", "accelerate") if name in sys.modules]
assert not loaded, loaded
"""


@pytest.mark.parametrize(
    "words", [["status"], ["sft", "DRY=1"], ["help"], ["settings"], ["sft", "rm", "ppo", "eval"]]
)
def test_looking_and_a_command_with_nothing_to_do_load_no_torch(tmp_path, monkeypatch, words):
    monkeypatch.setattr("stages.config.paths.RUNS", tmp_path / "runs")
    for stage in EVALUATED:
        finish(named(), stage)
    name = [] if words == ["help"] else ["NAME=mine"]
    done = subprocess.run(
        [sys.executable, "-c", LOADS, *words, *name],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_help_names_every_target_variable_and_preset_in_80_columns():
    text = "\n".join(help_lines())
    assert all(len(line) <= 80 for line in help_lines())
    for target in {*targets_by_name(), *(stage.target for stage in STAGES.values())}:
        assert f"\n  {target} " in text, target
    for name in PRESETS:
        assert name in text.split("presets (")[1].split()
    for variable in VARIABLES:
        assert f"\n  {variable} " in text, variable


def test_help_needs_only_the_standard_library():
    """Without site-packages, as before installation."""
    words = [sys.executable, "-S", "-m", "stages.pipeline.targets"]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "make sft rm ppo eval" in printed.stdout
    assert "\n  MAX_COST " in printed.stdout


# -- make ------------------------------------------------------------------------------------------


def test_the_makefile_lists_the_targets_that_make_does_itself():
    lines = (ROOT / "Makefile").read_text().splitlines()
    (listed,) = [line.split()[2:] for line in lines if line.startswith("MAKE_TARGETS := ")]
    assert {*listed} == {"help", *DONE_BY_MAKE}


def test_make_starts_one_process_for_all_targets(tmp_path):
    printed = typed(tmp_path, "-n", "sft", "rm", "ppo", "eval", "NAME=x").stdout
    assert [line for line in printed.splitlines() if "stages" in line] == [
        f"{sys.executable} -m stages sft rm ppo eval"
    ]


def installs(target: str) -> set[str]:
    words = ["make", "-n", "VENV=no-such-folder", target]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout
    return set(re.findall(r"touch no-such-folder/(\w+)", printed))


def test_make_installs_first_and_developers_tools_only_for_developers():
    assert installs("help") == set()
    for target in ("sft", "scaling", "status"):
        assert installs(target) == {"installed"}, target
    for target in ("check", "test", "simulations"):
        assert installs(target) == {"installed", "developed"}, target


def test_two_commands_at_once_install_once(tmp_path):
    """Python and pip only say that they were called, and take their time."""
    fake = tmp_path / "python"
    calls = tmp_path / "calls"
    place = tmp_path / "env"
    fake.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\nsleep 0.3\n'
        f'[ "$2" = venv ] && mkdir -p "$3/bin" && cp {fake} "$3/bin/python"\nexit 0\n'
    )
    fake.chmod(0o755)
    command = ["make", "install", f"PYTHON={fake}", f"VENV={place}"]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert [line.split()[1] for line in calls.read_text().splitlines()] == ["venv", "pip", "pip"]
    assert (place / "installed").exists()
