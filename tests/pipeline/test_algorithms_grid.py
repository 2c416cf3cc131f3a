"""The runs of `make algorithms`: one for each KL coefficient, with all algorithms."""

import pytest

from stages.config.command_line import Request
from stages.config.errors import UserError
from stages.pipeline.grid import GridOptions, algorithms, run_grid
from stages.rl.algorithms import ALGORITHMS
from tests.lib.pipeline import FAILED, Recorder


@pytest.fixture
def grid(runs):
    return algorithms(Request(preset="tiny", seed=1), GridOptions(seeds=[1, 2]))


@pytest.fixture
def variants_of_seed_1(grid):
    """The runs of the first seed, one for each of the four coefficients."""
    return grid.variants[:4]


def test_the_reward_model_of_each_seed_is_trained_once(grid):
    assert [planned.targets for planned in grid.base_runs] == [("rm",), ("rm",)]


def test_each_coefficient_is_a_run_of_all_algorithms(variants_of_seed_1):
    coefficients = GridOptions().kl_coefs
    for planned, coefficient in zip(variants_of_seed_1, coefficients, strict=True):
        config = planned.config
        assert config.name == f"tiny-kl{coefficient}"
        assert config.upstream == "tiny"
        assert config.eval.temperature == config.ppo.temperature
        for algorithm in ALGORITHMS:
            assert getattr(config, algorithm).kl_coef == float(coefficient)


def test_only_the_first_coefficient_has_dpo_and_best_of_n(variants_of_seed_1):
    first, *others = variants_of_seed_1
    assert "dpo" in first.targets
    assert first.config.eval.numbers
    for planned in others:
        assert "dpo" not in planned.targets
        assert not planned.config.eval.numbers


def test_runs_that_train_nothing_are_refused():
    request = Request(preset="outputs", overrides=("outputs.file=x",))
    with pytest.raises(UserError, match="a grid of runs trains, but"):
        algorithms(request, GridOptions())


def test_a_seed_without_a_reward_model_has_no_further_runs(runs, capsys):
    recorder = Recorder(fails="rm")
    grid = algorithms(Request(preset="tiny"), GridOptions(seeds=[1], kl_coefs=["0.05"]))
    pages: list[list[str]] = []

    status = run_grid(recorder, grid, pages.append)

    assert status == FAILED
    assert {name for name, _, _ in recorder.made} == {"tiny"}
    assert pages == []
