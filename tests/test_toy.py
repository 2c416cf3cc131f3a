"""The built-in world: its facts are in its posts, its references imperfect, its labellers human."""

import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from stages.posts import toy
from stages.posts.kinds import HARD, PLAIN
from stages.posts.readers import SPLITS, check_comparison, check_post, is_cnndm
from stages.posts.toy import (
    COPYISTS,
    WRITERS,
    Facts,
    facts_of,
    make_comparison,
    make_post,
    read_summary,
    score_summary,
    write_as,
    write_world,
)
from stages.running.files import file_hash
from stages.settings.config import World

POSTS = [make_post(f"toy1-train-{n}") for n in range(400)]
HARD_POSTS = [make_post(f"toyhard1-train-{n}") for n in range(400)]
PAIRS = [make_comparison(POSTS[n % 400], str(n), "train") for n in range(3000)]
FACTS = Facts(
    who="boss", deed="sold", thing="bike", when="monday", feeling="angry", ask="leave"
)  # of a post that nobody wrote
HARD_FACTS = replace(FACTS, name="Bako", place="Suten")
HARD_COMPLETE = "My boss Bako sold my bike in Suten on monday. I feel angry. Should I leave?"
COMPLETE = "My boss sold my bike on monday. I feel angry. Should I leave?"


WRITE_WORLD = """
from pathlib import Path
from stages.posts.toy import write_world
from stages.settings.config import World
world = World(
    seed={seed}, train_posts=5, validation_posts=4, train_comparisons=7, validation_comparisons=6
)
write_world(Path({folder!r}), world, lambda items, label, total: iter(items))
"""


def small_world(folder: Path, seed: int = 1, hash_seed: str = "0") -> list[bytes]:
    """The four files of a small world, written by a process of its own."""
    folder.mkdir()
    subprocess.run(
        [sys.executable, "-c", WRITE_WORLD.format(folder=str(folder), seed=seed)],
        cwd=Path(toy.__file__).parents[2],
        env={"PYTHONHASHSEED": hash_seed},
        check=True,
    )
    assert {path.name for path in folder.iterdir()} == {f"{split}.jsonl" for split in SPLITS}
    return [(folder / f"{split}.jsonl").read_bytes() for split in SPLITS]


def gaps_and_verdicts() -> list[tuple[float, bool]]:
    """For each pair: score of the second summary minus the first, and whether it was chosen."""
    found = []
    for pair in PAIRS:
        facts = facts_of(pair["info"]["id"])
        first, second = (score_summary(one["text"], facts) for one in pair["summaries"])
        found.append((second - first, pair["choice"] == 1))
    return found


VERDICTS = gaps_and_verdicts()


# -- facts and posts -------------------------------------------------------------------------------


def test_every_fact_is_stated_in_the_post_in_its_own_role():
    for row in POSTS:
        facts, text = facts_of(row["id"]), row["post"]
        assert f" my {facts.thing}." in text
        assert re.search(rf"\b[Mm]y {facts.who} {facts.deed} my {facts.thing}\.", text)
        assert re.search(rf"(It happened|That was) on {facts.when}\.", text)
        assert re.search(rf"I (really )?feel {facts.feeling}\.", text)
        assert re.search(rf"(Should I|I should) {facts.ask}[?.]", text)


def test_no_other_fact_is_stated_in_that_role():
    for row in POSTS:
        text = row["post"]
        assert len(re.findall(r"\b[Mm]y \w+ \w+ my \w+\.", text)) == 1
        assert len(re.findall(r"(?:It happened|That was) on ", text)) == 1
        assert len(re.findall(r"I (?:really )?feel ", text)) == 1
        assert len(re.findall(r"Should I|I should", text)) == 1


def test_a_post_holds_the_same_words_in_other_roles():
    words = {word for slot in PLAIN.words.values() for word in slot}
    extra = [
        sum(word.strip(".?").lower() in words for word in row["post"].split()) for row in POSTS
    ]
    assert min(extra) > 6, "some post has no distractor"
    copied = [
        found[1] == facts_of(row["id"]).when
        for row in POSTS
        if (found := re.search(r"We always meet on (\w+)", row["post"]))
    ]
    assert len(copied) > 50
    assert mean(copied) < 0.4, "whoever copies a distractor has to be wrong"


def test_facts_vary_and_belong_to_the_id():
    assert facts_of("toy1-train-3") == facts_of("toy1-train-3")
    assert len({facts_of(row["id"]) for row in POSTS}) > 390
    for slot, words in PLAIN.words.items():
        assert {getattr(facts_of(row["id"]), slot) for row in POSTS} == set(words)


@pytest.mark.parametrize("post_id", ["t3_2d41dc", "", "Toy1-train-0"])
def test_facts_of_a_foreign_post_are_refused(post_id):
    with pytest.raises(ValueError, match="built-in world"):
        facts_of(post_id)


