"""Algorithms at equal KL: which runs are made, what is compared, and what the page says."""

from math import log
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from reports import algorithms_page
from reports.algorithms_page import answer, matched, pairs_table, policies_frame, title
from reports.parts.cells import MISSING, Number
from reports.parts.collect import find_runs
from stages.__main__ import main
from stages.config.command_line import Request
from stages.config.config import UserError
from stages.pipeline.grid import GridOptions, algorithms, run_grid
from stages.rl.algorithms import ALGORITHMS
from tests.lib.pipeline import FAILED, Recorder

SMALL = """
    base.hidden_size=32 base.num_layers=2 world.train_posts=96 world.validation_posts=30
    world.train_comparisons=64 world.validation_comparisons=20 ppo.critic_updates=1
    memory.cpu_threads=1
""".split()
SMALL += [f"{name}.total_episodes=64" for name in ALGORITHMS]
SMALL += [f"{name}.batch_size=16" for name in ALGORITHMS]


def line(policy, *golds, kls=(1, 4), seed=1):
    """Rows of a policy's points in one seed: a gold score at each KL; None where none scored."""
    return [
        {
            "seed": seed,
            "rival": policy,
            "setting": str(kl),
            "kl": kl,
            "win_rate": 0.5,
            "gold": gold,
            "proxy": 0.0,
            "tokens": 16.0,
            "seconds": {"ppo": 41.2, "rloo": 5.0}.get(policy, np.nan),
        }
        for kl, gold in zip(kls, golds, strict=True)
    ]


def lines(policy, *golds, **changes):
    """A line for each seed, which has one gold score throughout."""
    rows = []
    for seed, gold in enumerate(golds):
        rows += line(policy, gold, gold, seed=seed, **changes)
    return rows


def frame(*lines_of_policies):
    """The frame of these lines."""
    rows = [row for of_policy in lines_of_policies for row in of_policy]
    return pd.DataFrame(rows).astype({"gold": float})


PPO = lines("ppo", 1, 1, 1)
ABOVE = lines("rloo", 1.4, 1.5, 1.6)


def test_two_lines_are_compared_where_both_are_over_the_root_of_kl():
    """By hand: over roots 1.5 to 2 the first rises from 1.5 to 2 and the other stays at 1."""
    both = frame(line("ppo", 1, 2), line("rloo", 1, 1, kls=(2.25, 9)))
    pair = matched(both, "ppo", "rloo", "gold")
    assert pair.each == [pytest.approx(0.75)]
    assert [pair.low, pair.high] == pytest.approx([2.25, 4.0])
    assert matched(both, "rloo", "ppo", "gold").each == [pytest.approx(-0.75)]
    assert not pair.is_clear  # one seed says nothing about seeds


def test_lines_without_a_kl_in_common_are_not_compared():
    both = frame(line("ppo", 1, 2, kls=(1, 2)), line("rloo", 1, 1, kls=(3, 9)))
    pair = matched(both, "ppo", "rloo", "gold")
    assert (pair.each, pair.apart) == ([], 1)
    assert "needs several seeds, and this is one" in title(both)


@pytest.mark.parametrize(("lowest", "is_over"), [(1.4, True), (0.6, False)])
def test_one_is_better_only_where_the_interval_over_seeds_leaves_out_0(lowest, is_over):
    both = frame(PPO, lines("rloo", lowest, 1.5, 1.6))
    # By hand: mean 0.5, deviation 0.1, t(0.975, 2) = 4.303: 0.5 -+ 4.303 * 0.1 / sqrt(3).
    assert (str(pairs_table(both).rows[0][2]) == "+0.50 [+0.25, +0.75]") == is_over
    assert (title(both) == "better at equal KL: RLOO over PPO") == is_over


def test_a_pair_that_stands_out_is_judged_again_among_all_pairs():
    """By hand: t = 0.5 / (0.1 / sqrt(3)) = 8.66, p = 0.013; three times that is below 0.05, six
    times it is not.
    """
    three = [PPO, lines("grpo", 1, 1, 1), ABOVE]
    assert title(frame(*three)) == "better at equal KL: RLOO over PPO, RLOO over Dr.GRPO"
    four = frame(*three, lines("best-of-n", 1, 1, 1))
    assert title(four) == "at equal KL no rival is shown to be better than another"
    assert {row[1] for row in pairs_table(four).rows} == {"inconclusive"}
    assert "correction. Without it these would stand out: RLOO - PPO (+0.50 [" in answer(four)
    assert "Training took PPO 41 s, RLOO 5 s (median of runs" in answer(four)


