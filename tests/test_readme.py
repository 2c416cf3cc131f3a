"""The documents are true: what they name exists, and no detail of the paper is left out.

`reports/test_publish.py` checks their numbers.
"""

import re
from pathlib import Path

import pytest

from stages.config.command_line import make_config
from stages.config.config import SECTIONS
from stages.config.errors import UserError
from stages.config.ppo import PAPER_QUIRKS
from stages.config.presets import ABLATIONS, GROUPS, PRESETS
from stages.config.stages import STAGES
from stages.config.values import parse_override
from stages.pipeline.targets import VARIABLES, targets_by_name
from tests.lib.documents import (
    COMMANDS,
    TEXTS,
    MakeCommand,
    code_spans,
    fenced_lines,
    make_commands,
)

ROOT = Path(__file__).parents[1]
FRONT = TEXTS["README.md"]
PAPER = TEXTS["docs/paper-details.md"]
CHANGE = TEXTS["docs/change-it.md"]
ALL = "\n".join(TEXTS.values())

CODE = code_spans(ALL)
DETAILS = re.findall(r"^\| (\d\d?|inherited) \|(.*)\|$", PAPER, re.MULTILINE)


def all_settings() -> set[str]:
    """The full name of every setting, such as `ppo.kl_coef`."""
    names = set()
    for section, model in SECTIONS.items():
        for field in model.model_fields:
            names.add(f"{section}.{field}")
    return names


def all_tests() -> set[str]:
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        names.update(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    return names


def all_targets() -> set[str]:
    return {*targets_by_name(), *STAGES, *(stage.target for stage in STAGES.values())}


# -- what is named exists --------------------------------------------------------------------------


def test_every_test_named_exists():
    named = {code for code in CODE if code.startswith("test_")}
    assert len(named) > 30
    assert named - all_tests() == set()


def test_every_file_named_exists():
    pattern = r"(stages|eval|reports|tests)/[\w./-]*"
    named = {code for code in CODE if re.fullmatch(pattern, code)}
    assert len(named) > 30
    assert {code for code in named if not (ROOT / code).exists()} == set()


def test_every_function_that_is_named_with_its_file_exists():
    for name, file in re.findall(r"`(\w+)`\sin\s`([\w/]+\.py)`", ALL):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {name}\b", text, re.MULTILINE), f"{name} in {file}"


def test_every_setting_named_exists():
    named = {code for code in CODE if re.fullmatch(rf"({'|'.join(SECTIONS)})\.[a-z]\w*", code)}
    assert len(named) > 60
    assert named - all_settings() == set()


def test_every_setting_that_is_set_takes_its_value():
    overrides = {code for code in CODE if re.fullmatch(r"\w+\.\w+=\S+", code)}
    assert overrides
    for override in overrides:
        parse_override(override)


def anchors_of(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    anchors = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        anchors.add(re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-"))
    return anchors


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_leads_to_a_file_and_a_heading(name):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXTS[name]) if "://" not in link]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = ROOT / name
        if path:
            target = target.parent / path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target.read_text(encoding="utf-8")), link


# Variables of other programs, and a table in the code.
OTHER_VARIABLES = {"LD_PRELOAD", "OMP_WAIT_POLICY", "PIP_EXTRA_INDEX_URL", "STAGES"}


def test_every_environment_and_makefile_variable_named_exists():
    named = {code for code in CODE if re.fullmatch(r"[A-Z][A-Z_]+", code)}
    for text in [*CODE, *fenced_lines(ALL)]:
        named.update(re.findall(r"(?:^|\s)([A-Z][A-Z_]*)=", text))

    in_code: set[str] = set()
    for package in ("stages", "eval"):
        for path in (ROOT / package).rglob("*.py"):
            in_code.update(re.findall(r"\b([A-Z]+_[A-Z_]+)\b", path.read_text(encoding="utf-8")))

    assert {"SET", "NAME", "UPSTREAM", "MAX_COST", "WANDB_PROJECT"} <= named
    assert named - VARIABLES.keys() - in_code - OTHER_VARIABLES == set()


# -- commands --------------------------------------------------------------------------------------


