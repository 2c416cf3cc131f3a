"""The graded world: eight facts that may be told, and who wants which of them.

A post states an event (who, deed, thing) and eight more facts among distracting sentences that use
the same words in other roles. A summary tells the event and some of the eight, in any order. The
labellers of each subreddit want four of them. Its writers are used to another four, of which two
are wanted; they get a fact wrong now and then, and some do not know where to stop.

So length is no cue, an SFT model tells what its subreddit is used to tell, and better summaries
differ from worse ones in many small choices. `toy.py` writes the files. Standard library only.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PREFIX = "toygraded"
TITLES = ["Advice about my {who}", "My {thing}", "Please help"]
WRONG_COST = 1.0  # a wrong fact costs what a right one gains
UNWANTED_COST = 0.5  # a right fact that nobody there wants
LONG_COST = 0.25  # per word beyond the length of a complete summary
WORDS: Mapping[str, Sequence[str]] = {
    "who": "brother sister mother father cousin uncle aunt roommate boss neighbor girlfriend "
    "teacher landlord coworker".split(),
    "deed": "sold broke lost stole borrowed painted hid burned washed wrapped copied "
    "dropped".split(),
    "thing": "bike laptop guitar camera phone jacket car couch piano watch ring book "
    "garden tent".split(),
    "when": "monday tuesday wednesday thursday friday saturday christmas easter".split(),
    "place": "work school church college home sea court camp".split(),
    "reason": "money rent noise food trust pride politics football".split(),
    "cost": "ten twenty thirty forty fifty sixty seventy eighty".split(),
    "age": "twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split(),
    "witness": "anna tom maria peter lucy frank emma oscar".split(),
    "feeling": "angry sad guilty happy nervous jealous proud lonely".split(),
    "ask": "apologize leave wait complain forgive move quit sue".split(),
}
EVENT = ("who", "deed", "thing")
# The facts that a summary may leave out.
OPTIONAL = tuple(slot for slot in WORDS if slot not in EVENT)

# One sentence of the post states the event; one each states the other facts.
EVENTS = ("My {who} {deed} my {thing}.", "So my {who} {deed} my {thing}.")
STATEMENTS: Mapping[str, str] = {
    "when": "It was on {when}.",
    "place": "We were at {place}.",
    "reason": "We fought over {reason}.",
    "cost": "It cost {cost}.",
    "age": "I am {age}.",
    "witness": "I told {witness}.",
    "feeling": "I feel {feeling}.",
    "ask": "Should I {ask}?",
}
# The same words in other roles: whoever copies these is wrong.
DISTRACTORS = [
    "His {who} has a {thing}.",
    "He is never {feeling} on {when}.",
    "She went to {place} with {witness}.",
    "They are {age} and {feeling}.",
    "Nobody has {cost} for {reason}.",
    "Some {who} would {ask}.",
]
NUM_DISTRACTORS = (1, 2)

# What a summary says of each fact: the event first, then the others in any order.
CLAUSES: Mapping[str, str] = {
    "event": "My {who} {deed} my {thing}",
    "when": "on {when}",
    "place": "at {place}",
    "reason": "over {reason}",
    "cost": "paid {cost}",
    "age": "aged {age}",
    "witness": "told {witness}",
    "feeling": "feel {feeling}",
    "ask": "should {ask}",
}
# What a reader takes from a summary: a word counts for a fact only in its clause.
PATTERNS = {
    "who": r"\bmy (\w+) (?:{deed})\b",
    "deed": r"\b({deed}) my\b",
    "thing": r"\b(?:{deed}) my (\w+)",
    **{slot: CLAUSES[slot].replace(f"{{{slot}}}", f"({{{slot}}})") for slot in OPTIONAL},
}
READERS = {
    slot: re.compile(text.format(**{name: "|".join(words) for name, words in WORDS.items()}))
    for slot, text in PATTERNS.items()
}

# What the labellers of a subreddit want to know: half of the optional facts.
WANTED: Mapping[str, Sequence[str]] = {
    "relationships": ("age", "feeling", "ask", "when"),
    "AskReddit": ("place", "reason", "witness", "cost"),
    "relationship_advice": ("age", "reason", "ask", "witness"),
    "tifu": ("when", "place", "feeling", "cost"),
    "personalfinance": ("cost", "ask", "reason", "age"),
    "legaladvice": ("when", "place", "witness", "feeling"),
}
# What its writers are used to tell, wanted or not: half of it is wanted.
HABITS: Mapping[str, Sequence[str]] = {
    "relationships": ("age", "when", "reason", "place"),
    "AskReddit": ("cost", "witness", "ask", "feeling"),
    "relationship_advice": ("reason", "ask", "cost", "when"),
    "tifu": ("feeling", "when", "reason", "witness"),
    "personalfinance": ("age", "cost", "place", "witness"),
    "legaladvice": ("place", "feeling", "ask", "age"),
}
HABIT = 3.0  # a fact of the habit is told so many times as often as another
COMPLETE_WORDS = 13  # of the event and four other facts


@dataclass(frozen=True, kw_only=True)
class GradedFacts:
    """What one post states: one word for each fact."""

    subreddit: str
    """Where it was posted."""
    told: Mapping[str, str]
    """Fact -> its word."""

    @property
    def wanted(self) -> frozenset[str]:
        """The optional facts that this subreddit's labellers want to know."""
        return frozenset(WANTED[self.subreddit])


