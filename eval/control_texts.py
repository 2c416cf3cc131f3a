"""Control texts: how they compare with the reference is known from how they are built.

No opinion is involved. A text that repeats the reference, or adds a sentence without content, says
nothing new and is longer. A text that states the opposite of one of the post's sentences, or names
a person, a day or a number that the post does not have, contradicts the post. A text of those of
the post's sentences that share least with the reference and the title is true but misses the point.
If a post lacks the sentence, name or number that a control needs, it does not have that control.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from eval.judges.protocol import Row
from stages.config.sections import PROMPT, parse_post
from stages.data.text_metrics import WORD, words_of

SELF = "reference"


@dataclass(frozen=True)
class Control:
    """A kind of text that is judged against the reference."""

    what: str
    proves: str
    """What it shows about a judge if the judge prefers the reference."""


CONTROLS = {
    SELF: Control("the reference itself", "nothing: a check of the protocol"),
    "truncated": Control("the first half of the reference's words", "it wants a complete summary"),
    "first_sentence": Control("the post's first sentence", "it wants the point, not the start"),
    "title": Control("the post's title", "it wants more than the topic"),
    "other_post": Control("the reference of another post", "it reads the post"),
    "repeated": Control("the reference written twice", "length does not sway it"),
    "padded": Control("the reference and a sentence that adds nothing", "padding does not sway it"),
    "contradicted": Control("the reference and a false sentence", "it checks added claims"),
    "swapped": Control(
        "the reference with other names or numbers", "it checks facts, at equal length and topic"
    ),
    "wrong_emphasis": Control(
        "a longer text of the post that misses the point", "topic, truth and length do not sway it"
    ),
}

# They claim nothing about any post.
FILLERS = (
    "There is of course more to this story than fits into a few words, as is so often the case.",
    "All of this could be told at much greater length, and there are many ways to look at it.",
    "That is the short version of it, and everything else can be read in the text further above.",
)

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")
FEWEST_WORDS = 4  # of a sentence that makes sense without its context
MOST_WORDS = 25  # of a sentence that is contradicted
SHORTEST_CONTENT_WORD = 4  # letters
# A summary with the wrong emphasis has at least this many times the reference's words, and at most
# this share of the reference's content words.
LONGER = 1.5
MOST_COVERED = 1 / 3

# The start of a main clause that says how things are or were: "I'm", "she was", "my boss is".
VERB = re.compile(
    r"(?:(?:and|but|so|now|then),?\s+)?"
    r"(?:(?:I|we|he|she|they)(?:['’](?:m|re|s)|\s+(?:am|is|was|are|were))"
    r"|(?:my|our|his|her|their)\s+\w+\s+(?:is|was|are|were))(?=\s)",
    re.IGNORECASE,
)
# A second "not" is unclear, and "not only" or "not always" is not an opposite.
NO_OPPOSITE = re.compile(
    r"\?|n['’]t\b|\b(?:not|never|no|none|nothing|nobody|without|hardly|only|just|always|all|every"
    r"|so|very|too|quite|if|unless)\b",
    re.IGNORECASE,
)


def control_rows(posts: Sequence[Row], prompt: str = PROMPT) -> dict[str, list[Row]]:
    """For each control one row per post that has such a text, with the text as `summary`.

    A text that equals the reference should not lose, so it is left out.
    """
    rows: dict[str, list[Row]] = {name: [] for name in CONTROLS}
    for index, post in enumerate(posts):
        other_posts = [*posts[index + 1 :], *posts[:index]]
        for name, text in control_texts(post, other_posts, prompt).items():
            is_reference = text.split() == post["reference"].split()
            if text.strip() and (name == SELF or not is_reference):
                row = {
                    "id": post["id"],
                    "query": post["query"],
                    "reference": post["reference"],
                    "summary": text.strip(),
                }
                rows[name].append(row)
    return rows


def control_texts(post: Row, others: Sequence[Row], prompt: str = PROMPT) -> dict[str, str]:
    """The control texts of one post, by the names of CONTROLS; empty where the post has none.

    `post` has `id`, `query` and `reference`; the reference of another post comes from `others`.
    """
    reference: str = post["reference"]
    fields = parse_post(post["query"], prompt)
    if fields is None:
        title = ""
        body = post["query"]
    else:
        title = fields["title"]
        body = fields["post"]
    return {
        SELF: reference,
        "truncated": first_half(reference),
        "first_sentence": re.split(r"(?<=[.!?])\s|\n", body.strip(), maxsplit=1)[0],
        "title": title,
        "other_post": other_reference(reference, others),
        "repeated": repeated(reference),
        "padded": padded(reference, post["id"]),
        "contradicted": contradicted(reference, title, body),
        "swapped": swapped_reference(reference, title, body),
        "wrong_emphasis": wrong_emphasis(reference, title, body),
    }


def first_half(reference: str) -> str:
    """The first half of the reference's words."""
    words = reference.split()
    return " ".join(words[: len(words) // 2])


def other_reference(reference: str, others: Sequence[Row]) -> str:
    """The first reference of the other posts that differs; empty if there is none."""
    for row in others:
        other: str = row["reference"]
        if other.split() != reference.split():
            return other
    return ""


def repeated(reference: str) -> str:
    """The reference written twice; empty for an empty one."""
    if not reference.split():
        return ""
    return f"{_with_full_stop(reference)} {reference.strip()}"


def padded(reference: str, post_id: str) -> str:
    """The reference and a sentence without content; empty for an empty reference."""
    if not reference.split():
        return ""
    filler = FILLERS[zlib.crc32(post_id.encode()) % len(FILLERS)]
    return f"{_with_full_stop(reference)} {filler}"


def contradicted(reference: str, title: str, body: str) -> str:
    """The reference and one sentence that says the opposite of one of the post's; else empty.

    The sentence is one of the post's with "not" at its main verb, or else with another person, day
    or number, which the post does not mention. It shares a content word with the reference or the
    title, so that it is on topic. If several sentences do, the one that shares most with the
    reference is used.
    """
    topic = content(f"{reference} {title}")
    content_of_reference = content(reference)
    sentences = [
        sentence
        for sentence in sentences_of(body)
        if len(sentence.split()) <= MOST_WORDS and content(sentence) & topic
    ]
    sentences.sort(key=lambda sentence: len(content(sentence) & content_of_reference), reverse=True)
    opposite = _first_opposite(sentences, mentioned=f"{title} {body} {reference}")
    if not opposite:
        return ""
    return f"{_with_full_stop(reference)} {_with_full_stop(opposite)}"


def _first_opposite(sentences: Sequence[str], mentioned: str) -> str:
    """The first sentence that can be negated, or else have its facts swapped; empty without one."""
    for sentence in sentences:
        opposite = negated(sentence)
        if opposite:
            return opposite
    for sentence in sentences:
        other = swapped(sentence, mentioned)
        if other != sentence:
            return other
    return ""


def negated(sentence: str) -> str:
    """The sentence with "not" after its main verb; empty if that would not be a clear opposite."""
    verb = VERB.match(sentence)
    if verb is None or NO_OPPOSITE.search(sentence):
        return ""
    return f"{verb[0]} not{sentence[verb.end() :]}"


def swapped_reference(reference: str, title: str, body: str) -> str:
    """The reference with other names or numbers; empty if it has none."""
    text = swapped(reference, mentioned=f"{title} {body} {reference}")
    return "" if text == reference else text


def wrong_emphasis(reference: str, title: str, body: str) -> str:
    """The post's sentences that share least with reference and title, in the post's order.

    They have at least `LONGER` times the reference's words and at most `MOST_COVERED` of its
    content words; empty if the post lacks such sentences.
    """
    topic = content(f"{reference} {title}")
    content_of_reference = content(reference)

    def rank(numbered: tuple[int, str]) -> tuple[float, int]:
        """Fewest shared words first; of equal ones the longest."""
        _, sentence = numbered
        words = content(sentence)
        shared = len(words & topic) / max(1, len(words))
        return shared, -len(sentence.split())

    chosen: list[tuple[int, str]] = []
    for numbered in sorted(enumerate(sentences_of(body)), key=rank):
        chosen.append(numbered)
        text = " ".join(_with_full_stop(sentence) for _, sentence in sorted(chosen))
        if len(text.split()) >= LONGER * len(reference.split()):
            if not content_of_reference:
                return ""
            covered = len(content(text) & content_of_reference) / len(content_of_reference)
            return text if covered <= MOST_COVERED else ""
    return ""


def sentences_of(body: str) -> list[str]:
    """The sentences of a post that make sense without their context, in its order."""
    sentences = [sentence.strip() for sentence in SENTENCE_END.split(body)]
    return [sentence for sentence in sentences if len(sentence.split()) >= FEWEST_WORDS]


def content(text: str) -> set[str]:
    """The distinct content words: those with at least four letters."""
    return {word for word in words_of(text) if len(word) >= SHORTEST_CONTENT_WORD}


def _with_full_stop(text: str) -> str:
    """The text with a period, unless it already ends a sentence."""
    text = text.strip()
    if text.rstrip("\"')]”’").endswith((".", "!", "?")):
        return text
    return f"{text}."


# -- other persons, names, days and numbers --------------------------------------------------------

# Things of one kind; a tuple lists the words for one thing. A thing is replaced by the next one of
# its kind that the post does not mention.
Kind = tuple[tuple[str, ...], ...]
WOMEN: Kind = (
    ("mother", "mom", "mum"),
    ("sister",),
    ("wife",),
    ("daughter",),
    ("girlfriend", "gf"),
    ("grandmother", "grandma"),
    ("fiancee",),
    ("aunt",),
    ("niece",),
)
MEN: Kind = (
    ("father", "dad"),
    ("brother",),
    ("husband",),
    ("son",),
    ("boyfriend", "bf"),
    ("grandfather", "grandpa"),
    ("fiance",),
    ("uncle",),
    ("nephew",),
)
ANYBODY: Kind = (
    ("roommate", "roomie"),
    ("boss", "manager"),
    ("neighbor", "neighbour"),
    ("teacher", "professor"),
    ("landlord",),
    ("coworker", "colleague"),
    ("cousin",),
    ("doctor",),
    ("lawyer",),
    ("friend", "buddy"),
)
DAYS: Kind = (
    ("monday",),
    ("tuesday",),
    ("wednesday",),
    ("thursday",),
    ("friday",),
    ("saturday",),
    ("sunday",),
)
HOLIDAYS: Kind = (("christmas",), ("easter",), ("thanksgiving",), ("halloween",))
WOMENS_NAMES: Kind = (
    ("Sarah",),
    ("Anna",),
    ("Emily",),
    ("Jessica",),
    ("Jane",),
    ("Kate",),
    ("Lisa",),
    ("Laura",),
    ("Mary",),
    ("Rachel",),
    ("Amy",),
    ("Emma",),
    ("Julia",),
    ("Megan",),
    ("Nicole",),
)
MENS_NAMES: Kind = (
    ("John",),
    ("Mike",),
    ("Tom",),
    ("James",),
    ("David",),
    ("Dave",),
    ("Matt",),
    ("Chris",),
    ("Jack",),
    ("Bob",),
    ("Steve",),
    ("Kevin",),
    ("Ryan",),
    ("Adam",),
    ("Paul",),
    ("Peter",),
)
# March and May are words, too.
MONTHS: Kind = (
    ("January",),
    ("February",),
    ("April",),
    ("June",),
    ("July",),
    ("August",),
    ("September",),
    ("October",),
    ("November",),
    ("December",),
)
KINDS_IN_ANY_CASE = (WOMEN, MEN, ANYBODY, DAYS, HOLIDAYS)
KINDS_WITH_CAPITAL = (WOMENS_NAMES, MENS_NAMES, MONTHS)

NUMBER_WORDS = (
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
SMALLEST_NUMBER_WORD = 2
NUMBER_WORD = re.compile(rf"\b(?:{'|'.join(NUMBER_WORDS)})\b", re.IGNORECASE)
DIGITS = re.compile(r"\d+(?:,\d{3})*")
CARDINAL = re.compile(r"\d+(?:,\d{3})*(?!\d|st\b|nd\b|rd\b|th\b)")
# Longer numbers are not quantities, and Python reads at most 4,300 digits.
LONGEST_NUMBER = 18


def swapped(text: str, mentioned: str) -> str:
    """The text with other persons, names, days and numbers, which `mentioned` does not contain."""
    taken = {word.lower() for word in WORD.findall(mentioned)}
    for kind in KINDS_IN_ANY_CASE:
        text = _swap_kind(text, kind, taken, re.IGNORECASE)
    for kind in KINDS_WITH_CAPITAL:
        text = _swap_kind(text, kind, taken, re.NOFLAG)
    return _swap_numbers(text, mentioned)


def _swap_kind(text: str, kind: Kind, taken: set[str], flags: re.RegexFlag) -> str:
    """Replace each thing of one kind by the next one that is not taken, and mark that as taken."""
    place_of_word = {
        word.lower(): (thing, place)
        for thing, words in enumerate(kind)
        for place, word in enumerate(words)
    }
    replacements: dict[int, tuple[str, ...]] = {}

    def replace(match: re.Match[str]) -> str:
        word, plural = match.groups()
        thing, place = place_of_word[word.lower()]
        if thing not in replacements:
            following = (*kind[thing + 1 :], *kind[:thing])
            free = [words for words in following if not _with_plurals(words) & taken]
            if not free:
                return match[0]
            replacements[thing] = free[0]
            taken.update(_with_plurals(free[0]))
        words = replacements[thing]
        new = words[min(place, len(words) - 1)]
        if word.istitle():
            new = new.capitalize()
        return new + plural

    # The longest words first, so that a short word does not hide a longer one.
    words = sorted((word for words in kind for word in words), key=len, reverse=True)
    return re.sub(rf"\b({'|'.join(words)})(s?)\b", replace, text, flags=flags)


def _with_plurals(words: Sequence[str]) -> set[str]:
    singulars = {word.lower() for word in words}
    return singulars | {f"{word}s" for word in singulars}


def _swap_numbers(text: str, mentioned: str) -> str:
    """Replace each number by one that is not mentioned; the same number by the same one."""
    taken = {_value(digits) for digits in DIGITS.findall(mentioned) if _is_readable(digits)}
    taken |= {_value_of_word(word) for word in NUMBER_WORD.findall(mentioned)}
    replacements: dict[int, int] = {}

    def replacement(number: int, candidates: Iterable[int]) -> int | None:
        """The number's replacement, or the first candidate that is not taken."""
        if number not in replacements:
            for candidate in candidates:
                if candidate not in taken:
                    replacements[number] = candidate
                    taken.add(candidate)
                    break
        return replacements.get(number)

    def replace_digits(match: re.Match[str]) -> str:
        if not _is_readable(match[0]):
            return match[0]
        number = _value(match[0])
        new = replacement(number, count(number + max(3, number // 2)))
        return f"{new:,}" if "," in match[0] else str(new)

    def replace_word(match: re.Match[str]) -> str:
        new = replacement(_value_of_word(match[0]), _following_number_words(match[0]))
        if new is None:
            return match[0]
        word = NUMBER_WORDS[new - SMALLEST_NUMBER_WORD]
        return word.capitalize() if match[0].istitle() else word

    # Words first, because they can become at most twelve, whereas digits can become anything.
    text = NUMBER_WORD.sub(replace_word, text)
    return CARDINAL.sub(replace_digits, text)


def _is_readable(digits: str) -> bool:
    return len(digits) <= LONGEST_NUMBER


def _value(digits: str) -> int:
    return int(digits.replace(",", ""))


def _value_of_word(word: str) -> int:
    return SMALLEST_NUMBER_WORD + NUMBER_WORDS.index(word.lower())


def _following_number_words(word: str) -> Iterator[int]:
    """The numbers with words, starting three further on and wrapping around to the beginning."""
    place = NUMBER_WORDS.index(word.lower())
    for step in range(len(NUMBER_WORDS)):
        yield SMALLEST_NUMBER_WORD + (place + 3 + step) % len(NUMBER_WORDS)
