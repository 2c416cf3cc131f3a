"""Rivals of PPO at equal KL: what is made, what is compared, and what the page says."""

from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from reports import rivals_page
from reports.parts.collect import find_runs
from reports.rivals_page import Point, answer, matched, points_of
from stages.driving.grid import KL_COEFS, RIVALS, make_rivals, rival_cells
from stages.driving.maker import Execution
from stages.pipeline import main
from stages.settings.command_line import Request
from stages.settings.config import UserError
from tests.test_pipeline import Recorder

SMALL = """
    base.hidden_size=32 base.num_layers=2 world.train_posts=96 world.validation_posts=30
    world.train_comparisons=64 world.validation_comparisons=20 ppo.critic_updates=1
    memory.cpu_threads=1
""".split()
SMALL += [f"{rival}.{key}" for rival in RIVALS for key in ("total_episodes=64", "batch_size=16")]


def point(rival, kl, gold, seed=1, win_rate=0.5):
    return Point(
        seed=seed,
        rival=rival,
        setting=str(kl),
        kl=kl,
        win_rate=win_rate,
        gold=gold,
        proxy=0.0,
        tokens=16.0,
    )


def test_two_lines_are_compared_where_both_are_over_the_root_of_kl():
    """By hand: over roots 1.5 to 2 the first rises from 1.5 to 2 and the other stays at 1."""
    points = [point("ppo", 1, 1.0), point("ppo", 4, 2.0)]
    points += [point("rloo", 2.25, 1.0), point("rloo", 9, 1.0)]
    pair = matched(points, "ppo", "rloo", "gold")
    assert pair.each == [pytest.approx(0.75)]
    assert [pair.low, pair.high] == pytest.approx([2.25, 4.0])
    assert matched(points, "rloo", "ppo", "gold").each == [pytest.approx(-0.75)]
    assert not pair.is_clear  # one seed says nothing about seeds


def test_lines_without_a_kl_in_common_are_not_compared():
    points = [point("ppo", 1, 1.0), point("ppo", 2, 2.0)]
    points += [point("rloo", 3, 1.0), point("rloo", 9, 1.0)]
    pair = matched(points, "ppo", "rloo", "gold")
    assert (pair.each, pair.apart) == ([], [1])
    assert "needs several seeds, and this is one" in answer(points)
    both = [*points, *(replace(x, seed=2) for x in points)]
    assert "no rival is shown to be over another in gold score, over 2 seeds" in answer(both)


@pytest.mark.parametrize(("gains", "said"), [((0.4, 0.5, 0.6), True), ((-0.4, 0.5, 0.6), False)])
def test_one_is_over_another_only_where_the_interval_over_seeds_leaves_out_0(gains, said):
    points = []
    for seed, gain in enumerate(gains):
        points += [point("ppo", kl, 1.0, seed) for kl in (1, 4)]
        points += [point("rloo", kl, 1.0 + gain, seed) for kl in (1, 4)]
    text = answer(points)
    # By hand: mean 0.5, deviation 0.1, t(0.975, 2) = 4.303: 0.5 -+ 4.303 * 0.1 / sqrt(3).
    assert ("RLOO over PPO (+0.50 [+0.25, +0.75], 3 seeds)" in text) == said
    assert ("no rival is shown" in text) != said


def test_who_stands_out_by_himself_is_counted_again_among_all_pairs():
    """By hand: t = 0.5 / (0.1 / sqrt(3)) = 8.66, p = 0.013; three times that is below 0.05, six
    times it is not.
    """
    points = []
    for seed, gain in enumerate((0.4, 0.5, 0.6)):
        for kl in (1, 4):
            points += [point(rival, kl, 1.0, seed) for rival in ("ppo", "grpo")]
            points.append(point("rloo", kl, 1.0 + gain, seed))
    assert answer(points).endswith(" After Holm's correction for all 3 pairs, 2 of 2 remain.")
    points += [replace(x, rival="best-of-n") for x in points if x.rival == "ppo"]
    assert answer(points).endswith(" After Holm's correction for all 6 pairs, 0 of 3 remain.")


def test_a_pair_without_a_kl_in_common_is_not_called_inconclusive():
    points = []
    for seed, gain in enumerate((0.4, 0.5, 0.6)):
        for kl in (1, 4):
            points += [point("ppo", kl, 1.0, seed), point("rloo", kl, 1.0 + gain, seed)]
            points.append(point("grpo", kl + 20, 1.0, seed))
    assert "], 3 seeds); pairs without a KL in common: 2. After" in answer(points)
    beside = [replace(x, kl=x.kl - 20) if x.rival == "grpo" else x for x in points]
    beside = [replace(x, gold=1.0 + x.seed) if x.rival == "grpo" else x for x in beside]
    assert "; the other 2 pairs are inconclusive." in answer(beside)
    two = [x for x in beside if x.rival != "ppo"]
    two += [replace(x, rival="ppo") for x in two if x.rival == "grpo"]
    assert " in gold score, over 3 seeds" in answer(two)


