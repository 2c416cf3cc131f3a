"""What a later stage would refuse is told as soon as it is known, not hours later."""

import pytest

from stages import base
from stages.driving.beforehand import check_rows
from stages.finished import stage_folder
from stages.posts.bad_rows import in_half
from stages.running.files import read_lines
from stages.settings.command_line import make_config
from stages.settings.config import UserError
from tests.test_pipeline import TINY, make

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
    with pytest.raises(UserError, match=r"rm\.batch_size is 16 but there are only \d rows"):
        check_rows(config_with("rm.pairs=odd"), ["sft", "rm"])
    path = stage_folder(config_with(), "base") / "data/comparisons_train.jsonl"
    even = [row["id"] for row in read_lines(path) if in_half(row["id"], "even")]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if any(f'"{name}"' in line for name in even)))
    for stage in ("rm", "dpo"):
        with pytest.raises(UserError, match=r"rm\.pairs=odd: no training comparison .*: take all"):
            check_rows(config_with("rm.pairs=odd"), ["sft", stage])
    check_rows(config_with("rm.pairs=odd"), ["sft"])


def test_a_gold_reward_model_that_is_the_runs_own_is_refused_before_ppo_learns(runs):
    assert make(TINY, "rm") == ["base", "sft", "rm", "normalize"]
    own = make_config("tiny", overrides=("judge.kind=reward_model", "judge.model=tiny"))
    with pytest.raises(UserError, match=r"judge\.model=tiny is this run's own reward model"):
        make(own)
    assert not (runs / "tiny/seed44413/ppo").exists()
