"""The built-in posts: short stories, imperfect reference summaries and noisy preferences.

A post states an event (who, deed, thing) and six more facts among distracting sentences that use
the same words in other roles. A summary tells the event and some of the six, in any order. The
labelers of a subreddit want three of them. Its writers usually tell another three, only one of
which is wanted; they get a fact wrong now and then, and some do not know where to stop. So length
is no cue, an SFT model tells what its subreddit usually tells, and better summaries differ from
worse ones in several small choices.

Comparisons pair summaries of several named policies. A labeler prefers the one that is worth more
(`score_summary`), but is sometimes mistaken.

Everything is a function of the seed (`world.seed`) and a post's id. So the judge can look up the
facts of a post by its id, and two machines get the same posts. Rows have the schemas of the real
data (`tldr_3_filtered` and `comparisons`) and go through the same readers.
"""

import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stages.config import paths
from stages.config.config import Config
from stages.config.sections import World
from stages.runs.files import cached_folder, file_hash, write_lines
from stages.runs.progress import progress

PREFIX = "toy"  # the ids of built-in posts begin with it

# -- what posts state ------------------------------------------------------------------------------

WORDS: Mapping[str, Sequence[str]] = {
    "who": (
        "brother",
        "sister",
        "mother",
        "father",
        "cousin",
        "uncle",
        "aunt",
        "roommate",
        "boss",
        "neighbor",
        "girlfriend",
        "teacher",
        "landlord",
        "coworker",
    ),
    "deed": (
        "sold",
        "broke",
        "lost",
        "stole",
        "borrowed",
        "painted",
        "hid",
        "burned",
        "washed",
        "wrapped",
        "copied",
        "dropped",
    ),
    "thing": (
        "bike",
        "laptop",
        "guitar",
        "camera",
        "phone",
        "jacket",
        "car",
        "couch",
        "piano",
        "watch",
        "ring",
        "book",
        "garden",
        "tent",
    ),
    "when": (
        "monday",
        "tuesday",
        "wednesday",
        "thursday",
        "friday",
        "saturday",
        "christmas",
        "easter",
    ),
    "place": ("work", "school", "church", "college", "home", "sea", "court", "camp"),
    "age": (
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
    ),
    "witness": ("anna", "tom", "maria", "peter", "lucy", "frank", "emma", "oscar"),
    "feeling": ("angry", "sad", "guilty", "happy", "nervous", "jealous", "proud", "lonely"),
    "ask": ("apologize", "leave", "wait", "complain", "forgive", "move", "quit", "sue"),
}
"""The words of each fact. The order matters: a draw from it decides what a post says."""
EVENT = ("who", "deed", "thing")
# The facts that a summary may leave out.
OPTIONAL = tuple(fact for fact in WORDS if fact not in EVENT)

TITLES = ("Advice about my {who}", "My {thing}", "Please help")
# One sentence of the post states the event, and one states each other fact.
EVENT_SENTENCES = ("My {who} {deed} my {thing}.", "So my {who} {deed} my {thing}.")
STATEMENTS: Mapping[str, str] = {
    "when": "It was on {when}.",
    "place": "We were at {place}.",
    "age": "I am {age}.",
    "witness": "I told {witness}.",
    "feeling": "I feel {feeling}.",
    "ask": "Should I {ask}?",
}
# The same words in other roles: a summary that copies these is wrong.
DISTRACTORS = (
    "His {who} has a {thing}.",
    "He is never {feeling} on {when}.",
    "She went to {place} with {witness}.",
    "They are {age} and {feeling}.",
    "Some {who} would {ask}.",
)
FEWEST_DISTRACTORS = 1
MOST_DISTRACTORS = 2

# -- what summaries say ----------------------------------------------------------------------------

# A summary's clause for each fact: the event first, then the others in any order.
CLAUSES: Mapping[str, str] = {
    "event": "My {who} {deed} my {thing}",
    "when": "on {when}",
    "place": "at {place}",
    "age": "aged {age}",
    "witness": "told {witness}",
    "feeling": "feel {feeling}",
    "ask": "should {ask}",
}


def _clause_readers() -> dict[str, re.Pattern[str]]:
    """For each fact a pattern whose group is its word: a word counts only in its fact's clause."""
    patterns = {
        "who": r"\bmy (\w+) (?:{deed})\b",
        "deed": r"\b({deed}) my\b",
        "thing": r"\b(?:{deed}) my (\w+)",
    }
    for fact in OPTIONAL:
        placeholder = f"{{{fact}}}"
        patterns[fact] = CLAUSES[fact].replace(placeholder, f"({placeholder})")
    any_word = {fact: "|".join(words) for fact, words in WORDS.items()}
    return {fact: re.compile(pattern.format(**any_word)) for fact, pattern in patterns.items()}


READERS = _clause_readers()

