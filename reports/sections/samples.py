"""Samples of a run: the first held-out posts, and what each policy wrote about them."""

from collections.abc import Sequence

from eval.rates.length_control import word_count
from reports.parts.collect import GIVEN, Record, policies_of
from reports.parts.page import Block, Heading, Sample, Table, Text
from reports.parts.sample_views import (
    REFERENCE,
    SampleBrowser,
    TokenView,
    fitting,
    post_rows,
    some_updates,
)
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


CAPTION = "The first logged response of each update, to another post each time."
ABOUT = (
    "What {} sampled while it learned: of some updates the episodes that were logged, spread over"
    " the lengths of the posts. Each token can be coloured by {}. Tab reaches an episode, the arrow"
    " keys its tokens."
)
BY_TOKEN = {
    "log_ratios": "its log-ratio to the reference policy",
    "advantages": "the advantage that the update learned from",
    "values": "the critic's value of the text before it",
    "rewards": "its reward: the penalty for KL, and after the end the score",
}


def training_blocks(record: Record) -> list[Block]:
    """A section for each policy-gradient stage; none for a stage that logged no episodes."""
    made: list[Block] = []
    for stage in record.gradient_stages:
        rows = some_updates(record.rows(stage, "samples.jsonl"))
        if not rows:
            continue
        logged = [text for key, text in BY_TOKEN.items() if any(row.get(key) for row in rows)]
        colours = " and ".join(filter(None, (", ".join(logged[:-1]), logged[-1])))
        more = f": {named(stage)}" if stage != record.policy else ""
        made += [
            Heading(f"Samples through training{more}"),
            Text(ABOUT.format(named(stage), colours)),
            TokenView(f"episodes-of-{stage}", rows, table(rows)),
        ]
    return made


def table(rows: Sequence[Row]) -> Table:
    """One episode of each update."""
    firsts: dict[int, Row] = {}
    for row in rows:
        firsts.setdefault(row["step"], row)
    cells = [
        [str(step), row["response"].strip(), number(row["score"]), number(row["kl"], 1)]
        for step, row in firsts.items()
    ]
    return Table(["update", "response", "score", "KL, nats"], cells, CAPTION)
