"""The ranking of existing summaries claims no more than the comparisons show."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from eval.win_rate import names_of_pair, post_scores, rates_of
from reports import outputs, render
from reports.results import Difference, Interval, interval_from


def rows_of_verdicts(verdicts: dict[str, list[tuple[str, str]]]) -> list[dict[str, str]]:
    """The judge's rows: for each system and post the verdicts in the two orders."""
    rows = []
    for system, posts in verdicts.items():
        for post, (policy_first, reference_first) in enumerate(posts):
            row = {"policy": system, "id": str(post)}
            rows.append(row | {"order": "policy_first", "verdict": policy_first})
            rows.append(row | {"order": "reference_first", "verdict": reference_first})
    return rows


def judged_systems(verdicts: dict[str, list[tuple[str, str]]]) -> Any:
    """A run that judged some systems with these verdicts on each post, in both orders."""
    judgements = rows_of_verdicts(verdicts)
    posts = {row["id"]: row["id"] for row in judgements}
    summaries = [{"id": post, "summary": "one two", "reference": "three"} for post in posts]
    results = rates_of(
        written=dict.fromkeys(verdicts, summaries),
        judgements=judgements,
        scores=post_scores(judgements),
        post_of=posts,
        judge_kind="facts",
    )

    policies = {}
    for name, row in results["policies"].items():
        rate = Interval(estimate=row["win_rate"], low=row["low"], high=row["high"])
        policies[name] = SimpleNamespace(name=name, title=name.upper(), win_rate=rate)

    differences = []
    for pair, row in results["differences"].items():
        policy, other = names_of_pair(pair)
        difference = Difference(
            policy=policy,
            other=other,
            interval=interval_from(row),
            p_value=row["p_value"],
            identical=0.0,
        )
        differences.append(difference)

    stages = {
        "win_rate": SimpleNamespace(results=results),
        "summaries": SimpleNamespace(results={}),
    }
    return SimpleNamespace(policies=policies, differences=differences, stages=stages)


def leader_of(ranking) -> Any:
    assert ranking.leader is not None
    return ranking.leader


def test_a_system_that_always_wins_leads_and_is_better_than_one_that_always_loses():
    wins = [("policy", "policy")] * 40
    losses = [("reference", "reference")] * 40
    ranking = outputs.ranking(judged_systems({"bad": losses, "good": wins}))
    assert [system.policy.name for system in ranking.systems] == ["good", "bad"]
    assert leader_of(ranking).is_better
    assert ranking.systems[1].is_worse
    assert ranking.inseparable == ()


def test_equal_systems_are_inseparable():
    half = [("policy", "policy"), ("reference", "reference")] * 20
    ranking = outputs.ranking(judged_systems({"a": half, "b": half}))
    assert not leader_of(ranking).is_better
    assert ranking.inseparable == ("B",)
    answer = render.fill_text("outputs_answer.md", ranking=ranking)
    assert " ".join(answer.splitlines()).endswith(
        "and is not significantly different from the references. It is not reliably better than B."
    )


def test_systems_with_the_same_rate_lead_together():
    half = [("policy", "policy"), ("reference", "reference")] * 20
    losses = [("reference", "reference")] * 40
    ranking = outputs.ranking(judged_systems({"a": half, "b": half, "c": losses}))
    assert ranking.leaders == ["A", "B"]
    answer = " ".join(render.fill_text("outputs_answer.md", ranking=ranking).split())
    assert answer.startswith("A and B lead with the same win rate. A has 50.0%")


def test_the_best_of_twelve_equal_systems_seldom_beats_the_references():
    """The judge answers at random. Of 12 such systems, the best one's own interval is above 50% in
    a quarter of the data sets. Holm's correction limits even one claim, above or below, to 5%.
    """
    rng = np.random.default_rng(5)
    claims = 0
    claims_without_correction = 0
    for _ in range(20):
        verdicts = {}
        for number in range(12):
            verdicts[f"s{number}"] = rng.choice(["policy", "reference"], (12, 2)).tolist()
        leader = leader_of(outputs.ranking(judged_systems(verdicts)))
        claims += leader.is_better
        claims_without_correction += leader.policy.win_rate.is_above(0.5)
    assert claims_without_correction >= 3
    assert claims <= 2


def test_long_names_are_cut_to_different_ones_for_the_terminal():
    names = ["a-very-long-name-of-a-system", "a-very-long-name-of-another", "short"]
    assert outputs.shortened(names, 12) == ["a-very-lo…#1", "a-very-lo…#2", "short"]
