"""The README is true: what it names exists, and no detail of the paper is left out."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from stages.config import SECTIONS
from stages.ppo_settings import PAPER_QUIRKS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`\n]+)`", README)
DETAILS = re.findall(r"^\| (\d\d?|inherited) \|(.*)\|$", README, re.MULTILINE)
TESTS = {
    name
    for path in (ROOT / "tests").glob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
}
SETTINGS = {f"{name}.{one.name}" for name, kind in SECTIONS.items() for one in fields(kind)}


def test_every_test_named_exists():
    named = {one for one in CODE if one.startswith("test_")}
    assert len(named) > 30
    assert named - TESTS == set()


def test_every_file_named_exists():
    named = {one for one in CODE if re.fullmatch(r"(stages|eval|reports|tests)/[\w./-]+", one)}
    assert len(named) > 15
    assert {one for one in named if not (ROOT / one).exists()} == set()


def test_every_setting_named_exists():
    named = {one for one in CODE if re.fullmatch(rf"({'|'.join(SECTIONS)})\.[a-z]\w*", one)}
    assert len(named) > 30
    assert {one for one in named if one not in SETTINGS and one != "ppo.optimize"} == set()


def test_every_link_leads_to_a_file():
    links = [one for one in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in one]
    assert links
    assert [one for one in links if not (ROOT / one).exists()] == []


def test_all_25_details_of_the_paper_are_in_the_table_with_a_place_and_a_test_or_setting():
    numbers = [int(number) for number, _ in DETAILS if number != "inherited"]
    assert numbers == list(range(1, 26))
    for number, row in DETAILS:
        assert re.search(r"`(stages|eval)/\w+\.py`", row), number
        assert "`test_" in row or re.search(r"`\w+\.\w+` *$", row), number


@pytest.mark.parametrize("name", [one.name for one in fields(SECTIONS["ppo"])])
def test_every_setting_of_ppo_is_explained(name):
    memory_of_a_run = {"samples_every", "batch_size", "num_ppo_epochs", "num_minibatches"}
    assert f"`ppo.{name}`" in README or name in memory_of_a_run or f"ppo.{name}=" in README


def test_the_papers_quirks_are_told_with_their_values():
    for name, value in PAPER_QUIRKS.items():
        assert re.search(rf"\| `ppo\.{name}` \| `\w+` \| `{value}` \|", README), name
