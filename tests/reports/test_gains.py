"""Gains over SFT: by seed, and where they lie: in closing questions, and in cut-off summaries."""

from types import SimpleNamespace
from typing import Any

import pytest

from reports import limits
from reports.entries import Entry
from reports.gains import Gain, Gains, gains_of, gold_over_kl
from reports.results import Interval
from reports.scores import gains_by_cut_off, gains_by_question

ROSE = Interval(estimate=0.4, low=0.2, high=0.6)
FELL = Interval(estimate=-0.3, low=-0.4, high=-0.2)
UNCLEAR = Interval(estimate=0.1, low=-0.1, high=0.3)


def run_with(proxy=None, gold=None, kl=4.0):
    """A run whose judge found these gains of PPO."""
    scores: dict[str, Any] = {"gains": {"ppo": {}}}
    if proxy is not None:
        scores["gains"]["ppo"]["proxy"] = vars(proxy)
    if gold is not None:
        scores["gains"]["ppo"]["gold"] = vars(gold)
    return SimpleNamespace(
        seed=1,
        stages={"win_rate": SimpleNamespace(results={"scores": scores})},
        policies={"ppo": SimpleNamespace(kl=kl), "sft": SimpleNamespace(kl=0.0)},
    )


def entry_of(*runs, policy="ppo"):
    return Entry(name="tiny", policy=policy, runs=runs, label=policy.upper())


# -- by seed ---------------------------------------------------------------------------------------


def test_a_gain_is_the_mean_over_seeds_with_its_t_interval():
    """Of 0.2, 0.4 and 0.3 the mean is 0.3, the deviation 0.1, and t(0.975, 2) is 4.303."""
    seeds = [Interval(estimate=value, low=0.1, high=0.6) for value in (0.2, 0.4, 0.3)]
    mean = Gain(by_seed=tuple(seeds)).mean
    assert isinstance(mean, Interval)
    assert (mean.estimate, mean.low, mean.high) == pytest.approx((0.3, 0.0516, 0.5484), abs=1e-4)


def test_the_gain_of_one_seed_has_its_interval_over_posts():
    assert Gain(by_seed=(ROSE,)).mean == ROSE


def test_seeds_that_rose_and_fell_are_counted():
    gain = Gain(by_seed=(ROSE, ROSE, FELL, UNCLEAR))
    assert (gain.rose, gain.fell) == (2, 1)
    assert (gain.lowest, gain.highest) == (-0.3, 0.4)


def test_one_post_shows_neither_a_rise_nor_a_fall():
    gain = Gain(by_seed=(Interval(estimate=1.0, low=1.0, high=1.0),))
    assert (gain.rose, gain.fell) == (0, 0)


def test_over_optimization_is_counted_by_seed():
    gains = Gains(
        label="PPO",
        proxy=Gain(by_seed=(ROSE, ROSE, UNCLEAR)),
        gold=Gain(by_seed=(FELL, ROSE, FELL)),
    )
    assert gains.over_optimized == 1


def test_an_entry_without_gains_in_every_seed_has_none():
    (gains,) = gains_of([entry_of(run_with(ROSE, FELL), run_with(ROSE)), entry_of(run_with())])
    assert gains.proxy == Gain(by_seed=(ROSE, ROSE))
    assert gains.gold is None


def test_gold_scores_over_kl_need_a_kl_and_a_gold_score(no_drawing):
    assert gold_over_kl([entry_of(run_with(gold=ROSE), run_with(gold=FELL))]) is not None
    assert gold_over_kl([entry_of(run_with(gold=ROSE, kl=None))]) is None
    assert gold_over_kl([entry_of(run_with(gold=ROSE), policy="sft")]) is None


# -- on which posts --------------------------------------------------------------------------------

PROXIES = (1.9, 2.0, 2.1, 7.0)


def four_posts(other_gold, proxies=PROXIES) -> Any:
    """A run of four posts: PPO ends 0 and 2 with a new question, and its summary of 3 is cut off.

    The gold score rises by 1.0 and 1.1 on posts 0 and 2, and by `other_gold` on 1 and 3.
    """
    texts = {"ppo": ("Is it?", "Am I?", 'Why?"', "No."), "sft": ("So.", "Am I?", "So.", "So.")}
    golds = {"ppo": (1.0, other_gold[0], 1.1, other_gold[1]), "sft": (0.0, 0.0, 0.0, 0.0)}
    scored = [
        {"policy": policy, "id": str(post), "score": score}
        for policy, scores in golds.items()
        for post, score in enumerate(scores)
    ]
    files: dict[str, list[dict[str, Any]]] = {"post_scores": scored, "gold_scores": scored}
    for policy, summaries in texts.items():
        files[policy] = [
            {
                "id": str(post),
                "query": str(post),
                "summary": summary,
                "score": proxies[post] if policy == "ppo" else 0.0,
                "has_eos": policy == "sft" or post < 3,
            }
            for post, summary in enumerate(summaries)
        ]

    def rows(file):
        return files[file.removesuffix(".jsonl")]

    gain = {"estimate": 1.0, "low": 0.1, "high": 2.0}
    stage = SimpleNamespace(rows=rows, results={"scores": {"gains": {"ppo": {"proxy": gain}}}})
    return SimpleNamespace(
        seed=1,
        policies={"sft": SimpleNamespace(title="SFT"), "ppo": SimpleNamespace(title="PPO")},
        stages={"summaries": stage, "judge": stage, "win_rate": stage},
    )


@pytest.mark.parametrize(
    ("other_gold", "explains", "only_there"),
    [((0.5, -0.5), True, True), ((0.1, 0.11), True, False), ((1.0, 1.1), False, False)],
)
def test_a_gain_that_lies_in_closing_questions_is_noticed(other_gold, explains, only_there):
    (gain,) = gains_by_question(four_posts(other_gold))
    assert (gain.posts, gain.other_posts) == (2, 2)
    # (1.0 + 1.1) / 2, and t(0.975, 1) = 12.706 times the error 0.05
    assert gain.gold is not None
    assert (gain.gold.estimate, gain.gold.low) == pytest.approx((1.05, 1.05 - 0.6353), abs=1e-4)
    assert gain.other_gold is not None
    assert gain.other_gold.estimate == pytest.approx(sum(other_gold) / 2)
    assert limits.question_explains(gain) == explains
    assert limits.rose_only_there(gain) == only_there


@pytest.mark.parametrize(
    ("proxies", "explains"), [((2.0, 2.1, 2.2, 7.0), False), ((0.1, -0.1, 0.3, 9.0), True)]
)
def test_a_proxy_that_rose_only_where_a_summary_is_cut_off_is_noticed(proxies, explains):
    """On the other posts 0.1, -0.1 and 0.3 are 0.1 on average, -+ 4.303 * 0.2 / sqrt(3)."""
    (gain,) = gains_by_cut_off(four_posts((1.0, 1.1), proxies))
    assert (gain.posts, gain.other_posts) == (1, 3)
    assert gain.proxy is None  # of a single post
    assert limits.cut_off_explains(gain) == explains
