"""Algorithms are compared where their lines over the square root of KL overlap."""

import pytest

from reports.algorithm_points import BEST_OF_N
from reports.equal_kl import difference_over_posts, overlaps_of, pairs_of
from reports.results import Interval
from reports.verdicts import Word
from tests.lib.algorithm_points import POSTS, PPO, RLOO, line, lines


def verdict_words(points):
    """The verdict on each pair of algorithms, by the pair's name; every pair must have one."""
    words = {}
    for pair in pairs_of(points):
        assert pair.verdict is not None
        words[pair.name] = pair.verdict.word
    return words


def test_two_lines_are_compared_where_both_are_over_the_root_of_kl():
    """By hand: over roots 1.5 to 2 the first rises from 0.6 to 0.8 and the other stays at 0.4."""
    points = line("ppo", 0.4, 0.8) + line("rloo", 0.4, 0.4, kls=(2.25, 9))

    (overlap,), seeds = overlaps_of(points, "ppo", "rloo")

    assert overlap.kl_from == pytest.approx(2.25)
    assert overlap.kl_to == pytest.approx(4.0)
    assert overlap.difference(lambda point: point.win_rate) == pytest.approx(0.3)
    assert seeds == 1


def test_lines_without_a_kl_in_common_are_not_compared():
    points = line("ppo", 0.4, 0.8, kls=(1, 2)) + line("rloo", 0.4, 0.4, kls=(3, 9))
    assert overlaps_of(points, "ppo", "rloo") == ([], 1)
    (pair,) = pairs_of(points)
    assert pair.comparison is None
    assert pair.verdict is None


def test_an_algorithm_with_one_point_has_no_line():
    single_points = line("dpo", 0.9, kls=(2,)) + line("sft", 0.5, kls=(0,))
    assert pairs_of(PPO + single_points) == []


def test_the_difference_over_posts_has_the_same_weights():
    """By hand: 0.3 on all posts, as in the comparison of the lines; one post is 0.1 lower."""
    points = line("ppo", 0.4, 0.8) + line("rloo", 0.4, 0.4, kls=(2.25, 9))
    for point in points:
        if point.algorithm == "rloo":
            point.post_scores["post0"] += 0.1
    overlaps, _ = overlaps_of(points, "ppo", "rloo")
    over_posts = difference_over_posts(overlaps)
    assert over_posts is not None
    assert over_posts.estimate == pytest.approx(0.3 - 0.1 / POSTS)


def test_an_algorithm_is_better_if_posts_and_seeds_show_it():
    (pair,) = pairs_of(PPO + RLOO)
    assert pair.name == "RLOO minus PPO"
    verdict = pair.verdict
    assert verdict is not None
    assert verdict.word is Word.BETTER
    assert verdict.p_value == pytest.approx(0.0131, abs=1e-4)
    assert verdict.interval_is_over == "seeds"
    assert verdict.interval is not None
    assert verdict.interval.low == pytest.approx(0.0252, abs=1e-4)
    assert verdict.interval.high == pytest.approx(0.0748, abs=1e-4)


def test_seeds_that_disagree_are_inconclusive():
    words = verdict_words(PPO + lines("rloo", 0.76, 0.85, 0.86))
    assert words == {"RLOO minus PPO": Word.INCONCLUSIVE}


def test_p_values_are_corrected_for_all_pairs():
    """Of three pairs 0.0131 becomes 0.039, which is below 0.05, and of six 0.079."""
    three_algorithms = PPO + lines("grpo", 0.8, 0.8, 0.8) + RLOO
    four_algorithms = three_algorithms + lines(BEST_OF_N, 0.8, 0.8, 0.8)

    words_of_three_pairs = list(verdict_words(three_algorithms).values())
    words_of_six_pairs = list(verdict_words(four_algorithms).values())

    assert words_of_three_pairs.count(Word.BETTER) == 2
    assert Word.BETTER not in words_of_six_pairs


def test_one_seed_gives_no_verdict():
    (pair,) = pairs_of(line("ppo", 0.8, 0.8) + line("rloo", 0.9, 0.9))
    assert pair.mean == pytest.approx(0.1)
    assert pair.verdict is None


def test_pairs_with_fewer_seeds_do_not_lead():
    """Best-of-n reaches the others' KL in one seed, and Dr.GRPO in none."""
    best_of_n = line(BEST_OF_N, 0.5, 0.5, seed=0)
    best_of_n += line(BEST_OF_N, 0.5, 0.5, seed=1, kls=(21, 24))
    best_of_n += line(BEST_OF_N, 0.5, 0.5, seed=2, kls=(21, 24))
    grpo = lines("grpo", 0.1, 0.1, 0.1, kls=(30, 31))

    pairs = pairs_of(PPO + RLOO + best_of_n + grpo)

    assert [(pair.name, pair.compared_seeds) for pair in pairs[:3]] == [
        ("RLOO minus PPO", 3),
        ("best-of-n minus PPO", 1),
        ("RLOO minus best-of-n", 1),
    ]
    assert {pair.compared_seeds for pair in pairs[3:]} == {0}


def test_the_gold_score_is_compared_at_equal_kl_too():
    points = []
    for seed, gold in enumerate((1.4, 1.5, 1.6)):
        points += line("ppo", 0.8, 0.8, seed=seed, golds=(1.0, 1.0))
        points += line("rloo", 0.8, 0.8, seed=seed, golds=(gold, gold))
    (pair,) = pairs_of(points)
    assert pair.name == "RLOO minus PPO"
    assert isinstance(pair.gold, Interval)
    assert pair.gold.estimate == pytest.approx(0.5)


def test_every_difference_is_the_first_algorithm_minus_the_second():
    """RLOO wins 5 points less often than PPO, and 10 points less often than GRPO."""
    rloo = lines("rloo", 0.74, 0.75, 0.76)
    grpo = lines("grpo", 0.84, 0.85, 0.86)

    pairs = pairs_of(PPO + rloo + grpo)

    assert [pair.name for pair in pairs] == [
        "Dr.GRPO minus PPO",
        "RLOO minus PPO",
        "Dr.GRPO minus RLOO",
    ]
    assert [pair.mean for pair in pairs] == pytest.approx([0.05, -0.05, 0.10])


def test_an_algorithm_that_wins_less_often_than_ppo_is_worse():
    words = verdict_words(PPO + lines("rloo", 0.74, 0.75, 0.76))
    assert words == {"RLOO minus PPO": Word.WORSE}
