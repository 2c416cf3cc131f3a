"""Text for a terminal or a log: lines of 80 columns, and durations."""

import textwrap

COLUMNS = 80


def folded(text: str, indent: str = "    ") -> list[str]:
    """Return a text in lines of at most 80 columns; all but the first are indented."""
    return textwrap.wrap(text, COLUMNS, subsequent_indent=indent, break_on_hyphens=False)


def labeled(label: str, text: str) -> str:
    """Return a text wrapped into lines that each start with the label, if that is short."""
    prefix = f"{label}: "
    indent = prefix if len(prefix) <= COLUMNS / 2 else "    "
    return "\n".join(folded(prefix + text, indent))


def duration(seconds: float) -> str:
    """Return a time as minutes and seconds, or as hours and minutes: `2:10`, `3h05`."""
    minutes, remaining_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{remaining_seconds:02}"
    return f"{minutes // 60}h{minutes % 60:02}"
