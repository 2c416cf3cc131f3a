"""The built-in TL;DR world: posts, imperfect reference summaries and noisy preferences.

A post states an event (who, deed, thing) and six more facts among distracting sentences that use
the same words in other roles. A summary tells the event and some of the six, in any order. The
labellers of a subreddit want three of them. Its writers are used to another three, one of which is
wanted; they get a fact wrong now and then, and some do not know where to stop. So length is no cue,
an SFT model tells what its subreddit is used to tell, and better summaries differ from worse ones
in several small choices.

Comparisons pair summaries of several named policies; a labeller with a temper prefers the one that
is worth more (`score_summary`), and is sometimes mistaken.

Everything is a function of the world's seed and a post's id, so the judge can ask for the facts
of a post by its id, and two machines get the same world. Rows have the schemas of the real data
(`tldr_3_filtered` and `comparisons`) and go through the same readers.
"""

import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stages.running.files import cached_folder, file_hash, write_lines
from stages.running.progress import progress
from stages.settings import config as settings
from stages.settings.config import Config, World

PREFIX = "toy"  # how the ids of its posts begin
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
    "Some {who} would {ask}.",
]
NUM_DISTRACTORS = (1, 2)

# What a summary says of each fact: the event first, then the others in any order.
CLAUSES: Mapping[str, str] = {
    "event": "My {who} {deed} my {thing}",
    "when": "on {when}",
    "place": "at {place}",
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
    "relationships": ("age", "feeling", "ask"),
    "AskReddit": ("when", "place", "witness"),
    "tifu": ("when", "place", "witness"),
    "relationship_advice": ("age", "feeling", "ask"),
}
# What its writers are used to tell, wanted or not: a third of it is wanted.
HABITS: Mapping[str, Sequence[str]] = {
    "relationships": ("age", "when", "place"),
    "AskReddit": ("witness", "feeling", "ask"),
    "tifu": ("witness", "feeling", "ask"),
    "relationship_advice": ("age", "when", "place"),
}
HABIT = 3.0  # a fact of the habit is told so many times as often as another
COMPLETE_WORDS = 11  # of the event and three other facts


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one post states: one word for each fact."""

    subreddit: str
    """Where it was posted."""
    words: Mapping[str, str]
    """Fact -> its word."""

    @property
    def wanted(self) -> frozenset[str]:
        """The optional facts that this subreddit's labellers want to know."""
        return frozenset(WANTED[self.subreddit])


@dataclass(frozen=True, kw_only=True)
class Writer:
    """How a policy writes."""

    counts: Mapping[int, float]
    """How many optional facts are told -> how often."""
    garble: float
    """Chance that each fact is told wrong."""
    taste: float = 1.0
    """A wanted fact is told so many times as often as another one."""


COUNTS = {2: 0.1, 3: 0.8, 4: 0.1}
# Named producers of summaries, as in the real comparisons: `ref` is the human reference. All but
# it write summaries of the same lengths.
WRITERS = {
    "ref": Writer(counts={2: 0.1, 3: 0.6, 5: 0.17, 6: 0.13}, garble=0.06, taste=2.5),
    "sup_small": Writer(counts=COUNTS, garble=0.06, taste=0.5),
    "sup_large": Writer(counts=COUNTS, garble=0.03, taste=3.0),
    "best_of_n": Writer(counts=COUNTS, garble=0.03, taste=16.0),
    "off_topic": Writer(counts=COUNTS, garble=0.03, taste=0.08),
}


def facts_of(post_id: str) -> Facts:
    """The facts that the post with this id states. Raises ValueError for a foreign id."""
    if not post_id.startswith(PREFIX):
        raise ValueError(f"{post_id!r} is not a post of the built-in world: it has no known facts")
    rng = random.Random(f"facts {post_id}")
    return Facts(
        subreddit=rng.choice(list(WANTED)),
        words={slot: rng.choice(choices) for slot, choices in WORDS.items()},
    )


def score_summary(summary: str, facts: Facts) -> float:
    """What a labeller thinks of a summary.

    A right fact gains 1 if it is wanted or of the event, and costs UNWANTED_COST otherwise; a wrong
    one costs WRONG_COST, a word beyond COMPLETE_WORDS LONG_COST. Range: 6 for the event with the
    three wanted facts, 0 for a text that says nothing, negative where it is wrong or rambles.
    """
    right, wrong = read_summary(summary, facts)
    unwanted = right & (set(OPTIONAL) - facts.wanted)
    extra_words = max(0, len(summary.split()) - COMPLETE_WORDS)
    gain = len(right - unwanted) - UNWANTED_COST * len(unwanted)
    return gain - WRONG_COST * len(wrong) - LONG_COST * extra_words


