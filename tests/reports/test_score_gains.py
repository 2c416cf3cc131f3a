"""On which posts a gain lies, and what proxy and gold score say together."""

from types import SimpleNamespace
from typing import Any

import pytest

from reports import limits, scores
from reports.formats import number
from reports.results import Interval
from reports.scores import ScoreRow

PROXIES = (1.9, 2.0, 2.1, 7.0)


def run_of(others, proxies=PROXIES) -> Any:
    """Four posts: PPO adds a question to two of them, where the gold score rises.

    `others` are its gold scores on the other two. PPO's last summary is cut off.
    """
    golds = {"sft": (0.0, 0.0, 0.0, 0.0), "ppo": (1.0, others[0], 1.1, others[1])}
    texts = {"sft": ("So.", "Am I?", "So.", "So."), "ppo": ("Is it?", "Am I?", 'Why?"', "No.")}

    def judged_rows(file):
        return [
            {"policy": policy, "id": str(post), "score": score}
            for policy, of_posts in golds.items()
            for post, score in enumerate(of_posts)
        ]

    def summary_rows(file):
        policy = file.removesuffix(".jsonl")
        rows = []
        for post, text in enumerate(texts[policy]):
            row: dict[str, Any] = {"id": str(post), "query": str(post), "summary": text}
            row["score"] = proxies[post] if policy == "ppo" else 0.0
            row["has_eos"] = policy == "sft" or post < 3
            rows.append(row)
        return rows

    gain = {"estimate": 1.0, "low": 0.1, "high": 2.0}
    win_rate = {"scores": {"gains": {"ppo": {"proxy": gain}}}}
    return SimpleNamespace(
        seed=1,
        policies={
            "sft": SimpleNamespace(title="SFT"),
            "ppo": SimpleNamespace(title="PPO"),
        },
        stages={
            "win_rate": SimpleNamespace(rows=judged_rows, results=win_rate),
            "judge": SimpleNamespace(rows=judged_rows),
            "summaries": SimpleNamespace(rows=summary_rows),
        },
    )


@pytest.mark.parametrize(
    ("others", "explains", "only_there"),
    [((0.5, -0.5), True, True), ((0.1, 0.11), True, False), ((1.0, 1.1), False, False)],
)
def test_a_gain_that_lies_in_closing_questions_is_found(others, explains, only_there):
    (gain,) = scores.gains_by_question(run_of(others))
    assert (gain.posts, gain.other_posts) == (2, 2)
    assert number(gain.proxy) == "2.00 [0.73, 3.27]"
    assert number(gain.gold) == "1.05 [0.41, 1.69]"  # (1.0 + 1.1) / 2, half of it t(1) * 0.05
    assert gain.other_gold is not None
    assert gain.other_gold.estimate == pytest.approx(sum(others) / 2)
    assert limits.question_explains(gain) == explains
    assert limits.rose_only_there(gain) == only_there


@pytest.mark.parametrize(
    ("proxies", "explains"), [((2.0, 2.1, 2.2, 7.0), False), ((0.1, -0.1, 0.3, 9.0), True)]
)
def test_a_proxy_that_rose_only_where_a_summary_is_cut_off_is_found(proxies, explains):
    (gain,) = scores.gains_by_cut_off(run_of((1.0, 1.1), proxies))
    assert (gain.posts, gain.other_posts) == (1, 3)
    assert gain.proxy is None  # one post has no interval
    assert limits.cut_off_explains(gain) == explains


def test_the_interval_of_a_gain_is_a_t_interval():
    # The mean of 0.1, -0.1 and 0.3 is 0.1; half of it is t(2) * 0.2 / sqrt 3 = 0.497.
    (gain,) = scores.gains_by_cut_off(run_of((1.0, 1.1), (0.1, -0.1, 0.3, 9.0)))
    assert number(gain.other_proxy) == "0.10 [-0.40, 0.60]"


@pytest.mark.parametrize(
    ("text", "is_question"),
    [("Why?", True), ('He said "why?" ', True), ("Why? So.", False), ("", False), ("Why?)", True)],
)
def test_a_question_counts_if_it_ends_the_summary(text, is_question):
    assert scores.asks(text) == is_question


@pytest.mark.parametrize(
    ("low", "high", "is_over"), [(-0.4, -0.2, True), (0.1, 0.2, False), (-0.1, 0.2, False)]
)
def test_over_optimization_needs_a_proxy_that_rose_and_a_gold_score_that_fell(low, high, is_over):
    row = ScoreRow(
        name="ppo",
        title="PPO",
        proxy=None,
        gold=None,
        proxy_gain=Interval(estimate=0.3, low=0.2, high=0.4),
        gold_gain=Interval(estimate=(low + high) / 2, low=low, high=high),
    )
    assert row.is_over_optimized == is_over
