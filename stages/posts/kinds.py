"""The kinds of the built-in world: their words, and the sentences that posts and summaries use.

`plain` has six facts in words that every post shares. `hard` has eight: people have one of 60 names
and places one of 40, put together from syllables, a few of them common and most rare; there are
more distracting sentences, and these are closer to the ones that count. Standard library only.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

Words = Mapping[str, Sequence[str]]

PLAIN_WORDS = {
    "who": "brother sister mother father cousin uncle aunt roommate boss neighbor girlfriend "
    "teacher landlord coworker".split(),
    "deed": "sold broke lost stole borrowed painted hid burned washed wrapped copied "
    "dropped".split(),
    "thing": "bike laptop guitar camera phone jacket car couch piano watch ring book "
    "garden tent".split(),
    "when": "monday tuesday wednesday thursday friday saturday christmas easter".split(),
    "feeling": "angry sad guilty happy nervous jealous proud lonely tired confused "
    "scared hurt".split(),
    "ask": "apologize leave wait complain forgive move quit call write sue pay listen".split(),
}
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
PAIRS = [first + second for first in SYLLABLES for second in SYLLABLES]


def often(words: Sequence[str]) -> list[str]:
    """The words, each as often as it is drawn: the second half as often as the first.

    So are real names: a few are everywhere, most are rare (Zipf's law).
    """
    return [word for rank, word in enumerate(words, 1) for _ in range(len(words) // rank)]


HARD_WORDS = {
    **PLAIN_WORDS,
    "name": often([pair.capitalize() for pair in PAIRS[::82]]),
    "place": often([f"{pair.capitalize()}n" for pair in PAIRS[12::123]]),
}


@dataclass(frozen=True)
class Kind:
    """What one kind of world says, and how a summary is read there."""

    prefix: str
    """How the ids of its posts begin, before the world's seed."""
    words: Words
    """Fact -> the words that it may be."""
    statements: Words
    """Sentences of the post: one of `event`, and one of each other key, state the facts."""
    distractors: Sequence[str]
    """Sentences with the same words in other roles: whoever copies these is wrong."""
    num_distractors: tuple[int, int]
    """The fewest and the most of them in a post."""
    clauses: Mapping[str, str]
    """What a summary says of each fact; `event` is always told, the others by chance."""
    inline: Sequence[str]
    """The optional facts that stand in the sentence of the event, in their order."""
    patterns: Mapping[str, str]
    """What a reader takes from a summary: a word counts for a fact only in its clause."""
    complete_words: int
    """Words that a summary may have without a price: one more than a complete one has."""

    @property
    def optional(self) -> tuple[str, ...]:
        """The facts that a summary may leave out, in the order in which it tells them."""
        return (*self.inline, *ENDS)

    @cached_property
    def readers(self) -> dict[str, re.Pattern[str]]:
        """The patterns, compiled, with the words of deeds and days."""
        words = {slot: "|".join(self.words[slot]) for slot in ("deed", "when")}
        return {slot: re.compile(text.format(**words)) for slot, text in self.patterns.items()}


# The facts that a summary tells in sentences of their own -> how these end.
ENDS = {"feeling": ".", "ask": "?"}
PLAIN = Kind(
    prefix="toy",
    words=PLAIN_WORDS,
    # One sentence of the post states the event; one each states the other facts.
    statements={
        "event": ["My {who} {deed} my {thing}.", "So my {who} {deed} my {thing}."],
        "when": ["It happened on {when}.", "That was on {when}."],
        "feeling": ["Now I feel {feeling}.", "I really feel {feeling}."],
        "ask": ["Should I {ask}?", "Maybe I should {ask}."],
    },
    distractors=[
        "The {who} next door has a {thing}.",
        "I once saw a {thing} in a shop.",
        "People said the {who} was {feeling}.",
        "We always meet on {when}.",
        "They tell everyone to {ask}.",
        "A {who} I know looked {feeling}.",
        "Nobody ever {deed} a {thing} there.",
        "Some {who} would {ask}.",
    ],
    num_distractors=(2, 4),
    clauses={
        "event": "My {who} {deed} my {thing}",
        "when": " on {when}",
        "feeling": "I feel {feeling}",
        "ask": "Should I {ask}",
    },
    inline=("when",),
    patterns={
        "who": r"\bmy (\w+) (?:{deed})\b",
        "deed": r"\b({deed}) my\b",
        "thing": r"\b(?:{deed}) my (\w+)",
        "when": r"\bon ({when})\b",
        "feeling": r"\bfeel (\w+)",
        "ask": r"\bshould i (\w+)",
    },
    complete_words=14,
)
HARD = Kind(
    prefix="toyhard",
    words=HARD_WORDS,
    statements={
        "event": ["My {who} {name} {deed} my {thing}.", "So my {who} {name} {deed} my {thing}."],
        "place": ["It happened in {place}.", "That was in {place}."],
        "when": ["It was on {when}.", "All that on {when}."],
        "feeling": ["Now I feel {feeling}.", "I really feel {feeling}."],
        "ask": ["Should I {ask}?", "Maybe I should {ask}."],
    },
    # Each begins as a sentence that counts does, and turns off.
    distractors=[
        "My {who} {name} has a {thing}.",
        "My {who} {name} was {feeling}.",
        "So {name} {deed} the {thing}.",
        "It happens in {place} too.",
        "That one is in {place}.",
        "It closed on {when}.",
        "I never feel as {feeling} as {name}.",
        "Should {name} {ask}?",
    ],
    num_distractors=(3, 5),
    clauses={
        "event": "My {who} {name} {deed} my {thing}",
        "place": " in {place}",
        "when": " on {when}",
        "feeling": "I feel {feeling}",
        "ask": "Should I {ask}",
    },
    inline=("place", "when"),
    patterns={
        **PLAIN.patterns,
        "who": r"\bmy (\w+) (?:\w+ )?(?:{deed})\b",
        "name": r"\bmy \w+ (\w+) (?:{deed})\b",
        "place": r"\b(?:{deed}) my \w+ in (\w+)",
    },
    complete_words=17,
)
KINDS = {"plain": PLAIN, "hard": HARD}
