"""What a later stage would refuse is told as soon as it is known, not hours later."""

import pytest

from stages import base
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.pipeline.plan import check_rows
from tests.lib.pipeline import RESULTS, TINY, Recorder, make, named, planned

SMALL = """base.hidden_size=32 base.num_layers=1 world.train_posts=32 world.validation_posts=4
    world.train_comparisons=16 world.validation_comparisons=4 sft.batch_size=4 rm.batch_size=16
    dpo.batch_size=4""".split()


def config_with(*overrides):
    return make_config("tiny", name="small", overrides=(*SMALL, *overrides))


def test_what_base_shows_of_rows_is_told_right_after_it(runs):
    base.make_base(config_with())
    check_rows(config_with("rm.batch_size=17"), ["sft", "dpo"])
    with pytest.raises(UserError, match=r"rm\.batch_size is 17 but there are only 16 rows"):
        check_rows(config_with("rm.batch_size=17"), ["sft", "rm", "dpo"])


@pytest.mark.parametrize(
    ("split", "line"),
    [
        ("comparisons_train", r"rm\.batch_size .* 3 rows"),
        ("sft_validation", r"eval\.posts is \d+ but the validation split has 3 posts"),
    ],
)
def test_too_few_rows_are_told_before_sft_learns(runs, monkeypatch, split, line):
    monkeypatch.setitem(RESULTS, "base", {"rows": {split: {"rows": 3}}})
    runner = Recorder()
    with pytest.raises(UserError, match=line):
        runner.run(planned(named("eval.posts=4")))
    assert runner.stages == ["base"]


def test_a_gold_reward_model_that_is_the_runs_own_is_refused_before_ppo_learns(runs):
    assert make(TINY, "rm") == ["base", "sft", "rm", "normalize"]
    own = make_config("tiny", overrides=("judge.kind=reward_model", "judge.model=tiny"))
    with pytest.raises(UserError, match=r"judge\.model=tiny is this run's own reward model"):
        make(own)
    with pytest.raises(UserError, match=r"judge\.model=tiny is this run's own reward model"):
        Recorder().plan(planned(own))  # what would be refused is not said to run
    assert not (runs / "tiny/seed44413/ppo").exists()
