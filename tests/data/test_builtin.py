"""The built-in posts: what is wanted depends on the subreddit, and length gives nothing away."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from stages.base import read_rows
from stages.config.command_line import make_config
from stages.config.sections import World
from stages.data import builtin
from stages.data.builtin import (
    CLAUSES,
    COMPLETE_WORDS,
    EVENT,
    LONG_COST,
    OPTIONAL,
    STATEMENTS,
    UNWANTED_COST,
    WORDS,
    WRITERS,
    WRONG_COST,
    Facts,
    Writer,
    facts_of,
    make_comparison,
    make_post,
    read_summary,
    score_summary,
    write_summary,
    write_world,
)
from stages.data.readers import SPLITS
from stages.runs.files import file_hash

POSTS = [make_post(f"toy1-train-{n}") for n in range(400)]
PAIRS = [make_comparison(POSTS[n % 400], str(n), "train") for n in range(3000)]
# A post that is not one of the generator's.
WORDS_OF_POST = {
    "who": "boss",
    "deed": "sold",
    "thing": "bike",
    "when": "easter",
    "place": "camp",
    "age": "twelve",
    "witness": "anna",
    "feeling": "sad",
    "ask": "wait",
}
FACTS = Facts(subreddit="tifu", words=WORDS_OF_POST)
EVENT_CLAUSE = "My boss sold my bike"
COMPLETE = f"{EVENT_CLAUSE}, on easter, at camp, told anna."
ALL_WRONG = "My uncle lost my ring, on monday, at work, told tom."


def texts_of(policy: str) -> list[tuple[str, Facts]]:
    """A policy's summary of every post, and the post's facts."""
    texts = []
    for number, post in enumerate(POSTS):
        facts = facts_of(post["id"])
        if policy == "ref":
            texts.append((post["summary"], facts))
        else:
            summary = write_summary(random.Random(number), facts, WRITERS[policy])
            texts.append((summary, facts))
    return texts


def gaps_and_verdicts() -> list[tuple[float, bool]]:
    """For each pair: score of the second summary minus the first, and whether it was chosen."""
    verdicts = []
    for pair in PAIRS:
        facts = facts_of(pair["info"]["id"])
        first, second = pair["summaries"]
        gap = score_summary(second["text"], facts) - score_summary(first["text"], facts)
        verdicts.append((gap, pair["choice"] == 1))
    return verdicts


VERDICTS = gaps_and_verdicts()
TEXTS = {policy: texts_of(policy) for policy in WRITERS}

# -- posts and summaries ---------------------------------------------------------------------------


def test_a_post_states_every_fact_once_in_its_role():
    deeds = "|".join(WORDS["deed"])
    for post in POSTS:
        words = facts_of(post["id"]).words
        text = post["post"]
        events = re.findall(rf"\b[Mm]y (\w+) ({deeds}) my (\w+)\.", text)
        assert events == [(words["who"], words["deed"], words["thing"])]
        for fact, statement in STATEMENTS.items():
            pattern = re.escape(statement).replace(re.escape(f"{{{fact}}}"), r"(\w+)")
            assert re.findall(rf"(?:^|\s){pattern}", text) == [words[fact]], fact


@pytest.mark.parametrize(
    ("summary", "score"),
    [
        (COMPLETE, 6),
        (COMPLETE.lower(), 6),
        (" " + COMPLETE, 6),
        (f"{EVENT_CLAUSE}, told anna, at camp, on easter.", 6),
        ("", 0),
        ("Something happened.", 0),
        (EVENT_CLAUSE, 3),
        (f"{EVENT_CLAUSE}, on easter", 4),
        ("at camp, told anna", 2),
        (COMPLETE + " " + EVENT_CLAUSE.lower(), 6 - 5 * LONG_COST),  # said twice, counted once
        # Right, and not wanted there: at the same length and at a greater one.
        (f"{EVENT_CLAUSE}, feel sad", 3 - UNWANTED_COST),
        (f"{EVENT_CLAUSE}, on easter, aged twelve, should wait.", 4 - 2 * UNWANTED_COST),
        (COMPLETE + " feel sad", 6 - UNWANTED_COST - 2 * LONG_COST),
        # Wrong, whether it would be wanted or not.
        ("My boss sold my ring", 2 - WRONG_COST),
        (f"{EVENT_CLAUSE}, on monday", 3 - WRONG_COST),
        (f"{EVENT_CLAUSE}, feel angry", 3 - WRONG_COST),
        ("on easter, on monday", 1 - WRONG_COST),
        (ALL_WRONG, -6 * WRONG_COST),
        # The right words in no role, or in another's, say nothing.
        ("boss sold bike easter camp sad", 0),
        ("The boss has a bike. We were in camp with anna.", 0),
        # Words beyond a complete summary.
        (COMPLETE + " It is so sad.", 6 - 4 * LONG_COST),
    ],
)
def test_a_summary_loses_what_is_unwanted_wrong_or_too_long(summary, score):
    assert score_summary(summary, FACTS) == score


def test_every_clause_is_read_as_it_is_written():
    writer = Writer(counts={len(OPTIONAL): 1.0}, garble=0.0)
    for post in POSTS[:50]:
        facts = facts_of(post["id"])
        summary = write_summary(random.Random(0), facts, writer)
        right, wrong = read_summary(summary, facts)
        assert right == set(WORDS)
        assert wrong == set()


# -- references ------------------------------------------------------------------------------------

BEST_SCORE = len(EVENT) + len(FACTS.wanted)


def test_references_are_better_than_the_event_alone():
    event_scores = [
        score_summary(CLAUSES["event"].format(**facts.words), facts) for _, facts in TEXTS["ref"]
    ]
    assert mean(event_scores) == len(EVENT)
    assert mean(score_summary(text, facts) for text, facts in TEXTS["ref"]) > len(EVENT)


def test_references_leave_room_above_them():
    scores = [score_summary(text, facts) for text, facts in TEXTS["ref"]]
    assert mean(scores) < BEST_SCORE - 1.5
    assert max(scores) <= BEST_SCORE


def test_some_references_are_wrong():
    has_error = [len(read_summary(text, facts)[1]) > 0 for text, facts in TEXTS["ref"]]
    assert 0.1 < mean(has_error) < 0.5


def test_some_references_are_too_long():
    is_too_long = [len(text.split()) > COMPLETE_WORDS for text, _ in TEXTS["ref"]]
    assert 0.1 < mean(is_too_long) < 0.5


# -- comparisons -----------------------------------------------------------------------------------


def test_policies_write_about_equally_long():
    lengths = {
        policy: mean(len(text.split()) for text, _ in texts) for policy, texts in TEXTS.items()
    }
    assert max(lengths.values()) - min(lengths.values()) < 2
    del lengths["ref"]
    assert max(lengths.values()) - min(lengths.values()) < 0.3


def test_length_is_no_cue():
    """The longer of two summaries is preferred about as often as the shorter one."""
    longer_won = []
    for pair in PAIRS:
        first, second = pair["summaries"]
        first_length = len(first["text"].split())
        second_length = len(second["text"].split())
        if first_length != second_length:
            second_won = pair["choice"] == 1
            longer_won.append((second_length > first_length) == second_won)
    assert len(longer_won) > 600
    assert 0.4 < mean(longer_won) < 0.6


def test_a_labeler_is_right_more_often_if_the_gap_is_larger():
    accuracies = []
    for low, high in ((0.01, 0.6), (0.6, 1.5), (1.5, 2.5), (2.5, 99)):
        is_right = [
            (gap > 0) == second_won for gap, second_won in VERDICTS if low < abs(gap) <= high
        ]
        assert len(is_right) > 80
        accuracies.append(mean(is_right))
    assert accuracies == sorted(accuracies)
    assert accuracies[0] > 0.5
    assert accuracies[-1] > 0.98


# -- files -----------------------------------------------------------------------------------------


def test_the_built_in_posts_keep_their_bytes(tmp_path):
    world = World(
        train_posts=200, validation_posts=40, train_comparisons=300, validation_comparisons=60
    )
    write_world(tmp_path, world, lambda items, *_: iter(items))
    assert {path.stem: file_hash(path)[:16] for path in tmp_path.iterdir()} == {
        "comparisons_train": "f37305c9838fb56b",
        "comparisons_validation": "62fd1c82c01c5376",
        "sft_train": "efdcb60d93ebb4c9",
        "sft_validation": "c04968670b9ed8a2",
    }


WRITE_WORLD = """
from pathlib import Path
from stages.data.builtin import write_world
from stages.config.sections import World
world = World(
    seed={seed}, train_posts=5, validation_posts=4, train_comparisons=7, validation_comparisons=6
)
write_world(Path({folder!r}), world, lambda items, label, total: iter(items))
"""


def write_small_world(folder: Path, seed: int = 1, hash_seed: str = "0") -> dict[str, bytes]:
    """The four files of a small world, written by a process of its own."""
    folder.mkdir()
    subprocess.run(
        [sys.executable, "-c", WRITE_WORLD.format(folder=str(folder), seed=seed)],
        cwd=Path(builtin.__file__).parents[2],
        env={"PYTHONHASHSEED": hash_seed},
        check=True,
    )
    return {path.stem: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def small_world(tmp_path_factory) -> dict[str, bytes]:
    return write_small_world(tmp_path_factory.mktemp("built-in") / "world")


@pytest.fixture
def rows(small_world) -> dict[str, list[dict[str, Any]]]:
    return {
        split: [json.loads(line) for line in small_world[split].splitlines()] for split in SPLITS
    }


def test_the_splits_share_no_post(rows):
    train_ids = {row["id"] for row in rows["sft_train"]}
    validation_ids = {row["id"] for row in rows["sft_validation"]}
    assert not train_ids & validation_ids


@pytest.mark.parametrize("part", ["train", "validation"])
def test_comparisons_are_about_posts_of_their_split(rows, part):
    posts = {row["id"] for row in rows[f"sft_{part}"]}
    assert {row["info"]["id"] for row in rows[f"comparisons_{part}"]} <= posts


def test_comparisons_name_the_splits_of_the_real_data(rows):
    assert {row["split"] for row in rows["comparisons_train"]} == {"train"}
    assert {row["split"] for row in rows["comparisons_validation"]} == {"valid1", "valid2"}


def test_the_posts_are_the_same_in_any_process(small_world, tmp_path):
    assert set(small_world) == set(SPLITS)
    assert write_small_world(tmp_path / "again", hash_seed="77") == small_world


def test_another_seed_gives_other_posts(small_world, tmp_path):
    other = write_small_world(tmp_path / "other", seed=2)
    for split in SPLITS:
        assert other[split] != small_world[split]


def test_nothing_is_said_about_the_files_of_the_built_in_world(runs, capsys):
    overrides = (
        "world.train_posts=8",
        "world.validation_posts=4",
        "world.train_comparisons=8",
        "world.validation_comparisons=4",
        "eval.posts=4",
    )
    read_rows(make_config("tiny-xs", name="small", overrides=overrides))
    assert "not read" not in capsys.readouterr().out