# -- what a summary is worth -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("summary", "score"),
    [
        (COMPLETE, 6),
        (COMPLETE.lower(), 6),
        (" " + COMPLETE, 6),
        ("", 0),
        ("Something happened.", 0),
        ("My boss sold my bike.", 3),
        ("My boss sold my bike on monday.", 4),
        ("My boss sold my laptop.", 2 - 1),
        ("My uncle lost my laptop on easter. I feel sad. Should I sue?", -6),
        ("I feel angry. Should I leave?", 2),
        ("I feel angry. I feel sad.", 1 - 1),
        # The right words in no role, or in another's, say nothing.
        ("boss sold bike monday angry leave", 0),
        ("The boss was angry. They tell everyone to leave.", 0),
        # 13 words are free, and one more; each word beyond costs a quarter.
        (COMPLETE + " Really.", 6),
        (COMPLETE + " It is so sad.", 6 - 3 * 0.25),
        (COMPLETE + " " + COMPLETE, 6 - 12 * 0.25),
    ],
)
def test_a_summary_is_worth_its_right_facts_less_its_wrong_ones_less_its_length(summary, score):
    assert score_summary(summary, FACTS) == score


def test_right_and_wrong_facts_are_told_apart():
    right, wrong = read_summary("My boss lost my bike on friday. I feel angry.", FACTS)
    assert right == {"who", "thing", "feeling"}
    assert wrong == {("deed", "lost"), ("when", "friday")}


def test_references_are_good_but_leave_room_above_them():
    scores = [score_summary(row["summary"], facts_of(row["id"])) for row in POSTS]
    assert 3 < mean(scores) < 5
    assert max(scores) == 6
    assert mean(0 <= score < 6 for score in scores) > 0.5
    wrong = mean(bool(read_summary(row["summary"], facts_of(row["id"]))[1]) for row in POSTS)
    assert 0.05 < wrong < 0.4


def test_policies_differ_in_quality_as_their_names_say():
    worth = {
        policy: mean(
            score_summary(write_as(policy, random.Random(n), row), facts_of(row["id"]))
            for n, row in enumerate(POSTS)
        )
        for policy in (*WRITERS, *COPYISTS)
    }
    assert worth["best_of_n"] > worth["sup_large"] > worth["sup_small"]
    assert worth["best_of_n"] > worth["ref"] > worth["sup_small"]
    assert worth["rambler"] < worth["best_of_n"]
    assert abs(worth["title"]) < 0.5
    row = POSTS[0]
    assert write_as("ref", random.Random(0), row) == row["summary"]
    assert row["post"].startswith(write_as("lead", random.Random(0), row).split(".")[0])


# -- the hard world --------------------------------------------------------------------------------


def test_a_hard_post_states_eight_facts_once_each_in_their_roles():
    for row in HARD_POSTS:
        facts, text = facts_of(row["id"]), row["post"]
        event = re.findall(r"\b[Mm]y (\w+) (\w+) (\w+) my (\w+)\.", text)
        assert event == [(facts.who, facts.name, facts.deed, facts.thing)]
        assert re.findall(r"(?:It happened|That was) in (\w+)\.", text) == [facts.place]
        assert re.findall(r"(?:It was|All that) on (\w+)\.", text) == [facts.when]
        assert re.findall(r"I (?:really )?feel (\w+)\.", text) == [facts.feeling]
        assert re.findall(r"(?:Should I|I should) (\w+)", text) == [facts.ask]


def test_hard_posts_are_longer_and_their_names_are_rare():
    words = [mean(len(row["post"].split()) for row in posts) for posts in (POSTS, HARD_POSTS)]
    assert words[1] > 1.2 * words[0]
    names = Counter(facts_of(f"toyhard1-train-{n}").name for n in range(8000))
    shared = Counter(facts_of(f"toyhard1-train-{n}").who for n in range(8000))
    assert (len(names), len(set(HARD.words["place"]))) == (60, 40)
    # By Zipf's law: 60 of 261 draws, 20 for the third name, 1 for each of the last thirty.
    drawn = names.most_common()
    assert drawn[0][1] == pytest.approx(8000 * 60 / 261, rel=0.05)
    assert drawn[2][1] == pytest.approx(8000 * 20 / 261, rel=0.1)
    assert mean(count for _, count in drawn[30:]) == pytest.approx(8000 / 261, rel=0.1)
    assert min(shared.values()) > 480  # of 14, all alike: 571 on average


@pytest.mark.parametrize(
    ("summary", "score"),
    [
        (HARD_COMPLETE, 8),
        (HARD_COMPLETE.lower(), 8),
        ("My boss Bako sold my bike.", 4),
        ("My boss sold my bike.", 3),
        ("My boss Lemo sold my bike.", 3 - 1),
        ("My boss Bako sold my bike in Rotan.", 4 - 1),
        ("It happened in Suten. My boss was there.", 0),
        (HARD_COMPLETE + " It is so sad.", 8 - 3 * 0.25),
    ],
)
def test_a_hard_summary_is_worth_its_eight_facts(summary, score):
    assert score_summary(summary, HARD_FACTS) == score


