"""The page of `make algorithms`: algorithms compared at equal KL, and what the page says."""

from math import log
from pathlib import Path

import pytest

from reports import algorithms as algorithms_page
from reports.about_runs import folder
from reports.algorithms import (
    BEST_OF_N,
    Point,
    bars_against_base,
    difference_over_posts,
    differences_at_equal_penalty,
    outside_the_zoom,
    overlaps_of,
    pairs_of,
    penalty_effects,
    points_of,
    setting_rows,
)
from reports.results import Interval, find_all
from reports.verdicts import Word
from stages.__main__ import main
from stages.config.checks import UserError
from stages.config.command_line import make_config
from stages.rl.algorithms import ALGORITHMS
from tests.lib.fabricated_runs import fabricate

POSTS = 400
SMALL = [
    "base.hidden_size=32",
    "base.num_layers=2",
    "world.train_posts=96",
    "world.validation_posts=30",
    "world.train_comparisons=64",
    "world.validation_comparisons=20",
    "ppo.critic_updates=1",
    "memory.cpu_threads=1",
    *(f"{name}.total_episodes=64" for name in ALGORITHMS),
    *(f"{name}.batch_size=16" for name in ALGORITHMS),
]


def line(algorithm, *rates, kls=(1, 4), seed=1, golds=None, proxies=None):
    """The points of an algorithm in one seed: a win rate at each KL; every post has this score."""
    points = []
    for place, (rate, kl) in enumerate(zip(rates, kls, strict=True)):
        points.append(
            Point(
                seed=seed,
                algorithm=algorithm,
                setting=str(1 / kl) if kl else "",
                kl=kl,
                win_rate=rate,
                gold=golds[place] if golds else None,
                proxy=proxies[place] if proxies else 0.0,
                tokens=16.0,
                seconds={"ppo": 41.2, "rloo": 5.0}.get(algorithm),
                post_scores={f"post{number}": rate for number in range(POSTS)},
                texts={f"post{number}": f"post{number}" for number in range(POSTS)},
            )
        )
    return points


def lines(algorithm, *rates, **others):
    """A line for each seed, with one win rate throughout."""
    points = []
    for seed, rate in enumerate(rates):
        points += line(algorithm, rate, rate, seed=seed, **others)
    return points


PPO = lines("ppo", 0.8, 0.8, 0.8)
# Minus PPO's: 0.05 on average, standard deviation 0.01, t = 0.05 / (0.01 / sqrt(3)) = 8.66 with 2
# degrees of freedom, p = 0.0131, and the interval is 0.05 -+ 4.303 * 0.01 / sqrt(3).
RLOO = lines("rloo", 0.84, 0.85, 0.86)


def names_and_words(points):
    """Each pair with its verdict."""
    return [(pair.name, pair.verdict.word if pair.verdict else None) for pair in pairs_of(points)]


# -- at equal KL -----------------------------------------------------------------------------------


def test_two_lines_are_compared_where_both_are_over_the_root_of_kl():
    """By hand: over roots 1.5 to 2 the first rises from 0.6 to 0.8 and the other stays at 0.4."""
    points = line("ppo", 0.4, 0.8) + line("rloo", 0.4, 0.4, kls=(2.25, 9))
    (overlap,), seeds = overlaps_of(points, "ppo", "rloo")
    assert (overlap.kl_from, overlap.kl_to) == pytest.approx((2.25, 4.0))
    assert overlap.difference(lambda point: point.win_rate) == pytest.approx(0.3)
    assert seeds == 1


def test_lines_without_a_kl_in_common_are_not_compared():
    points = line("ppo", 0.4, 0.8, kls=(1, 2)) + line("rloo", 0.4, 0.4, kls=(3, 9))
    assert overlaps_of(points, "ppo", "rloo") == ([], 1)
    (pair,) = pairs_of(points)
    assert (pair.comparison, pair.verdict) == (None, None)


def test_an_algorithm_with_one_point_has_no_line():
    assert pairs_of(PPO + line("dpo", 0.9, kls=(2,)) + line("sft", 0.5, kls=(0,))) == []


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
    assert pair.verdict is not None
    assert pair.verdict.interval is not None
    assert pair.verdict.word == Word.BETTER
    assert pair.verdict.interval_is_over == "seeds"
    assert pair.verdict.p_value == pytest.approx(0.0131, abs=1e-4)
    interval = pair.verdict.interval
    assert (interval.low, interval.high) == pytest.approx((0.0252, 0.0748), abs=1e-4)


