"""A change to one of your files makes the stages stale that read it, and no other stages."""

import os
from dataclasses import dataclass
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

# -- folders of posts, models and tokenizers -------------------------------------------------------


@pytest.fixture
def folders(runs, place):
    """A working directory with a folder of posts, `data`, and with model and tokenizer folders."""
    write_folder(place / "data")
    for name in ("model", "tokenizer", "reward"):
        (place / name).mkdir()
        (place / name / "config.json").write_text("{}")
        (place / name / "model.safetensors").write_text(name)
    return place


def config_of(*overrides, **more):
    return make_config("tiny", name="mine", overrides=overrides, **more)


def finish_with(config, stage="base"):
    """Finish a stage with these settings and the current files."""
    stage_folder(config, stage).parent.mkdir(parents=True, exist_ok=True)
    with open_stage(config, stage) as run:
        (run.partial / "out.txt").write_text("output")
        run.finish({})
    assert find_problem(config, stage) is None


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A stage that has finished with settings, then a file that is edited."""

    overrides: tuple[str, ...]
    stage: str
    file: str
    setting: str
    """The setting that names the folder of the file."""


MODEL = ("base.checkpoint=model", "base.tokenizer=")
EDITS = {
    "weights": Edit(
        overrides=MODEL,
        stage="base",
        file="model/model.safetensors",
        setting="base.checkpoint",
    ),
    "a model's config": Edit(
        overrides=MODEL,
        stage="base",
        file="model/config.json",
        setting="base.checkpoint",
    ),
    "a tokenizer": Edit(
        overrides=("base.tokenizer=tokenizer",),
        stage="base",
        file="tokenizer/config.json",
        setting="base.tokenizer",
    ),
    "a released policy": Edit(
        overrides=("released.policy=model", "released.reward_model=reward"),
        stage="base",
        file="model/model.safetensors",
        setting="base.checkpoint",
    ),
    "a released reward model": Edit(
        overrides=("released.policy=model", "released.reward_model=reward"),
        stage="released",
        file="reward/model.safetensors",
        setting="released.reward_model",
    ),
    "a released reward model in training": Edit(
        overrides=("released.reward_model=reward",),
        stage="rm",
        file="reward/model.safetensors",
        setting="released.reward_model",
    ),
    "posts": Edit(
        overrides=(
            f"data.source={HUB}",
            "data.sft_dataset=data",
            "data.comparisons_dataset=data:x",
        ),
        stage="base",
        file="data/sft_train.jsonl",
        setting="data.sft_dataset",
    ),
    "comparisons for the calibration": Edit(
        overrides=(
            f"data.source={HUB}",
            "data.sft_dataset=a/b",
            "data.comparisons_dataset=data:x",
        ),
        stage="calibration",
        file="data/sft_train.jsonl",
        setting="data.comparisons_dataset",
    ),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_file_in_a_folder_that_a_setting_names_makes_the_stage_stale(folders, edit):
    config = config_of(*edit.overrides)
    finish_with(config, edit.stage)

    (folders / edit.file).write_text("other")

    problem = str(find_problem(config, edit.stage))
    assert problem == f"ran with another version of {edit.setting}"


def test_files_that_no_stage_loads_from_a_folder_do_not_count(folders):
    config = config_of("base.checkpoint=model", "base.tokenizer=tokenizer")
    finish_with(config)

    (folders / "model/README.md").write_text("a card that somebody edits")
    (folders / "model/checkpoint-9").mkdir()
    (folders / "model/checkpoint-9/model.safetensors").write_text("of a trainer")
    (folders / "tokenizer/model.safetensors").write_text("weights of a tokenizer's model")

    assert find_problem(config, "base") is None


def test_the_words_random_train_and_toy_name_no_folder(folders):
    for word in ("random", "train", "toy"):
        (folders / word).mkdir()
    assert user_inputs(config_of(), "base") == {}


def test_other_tables_in_the_folder_of_posts_do_not_count(folders):
    config = config_of(data="data")
    finish_with(config)
    inputs = user_inputs(config, "base")

    (folders / "data/notes.jsonl").write_text("{}\n")

    assert user_inputs(config, "base") == inputs
    assert find_problem(config, "base") is None


def test_edited_posts_make_base_stale(folders):
    config = config_of(data="data")
    finish_with(config)

    (folders / "data/sft_train.jsonl").write_text("{}\n")

    assert str(find_problem(config, "base")) == "ran with other data"


def test_two_files_of_one_split_are_refused(folders):
    (folders / "data/sft_train.JSON").write_text("[]")
    with pytest.raises(UserError, match=r"data: sft_train\.JSON and sft_train\.jsonl are both"):
        user_inputs(config_of(data="data"), "base")


# -- ways to write a folder ------------------------------------------------------------------------


def test_a_folder_may_be_written_in_several_ways(folders):
    finish_with(config_of(data="data", tokenizer="tokenizer"))
    for data in ("data/", "./data", str(folders / "data"), "tokenizer/../data"):
        config = config_of(data=data, tokenizer=str(folders / "tokenizer/"))
        assert find_problem(config, "base") is None, data


def test_another_folder_of_posts_is_a_difference(folders):
    finish_with(config_of(data="data", tokenizer="tokenizer"))
    write_folder(folders / "toy")
    config = config_of(data=str(folders / "toy"), tokenizer="tokenizer")
    assert "data.source: ran with data, now" in str(find_problem(config, "base"))


def test_a_folder_called_toy_is_not_the_built_in_posts(folders):
    overrides = ("base.vocab_size=600",)
    finish_with(make_config("tiny", name="built-in", overrides=overrides))
    write_folder(folders / "toy")
    config = make_config("tiny", name="built-in", data=str(folders / "toy"), overrides=overrides)
    assert "data.source: ran with toy" in str(find_problem(config, "base"))


def ablation_with(data):
    """An ablation of the run `mine` with this folder of posts."""
    return make_config(
        "tiny", name="from", upstream="mine", data=data, overrides=("ppo.kl_coef=0.1",)
    )


def test_a_run_from_an_upstream_may_write_its_folder_differently(folders):
    finish_with(config_of(data="data"))
    assert ablation_with("data/").own_from == ""


def test_a_run_from_an_upstream_may_not_have_another_folder(folders):
    finish_with(config_of(data="data"))
    write_folder(folders / "other")
    with pytest.raises(UserError, match="changes stage base, which UPSTREAM=mine supplies"):
        ablation_with("other")


# -- files that change while they are read ---------------------------------------------------------


def test_files_that_change_while_a_stage_reads_them_stop_it(folders):
    config = config_of(*MODEL, data="data")

    def run_with_edits():
        with open_stage(config, "base") as run:
            (folders / "data/sft_train.jsonl").write_text("{}\n")
            (folders / "model/model.safetensors").write_text("other")
            run.finish({})

    text = "stage base: base.checkpoint, data changed while the stage was running: run it again"
    with pytest.raises(UserError, match=text):
        run_with_edits()
    assert read_manifest(stage_folder(config, "base")) is None
    finish_with(config)


@pytest.fixture
def hashed_paths(monkeypatch):
    """The paths whose files have been hashed."""
    paths = []
    file_hash = files.file_hash

    def record_path(path: Path) -> str:
        paths.append(path)
        return file_hash(path)

    monkeypatch.setattr(files, "file_hash", record_path)
    return paths


def test_a_process_hashes_a_file_only_once(place, hashed_paths):
    (place / "weights").write_text("one")

    absolute = files.known_hash(place / "weights")
    relative = files.known_hash(Path("weights"))

    assert relative == absolute
    assert len(hashed_paths) == 1


def test_a_process_hashes_a_changed_file_again(place, hashed_paths):
    path = place / "weights"
    path.write_text("one")
    hash_before = files.known_hash(path)

    path.write_text("two")
    os.utime(path, ns=(1, 1))
    hash_after = files.known_hash(path)

    assert len(hashed_paths) == 2
    assert hash_after != hash_before
    assert hash_after == files.file_hash(path)


# -- the reward function ---------------------------------------------------------------------------

TARGETS = ("sft", "rm", "ppo", "rloo", "dpo", "eval")


@pytest.fixture
def config_with_function(runs, place):
    """The config of a finished run whose reward is a function that imports a second file."""
    (place / "my_reward.py").write_text("from my_words import WORDS\n\ndef score(): return WORDS\n")
    (place / "my_words.py").write_text("WORDS = 1\n")
    config = config_of("reward.function=my_reward:score", "ppo.critic_init=sft")
    run_stages(config, *TARGETS)
    assert run_stages(config, *TARGETS) == []
    return config


@pytest.mark.parametrize("name", ["my_reward.py", "my_words.py"])
def test_an_edited_reward_function_makes_everything_stale_that_calls_it(
    config_with_function, place, name
):
    (place / name).write_text((place / name).read_text() + "# edited\n")

    stale = list(make_plan(config_with_function, TARGETS).reasons)

    assert stale[:5] == ["rm", "normalize", "ppo", "rloo", "summaries"]
    for stage in stale[:5]:
        problem = str(find_problem(config_with_function, stage))
        assert problem == "ran with another version of reward.function"


def test_an_edited_reward_function_leaves_base_sft_and_dpo(config_with_function, place):
    (place / "my_reward.py").write_text("def score(): return 2\n")

    reran = run_stages(config_with_function, *TARGETS, text="other")

    assert not {"base", "sft", "dpo"} & set(reran)
    assert run_stages(config_with_function, *TARGETS) == []


def test_a_policy_that_was_trained_with_a_function_is_stale_without_it(config_with_function):
    config = config_of("ppo.critic_init=sft")
    assert str(find_problem(config, "ppo")) == "ran with reward.function, which is not set now"


def test_a_file_that_the_reward_function_does_not_import_does_not_count(
    config_with_function, place
):
    (place / "notes.py").write_text("x = 1\n")
    assert run_stages(config_with_function, *TARGETS) == []


def test_a_checkpoint_of_another_reward_function_is_refused(config_with_function, place):
    stage_folder(config_with_function, "ppo").rename(place / "gone")
    interrupt(config_with_function, "ppo", update=3)

    (place / "my_words.py").write_text("WORDS = 2\n")

    with pytest.raises(UserError, match=r"it began with another version of reward\.function"):
        make_plan(config_with_function, ["ppo"])


def test_an_edit_while_a_stage_runs_counts_for_the_next_run(config_with_function, place):
    """The stage imported the function when it began."""
    with open_stage(config_with_function, "ppo") as run:
        (place / "my_reward.py").write_text("def score(): return 2\n")
        run.finish({})

    assert str(find_problem(config_with_function, "ppo")) == "ran without base"


def test_stages_of_an_earlier_version_that_recorded_the_function_only_for_rm_stay_done(
    config_with_function,
):
    for stage in ("normalize", "ppo"):
        path = stage_folder(config_with_function, stage) / "manifest.json"
        manifest = read_json(path)
        del manifest["inputs"]["reward.function"]
        manifest["code"] = {"module": "", "files": {}}
        write_json(path, manifest)
        assert find_problem(config_with_function, stage) is None
