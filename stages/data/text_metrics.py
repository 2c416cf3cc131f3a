"""Measures of generated text that need no model."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stages.config.sections import parse_post

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
TITLE = re.compile(r"^TITLE:(.*)$", re.MULTILINE)
WORD = re.compile(r"\w+")


def text_measures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The measures below, averaged over rows with `query`, `summary` and `reference`."""
    summaries = [row["summary"] for row in rows]
    references = [row["reference"] for row in rows]
    return {
        "copied_title_words": mean_copied((row["query"], row["summary"]) for row in rows),
        "distinct_1": distinct(summaries, 1),
        "distinct_2": distinct(summaries, 2),
        **rouge(summaries, references),
    }


def first_ids(posts: Iterable[tuple[str, str]]) -> list[str]:
    """For each post, given as (id, text), the first id with the same text, up to white space."""
    first_id_by_text: dict[str, str] = {}
    ids = []
    for post_id, text in posts:
        ids.append(first_id_by_text.setdefault(normalize_whitespace(text), post_id))
    return ids


def identical(rows: Sequence[Mapping[str, Any]], prompt: str) -> dict[str, float]:
    """The shares of a policy's summaries that equal another text, up to white space.

    `reference` and `post`: equal to those of the same row. `summary`: equal to the policy's own
    most frequent summary of different posts; 0 if there is only one post. `prompt` is the template
    of the queries.
    """
    equal_to_reference = 0
    equal_to_post = 0
    summary_by_query = {}
    for row in rows:
        fields = parse_post(row["query"], prompt)
        post = row["query"] if fields is None else fields["post"]
        summary = normalize_whitespace(row["summary"])
        if summary == normalize_whitespace(row["reference"]):
            equal_to_reference += 1
        if summary == normalize_whitespace(post):
            equal_to_post += 1
        summary_by_query[normalize_whitespace(row["query"])] = summary

    most_frequent = 0
    if len(summary_by_query) > 1:
        [(_, most_frequent)] = Counter(summary_by_query.values()).most_common(1)
    return {
        "reference": equal_to_reference / len(rows),
        "post": equal_to_post / len(rows),
        "summary": most_frequent / len(summary_by_query),
    }


def normalize_whitespace(text: str) -> str:
    """The text with each stretch of white space replaced by one space, and none at its ends."""
    return " ".join(text.split())


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Mean ROUGE F-measures of texts against references, as fractions.

    Source: Huang et al. 2024, detail 9 (`rouge-score` without stemming).
    differs: the mean is over all rows, where Huang et al. 2024 averages the means of small batches.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGE_TYPES)
    scores = [
        scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)
    ]
    return {
        kind: sum(score[kind].fmeasure for score in scores) / len(scores) for kind in ROUGE_TYPES
    }


def mean_copied(pairs: Iterable[tuple[str, str]]) -> float | None:
    """Mean `copied_title_words` of (query, summary) pairs; None if no query has a title."""
    shares = []
    for query, summary in pairs:
        share = copied_title_words(query, summary)
        if share is not None:
            shares.append(share)
    if not shares:
        return None
    return sum(shares) / len(shares)


def copied_title_words(query: str, summary: str) -> float | None:
    """Share of the title's distinct words that the summary repeats; None without a title.

    Case and punctuation do not matter. Over-optimized TL;DR policies copy the title.
    """
    title = TITLE.search(query)
    if title is None:
        return None
    title_words = set(words_of(title[1]))
    if not title_words:
        return None
    return len(title_words & set(words_of(summary))) / len(title_words)


def distinct(texts: Sequence[str], n: int) -> float:
    """Number of distinct word n-grams divided by that of all n-grams, in all texts together.

    0 if there are no n-grams.
    Source: Li et al. 2016, "A Diversity-Promoting Objective Function" (distinct-1 and -2).
    """
    grams = []
    for text in texts:
        words = words_of(text)
        grams += [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    if not grams:
        return 0.0
    return len(set(grams)) / len(grams)


def unshown_tokens(tokenizer: Any) -> list[int]:
    """The special tokens other than EOS and [PAD].

    Decoded summaries leave them out, but a reward model reads them: if a policy uses them to raise
    its score, a judge does not see what it learned.
    """
    return [
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token_id not in (tokenizer.eos_token_id, tokenizer.pad_token_id)
    ]


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return WORD.findall(text.lower())
