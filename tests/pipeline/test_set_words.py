"""SET holds several settings in one word, and a value may hold spaces; a prompt, line breaks."""

import re
import shlex

import pytest

from stages.config.command_line import (
    Request,
    add_arguments,
    config_from_arguments,
    make_config,
    request_of,
)
from stages.config.config import override_of
from stages.config.faults import Parser
from stages.pipeline.variables import settings_lines
from stages.runs.manifest import make_command
from tests.lib.pipeline import typed

PROMPT = "r/{subreddit}\n\n# {title}\n{post}\n\nTL;DR:"
WRITTEN = r"r/{subreddit}\n\n# {title}\n{post}\n\nTL;DR:"


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
    parser = Parser()
    add_arguments(parser)
    assert request_of(parser.parse_args(["--set", *words])).overrides == tuple(overrides)


def test_a_value_with_spaces_comes_through_make(tmp_path):
    (tmp_path / "my posts").mkdir()
    words = "SET=data.source=my posts  judge.kind=openai judge.model=a  b"
    printed = typed(tmp_path, "settings", "NAME=x", words)
    assert printed.stderr == ""
    expected = {"data.source=my posts", "judge.kind=openai", "judge.model=a  b"}
    assert expected <= {*printed.stdout.splitlines()}


def test_a_prompt_has_line_breaks_where_it_says_so_and_every_command_repeats_them(runs, tmp_path):
    text = f"data.prompt={WRITTEN}"
    assert override_of(text) == ("data", "prompt", PROMPT)
    made = make_config("tiny", name="mine", overrides=(text, "sft.epochs=2"))
    assert made.data.prompt == PROMPT
    assert text in settings_lines(made)
    (again,) = re.findall(r"SET=('[^']*')", make_command(made, "sft"))
    given = config_from_arguments(["--name", "mine", "--set", *shlex.split(again)], "")
    assert given == made
    assert Request(overrides=made.overrides).arguments[-2:] == [text, "sft.epochs=2"]
    printed = typed(tmp_path, "settings", "NAME=x", f"SET={text} sft.epochs=2")
    assert {text, "sft.epochs=2"} <= {*printed.stdout.splitlines()}


def test_every_setting_that_is_shown_can_be_given_back(runs):
    config = make_config("tiny")
    for line in settings_lines(config):
        section, name, value = override_of(line)
        assert value == getattr(getattr(config, section), name), line
