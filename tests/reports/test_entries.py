"""Entries of a comparison are named, read, and paired by seed and post."""

import json

import pytest

from reports import compare as compare_page
from reports.entries import Changes, change_of, compare, differing_settings, read_entries
from reports.results import Interval
from stages.config.command_line import make_config
from stages.runs.files import read_lines
from stages.runs.manifest import stage_folder
from tests.lib.asserts import refused_by
from tests.lib.fabricated_runs import NASTY, fabricate, write_rows

# The scores of nine posts. From A to B post 0 becomes worse, 2 and 4 become better, 3 and 7 lose
# both times, 1, 5 and 6 stay the same, and 8 becomes worse.
A = (1.0, 1.0, 0.5, 0.0, 0.0, 0.5, 1.0, 0.0, 1.0)
B = (0.0, 1.0, 1.0, 0.0, 1.0, 0.5, 1.0, 0.0, 0.5)
WON = (1.0,) * 9
LOST = (0.0,) * 9
TEXTS = [f"My aunt sold lamp {number}." for number in range(9)]

pytestmark = pytest.mark.usefixtures("runs")


def finish(name, scores, *seeds, **others):
    """Fabricate a run in these seeds; another run than `tiny` has another penalty."""
    overrides: tuple[str, ...] = ()
    if name != "tiny":
        overrides = ("ppo.kl_coef=0.1",)
    for seed in seeds:
        config = make_config("tiny", name=name, seed=seed, overrides=overrides)
        fabricate(config, scores=scores, **others)


def pair_of(*texts):
    """The second entry compared with the first."""
    (base, entry), _ = read_entries(texts)
    return compare(entry, base)


def test_verdicts_on_the_same_posts_are_counted():
    finish("tiny", A, 1, texts=TEXTS)
    finish("b", B, 1)
    assert pair_of("tiny/1", "b/1").changes == Changes(
        better=2, worse=2, both_lose=2, unchanged=3, unjudged=0, identical=0, summaries=9
    )


def test_the_difference_is_the_mean_over_posts():
    """By hand: -1, 0, 1/2, 0, 1, 0, 0, 0 and -1/2 add up to 0."""
    finish("tiny", A, 1, texts=TEXTS)
    finish("b", B, 1)
    comparison = pair_of("tiny/1", "b/1").comparison
    assert comparison.over_posts is not None
    assert comparison.over_posts.estimate == pytest.approx(0.0)
    assert comparison.p_over_posts == 1.0


def test_a_win_rate_is_the_mean_score():
    finish("tiny", A, 1)
    (ppo, _), _ = read_entries(["tiny/1:ppo", "tiny/1:sft"])
    assert ppo.win_rate is not None
    assert ppo.win_rate.estimate == pytest.approx(5 / 9)


def test_seeds_are_paired_and_a_seed_of_only_one_entry_is_left_out():
    for seed in (1, 2, 3):
        finish("tiny", (0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0), seed, texts=TEXTS)
    finish("b", WON, 1, 2)
    finish("b", (*WON[:8], 0.0), 3)
    finish("tiny", WON, 4)
    assert pair_of("tiny", "b").comparison.by_seed == pytest.approx([8 / 9, 8 / 9, 7 / 9])
    assert pair_of("b", "tiny").comparison.by_seed == pytest.approx([-8 / 9, -8 / 9, -7 / 9])


def test_two_single_runs_are_compared_whatever_their_seeds():
    finish("tiny", LOST, 1, texts=TEXTS)
    finish("b", WON, 2)
    assert pair_of("tiny/1", "b/2").comparison.by_seed == (1.0,)


def test_too_many_posts_without_a_verdict_give_no_difference():
    finish("tiny", A, 1)
    finish("b", (None, *B[1:]), 1)
    pair = pair_of("tiny/1", "b/1")
    assert pair.comparison.over_posts is None
    assert pair.comparison.by_seed == ()
    assert pair.changes.unjudged == 1
    assert pair.entry.win_rate is None


