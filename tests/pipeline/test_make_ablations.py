"""What `make ablations` turns and makes: valid switches, every seed, nothing misspelled."""

import pytest

from reports.ablation_runs import settings_changed_by
from stages.config.command_line import Request, make_config
from stages.config.config import SECTIONS
from stages.config.errors import UserError
from stages.config.presets import ABLATIONS, PRESETS
from stages.config.values import parse_override
from stages.pipeline.grid import GridOptions, ablations, run_grid, show_grid
from stages.runs.manifest import stage_folder
from stages.runs.staleness import find_problem
from tests.lib.fake_stages import status_lines
from tests.lib.pipeline import EVALUATED, FAILED, Recorder, finish, make

# These turn the paper's way back on where a preset starts PPO otherwise.
AS_IN_TINY = ("critic-reward-model", "critic-paper", "critic-updates", "lambda-0.95")
NOT_WHOLE = (*AS_IN_TINY, "gated", "mean", "critic-decoupled", "critic-bounded")


@pytest.mark.parametrize(
    ("name", "preset"),
    [(name, "smollm2") for name in NOT_WHOLE]
    + [(n, preset) for n in ABLATIONS if n not in NOT_WHOLE for preset in ("tiny", "pythia-1b")],
)
def test_every_ablation_is_valid_and_changes_what_it_names_alone(name, preset):
    there = (
        "ppo.critic_updates=1",
        "rm.center=0.001",
        *(["data.source=.", "base.checkpoint=hub/id"] if preset == "smollm2" else []),
    )  # else taking them away would change nothing
    plain = make_config(preset, name="mine", overrides=there)
    changes = ABLATIONS[name].settings
    keys = {text.split("=")[0] for text in changes}
    turned = (*(text for text in there if text.split("=")[0] not in keys), *changes)
    made = make_config(preset, name="mine", overrides=turned)
    before, after = (
        {
            f"{section}.{key}": value
            for section in SECTIONS
            for key, value in vars(getattr(one, section)).items()
        }
        for one in (plain, made)
    )
    differing = {key: value for key, value in after.items() if value != before[key]}
    named_keys = {f"{section}.{key}" for section, key, _ in map(parse_override, changes)}
    assert named_keys <= set(differing)
    assert differing == settings_changed_by(name)
    assert len(differing) == len(named_keys) or name == "compat-paper"


def test_the_papers_ablations_are_on_the_list():
    """Reading before EOS, EOS trick off, critic from SFT, no normalization, and the others."""
    found = {" ".join(one.settings) for one in ABLATIONS.values()}
    of_paper = "eos_trick=off critic_init=sft reward_normalization=false whiten_rewards=true"
    of_paper += " dropout=0.1 score_at=eos"
    settings_named = {f"ppo.{setting}" for setting in of_paper.split()}
    assert settings_named | {"rm.read_at=before_eos"} <= found
    assert not {f"tiny-{name}" for name in ABLATIONS} & set(PRESETS)


def grid_of(request, names, seeds=(1,)):
    """Return the grid of some ablations."""
    return ablations(request, GridOptions(seeds=seeds, ablations=names))


def names_in(page_options):
    """Return the ablations that a page is written about."""
    return page_options[page_options.index("--ablations") + 1 :]


def no_page(options):
    """Stand for the page, which these runs have no numbers for."""


def test_a_group_stands_for_its_ablations(runs):
    grid = grid_of(Request(), ["baseline", "dropout"])

    # The preset's critic has a warm-up, so each of the three changes something.
    assert names_in(grid.page_options) == ["critic-paper", "gated", "mean", "dropout"]
    names = [planned.request.name for planned in grid.variants]
    assert names == ["tiny-critic-paper", "tiny-gated", "tiny-mean", "tiny-dropout"]


def test_an_ablation_that_changes_nothing_or_what_another_does_is_left_out(runs, capsys):
    names = ["critic-zero", "no-critic-updates", "critic-zero-alone", "dropout"]
    together = Request(name="together", overrides=("ppo.critic_updates=0",))
    grid = grid_of(together, names)
    assert names_in(grid.page_options) == ["critic-zero", "dropout"]
    left_out = "ablation {} is left out: with these settings it equals {}"
    assert capsys.readouterr().out.splitlines() == [
        left_out.format("no-critic-updates", "the run itself"),
        left_out.format("critic-zero-alone", "critic-zero"),
    ]
    recorder = Recorder()
    assert run_grid(recorder, grid, no_page) == 0
    made = {name for name, _, _ in recorder.made}
    assert made == {"together", "together-critic-zero", "together-dropout"}


