"""Samples of a run: the first held-out posts, and what each policy wrote about them."""

from collections.abc import Sequence
from dataclasses import replace

from eval.judges.offline import facts_told
from eval.scores import START
from eval.stats.length_control import word_count
from reports.parts.blocks import Block, Heading, Sample, Table, Text
from reports.parts.collect import GIVEN, Record, policies_of
from reports.parts.paired import UNJUDGED, posts_frame, side_by_side
from reports.parts.words import Row, named, number, whole
from stages.data.builtin import EVENT

SAMPLES = 5
OUTCOMES = {1.0: "preferred to the reference", 0.5: "even", 0.0: "the reference is preferred"}


def blocks(record: Record) -> list[Block]:
    """The first held-out posts with the reference, every policy's summary and what was judged."""
    policies = policies_of(record)
    posts = side_by_side([posts_frame(record, name) for name in policies])
    names = [named(name, policies) for name in policies]
    held_out = "" if GIVEN in record.settings else " held-out"  # nobody knows that of a user's file
    rule = (
        f"The first {whole(len(posts[:SAMPLES]))} of {whole(len(posts))}{held_out} posts, in the"
        " order of the data: nobody chose them."
    )
    return [Heading("Samples"), Text(rule), *samples(posts[:SAMPLES], names)]


def example(record: Record) -> list[Block]:
    """The first held-out post with what the policy that learned and SFT wrote of it; of the
    built-in world also which facts are wanted, and who tells them.
    """
    judged = policies_of(record)
    policies = [name for name in (START, record.policy) if name in judged] or judged
    posts = side_by_side([posts_frame(record, name) for name in policies])
    names = [named(name, judged) for name in policies]
    title = "An example: the first post, which nobody chose"
    shown: list[Block] = [replace(sample, title=title) for sample in samples(posts[:1], names)]
    if record.has_real_texts or not shown:
        return shown
    rows = posts[0]
    texts = [rows[0]["reference"], *(x["summary"] for x in rows)]
    facts, cells = facts_told(rows[0]["post"], texts)
    wanted = [cell[0] for cell in cells[len(EVENT) : -1]]
    text = (
        f"Wanted is what labellers of r/{facts.subreddit} want to read: who did what to which thing"
        f" ({', '.join(EVENT)}), and {', '.join(wanted)}. They count 1 for each of"
        " these facts that a summary gets right, and take points off for wrong facts, other facts"
        " and length."
    )
    header = ("wanted fact", "in the post", "Reference", *names)
    return [*shown, Text(text), Table(header, cells, name="wanted-facts")]


def samples(posts: Sequence[Sequence[Row]], names: Sequence[str]) -> list[Sample]:
    """Posts, each with the reference and the summaries of who is named, in one order."""
    samples_shown = []
    for place, rows in enumerate(posts, start=1):
        first = rows[0]
        scored = _scored(first["reference"], first["reference_tokens"], first["reference_score"])
        sides = [(name, x["summary"], _facts(x)) for name, x in zip(names, rows, strict=True)]
        summaries = [("Reference", first["reference"], scored), *sides]
        samples_shown.append(Sample(f"Post {place}", first["query"], summaries))
    return samples_shown


def _facts(row: Row) -> str:
    """What is known of a summary, in a line."""
    outcome = OUTCOMES.get(row["score"], f"judged {row['score']:g} of 1")
    outcome = UNJUDGED if row["verdict"] == UNJUDGED else outcome
    ends = ", cut at the limit" if row["ends"] is False else ""
    return f"Judge: {outcome}; {_scored(row['summary'], row['length'], row['proxy'])}{ends}"


def _scored(text: str, tokens: int | None, score: float | None) -> str:
    """The reward model's score and the length; of given summaries only the words are known."""
    if tokens is None:
        return f"{word_count(text)} words"
    return f"RM score {number(score)}, {tokens} tokens"
