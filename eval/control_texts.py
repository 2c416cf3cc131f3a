"""Texts about a post whose worth beside the human reference is known from how they were made.

Nobody's opinion is in them. A text that repeats the reference, or adds a sentence without content,
tells nothing more and takes longer. A text that states the opposite of a sentence of the post, or
names a person, a day or a number that the post does not have, is wrong by the post itself. A text
of the post's own sentences that share least with the reference and the title is true and misses
the point. A post that offers no such sentence, name or number has no such text.
"""

import re
import zlib
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

from eval.judges.protocol import Row
from stages.config.sections import PROMPT, parse_post
from stages.data.text_metrics import WORD, words_of

SELF = "reference"


class Control(NamedTuple):
    """What is judged against the reference, and what a judge shows that prefers the reference."""

    what: str
    proves: str


CONTROLS = {
    SELF: Control("the reference itself", "nothing: a check of the protocol"),
    "truncated": Control("the first half of the reference's words", "it wants a whole summary"),
    "first_sentence": Control("the post's first sentence", "it wants the point, not the start"),
    "title": Control("the post's title", "it wants more than the topic"),
    "other_post": Control("the reference of another post", "it reads the post"),
    "repeated": Control("the reference written twice", "length alone does not win it"),
    "padded": Control("the reference and a sentence that adds nothing", "padding does not win it"),
    "contradicted": Control("the reference and a false sentence", "it checks added claims"),
    "swapped": Control(
        "the reference with other names or numbers", "it checks facts, at equal length and topic"
    ),
    "wrong_emphasis": Control(
        "a longer text of the post that misses the point", "topic, truth and length do not win it"
    ),
}

# They claim nothing about any post.
FILLERS = (
    "There is of course more to this story than fits into a few words, as is so often the case.",
    "All of this could be told at much greater length, and there are many ways to look at it.",
    "That is the short version of it, and everything else can be read in the text further above.",
)

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")
FEWEST_WORDS, MOST_WORDS = 4, 25  # of a sentence that stands for itself
LONGER = 1.5  # a summary of the wrong emphasis has at least so many times the reference's words
MOST_COVERED = 1 / 3  # and tells at most this share of the reference's content words

# A main clause that says how things are or were: "I'm ...", "she was ...", "my boss is ...".
VERB = re.compile(
    r"(?:(?:and|but|so|now|then),?\s+)?"
    r"(?:(?:I|we|he|she|they)(?:['’](?:m|re|s)|\s+(?:am|is|was|are|were))"
    r"|(?:my|our|his|her|their)\s+\w+\s+(?:is|was|are|were))(?=\s)",
    re.IGNORECASE,
)
# Twice "not" says little, and "not only", "not always" are no opposite.
NO_OPPOSITE = re.compile(
    r"\?|n['’]t\b|\b(?:not|never|no|none|nothing|nobody|without|hardly|only|just|always|all|every"
    r"|so|very|too|quite|if|unless)\b",
    re.IGNORECASE,
)


