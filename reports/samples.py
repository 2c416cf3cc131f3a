"""Example posts of a page: the post, the reference, and what each policy wrote."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from eval.scores import START
from eval.stats.length_control import word_count
from reports.formats import listed
from reports.posts import UNJUDGED, judged_posts, side_by_side
from reports.results import RunResult
from stages.data.builtin import EVENT, OPTIONAL, Facts, facts_of, read_summary, score_summary

NUMBER_OF_SAMPLES = 5
SUMMARY_ROWS = 2  # at the end of the table of facts
OUTCOMES = {
    1.0: "preferred to the reference",
    0.5: "even with the reference",
    0.0: "the reference is preferred",
}


@dataclass(frozen=True, kw_only=True)
class SampleText:
    """One summary of a sample; the first of a sample is the reference."""

    author: str
    text: str
    outcome: str
    """What the judge said; empty for the reference."""
    score: float | None
    tokens: int | None
    words: int
    is_cut_off: bool


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One held-out post with all its summaries."""

    number: int
    post_id: str
    post: str
    texts: tuple[SampleText, ...]
    """The reference, then what the policies wrote; policies that wrote the same share a text."""

    @property
    def has_tokens(self) -> bool:
        """Whether scores and tokens are known; else the texts have only words."""
        return any(text.tokens is not None for text in self.texts)


@dataclass(frozen=True, kw_only=True)
class WantedFacts:
    """What the readers of a built-in post want to know, and who tells it."""

    subreddit: str
    event: tuple[str, ...]
    others: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """The name of the fact, its word in the post, and what each text says."""


def samples_of(run: RunResult, policies: Sequence[str]) -> list[Sample]:
    """Return all held-out posts that were judged of all the policies, in the order of the data."""
    return samples_from(
        [judged_posts(run, policy) for policy in policies],
        authors=[run.policies[policy].title for policy in policies],
    )


def samples_from(frames: Sequence[pd.DataFrame], authors: Sequence[str]) -> list[Sample]:
    """Return the posts that all frames have, in the order of the first one.

    `frames` are rows as `judged_posts` returns them, one frame for each author.
    """
    samples = []
    for number, rows in enumerate(side_by_side(frames), start=1):
        first = rows[0]
        reference = SampleText(
            author="Reference",
            text=first["reference"],
            outcome="",
            score=first["reference_score"],
            tokens=first["reference_tokens"],
            words=word_count(first["reference"]),
            is_cut_off=False,
        )
        texts = []
        for author, row in zip(authors, rows, strict=True):
            texts.append(
                SampleText(
                    author=author,
                    text=row["summary"],
                    outcome=_outcome(row["score"], row["verdict"]),
                    score=row["proxy"],
                    tokens=row["length"],
                    words=word_count(row["summary"]),
                    is_cut_off=row["ends"] is False,
                )
            )
        sample = Sample(
            number=number,
            post_id=first["post"],
            post=first["query"],
            texts=(reference, *_merged(texts)),
        )
        samples.append(sample)
    return samples


def _merged(texts: Sequence[SampleText]) -> list[SampleText]:
    """Return the texts, those that are the same with the same scores in one, by all authors.

    Scores are the same if they are printed alike: in another batch, they differ by rounding.
    """
    authors: dict[SampleText, list[str]] = {}
    for text in texts:
        score = None if text.score is None else round(text.score, 2)
        authors.setdefault(replace(text, author="", score=score), []).append(text.author)
    return [replace(text, author=listed(names)) for text, names in authors.items()]


def example_of(run: RunResult) -> Sample | None:
    """Return the post that opens a run's page, with the summaries of SFT and the trained policy."""
    policies = [policy for policy in (START, run.trained) if policy in run.policies]
    return first_example(samples_of(run, policies or list(run.policies)), run.has_real_texts)


def first_example(samples: Sequence[Sample], has_real_texts: bool) -> Sample | None:
    """Return the first post that is fit to open a page; None if there is none.

    Some references of the built-in posts tell wrong facts on purpose; such a post is passed over.
    """
    for sample in samples:
        if has_real_texts:
            return sample
        _, wrong = read_summary(sample.texts[0].text, facts_of(sample.post_id))
        if not wrong:
            return sample
    return None


def wanted_facts(sample: Sample | None, has_real_texts: bool) -> WantedFacts | None:
    """Return what a built-in post's readers want to know; None for real posts."""
    if has_real_texts or sample is None:
        return None
    facts, rows = fact_table(sample.post_id, [text.text for text in sample.texts])
    wanted = [row[0] for row in rows[len(EVENT) : -SUMMARY_ROWS]]
    return WantedFacts(
        subreddit=facts.subreddit,
        event=tuple(EVENT),
        others=tuple(wanted),
        rows=tuple(tuple(row) for row in rows),
    )


def fact_table(post_id: str, texts: Sequence[str]) -> tuple[Facts, list[list[str]]]:
    """A post's facts, and what each text says about them.

    There is a row for each fact that the post's readers want: its name, its word, and what each
    text says. Two rows follow: how many of the wanted facts each text gets right, and its points.
    """
    facts = facts_of(post_id)
    wanted = [*EVENT, *(slot for slot in OPTIONAL if slot in facts.wanted)]
    read = [read_summary(text, facts) for text in texts]

    def said(slot: str, right: set[str], wrong: set[tuple[str, str]]) -> str:
        if slot in right:
            return facts.words[slot]
        wrong_words = sorted(word for wrong_slot, word in wrong if wrong_slot == slot)
        if wrong_words:
            return f"{', '.join(wrong_words)} (wrong)"
        return "not told"

    rows = [
        [slot, facts.words[slot], *(said(slot, right, wrong) for right, wrong in read)]
        for slot in wanted
    ]
    counts = [f"{len(right.intersection(wanted))} of {len(wanted)}" for right, _ in read]
    total = f"{len(wanted)} of {len(wanted)}"
    rows.append(["wanted facts told correctly", total, *counts])
    points = [f"{score_summary(text, facts):g}" for text in texts]
    rows.append(["points by the rule", f"{len(wanted)}", *points])
    return facts, rows


def _outcome(score: float, verdict: str) -> str:
    if verdict == UNJUDGED:
        return UNJUDGED
    return OUTCOMES.get(score, f"judged {score:g} of 1")
