"""A program on a terminal: what it prints there, with the escape sequences."""

import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.lib.places import ROOT


def printed_on_terminal(words: Sequence[str], folder: Path) -> str:
    """Run Python with these words in a folder, with a color terminal as its three streams."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "LC_ALL": "C.UTF-8",
        "TERM": "xterm-256color",
        "COLUMNS": "80",
    }
    own_end, child_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdin=child_end,
        stdout=child_end,
        stderr=child_end,
    )
    os.close(child_end)

    printed = b""
    while True:
        try:
            part = os.read(own_end, 65536)
        except OSError:  # Linux reports the end of a terminal as an error
            break
        if not part:
            break
        printed += part
    os.close(own_end)
    assert process.wait() == 0, printed
    return printed.decode()
