"""The page of `make algorithms`: its points, its title and its summary on the terminal."""

from math import log
from pathlib import Path

import pytest

from reports import algorithms as algorithms_page
from reports.about_runs import folder
from reports.algorithm_points import BEST_OF_N, points_of
from reports.results import find_all
from stages.__main__ import main
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.rl.algorithms import ALGORITHMS
from tests.lib.algorithm_points import PPO, RLOO, line, lines
from tests.lib.fabricated_runs import fabricate


def fabricate_penalties():
    """Fabricate two runs with different penalties."""
    for coefficient, kl in (("0.05", 8.0), ("0.2", 4.0)):
        config = make_config(
            "tiny",
            name=f"tiny-kl{coefficient}",
            seed=1,
            overrides=(f"ppo.kl_coef={coefficient}",),
        )
        fabricate(config, found={"objective/kl": kl})


def test_points_have_the_penalty_and_the_kl_of_their_run(runs):
    fabricate_penalties()
    results, _ = find_all(["tiny-kl0.05", "tiny-kl0.2"])

    sft, larger_kl, smaller_kl = points_of(results)  # SFT is in both runs, and is one point

    assert sft.algorithm == "sft"
    assert sft.setting == ""
    assert sft.kl == 0.0
    assert sft.win_rate == 0.412

    assert larger_kl.algorithm == smaller_kl.algorithm == "ppo"
    assert larger_kl.setting == "0.05"
    assert smaller_kl.setting == "0.2"
    assert larger_kl.kl == 8.0
    assert smaller_kl.kl == 4.0
    assert larger_kl.win_rate == smaller_kl.win_rate == 0.63


@pytest.mark.parametrize(
    ("points", "title"),
    [
        (PPO + RLOO, "at equal KL (1.0 to 4.0 nats) RLOO is better than PPO"),
        (
            PPO + lines("rloo", 0.74, 0.75, 0.76),
            "at equal KL (1.0 to 4.0 nats) RLOO is worse than PPO",
        ),
        (PPO + lines("rloo", 0.7, 0.8, 0.9), "at equal KL no algorithm is shown to be better"),
        (PPO + lines("rloo", 0.8, 0.8, 0.8), "at equal KL no algorithm is 3 points better"),
        (
            line("ppo", 0.8, 0.8) + line("rloo", 0.9, 0.9),
            "no verdict at equal KL, which takes several seeds; this is one",
        ),
        (line("ppo", 0.8, kls=(1,)), "nothing was compared at equal KL"),
    ],
    ids=["better", "worse", "seeds disagree", "equal", "one seed", "one point"],
)
def test_the_title_says_who_is_better(runs, no_drawing, monkeypatch, points, title):
    fabricate_penalties()
    monkeypatch.setattr(algorithms_page, "points_of", lambda _: points)
    algorithms_page.write_page("tiny", ["0.05", "0.2"])
    assert title in (folder() / "algorithms-tiny.md").read_text().splitlines()[0]


def test_the_terminal_shows_verdicts_and_the_path(runs, no_drawing, monkeypatch, capsys):
    fabricate_penalties()
    monkeypatch.setattr(algorithms_page, "points_of", lambda _: PPO + RLOO)

    algorithms_page.main(["--name", "tiny", "--kl-coefs", "0.05", "0.2"])

    first, *rows, path = capsys.readouterr().out.splitlines()
    assert first == "tiny: at equal KL (1.0 to 4.0 nats) RLOO is better than PPO."
    (verdict,) = [row for row in rows if row.startswith("RLOO minus PPO")]
    assert "p = 0.013" in verdict
    assert path == str(folder() / "algorithms-tiny.html")


def test_runs_without_any_win_rate_have_no_page(monkeypatch):
    monkeypatch.setattr(algorithms_page, "find_all", lambda *_: ([], []))
    with pytest.raises(UserError, match=r"no policy of tiny-kl0\.1 has a win rate"):
        algorithms_page.write_page("tiny", ["0.1"])


def small_settings() -> str:
    """SET for algorithms that are trained in a few updates."""
    settings = [
        "base.hidden_size=32",
        "base.num_layers=2",
        "world.train_posts=96",
        "world.validation_posts=30",
        "world.train_comparisons=64",
        "world.validation_comparisons=20",
        "ppo.critic_updates=1",
        "memory.cpu_threads=1",
    ]
    for algorithm in ALGORITHMS:
        settings += [f"{algorithm}.total_episodes=64", f"{algorithm}.batch_size=16"]
    return " ".join(settings)


@pytest.mark.walk
def test_all_algorithms_are_trained_and_compared_on_a_page(place, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    words = ["algorithms", "PRESET=tiny", "NAME=mini", "SEEDS=1", "PENALTIES=0.05 0.2"]

    main([*words, f"SET={small_settings()}"])

    page = (place / "runs/reports/algorithms-mini.md").read_text()
    for text in ("PPO", "RLOO", "GRPO", "best-of-n", "DPO", "gold score", "win rate"):
        assert text in page
    results, _ = find_all(["mini-kl0.05", "mini-kl0.2"])
    points = points_of(results)
    assert len([point for point in points if point.algorithm == "sft"]) == 1
    for point in points:
        assert point.gold is not None

    # Best of n: the KL is known, and the proxy score rises with n.
    best_of_n = [point for point in points if point.algorithm == BEST_OF_N]
    (best_of_4,) = [point for point in best_of_n if point.setting == "4"]
    assert best_of_4.kl == pytest.approx(log(4) - 3 / 4)
    best_of_n.sort(key=lambda point: int(point.setting))
    proxies = []
    for point in best_of_n:
        assert point.proxy is not None
        proxies.append(point.proxy)
    assert proxies == sorted(proxies)
