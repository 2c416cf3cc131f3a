"""What happens to a row that cannot be used: the stage stops, or the row is skipped and listed.

A row is bad if it has a fault that only the user's own files can have: it is not JSON, a field is
missing or has the wrong type, its summary is far over the limit, or it has more tokens than the
model has positions. Oddities that are known to occur in the published data (empty or equal
summaries, a few tokens over a limit) are not bad: those rows are kept, and `row_counts.py` counts
them. Standard library only.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.config.errors import UserError
from stages.runs.files import write_lines

SKIPPED_FILE = "skipped.jsonl"


class BadRowError(UserError):
    """A row that cannot be used: its place and the reason."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


class LeftOutError(BadRowError):
    """A row that is excluded from training by its own label. It is always left out and listed."""


class BadRows:
    """The bad rows of one pass over the data."""

    def __init__(self, on_bad_row: str) -> None:
        """`on_bad_row` is the setting of that name: `stop` or `skip`."""
        self.should_skip = on_bad_row == "skip"
        self.skipped: list[dict[str, str]] = []
        """The split, the place (`file:line`) and the reason of each skipped row."""
        self.changes: Counter[str] = Counter()
        """What was done with rows (left out by a label, cut, ...) -> the number of these rows."""

    @contextmanager
    def catch(self, split: str) -> Iterator[None]:
        """Surround the work on one row: a BadRowError stops the stage, or the row is skipped.

        A skipped row leaves the block at the error, so what the block does with a good row belongs
        at its end.
        """
        try:
            yield
        except BadRowError as bad:
            if isinstance(bad, LeftOutError):
                self.changes[f"rows are left out: {bad.reason}"] += 1
            elif not self.should_skip:
                raise UserError(f"{bad} (or skip such rows: data.on_bad_row=skip)") from None
            self.skipped.append({"split": split, "where": bad.where, "reason": bad.reason})

    def write(self, folder: Path) -> None:
        """List the skipped rows in `skipped.jsonl`; write no file if there are none."""
        if self.skipped:
            write_lines(folder / SKIPPED_FILE, self.skipped)
