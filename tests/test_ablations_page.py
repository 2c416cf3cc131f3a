"""The page of the ablations says what a judge's checks and verdicts allow."""

import pytest

from reports import ablations, page
from stages import config as settings
from stages.presets import make_config
from tests.fabricated_runs import fabricate

NAME = "dropout"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The page of one ablation on two seeds; `changes` go to its second seed."""

    def write(**changes):
        monkeypatch.setattr(settings, "RUNS", tmp_path / "runs")
        monkeypatch.setattr(page, "GENERATED", tmp_path / "generated")
        for seed in (1, 2):
            fabricate(make_config("tiny", seed=seed))
            given = changes if seed == 2 else {}
            fabricate(make_config("tiny", seed=seed, name=f"tiny-{NAME}"), ppo=0.55, **given)
        ablations.main(["--preset", "tiny", "--ablations", NAME])
        return (tmp_path / "generated/ablations-tiny.md").read_text()

    return write


def test_an_ablation_stands_beside_its_preset(written, capsys):
    text = written()
    assert "| dropout | 55.0% [55.0%, 55.0%] |" in text
    assert "dropout: +0.0 points of win rate (seeds: +0.0, +0.0)" in capsys.readouterr().out
    assert "FAILED" not in text


def test_a_judge_that_fails_a_control_is_flagged_here_too(written):
    assert "THE JUDGE FAILED ITS CHECKS: it does not surely prefer" in written(controls_pass=False)


def test_a_seed_with_too_much_unjudged_has_no_rate_and_no_difference(written, capsys):
    text = written(unjudged=0.05)
    assert "| dropout | 55.0% | 7.31" in text  # the other seed's, with no spread of seeds
    assert "tiny-dropout seed 2: PPO: 5.0% of the posts have no verdict" in text
    assert "dropout is not compared on every seed" in text
    assert "(seeds: +0.0); one seed only" in capsys.readouterr().out


def test_without_a_rate_on_any_seed_nothing_is_compared(written, monkeypatch, capsys):
    monkeypatch.setattr(ablations, "has_rate", lambda record: False)
    text = written()
    assert "dropout: not compared, for too many posts have no verdict" in capsys.readouterr().out
    assert "| – | – | – |" in text
