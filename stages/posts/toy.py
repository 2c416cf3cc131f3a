"""The built-in TL;DR world: posts, imperfect reference summaries and noisy preferences.

A post states six facts (who, deed, thing, when, feeling, ask) among distracting sentences that
use the same words in other roles, so that a summary has to be copied from the right places. In the
hard world it states eight, two of them rare names (`kinds.py`); `graded.py` is a world of its own.
Human-like references leave facts out and now and then get one wrong: there is room above them.
Comparisons pair summaries of several named policies; a labeller with a temper prefers the one
with more right facts, fewer wrong ones and no rambling, and is sometimes mistaken.

Everything is a function of the world's seed and a post's id, so the judge can ask for the facts
of a post by its id, and two machines get the same world. Rows have the schemas of the real data
(`tldr_3_filtered` and `comparisons`) and go through the same readers.
"""

import hashlib
import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stages.posts import graded, kinds
from stages.posts.graded import GRADED_WRITERS
from stages.posts.kinds import ENDS, HARD, KINDS, PLAIN, Kind
from stages.running.files import file_hash
from stages.running.progress import progress
from stages.settings import config as settings
from stages.settings.config import Config, World

SUBREDDITS = "relationships AskReddit relationship_advice tifu personalfinance legaladvice".split()
TITLES = ["Need advice about my {who}", "What to do about my {thing}", "Long story, please help"]
WRONG_COST = 1.0  # a wrong fact costs what a right one gains
LONG_COST = 0.25  # per word beyond the length of a complete summary


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of one post, one word each; name and place in the hard world alone."""

    who: str
    deed: str
    thing: str
    when: str
    feeling: str
    ask: str
    name: str = ""
    place: str = ""

    @property
    def kind(self) -> Kind:
        """The kind of world that states them."""
        return HARD if self.name else PLAIN


@dataclass(frozen=True, kw_only=True)
class Writer:
    """How a policy writes."""

    mention: float
    """Chance that each optional fact (place, when, feeling, ask) is mentioned."""
    garble: float
    """Chance that each fact is told wrong."""
    terse: float = 0.0
    """Chance that the event is told and nothing else."""
    repeats: int = 0
    """Sentences that are said again."""


# Named producers of summaries, as in the real comparisons: `ref` is the human reference.
# Half of its writers are terse: the single most likely summary leaves everything optional out.
REFERENCE = Writer(mention=0.85, garble=0.06, terse=0.5)
WRITERS = {
    "ref": REFERENCE,
    "sup_small": Writer(mention=0.25, garble=0.25),
    "sup_large": Writer(mention=0.5, garble=0.10),
    "best_of_n": Writer(mention=0.85, garble=0.05),
    "rambler": Writer(mention=0.7, garble=0.05, repeats=2),
}
COPYISTS = ("lead", "title")  # policies that copy text instead of writing; not in the graded world
PREFIXES = {kind: world.prefix for kind, world in KINDS.items()} | {"graded": graded.PREFIX}


def facts_of(post_id: str) -> Facts:
    """The facts of a post of the plain or the hard world. Raises ValueError for a foreign id."""
    if not post_id.startswith(PLAIN.prefix) or is_graded(post_id):
        raise ValueError(f"{post_id!r} is not a post of the built-in world: it has no known facts")
    kind = HARD if post_id.startswith(HARD.prefix) else PLAIN
    rng = random.Random(f"facts {post_id}")
    return Facts(**{slot: rng.choice(words) for slot, words in kind.words.items()})


def is_graded(post_id: str) -> bool:
    """Whether a post is of the graded world."""
    return post_id.startswith(graded.PREFIX)


def worth(summary: str, post_id: str) -> float:
    """What a labeller thinks of a summary of a post of any kind of world.

    Raises ValueError for a foreign id.
    """
    if is_graded(post_id):
        return graded.score_summary(summary, graded.facts_of(post_id))
    return score_summary(summary, facts_of(post_id))


def score_summary(summary: str, facts: Facts) -> float:
    """Right facts minus wrong ones minus a price for every word beyond a complete summary.

    Range: 6 (in the hard world 8) for a complete correct summary of at most `complete_words`, 0 for
    one that says nothing, negative where it is wrong or rambles.
    """
    right, wrong = read_summary(summary, facts)
    extra_words = max(0, len(summary.split()) - facts.kind.complete_words)
    return len(right) - WRONG_COST * len(wrong) - LONG_COST * extra_words


def read_summary(summary: str, facts: Facts) -> tuple[set[str], set[tuple[str, str]]]:
    """The facts that a summary gets right, and the (fact, word) pairs that it gets wrong."""
    text = summary.lower()
    right, wrong = set(), set()
    for slot, reader in facts.kind.readers.items():
        told, truth = set(reader.findall(text)), getattr(facts, slot).lower()
        if truth in told:
            right.add(slot)
        wrong |= {(slot, word) for word in told if word != truth}
    return right, wrong


def write_summary(rng: random.Random, facts: Facts, writer: Writer) -> str:
    """A summary in the manner of `writer`: the event always, the other facts by chance."""
    mention = 0.0 if rng.random() < writer.terse else writer.mention
    kind, told = facts.kind, facts
    for slot in kind.words:
        if rng.random() < writer.garble:
            told = replace(told, **{slot: rng.choice(kind.words[slot])})
    mentioned = {slot: rng.random() < mention for slot in kind.optional}
    parts = {slot: text.format(**asdict(told)) for slot, text in kind.clauses.items()}
    sentences = [
        "".join(parts[slot] for slot in ("event", *kind.inline) if mentioned.get(slot, True)) + "."
    ]
    sentences += [parts[slot] + end for slot, end in ENDS.items() if mentioned[slot]]
    sentences += [rng.choice(sentences) for _ in range(writer.repeats)]
    return " ".join(sentences)


def make_post(post_id: str) -> dict[str, str]:
    """One row in the schema of `tldr_3_filtered`."""
    if is_graded(post_id):
        return graded.make_post(post_id)
    stated = facts_of(post_id)
    kind, facts = stated.kind, asdict(stated)
    rng = random.Random(f"post {post_id}")
    event, *others = (rng.choice(options).format(**facts) for options in kind.statements.values())
    distractors = [
        text.format(**{slot: rng.choice(words) for slot, words in kind.words.items()})
        for text in rng.sample(kind.distractors, k=rng.randint(*kind.num_distractors))
    ]
    rest = others + distractors
    rng.shuffle(rest)
    rest.insert(rng.randint(0, 2), event)
    half = len(rest) // 2
    return {
        "id": post_id,
        "subreddit": rng.choice(SUBREDDITS),
        "title": rng.choice(TITLES).format(**facts),
        "post": " ".join(rest[:half]) + "\n" + " ".join(rest[half:]),
        "summary": write_summary(rng, stated, REFERENCE),
    }


def write_as(policy: str, rng: random.Random, row: dict[str, str]) -> str:
    """The summary that the named policy gives of a post (`ref`: the reference itself)."""
    if policy == "ref":
        return row["summary"]
    if is_graded(row["id"]):
        return graded.write_summary(rng, graded.facts_of(row["id"]), GRADED_WRITERS[policy])
    if policy == "lead":
        return " ".join(re.split(r"(?<=[.?])\s", row["post"])[:2])
    if policy == "title":
        return row["title"] + "."
    return write_summary(rng, facts_of(row["id"]), WRITERS[policy])


def make_comparison(row: dict[str, str], key: str, split: str) -> dict[str, Any]:
    """One row in the schema of `comparisons`: two policies on one post, and a verdict.

    The labeller prefers the better summary with probability sigmoid(gap / temper). `confidence` is
    OpenAI's: from 1 (sure of the first) to 9 (sure of the second), further from 5 the larger the
    gap that the labeller felt; nobody says 5.
    """
    rng = random.Random(f"comparison {key} {row['id']}")
    policies = GRADED_WRITERS if is_graded(row["id"]) else (*WRITERS, *COPYISTS)
    pair = rng.sample(list(policies), k=2)
    texts = [write_as(policy, rng, row) for policy in pair]
    worker = rng.randrange(5)
    temper = 0.15 + 0.05 * worker
    scores = [worth(text, row["id"]) for text in texts]
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
    name = f"{PREFIXES[world.kind]}{world.seed}"
    sizes = {
        "train": (world.train_posts, world.train_comparisons, ("train",)),
        "validation": (world.validation_posts, world.validation_comparisons, ("valid1", "valid2")),
    }
    for part, (posts, comparisons, splits) in sizes.items():
        rows = [make_post(f"{name}-{part}-{n}") for n in show(range(posts), part, posts)]
        _write_lines(folder / f"sft_{part}.jsonl", rows)
        pairs = (
            make_comparison(rows[n % posts], f"{world.seed} {n}", splits[n % len(splits)])
            for n in show(range(comparisons), f"{part} comparisons", comparisons)
        )
        _write_lines(folder / f"comparisons_{part}.jsonl", pairs)


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def world_folder(config: Config) -> Path:
    """The built-in world as files in the real schemas, written once for each set of settings."""
    # Another generator writes another world: its source is part of the name.
    files = (__file__, kinds.__file__, graded.__file__)
    sources = "".join(file_hash(Path(str(path))) for path in files)
    key = json.dumps(asdict(config.world), sort_keys=True) + sources
    folder = settings.RUNS / "cache" / f"toy-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not folder.exists():
        partial = fresh_folder(folder)
        write_world(partial, config.world, show=progress)
        put_folder(partial, folder)
    return folder


def fresh_folder(folder: Path) -> Path:
    """An empty folder of this process's own, beside the one that it shall become."""
    partial = folder.with_name(f"{folder.name}.partial{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def put_folder(partial: Path, folder: Path) -> None:
    """Give a finished folder its name, unless another run was faster."""
    try:
        partial.rename(folder)
    except OSError:  # another run was faster with the same content
        shutil.rmtree(partial)
