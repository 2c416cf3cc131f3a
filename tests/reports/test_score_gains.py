"""The posts on which a gain lies, and what proxy and gold score say together."""

from types import SimpleNamespace
from typing import Any

import pytest

from reports import limits, scores
from reports.formats import number
from reports.results import Interval
from reports.scores import ScoreRow

PROXIES = (1.9, 2.0, 2.1, 7.0)


def summary(post: int, text: str, score: float = 0.0, has_eos: bool = True) -> dict[str, Any]:
    """A row of the stage `summaries`; the score is the proxy's."""
    return {
        "id": str(post),
        "query": str(post),
        "summary": text,
        "score": score,
        "has_eos": has_eos,
    }


def gold_scores(policy: str, scores: tuple[float, ...]) -> list[dict[str, Any]]:
    """Rows of the gold scores of a policy's summaries, post by post."""
    rows = []
    for post, score in enumerate(scores):
        rows.append({"policy": policy, "id": str(post), "score": score})
    return rows


def four_posts(other_golds: tuple[float, float], proxies=PROXIES) -> Any:
    """A run of four posts: PPO ends 0 and 2 with a new question, and its summary of 3 is cut off.

    The gold score rises by 1.0 and 1.1 on posts 0 and 2, and by `other_golds` on 1 and 3.
    """
    summaries = {
        "sft.jsonl": [
            summary(0, "So."),
            summary(1, "Am I?"),
            summary(2, "So."),
            summary(3, "So."),
        ],
        "ppo.jsonl": [
            summary(0, "Is it?", proxies[0]),
            summary(1, "Am I?", proxies[1]),
            summary(2, 'Why?"', proxies[2]),
            summary(3, "No.", proxies[3], has_eos=False),
        ],
    }
    golds = [
        *gold_scores("sft", (0.0, 0.0, 0.0, 0.0)),
        *gold_scores("ppo", (1.0, other_golds[0], 1.1, other_golds[1])),
    ]
    gain = {"estimate": 1.0, "low": 0.1, "high": 2.0}
    win_rate = {"scores": {"gains": {"ppo": {"proxy": gain}}}}
    return SimpleNamespace(
        seed=1,
        policies={
            "sft": SimpleNamespace(title="SFT"),
            "ppo": SimpleNamespace(title="PPO"),
        },
        stages={
            "win_rate": SimpleNamespace(rows=lambda file: golds, results=win_rate),
            "judge": SimpleNamespace(rows=lambda file: golds),
            "summaries": SimpleNamespace(rows=lambda file: summaries[file]),
        },
    )


# -- closing questions -----------------------------------------------------------------------------


def test_gains_are_measured_apart_on_posts_with_a_new_closing_question():
    (gain,) = scores.gains_by_question(four_posts(other_golds=(0.5, -0.5)))

    assert gain.posts == 2
    assert gain.other_posts == 2
    assert number(gain.proxy) == "2.00 [0.73, 3.27]"
    # (1.0 + 1.1) / 2, and t(0.975, 1) = 12.706 times the error 0.05
    assert gain.gold is not None
    assert gain.gold.estimate == pytest.approx(1.05)
    assert gain.gold.low == pytest.approx(1.05 - 0.6353, abs=1e-4)
    assert gain.gold.high == pytest.approx(1.05 + 0.6353, abs=1e-4)
    assert gain.other_gold is not None
    assert gain.other_gold.estimate == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("other_golds", "explains", "rose_only_there"),
    [((0.5, -0.5), True, True), ((0.1, 0.11), True, False), ((1.0, 1.1), False, False)],
)
def test_a_gain_that_lies_in_closing_questions_is_noticed(other_golds, explains, rose_only_there):
    (gain,) = scores.gains_by_question(four_posts(other_golds))
    assert gain.other_gold is not None
    assert gain.other_gold.estimate == pytest.approx(sum(other_golds) / 2)
    assert limits.question_explains(gain) == explains
    assert limits.rose_only_there(gain) == rose_only_there


@pytest.mark.parametrize(
    ("text", "is_question"),
    [("Why?", True), ('He said "why?" ', True), ("Why? So.", False), ("", False), ("Why?)", True)],
)
def test_a_question_counts_if_it_ends_the_summary(text, is_question):
    assert scores.asks(text) == is_question


# -- summaries that are cut off --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proxies", "explains"), [((2.0, 2.1, 2.2, 7.0), False), ((0.1, -0.1, 0.3, 9.0), True)]
)
def test_a_proxy_that_rose_only_where_a_summary_is_cut_off_is_noticed(proxies, explains):
    (gain,) = scores.gains_by_cut_off(four_posts((1.0, 1.1), proxies))
    assert gain.posts == 1
    assert gain.other_posts == 3
    assert gain.proxy is None  # one post has no interval
    assert limits.cut_off_explains(gain) == explains


def test_the_interval_of_a_gain_is_a_t_interval():
    # The mean of 0.1, -0.1 and 0.3 is 0.1; half of it is t(2) * 0.2 / sqrt 3 = 0.497.
    (gain,) = scores.gains_by_cut_off(four_posts((1.0, 1.1), (0.1, -0.1, 0.3, 9.0)))
    assert number(gain.other_proxy) == "0.10 [-0.40, 0.60]"


# -- over-optimization -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "is_over_optimized"),
    [(-0.4, -0.2, True), (0.1, 0.2, False), (-0.1, 0.2, False)],
    ids=["fell", "rose", "unclear"],
)
def test_over_optimization_needs_a_proxy_that_rose_and_a_gold_score_that_fell(
    low, high, is_over_optimized
):
    row = ScoreRow(
        name="ppo",
        title="PPO",
        proxy=None,
        gold=None,
        proxy_gain=Interval(estimate=0.3, low=0.2, high=0.4),
        gold_gain=Interval(estimate=(low + high) / 2, low=low, high=high),
    )
    assert row.is_over_optimized == is_over_optimized
