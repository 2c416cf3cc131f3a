"""Lines for a terminal of 80 columns."""

import textwrap

COLUMNS = 80
MOST_REPEATED = 40  # a longer name is not repeated on each line


def folded(text: str, more: str = "    ") -> list[str]:
    """A text in lines of at most 80 columns; its own indent stands before the first.

    `more` stands before each other line.
    """
    return textwrap.wrap(text, COLUMNS, subsequent_indent=more, break_on_hyphens=False)


def told(who: str, said: str) -> str:
    """What somebody says, in lines that each begin with the name, so that a log can be searched."""
    mark = f"{who}: "
    return "\n".join(folded(mark + said, mark if len(mark) <= MOST_REPEATED else "    "))
