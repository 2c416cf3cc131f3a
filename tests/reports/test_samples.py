"""The held-out posts that pages show, with the texts of all policies."""

import pandas as pd

from reports.posts import WON
from reports.samples import samples_from


def judged_frame(score: float) -> pd.DataFrame:
    """One judged post, as `reports.posts.judged_posts` returns it, whose summary has this score."""
    row = {
        "seed": 1,
        "post": "p",
        "query": "POST: My aunt sold my lamp.",
        "reference": "My aunt sold my lamp.",
        "reference_score": 0.2,
        "reference_tokens": 6,
        "summary": "Aunt sold lamp.",
        "score": 1.0,
        "verdict": WON,
        "proxy": score,
        "length": 4,
        "ends": True,
    }
    return pd.DataFrame([row])


def authors_of(*scores: float) -> list[str]:
    """The authors that the page names, if policies with these scores wrote the same text."""
    names = [f"policy {number}" for number in range(len(scores))]
    (sample,) = samples_from([judged_frame(score) for score in scores], names)
    _, *texts = sample.texts
    return [text.author for text in texts]


def test_policies_that_wrote_the_same_share_a_text_if_their_scores_are_printed_alike():
    assert authors_of(0.0877, 0.0856) == ["policy 0 and policy 1"]


def test_the_same_text_with_another_score_is_another_row():
    assert authors_of(0.0877, 0.2) == ["policy 0", "policy 1"]