# The facts that the labelers of a subreddit want to know: half of the optional ones.
WANTED: Mapping[str, Sequence[str]] = {
    "relationships": ("age", "feeling", "ask"),
    "AskReddit": ("when", "place", "witness"),
    "tifu": ("when", "place", "witness"),
    "relationship_advice": ("age", "feeling", "ask"),
}
# The facts that its writers usually tell, of which a third is wanted.
HABITS: Mapping[str, Sequence[str]] = {
    "relationships": ("age", "when", "place"),
    "AskReddit": ("witness", "feeling", "ask"),
    "tifu": ("witness", "feeling", "ask"),
    "relationship_advice": ("age", "when", "place"),
}
HABIT_WEIGHT = 3.0  # a usual fact is told this many times as often as an unusual one

# What a labeler subtracts; a right fact that is wanted gains 1.
WRONG_COST = 1.0  # for a wrong fact
UNWANTED_COST = 0.5  # for a right fact that the subreddit's labelers do not want
LONG_COST = 0.25  # for each word beyond the length of a complete summary
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
        """The optional facts that this subreddit's labelers want to know."""
        return frozenset(WANTED[self.subreddit])


@dataclass(frozen=True, kw_only=True)
class Writer:
    """How a policy writes."""

    counts: Mapping[int, float]
    """Number of optional facts in a summary -> how often."""
    garble: float
    """Chance that each fact is told wrong."""
    taste: float = 1.0
    """A wanted fact is told this many times as often as another one."""


COUNTS = {2: 0.1, 3: 0.8, 4: 0.1}
# Named policies, as in the real comparisons; `ref` is the human reference. All others write
# summaries of the same lengths.
WRITERS = {
    "ref": Writer(counts={2: 0.1, 3: 0.6, 5: 0.17, 6: 0.13}, garble=0.06, taste=2.5),
    "sup_small": Writer(counts=COUNTS, garble=0.06, taste=0.5),
    "sup_large": Writer(counts=COUNTS, garble=0.03, taste=3.0),
    "best_of_n": Writer(counts=COUNTS, garble=0.03, taste=16.0),
    "off_topic": Writer(counts=COUNTS, garble=0.03, taste=0.08),
}
NUM_LABELERS = 5
NUM_BATCHES = 4


def facts_of(post_id: str) -> Facts:
    """The facts that the post with this id states. Raises ValueError for a foreign id."""
    if not post_id.startswith(PREFIX):
        raise ValueError(f"{post_id!r} is not a built-in post: its facts are not known")
    rng = random.Random(f"facts {post_id}")
    return Facts(subreddit=rng.choice(list(WANTED)), words=_draw_words(rng))


def _draw_words(rng: random.Random) -> dict[str, str]:
    """One word for each fact."""
    return {fact: rng.choice(words) for fact, words in WORDS.items()}


def score_summary(summary: str, facts: Facts) -> float:
    """What a summary is worth to a labeler.

    A right fact gains 1 if it is wanted or part of the event, and costs UNWANTED_COST otherwise. A
    wrong fact costs WRONG_COST, and each word beyond COMPLETE_WORDS costs LONG_COST. The range: 6
    for the event with the three wanted facts, 0 for a text that says nothing, and negative for one
    that is wrong or rambles.
    """
    right, wrong = read_summary(summary, facts)
    unwanted = {fact for fact in right if fact in OPTIONAL and fact not in facts.wanted}
    extra_words = max(0, len(summary.split()) - COMPLETE_WORDS)
    return (
        len(right - unwanted)
        - UNWANTED_COST * len(unwanted)
        - WRONG_COST * len(wrong)
        - LONG_COST * extra_words
    )


def read_summary(summary: str, facts: Facts) -> tuple[set[str], set[tuple[str, str]]]:
    """The facts that a summary gets right, and the (fact, word) pairs that it gets wrong."""
    text = summary.lower()
    right = set()
    wrong = set()
    for fact, reader in READERS.items():
        for word in reader.findall(text):
            if word == facts.words[fact]:
                right.add(fact)
            else:
                wrong.add((fact, word))
    return right, wrong


def write_summary(rng: random.Random, facts: Facts, writer: Writer) -> str:
    """A summary in the manner of `writer`: always the event, then other facts in any order."""
    words = {
        fact: rng.choice(WORDS[fact]) if rng.random() < writer.garble else word
        for fact, word in facts.words.items()
    }
    [count] = rng.choices(list(writer.counts), weights=list(writer.counts.values()))

    # A weighted draw without replacement: the facts with the largest keys (Efraimidis).
    keys = {}
    for fact in OPTIONAL:
        weight = 1.0
        if fact in facts.wanted:
            weight *= writer.taste
        if fact in HABITS[facts.subreddit]:
            weight *= HABIT_WEIGHT
        keys[fact] = rng.random() ** (1 / weight)
    chosen = sorted(OPTIONAL, key=lambda fact: keys[fact], reverse=True)[:count]

    clauses = [CLAUSES[name].format(**words) for name in ("event", *chosen)]
    return ", ".join(clauses) + "."


