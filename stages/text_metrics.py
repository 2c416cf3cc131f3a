"""Measures of generated text that need no model."""

from collections.abc import Sequence

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Mean ROUGE F-measures of texts against references, as fractions.

    Source: P1 detail 9 (`rouge-score` without stemming).
    differs: the mean is over all rows, where P1 averages means of small batches.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGE_TYPES)
    pairs = zip(texts, references, strict=True)
    scores = [scorer.score(reference, text) for text, reference in pairs]
    return {kind: sum(one[kind].fmeasure for one in scores) / len(scores) for kind in ROUGE_TYPES}
