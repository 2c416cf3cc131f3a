"""A post as people type it. Standard library only."""

import re
from collections.abc import Iterable, Iterator

# Each part but the text may be missing.
TYPED = re.compile(
    r"(?:(?:SUBREDDIT:\s*)?r/(?P<subreddit>\w+)\s+)?(?:TITLE:[ \t]*(?P<title>[^\n]*)\s*)?"
    r"(?P<label>POST:\s*)?(?P<post>.*?)\s*(?:TL;DR:)?",
    re.DOTALL,
)


def typed_fields(text: str) -> dict[str, str]:
    """Subreddit, title and post of a text, empty where missing.

    Without labels the first of several lines is the title; a single line is the post.
    """
    match = TYPED.fullmatch(text.strip())
    parts = {key: value or "" for key, value in match.groupdict().items()} if match else {}
    label, title, post = (parts.get(key, "").strip() for key in ("label", "title", "post"))
    if not label and not title and "\n" in post:
        title, _, post = (part.strip() for part in post.partition("\n"))
    return {"subreddit": parts.get("subreddit", ""), "title": title, "post": post}


def typed_posts(lines: Iterable[str]) -> Iterator[str]:
    """The posts of many lines: one ends with TL;DR:, two empty lines, or the last line."""
    kept: list[str] = []
    for line in lines:
        kept.append(line.rstrip())
        if kept[-1].endswith("TL;DR:") or kept[-2:] == ["", ""]:
            text, kept = "\n".join(kept).strip(), []
            if text:
                yield text
    if "".join(kept):
        yield "\n".join(kept).strip()
