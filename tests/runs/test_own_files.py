"""The user's files: a change makes stale what was read from them, and nothing else does."""

import os
from pathlib import Path

import pytest

from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.sections import HUB
from stages.pipeline.plan import make_plan
from stages.runs import files
from stages.runs.files import read_json, write_json
from stages.runs.inputs import user_inputs
from stages.runs.manifest import read_manifest, stage_folder
from stages.runs.run import open_stage
from stages.runs.staleness import find_problem
from tests.lib.fake_stages import interrupt, run_stages
from tests.lib.rows import write_folder


@pytest.fixture
def folders(runs, place):
    """A working directory with folders of posts, of a model and of a tokenizer."""
    write_folder(place / "data")
    for name in ("model", "tokenizer", "reward"):
        (place / name).mkdir()
        (place / name / "config.json").write_text("{}")
        (place / name / "model.safetensors").write_text(name)
    return place


def finished(config, stage="base"):
    """A stage that has finished with these settings."""
    stage_folder(config, stage).parent.mkdir(parents=True, exist_ok=True)
    with open_stage(config, stage) as run:
        (run.partial / "out.txt").write_text("made")
        run.finish({})
    assert find_problem(config, stage) is None


def own_config(*overrides, **more):
    return make_config("tiny", name="mine", overrides=overrides, **more)


MODEL = ("base.checkpoint=model", "base.tokenizer=")
POLICY = ("released.policy=model", "released.reward_model=reward")


@pytest.mark.parametrize(
    ("overrides", "stage", "changed", "setting"),
    [
        (MODEL, "base", "model/model.safetensors", "base.checkpoint"),
        (MODEL, "base", "model/config.json", "base.checkpoint"),
        (["base.tokenizer=tokenizer"], "base", "tokenizer/config.json", "base.tokenizer"),
        (POLICY, "base", "model/model.safetensors", "base.checkpoint"),
        (POLICY, "released", "reward/model.safetensors", "released.reward_model"),
        (POLICY[1:], "rm", "reward/model.safetensors", "released.reward_model"),
        (
            [f"data.source={HUB}", "data.sft_dataset=data", "data.comparisons_dataset=data:x"],
            "base",
            "data/sft_train.jsonl",
            "data.sft_dataset",
        ),
        (
            [f"data.source={HUB}", "data.sft_dataset=a/b", "data.comparisons_dataset=data:x"],
            "calibration",
            "data/sft_train.jsonl",
            "data.comparisons_dataset",
        ),
    ],
)
def test_a_folder_that_a_setting_names_counts_by_what_it_holds(
    folders, overrides, stage, changed, setting
):
    config = own_config(*overrides)
    finished(config, stage)
    (folders / changed).write_text("other")
    assert str(find_problem(config, stage)) == f"ran with another version of {setting}"


def test_files_that_no_stage_loads_from_a_folder_count_for_nothing(folders):
    config = own_config("base.checkpoint=model", "base.tokenizer=tokenizer")
    finished(config)
    (folders / "model/README.md").write_text("a card that somebody edits")
    (folders / "model/checkpoint-9").mkdir()
    (folders / "model/checkpoint-9/model.safetensors").write_text("of a trainer")
    (folders / "tokenizer/model.safetensors").write_text("weights of a tokenizer's model")
    assert find_problem(config, "base") is None


def test_the_words_random_train_and_toy_name_no_folder(folders):
    for word in ("random", "train", "toy"):
        (folders / word).mkdir()
    assert user_inputs(own_config(), "base") == {}


def test_other_tables_in_the_folder_of_posts_are_not_read_and_make_nothing_stale(folders):
    config = own_config(data="data")
    only_read = user_inputs(config, "base")
    finished(config)
    (folders / "data/notes.jsonl").write_text("{}\n")
    assert user_inputs(config, "base") == only_read
    assert find_problem(config, "base") is None
    (folders / "data/sft_train.jsonl").write_text("{}\n")
    assert str(find_problem(config, "base")) == "ran with other data"


def test_two_files_of_one_split_are_refused(folders):
    (folders / "data/sft_train.JSON").write_text("[]")
    with pytest.raises(UserError, match=r"data: sft_train\.JSON and sft_train\.jsonl are both"):
        user_inputs(own_config(data="data"), "base")


def test_a_folder_may_be_written_in_several_ways(folders):
    finished(own_config(data="data", tokenizer="tokenizer"))
    for data in ("data/", "./data", str(folders / "data"), "tokenizer/../data"):
        config = own_config(data=data, tokenizer=str(folders / "tokenizer/"))
        assert find_problem(config, "base") is None, data
    write_folder(folders / "toy")
    other = own_config(data=str(folders / "toy"), tokenizer="tokenizer")
    assert "data.source: ran with data, now" in str(find_problem(other, "base"))
    finished(make_config("tiny", name="built-in", overrides=("base.vocab_size=600",)))
    own = make_config(
        "tiny", name="built-in", data=str(folders / "toy"), overrides=("base.vocab_size=600",)
    )
    assert "data.source: ran with toy" in str(find_problem(own, "base"))


