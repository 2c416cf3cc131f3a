"""No control character of a text reaches a terminal, a page, its Markdown or its tables."""

import json
import re
import sys

import pytest

from stages.config.error_messages import in_one_line
from stages.config.errors import HIDDEN, UserError, visible
from stages.runs.files import write_json

STEERING = "\x1b[31mred\x1b]0;title\x07\x00nul\x08\x7f\x85\x9b2J\u202eright to left\u2066\ud83d"
HOSTILE = f"a post{STEERING}\r\nand\ra line\tand ▄ é אב"

WHOLE = HOSTILE.replace("\ud83d", "")  # half characters are refused where rows are read


def hidden_in(text: str) -> list[str]:
    """What may not be shown, spelled out in JSON or as a character reference, too."""
    spelled = re.findall(r"(?<!\\)\\u00[01][0-9a-f]|&#(?:x1b|27|0);", text)
    return HIDDEN.findall(text) + spelled


def test_what_steers_is_replaced_and_all_else_stays():
    shown = visible(HOSTILE)
    assert not hidden_in(shown)
    assert shown.startswith("a post�[31mred�]0;title�")
    assert shown.endswith("\nand\na line\tand ▄ é אב")
    assert visible("plain\n\ttext ✓ 👍🏽 \u200f") == "plain\n\ttext ✓ 👍🏽 \u200f"


def test_an_error_is_one_line_that_steers_nothing(capsys):
    with pytest.raises(SystemExit), in_one_line():
        raise UserError(HOSTILE)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: a post�[31mred")
    assert not hidden_in(line)


def test_what_a_command_prints_steers_nothing(capsys):
    with in_one_line():
        print(HOSTILE, flush=True)
        sys.stdout.write(HOSTILE)
    assert capsys.readouterr().out == f"{visible(HOSTILE)}\n{visible(HOSTILE)}"


def test_data_keep_every_character(tmp_path):
    write_json(tmp_path / "x.json", {"text": WHOLE})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"text": WHOLE}
