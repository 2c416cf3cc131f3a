"""Overrides: what SET may change, how its words are read, and what is refused."""

import re
import shlex

import pytest

from stages.config.command_line import Request, make_config
from stages.config.error_messages import Parser
from stages.config.listing import settings_lines
from stages.config.options import add_arguments, config_from_arguments, request_of
from stages.config.values import parse_override
from stages.runs.make_command import make_command
from tests.lib.asserts import refusal_of
from tests.lib.configs import override

PROMPT = "r/{subreddit}\n\n# {title}\n{post}\n\nTL;DR:"
# As a command line has it: each line break is two characters.
PROMPT_TEXT = r"r/{subreddit}\n\n# {title}\n{post}\n\nTL;DR:"


def request_from(words: list[str]) -> Request:
    parser = Parser()
    add_arguments(parser)
    return request_of(parser.parse_args(words))


# -- values ----------------------------------------------------------------------------------------


def test_an_override_is_parsed_by_the_type_of_its_field():
    config = override("ppo.kl_coef=1e-1", "ppo.batch_size=32", "ppo.whiten_rewards=True")

    assert config.ppo.kl_coef == 0.1
    assert config.ppo.batch_size == 32
    assert config.ppo.whiten_rewards is True


def test_an_override_changes_nothing_else():
    config = override("ppo.kl_coef=1e-1")

    assert (config.name, config.preset) == ("mine", "tiny")
    assert config.sft == make_config("tiny").sft


def test_a_value_may_contain_an_equals_sign():
    assert override("judge.kind=openai", "judge.model=a=b").judge.model == "a=b"


@pytest.mark.parametrize("name", ["microbatch_size", "forward_batch_size"])
def test_auto_is_a_batch_size_of_0(name):
    assert parse_override(f"memory.{name}=auto") == ("memory", name, 0)


def test_only_batch_sizes_of_memory_may_be_auto():
    line = refusal_of(override, "ppo.batch_size=auto")

    assert line == "ppo.batch_size must be a whole number, not 'auto'"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ppo.kl_coeff=1", "unknown setting 'ppo.kl_coeff': did you mean ppo.kl_coef"),
        ("xyzzy=1", "unknown setting 'xyzzy': `make settings` lists all of them"),
        ("ppo.kl_coef", "section.key=value"),
        ("ppo.batch_size=1.5", "ppo.batch_size must be a whole number, not '1.5'"),
        ("ppo.whiten_rewards=1", "ppo.whiten_rewards must be true or false"),
        ("ppo.batch_size=0", "ppo.batch_size must be above 0"),
        ("ppo.kl_coef=-0.1", "ppo.kl_coef must be at least 0"),
        ("ppo.kl_coef=nan", "ppo.kl_coef must be a finite number"),
        ("ppo.missing_eos_penalty=1", "ppo.missing_eos_penalty must be at most 0"),
        ("ppo.gamma=1.01", "ppo.gamma must be at most 1"),
        ("ppo.critic_updates=56", "ppo.critic_updates must be fewer than the 56 updates"),
        ("ppo.checkpoints=40", "ppo.checkpoints must be fewer than the 40 updates of the policy"),
        ("ppo.num_minibatches=7", "times ppo.num_minibatches, 7"),
        ("ppo.total_episodes=3", "ppo.total_episodes must fill one batch"),
        ("base.num_heads=5", "base.hidden_size must be an even multiple"),
        (
            "base.checkpoint=me/model",
            "base.tokenizer must be empty (the checkpoint's own) or name a",
        ),
        ("memory.mixed_precision=fp16", "memory.mixed_precision must be 'no' or 'bf16'"),
        ("judge.request_seconds=1e300", "judge.request_seconds must be at most 86400"),
        ("judge.requests_per_minute=1e-300", "judge.requests_per_minute must be at least 0.01"),
    ],
)
def test_a_bad_override_is_refused_with_one_line_that_names_it(text, line):
    assert line in refusal_of(override, text)


# -- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (["ppo.kl_coef=0.1 sft.epochs=2"], ["ppo.kl_coef=0.1", "sft.epochs=2"]),
        (["ppo.kl_coef=0.1", "sft.epochs=2"], ["ppo.kl_coef=0.1", "sft.epochs=2"]),
        ([" ppo.kl_coef=0.1\t  sft.epochs=2 "], ["ppo.kl_coef=0.1", "sft.epochs=2"]),
        (["base.tokenizer=my  tok sft.epochs=2"], ["base.tokenizer=my  tok", "sft.epochs=2"]),
        (["judge.model=a=b c.d sft.epochs=2"], ["judge.model=a=b c.d", "sft.epochs=2"]),
        (["ppo.kl_coef=0.1 pppo.x=2"], ["ppo.kl_coef=0.1", "pppo.x=2"]),
    ],
)
def test_a_value_ends_where_the_next_setting_begins(words, overrides):
    assert request_from(["--set", *words]).overrides == tuple(overrides)


