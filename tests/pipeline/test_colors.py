"""On a terminal our tables have colors, and a text from a file steers nothing."""

import re

from stages.runs.files import write_json
from tests.lib.pseudo_terminal import printed_on_terminal

HOSTILE = "\x1b[31mred\x1b]0;title\x07"
SHOWN = "�[31mred�]0;title�"

TABLE = f"""
from stages.config.command_line import make_config
from stages.config.error_messages import in_one_line
from stages.pipeline import terminal

with in_one_line(), in_one_line():
    terminal.Terminal().start("tiny seed 44413", ["sft"])
    terminal.print_row(stage="sft", what={HOSTILE!r}, time="0:01", result="")
"""


def failed_run(folder):
    """Write a run whose SFT stage has failed with a hostile error."""
    partial = folder / "runs/tiny/seed44413/sft.partial"
    partial.mkdir(parents=True)
    write_json(partial / "failed.json", {"error": HOSTILE})


def colored(style: str, text: str) -> re.Pattern[str]:
    """Return a pattern for a text after the escape sequence of its style."""
    return re.compile(rf"\x1b\[[\d;]*{style}m{re.escape(text)}")


def test_status_has_colors(tmp_path):
    failed_run(tmp_path)
    printed = printed_on_terminal(["-m", "stages", "status"], tmp_path)
    assert colored("1", "run").search(printed)
    assert colored("31", "failed").search(printed)


def test_status_shows_a_hostile_text_as_text(tmp_path):
    failed_run(tmp_path)
    printed = printed_on_terminal(["-m", "stages", "status"], tmp_path)
    assert SHOWN in printed
    assert HOSTILE not in printed


def test_the_table_of_stages_has_colors_and_shows_a_hostile_text_as_text(tmp_path):
    printed = printed_on_terminal(["-c", TABLE], tmp_path)
    assert colored("1", "stage").search(printed)
    assert SHOWN in printed
    assert HOSTILE not in printed
