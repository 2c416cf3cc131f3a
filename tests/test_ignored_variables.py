"""A make variable that a goal does not read is refused with the right one: it would do nothing."""

import re

import pytest

from stages.goals import VARIABLES, help_lines
from stages.running.progress import COLUMNS
from tests.test_make_text import typed
from tests.test_readme import COMMANDS

# What is typed, and what the line says.
REFUSED = [
    ("ppo eval SEEDS=1", "SEEDS is for study ablations rivals: one run takes SEED."),
    ("compare SEEDS=1", "one run takes SEED."),
    ("ppo PRESETS=tiny", "PRESETS is for study: one run takes PRESET."),
    ("sft JOB=ppo", "JOB is for study: name the goals themselves."),
    ("rivals ABLATIONS=dropout", "ABLATIONS is for ablations: leave it out."),
    ("ablations PENALTIES=0.1", "PENALTIES is for rivals: leave it out."),
    ("sft rm ppo GPU=8", "GPU is for plan: the number of cards is GPUS."),
    ("compare NAMES=tiny", "NAMES is for scaling: one run takes NAME."),
    ("eval RUNS=3", "RUNS is for compare bench: one run takes NAME."),
    ("summarize SET=eval.temperature=1", "summarize takes no SET: runs have the settings"),
    ("compare UPSTREAM=tiny", "compare takes no UPSTREAM: runs have the settings"),
    ("publish PRESET=tiny-l", "publish takes no PRESET: name the runs."),
    ("ppo ID=x", "ID is for summarize: leave it out."),
    ("study SEED=1", "study takes no SEED: give SEEDS."),
    ("ablations SEED=5", "ablations takes no SEED: give SEEDS."),
    ("rivals SEED=5", "rivals takes no SEED: give SEEDS."),
    ("study PRESET=tiny", "study takes no PRESET: give PRESETS."),
    ("plan PRESET=tiny SEEDS=2", "SEEDS is for study ablations rivals: one run takes SEED."),
    ("compare NODES=2", "compare takes no NODES: it is one process."),
    ("GPUS=2", "help takes no GPUS: it is one process."),
    ("scaling NAME=foo", "scaling takes no NAME: it reads NAMES JUDGE."),
    ("status SEED=3", "status takes no SEED: it reads NAME."),
    ("publish NAME=x SEED=3", "publish takes no SEED: it reads PAGES JUDGE."),
    ("compare RUNS=a NAME=x", "compare takes no NAME: it reads RUNS JUDGE."),
    ("check test NAME=x", "check test takes no NAME: it reads none."),
]

REFUSABLE = """A B ABLATIONS CHECK DATA DIFFERENCE DIRECT ENGINE ERRORS FILE GPU GPUS HUB ID INPUT
    INTERACTIVE JOB JUDGE JUDGES LAUNCH MAX_COST MFU NAME NAMES NODES PAGES PAIRS PENALTIES POLICY
    POST PRESET PRESETS PRICE_PER_HOUR PUBLIC REPLACE REWARD_MODEL RUNS SEED SEEDS SET SHAPES
    TEMPERATURE TOKENIZER UPSTREAM"""


@pytest.mark.parametrize(("words", "line"), REFUSED)
def test_a_variable_that_the_goal_does_not_read_is_refused(tmp_path, words, line):
    refused = typed(tmp_path, *words.split())
    assert refused.returncode == 2
    assert line.rstrip(".") in refused.stderr
    assert not list(tmp_path.iterdir())


def test_a_post_that_is_refused_is_text_all_the_same(tmp_path):
    refused = typed(tmp_path, "ppo", "POST=$(shell touch hacked)")
    assert "POST is for summarize: leave it out" in refused.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        "sft SEED=1 SEEDS=",
        "study SEEDS=1 PRESETS=tiny JOB=sft",
        "plan PRESET=tiny SEED=1",
        "status SEED=",
        "help NAME=x",
    ],
)
def test_what_the_goal_reads_is_taken_and_so_is_what_is_empty(tmp_path, words):
    taken = typed(tmp_path, "-n", *words.split())
    assert taken.returncode == 0, taken.stderr


def test_what_the_environment_happens_to_hold_is_not_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("JOB", "nightly")
    assert typed(tmp_path, "-n", "sft").returncode == 0


def test_the_name_of_a_machine_under_wsl_is_not_that_of_a_run(tmp_path):
    wsl = {"WSL_DISTRO_NAME": "Ubuntu", "NAME": "DESKTOP-1"}
    looked = typed(tmp_path, "-n", "sft", **wsl)
    assert "tiny seed 44413: would make sft" in looked.stdout
    assert "named seed 44413" in typed(tmp_path, "-n", "sft", "NAME=named", **wsl).stdout
    assert "own seed 44413" in typed(tmp_path, "-n", "sft", NAME="own").stdout


def test_the_seed_of_one_run_is_the_presets_where_none_is_given(tmp_path):
    assert "tiny seed 44413: would make sft" in typed(tmp_path, "-n", "sft").stdout
    assert "tiny seed 5: would make sft" in typed(tmp_path, "-n", "sft", "SEED=5").stdout


def test_no_command_of_the_documents_gives_what_its_goal_does_not_read(tmp_path):
    given = re.compile("|".join(f"{name}=" for name in REFUSABLE.split()))
    for _, *words in COMMANDS:
        if any(given.match(word) for word in words):
            checked = typed(tmp_path, "-n", *words, "PYTHON=true")
            assert "error" not in checked.stderr, (words, checked.stderr)


def test_help_promises_no_seeds_to_one_run():
    assert "SEEDS" not in VARIABLES["SEED"].what
    for goal in ("study", "ablations", "rivals"):
        assert goal in VARIABLES["SEEDS"].what
    assert max(map(len, help_lines())) <= COLUMNS
