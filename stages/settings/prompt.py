"""The prompt: a template with places for a post's fields, filled and read back.

Standard library only. The template is the setting `data.prompt`.
"""

import re
from collections.abc import Mapping
from functools import cache
from string import Formatter

from stages.settings.checks import require

# Huang et al. 2024, detail 2.
PROMPT = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
FIELDS = ("subreddit", "title", "post")
SAMPLE = {"subreddit": "tifu", "title": "My title: two words", "post": "One line.\n\nAnother: it."}


def check_prompt(template: str) -> None:
    """Raise UserError unless a template holds each field once and can be read back."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError:
        parts = []
    names = sorted(name for _, name, _, _ in parts if name is not None)
    plain = not any(form or conversion for _, _, form, conversion in parts)
    places = "hold {subreddit}, {title} and {post}, each once, and nothing else in braces"
    require(names == sorted(FIELDS) and plain, "data.prompt", places)
    require(template == template.strip(), "data.prompt", "not begin or end with white space")
    again = parse_post(format_post(SAMPLE, template), template)
    require(again == SAMPLE, "data.prompt", "have words or line breaks between its places")


def format_post(row: Mapping[str, str], template: str = PROMPT) -> str:
    """The prompt of one post, without truncation; a post that is a whole prompt stays as it is."""
    if row.get("whole"):
        return row["post"]
    return template.format(**{name: row[name] for name in FIELDS})


def parse_post(query: str, template: str = PROMPT) -> dict[str, str] | None:
    """Subreddit, title and post of a prompt that `format_post` wrote; None for another text."""
    match = _pattern(template).fullmatch(query)
    return match.groupdict() if match else None


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """Fields end at the first text that follows them in the template, the post at the last."""
    pattern = ""
    for text, name, _, _ in Formatter().parse(template):
        pattern += re.escape(text)
        if name is not None:
            pattern += f"(?P<{name}>.*)" if name == "post" else f"(?P<{name}>.*?)"
    return re.compile(pattern, re.DOTALL)