def test_the_documents_have_many_commands():
    assert len(COMMANDS) > 20


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_make_command_has_targets_variables_and_settings_that_exist(command):
    assert command.targets
    assert set(command.targets) <= all_targets()
    variables = command.variables
    assert variables.keys() <= VARIABLES.keys()
    assert variables.get("PRESET", "tiny") in {*PRESETS, "my_preset.yaml"}
    for override in variables.get("SET", "").replace("...", "facts").split():
        parse_override(override)
    assert set(variables.get("ABLATIONS", "").split()) <= {*ABLATIONS, *GROUPS}


def changes_settings(command: MakeCommand) -> bool:
    """Whether a command changes settings, and needs neither another run nor a file of data."""
    variables = command.variables
    return "SET" in variables and "UPSTREAM" not in variables and "DATA" not in variables


CHANGING_COMMANDS = [command for command in COMMANDS if changes_settings(command)]


def test_the_documents_have_commands_that_change_settings():
    assert len(CHANGING_COMMANDS) > 3


@pytest.mark.parametrize("command", CHANGING_COMMANDS, ids=str)
def test_every_command_that_changes_a_setting_is_one_that_the_pipeline_takes(command):
    variables = command.variables
    preset = variables.get("PRESET", "tiny")
    overrides = variables["SET"].split()
    if "INPUT" in variables:
        preset = variables.get("PRESET", "outputs")
        overrides.append(f"outputs.file={variables['INPUT']}")

    config = make_config(preset, name=variables.get("NAME", ""), overrides=tuple(overrides))

    assert list(config.overrides) == overrides


def test_commands_are_found_in_code_and_fences_without_comments():
    text = (
        "run `make evall SET=ppo.klcoef=1`\n```\nKEY=x make eval \\\n    NAMES='a b'   # why\n```\n"
    )
    wrong, right = make_commands(text)
    assert right.words == ["eval", "NAMES=a b"]
    assert right.targets == ["eval"]
    assert right.variables == {"NAMES": "a b"}
    assert wrong.targets == ["evall"]
    assert wrong.variables == {"SET": "ppo.klcoef=1"}


def test_a_wrong_command_would_be_noticed():
    assert "evall" not in all_targets()
    with pytest.raises(UserError):
        parse_override("ppo.klcoef=1")


# -- what must not be left out ---------------------------------------------------------------------


def test_all_25_details_of_the_paper_are_in_the_table_with_a_place_and_a_test_or_setting():
    numbers = [int(number) for number, _ in DETAILS if number != "inherited"]
    assert numbers == list(range(1, 26))
    for number, row in DETAILS:
        assert re.search(r"`(stages|eval)/[\w/]+\.py`", row), number
        assert "`test_" in row or re.search(r"`\w+\.\w+` *$", row), number


@pytest.mark.parametrize("name", SECTIONS["ppo"].model_fields)
def test_every_setting_of_ppo_is_explained(name):
    assert f"`ppo.{name}`" in ALL or f"`ppo.{name}=" in ALL


@pytest.mark.parametrize(("name", "value"), PAPER_QUIRKS.items(), ids=PAPER_QUIRKS)
def test_the_papers_quirks_are_in_the_table_with_their_values(name, value):
    assert re.search(rf"\| `ppo\.{name}` \| `\w+` \| `{value}` \|", PAPER)


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_is_in_the_table_with_its_module_and_target(name):
    stage = STAGES[name]
    what = re.escape(stage.what)
    row = rf"^\| `{name}` \| {what} \| `([\w/]+)\.py` \| `make {stage.target}` \|$"
    match = re.search(row, TEXTS["docs/quickstart.md"], re.MULTILINE)
    assert match is not None
    assert match[1].replace("/", ".") == stage.module


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_named(name):
    assert f"`{name}`" in CHANGE


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_is_in_the_table_with_its_settings(name):
    assert f"| `{name}` | `{' '.join(ABLATIONS[name].settings)}` |" in CHANGE


def test_the_readme_says_who_judges_and_what_was_not_run():
    assert "**not an LLM**" in FRONT
    assert "No Pythia preset has been run from start to end" in FRONT
    assert "nothing has run on several GPUs" in FRONT
