"""NAME alone asks for a run that is there as it was made: its preset, data and settings."""

import json
import shutil

import pytest

from stages.config.command_line import Request, add_arguments, config_of, make_config, request_of
from stages.config.error_messages import Parser
from tests.lib.fabricated_runs import fabricate

MADE = ("base.num_layers=1", "judge.kind=openai", "judge.model=other")


def requested(*words: str) -> Request:
    parser = Parser()
    add_arguments(parser)
    return request_of(parser.parse_args(words))


@pytest.fixture
def foo(runs):
    config = make_config("tiny-xs", name="foo", overrides=MADE)
    fabricate(config)
    return config


@pytest.mark.parametrize("preset", [(), ("--preset", "outputs")])
def test_a_run_named_alone_is_asked_for_as_it_was_made(foo, preset):
    request = requested("--name", "foo", *preset)
    assert request.preset == "tiny-xs"
    assert config_of(request) == foo


def test_another_judge_is_the_same_run_and_nothing_of_the_recorded_judge_is_left(foo):
    request = requested("--name", "foo", "--set", "judge.kind=facts")
    assert request.preset == "tiny-xs"
    assert request.overrides == ("base.num_layers=1", "judge.kind=facts")


def test_a_memory_setting_replaces_only_itself(runs):
    memory = ("memory.mixed_precision=bf16", "memory.cpu_threads=1")
    fabricate(make_config("tiny-xs", name="foo", overrides=(*MADE, *memory)))
    request = requested("--name", "foo", "--set", "memory.cpu_threads=2")
    assert request.overrides == (*MADE, "memory.mixed_precision=bf16", "memory.cpu_threads=2")


def test_another_seed_of_the_run_has_its_settings_too(foo):
    request = requested("--name", "foo", "--seed", "5")
    assert (request.preset, request.seed, request.overrides) == ("tiny-xs", 5, MADE)


def test_a_setting_that_a_replaced_stage_no_longer_has_is_not_asked_for_again(runs):
    before, after = (
        make_config("tiny-xs", name="foo", overrides=(*MADE, text))
        for text in ("ppo.kl_coef=0.2", "ppo.lam=0.5")
    )
    fabricate(before)
    seed = runs / "foo/seed44413"
    shutil.copytree(seed / "sft", seed / "dpo")  # older than PPO, and reads no section of it
    record = json.dumps(after.model_dump())
    for stage in ("ppo", "summaries"):
        (seed / stage / "config.json").write_text(record)
    assert config_of(requested("--name", "foo")) == after


def test_the_settings_of_a_half_finished_stage_count_too(foo, runs):
    begun = make_config("tiny-xs", name="foo", overrides=(*MADE, "ppo.kl_coef=0.2"))
    ppo = runs / "foo/seed44413/ppo"
    shutil.rmtree(ppo)
    shutil.rmtree(ppo.with_name("summaries"))
    partial = ppo.with_name("ppo.partial")
    partial.mkdir()
    (partial / "config.json").write_text(json.dumps(begun.model_dump()))
    assert config_of(requested("--name", "foo")) == begun


def test_data_and_tokenizer_are_those_of_the_run(runs, tmp_path, tokenizer_folder):
    folders = {"data": str(tmp_path), "tokenizer": str(tokenizer_folder)}
    config = make_config("posts", name="mine", **folders)
    fabricate(config)
    request = requested("--name", "mine")
    assert {"data": request.data, "tokenizer": request.tokenizer} == folders
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
def test_what_is_asked_for_otherwise_is_taken_at_its_word(foo, words):
    request = requested(*words)
    assert request.preset == "tiny"
    assert not set(MADE) & {*request.overrides}


def test_a_record_that_says_nothing_is_no_record(foo, runs):
    for path in (runs / "foo").rglob("config.json"):
        path.write_text("{}")
    assert requested("--name", "foo").preset == "tiny"
    shutil.rmtree(runs)
    assert requested("--name", "foo").preset == "tiny"
