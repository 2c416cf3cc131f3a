"""Reads which summary a reply prefers, from the judge's own words only."""

import json
import re
import unicodedata

from eval.judges.protocol import Choice

MARKER = re.compile(r"\b(?:preferred|preference|verdict|winner)(?: summary)?\s*[:=]\s*")
NAMED = r"\W*(?:the\s+)?(?:summary|option)?\s*(?P<letter>[ab])\b"
TIE = r"\W*(?:an?\s+|its\s+an?\s+)?(?:tie|neither)\b"
# What may follow the choice: the end or a reason, but no other candidate ("A or B", "A/B",
# "A and B", "A, B or tie").
REASON = (
    r"(?=\s*(?:$|[^\w\s/&+<=]|because\b|is\s+(?:the\s+)?better\b))"
    r"(?!\W*(?:[ab]|tie)\W*$)(?!\W*(?:or|and)\b)(?!.*\bor\s+(?:[ab]|tie)\b)"
)
CHOICE = re.compile(rf"(?:{NAMED}|{TIE}){REASON}")
BARE_CHOICE = re.compile(rf"(?:{NAMED}|{TIE})\W*$")

KEYS = ("preferred", "preference", "verdict", "winner")
# A flat object; braces within its strings do not end it.
OBJECT = re.compile(r'\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}', re.DOTALL)
# A marker outside an object: inside one, its name would be in quotes.
LINE_MARKER = re.compile(rf"^[^\w\"']*{MARKER.pattern[2:]}", re.MULTILINE | re.IGNORECASE)
OPEN_OBJECT = re.compile(r'\{\s*"')
# What a reasoning model thinks aloud is not its answer.
THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
# A marker that opens a quotation within a line is somebody else's word, such as the post's.
QUOTED = re.compile(rf"(?<=[\w:,.;)])[ \t*]*[\"'`‘“«]+{MARKER.pattern}", re.IGNORECASE)
# So is a line after other lines that is quoted as a whole, by its marks or by the sign ">".
IN_MARKS = rf"[*_]*[\"'`‘“«]+{MARKER.pattern}[^\n\"'`’”»]*[\"'`’”»]+[*_.]*"
QUOTED_LINE = re.compile(
    rf"(?<=\n)[ \t]*(?:>[^\n]*|{IN_MARKS})[ \t]*(?=\n|$)",
    re.IGNORECASE,
)


def parse_choice(text: str) -> Choice | None:
    """What a reply prefers; None where it names both or neither, or its JSON object is cut off.

    The last `Preferred:` after the last JSON object decides; without one, the word in that object;
    without either, a last line that holds nothing but the choice. Bold, brackets, fences, case,
    "Summary" and a reason after the letter do no harm, nor quotes about the whole reply. A marker
    that is quoted after other words is no verdict.
    """
    text = unicodedata.normalize("NFKC", THOUGHT.sub("", text)).strip()
    word, rest = None, text
    for found in OBJECT.finditer(text):
        if (its_word := _preferred(found[0])) is not None:
            word, rest = its_word, text[found.end() :]
    if word is not None and not LINE_MARKER.search(rest):
        return _choice(BARE_CHOICE.match(word))
    if OPEN_OBJECT.search(rest) and not LINE_MARKER.search(rest):
        return None  # cut off, or without a verdict
    unquoted = QUOTED.sub(" [quoted] ", QUOTED_LINE.sub("[quoted]", rest))
    plain = re.sub(r"[*_`\"'‘’“”]", "", unquoted).lower().strip()
    markers = list(MARKER.finditer(plain))
    if markers:
        return _choice(CHOICE.match(plain[markers[-1].end() :].split("\n")[0]))
    return _choice(BARE_CHOICE.match(plain.split("\n")[-1]))


def _preferred(text: str) -> str | None:
    """The verdict in a JSON object, in lower case; "" where it is no word or stands there twice."""
    try:
        pairs = json.loads(text, object_pairs_hook=list)
    except ValueError:
        return None
    found = [value for key, value in pairs if key.lower() in KEYS]
    if not found:
        return None
    return found[0].lower() if len(found) == 1 and isinstance(found[0], str) else ""


def _choice(found: re.Match[str] | None) -> Choice | None:
    if not found:
        return None
    letters: dict[str | None, Choice] = {"a": "A", "b": "B", None: "tie"}
    return letters[found["letter"]]