def test_a_run_from_an_upstream_may_write_its_folder_differently(folders):
    finished(own_config(data="data"))
    more = {"name": "from", "upstream": "mine", "overrides": ("ppo.kl_coef=0.1",)}
    assert make_config("tiny", data="data/", **more).own_from == ""
    write_folder(folders / "other")
    with pytest.raises(UserError, match="changes stage base, which UPSTREAM=mine supplies"):
        make_config("tiny", data="other", **more)


def test_files_that_change_while_a_stage_reads_them_stop_it(folders):
    config = own_config(*MODEL, data="data")

    def disturbed():
        with open_stage(config, "base") as run:
            (folders / "data/sft_train.jsonl").write_text("{}\n")
            (folders / "model/model.safetensors").write_text("other")
            run.finish({})

    text = "stage base: base.checkpoint, data changed while the stage was running: run it again"
    with pytest.raises(UserError, match=text):
        disturbed()
    assert read_manifest(stage_folder(config, "base")) is None
    finished(config)


def test_a_file_is_hashed_once_by_a_process_until_it_changes(place, monkeypatch):
    path, read = place / "weights", []
    hashed = files.file_hash

    def noted(path: Path) -> str:
        read.append(path)
        return hashed(path)

    monkeypatch.setattr(files, "file_hash", noted)
    path.write_text("one")
    first = files.known_hash(path)
    assert files.known_hash(Path("weights")) == first
    assert len(read) == 1
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    assert files.known_hash(path) == hashed(path) != first
    assert len(read) == 2


# -- the reward function ---------------------------------------------------------------------------

TARGETS = ("sft", "rm", "ppo", "rloo", "dpo", "eval")


@pytest.fixture
def rewarded(runs, place):
    """The config of a finished run whose reward is a function that imports a second file."""
    (place / "my_reward.py").write_text("from my_words import WORDS\n\ndef score(): return WORDS\n")
    (place / "my_words.py").write_text("WORDS = 1\n")
    config = own_config("reward.function=my_reward:score", "ppo.critic_init=sft")
    run_stages(config, *TARGETS)
    assert run_stages(config, *TARGETS) == []
    return config


@pytest.mark.parametrize("name", ["my_reward.py", "my_words.py"])
def test_an_edited_reward_function_makes_everything_stale_that_calls_it(rewarded, place, name):
    (place / name).write_text((place / name).read_text() + "# edited\n")
    stale = [*make_plan(rewarded, TARGETS).reasons]
    assert stale[:5] == ["rm", "normalize", "ppo", "rloo", "summaries"]
    for stage in stale[:5]:
        assert str(find_problem(rewarded, stage)) == "ran with another version of reward.function"


def test_an_edited_reward_function_leaves_base_sft_and_dpo(rewarded, place):
    (place / "my_reward.py").write_text("def score(): return 2\n")
    assert not {"base", "sft", "dpo"} & {*run_stages(rewarded, *TARGETS, text="other")}
    assert run_stages(rewarded, *TARGETS) == []


def test_a_policy_that_was_trained_with_a_function_is_stale_without_it(rewarded):
    config = own_config("ppo.critic_init=sft")
    assert str(find_problem(config, "ppo")) == "ran with reward.function, which is not set now"


def test_a_file_that_the_reward_function_does_not_import_counts_for_nothing(rewarded, place):
    (place / "notes.py").write_text("x = 1\n")
    assert run_stages(rewarded, *TARGETS) == []


def test_a_checkpoint_of_another_reward_function_is_refused(rewarded, place):
    stage_folder(rewarded, "ppo").rename(place / "gone")
    interrupt(rewarded, "ppo", update=3)
    (place / "my_words.py").write_text("WORDS = 2\n")
    with pytest.raises(UserError, match=r"it began with another version of reward\.function"):
        make_plan(rewarded, ["ppo"])


def test_an_edit_while_a_stage_runs_counts_for_the_next_run(rewarded, place):
    """The stage imported the function when it began."""
    with open_stage(rewarded, "ppo") as run:
        (place / "my_reward.py").write_text("def score(): return 2\n")
        run.finish({})
    assert str(find_problem(rewarded, "ppo")) == "ran without base"


def test_manifests_of_an_earlier_version_which_recorded_it_for_rm_only_stay_done(rewarded):
    for stage in ("normalize", "ppo"):
        path = stage_folder(rewarded, stage) / "manifest.json"
        manifest = read_json(path)
        del manifest["inputs"]["reward.function"]
        manifest["code"] = {"module": "", "files": {}}
        write_json(path, manifest)
        assert find_problem(rewarded, stage) is None
