"""What a later stage would refuse is told as soon as it is known, not hours later."""

import re

import pytest

from stages import base
from stages.driving.wanted import check_rows
from stages.finished import read_manifest, stage_folder
from stages.settings.command_line import make_config
from stages.settings.config import UserError
from tests.test_pipeline import RESULTS, TINY, Recorder, make, named

SMALL = """base.hidden_size=32 base.num_layers=1 world.train_posts=32 world.validation_posts=4
    world.train_comparisons=16 world.validation_comparisons=4 sft.batch_size=4 rm.batch_size=16
    dpo.batch_size=4""".split()


def config_with(*overrides):
    return make_config("tiny", name="small", overrides=(*SMALL, *overrides))


def test_what_base_shows_of_rows_and_positions_is_told_right_after_it(runs):
    base.make_base(config_with())
    check_rows(config_with(), ["sft", "rm", "dpo"])
    long = config_with("eval.dpo_summary_tokens=4000")
    with pytest.raises(UserError, match=r"summary_tokens is 4000, after .* 2048 positions"):
        check_rows(long, ["sft", "dpo"])
    check_rows(long, ["sft", "rm", "ppo"])  # without DPO nobody writes so long a summary
    halves = (read_manifest(stage_folder(config_with(), "base")) or {})["results"]["halves"]
    assert halves["even"] + halves["odd"] == 16
    assert min(halves.values()) > 0
    check_rows(config_with("rm.pairs=odd"), ["sft"])
    of_half = f"rm.batch_size is 16 but there are only {halves['odd']} rows of rm.pairs=odd"
    with pytest.raises(UserError, match=re.escape(of_half)):
        check_rows(config_with("rm.pairs=odd"), ["sft", "rm"])


@pytest.mark.parametrize("stage", ["rm", "dpo"])
def test_a_half_without_pairs_is_told_before_sft_learns(runs, monkeypatch, stage):
    counted = {"rows": {"comparisons_train": {"rows": 200}}, "halves": {"even": 200, "odd": 0}}
    monkeypatch.setitem(RESULTS, "base", counted)
    maker = Recorder()
    with pytest.raises(UserError, match=rf"{stage}\.batch_size .* 0 rows of rm\.pairs=odd"):
        make(named("rm.pairs=odd"), stage, maker=maker)
    assert [made for _, made in maker.made] == ["base"]


def test_a_gold_reward_model_that_is_the_runs_own_is_refused_before_ppo_learns(runs):
    assert make(TINY, "rm") == ["base", "sft", "rm", "normalize"]
    own = make_config("tiny", overrides=("judge.kind=reward_model", "judge.model=tiny"))
    with pytest.raises(UserError, match=r"judge\.model=tiny is this run's own reward model"):
        make(own)
    with pytest.raises(UserError, match=r"judge\.model=tiny is this run's own reward model"):
        make(own, dry_run=True)  # what would be refused is not said to be made
    assert not (runs / "tiny/seed44413/ppo").exists()