def control_texts(post: Row, others: Sequence[Row], prompt: str = PROMPT) -> dict[str, str]:
    """The control texts of one post, by the names of CONTROLS; an empty one where it has none.

    `post` has `id`, `query` and `reference`; `others` are posts of which one lends its reference.
    """
    reference: str = post["reference"]
    words = reference.split()
    fields = parse_post(post["query"], prompt) or {"title": "", "post": post["query"]}
    title = fields["title"]
    body = fields["post"]
    unlike = (row["reference"] for row in others if row["reference"].split() != words)
    filler = FILLERS[zlib.crc32(post["id"].encode()) % len(FILLERS)]
    other = swapped(reference, f"{title} {body} {reference}")
    return {
        SELF: reference,
        "truncated": " ".join(words[: len(words) // 2]),
        "first_sentence": re.split(r"(?<=[.!?])\s|\n", body.strip(), maxsplit=1)[0],
        "title": title,
        "other_post": next(unlike, ""),
        "repeated": f"{_ended(reference)} {reference.strip()}" if words else "",
        "padded": f"{_ended(reference)} {filler}" if words else "",
        "contradicted": contradicted(reference, title, body),
        "swapped": other if other != reference else "",
        "wrong_emphasis": wrong_emphasis(reference, title, body),
    }


def control_rows(posts: Sequence[Row], prompt: str = PROMPT) -> dict[str, list[Row]]:
    """For each control one row a post that has such a text, with the text as `summary`.

    A text that is the reference itself need not lose, and is no control.
    """
    rows: dict[str, list[Row]] = {name: [] for name in CONTROLS}
    for index, post in enumerate(posts):
        others = [*posts[index + 1 :], *posts[:index]]
        for name, text in control_texts(post, others, prompt).items():
            is_reference = text.split() == post["reference"].split()
            if text.strip() and (name == SELF or not is_reference):
                kept = {key: post[key] for key in ("id", "query", "reference")}
                rows[name].append({**kept, "summary": text.strip()})
    return rows


def contradicted(reference: str, title: str, body: str) -> str:
    """The reference and one sentence that says the opposite of one of the post's; else empty.

    The sentence is the post's own with "not" at its main verb, or else with another person, day or
    number, which the post does not name. It shares a content word with the reference or the title,
    so that it is about the matter; of several, it is the one that shares most with the reference.
    """
    main = content(f"{reference} {title}")
    short = (text for text in sentences_of(body) if len(text.split()) <= MOST_WORDS)
    sentences = [text for text in short if content(text) & main]
    sentences.sort(key=lambda text: -len(content(text) & content(reference)))
    known = f"{title} {body} {reference}"
    wrong = [(negated(sentence), sentence) for sentence in sentences]
    wrong += [(swapped(sentence, known), sentence) for sentence in sentences]
    opposites = (text for text, sentence in wrong if text not in ("", sentence))
    opposite = next(opposites, "")
    return f"{_ended(reference)} {_ended(opposite)}" if opposite else ""


def negated(sentence: str) -> str:
    """The sentence with "not" after its main verb; empty where that would be no plain opposite."""
    verb = VERB.match(sentence)
    if verb is None or NO_OPPOSITE.search(sentence):
        return ""
    return f"{verb[0]} not{sentence[verb.end() :]}"


def wrong_emphasis(reference: str, title: str, body: str) -> str:
    """The post's sentences that share least with reference and title, in the post's order.

    They are at least `LONGER` times as long as the reference and tell at most `MOST_COVERED` of
    its content words; empty where the post has no such sentences.
    """
    main = content(f"{reference} {title}")
    covered = content(reference)
    sentences = list(enumerate(sentences_of(body)))

    def rank(numbered: tuple[int, str]) -> tuple[float, int]:
        words = content(numbered[1])
        return len(words & main) / max(1, len(words)), -len(numbered[1].split())

    chosen: list[tuple[int, str]] = []
    for numbered in sorted(sentences, key=rank):
        chosen.append(numbered)
        text = " ".join(_ended(sentence) for _, sentence in sorted(chosen))
        if len(text.split()) >= LONGER * len(reference.split()):
            share = len(content(text) & covered) / max(1, len(covered))
            return text if covered and share <= MOST_COVERED else ""
    return ""


def sentences_of(body: str) -> list[str]:
    """The sentences of a post that stand for themselves, in its order."""
    sentences = map(str.strip, SENTENCE_END.split(body))
    return [sentence for sentence in sentences if len(sentence.split()) >= FEWEST_WORDS]


def content(text: str) -> set[str]:
    """The distinct words that carry content: those of four letters or more."""
    return {word for word in words_of(text) if len(word) > 3}


def _ended(text: str) -> str:
    """The text with a full stop, unless it has an end of its own."""
    text = text.strip()
    return text if text.rstrip("\"')]”’").endswith((".", "!", "?")) else f"{text}."


# -- other persons, names, days and numbers --------------------------------------------------------

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
        place = NUMBER_WORDS.index(match[0].lower())
        many = len(NUMBER_WORDS)
        new = other(2 + place, [2 + (place + 3 + k) % many for k in range(many)])
        text = NUMBER_WORDS[new - 2] if new else match[0]
        return text.capitalize() if match[0].istitle() else text

    # Words first, because a word can become twelve at most, and digits anything.
    return NUMBER.sub(digits, NUMBER_WORD.sub(word, text))
