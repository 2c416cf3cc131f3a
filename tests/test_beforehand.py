"""What a later stage would refuse is refused as soon as it is known, not hours later."""

import pytest

from stages import base
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.pipeline.plan import check_rows
from tests.lib.pipeline import RESULTS, TINY, Recorder, make, named, planned

SMALL = [
    "base.hidden_size=32",
    "base.num_layers=1",
    "world.train_posts=32",
    "world.validation_posts=4",
    "world.train_comparisons=16",
    "world.validation_comparisons=4",
    "sft.batch_size=4",
    "rm.batch_size=16",
    "dpo.batch_size=4",
]


def config_with(*overrides):
    return make_config("tiny", name="small", overrides=(*SMALL, *overrides))


def test_a_batch_larger_than_its_data_is_refused_if_its_stage_was_requested(runs):
    base.make_base(config_with())
    too_large = config_with("rm.batch_size=17")
    check_rows(too_large, ["sft", "dpo"])
    with pytest.raises(UserError, match=r"rm\.batch_size is 17 but there are only 16 rows"):
        check_rows(too_large, ["sft", "rm", "dpo"])


@pytest.mark.parametrize(
    ("split", "error"),
    [
        ("comparisons_train", r"rm\.batch_size .* 3 rows"),
        ("sft_validation", r"eval\.posts is \d+ but the validation split has 3 posts"),
    ],
)
def test_too_few_rows_are_refused_before_sft_is_trained(runs, monkeypatch, split, error):
    monkeypatch.setitem(RESULTS, "base", {"rows": {split: {"rows": 3}}})
    runner = Recorder()
    with pytest.raises(UserError, match=error):
        runner.run(planned(named("eval.posts=4")))
    assert runner.stages == ["base"]


OWN_REWARD_MODEL = r"judge\.model=tiny is this run's own reward model"


@pytest.fixture
def judged_by_itself(runs):
    """A run whose reward model has been trained and is to be the gold judge as well."""
    assert make(TINY, "rm") == ["base", "sft", "rm", "normalize"]
    return make_config("tiny", overrides=("judge.kind=reward_model", "judge.model=tiny"))


def test_a_gold_reward_model_that_is_the_runs_own_is_refused_before_ppo_is_trained(
    runs, judged_by_itself
):
    with pytest.raises(UserError, match=OWN_REWARD_MODEL):
        make(judged_by_itself)
    assert not (runs / "tiny/seed44413/ppo").exists()


def test_a_plan_does_not_list_what_would_be_refused(judged_by_itself):
    with pytest.raises(UserError, match=OWN_REWARD_MODEL):
        Recorder().plan(planned(judged_by_itself))
