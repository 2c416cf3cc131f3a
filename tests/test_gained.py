"""Where a gain lies: posts with an added closing question, and posts with a summary cut off."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from reports.parts import gained
from reports.parts.paired import Entry
from reports.parts.words import plain
from reports.sections import scores
from reports.sections.scores import gain_notes

PROXIES = (1.9, 2.0, 2.1, 7.0)
QUESTIONS = "where it ends with a question and SFT does not (2 posts: 1.05 [0.41, 1.69]"


@pytest.mark.parametrize(
    ("others", "note"),
    [
        ((0.5, -0.5), [f"only {QUESTIONS}; the others, 2 posts: {{}})."]),
        ((0.1, 0.11), [f"more {QUESTIONS}; the others, 2 posts: {{}})."]),
        ((1.0, 1.1), []),
    ],
)
def test_a_gain_that_lies_in_closing_questions_is_named(others, note):
    """Four posts: PPO adds a question to two of them, where the gold score rises."""
    run: Any = FourPosts(others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "policies_of", lambda record: ["sft", "ppo"])
        notes = gain_notes(run)
        asking, rest = scores.by_kind(run, scores.adds_question)["ppo"]
        cut, ended = scores.by_kind(run, scores.is_cut_off)["ppo"]
    assert (asking.posts, rest.posts, cut.posts, ended.posts) == (2, 2, 1, 3)
    assert str(plain(asking.proxy)) == "2.00 [0.73, 3.27]"
    assert str(plain(asking.gold)) == "1.05 [0.41, 1.69]"  # (1.0 + 1.1) / 2, half t(1) * 0.05
    assert rest.gold is not None
    assert rest.gold["estimate"] == pytest.approx(sum(others) / 2)
    # The last post's summary is cut off, and there the proxy rose by 7: on the others by 2.
    assert cut.proxy is None
    assert str(plain(ended.proxy)) == "2.00 [1.75, 2.25]"
    said_of_rest = plain(rest.gold)
    assert notes == [f"PPO's gold score reliably rose {text.format(said_of_rest)}" for text in note]


class FourPosts:
    """A run whose PPO asks on two posts more than SFT; of the last post its summary is cut off."""

    def __init__(self, others: tuple[float, float], proxies: Sequence[float] = PROXIES):
        self.golds = {"sft": (0.0, 0.0, 0.0, 0.0), "ppo": (1.0, others[0], 1.1, others[1])}
        self.proxies = proxies

    seed = 1

    def rows(self, stage, file):
        if stage in ("judge", "win_rate"):
            return [
                {"policy": name, "id": str(post), "score": score}
                for name, of_posts in self.golds.items()
                for post, score in enumerate(of_posts)
            ]
        theirs, ours = ("So.", "Am I?", "So.", "So."), ("Is it?", "Am I?", 'Why?"', "No.")
        is_ppo = file == "ppo.jsonl"
        return [
            {"id": str(n), "query": str(n), "summary": x, "score": y * is_ppo}
            | {"has_eos": n < 3 or not is_ppo}
            for n, (x, y) in enumerate(zip(ours if is_ppo else theirs, self.proxies, strict=True))
        ]

    def results(self, stage):
        return {"scores": {"gains": {"ppo": {"proxy": {"low": 0.1, "high": 2.0}}}}}


@pytest.mark.parametrize(
    ("proxies", "named"), [((2.0, 2.1, 2.2, 7.0), False), ((0.1, -0.1, 0.3, 9.0), True)]
)
def test_a_proxy_that_rose_only_where_a_summary_is_cut_off_is_named(proxies, named):
    """Where both end the mean of 0.1, -0.1 and 0.3 is 0.1, half t(2) * 0.2 / sqrt 3 = 0.497."""
    run: Any = FourPosts((1.0, 1.1), proxies)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "policies_of", lambda record: ["sft", "ppo"])
        notes = gain_notes(run)
    text = (
        "PPO's proxy rose, but not reliably where its summary and SFT's both end by themselves"
        " (3 posts: 0.10 [-0.40, 0.60])."
    )
    assert notes == [text] * named


def test_gold_scores_over_kl_are_drawn_a_point_a_seed(monkeypatch):
    def run(gain: float) -> Any:
        gains = {"ppo": {"gold": {"estimate": gain}}}
        return SimpleNamespace(results=lambda stage: {"scores": {"gains": gains}})

    monkeypatch.setattr(gained, "judged_row", lambda run: {"ppo/kl": 4.0, "sft/kl": 0.0})
    entries = [Entry(name="x", policy=name, runs=[run(0.5), run(-1.25)]) for name in ("sft", "ppo")]
    (figure,) = gained.over_kl(entries, ["#111111", "#222222"])
    assert "x:ppo: 0.50 at 2.00, -1.25 at 2.00." in figure.about
    assert gained.over_kl(entries[:1], ["#111111"]) == []
