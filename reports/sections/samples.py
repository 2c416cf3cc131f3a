"""Samples of a run: the first held-out posts, and what each policy wrote about them."""

from collections.abc import Sequence

from eval.rates.length_control import word_count
from reports.parts.collect import GIVEN, Record, policies_of
from reports.parts.page import Block, Heading, Sample, Table, Text
from reports.parts.sample_views import REFERENCE, SampleBrowser, fitting, post_rows
from reports.parts.words import Row, named, number, whole

SAMPLES = 6


def blocks(record: Record) -> list[Block]:
    """The first held-out posts with the reference, every policy's summary and what was judged."""
    policies = policies_of(record)
    names = [named(name, policies) for name in policies]
    everything = post_rows(record)
    posts = fitting(everything)
    held_out = "" if GIVEN in record.settings else " held-out"  # nobody knows that of a user's file
    rule = (
        f"The first {whole(len(posts))} of {whole(len(everything))}{held_out} posts, in the order"
        " of the data: nobody chose them."
    )
    few = [sample(index, row, names) for index, row in enumerate(posts[:SAMPLES], start=1)]
    if len(posts) > len(few):
        rule += f" Without JavaScript, and in Markdown, the first {len(few)} stand here."
    shown = policies.index(record.policy) if record.policy in policies else -1
    browser = SampleBrowser("samples-of-the-run", names, posts, few, shown=shown)
    return [Heading("Samples"), Text(rule), browser]


def sample(index: int, row: Row, names: Sequence[str], against: str = REFERENCE) -> Sample:
    """A post with the reference and every summary, as it stands where no script runs."""
    reference = row["reference"]
    summaries = [
        ("Reference", reference["text"], scored(reference)),
        *(
            (name, side["text"], facts(side, against))
            for name, side in zip(names, row["sides"], strict=True)
        ),
    ]
    return Sample(f"Post {index}", row["post"], summaries)


def facts(side: Row, against: str) -> str:
    """What is known of a summary, in a line."""
    points = side["points"]
    outcomes = {1.0: f"preferred to {against}", 0.5: "even", 0.0: f"{against} is preferred"}
    outcome = "unjudged" if points is None else outcomes.get(points, f"judged {points:g} of 1")
    ends = ", cut at the limit" if side["ends"] is False else ""
    return f"Judge: {outcome}; {scored(side)}{ends}"


def scored(text: Row) -> str:
    """The reward model's score and the length; of given summaries only the words are known."""
    if text["tokens"] is None:
        return f"{word_count(text['text'])} words"
    return f"RM score {number(text['score'])}, {text['tokens']} tokens"


MOST_UPDATES = 12


def training_blocks(record: Record) -> list[Block]:
    """A section for each policy-gradient stage; none for a stage that logged no episodes."""
    blocks: list[Block] = []
    for stage in record.gradient_stages:
        rows = some_updates(record.rows(stage, "samples.jsonl"))
        more = f": {named(stage)}" if stage != record.policy else ""
        blocks += [Heading(f"Samples through training{more}"), table(rows)] if rows else []
    return blocks


def some_updates(rows: Sequence[Row]) -> list[Row]:
    """One episode of each of a few updates, evenly spread, the first and the last among them."""
    firsts = list({row["step"]: row for row in reversed(rows)}.values())[::-1]
    if len(firsts) <= MOST_UPDATES:
        return firsts
    last = len(firsts) - 1
    return [firsts[round(place * last / (MOST_UPDATES - 1))] for place in range(MOST_UPDATES)]


def table(rows: Sequence[Row]) -> Table:
    """Some episodes as they were sampled."""
    cells = [
        [str(row["step"]), row["response"].strip(), number(row["score"]), number(row["kl"], 1)]
        for row in rows
    ]
    caption = (
        "What the policy sampled while it learned: the first logged response of some updates, to"
        " another post each time. samples.jsonl has all of them, with numbers by token."
    )
    return Table(["update", "response", "score", "KL, nats"], cells, caption)
