"""The built-in world: what is wanted depends on the subreddit, and length gives nothing away."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

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
from stages.running.files import file_hash
from stages.settings.config import World

POSTS = [make_post(f"toy1-train-{n}") for n in range(400)]
PAIRS = [make_comparison(POSTS[n % 400], str(n), "train") for n in range(3000)]
TOLD = {
    **{"who": "boss", "deed": "sold", "thing": "bike", "when": "easter", "place": "camp"},
    **{"age": "twelve", "witness": "anna", "feeling": "sad", "ask": "wait"},
}  # of a post that nobody wrote
FACTS = Facts(subreddit="tifu", words=TOLD)
EVENT_TOLD = "My boss sold my bike"
COMPLETE = f"{EVENT_TOLD}, on easter, at camp, told anna."
ALL_WRONG = "My uncle lost my ring, on monday, at work, told tom."


def texts_of(policy: str) -> list[tuple[str, Facts]]:
    """What a policy says of every post, beside its facts."""
    if policy == "ref":
        return [(row["summary"], facts_of(row["id"])) for row in POSTS]
    every = [facts_of(row["id"]) for row in POSTS]
    writer = WRITERS[policy]
    return [
        (write_summary(random.Random(n), facts, writer), facts) for n, facts in enumerate(every)
    ]


def gaps_and_verdicts() -> list[tuple[float, bool]]:
    """For each pair: score of the second summary minus the first, and whether it was chosen."""
    found = []
    for pair in PAIRS:
        facts = facts_of(pair["info"]["id"])
        first, second = (score_summary(one["text"], facts) for one in pair["summaries"])
        found.append((second - first, pair["choice"] == 1))
    return found


VERDICTS = gaps_and_verdicts()
TEXTS = {policy: texts_of(policy) for policy in WRITERS}


def test_a_post_states_every_fact_once_in_its_role():
    deeds = "|".join(WORDS["deed"])
    for row in POSTS:
        told, text = facts_of(row["id"]).words, row["post"]
        events = re.findall(rf"\b[Mm]y (\w+) ({deeds}) my (\w+)\.", text)
        assert events == [tuple(told[slot] for slot in EVENT)]
        for slot, statement in STATEMENTS.items():
            pattern = re.escape(statement).replace(re.escape(f"{{{slot}}}"), r"(\w+)")
            assert re.findall(rf"(?:^|\s){pattern}", text) == [told[slot]], slot


@pytest.mark.parametrize(
    ("summary", "score"),
    [
        (COMPLETE, 6),
        (COMPLETE.lower(), 6),
        (" " + COMPLETE, 6),
        (f"{EVENT_TOLD}, told anna, at camp, on easter.", 6),
        ("", 0),
        ("Something happened.", 0),
        (EVENT_TOLD, 3),
        (f"{EVENT_TOLD}, on easter", 4),
        ("at camp, told anna", 2),
        (COMPLETE + " " + EVENT_TOLD.lower(), 6 - 5 * LONG_COST),  # told twice gains once
        # Right, and not wanted there: at the same length and at a greater one.
        (f"{EVENT_TOLD}, feel sad", 3 - UNWANTED_COST),
        (f"{EVENT_TOLD}, on easter, aged twelve, should wait.", 4 - 2 * UNWANTED_COST),
        (COMPLETE + " feel sad", 6 - UNWANTED_COST - 2 * LONG_COST),
        # Wrong, whether it would be wanted or not.
        ("My boss sold my ring", 2 - WRONG_COST),
        (f"{EVENT_TOLD}, on monday", 3 - WRONG_COST),
        (f"{EVENT_TOLD}, feel angry", 3 - WRONG_COST),
        ("on easter, on monday", 1 - WRONG_COST),
        (ALL_WRONG, -6 * WRONG_COST),
        # The right words in no role, or in another's, say nothing.
        ("boss sold bike easter camp sad", 0),
        ("The boss has a bike. We were in camp with anna.", 0),
        # Words beyond a complete summary.
        (COMPLETE + " It is so sad.", 6 - 4 * LONG_COST),
    ],
)
def test_a_summary_is_worth_what_it_tells_less_what_is_unwanted_wrong_or_too_long(summary, score):
    assert score_summary(summary, FACTS) == score


def test_every_clause_is_read_as_it_is_written():
    writer = Writer(counts={len(OPTIONAL): 1.0}, garble=0.0)
    for row in POSTS[:50]:
        facts = facts_of(row["id"])
        text = write_summary(random.Random(0), facts, writer)
        assert read_summary(text, facts) == (set(WORDS), set())


def test_references_are_good_but_leave_room_above_them():
    scores = [score_summary(*one) for one in TEXTS["ref"]]
    best = len(EVENT) + len(FACTS.wanted)
    event = mean(score_summary(CLAUSES["event"].format(**f.words), f) for _, f in TEXTS["ref"])
    assert event == 3
    assert event < mean(scores) < best - 1.5
    assert max(scores) <= best
    wrong = [bool(read_summary(*one)[1]) for one in TEXTS["ref"]]
    assert 0.1 < mean(wrong) < 0.5
    too_long = [len(text.split()) > COMPLETE_WORDS for text, _ in TEXTS["ref"]]
    assert 0.1 < mean(too_long) < 0.5


def test_length_is_no_cue():
    """Policies but the references tell equally many facts, and the longer text wins by chance."""
    lengths = [mean(len(text.split()) for text, _ in TEXTS[name]) for name in WRITERS]
    others = [length for name, length in zip(WRITERS, lengths, strict=True) if name != "ref"]
    assert max(others) - min(others) < 0.3
    assert max(lengths) - min(lengths) < 2
    longer_won = []
    for pair in PAIRS:
        first, second = (len(one["text"].split()) for one in pair["summaries"])
        if first != second:
            longer_won.append((second > first) == (pair["choice"] == 1))
    assert len(longer_won) > 600
    assert 0.4 < mean(longer_won) < 0.6


def test_a_labeller_is_right_more_often_where_the_gap_is_larger():
    shares = []
    for low, high in ((0.01, 0.6), (0.6, 1.5), (1.5, 2.5), (2.5, 99)):
        inside = [(gap > 0) == chosen for gap, chosen in VERDICTS if low < abs(gap) <= high]
        assert len(inside) > 80
        shares.append(mean(inside))
    assert shares == sorted(shares)
    assert shares[0] > 0.5
    assert shares[-1] > 0.98


def test_the_world_keeps_its_bytes(tmp_path):
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
        cwd=Path(builtin.__file__).parents[2],
        env={"PYTHONHASHSEED": hash_seed},
        check=True,
    )
    assert {path.name for path in folder.iterdir()} == {f"{split}.jsonl" for split in SPLITS}
    return [(folder / f"{split}.jsonl").read_bytes() for split in SPLITS]


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


def test_a_world_is_a_function_of_its_seed_in_any_process(tmp_path):
    first = small_world(tmp_path / "first")
    assert first == small_world(tmp_path / "again", hash_seed="77")
    other = small_world(tmp_path / "other", seed=2)
    assert all(one != two for one, two in zip(first, other, strict=True))
