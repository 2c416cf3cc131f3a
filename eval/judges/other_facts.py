"""A text with other persons, names, days and numbers, which a judge of facts must notice."""

import re
from collections.abc import Iterable, Sequence
from itertools import count

from stages.posts.text_metrics import WORD

# Lists of one kind each; what has a comma between is one thing in several words. A thing is
# replaced by the next one of its kind that the post does not name.
KINDS = tuple(
    tuple(tuple(thing.split(",")) for thing in kind.split())
    for kind in (
        "mother,mom,mum sister wife daughter girlfriend,gf grandmother,grandma fiancee aunt niece",
        "father,dad brother husband son boyfriend,bf grandfather,grandpa fiance uncle nephew",
        "roommate,roomie boss,manager neighbor,neighbour teacher,professor landlord"
        " coworker,colleague cousin doctor lawyer friend,buddy",
        "monday tuesday wednesday thursday friday saturday sunday",
        "christmas easter thanksgiving halloween",
    )
)
NAMES = tuple(
    tuple((name,) for name in kind.split())
    for kind in (
        "Sarah Anna Emily Jessica Jane Kate Lisa Laura Mary Rachel Amy Emma Julia Megan Nicole",
        "John Mike Tom James David Dave Matt Chris Jack Bob Steve Kevin Ryan Adam Paul Peter",
        "January February April June July August September October November December",
    )
)
NUMBER_WORDS = "two three four five six seven eight nine ten eleven twelve".split()
NUMBER = re.compile(r"\d+(?:,\d{3})*(?!\d|st\b|nd\b|rd\b|th\b)")
LONGEST_NUMBER = 18  # letters; a longer one counts nothing, and Python reads at most 4,300 digits
NUMBER_WORD = re.compile(rf"\b(?:{'|'.join(NUMBER_WORDS)})\b", re.IGNORECASE)


def swapped(text: str, known: str) -> str:
    """The text with other persons, names, days and numbers, none of which stands in `known`."""
    taken = {word.lower() for word in WORD.findall(known)}
    for kind in KINDS:
        text = _swap_kind(text, kind, taken, re.IGNORECASE)
    for kind in NAMES:
        text = _swap_kind(text, kind, taken)
    return _swap_numbers(text, known)


def _swap_kind(
    text: str, kind: Sequence[tuple[str, ...]], taken: set[str], flags: re.RegexFlag = re.NOFLAG
) -> str:
    """Replace each thing of one kind by the next that is not taken, and take that."""
    places = {form.lower(): (n, k) for n, forms in enumerate(kind) for k, form in enumerate(forms)}
    chosen: dict[int, tuple[str, ...]] = {}

    def other(match: re.Match[str]) -> str:
        n, k = places[match[1].lower()]
        if n not in chosen:
            ring = (*kind[n + 1 :], *kind[:n])
            free = [forms for forms in ring if not _names(forms) & taken]
            if not free:
                return match[0]
            chosen[n] = free[0]
            taken.update(_names(free[0]))
        new = chosen[n][min(k, len(chosen[n]) - 1)]
        new = new.capitalize() if match[1].istitle() else new
        return new + match[2]

    # Longest first, so that no form hides a longer one.
    forms = "|".join(sorted((form for forms in kind for form in forms), key=len, reverse=True))
    return re.sub(rf"\b({forms})(s?)\b", other, text, flags=flags)


def _names(forms: Sequence[str]) -> set[str]:
    return {form.lower() + ending for form in forms for ending in ("", "s")}


def _swap_numbers(text: str, known: str) -> str:
    numbers = re.findall(r"\d+(?:,\d{3})*", known)
    taken = {int(n.replace(",", "")) for n in numbers if len(n) <= LONGEST_NUMBER}
    taken |= {2 + NUMBER_WORDS.index(word.lower()) for word in NUMBER_WORD.findall(known)}
    chosen: dict[int, int] = {}

    def other(old: int, ring: Iterable[int]) -> int | None:
        if old not in chosen and (new := next((n for n in ring if n not in taken), None)):
            chosen[old] = new
            taken.add(new)
        return chosen.get(old)

    def digits(match: re.Match[str]) -> str:
        if len(match[0]) > LONGEST_NUMBER:
            return match[0]
        old = int(match[0].replace(",", ""))
        new = other(old, count(old + max(3, old // 2)))
        return f"{new:,}" if "," in match[0] else str(new)

    def word(match: re.Match[str]) -> str:
        place, many = NUMBER_WORDS.index(match[0].lower()), len(NUMBER_WORDS)
        new = other(2 + place, [2 + (place + 3 + k) % many for k in range(many)])
        text = NUMBER_WORDS[new - 2] if new else match[0]
        return text.capitalize() if match[0].istitle() else text

    # Words first, because a word can become twelve at most, and digits anything.
    return NUMBER.sub(digits, NUMBER_WORD.sub(word, text))
