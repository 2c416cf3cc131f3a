"""How pages write numbers: the filters of the templates.

Every filter takes a number, an `Interval`, or None; None is written as a dash.
"""

from collections.abc import Sequence
from math import isnan

from reports.results import Interval

MISSING = "–"

Value = float | Interval | None


def percent(value: Value, digits: int = 1) -> str:
    """Write a fraction in percent: 93.6%, or with its interval 93.6% [91.7, 95.4]."""
    return _written(value, scale=100, digits=digits, unit="%")


def points(value: Value, digits: int = 1) -> str:
    """Write a difference of two fractions in percentage points, with its sign."""
    return _written(value, scale=100, digits=digits, unit=" points", is_signed=True)


def bare_points(value: Value, digits: int = 1) -> str:
    """Write a difference in percentage points without the unit, which the table's header has."""
    return _written(value, scale=100, digits=digits, unit="", is_signed=True)


def number(value: Value, digits: int = 2) -> str:
    """Write a number, such as a mean score."""
    return _written(value, scale=1, digits=digits, unit="")


def difference(value: Value, digits: int = 2) -> str:
    """Write a difference of two numbers with its sign."""
    return _written(value, scale=1, digits=digits, unit="", is_signed=True)


def count(value: float | None) -> str:
    """Write a whole number: 117,000."""
    return number(value, digits=0)


def parameter_count(value: float) -> str:
    """Write a number of parameters as people say it: 471K, 1.01B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"


def bounds(value: tuple[float, float] | Interval | None) -> str:
    """Write only the bounds of an interval of fractions, in percent: [91.7, 95.4]."""
    if value is None:
        return MISSING
    low, high = (value.low, value.high) if isinstance(value, Interval) else value
    return f"[{_rounded(100 * low, digits=1)}, {_rounded(100 * high, digits=1)}]"


def p_value(value: float | None) -> str:
    """Write a p-value as papers do."""
    if value is None or isnan(value):
        return MISSING
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def bare_p_value(value: float | None) -> str:
    """Write a p-value without its letter, which the table's header has."""
    return p_value(value).removeprefix("p = ").removeprefix("p ")


def plural(number_of: float, noun: str) -> str:
    """Write a count with its noun: 1 seed, 3 seeds."""
    return f"{count(number_of)} {noun}" if number_of == 1 else f"{count(number_of)} {noun}s"


def listed(names: Sequence[str]) -> str:
    """Write names as a sentence lists them: a, b and c."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def duration(seconds: float) -> str:
    """Write a duration: 40 s, 25 min, 1 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _written(value: Value, scale: float, digits: int, unit: str, is_signed: bool = False) -> str:
    if value is None:
        return MISSING
    if not isinstance(value, Interval):
        if isnan(value):
            return MISSING
        return f"{_rounded(scale * value, digits, is_signed)}{unit}"
    middle = _rounded(scale * value.estimate, digits, is_signed)
    low = _rounded(scale * value.low, digits, is_signed)
    high = _rounded(scale * value.high, digits, is_signed)
    if value.low == value.high:  # an interval without width, of a single post or a constant
        return f"{middle}{unit}"
    return f"{middle}{unit} [{low}, {high}]"


def _rounded(value: float, digits: int, is_signed: bool = False) -> str:
    value = round(value, digits) + 0.0  # never -0.0
    return f"{value:+,.{digits}f}" if is_signed else f"{value:,.{digits}f}"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table for the terminal: the first column to the left, the others to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
