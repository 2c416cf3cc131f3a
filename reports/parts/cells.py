"""What stands in a table's cells: a number that stays one until the page is written, or a text.

A `Number` prints as a page shows it, so it may stand in a sentence, too. For programs a column of
numbers becomes columns of values in full precision: see `columns_of`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, isnan

INTERVAL = re.compile(r" \[95%[^]]*\]")  # in the title of a column whose numbers have bounds


@dataclass(frozen=True)
class Number:
    """A number in its unit, perhaps with bounds, and how a page shows it; without one a dash."""

    value: float | None = None
    digits: int = 2
    """After the point."""
    unit: str = ""
    """`%`, `points`, or none."""
    low: float | None = None
    high: float | None = None
    """The bounds, in the same unit; alone where there is no value."""
    note: str = ""
    """Words that follow it."""
    signed: bool = False
    """Whether a plus is shown, as of a difference."""
    is_range: bool = False
    """Whether the bounds are the lowest and the highest of several values, and no interval."""

    @property
    def is_missing(self) -> bool:
        """Whether it has neither a value nor bounds."""
        return all(value is None or isnan(value) for value in (self.value, self.low))

    def __str__(self) -> str:
        """As a page shows it."""
        if self.is_missing:
            return f"– {self.note}".strip()
        value, low, high = map(self._text, (self.value, self.low, self.high))
        unit = f" {self.unit}" if self.unit.isalpha() else self.unit
        parts = [f"{value}{unit}"] if value else []
        if low:
            parts.append(f"({low} to {high})" if self.is_range else f"[{low}, {high}]")
        return " ".join(filter(None, [*parts, self.note]))

    def _text(self, value: float | None) -> str:
        if value is None or isnan(value):
            return ""
        value = round(value, self.digits) + 0.0  # never -0.0
        return f"{value:{'+' if self.signed else ''},.{self.digits}f}"


class PValue(Number):
    """A p-value, as papers write it."""

    def __str__(self) -> str:
        """As a page shows it."""
        if self.value is None:
            return super().__str__()
        return "p < 0.001" if self.value < 0.001 else f"p = {self.value:.3f}"


MISSING = Number()


def is_numeric(cells: Sequence[object]) -> bool:
    """Whether a column holds numbers alone; a dash is one that is not there."""
    return bool(cells) and all(isinstance(cell, Number) for cell in cells)


Column = tuple[str, list[str | float | None]]
"""A title and its values."""


def columns_of(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[Column]:
    """A table as programs read it: a column for each number, with the unit in its title.

    Numbers bring `<title> low` and `<title> high` where some have bounds, `<title> unit` where
    their units differ, and `<title> note` where a cell has words. A dash is None.
    """
    return [
        column
        for index, title in enumerate(header)
        for column in _columns(title, [row[index] for row in rows])
    ]


def _columns(title: str, cells: Sequence[object]) -> list[Column]:
    numbers = [cell if isinstance(cell, Number) else Number(note=str(cell)) for cell in cells]
    units = {number.unit for number in numbers if not number.is_missing}
    more: dict[str, list[str | float | None]] = {
        "low": [_finite(number.low) for number in numbers],
        "high": [_finite(number.high) for number in numbers],
        "unit": [number.unit if len(units) > 1 else None for number in numbers],
        "note": [number.note or None for number in numbers],
    }
    if all(number.is_missing for number in numbers):
        return [(title, more["note"])]
    held = {end: values for end, values in more.items() if {*values} != {None}}
    name = INTERVAL.sub("", title) if "low" in held else title
    unit = units.pop() if len(units) == 1 else ""
    middle = f"{name}, {unit}".removeprefix(", ") if unit else name
    return [
        (middle, [_finite(number.value) for number in numbers]),
        *((f"{name} {end}".strip(), values) for end, values in held.items()),
    ]


def _finite(value: float | None) -> float | None:
    """A number that JSON can hold; None where there is none."""
    if value is None or not isfinite(value):
        return None
    return value if isinstance(value, int) else float(value)