def read_summary(summary: str, facts: Facts) -> tuple[set[str], set[tuple[str, str]]]:
    """The facts that a summary gets right, and the (fact, word) pairs that it gets wrong."""
    text = summary.lower()
    right, wrong = set(), set()
    for slot, reader in READERS.items():
        found_words, truth = set(reader.findall(text)), facts.words[slot]
        if truth in found_words:
            right.add(slot)
        wrong |= {(slot, word) for word in found_words if word != truth}
    return right, wrong


def write_summary(rng: random.Random, facts: Facts, writer: Writer) -> str:
    """A summary in the manner of `writer`: the event always, then other facts in any order."""
    words = {
        slot: rng.choice(WORDS[slot]) if rng.random() < writer.garble else word
        for slot, word in facts.words.items()
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
    return ", ".join(CLAUSES[slot].format(**words) for slot in ("event", *chosen)) + "."


def make_post(post_id: str) -> dict[str, str]:
    """One row in the schema of `tldr_3_filtered`."""
    facts = facts_of(post_id)
    rng = random.Random(f"post {post_id}")
    rest = [STATEMENTS[slot].format(**facts.words) for slot in OPTIONAL]
    rng.shuffle(rest)
    for text in rng.sample(DISTRACTORS, k=rng.randint(*NUM_DISTRACTORS)):
        other = {slot: rng.choice(choices) for slot, choices in WORDS.items()}
        rest.insert(rng.randint(0, len(rest)), text.format(**other))
    rest.insert(rng.randint(0, 2), rng.choice(EVENTS).format(**facts.words))
    half = len(rest) // 2
    return {
        "id": post_id,
        "subreddit": facts.subreddit,
        "title": rng.choice(TITLES).format(**facts.words),
        "post": " ".join(rest[:half]) + "\n" + " ".join(rest[half:]),
        "summary": write_summary(rng, facts, WRITERS["ref"]),
    }


def make_comparison(row: dict[str, str], key: str, split: str) -> dict[str, Any]:
    """One row in the schema of `comparisons`: two policies on one post, and a verdict.

    The labeller prefers the better summary with probability sigmoid(gap / temper). `confidence` is
    OpenAI's: from 1 (sure of the first) to 9 (sure of the second), further from 5 the larger the
    gap that the labeller felt; nobody says 5.
    """
    rng = random.Random(f"comparison {key} {row['id']}")
    pair = rng.sample(list(WRITERS), k=2)
    facts = facts_of(row["id"])
    texts = [
        row["summary"] if policy == "ref" else write_summary(rng, facts, WRITERS[policy])
        for policy in pair
    ]
    worker = rng.randrange(5)
    temper = 0.15 + 0.05 * worker
    scores = [score_summary(text, facts) for text in texts]
    noise = temper * math.log(1 / rng.uniform(1e-9, 1 - 1e-9) - 1)  # logistic
    felt_gap = scores[1] - scores[0] + noise
    strength = 1 + min(3, int(abs(felt_gap)))
    return {
        "info": {**{k: row[k] for k in ("id", "post", "title", "subreddit")}}
        | {"site": None, "article": None},
        "summaries": [
            {"text": f" {text}", "policy": policy, "note": None}
            for text, policy in zip(texts, pair, strict=True)
        ],
        "choice": int(felt_gap > 0),
        "worker": f"labeller-{worker}",
        "batch": f"toy_batch{1 + rng.randrange(4)}",
        "split": split,
        "extra": {"confidence": 5 + strength if felt_gap > 0 else 5 - strength},
    }


def write_world(folder: Path, world: World, show: Callable[..., Iterator[int]]) -> None:
    """Write the four files of a data folder; `show` passes a range on and shows progress."""
    name = f"{PREFIX}{world.seed}"
    sizes = {
        "train": (world.train_posts, world.train_comparisons, ("train",)),
        "validation": (world.validation_posts, world.validation_comparisons, ("valid1", "valid2")),
    }
    for part, (posts, comparisons, splits) in sizes.items():
        rows = [make_post(f"{name}-{part}-{n}") for n in show(range(posts), part, posts)]
        write_lines(folder / f"sft_{part}.jsonl", rows)
        pairs = (
            make_comparison(rows[n % posts], f"{world.seed} {n}", splits[n % len(splits)])
            for n in show(range(comparisons), f"{part} comparisons", comparisons)
        )
        write_lines(folder / f"comparisons_{part}.jsonl", pairs)


def world_folder(config: Config) -> Path:
    """The built-in world as files in the real schemas, written once for each set of settings."""
    # Another generator writes another world: its source is part of the name.
    key = json.dumps(asdict(config.world), sort_keys=True) + file_hash(Path(__file__))
    folder = settings.RUNS / "cache" / f"toy-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return cached_folder(folder, partial(write_world, world=config.world, show=progress))