def test_a_setting_that_is_set_twice_is_refused():
    line = refusal_of(config_from_arguments, ["--set", "ppo.lam=0.5 ppo.lam=0.6"])

    assert line == "ppo.lam is set twice: leave one out"


def test_the_command_line_gives_the_same_config_as_the_call():
    words = ["--preset", "tiny-s", "--seed", "3", "--name", "x"]
    words += ["--set", "ppo.lam=0.5", "ppo.gamma=0.9"]

    config = config_from_arguments(words)

    overrides = ("ppo.lam=0.5", "ppo.gamma=0.9")
    assert config == make_config("tiny-s", seed=3, name="x", overrides=overrides)


def test_an_empty_command_line_gives_the_preset_tiny():
    assert config_from_arguments([]) == make_config("tiny")


def test_a_request_is_parsed_from_its_own_words():
    request = Request(
        preset="tiny-s",
        seed=3,
        name="x",
        recorded=("sft.epochs=3", "judge.model=a b"),
        overrides=("ppo.lam=0.5",),
    )

    assert request_from(request.arguments) == request


# -- line breaks in a prompt -----------------------------------------------------------------------


def test_a_backslash_and_n_in_a_prompt_are_a_line_break():
    assert parse_override(f"data.prompt={PROMPT_TEXT}") == ("data", "prompt", PROMPT)


def test_a_suggested_command_repeats_the_line_breaks_of_a_prompt(runs):
    config = override(f"data.prompt={PROMPT_TEXT}", "sft.epochs=2")

    command = make_command(config, "sft")

    (quoted,) = re.findall(r"SET=('[^']*')", command)
    assert config_from_arguments(["--name", "mine", "--set", *shlex.split(quoted)]) == config


def test_a_launched_process_gets_the_line_breaks_of_a_prompt():
    overrides = (f"data.prompt={PROMPT_TEXT}", "sft.epochs=2")

    words = Request(overrides=overrides).arguments

    assert words[-2:] == list(overrides)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "tiny", "pythia-1b"])
def test_an_override_needs_a_name_of_its_own(name):
    line = refusal_of(make_config, "tiny", name=name, overrides=("ppo.lam=0.5",))

    assert "NAME=" in line


def test_an_upstream_needs_a_name_of_its_own():
    line = refusal_of(make_config, "tiny", upstream="another")

    assert line == "UPSTREAM=another changes preset tiny: name the run with NAME=..."


@pytest.mark.parametrize("name", ["a/b", "..", ".", "cache", "judge_cache", "models", "reports"])
def test_a_name_is_one_folder_that_nothing_else_uses(name):
    line_about_name = refusal_of(make_config, "tiny", name=name)
    line_about_upstream = refusal_of(make_config, "tiny", name="mine", upstream=name)

    fix = "names no run: give the name of a folder, and none of bench"
    assert line_about_name.startswith(f"NAME={name} {fix}")
    assert line_about_upstream.startswith(f"UPSTREAM={name} {fix}")


def test_the_judge_and_memory_may_change_within_a_run():
    config = make_config("tiny", overrides=("judge.max_cost=2", "memory.microbatch_size=3"))

    assert config.name == "tiny"
    assert config.judge.max_cost == 2
    assert config.memory.microbatch_size == 3


def test_a_setting_next_to_those_of_the_judge_needs_a_name():
    line = refusal_of(make_config, "tiny", overrides=("judge.max_cost=2", "eval.posts=3"))

    assert line == "eval.posts=3 changes preset tiny: name the run with NAME=..."


# -- the list of all settings ----------------------------------------------------------------------


def test_every_line_of_the_list_is_an_override_with_the_current_value(runs):
    config = make_config("tiny")

    lines = settings_lines(config)

    overrides = [line for line in lines if line and not line.lstrip().startswith("#")]
    assert len(overrides) > 150
    for line in overrides:
        section, field, value = parse_override(line)
        assert value == getattr(getattr(config, section), field), line


def test_every_setting_is_listed_with_its_description():
    lines = settings_lines(override("ppo.kl_coef=0.1", f"data.prompt={PROMPT_TEXT}"))

    position = lines.index("ppo.kl_coef=0.1")
    assert lines[position + 1] == "  # Weight of the KL penalty, reward units per nat."
    assert f"data.prompt={PROMPT_TEXT}" in lines
    assert max(len(line) for line in lines if "# " in line) <= 80
