"""No control character of a text reaches a terminal; files of data keep every character."""

import json
import re
import sys

import pytest

from stages.config.error_messages import in_one_line
from stages.config.errors import HIDDEN, UserError, visible
from stages.runs.files import write_json

STEERING = "\x1b[31mred\x1b]0;title\x07\x00nul\x08\x7f\x85\x9b2J\u202eright to left\u2066\ud83d"
HOSTILE = f"a post{STEERING}\r\nand\ra line\tand ▄ é אב"
# Readers of data refuse half characters.
WITHOUT_HALF_CHARACTERS = HOSTILE.replace("\ud83d", "")


def hidden_in(text: str) -> list[str]:
    """Return what may not be shown, including what JSON or HTML spells out."""
    spelled_out = re.findall(r"(?<!\\)\\u00[01][0-9a-f]|&#(?:x1b|27|0);", text)
    return HIDDEN.findall(text) + spelled_out


def test_control_characters_are_replaced():
    shown = visible(HOSTILE)

    assert not hidden_in(shown)
    assert shown.startswith("a post�[31mred�]0;title�")
    assert shown.endswith("\nand\na line\tand ▄ é אב")


def test_plain_text_stays_as_it_is():
    text = "plain\n\ttext ✓ 👍🏽 \u200f"
    assert visible(text) == text


def test_an_error_is_one_line_without_control_characters(capsys):
    with pytest.raises(SystemExit), in_one_line():
        raise UserError(HOSTILE)

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: a post�[31mred")
    assert not hidden_in(line)


def test_a_command_prints_no_control_characters(capsys):
    with in_one_line():
        print(HOSTILE, flush=True)
        sys.stdout.write(HOSTILE)

    assert capsys.readouterr().out == f"{visible(HOSTILE)}\n{visible(HOSTILE)}"


def test_data_keep_every_character(tmp_path):
    path = tmp_path / "x.json"

    write_json(path, {"text": WITHOUT_HALF_CHARACTERS})

    assert json.loads(path.read_text(encoding="utf-8")) == {"text": WITHOUT_HALF_CHARACTERS}
