"""Samples of a run: the first held-out posts, and what each policy wrote about them."""

from collections.abc import Sequence

from eval.rates.length_control import word_count
from reports.parts.collect import GIVEN, Record, policies_of
from reports.parts.page import Block, Heading, Sample, Text
from reports.parts.sample_views import post_rows
from reports.parts.words import Row, named, number, whole

SAMPLES = 5
OUTCOMES = {1.0: "preferred to the reference", 0.5: "even", 0.0: "the reference is preferred"}


def blocks(record: Record) -> list[Block]:
    """The first held-out posts with the reference, every policy's summary and what was judged."""
    policies, rows = policies_of(record), post_rows(record)
    names = [named(name, policies) for name in policies]
    held_out = "" if GIVEN in record.settings else " held-out"  # nobody knows that of a user's file
    rule = (
        f"The first {whole(len(rows[:SAMPLES]))} of {whole(len(rows))}{held_out} posts, in the"
        " order of the data: nobody chose them."
    )
    return [Heading("Samples"), Text(rule), *samples(rows[:SAMPLES], names)]


def samples(rows: Sequence[Row], names: Sequence[str]) -> list[Sample]:
    """Posts, each with the reference and the summaries of who is named, in one order."""
    return [
        Sample(
            f"Post {place}",
            row["post"],
            [
                ("Reference", row["reference"]["text"], _scored(row["reference"])),
                *(
                    (name, side["text"], _facts(side))
                    for name, side in zip(names, row["sides"], strict=True)
                ),
            ],
        )
        for place, row in enumerate(rows, start=1)
    ]


def _facts(side: Row) -> str:
    """What is known of a summary, in a line."""
    points = side["points"]
    outcome = "unjudged" if points is None else OUTCOMES.get(points, f"judged {points:g} of 1")
    ends = ", cut at the limit" if side["ends"] is False else ""
    return f"Judge: {outcome}; {_scored(side)}{ends}"


def _scored(text: Row) -> str:
    """The reward model's score and the length; of given summaries only the words are known."""
    if text["tokens"] is None:
        return f"{word_count(text['text'])} words"
    return f"RM score {number(text['score'])}, {text['tokens']} tokens"
