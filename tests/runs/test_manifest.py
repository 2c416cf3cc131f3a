"""A finished stage counts only if settings, inputs and files are what its manifest records."""

import shlex

import pytest

from stages.config.command_line import make_config
from stages.config.config import Config
from stages.config.judge import JudgeSettings
from stages.config.options import config_from_arguments
from stages.pipeline.plan import make_plan, settings_warnings
from stages.runs.differences import unknown_settings
from stages.runs.files import read_json, write_json
from stages.runs.make_command import make_command
from stages.runs.run import Run
from stages.runs.staleness import find_problem
from tests.lib.asserts import refusal_of
from tests.lib.fake_stages import finish, finish_alone, run_stages

TINY = make_config("tiny")
SEVEN_SFT_EPOCHS = TINY.changed(sft=TINY.sft.changed(epochs=7))


def refusal(config: Config, stage: str) -> str:
    """The line with which a stage of this config is not opened as an input."""
    return refusal_of(Run(config, "ppo").require, stage)


# -- files -----------------------------------------------------------------------------------------


def test_a_changed_output_is_found_by_its_hash(runs):
    folder = finish_alone(TINY, "sft", text="made")

    (folder / "out.txt").write_text("fade")

    assert find_problem(TINY, "sft") is None  # the size is the same
    assert refusal(TINY, "sft").startswith("stage sft has changed on disk (out.txt): ")


def test_a_removed_output_is_found_and_the_line_says_how_to_replace_the_stage(runs):
    folder = finish_alone(TINY, "sft")

    (folder / "out.txt").unlink()

    assert refusal(TINY, "sft") == (
        "stage sft has changed on disk (out.txt): choose another NAME, or run "
        "`make sft PRESET=tiny SEED=44413 REPLACE=sft`, which moves the finished stage aside"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "manifest.json is not JSON"),
        ("[]", "manifest.json is not a JSON object"),
        ("{}", "manifest.json is not a manifest of this project: move /"),
    ],
)
def test_a_file_that_is_not_a_manifest_is_refused_in_one_line(runs, text, line):
    folder = finish_alone(TINY, "sft")
    (folder / "manifest.json").write_text(text)
    assert line in refusal_of(find_problem, TINY, "sft")


# -- settings --------------------------------------------------------------------------------------


def test_other_settings_are_refused_with_the_difference_and_what_to_do(runs):
    finish_alone(TINY, "sft")
    assert refusal(SEVEN_SFT_EPOCHS, "sft") == (
        "stage sft has finished with other settings (sft.epochs: ran with 2, now 7): choose "
        "another NAME, or run `make sft PRESET=tiny SEED=44413 REPLACE=sft`, which moves the "
        "finished stage aside"
    )


def test_a_stage_of_another_seed_is_missing(runs):
    finish_alone(TINY, "sft")
    assert "missing" in refusal(TINY.changed(seed=1), "sft")


def test_another_number_of_threads_is_another_setting(runs):
    finish_alone(TINY, "sft")
    one_thread = TINY.changed(memory=TINY.memory.changed(cpu_threads=1))
    assert "memory.cpu_threads: ran with 2, now 1" in refusal(one_thread, "sft")


def test_another_microbatch_size_makes_no_difference(runs):
    folder = finish_alone(TINY, "sft")
    microbatches_of_1 = TINY.changed(memory=TINY.memory.changed(microbatch_size=1))
    assert Run(microbatches_of_1, "ppo").require("sft") == folder


def edit_recorded_settings(folder, edit):
    """Change the settings in a manifest, as if another version had written it."""
    manifest = read_json(folder / "manifest.json")
    edit(manifest["settings"])
    manifest["settings_hash"] = "another"
    write_json(folder / "manifest.json", manifest)


def test_a_setting_that_is_newer_than_a_manifest_had_its_default(runs):
    folder = finish_alone(TINY, "ppo")
    edit_recorded_settings(folder, lambda settings: settings["ppo"].pop("kl_target"))
    assert find_problem(TINY, "ppo") is None

    config = TINY.changed(ppo=TINY.ppo.changed(kl_target=6.0))
    assert "ppo.kl_target: ran with nothing, now 6.0" in str(find_problem(config, "ppo"))


def test_a_section_that_is_newer_than_a_manifest_had_its_defaults(runs):
    config = make_config("tiny", name="mine", overrides=("normalize.posts=0",))
    folder = finish_alone(config, "normalize")
    edit_recorded_settings(folder, lambda settings: settings.pop("normalize"))
    assert find_problem(config, "normalize") is None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"adapters": {"kind": "none"}}, "adapters.kind"),
        ({"sft": {**vars(TINY.sft), "label_smoothing": 0.1}}, "sft.label_smoothing"),
    ],
)
def test_recorded_settings_of_another_branch_are_ignored_with_a_warning(runs, change, name):
    folder = finish_alone(TINY, "sft")

    edit_recorded_settings(folder, lambda settings: settings.update(change))

    assert find_problem(TINY, "sft") is None
    assert unknown_settings(TINY, "sft") == [name]
    assert settings_warnings(TINY, ["base", "sft"]) == [
        f"sft recorded settings that this version does not know: {name}. They are ignored."
    ]