def test_references_of_the_hard_world_leave_room_and_read_as_they_are_written():
    scores = [score_summary(row["summary"], facts_of(row["id"])) for row in HARD_POSTS]
    assert 4 < mean(scores) < 7
    assert max(scores) == 8
    perfect = toy.Writer(mention=1.0, garble=0.0)
    for row in HARD_POSTS[:50]:
        facts = facts_of(row["id"])
        text = toy.write_summary(random.Random(0), facts, perfect)
        assert read_summary(text, facts) == (set(HARD.words), set())


# -- comparisons -----------------------------------------------------------------------------------


def test_a_labeller_is_right_more_often_where_the_gap_is_larger():
    shares = []
    for low, high in ((0.01, 0.6), (0.6, 1.5), (1.5, 2.5), (2.5, 99)):
        inside = [(gap > 0) == chosen for gap, chosen in VERDICTS if low < abs(gap) <= high]
        assert len(inside) > 80
        shares.append(mean(inside))
    assert shares == sorted(shares)
    assert shares[0] > 0.5
    assert shares[-1] > 0.98


def test_some_labellers_are_more_often_mistaken_than_others():
    right: dict[str, list[bool]] = {}
    for pair, (gap, chosen) in zip(PAIRS, VERDICTS, strict=True):
        if 0 < abs(gap) <= 1:
            right.setdefault(pair["worker"], []).append((gap > 0) == chosen)
    shares = [mean(right[f"labeller-{worker}"]) for worker in range(5)]
    assert shares[0] > shares[4] + 0.02
    assert all(0.5 < share < 1 for share in shares)


def test_equal_summaries_are_chosen_by_a_fair_coin_and_order_gives_nothing_away():
    ties = [chosen for gap, chosen in VERDICTS if gap == 0]
    assert mean(ties) == pytest.approx(0.5, abs=3.5 * 0.5 / math.sqrt(len(ties)))
    assert mean(chosen for _, chosen in VERDICTS) == pytest.approx(0.5, abs=0.03)


def test_confidence_is_on_the_side_of_the_choice_and_its_strength_grows_with_the_gap():
    by_strength: dict[int, list[float]] = {}
    for pair, (gap, chosen) in zip(PAIRS, VERDICTS, strict=True):
        confidence = pair["extra"]["confidence"]
        assert (confidence > 5) == (pair["choice"] == 1) == chosen
        by_strength.setdefault(abs(confidence - 5), []).append(abs(gap))
    assert sorted(by_strength) == [1, 2, 3, 4]
    means = [mean(by_strength[level]) for level in range(1, 5)]
    assert means == sorted(means)


def test_two_policies_meet_in_every_pair_and_all_of_them_appear():
    met = [{one["policy"] for one in pair["summaries"]} for pair in PAIRS]
    assert {len(pair) for pair in met} == {2}
    assert set().union(*met) == {*WRITERS, *COPYISTS}
    assert len({pair["worker"] for pair in PAIRS}) == 5
    assert len({pair["batch"] for pair in PAIRS}) == 4


# -- the world on disk -----------------------------------------------------------------------------


def test_rows_have_the_schemas_of_the_real_data():
    for row in POSTS:
        check_post("post", row)
        assert "\n" in row["post"]
        assert not row["summary"].startswith(" ")
    for pair in PAIRS:
        check_comparison("pair", pair)
        assert not is_cnndm(pair)
        assert all(one["text"].startswith(" ") for one in pair["summaries"])


def test_a_world_is_a_function_of_its_seed_in_any_process(tmp_path):
    first = small_world(tmp_path / "first")
    assert first == small_world(tmp_path / "again", hash_seed="77")
    other = small_world(tmp_path / "other", seed=2)
    assert all(one != two for one, two in zip(first, other, strict=True))


def test_the_plain_world_is_to_the_byte_what_it_was_before_there_was_another(tmp_path):
    world = World(
        train_posts=200, validation_posts=40, train_comparisons=300, validation_comparisons=60
    )
    write_world(tmp_path, world, lambda items, *_: iter(items))
    # SHA-256 of what the generator wrote at commit c09328c.
    assert {path.stem: file_hash(path)[:16] for path in tmp_path.iterdir()} == {
        "comparisons_train": "a7e6589d9bd3db74",
        "comparisons_validation": "1fb01114eddcd167",
        "sft_train": "718cc2b9c06316b3",
        "sft_validation": "02528adf3b98a49a",
    }


def test_splits_share_no_post_and_comparisons_are_about_posts_of_their_split(tmp_path):
    folder = tmp_path / "world"
    small_world(folder)
    ids: dict[str, set[str]] = {}
    parts: dict[str, set[str]] = {}
    for split in SPLITS:
        rows = [json.loads(line) for line in (folder / f"{split}.jsonl").open(encoding="utf-8")]
        ids[split] = {row.get("id") or row["info"]["id"] for row in rows}
        parts[split] = {row.get("split") for row in rows}
    assert parts["comparisons_train"] == {"train"}
    assert parts["comparisons_validation"] == {"valid1", "valid2"}
    assert not ids["sft_train"] & ids["sft_validation"]
    assert ids["comparisons_train"] <= ids["sft_train"]
    assert ids["comparisons_validation"] <= ids["sft_validation"]
