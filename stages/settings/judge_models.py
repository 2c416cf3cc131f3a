"""What the models that judge cost, and when they end. Standard library only.

A study that was judged by a model that has ended cannot be repeated, so its end stands beside its
price, and is said before the first request.
"""

import re
from datetime import date, timedelta
from typing import NamedTuple

AS_OF = date(2026, 11, 22)
"""The day on which the table was checked."""
EARLIER = date(2025, 11, 1)
"""When the prices of the models that are about to end were noted; they were not checked again."""
NEAR = timedelta(days=90)
"""A model that ends within this time is warned of."""


class Known(NamedTuple):
    """A model's list price in USD per million tokens (standard tier) and its end."""

    read: float | None = None
    """None: the model has ended, and no price of it can be backed."""
    written: float | None = None
    """Reasoning is written too."""
    cached: float | None = None
    """What was read before, as the server counts it; None: costs what is read."""
    cache_written: float | None = None
    """What the server keeps for later; None: costs what is read."""
    end: date | None = None
    """The first day without it; None: no end is known."""
    priced: date = EARLIER


JANUARY, DECEMBER, ENDED = date(2027, 1, 14), date(2026, 12, 11), date(2026, 10, 23)
# OpenAI's list prices and its page of deprecations. A dated snapshot is what the undated name is,
# unless it has a line of its own. Batches cost half.
MODELS = {
    "gpt-6-luna": Known(0.10, 0.50, cached=0.01, cache_written=0.125, priced=AS_OF),
    "gpt-4o": Known(2.50, 10.00, end=JANUARY),
    "gpt-4o-mini": Known(0.15, 0.60, end=JANUARY),
    "gpt-4.1": Known(2.00, 8.00, end=JANUARY),
    "gpt-4.1-mini": Known(0.40, 1.60, end=JANUARY),
    "gpt-5": Known(1.25, 10.00, end=DECEMBER),
    "gpt-5-mini": Known(0.25, 2.00, end=DECEMBER),
    "gpt-5-nano": Known(0.05, 0.40, end=DECEMBER),
    "o3": Known(2.00, 8.00, end=DECEMBER),
    "gpt-3.5-turbo": Known(end=ENDED),
    "gpt-4": Known(end=ENDED),
    "gpt-4-turbo": Known(end=ENDED),
    "gpt-4o-2024-05-13": Known(end=ENDED),
    "gpt-4.1-nano": Known(end=ENDED),
    "o4-mini": Known(end=ENDED),
}


def known_model(name: str) -> Known | None:
    """The line of the table for a model's name, which may be that of a snapshot; None without."""
    lines = [model for model in MODELS if is_model(model, name)]
    return MODELS[max(lines, key=len)] if lines else None


def is_model(requested: str, returned: str) -> bool:
    """Whether a returned model id is the requested one: itself, a dated snapshot, a revision."""
    dated = r"(?:-\d{4}-\d{2}-\d{2}|-\d{4,8}|@.+|:latest)?"
    return re.fullmatch(re.escape(requested) + dated, returned) is not None


def warning_of(name: str, today: date | None = None) -> str:
    """One line about a model that has ended or will soon; empty where there is nothing to say.

    `today` is this day unless it is given.
    """
    today = today or date.today()
    line = known_model(name)
    if line is None or line.end is None or today + NEAR < line.end:
        return ""
    advice = "choose another judge.model, best one with open weights (eval/README.md)"
    if today < line.end:
        days = (line.end - today).days
        return (
            f"warning: judge {name} ends on {line.end}, in {days} days, and what it judged cannot"
            f" be repeated then: {advice}"
        )
    older = f", and the table of prices, of {AS_OF}, is older" if line.end > AS_OF else ""
    return f"warning: judge {name} ended on {line.end}{older}: {advice}"