def test_a_section_that_no_longer_counts_is_a_difference(runs):
    adapted = make_config("tiny", name="mine", overrides=("lora.rank=2",))
    finish_alone(adapted, "sft")
    config = make_config("tiny", name="mine")
    assert "lora.rank: ran with 2, now nothing" in str(find_problem(config, "sft"))


# -- inputs ----------------------------------------------------------------------------------------


def test_an_input_that_came_out_differently_makes_a_stage_stale(runs):
    run_stages(TINY, "sft")
    finish(TINY, "base", text="other")

    assert str(find_problem(TINY, "sft")) == "ran with an earlier base"
    assert run_stages(TINY, "sft") == ["sft"]


def test_an_input_that_came_out_the_same_makes_nothing_stale(runs):
    run_stages(TINY, "sft")
    finish(TINY, "base")
    assert run_stages(TINY, "sft") == []


@pytest.fixture
def use_wording(monkeypatch):
    """Gives the judge's prompt another wording."""

    def use(wording):
        identity = {"kind": "openai", "wording": wording}
        monkeypatch.setattr(JudgeSettings, "identity", property(lambda _: identity))

    return use


@pytest.fixture
def judged_config(runs, use_wording, monkeypatch):
    """The config of a finished run whose LLM judge was asked with the first wording."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    config = TINY.changed(judge=TINY.judge.changed(kind="openai", model="a-model"))
    use_wording("first")
    run_stages(config, "eval", "judge-calibration")
    return config


def test_the_same_wording_of_the_judges_prompt_makes_nothing_stale(judged_config):
    assert run_stages(judged_config, "eval", "judge-calibration") == []


def test_another_wording_makes_every_stage_stale_that_asks_the_judge(judged_config, use_wording):
    use_wording("second")

    stale = set(make_plan(judged_config, ("eval", "judge-calibration")).reasons)

    assert {"judge", "controls", "calibration", "win_rate", "report"} <= stale
    assert "summaries" not in stale


def test_replace_judge_reruns_what_another_wording_makes_stale(judged_config, use_wording):
    use_wording("second")
    targets = ("eval", "judge-calibration")
    stale = make_plan(judged_config, targets).reasons
    replaced = make_plan(judged_config, targets, replace="judge").reasons
    assert set(replaced) == set(stale)


# -- the command to type ---------------------------------------------------------------------------


def parse_command(command: str) -> tuple[str, Config]:
    """The target of a make command, and the config that it asks for."""
    make, target, *words = shlex.split(command)
    assert make == "make"
    variables = dict(word.split("=", 1) for word in words)
    preset = variables["PRESET"]
    config = make_config(
        preset,
        seed=int(variables["SEED"]),
        name=variables.get("NAME", ""),
        data=variables.get("DATA", ""),
        tokenizer=variables.get("TOKENIZER", ""),
        upstream=variables.get("UPSTREAM", ""),
        overrides=tuple(variables.get("SET", "").split()),
    )
    return target, config


@pytest.mark.parametrize(
    ("stage", "target"), [("base", "data"), ("sft", "sft"), ("ppo", "ppo"), ("judge", "eval")]
)
def test_the_command_runs_exactly_the_run_that_needs_the_stage(tmp_path, stage, target):
    posts = tmp_path / "my posts"
    posts.mkdir()
    for config in (
        make_config("tiny", seed=3),
        make_config("tiny", name="another"),
        make_config("posts", data=str(posts), tokenizer="a tokenizer"),
        make_config("tiny", name="mine", overrides=("ppo.lam=0.5", "ppo.whiten_rewards=true")),
    ):
        assert parse_command(make_command(config, stage)) == (target, config)


def test_the_command_for_an_upstream_stage_runs_the_upstream(runs):
    finish_alone(TINY, "base")
    ablation = make_config("tiny", name="mine", upstream="tiny", overrides=("ppo.lam=0.5",))

    assert parse_command(make_command(ablation, "sft")) == ("sft", TINY)
    assert parse_command(make_command(ablation, "ppo")) == ("ppo", ablation)


def test_the_command_for_an_ablations_own_reward_model_runs_the_ablation(runs):
    finish_alone(TINY, "base")
    ablation = make_config("tiny", name="mine", upstream="tiny", overrides=("rm.epochs=3",))

    assert parse_command(make_command(ablation, "sft")) == ("sft", TINY)
    assert parse_command(make_command(ablation, "rm")) == ("rm", ablation)


def test_the_command_for_a_stage_of_a_changed_upstream_leaves_its_settings_to_its_record(runs):
    upstream = make_config("tiny", name="other", overrides=("sft.epochs=3",))
    finish_alone(upstream, "base")
    ablation = make_config("tiny", name="mine", upstream="other", overrides=("ppo.lam=0.5",))

    assert make_command(ablation, "sft") == "make sft SEED=44413 NAME=other"
    assert config_from_arguments(["--name", "other", "--seed", "44413"], "") == upstream