def test_all_ablations_but_the_papers_own_are_runs_where_the_critic_warms_up(runs):
    grid = grid_of(Request(), list(ABLATIONS))
    assert names_in(grid.page_options) == [name for name in ABLATIONS if name not in AS_IN_TINY]


def test_unknown_ablations_and_none_at_all_are_refused(runs):
    with pytest.raises(UserError, match="unknown ablation 'dropuot': did you mean dropout"):
        grid_of(Request(), ["dropuot"])
    together = Request(name="together", overrides=("ppo.critic_updates=0",))
    with pytest.raises(UserError, match="no ablation is left"):
        grid_of(together, ["no-critic-updates"])


def test_a_run_from_another_ones_sft_keeps_its_own_reward_model_in_its_ablations(runs):
    make()
    request = Request(name="hot", upstream="tiny", overrides=("rm.epochs=3", "sft.epochs=2"))
    grid = grid_of(request, ["read-before-eos", "dropout"], seeds=[44413])
    recorder = Recorder()
    assert run_grid(recorder, grid, no_page) == 0
    own = [stage for stage in EVALUATED if stage not in ("base", "sft")]
    for name in ("hot", "hot-read-before-eos", "hot-dropout"):
        assert [stage for whose, _, stage in recorder.made if whose == name] == own, name
    assert [planned.config.rm.epochs for planned in grid.variants] == [3, 3]
    assert [planned.config.upstream for planned in grid.variants] == ["tiny", "tiny"]


MINE = Request(name="mine", overrides=("sft.epochs=3", "rm.epochs=3", "ppo.lam=0.9"))


def test_looking_says_which_runs_would_follow_and_writes_nothing(runs, capsys):
    show_grid(Recorder(), grid_of(MINE, ["read-before-eos", "dropout"], seeds=[1, 2]))
    assert not runs.exists()
    text = capsys.readouterr().out
    follows = "mine-read-before-eos seed 1: would follow, with ppo.lam=0.9 rm.read_at=before_eos"
    assert follows in text
    assert "mine-dropout seed 2: would follow" in text


def test_an_ablation_of_the_reward_model_shares_the_stages_before_it(runs):
    names = ["read-before-eos", "dropout"]
    recorder = Recorder()
    assert run_grid(recorder, grid_of(MINE, names, seeds=[1, 2]), no_page) == 0
    own = [stage for stage in EVALUATED if stage not in ("base", "sft")]
    for seed in (1, 2):
        made = [stage for *whose, stage in recorder.made if whose == ["mine-read-before-eos", seed]]
        assert made == own
        config = make_config(
            "tiny",
            name="mine-read-before-eos",
            seed=seed,
            upstream="mine",
            overrides=("ppo.lam=0.9", "rm.read_at=before_eos"),
        )
        assert (config.rm.read_at, config.rm.epochs, config.sft.epochs) == ("before_eos", 3, 3)
        assert config.own_from == "rm"
        assert all(find_problem(config, stage) is None for stage in EVALUATED)
        assert stage_folder(config, "sft").samefile(runs / f"mine/seed{seed}/sft")
    lines = status_lines("mine-read-before-eos")
    assert lines[:2] == ["mine-read-before-eos, seed 1", "  from upstream       base, sft"]


def test_another_sft_of_the_default_is_another_one_of_its_ablations(runs):
    names = ["read-before-eos"]
    run_grid(Recorder(), grid_of(MINE, names), no_page)
    finish(make_config("tiny", name="mine", seed=1, overrides=MINE.overrides), "sft", "other")
    again = Recorder()
    assert run_grid(again, grid_of(MINE, names), no_page) == 0
    assert ("mine-read-before-eos", 1, "rm") in again.made


def test_the_same_command_resumes_at_the_stage_that_failed(runs):
    grid = grid_of(MINE, ["read-before-eos", "dropout"], seeds=[1, 2])
    fails = ("mine-read-before-eos", 2, "ppo")
    assert run_grid(Recorder(fails=fails), grid, no_page) == FAILED
    again = Recorder()
    pages: list[list[str]] = []
    assert run_grid(again, grid, pages.append) == 0
    assert again.made[0] == fails
    assert {(name, seed) for name, seed, _ in again.made} == {("mine-read-before-eos", 2)}
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
