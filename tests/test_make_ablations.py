"""What `make ablations` turns and makes: valid switches, every seed, nothing misspelled."""

import pytest

from reports.parts import ablated
from reports.sharing.status import status
from stages.config import config as settings
from stages.config.command_line import Request, make_config
from stages.config.config import UserError, override_of
from stages.config.presets import ABLATIONS, PRESETS
from stages.pipeline.grid import ablations, make_grid
from stages.runs.manifest import stage_folder, why_not
from tests.test_pipeline import EVALUATED, Recorder, finish, make

# These turn the paper's way back on where a preset starts PPO otherwise.
AS_IN_TINY = ("critic-reward-model", "critic-paper", "critic-updates", "lambda-0.95")
NOT_WHOLE = (*AS_IN_TINY, "gated", "mean")


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
            for section in settings.SECTIONS
            for key, value in vars(getattr(one, section)).items()
        }
        for one in (plain, made)
    )
    differing = {key: value for key, value in after.items() if value != before[key]}
    named_keys = {f"{section}.{key}" for section, key, _ in map(override_of, changes)}
    assert named_keys <= set(differing)
    assert differing == ablated.switched(name)
    assert len(differing) == len(named_keys) or name == "compat-paper"


def test_the_papers_ablations_are_on_the_list():
    """Reading before EOS, EOS trick off, critic from SFT, no normalization, and the others."""
    found = {" ".join(one.settings) for one in ABLATIONS.values()}
    of_paper = "eos_trick=off critic_init=sft reward_normalization=false whiten_rewards=true"
    of_paper += " dropout=0.1 score_at=eos"
    settings_named = {f"ppo.{setting}" for setting in of_paper.split()}
    assert settings_named | {"rm.read_at=before_eos"} <= found
    assert not {f"tiny-{name}" for name in ABLATIONS} & set(PRESETS)


def test_a_switch_that_changes_nothing_or_what_another_does_is_left_out(runs, capsys):
    names = ["critic-zero", "no-critic-updates", "critic-zero-alone", "dropout"]
    together = Request(name="together", overrides=("ppo.critic_updates=0",))
    assert ablations(together, [1], names).page[4:] == ["critic-zero", "dropout"]
    left_out = "ablation {} is left out: with these settings it is {}"
    assert capsys.readouterr().out.splitlines() == [
        left_out.format("no-critic-updates", "the run itself"),
        left_out.format("critic-zero-alone", "critic-zero"),
    ]
    # Where the critic learns first, all but the paper's own are runs of their own.
    own = ablations(Request(), [1], list(ABLATIONS)).page[4:]
    assert own == [name for name in ABLATIONS if name not in AS_IN_TINY]
    assert left_out.format("critic-paper", "no-critic-updates") in capsys.readouterr().out
    with pytest.raises(UserError, match="unknown ablation 'dropuot': did you mean dropout"):
        ablations(Request(), [1], ["dropuot"])
    with pytest.raises(UserError, match="no ablation is left"):
        ablations(together, [1], ["no-critic-updates"])
    maker = Recorder()
    assert make_grid(maker, ablations(together, [1], names)) == 0
    assert {name for name, _ in maker.made} >= {"together-critic-zero", "together-dropout"}
    assert not (runs / "together-critic-zero-alone").exists()


def test_a_run_from_another_ones_sft_keeps_its_own_reward_model_in_its_ablations(runs):
    make()
    request = Request(name="hot", upstream="tiny", overrides=("rm.epochs=3", "sft.epochs=2"))
    names = ["read-before-eos", "dropout"]
    maker = Recorder()
    assert make_grid(maker, ablations(request, [44413], names)) == 0
    for name in ("hot", "hot-read-before-eos", "hot-dropout"):
        made = [stage for whose, stage in maker.made if whose == name]
        assert made == [stage for stage in EVALUATED if stage not in ("base", "sft")], name
    turned = ablations(request, [44413], names).others
    assert [cell.config.rm.epochs for cell in turned] == [3, 3]
    assert [cell.config.upstream for cell in turned] == ["tiny", "tiny"]


def test_a_switch_of_the_reward_model_shares_what_comes_before_it_and_goes_on(runs, capsys):
    """Of a run with settings of its own; beside a switch of PPO's; after a failure; status."""
    mine = Request(name="mine", overrides=("sft.epochs=3", "rm.epochs=3", "ppo.lam=0.9"))
    names = ["read-before-eos", "dropout"]
    dry = Recorder(dry_run=True)
    assert make_grid(dry, ablations(mine, [1, 2], names)) == 0
    assert not runs.exists()
    planned = capsys.readouterr().out
    assert (
        "mine-read-before-eos seed 1: would follow, with ppo.lam=0.9 rm.read_at=before_eos"
    ) in planned
    assert "mine-dropout seed 1: would follow" in planned

    class Broken(Recorder):
        def call(self, words) -> int:
            fails = words[0] == "mine-read-before-eos" and words[1:3] == ["2", "ppo"]
            return 7 if fails else super().call(words)

    maker = Broken()
    assert make_grid(maker, ablations(mine, [1, 2], names)) == 7
    again = Recorder()
    assert make_grid(again, ablations(mine, [1, 2], names)) == 0
    own = [stage for stage in EVALUATED if stage not in ("base", "sft")]
    made = [stage for name, stage in maker.made if name == "mine-read-before-eos"]
    assert made == [*own, "rm", "normalize"]
    assert again.made[0] == ("mine-read-before-eos", "ppo")
    assert {name for name, _ in again.made[:-1]} == {"mine-read-before-eos"}
    assert again.made[-1][1] == "reports.ablations_page"
    switch = ("ppo.lam=0.9", "rm.read_at=before_eos")
    for seed in (1, 2):
        asked = {"name": "mine-read-before-eos", "seed": seed, "upstream": "mine"}
        one = make_config("tiny", **asked, overrides=switch)
        assert (one.rm.read_at, one.rm.epochs, one.sft.epochs) == ("before_eos", 3, 3)
        assert one.own_from == "rm"
        assert all(why_not(one, stage) is None for stage in EVALUATED)
        assert not stage_folder(one, "rm").samefile(runs / f"mine/seed{seed}/rm")
        assert stage_folder(one, "sft").samefile(runs / f"mine/seed{seed}/sft")
    lines = status("mine-read-before-eos")
    assert lines[:2] == ["mine-read-before-eos, seed 1", "  from upstream         base, sft"]
    # Another SFT of the default's is another one of the ablation's.
    finish(make_config("tiny", name="mine", seed=1, overrides=mine.overrides), "sft", "other")
    third = Recorder()
    assert make_grid(third, ablations(mine, [1], names)) == 0
    assert ("mine-read-before-eos", "rm") in third.made


def test_a_seed_that_fails_has_no_ablations_and_the_others_go_on(runs, capsys):
    class Broken(Recorder):
        def call(self, words, label="") -> int:
            return 7 if words[1:3] == ["2", "sft"] else super().call(words)

    maker = Broken()
    assert make_grid(maker, ablations(Request(), [1, 2, 3], ["dropout"])) == 7
    done = sorted(str(one.relative_to(runs)) for one in runs.glob("tiny-dropout/*/ppo"))
    assert done == ["tiny-dropout/seed1/ppo", "tiny-dropout/seed3/ppo"]
    assert "1 runs failed: tiny seed 2" in capsys.readouterr().err
    assert maker.made[-1][1] == "reports.ablations_page"
