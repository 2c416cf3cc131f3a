"""What is done about a row that cannot be used: the stage stops there, or lists it and goes on.

A bad row is one that only the user's own files could hold: no JSON, a wrong type, a missing field,
a summary far over its limit, more tokens than the model has positions. What the published data are
known to hold (empty or equal summaries, a few tokens over a limit) is not bad: it is kept, and
counted by `kept_odd_rows`. Standard library only.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.running.files import write_lines
from stages.settings.checks import UserError
from stages.settings.sections import ALL_PAIRS

SKIPPED_FILE = "skipped.jsonl"


class BadRowError(UserError):
    """A row that cannot be used."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason


class BadRows:
    """The bad rows of one reading of the data; `on_bad_row` is the setting of that name."""

    def __init__(self, on_bad_row: str) -> None:
        self.skip = on_bad_row == "skip"
        self.skipped: list[dict[str, str]] = []
        """For each row left out: its split, `file:line` and the reason."""

    @contextmanager
    def of(self, split: str) -> Iterator[None]:
        """Around the work on one row: a BadRowError stops the stage, or is noted and passed over.

        The block ends at the error, so what it does with a good row belongs at its end.
        """
        try:
            yield
        except BadRowError as bad:
            if not self.skip:
                hint = "(or leave such rows out: data.on_bad_row=skip)"
                raise UserError(f"{bad} {hint}") from None
            self.skipped.append({"split": split, "where": bad.where, "reason": bad.reason})

    def write(self, folder: Path) -> None:
        """List the skipped rows in `skipped.jsonl`; no file where there are none."""
        if self.skipped:
            write_lines(folder / SKIPPED_FILE, self.skipped)


def in_half(post_id: str, pairs: str) -> bool:
    """Whether the comparisons of a post belong to `pairs`: `all`, `even` or `odd`.

    Even and odd are the last bit of the SHA-256 of the id, so the halves are the same in every run.
    """
    parity = hashlib.sha256(post_id.encode()).digest()[-1] % 2
    return pairs == ALL_PAIRS or parity == (pairs == "odd")