def test_seeds_that_disagree_are_inconclusive():
    assert names_and_words(PPO + lines("rloo", 0.76, 0.85, 0.86)) == [
        ("RLOO minus PPO", Word.INCONCLUSIVE)
    ]


def test_p_values_are_corrected_for_all_pairs():
    """Of three pairs 0.0131 becomes 0.039, which is below 0.05, and of six 0.079."""
    three = PPO + lines("grpo", 0.8, 0.8, 0.8) + RLOO
    words = [word for _, word in names_and_words(three)]
    assert words.count(Word.BETTER) == 2
    six = three + lines(BEST_OF_N, 0.8, 0.8, 0.8)
    assert Word.BETTER not in [word for _, word in names_and_words(six)]


def test_one_seed_gives_no_verdict():
    (pair,) = pairs_of(line("ppo", 0.8, 0.8) + line("rloo", 0.9, 0.9))
    assert pair.mean == pytest.approx(0.1)
    assert pair.verdict is None


def test_pairs_with_fewer_seeds_do_not_lead():
    best = lines(BEST_OF_N, 0.5, 0.5, 0.5, kls=(21, 24))
    best[0:2] = line(BEST_OF_N, 0.5, 0.5, seed=0)
    pairs = pairs_of(PPO + RLOO + best + lines("grpo", 0.1, 0.1, 0.1, kls=(30, 31)))
    assert [(pair.name, pair.compared_seeds) for pair in pairs[:3]] == [
        ("RLOO minus PPO", 3),
        ("RLOO minus best-of-n", 1),
        ("PPO minus best-of-n", 1),
    ]
    assert {pair.compared_seeds for pair in pairs[3:]} == {0}


def test_the_gold_score_is_compared_at_equal_kl_too():
    points = []
    for seed, gold in enumerate((1.4, 1.5, 1.6)):
        points += line("ppo", 0.8, 0.8, seed=seed, golds=(1.0, 1.0))
        points += line("rloo", 0.8, 0.8, seed=seed, golds=(gold, gold))
    (pair,) = pairs_of(points)
    assert isinstance(pair.gold, Interval)
    assert abs(pair.gold.estimate) == pytest.approx(0.5)


# -- tables and plots ------------------------------------------------------------------------------


def test_the_plot_shows_differences_from_ppo_whichever_is_better():
    (pair,) = pairs_of(PPO + lines("rloo", 0.74, 0.75, 0.76))
    assert pair.name == "PPO minus RLOO"
    (bar,) = bars_against_base([pair])
    assert bar.label == "RLOO"
    assert bar.value == pytest.approx(-5.0)
    assert bar.interval == pytest.approx((-7.48, -2.52), abs=0.01)


def test_each_setting_has_a_row_with_means_over_seeds():
    row = setting_rows(PPO + RLOO)[2]
    assert (row.title, row.setting, row.seeds, row.seconds) == ("RLOO", "1.0", 3, 5.0)
    assert isinstance(row.win_rate, Interval)
    assert row.win_rate.estimate == pytest.approx(0.85)
    assert row.gold is None


def test_a_proxy_that_rises_while_the_gold_score_falls_is_over_optimization():
    """From the largest penalty (KL 1) to the smallest (KL 4)."""
    points = []
    for seed, change in enumerate((0.4, 0.5, 0.6)):
        points += line(
            "ppo", 0.8, 0.8, seed=seed, proxies=(1.0, 1.0 + change), golds=(2.0, 2.0 - change)
        )
        points += line(
            "rloo", 0.8, 0.8, seed=seed, proxies=(1.0, 1.0 + change), golds=(2.0, 2.0 + change)
        )
    ppo, rloo = penalty_effects(points)
    assert (ppo.largest, ppo.smallest) == ("1.0", "0.25")
    assert isinstance(ppo.gold, Interval)
    assert ppo.gold.estimate == pytest.approx(-0.5)
    assert ppo.is_over_optimized
    assert not rloo.is_over_optimized