def test_a_difference_between_the_same_texts_is_not_significant():
    finish("tiny", LOST, 1)
    finish("b", WON, 1)
    pair = pair_of("tiny/1", "b/1")
    assert pair.changes.identical == 9
    assert pair.changes.summaries == 9
    assert pair.changes.are_none
    # The judge's verdicts differ, but the texts do not.
    assert pair.comparison.over_posts == Interval(estimate=0.0, low=0.0, high=0.0)
    assert pair.comparison.by_seed == (0.0,)
    assert pair.comparison.p_value == 1.0


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ("lost", "won", "better"),
        ("even", "won", "better"),
        ("won", "even", "worse"),
        ("lost", "lost", "both lose"),
        ("won", "won", "unchanged"),
        ("won", "unjudged", "unjudged"),
        ("unjudged", "unjudged", "unjudged"),
    ],
)
def test_a_change_of_the_verdict_has_a_name(before, after, change):
    assert change_of(before, after) == change


def test_settings_that_differ_have_a_value_for_each_group():
    finish("tiny", A, 1)
    finish("b", B, 1)
    entries, _ = read_entries(["tiny/1", "b/1"])
    groups = {entry.label: entry.runs for entry in entries}
    (setting,) = differing_settings(groups)
    assert setting.name == "ppo.kl_coef"
    assert setting.values == ("0.05", "0.1")
    assert differing_settings(groups, ["ppo"]) == []


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        (["tiny:ppo", "tiny:sft"], ["PPO", "SFT"]),
        (["tiny:ppo", "b:ppo", "b:sft"], ["PPO (tiny)", "PPO (b)", "SFT"]),
        (["tiny:ppo", "tiny-dropout:ppo"], ["PPO", "PPO (dropout)"]),
        (["tiny/1:ppo", "b/1:ppo"], ["PPO (tiny/1)", "PPO (b/1)"]),
    ],
)
def test_labels_tell_entries_apart(texts, labels):
    for name in ("tiny", "b", "tiny-dropout"):
        finish(name, A, 1)
    entries, _ = read_entries(texts)
    assert [entry.label for entry in entries] == labels


def test_a_seed_without_the_policy_is_left_out():
    finish("tiny", A, 1, 2)
    path = stage_folder(make_config("tiny", seed=2), "win_rate") / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["results"]["policies"]["ppo"]
    path.write_text(json.dumps(manifest))

    entries, left_out = read_entries(["tiny:ppo", "tiny:sft"])
    assert [entry.seeds for entry in entries] == [[1], [1, 2]]
    assert left_out == ["tiny has no policy ppo in seed 2."]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["tiny:ppo"], "name two or more"),
        (["tiny/1", "tiny/1:ppo"], "are all tiny/1:ppo"),
        (["tiny/1", "tiny/9"], "seed 9 of tiny has not finished"),
        (["tiny/1", "tiny/1:dpo"], "has no policy dpo: it has sft, ppo"),
        (["tiyn", "tiny"], "did you mean tiny?"),
        (["tiny/one", "tiny"], "names no policy"),
        (["tiny/seed:ppo", "tiny"], "names no policy"),
        (["tiny", "b"], "have no seed in common"),
        (["tiny/1", "b/2"], "toy3 has another text in b/2:ppo"),
    ],
)
def test_entries_that_cannot_be_compared_are_refused_in_one_line(capsys, texts, message):
    finish("tiny", A, 1, 3)
    finish("b", B, 2)
    config = make_config("tiny", name="b", seed=2, overrides=("ppo.kl_coef=0.1",))
    path = stage_folder(config, "summaries") / "ppo.jsonl"
    rows = read_lines(path)
    rows[3]["query"] = NASTY + " More."
    write_rows(path, rows)

    assert message in refused_by(capsys, compare_page.main, "--runs", *texts)


def test_without_entries_the_command_says_what_to_name(capsys):
    assert "name two or more" in refused_by(capsys, compare_page.main)
