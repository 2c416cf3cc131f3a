"""Metrics of the texts that a policy writes in training."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from stages.config.sections import format_post
from stages.models.tokenizers import load_tokenizer
from stages.rl.metrics import describe_special, describe_texts, summarize

QUERY = format_post({"subreddit": "x", "title": "My cat", "post": "The cat sat on the mat."})
COPIED = "text/copied_title_words"


@pytest.fixture
def learner() -> Any:
    return SimpleNamespace(accelerator=Accelerator(cpu=True))


def texts_of(learner, queries):
    """The metrics of responses that say "cat"."""
    tokenizer: Any = SimpleNamespace(
        eos_token_id=0,
        pad_token_id=1,
        added_tokens_decoder={},
        batch_decode=lambda texts, skip_special_tokens: texts,
    )
    rollout: Any = SimpleNamespace(queries=queries, responses=["cat"] * len(queries))
    return describe_texts(learner, rollout, tokenizer)


def test_copied_titles_are_counted_only_where_a_prompt_shows_one(learner):
    assert COPIED not in texts_of(learner, ["one two"])
    assert texts_of(learner, ["one two", QUERY])[COPIED] == pytest.approx(1 / 2)


def test_copied_titles_are_averaged_over_the_updates_that_have_them(learner):
    other_metrics = {
        "objective/kl": 1.0,
        "objective/scores": 1.0,
        "policy/eos_rate": 1.0,
        "policy/response_length": 1.0,
    }
    without_title = texts_of(learner, ["one two"]) | other_metrics
    with_title = texts_of(learner, ["one two", QUERY]) | other_metrics
    settings: Any = SimpleNamespace(batch_size=1)

    assert COPIED not in summarize([without_title], settings)
    assert summarize([without_title, with_title], settings)[COPIED] == pytest.approx(1 / 2)


def test_special_tokens_other_than_eos_are_counted(learner, tokenizer_folder):
    """A policy can end every summary with <|im_end|> before its EOS, which no text shows."""
    tokenizer = load_tokenizer(tokenizer_folder)
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    responses = torch.tensor([[5, 6, eos], [5, eos, pad], [5, 6, 7]])
    rollout: Any = SimpleNamespace(responses=responses)

    assert describe_special(learner, rollout, tokenizer) == {}  # the tokenizer has none
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    assert describe_special(learner, rollout, tokenizer) == {"text/special_tokens": 0.0}
    responses[0, 1] = tokenizer.convert_tokens_to_ids("<|im_end|>")
    share = describe_special(learner, rollout, tokenizer)["text/special_tokens"]
    assert share == pytest.approx(1 / 3)