def test_differences_at_equal_penalty_are_paired_by_seed():
    means = differences_at_equal_penalty(PPO + RLOO, "rloo")
    assert list(means) == ["1.0", "0.25"]
    for mean in means.values():
        assert isinstance(mean, Interval)
        assert (mean.estimate, mean.low, mean.high) == pytest.approx((5.0, 2.52, 7.48), abs=0.01)


def test_algorithms_outside_the_zoomed_plot_are_named():
    far = line("dpo", 0.8, kls=(17,)) + line("sft", 0.5, kls=(0,))
    assert outside_the_zoom(PPO + RLOO + far) == ["DPO", "SFT"]


# -- the page --------------------------------------------------------------------------------------


def fabricate_penalties(*seeds):
    """Fabricate runs with two penalties in these seeds."""
    for coef, kl in (("0.05", 8.0), ("0.2", 4.0)):
        for seed in seeds:
            config = make_config(
                "tiny", name=f"tiny-kl{coef}", seed=seed, overrides=(f"ppo.kl_coef={coef}",)
            )
            fabricate(config, found={"objective/kl": kl})


def test_points_have_the_penalty_and_the_kl_of_their_run(runs):
    fabricate_penalties(1)
    found, _ = find_all(["tiny-kl0.05", "tiny-kl0.2"])
    points = [(x.algorithm, x.setting, x.kl, x.win_rate) for x in points_of(found)]
    assert points == [
        ("sft", "", 0.0, 0.412),  # once, though it is in both runs
        ("ppo", "0.05", 8.0, 0.63),
        ("ppo", "0.2", 4.0, 0.63),
    ]


@pytest.mark.parametrize(
    ("points", "title"),
    [
        (PPO + RLOO, "at equal KL RLOO is better than PPO"),
        (PPO + lines("rloo", 0.7, 0.8, 0.9), "at equal KL no algorithm is shown to be better"),
        (PPO + lines("rloo", 0.8, 0.8, 0.8), "at equal KL no algorithm is 3 points better"),
        (line("ppo", 0.8, 0.8) + line("rloo", 0.9, 0.9), "takes several seeds, and this is one"),
        (line("ppo", 0.8, kls=(1,)), "nothing was compared at equal KL"),
    ],
)
def test_the_title_says_who_is_better(runs, no_drawing, monkeypatch, points, title):
    fabricate_penalties(1)
    monkeypatch.setattr(algorithms_page, "points_of", lambda _: points)
    algorithms_page.write_page("tiny", ["0.05", "0.2"])
    assert title in (folder() / "algorithms-tiny.md").read_text().splitlines()[0]


def test_the_terminal_shows_verdicts_and_the_path(runs, no_drawing, monkeypatch, capsys):
    fabricate_penalties(1)
    monkeypatch.setattr(algorithms_page, "points_of", lambda _: PPO + RLOO)
    algorithms_page.main(["--name", "tiny", "--kl-coefs", "0.05", "0.2"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "tiny: at equal KL RLOO is better than PPO."
    assert any(text.startswith("RLOO minus PPO") and "p = 0.013" in text for text in printed)
    assert printed[-1] == str(folder() / "algorithms-tiny.html")


def test_runs_without_any_win_rate_have_no_page(monkeypatch):
    monkeypatch.setattr(algorithms_page, "find_all", lambda *_: ([], []))
    with pytest.raises(UserError, match=r"no policy of tiny-kl0\.1 has a win rate"):
        algorithms_page.write_page("tiny", ["0.1"])


@pytest.mark.walk
def test_all_algorithms_are_trained_and_compared_on_a_page(place, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    request = ["algorithms", "PRESET=tiny", "NAME=mini", "SEEDS=1", "PENALTIES=0.05 0.2"]
    main([*request, f"SET={' '.join(SMALL)}"])
    page = (place / "runs/reports/algorithms-mini.md").read_text()
    for word in ("PPO", "RLOO", "GRPO", "best-of-n", "DPO", "gold score", "win rate"):
        assert word in page
    found, _ = find_all(["mini-kl0.05", "mini-kl0.2"])
    points = points_of(found)
    assert sum(point.algorithm == "sft" for point in points) == 1
    best = {int(x.setting): x for x in points if x.algorithm == BEST_OF_N}
    assert best[4].kl == pytest.approx(log(4) - 3 / 4)
    assert all(point.gold is not None for point in points)
    by_score = sorted(best, key=lambda number: best[number].proxy or 0.0)
    assert by_score == sorted(best)
