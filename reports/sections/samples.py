"""Samples of a run: the first held-out posts, and what each policy wrote about them."""

from collections.abc import Sequence
from typing import Any

from eval.rates.length_control import word_count
from reports.collect import Record, policies_of
from reports.page import Block, Heading, Sample, Text
from reports.verdict import number

SAMPLES = 6
SCORES = "post_scores.jsonl"
OUTCOMES = {1.0: "preferred to the reference", 0.5: "even", 0.0: "the reference is preferred"}


def blocks(record: Record) -> list[Block]:
    """The first held-out posts with the reference, every policy's summary and what was judged."""
    written = {
        policy: {one["id"]: one for one in record.rows("summaries", f"{policy}.jsonl")}
        for policy in policies_of(record)
    }
    scores = {(one["policy"], one["id"]): one["score"] for one in record.rows("win_rate", SCORES)}
    first = next(iter(written.values()))
    posts = [one for one in first.values() if all(one["id"] in x for x in written.values())]
    posts = posts[:SAMPLES]
    rule = f"The first {len(posts)} held-out posts, in the order of the data: nobody chose them."
    return [
        Heading("Samples"),
        Text(rule),
        *(
            Sample(
                f"Post {index}",
                post["query"],
                [
                    ("Reference", post["reference"], _said_of_reference(post)),
                    *(_said(one, written[one][post["id"]], scores) for one in written),
                ],
            )
            for index, post in enumerate(posts, start=1)
        ),
    ]


def without_the_data(page: Sequence[Block]) -> list[Block]:
    """A page as it may be published: posts and references, which others wrote, are left out."""
    return [block.without_the_data() for block in page]


def _said_of_reference(post: dict[str, Any]) -> str:
    return _scored(post["reference_score"], post["reference_tokens"], post["reference"])


def _scored(score: float | None, tokens: int | None, text: str) -> str:
    """The reward model's score and the length; of given summaries only the words are known."""
    if tokens is None:
        return f"{word_count(text)} words"
    return f"RM score {number(score)}, {tokens} tokens"


def _said(
    policy: str, one: dict[str, Any], scores: dict[tuple[str, str], float | None]
) -> tuple[str, str, str]:
    score = scores.get((policy, one["id"]))
    outcome = "unjudged" if score is None else OUTCOMES.get(score, f"judged {score:g} of 1")
    ends = ", cut at the limit" if one["has_eos"] is False else ""
    facts = f"{outcome}; {_scored(one['score'], one['tokens'], one['summary'])}{ends}"
    return policy.upper(), one["summary"], f"Judge: {facts}"
