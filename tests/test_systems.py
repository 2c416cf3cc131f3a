"""What a page says of several systems: who leads, the headline, names and counts."""

from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eval.win_rate import (
    describe,
    judged_for_both,
    pair_name,
    paired_difference,
    post_scores,
    statistics_of,
)
from reports import outputs_page
from reports.parts import sentences
from reports.parts.page import Details
from reports.parts.words import at_equal_length, named, plain
from reports.sections import judging, made_with
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


@pytest.mark.parametrize(
    ("said", "stands"),
    [
        ([WIN] * 12, "reliably beats the reference"),
        ([LOSS] * 11 + [WIN], "reliably LOSES to the reference"),
        ([SPLIT] * 12, "is inconclusive against the reference"),
    ],
)
def test_who_leads_is_said_with_where_it_stands_to_the_reference(said, stands):
    alone = outputs_page.leads(wins_of({"a": said}))
    assert alone.startswith(f"a {stands}: ")
    assert "leads" not in alone  # it has no opponent
    both = outputs_page.leads(wins_of({"a": said, "b": said}))
    assert " leads with " in both
    assert both.endswith(f"is inconclusive. It {stands}.")


def test_a_reliable_lead_is_said_and_the_table_has_the_best_first():
    wins = wins_of({"weak": [LOSS] * 11 + [WIN], "b-c": [WIN] * 12})
    assert "b-c leads with 100.0% [" in outputs_page.leads(wins)
    assert "and is reliably better than the next, weak. It" in outputs_page.leads(wins)
    rows = outputs_page.table(wins).rows
    assert [(row[0], *row[3:]) for row in rows] == [("b-c", "12", "0.0%"), ("weak", "12", "0.0%")]


def test_a_system_without_enough_verdicts_is_last_and_has_no_rate_anywhere():
    silent = [("unjudged",) * 2] * 12
    wins = wins_of({"silent": silent, "a": [WIN] * 6 + [LOSS] * 6})
    assert "the only one with a rate" in outputs_page.leads(wins)
    assert outputs_page.table(wins).rows[1][:3] == ["silent", "– (100.0% unjudged)", "–"]
    (line,) = (one for one in headline_of(wins).splitlines() if one.startswith("  silent "))
    assert line.split() == ["silent", "–", "(100.0%", "unjudged)", "–"]
    assert "No system has a rate" in outputs_page.leads(wins_of({"silent": silent}))


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


ABOUT = {"name": "x", "judge": "j", "is_llm": True, "judge_flags": [], "policies": []}
ABOUT |= {"data": {}, "posts": 1, "texts": 1, "differences": {}}
"""A judge without a caveat."""


def headline_of(wins):
    return outputs_page.headline(ABOUT, wins, Path("page.html"))


def test_a_system_in_the_place_of_the_reference_is_named_in_lead_caveats_and_headline():
    wins = wins_of({"a": [WIN] * 12})
    numbers = ABOUT | {"reference_system": "lead3"}
    assert "with the reference, which is the system lead3, in" in outputs_page.answer(numbers, wins)
    said = "The reference is the system lead3. The controls are made from its summaries, whose"
    assert outputs_page.caveats(numbers)[0].startswith(said)
    headline = outputs_page.headline(numbers, wins, Path("p"))
    assert "- The reference is the system lead3." in headline
    assert "x: 12 posts, judged by j" in headline
    assert outputs_page.caveats(ABOUT) == []
    assert "with the reference, in both orders" in outputs_page.answer(ABOUT, wins)


WHO = {"judge": "j", "is_llm": True, "judgements": 4, "judge_models": [], "judge_note": ""}


def test_a_judge_that_decided_nothing_prefers_no_place():
    assert "shown first in 50.0% of" in judging._who(WHO | {"share_first": 0.5})
    assert judging._who(WHO | {"share_first": None}).endswith(
        "a win and a tie count 3/4, and as won."
    )


def test_a_judge_that_is_no_llm_is_described_in_the_caveats_alone():
    numbers = WHO | {"share_first": 0.5, "judge_note": "counts facts", "judge_kind": "facts"}
    assert judging._who(numbers).endswith(" Its description: counts facts.")
    assert sentences.judge_note(numbers | {"policies": []}) is None
    other = numbers | {"is_llm": False}
    assert "counts facts" not in judging._who(other)
    assert "It is: counts facts." in str(sentences.judge_note(other))


def test_a_released_policy_without_enough_verdicts_has_a_whole_sentence():
    record: Any = SimpleNamespace(settings={"released": {"policy": "a/b"}})
    numbers = WHO | {"posts": 600, "policies": ["released"], "released/unjudged": 0.5}
    numbers |= dict.fromkeys(f"released/{key}" for key in ("win_rate", "low", "high"))
    said = "Of 600 held-out posts, too many have no verdict for a conclusion."
    assert said in made_with.summary(record, numbers).text


def test_rates_by_length_stand_there_only_where_there_are_some():
    titles = [one.summary for one in judging.rates({"a": {}}) if isinstance(one, Details)]
    assert titles == []


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


def test_the_headline_tells_two_long_names_apart():
    names = [f"meta-llama-3.1-8b-instruct-sft-{one}" for one in ("nucleus", "beam")]
    said = headline_of(wins_of(dict.fromkeys(names, [WIN] * 12))).splitlines()
    lines = [one for one in said if one.startswith("  meta")]
    assert len({one.split()[0] for one in lines}) == 2
