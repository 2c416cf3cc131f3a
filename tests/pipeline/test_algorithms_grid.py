"""Which runs `make algorithms` makes."""

import pytest

from stages.config.command_line import Request
from stages.config.errors import UserError
from stages.pipeline.grid import GridOptions, algorithms, run_grid
from stages.rl.algorithms import ALGORITHMS
from tests.lib.pipeline import FAILED, Recorder


def test_each_coefficient_is_a_run_of_all_algorithms_and_the_first_has_best_of_n_too(runs):
    coefs = GridOptions().kl_coefs
    grid = algorithms(Request(preset="tiny", seed=1), GridOptions(seeds=[1, 2]))
    assert [planned.targets for planned in grid.base_runs] == [("rm",)] * 2
    names = [planned.config.name for planned in grid.variants[:4]]
    assert names == [f"tiny-kl{coef}" for coef in coefs]
    for place, planned in enumerate(grid.variants[:4]):
        config = planned.config
        assert config.upstream == "tiny"
        assert {getattr(config, name).kl_coef for name in ALGORITHMS} == {float(coefs[place])}
        assert config.eval.temperature == config.ppo.temperature
        assert bool(config.eval.numbers) == ("dpo" in planned.targets) == (place == 0)


def test_runs_that_train_nothing_are_refused():
    request = Request(preset="outputs", overrides=("outputs.file=x",))
    with pytest.raises(UserError, match="a grid of runs trains, but"):
        algorithms(request, GridOptions())


def test_a_seed_without_a_reward_model_has_no_further_runs(runs, capsys):
    recorder = Recorder(fails="rm")
    options = GridOptions(seeds=[1], kl_coefs=["0.05"])
    pages: list[list[str]] = []
    assert run_grid(recorder, algorithms(Request(preset="tiny"), options), pages.append) == FAILED
    assert {name for name, _, _ in recorder.made} == {"tiny"}
    assert pages == []
