"""The documents are true: what they name exists, and no detail of the paper is left out.

Checked are files, tests, settings, links, commands,
variables, stages, switches and the paper's details. `reports/test_publish.py` checks their numbers.
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
from stages.pipeline.targets import VARIABLES as VARIABLE_TABLE
from stages.pipeline.targets import targets_by_name
from tests.lib.documents import COMMANDS, FENCE, TEXTS, make_commands

ROOT = Path(__file__).parents[1]
FRONT = TEXTS["README.md"]
PAPER = TEXTS["docs/paper-details.md"]
CHANGE = TEXTS["docs/change-it.md"]
ALL = "\n".join(TEXTS.values())
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

CODE = re.findall(r"`([^`\n]+)`", FENCE.sub("", ALL))
TYPED = [*CODE, *(line for block in FENCE.findall(ALL) for line in block.splitlines())]
DETAILS = re.findall(r"^\| (\d\d?|inherited) \|(.*)\|$", PAPER, re.MULTILINE)
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
}
SETTINGS = {f"{name}.{field}" for name, kind in SECTIONS.items() for field in kind.model_fields}

TARGETS = {*targets_by_name(), *STAGES, *(stage.target for stage in STAGES.values())}
VARIABLES = {*VARIABLE_TABLE}


# -- what is named exists --------------------------------------------------------------------------


def test_every_test_named_exists():
    named = {code for code in CODE if code.startswith("test_")}
    assert len(named) > 30
    assert named - TESTS == set()


def test_every_file_named_exists():
    pattern = r"(stages|eval|reports|tests)/[\w./-]*"
    named = {code for code in CODE if re.fullmatch(pattern, code)}
    assert len(named) > 30
    assert {code for code in named if not (ROOT / code).exists()} == set()
    for name, file in re.findall(r"`(\w+)`\sin\s`([\w/]+\.py)`", ALL):
        assert re.search(rf"^(def|class) {name}\b", (ROOT / file).read_text("utf-8"), re.M), name


def test_every_setting_named_exists():
    named = {code for code in CODE if re.fullmatch(rf"({'|'.join(SECTIONS)})\.[a-z]\w*", code)}
    assert len(named) > 60
    assert named - SETTINGS == set()


def test_every_setting_that_is_set_takes_its_value():
    pairs = {code for code in CODE if re.fullmatch(r"\w+\.\w+=\S+", code)}
    assert pairs
    for pair in pairs:
        parse_override(pair)


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_leads_to_a_file_and_a_heading(name):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXTS[name]) if "://" not in link]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = ROOT / Path(name).parent / path if path else ROOT / name
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.M) if anchor else []
        anchors = [re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings]
        assert anchor in ("", *anchors), link


def test_every_environment_and_makefile_variable_named_exists():
    sources = [path for package in ("stages", "eval") for path in (ROOT / package).glob("**/*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    environment = set(re.findall(r"\b([A-Z]+_[A-Z_]+)\b", code))
    named = {word for text in TYPED for word in re.findall(r"(?:^|\s)([A-Z][A-Z_]*)=", text)}
    named |= {text for text in CODE if re.fullmatch(r"[A-Z][A-Z_]+", text)}
    assert {"SET", "NAME", "UPSTREAM", "MAX_COST", "WANDB_PROJECT"} <= named
    elsewhere = {"LD_PRELOAD", "OMP_WAIT_POLICY", "PIP_EXTRA_INDEX_URL", "STAGES"}
    assert named - VARIABLES - environment - elsewhere == set()


# -- what is to be typed ---------------------------------------------------------------------------


def test_every_make_command_has_targets_variables_and_settings_that_exist():
    assert len(COMMANDS) > 20
    for _, *words in COMMANDS:
        given = dict(word.split("=", 1) for word in words if "=" in word)
        targets = {word for word in words if "=" not in word and not word.startswith("-")}
        assert targets, words
        assert targets <= TARGETS, words
        assert given.keys() <= VARIABLES, words
        assert given.get("PRESET", "tiny") in {*PRESETS, "my_preset.yaml"}, words
        for override in given.get("SET", "").replace("...", "facts").split():
            parse_override(override)
        assert set(given.get("ABLATIONS", "").split()) <= {*ABLATIONS, *GROUPS}, words


def test_every_command_that_changes_a_setting_is_one_that_the_pipeline_takes():
    taken = 0
    for _, *words in COMMANDS:
        given = dict(word.split("=", 1) for word in words if "=" in word)
        if "SET" not in given or "UPSTREAM" in given or "DATA" in given:
            continue
        overrides = tuple(given["SET"].split())
        name = given.get("NAME", "")
        preset = given.get("PRESET", "outputs" if "INPUT" in given else "tiny")
        overrides += (f"outputs.file={given['INPUT']}",) if "INPUT" in given else ()
        made = make_config(preset, name=name, overrides=overrides)
        assert made.overrides == overrides
        taken += 1
    assert taken > 3


def test_a_wrong_command_would_be_noticed():
    text = (
        "run `make evall SET=ppo.klcoef=1`\n```\nKEY=x make eval \\\n    NAMES='a b'   # why\n```\n"
    )
    wrong, right = make_commands(text)
    assert not {"evall"} <= TARGETS
    with pytest.raises(UserError):
        parse_override(wrong[-1].removeprefix("SET="))
    assert right == ["make", "eval", "NAMES=a b"]


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


def test_the_papers_quirks_are_told_with_their_values():
    for name, value in PAPER_QUIRKS.items():
        assert re.search(rf"\| `ppo\.{name}` \| `\w+` \| `{value}` \|", PAPER), name


def test_every_stage_is_told_with_its_module_and_target():
    for name, stage in STAGES.items():
        command = f"make {stage.target}"
        row = rf"^\| `{name}` \| {re.escape(stage.what)} \| `([\w/]+)\.py` \| `{command}` \|$"
        told = re.search(row, TEXTS["docs/quickstart.md"], re.MULTILINE)
        assert told, name
        assert told[1].replace("/", ".") == stage.module


def test_every_preset_and_every_switch_is_told():
    assert {name for name in PRESETS if f"`{name}`" not in CHANGE} == set()
    for name, ablation in ABLATIONS.items():
        assert f"| `{name}` | `{' '.join(ablation.settings)}` |" in CHANGE


def test_the_front_door_says_who_judges_and_what_was_not_run():
    assert "**not an LLM**" in FRONT
    assert "No Pythia preset has been run from start to end" in FRONT
    assert "nothing has run on several GPUs" in FRONT