def test_a_pair_without_a_kl_in_common_is_not_called_inconclusive():
    far = pairs_table(frame(PPO, ABOVE, lines("grpo", 1, 1, 1, kls=(21, 24)))).rows
    apart = ("no KL in common", "–")
    assert [(row[1], str(row[4])) for row in far] == [("better", "1.0 to 4.0"), apart, apart]


def test_seeds_are_counted_that_both_of_a_pair_have():
    lacking = frame(PPO, lines("rloo", 1, 1))
    for measured, measure in ((lacking, "gold score"), (lacking.assign(gold=np.nan), "win rate")):
        assert answer(measured).startswith(f"1 pair compared by {measure} over 2 seeds, ")
    assert pairs_table(frame(PPO, line("ppo", 1, 1, seed=3), ABOVE)).rows[0][5] == "3 of 3"


def test_tables_hold_means_and_differences_as_numbers():
    both = frame(PPO, ABOVE)
    gap = algorithms_page.pairs_table(both).rows[0][2]
    assert isinstance(gap, Number)
    assert (gap.value, gap.low, gap.high) == pytest.approx((0.5, 0.2516, 0.7484), abs=1e-4)
    (ppo, *_) = algorithms_page.rivals_table(both).rows
    assert [x.value for x in ppo if isinstance(x, Number)] == [50, 1, 0, 1, 16, 3]
    assert algorithms_page.rivals_table(both.assign(gold=np.nan)).rows[0][3] == MISSING


def test_runs_without_any_win_rate_have_no_page(monkeypatch):
    monkeypatch.setattr(algorithms_page, "find_all", lambda *_: ([], []))
    with pytest.raises(UserError, match=r"no policy of tiny-kl0\.1 has a win rate"):
        algorithms_page.write_page("tiny", ["0.1"])


def test_each_coefficient_is_a_run_of_all_algorithms_and_the_first_has_best_of_n_too(runs):
    coefs = GridOptions().kl_coefs
    grid = algorithms(Request(preset="tiny", seed=1), GridOptions(seeds=[1, 2]))
    assert [planned.targets for planned in grid.base_runs] == [("rm",)] * 2
    names = [planned.config.name for planned in grid.variants[:4]]
    assert names == [f"tiny-kl{coef}" for coef in coefs]
    for place, cell in enumerate(grid.variants[:4]):
        config = cell.config
        assert config.upstream == "tiny"
        assert {getattr(config, name).kl_coef for name in ALGORITHMS} == {float(coefs[place])}
        assert config.eval.temperature == config.ppo.temperature
        assert bool(config.eval.numbers) == ("dpo" in cell.targets) == (place == 0)
    with pytest.raises(UserError, match="a grid of runs trains, and"):
        algorithms(Request(preset="outputs", overrides=("outputs.file=x",)), GridOptions())


def test_a_seed_without_a_reward_model_has_no_further_runs(runs, capsys):
    recorder = Recorder(fails="rm")
    options = GridOptions(seeds=[1], kl_coefs=["0.05"])
    pages: list[list[str]] = []
    assert run_grid(recorder, algorithms(Request(preset="tiny"), options), pages.append) == FAILED
    assert {name for name, _, _ in recorder.made} == {"tiny"}
    assert pages == []


@pytest.mark.walk
def test_all_algorithms_are_trained_and_compared_on_a_page(place, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    request = ["algorithms", "PRESET=tiny", "NAME=mini", "SEEDS=1", "PENALTIES=0.05 0.2"]
    main([*request, f"SET={' '.join(SMALL)}"])
    made = (place / "runs/reports/rivals-mini.md").read_text()
    for word in ("PPO", "RLOO", "GRPO", "best-of-n", "DPO", "gold score", "win rate"):
        assert word in made
    records = [*find_runs("mini-kl0.05")[0], *find_runs("mini-kl0.2")[0]]
    policies = policies_frame(records)
    assert sum(policies["rival"] == "sft") == 1  # though it is in every run
    best = policies[policies["rival"] == "best-of-n"].set_index("setting")
    assert best["kl"]["4"] == pytest.approx(log(4) - 3 / 4)
    assert policies["gold"].notna().all()
    by_score = best.sort_values("proxy").index.tolist()
    assert by_score == sorted(by_score, key=int)