def make_post(post_id: str) -> dict[str, str]:
    """One row in the schema of `tldr_3_filtered`."""
    facts = facts_of(post_id)
    rng = random.Random(f"post {post_id}")

    # The event is one of the first three sentences; everything else comes in any order.
    sentences = [STATEMENTS[fact].format(**facts.words) for fact in OPTIONAL]
    rng.shuffle(sentences)
    num_distractors = rng.randint(FEWEST_DISTRACTORS, MOST_DISTRACTORS)
    for distractor in rng.sample(DISTRACTORS, k=num_distractors):
        other_words = _draw_words(rng)
        place = rng.randint(0, len(sentences))
        sentences.insert(place, distractor.format(**other_words))
    place = rng.randint(0, 2)
    sentences.insert(place, rng.choice(EVENT_SENTENCES).format(**facts.words))

    half = len(sentences) // 2
    return {
        "id": post_id,
        "subreddit": facts.subreddit,
        "title": rng.choice(TITLES).format(**facts.words),
        "post": " ".join(sentences[:half]) + "\n" + " ".join(sentences[half:]),
        "summary": write_summary(rng, facts, WRITERS["ref"]),
    }


def make_comparison(row: dict[str, str], key: str, split: str) -> dict[str, Any]:
    """One row in the schema of `comparisons`: two policies on one post, and a verdict.

    The labeler prefers the better summary with probability sigmoid(gap / temper). `confidence` is
    OpenAI's: from 1 (sure of the first summary) to 9 (sure of the second), further from 5 the
    larger the gap that the labeler felt. It is never 5, a tie.
    """
    rng = random.Random(f"comparison {key} {row['id']}")
    facts = facts_of(row["id"])

    # Two policies and their summaries.
    policies = rng.sample(list(WRITERS), k=2)
    texts = []
    for policy in policies:
        if policy == "ref":
            texts.append(row["summary"])
        else:
            texts.append(write_summary(rng, facts, WRITERS[policy]))

    # The labeler feels the gap between the scores with logistic noise.
    labeler = rng.randrange(NUM_LABELERS)
    temper = 0.15 + 0.05 * labeler
    first_score, second_score = (score_summary(text, facts) for text in texts)
    noise = temper * math.log(1 / rng.uniform(1e-9, 1 - 1e-9) - 1)
    felt_gap = second_score - first_score + noise
    strength = 1 + min(3, int(abs(felt_gap)))
    prefers_second = felt_gap > 0
    return {
        "info": {
            "id": row["id"],
            "post": row["post"],
            "title": row["title"],
            "subreddit": row["subreddit"],
            "site": None,
            "article": None,
        },
        "summaries": [
            {"text": f" {text}", "policy": policy, "note": None}
            for text, policy in zip(texts, policies, strict=True)
        ],
        "choice": 1 if prefers_second else 0,
        # The spelling of this value must not change: the data are the same in every version.
        "worker": f"labeller-{labeler}",
        "batch": f"toy_batch{1 + rng.randrange(NUM_BATCHES)}",
        "split": split,
        "extra": {"confidence": 5 + strength if prefers_second else 5 - strength},
    }


def write_world(folder: Path, world: World, show: Callable[..., Iterator[int]]) -> None:
    """Write the four files of a data folder. `show` iterates over a range and shows progress."""
    _write_part(
        folder,
        world,
        part="train",
        num_posts=world.train_posts,
        num_comparisons=world.train_comparisons,
        splits=("train",),
        show=show,
    )
    _write_part(
        folder,
        world,
        part="validation",
        num_posts=world.validation_posts,
        num_comparisons=world.validation_comparisons,
        splits=("valid1", "valid2"),
        show=show,
    )


def _write_part(
    folder: Path,
    world: World,
    *,
    part: str,
    num_posts: int,
    num_comparisons: int,
    splits: Sequence[str],
    show: Callable[..., Iterator[int]],
) -> None:
    """Write `sft_<part>.jsonl` and `comparisons_<part>.jsonl`.

    The comparisons go through the posts in turn, and through `splits`, the values of their field.
    """
    posts = [
        make_post(f"{PREFIX}{world.seed}-{part}-{number}")
        for number in show(range(num_posts), part, num_posts)
    ]
    write_lines(folder / f"sft_{part}.jsonl", posts)
    comparisons = (
        make_comparison(
            posts[number % num_posts],
            key=f"{world.seed} {number}",
            split=splits[number % len(splits)],
        )
        for number in show(range(num_comparisons), f"{part} comparisons", num_comparisons)
    )
    write_lines(folder / f"comparisons_{part}.jsonl", comparisons)


def world_folder(config: Config) -> Path:
    """The built-in posts as files in the real schemas, written once for each set of settings."""
    # The source is part of the name, because another version of it may write other posts.
    key = json.dumps(config.world.model_dump(), sort_keys=True) + file_hash(Path(__file__))
    folder = paths.RUNS / "cache" / f"toy-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return cached_folder(folder, partial(write_world, world=config.world, show=progress))
