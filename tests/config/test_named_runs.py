"""A command that gives only NAME uses the settings that the run recorded."""

import json
import shutil

import pytest

from stages.config.command_line import Request, config_of, make_config
from stages.config.error_messages import Parser
from stages.config.options import add_arguments, request_as_typed, request_of
from tests.lib.fabricated_runs import fabricate

OVERRIDES = ("base.num_layers=1", "judge.kind=openai", "judge.model=other")


def request_from(*words: str) -> Request:
    parser = Parser()
    add_arguments(parser)
    return request_of(parser.parse_args(words))


@pytest.fixture
def foo(runs):
    """A finished run called `foo`."""
    config = make_config("tiny-xs", name="foo", overrides=OVERRIDES)
    fabricate(config)
    return config


@pytest.mark.parametrize("preset", [(), ("--preset", "outputs")])
def test_a_run_that_is_only_named_has_its_recorded_settings(foo, preset):
    request = request_from("--name", "foo", *preset)

    assert request.preset == "tiny-xs"
    assert config_of(request) == foo


def test_a_launched_process_takes_its_options_as_they_are(foo):
    parser = Parser()
    add_arguments(parser)

    request = request_as_typed(parser.parse_args(["--name", "foo"]))

    assert request == Request(preset="tiny", name="foo")


def test_another_judge_replaces_the_recorded_judge_entirely(foo):
    request = request_from("--name", "foo", "--set", "judge.kind=facts")

    assert request.preset == "tiny-xs"
    assert request.overrides == ("base.num_layers=1", "judge.kind=facts")


def test_a_memory_setting_replaces_only_itself(runs):
    memory = ("memory.mixed_precision=bf16", "memory.cpu_threads=1")
    fabricate(make_config("tiny-xs", name="foo", overrides=(*OVERRIDES, *memory)))

    request = request_from("--name", "foo", "--set", "memory.cpu_threads=2")

    expected = (*OVERRIDES, "memory.mixed_precision=bf16", "memory.cpu_threads=2")
    assert request.overrides == expected


def test_another_seed_of_a_run_has_its_recorded_settings(foo):
    request = request_from("--name", "foo", "--seed", "5")

    assert request == Request(preset="tiny-xs", seed=5, name="foo", overrides=OVERRIDES)


def test_a_setting_that_a_replaced_stage_no_longer_has_is_not_used(runs):
    before = make_config("tiny-xs", name="foo", overrides=(*OVERRIDES, "ppo.kl_coef=0.2"))
    after = make_config("tiny-xs", name="foo", overrides=(*OVERRIDES, "ppo.lam=0.5"))
    fabricate(before)
    seed = runs / "foo/seed44413"
    shutil.copytree(seed / "sft", seed / "dpo")  # older than PPO, and reads no section of it
    for stage in ("ppo", "summaries"):
        (seed / stage / "config.json").write_text(json.dumps(after.model_dump()))

    request = request_from("--name", "foo")

    assert config_of(request) == after


def test_the_settings_of_a_half_finished_stage_are_used(foo, runs):
    started = make_config("tiny-xs", name="foo", overrides=(*OVERRIDES, "ppo.kl_coef=0.2"))
    seed = runs / "foo/seed44413"
    shutil.rmtree(seed / "ppo")
    shutil.rmtree(seed / "summaries")
    (seed / "ppo.partial").mkdir()
    (seed / "ppo.partial/config.json").write_text(json.dumps(started.model_dump()))

    request = request_from("--name", "foo")

    assert config_of(request) == started


def test_a_named_run_keeps_its_data_and_tokenizer(runs, tmp_path, tokenizer_folder):
    data = str(tmp_path)
    tokenizer = str(tokenizer_folder)
    config = make_config("posts", name="mine", data=data, tokenizer=tokenizer)
    fabricate(config)

    request = request_from("--name", "mine")

    assert request.data == data
    assert request.tokenizer == tokenizer
    assert config_of(request) == config


@pytest.mark.parametrize(
    "words",
    [
        ("--name", "nosuch"),
        ("--name", "foo", "--preset", "tiny"),
        ("--name", "foo", "--set", "ppo.kl_coef=0.1"),
        ("--name", "foo", "--data", "folder"),
        ("--name", "foo", "--upstream", "tiny"),
        (),
    ],
)
def test_a_request_with_settings_does_not_use_the_recorded_ones(foo, words):
    request = request_from(*words)

    assert request.preset == "tiny"
    assert not set(OVERRIDES) & set(request.overrides)


def test_an_empty_record_is_not_used(foo, runs):
    for path in (runs / "foo").rglob("config.json"):
        path.write_text("{}")

    assert request_from("--name", "foo").preset == "tiny"


def test_a_missing_runs_folder_is_not_an_error(runs):
    assert not runs.exists()

    assert request_from("--name", "foo").preset == "tiny"