@dataclass(frozen=True, kw_only=True)
class GradedWriter:
    """How a policy writes."""

    counts: Mapping[int, float]
    """How many optional facts are told -> how often."""
    garble: float
    """Chance that each fact is told wrong."""
    taste: float = 1.0
    """A wanted fact is told so many times as often as another one."""


COUNTS = {3: 0.1, 4: 0.8, 5: 0.1}
# As in `toy.py`, `ref` is the human reference. All but it write summaries of the same lengths.
GRADED_WRITERS = {
    "ref": GradedWriter(counts={3: 0.1, 4: 0.6, 6: 0.17, 7: 0.13}, garble=0.06, taste=1.5),
    "sup_small": GradedWriter(counts=COUNTS, garble=0.06, taste=0.3),
    "sup_large": GradedWriter(counts=COUNTS, garble=0.03, taste=4.0),
    "best_of_n": GradedWriter(counts=COUNTS, garble=0.03, taste=50.0),
    "off_topic": GradedWriter(counts=COUNTS, garble=0.03, taste=0.03),
}


def facts_of(post_id: str) -> GradedFacts:
    """The facts that the post with this id states."""
    rng = random.Random(f"facts {post_id}")
    return GradedFacts(
        subreddit=rng.choice(list(WANTED)),
        told={slot: rng.choice(choices) for slot, choices in WORDS.items()},
    )


def score_summary(summary: str, facts: GradedFacts) -> float:
    """What a labeller thinks of a summary.

    A right fact gains 1 if it is wanted or of the event, and costs UNWANTED_COST otherwise; a wrong
    one costs WRONG_COST, a word beyond COMPLETE_WORDS LONG_COST. Range: 7 for the event with the
    four wanted facts, 0 for a text that says nothing, negative where it is wrong or rambles.
    """
    right, wrong = read_summary(summary, facts)
    unwanted = right & (set(OPTIONAL) - facts.wanted)
    extra_words = max(0, len(summary.split()) - COMPLETE_WORDS)
    gain = len(right - unwanted) - UNWANTED_COST * len(unwanted)
    return gain - WRONG_COST * len(wrong) - LONG_COST * extra_words


def read_summary(summary: str, facts: GradedFacts) -> tuple[set[str], set[tuple[str, str]]]:
    """The facts that a summary gets right, and the (fact, word) pairs that it gets wrong."""
    text = summary.lower()
    right, wrong = set(), set()
    for slot, reader in READERS.items():
        told, truth = set(reader.findall(text)), facts.told[slot]
        if truth in told:
            right.add(slot)
        wrong |= {(slot, word) for word in told if word != truth}
    return right, wrong


def write_summary(rng: random.Random, facts: GradedFacts, writer: GradedWriter) -> str:
    """A summary in the manner of `writer`: the event always, then other facts in any order."""
    told = {
        slot: rng.choice(WORDS[slot]) if rng.random() < writer.garble else word
        for slot, word in facts.told.items()
    }
    (count,) = rng.choices(list(writer.counts), list(writer.counts.values()))
    # The largest of these are a draw without replacement in which weights count (Efraimidis).
    weights = {
        slot: (writer.taste if slot in facts.wanted else 1.0)
        * (HABIT if slot in HABITS[facts.subreddit] else 1.0)
        for slot in OPTIONAL
    }
    keys = {slot: rng.random() ** (1 / weight) for slot, weight in weights.items()}
    chosen = sorted(OPTIONAL, key=lambda slot: -keys[slot])[:count]
    return ", ".join(CLAUSES[slot].format(**told) for slot in ("event", *chosen)) + "."


def make_post(post_id: str) -> dict[str, str]:
    """One row in the schema of `tldr_3_filtered`."""
    facts = facts_of(post_id)
    rng = random.Random(f"post {post_id}")
    rest = [STATEMENTS[slot].format(**facts.told) for slot in OPTIONAL]
    rng.shuffle(rest)
    for text in rng.sample(DISTRACTORS, k=rng.randint(*NUM_DISTRACTORS)):
        other = {slot: rng.choice(choices) for slot, choices in WORDS.items()}
        rest.insert(rng.randint(0, len(rest)), text.format(**other))
    rest.insert(rng.randint(0, 2), rng.choice(EVENTS).format(**facts.told))
    half = len(rest) // 2
    return {
        "id": post_id,
        "subreddit": facts.subreddit,
        "title": rng.choice(TITLES).format(**facts.told),
        "post": " ".join(rest[:half]) + "\n" + " ".join(rest[half:]),
        "summary": write_summary(rng, facts, GRADED_WRITERS["ref"]),
    }