def test_a_page_of_seeds_that_a_pair_lacks_counts_those_that_it_has():
    points = [
        point(rival, kl, 1.0, seed) for rival in ("ppo", "rloo") for kl in (1, 4) for seed in (1, 2)
    ]
    points += [point("ppo", kl, 1.0, 3) for kl in (1, 4)]
    assert answer(points).endswith(" in gold score, over 2 seeds.")
    rates = [replace(x, gold=None) for x in points]
    assert answer(rates).endswith(" over another in win rate, over 2 seeds.")


def test_a_clear_pair_says_on_how_many_seeds_it_rests():
    """Of four seeds, one lacks RLOO."""
    points = [point("ppo", kl, 1.0, seed) for kl in (1, 4) for seed in range(4)]
    for seed, gain in enumerate((0.4, 0.5, 0.6)):
        points += [point("rloo", kl, 1.0 + gain, seed) for kl in (1, 4)]
    points += [replace(x, rival="grpo", gold=1.0 + x.seed) for x in points if x.rival == "ppo"]
    assert "At equal KL, in gold score: RLOO over PPO (" in answer(points)
    assert "], 3 seeds); the other 2 pairs are inconclusive." in answer(points)


def test_a_clear_pair_with_best_of_n_says_that_its_kl_is_a_bound():
    points = []
    for seed, gain in enumerate((0.4, 0.5, 0.6)):
        for kl in (1, 4):
            points += [point("ppo", kl, 1.0 + gain, seed), point("best-of-n", kl, 1.0, seed)]
    (note,) = rivals_page.bound_notes(points)
    assert note.startswith("PPO - best-of-n: of best-of-n's KL an upper bound is known.")
    unclear = [replace(x, gold=-x.gold) if x.seed == 0 else x for x in points]
    assert rivals_page.bound_notes(unclear) == []


def test_runs_without_any_win_rate_have_no_page(monkeypatch):
    monkeypatch.setattr(rivals_page, "find_runs", lambda *_: ([], []))
    with pytest.raises(UserError, match=r"no policy of tiny-kl0\.1 has a win rate"):
        rivals_page.write_page("tiny", ["0.1"])


def test_the_curve_of_a_win_rate_is_in_percent_and_its_differences_in_points():
    both = [point(rival, kl, None) for rival in ("ppo", "rloo") for kl in (1, 4)]
    assert rivals_page._panel(both, "win_rate").title == "Win rate, %"
    assert "win rate, points" in rivals_page.pairs_table(both).header


def test_each_coefficient_is_a_run_with_all_rivals_and_the_first_has_best_of_n_too(runs):
    start, rivals = rival_cells(Request(preset="tiny", seed=1), [1, 2], KL_COEFS)
    assert [cell.goals for cell in start] == [("rm",)] * 2
    assert [cell.config.name for cell in rivals[:4]] == [f"tiny-kl{coef}" for coef in KL_COEFS]
    for place, cell in enumerate(rivals[:4]):
        config = cell.config
        assert config.upstream == "tiny"
        coefs = {getattr(config, rival).kl_coef for rival in RIVALS}
        assert coefs == {float(KL_COEFS[place])}
        assert config.eval.temperature == config.ppo.temperature
        assert bool(config.eval.numbers) == ("dpo" in cell.goals) == (place == 0)
    with pytest.raises(UserError, match="rivals trains, and"):
        rival_cells(Request(preset="outputs", overrides=("outputs.file=x",)), [1], KL_COEFS)


def test_a_seed_without_a_reward_model_has_no_rivals(runs, capsys):
    maker = Recorder(Execution(), fails="rm")
    assert make_rivals(maker, Request(preset="tiny", seed=1), [1], ("0.05",))
    assert not any(name == "tiny-kl0.05" for name, _ in maker.made)


@pytest.mark.walk
def test_rivals_are_made_and_put_beside_each_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    request = ["rivals", "--preset", "tiny", "--name", "mini", "--seeds", "1"]
    with pytest.raises(SystemExit) as ended:
        main([*request, "--kl-coefs", "0.05", "0.2", "--set", *SMALL])
    assert ended.value.code == 0
    made = (tmp_path / "runs/reports/rivals-mini.md").read_text()
    for word in ("PPO", "RLOO", "GRPO", "best-of-n", "DPO", "gold score", "win rate, points"):
        assert word in made
    records = [*find_runs("mini-kl0.05")[0], *find_runs("mini-kl0.2")[0]]
    points = points_of(records)
    assert sum(x.rival == "sft" for x in points) == 1  # though it is in every run
    four = [x for x in points if (x.rival, x.setting) == ("best-of-n", "4")]
    assert [x.kl for x in four] == [pytest.approx(log(4) - 3 / 4)]
    assert all(x.gold is not None for x in points)
    scores = {x.setting: x.proxy for x in points if x.rival == "best-of-n" and x.seed == 1}
    assert sorted(scores, key=lambda n: scores[n]) == sorted(scores, key=int)
