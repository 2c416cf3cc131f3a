"""What a reply prefers: a reader of the judge's own words, never of what it was shown."""

import re

from eval.verdicts import Choice

MARKER = re.compile(r"\b(?:preferred|preference|verdict|winner)(?: summary)?\s*[:=]\s*")
NAMED = r"\W*(?:the\s+)?(?:summary|option)?\s*(?P<letter>[ab])\b"
TIE = r"\W*(?:an?\s+|its\s+an?\s+)?(?:tie|neither)\b"
# After it: the end or a reason, but no other candidate ("A or B", "A/B", "A and B", "A, B or tie").
REASON = (
    r"(?=\s*(?:$|[^\w\s/&+<=]|because\b|is\s+(?:the\s+)?better\b))"
    r"(?!\W*(?:[ab]|tie)\W*$)(?!\W*(?:or|and)\b)(?!.*\bor\s+(?:[ab]|tie)\b)"
)
CHOICE = re.compile(rf"(?:{NAMED}|{TIE}){REASON}")
BARE_CHOICE = re.compile(rf"(?:{NAMED}|{TIE})\W*$")


def parse_choice(text: str) -> Choice | None:
    """What a reply prefers: what follows its last `Preferred:`, else a last line that is bare.

    Quotes, bold, brackets, case, "Summary" and a reason after the letter do no harm; whatever
    names both or neither is None.
    """
    plain = re.sub(r"[*_`\"'‘’“”]", "", text).lower().strip()
    markers = list(MARKER.finditer(plain))
    if markers:
        found = CHOICE.match(plain[markers[-1].end() :].split("\n")[0])
    else:
        found = BARE_CHOICE.match(plain.split("\n")[-1])
    if not found:
        return None
    letters: dict[str | None, Choice] = {"a": "A", "b": "B", None: "tie"}
    return letters[found["letter"]]
