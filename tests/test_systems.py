"""Several systems on one page: claims under Holm's correction, and names that stay apart."""

from itertools import combinations

import numpy as np

from eval.win_rate import (
    describe,
    judged_for_both,
    pair_name,
    paired_difference,
    post_scores,
    statistics_of,
)
from reports import outputs_page
from reports.parts.words import at_equal_length, named, plain
from stages.running.progress import shortened

WIN, LOSS, SPLIT = ("policy",) * 2, ("reference",) * 2, ("policy", "reference")
ORDERS = ("policy_first", "reference_first")


def wins_of(said):
    """What the stage `win_rate` finds; `said`: system -> the verdicts on each post, both orders."""
    rows = [
        {"policy": policy, "id": str(post), "order": order, "verdict": verdict}
        for policy, posts in said.items()
        for post, both in enumerate(posts)
        for order, verdict in zip(ORDERS, both, strict=True)
    ]
    scores, texts = post_scores(rows), {str(post): ("one two", "three") for post in range(60)}
    return {
        "posts": max(map(len, said.values())),
        "policies": {
            name: describe(of) | {"statistics": statistics_of(name, rows, texts)}
            for name, of in scores.items()
        },
        "differences": {
            pair_name(b, a): vars(paired_difference(scores[b], scores[a]))
            for a, b in combinations(scores, 2)
            if judged_for_both(scores[a], scores[b])
        },
    }


def test_the_best_of_twelve_equal_systems_seldom_beats_the_reference():
    """The judge answers at random. Of 12 such systems the best one's own interval lies above 50 %
    in a quarter of the data sets; Holm keeps even one claim, above or below, to 5 %.
    """
    rng, claims, alone = np.random.default_rng(5), 0, 0
    for _ in range(20):
        said = {f"s{k}": rng.choice(["policy", "reference"], (12, 2)).tolist() for k in range(12)}
        wins = wins_of(said)
        claims += "reliably beats the reference" in outputs_page.leads(wins)
        alone += next(iter(outputs_page.in_order(wins).values()))["low"] > 0.5
    assert alone >= 3
    assert claims <= 2


def test_a_rate_that_the_model_made_up_is_marked():
    made = {"estimate": 0.475, "low": 0.158, "high": 0.814, "extrapolated": True}
    assert at_equal_length(made) == "47.5% [15.8, 81.4] EXTRAPOLATED"
    assert at_equal_length({"estimate": None, "extrapolated": True}) == "–"


# -- names -----------------------------------------------------------------------------------------


def test_only_our_own_policies_are_written_in_capitals():
    names = ("sft", "ppo", "dpo", "released", "Ours", "ours", "lead3")
    said = [named(one, names) for one in names]
    assert said == ["SFT", "PPO", "DPO", "RELEASED", "Ours", "ours", "lead3"]
    assert [named(one, ("ppo", "PPO")) for one in ("ppo", "PPO")] == ["ppo", "PPO"]


def test_two_long_names_stay_different_in_a_narrow_column():
    names = [f"meta-llama-3.1-8b-instruct-sft-{one}" for one in ("nucleus", "beam")]
    short = shortened([*names, "ppo"], 22)
    assert short == ["meta-llama-…ft-nucleus", "meta-llama-…t-sft-beam", "ppo"]
    inside = [f"{'a' * 20}{one}{'b' * 20}" for one in ("1", "2")]
    assert len(set(shortened(inside, 30))) == 2
    assert len(set(shortened(inside, 10))) == 2
    for width, some in ((22, names), (30, inside), (10, inside)):
        assert max(map(len, shortened(some, width))) <= width


def test_a_kappa_that_is_0_by_construction_has_no_interval():
    found = {"estimate": 0.0, "low": 0.0, "high": 0.0}
    assert plain(found) == "0.00"
    assert plain(found | {"high": 0.1}) == "0.00 [0.00, 0.10]"
