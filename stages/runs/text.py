"""Text for a terminal or a log: lines of 80 columns, durations, and shortened lists."""

import textwrap
from collections.abc import Sequence

COLUMNS = 80
MOST_LISTED = 3


def folded(text: str, indent: str = "    ") -> list[str]:
    """Return a text in lines of at most 80 columns; all but the first are indented."""
    return textwrap.wrap(text, COLUMNS, subsequent_indent=indent, break_on_hyphens=False)


def told(who: str, text: str) -> str:
    """Return a text wrapped into lines that each start with `who: `, if that is short."""
    prefix = f"{who}: "
    return "\n".join(folded(prefix + text, prefix if len(prefix) <= COLUMNS / 2 else "    "))


def first_few(items: Sequence[str], separator: str = ", ") -> str:
    """Return the first three items in one line, and how many follow: `a, b, c, and 2 more`."""
    text = separator.join(items[:MOST_LISTED])
    if len(items) > MOST_LISTED:
        text += f"{separator}and {len(items) - MOST_LISTED} more"
    return text


def duration(seconds: float) -> str:
    """Return a time as minutes and seconds, or as hours and minutes: `2:10`, `3h05`."""
    minutes, remaining_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{remaining_seconds:02}"
    return f"{minutes // 60}h{minutes % 60:02}"
