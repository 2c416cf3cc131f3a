"""The page of `make algorithms`: what it is computed from, and what it says."""

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
        (PPO + RLOO, "at equal KL (1.0 to 4.0 nats) RLOO is better than PPO"),
        (
            PPO + lines("rloo", 0.74, 0.75, 0.76),
            "at equal KL (1.0 to 4.0 nats) RLOO is worse than PPO",
        ),
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
    assert printed[0] == "tiny: at equal KL (1.0 to 4.0 nats) RLOO is better than PPO."
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
