"""`make ablations`: which variants of a run it plans, and what it runs for each seed."""

from typing import Any

import pytest

from reports.ablation_runs import settings_changed_by
from stages.config.command_line import Request, make_config
from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.presets import ABLATIONS, PRESETS
from stages.config.values import TYPES, key_of, value_of
from stages.pipeline.grid import GridOptions, ablations, run_grid, show_grid
from stages.runs.manifest import stage_folder
from stages.runs.staleness import find_problem
from tests.lib.fake_stages import status_lines
from tests.lib.pipeline import EVALUATED, FAILED, Recorder, finish, make

# Ablations that restore the paper's choice: the preset `tiny` already has it.
NOT_IN_TINY = ("critic-reward-model", "critic-paper", "critic-updates", "lambda-0.95")
# These change something only in the preset `smollm2`.
ONLY_IN_SMOLLM2 = (*NOT_IN_TINY, "gated", "mean", "critic-decoupled", "critic-bounded")


def presets_with_effect(ablation: str) -> list[str]:
    """Return presets in which an ablation changes something."""
    if ablation in ONLY_IN_SMOLLM2:
        return ["smollm2"]
    return ["tiny", "pythia-1b"]


def values_by_key(config: Config) -> dict[str, Any]:
    """Return all settings of a config: `ppo.lam` -> value."""
    return {key: value_of(config, key) for key in TYPES}


@pytest.mark.parametrize(
    ("name", "preset"),
    [(name, preset) for name in ABLATIONS for preset in presets_with_effect(name)],
)
def test_an_ablation_changes_only_the_settings_that_it_names(name, preset):
    # Without a critic warm-up and centering, the ablations that remove them would change nothing.
    base_overrides = ["ppo.critic_updates=1", "rm.center=0.001"]
    if preset == "smollm2":
        base_overrides += ["data.source=.", "base.checkpoint=hub/id"]
    ablation = ABLATIONS[name].settings
    named_keys = {key_of(override) for override in ablation}
    kept = [override for override in base_overrides if key_of(override) not in named_keys]

    base = make_config(preset, name="mine", overrides=tuple(base_overrides))
    variant = make_config(preset, name="mine", overrides=(*kept, *ablation))

    before = values_by_key(base)
    after = values_by_key(variant)
    changed = {key: value for key, value in after.items() if value != before[key]}
    assert named_keys <= changed.keys()
    assert changed == settings_changed_by(name)
    if name != "compat-paper":  # it stands for several settings
        assert len(changed) == len(named_keys)


def test_the_papers_ablations_are_on_the_list():
    """Reading before EOS, EOS trick off, critic from SFT, no normalization, and the others."""
    settings_of_paper = {
        "rm.read_at=before_eos",
        "ppo.eos_trick=off",
        "ppo.critic_init=sft",
        "ppo.reward_normalization=false",
        "ppo.whiten_rewards=true",
        "ppo.dropout=0.1",
        "ppo.score_at=eos",
    }

    settings = {" ".join(ablation.settings) for ablation in ABLATIONS.values()}

    assert settings_of_paper <= settings


def test_no_ablation_of_tiny_has_the_name_of_a_preset():
    names = {f"tiny-{name}" for name in ABLATIONS}
    assert not names & set(PRESETS)


def grid_of(request, names, seeds=(1,)):
    """Return the grid of some ablations."""
    return ablations(request, GridOptions(seeds=seeds, ablations=names))


def ablations_on_page(page_options):
    """Return the ablations that a page is written about."""
    return page_options[page_options.index("--ablations") + 1 :]


def no_page(options):
    """Write no page, because these runs have no numbers."""


def runs_of(recorder):
    """Return the names of the runs that ran."""
    return {name for name, _, _ in recorder.made}


def stages_of(recorder, name, seed):
    """Return the stages that ran in a seed of a run."""
    stages = []
    for run_name, run_seed, stage in recorder.made:
        if (run_name, run_seed) == (name, seed):
            stages.append(stage)
    return stages


def test_a_group_stands_for_its_ablations(runs):
    grid = grid_of(Request(), ["baseline", "dropout"])

    # The preset's critic has a warm-up, so each of the three changes something.
    assert ablations_on_page(grid.page_options) == ["critic-paper", "gated", "mean", "dropout"]
    names = [planned.request.name for planned in grid.variants]
    assert names == ["tiny-critic-paper", "tiny-gated", "tiny-mean", "tiny-dropout"]


def test_an_ablation_that_changes_nothing_or_what_another_does_is_left_out(runs, capsys):
    names = ["critic-zero", "no-critic-updates", "critic-zero-alone", "dropout"]
    request = Request(name="together", overrides=("ppo.critic_updates=0",))

    grid = grid_of(request, names)

    assert ablations_on_page(grid.page_options) == ["critic-zero", "dropout"]
    left_out = "ablation {} is left out: with these settings it equals {}"
    assert capsys.readouterr().out.splitlines() == [
        left_out.format("no-critic-updates", "the run itself"),
        left_out.format("critic-zero-alone", "critic-zero"),
    ]


def test_an_ablation_that_is_left_out_does_not_run(runs):
    request = Request(name="together", overrides=("ppo.critic_updates=0",))
    grid = grid_of(request, ["critic-zero", "no-critic-updates", "dropout"])
    recorder = Recorder()

    assert run_grid(recorder, grid, no_page) == 0

    assert runs_of(recorder) == {"together", "together-critic-zero", "together-dropout"}


