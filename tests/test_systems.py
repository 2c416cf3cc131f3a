"""What a page says of several systems: who leads, the headline, names and counts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eval import standings as standings_module
from eval.standings import standings
from eval.win_rate import statistics_of
from reports import leaderboard_page, outputs_page
from reports.parts import sentences
from reports.parts.page import Details, Table
from reports.parts.words import named, plain
from reports.sections import judging, made_with, systems
from stages.running.progress import shortened
from tests.test_standings import LOSS, SPLIT, TEXTS, WIN, verdicts


@pytest.mark.parametrize(
    ("said", "stands"),
    [
        ([WIN] * 12, "reliably beats the reference"),
        ([LOSS] * 11 + [WIN], "reliably LOSES to the reference"),
        ([SPLIT] * 12, "is inconclusive against the reference"),
    ],
)
def test_who_leads_is_said_with_where_it_stands_to_the_reference(said, stands):
    found = standings(verdicts("a", said), {"a": TEXTS})
    assert systems.leads(found).startswith(f"a {stands}: ")
    assert "leads" not in systems.leads(found)  # it has no opponent
    rows = [*verdicts("a", said), *verdicts("b", said)]
    both = systems.leads(standings(rows, dict.fromkeys("ab", TEXTS)))
    assert both.startswith("a leads with ")
    assert both.endswith(f"but its lead over b is inconclusive. It {stands}.")


def test_a_copy_of_the_reference_stands_where_the_reference_does():
    """It ties with the reference on every post, and meets the others as the reference does."""
    good, bad = [WIN] * 45 + [LOSS] * 15, [WIN] * 15 + [LOSS] * 45
    texts = {str(post): ("one two", "three") for post in range(60)}
    rows = [*verdicts("copy", [("tie",) * 2] * 60), *verdicts("good", good), *verdicts("bad", bad)]
    pairs = [*verdicts("good-bad", good), *verdicts("good-copy", good), *verdicts("bad-copy", bad)]
    found = standings(rows, dict.fromkeys(("copy", "good", "bad"), texts), pairs)
    assert list(found["systems"]) == ["good", "copy", "bad"]
    assert [systems.rank(name, found) for name in found["systems"]] == ["1", "2", "3"]
    assert "good leads by strength" in systems.leads(found)
    assert "reliably better than the next, copy" in systems.leads(found)
    gap = next(gap for gap in found["differences"] if gap["second"] == "copy")
    assert gap["estimate"] == pytest.approx(found["systems"]["good"]["strength"]["estimate"])


def test_the_best_of_twelve_equal_systems_seldom_beats_the_reference(monkeypatch):
    """The judge answers at random. Of 12 such systems the best one's own interval lies above 50 %
    in a quarter of the data sets; Holm keeps even one claim, above or below, to 5 %.
    """
    for name, empty in (("differences", []), ("strengths", {}), ("statistics_of", {})):
        monkeypatch.setattr(standings_module, name, lambda *_, empty=empty: empty)  # not looked at
    rng, claims, alone, data_sets = np.random.default_rng(5), 0, 0, 20
    posts = {str(post): ("one two", "one two") for post in range(12)}
    names = [f"s{number}" for number in range(12)]
    for _ in range(data_sets):
        said = {name: rng.choice(["policy", "reference"], (12, 2)).tolist() for name in names}
        rows = [row for name in names for row in verdicts(name, said[name])]
        found = standings(rows, dict.fromkeys(names, posts))
        best = next(iter(found["systems"].values()))
        claims += "reliably beats the reference" in systems.leads(found)
        alone += best["low"] > 0.5
    assert alone >= 3
    assert claims <= 2


def test_one_difference_and_one_post_are_written_of_one():
    rows = [*verdicts("a", [WIN] * 12), *verdicts("b", [LOSS] * 11)]
    texts = {"a": TEXTS, "b": {post: TEXTS[post] for post in list(TEXTS)[:11]}}
    found = standings(rows, texts)
    (left_out,), (details,) = systems.left_out(found), systems.differences(found)
    (table,) = details.inside()
    assert "after Holm's correction, which leaves one as it is." in table.markdown("")
    one = "1 post is left out of the table, because some system has no summary of it."
    assert left_out.markdown("") == one


def test_a_leaderboard_counts_one_system_and_one_post_as_one():
    assert leaderboard_page._counted({"systems": {"a": {}}, "posts": 1}) == (
        "1 system on the same 1 post"
    )
    assert leaderboard_page._counted({"systems": dict.fromkeys("ab"), "posts": 20}) == (
        "2 systems on the same 20 posts"
    )


ABOUT = {"name": "x", "judge": "j", "is_llm": True, "judge_flags": [], "policies": []}
ABOUT |= {"data": {}, "posts": 1, "texts": 1, "differences": {}}
"""A judge without a caveat."""


def headline_of(found):
    return outputs_page.headline(ABOUT, found, Path("page.html"))


def test_the_headline_gives_no_rate_at_all_where_too_much_is_unjudged():
    rows = [*verdicts("a", [WIN, LOSS] * 20), *verdicts("b", [WIN, LOSS, ("unjudged",) * 2] * 13)]
    texts = {name: {str(k): ("one two", "one two") for k in range(39)} for name in "ab"}
    found = standings([row for row in rows if row["id"] in texts["a"]], texts)
    found["systems"]["b"]["statistics"]["length_controlled"] |= {"estimate": 0.5, "low": 0.4}
    found["systems"]["b"]["statistics"]["length_controlled"] |= {"high": 0.6}
    (line,) = (one for one in headline_of(found).splitlines() if one.startswith("  b "))
    assert line.split() == ["b", "–", "(33.3%", "unjudged)", "–"]


def parts():
    """Two systems of ten posts each, four of which both have."""
    a, b = list(TEXTS)[:8], list(TEXTS)[4:]
    texts = {"a": {post: TEXTS[post] for post in a}, "b": {post: TEXTS[post] for post in b}}
    rows = verdicts("a", [WIN] * 8) + verdicts("b", [LOSS] * 12)
    return [row for row in rows if row["id"] in texts[row["policy"]]], texts


def test_headline_and_lead_count_the_posts_that_the_rates_rest_on():
    rows, texts = parts()
    found = standings(rows, texts)
    assert "x: 4 posts that all have (of 12), judged by j" in headline_of(found)
    assert "summaries of 4 posts that all have (of 12) as" in outputs_page.answer(ABOUT, found)


def test_a_system_in_the_place_of_the_reference_is_named_in_lead_caveats_and_headline():
    found = standings(verdicts("a", [WIN] * 12), {"a": TEXTS})
    numbers = ABOUT | {"reference_system": "lead3"}
    assert "with the reference, which is the system lead3, in" in outputs_page.answer(
        numbers, found
    )
    said = "The reference is the system lead3. The controls are made from its summaries, whose"
    assert outputs_page.caveats(numbers)[0].startswith(said)
    assert "- The reference is the system lead3." in outputs_page.headline(
        numbers, found, Path("p")
    )
    assert outputs_page.caveats(ABOUT) == []
    assert "with the reference, in both orders" in outputs_page.answer(ABOUT, found)


def test_the_judges_rates_do_not_pass_for_the_result_tables_where_posts_differ():
    rows, texts = parts()
    numbers = {
        "posts": 12,
        "policies": ["a", "b"],
        **{f"{one}/statistics": statistics_of(one, rows, texts[one]) for one in "ab"},
    }
    assert "only those that all systems have" in judging.beside_the_result(numbers)
    numbers["posts"] = 8
    assert "shows the second interval" in judging.beside_the_result(numbers)


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
    rows = [row for name in names for row in verdicts(name, [WIN] * 12)]
    said = headline_of(standings(rows, dict.fromkeys(names, TEXTS))).splitlines()
    lines = [one for one in said if one.startswith("  meta")]
    assert len({one.split()[0] for one in lines}) == 2


def test_with_direct_comparisons_whoever_won_all_is_first_and_whoever_lost_all_is_last():
    """Neither has a finite strength, so their rates say on which side they stand."""
    said = {"lost": [LOSS] * 12, "some": [WIN] * 6 + [LOSS] * 6, "won": [WIN] * 12}
    rows = [row for name, of_posts in said.items() for row in verdicts(name, of_posts)]
    pairs = [row for name in ("won-some", "some-lost") for row in verdicts(name, [WIN] * 12)]
    found = standings(rows, dict.fromkeys(said, TEXTS), pairs)["systems"]
    assert [found[name]["strength"]["estimate"] for name in ("won", "lost")] == [None, None]
    assert list(found) == ["won", "some", "lost"]


def test_with_direct_comparisons_a_system_that_won_everything_is_tested_by_its_rates():
    """Without a strength it had no test: its lead was "inconclusive", and b could be the first."""
    posts = {str(post): ("one two", "three") for post in range(60)}
    some = [WIN] * 40 + [LOSS] * 20
    rows = [*verdicts("b", some), *verdicts("a", [WIN] * 60), *verdicts("none", [LOSS] * 60)]
    pairs = [*verdicts("b-a", [LOSS] * 60), *verdicts("b-none", [WIN] * 60)]
    pairs += verdicts("a-none", [WIN] * 60)
    found = standings(rows, dict.fromkeys(("b", "a", "none"), posts), pairs)
    assert list(found["systems"]) == ["a", "b", "none"]
    assert found["systems"]["a"]["p_value"] == pytest.approx(2 / 2**60)  # all signs alike
    assert [systems.rank(name, found) for name in found["systems"]] == ["1", "2", "3"]
    said = systems.leads(found)
    assert said.startswith("a leads with 100.0% [")
    assert said.endswith(
        "and is reliably better than the next, b. It reliably beats the reference."
    )
    last = systems.beside_reference(found["systems"]["none"], by_strength=True)
    assert last == "reliably LOSES to the reference"
    gaps = {(gap["first"], gap["second"]): gap for gap in found["differences"]}
    assert list(gaps) == [("a", "b"), ("a", "none"), ("b", "none")]
    assert gaps["a", "b"]["estimate"] == 0.5
    assert gaps["a", "b"]["holm"] == pytest.approx(3 * 2 / 2**60)
    (details,) = (one for one in systems.differences(found) if isinstance(one, Details))
    (table,) = details.inside()
    assert isinstance(table, Table)
    assert table.rows[0][:2] == [
        "a - b",
        "100.0% [94.0, 100.0] head to head",
    ]  # Wilson: 60 / (60 + 3.84)


def test_of_two_systems_that_won_everything_the_one_that_beats_the_other_is_first():
    rows = [*verdicts("a", [WIN] * 12), *verdicts("b", [WIN] * 12)]
    pairs = verdicts("a-b", [LOSS] * 12)
    found = standings(rows, dict.fromkeys("ab", TEXTS), pairs)
    assert list(found["systems"]) == ["b", "a"]
    assert "b leads with 100.0%" in systems.leads(found)
    assert "reliably better than the next, a" in systems.leads(found)


def test_a_few_posts_that_were_all_won_leave_the_lead_inconclusive():
    """Of 5 posts, all signs alike have a chance of 2 / 32."""
    few = {post: TEXTS[post] for post in list(TEXTS)[:5]}
    rows = [*verdicts("a", [WIN] * 5), *verdicts("b", [WIN] * 3 + [LOSS] * 2)]
    found = standings(rows, dict.fromkeys("ab", few), verdicts("a-b", [WIN] * 5))
    assert [systems.rank(name, found) for name in "ab"] == ["1-2", "1-2"]
    assert "its lead over b is inconclusive" in systems.leads(found)
    assert "It is inconclusive against the reference" in systems.leads(found)
