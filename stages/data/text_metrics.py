"""Measures of generated text that need no model."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stages.settings.sections import parse_post

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
TITLE = re.compile(r"^TITLE:(.*)$", re.MULTILINE)
WORD = re.compile(r"\w+")


def text_measures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The measures below of rows with `query`, `summary` and `reference`: means over all rows."""
    texts = [row["summary"] for row in rows]
    copied = mean_copied((row["query"], row["summary"]) for row in rows)
    measures: dict[str, float | None] = {"copied_title_words": copied}
    measures |= {"distinct_1": distinct(texts, 1), "distinct_2": distinct(texts, 2)}
    return measures | rouge(texts, [row["reference"] for row in rows])


def first_ids(posts: Iterable[tuple[str, str]]) -> list[str]:
    """For each id and text of a post the first id with this text, whatever its white space."""
    first: dict[str, str] = {}
    return [first.setdefault(squeezed(text), name) for name, text in posts]


def identical(rows: Sequence[Mapping[str, Any]], prompt: str) -> dict[str, float]:
    """The shares of a policy's summaries that are, but for white space, another text.

    `reference`, `post`: those of the same row. `summary`: the policy's own most frequent summary of
    different posts; 0 where there is one post.
    """
    own, posts = [], {}
    for row in rows:
        about = (parse_post(row["query"], prompt) or {}).get("post", row["query"])
        text, reference, post = map(squeezed, (row["summary"], row["reference"], about))
        own.append((text == reference, text == post))
        posts[squeezed(row["query"])] = text
    most = max(Counter(posts.values()).values()) if len(posts) > 1 else 0
    references, copies = (sum(column) / len(own) for column in zip(*own, strict=True))
    return {"reference": references, "post": copies, "summary": most / len(posts)}


def squeezed(text: str) -> str:
    """A text with one space for each stretch of white space, and none at its ends."""
    return " ".join(text.split())


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Mean ROUGE F-measures of texts against references, as fractions.

    Source: Huang et al. 2024, detail 9 (`rouge-score` without stemming).
    differs: the mean is over all rows, where Huang et al. 2024 averages means of small batches.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGE_TYPES)
    pairs = zip(texts, references, strict=True)
    scores = [scorer.score(reference, text) for text, reference in pairs]
    return {
        kind: sum(score[kind].fmeasure for score in scores) / len(scores) for kind in ROUGE_TYPES
    }


def mean_copied(pairs: Iterable[tuple[str, str]]) -> float | None:
    """Mean `copied_title_words` of the queries with a title; None where none has one."""
    shares = [share for pair in pairs if (share := copied_title_words(*pair)) is not None]
    return sum(shares) / len(shares) if shares else None


def copied_title_words(query: str, summary: str) -> float | None:
    """Share of the title's distinct words that the summary repeats; None without a title.

    Case and punctuation do not matter. Policies over-optimised on TL;DR copy the title.
    """
    title = TITLE.search(query)
    words = set(words_of(title[1])) if title else set()
    return len(words & set(words_of(summary))) / len(words) if words else None


def distinct(texts: Sequence[str], n: int) -> float:
    """Distinct n-grams of words over all n-grams, in all texts together; 0 where there are none.

    Source: Li et al. 2016, "A Diversity-Promoting Objective Function" (distinct-1 and -2).
    """
    starts = ([words_of(text)[start:] for start in range(n)] for text in texts)
    grams = [gram for shifted in starts for gram in zip(*shifted, strict=False)]
    return len(set(grams)) / len(grams) if grams else 0.0


def unshown_tokens(tokenizer: Any) -> list[int]:
    """The special tokens beside EOS and [PAD]: no summary shows them, a reward model reads them.

    A policy that raises its score with them alone learns nothing that a judge sees.
    """
    known = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    added = tokenizer.added_tokens_decoder.items()
    return [number for number, token in added if token.special and number not in known]


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return WORD.findall(text.lower())