def test_all_ablations_are_variants_of_tiny_except_those_that_it_already_has(runs):
    grid = grid_of(Request(), list(ABLATIONS))

    expected = [name for name in ABLATIONS if name not in NOT_IN_TINY]
    assert ablations_on_page(grid.page_options) == expected


def test_an_unknown_ablation_is_refused(runs):
    with pytest.raises(UserError, match="unknown ablation 'dropuot': did you mean dropout"):
        grid_of(Request(), ["dropuot"])


def test_a_grid_without_any_ablation_is_refused(runs):
    request = Request(name="together", overrides=("ppo.critic_updates=0",))

    with pytest.raises(UserError, match="no ablation is left"):
        grid_of(request, ["no-critic-updates"])


def test_the_variants_of_a_run_with_an_upstream_take_the_same_stages_from_it(runs):
    make()
    request = Request(name="hot", upstream="tiny", overrides=("rm.epochs=3", "sft.epochs=2"))
    grid = grid_of(request, ["read-before-eos", "dropout"], seeds=[44413])
    recorder = Recorder()

    assert run_grid(recorder, grid, no_page) == 0

    own_stages = [stage for stage in EVALUATED if stage not in ("base", "sft")]
    for name in ("hot", "hot-read-before-eos", "hot-dropout"):
        assert stages_of(recorder, name, seed=44413) == own_stages, name
    assert [planned.config.rm.epochs for planned in grid.variants] == [3, 3]
    assert [planned.config.upstream for planned in grid.variants] == ["tiny", "tiny"]


MINE = Request(name="mine", overrides=("sft.epochs=3", "rm.epochs=3", "ppo.lam=0.9"))


def test_showing_a_grid_lists_its_variants_and_writes_nothing(runs, capsys):
    grid = grid_of(MINE, ["read-before-eos", "dropout"], seeds=[1, 2])

    show_grid(Recorder(), grid)

    text = capsys.readouterr().out
    line = "mine-read-before-eos seed 1: would follow, with ppo.lam=0.9 rm.read_at=before_eos"
    assert line in text
    assert "mine-dropout seed 2: would follow" in text
    assert not runs.exists()


def test_an_ablation_of_the_reward_model_shares_the_stages_before_it(runs):
    grid = grid_of(MINE, ["read-before-eos", "dropout"], seeds=[1, 2])
    recorder = Recorder()

    assert run_grid(recorder, grid, no_page) == 0

    own_stages = [stage for stage in EVALUATED if stage not in ("base", "sft")]
    for seed in (1, 2):
        assert stages_of(recorder, "mine-read-before-eos", seed) == own_stages
        config = make_config(
            "tiny",
            name="mine-read-before-eos",
            seed=seed,
            upstream="mine",
            overrides=("ppo.lam=0.9", "rm.read_at=before_eos"),
        )
        assert config.rm.read_at == "before_eos"
        assert config.rm.epochs == 3
        assert config.sft.epochs == 3
        assert config.own_from == "rm"
        assert all(find_problem(config, stage) is None for stage in EVALUATED)
        assert stage_folder(config, "sft").samefile(runs / f"mine/seed{seed}/sft")

    lines = status_lines("mine-read-before-eos")
    assert lines[:2] == ["mine-read-before-eos, seed 1", "  from upstream       base, sft"]


def test_another_sft_model_of_the_base_run_reruns_its_variants(runs):
    grid = grid_of(MINE, ["read-before-eos"])
    run_grid(Recorder(), grid, no_page)
    base_run = make_config("tiny", name="mine", seed=1, overrides=MINE.overrides)
    finish(base_run, "sft", "other")
    recorder = Recorder()

    assert run_grid(recorder, grid, no_page) == 0

    assert "rm" in stages_of(recorder, "mine-read-before-eos", seed=1)


def test_the_same_command_resumes_at_the_stage_that_failed(runs):
    grid = grid_of(MINE, ["read-before-eos", "dropout"], seeds=[1, 2])
    failing_stage = ("mine-read-before-eos", 2, "ppo")
    assert run_grid(Recorder(fails=failing_stage), grid, no_page) == FAILED
    recorder = Recorder()
    pages: list[list[str]] = []

    assert run_grid(recorder, grid, pages.append) == 0

    assert recorder.made[0] == failing_stage
    assert runs_of(recorder) == {"mine-read-before-eos"}
    assert not stages_of(recorder, "mine-read-before-eos", seed=1)
    assert pages[0][:2] == ["--name", "mine"]


def test_a_seed_that_fails_has_no_ablations_and_the_others_continue(runs, capsys):
    recorder = Recorder(fails=("tiny", 2, "sft"))
    pages: list[list[str]] = []
    grid = grid_of(Request(), ["dropout"], seeds=[1, 2, 3])

    assert run_grid(recorder, grid, pages.append) == FAILED

    done = sorted(str(path.relative_to(runs)) for path in runs.glob("tiny-dropout/*/ppo"))
    assert done == ["tiny-dropout/seed1/ppo", "tiny-dropout/seed3/ppo"]
    assert "1 runs failed: tiny seed 2" in capsys.readouterr().err
    assert len(pages) == 1
