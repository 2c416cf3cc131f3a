"""What summaries are like: closing questions, copied titles, special tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from eval.summaries import describe, make_rows
from reports.parts.sentences import unshown
from reports.scores import asks
from stages.config.sections import format_post
from stages.data.text_metrics import copied_title_words, distinct
from stages.models.tokenizers import load_tokenizer
from stages.rl.metrics import describe_special, describe_texts, summarize

POST = {
    "subreddit": "x",
    "title": "My cat",
    "post": "The cat sat on the mat. It purred, and I slept.",
}
QUERY = format_post(POST)


@pytest.mark.parametrize(
    ("text", "is_question"),
    [("Why?", 1), ('He said "why?" ', 1), ("Why? So.", 0), ("", 0), ("Why?)", 1)],
)
def test_a_question_counts_where_it_ends_the_summary(text, is_question):
    assert asks(text) == is_question


def test_training_says_nothing_of_copied_titles_where_no_prompt_shows_one():
    """It was 0 %, also on the curve."""
    decode = {"batch_decode": lambda texts, skip_special_tokens: texts}
    tokenizer: Any = SimpleNamespace(
        eos_token_id=0, pad_token_id=1, added_tokens_decoder={}, **decode
    )
    learner: Any = SimpleNamespace(accelerator=Accelerator(cpu=True))
    key, logged = "text/copied_title_words", []
    for queries in (["one two"], ["one two", QUERY]):
        rollout: Any = SimpleNamespace(queries=queries, responses=["cat"] * len(queries))
        logged.append(describe_texts(learner, rollout, tokenizer))
    assert [row.get(key) for row in logged] == [None, pytest.approx(1 / 2)]
    others = "objective/kl objective/scores policy/eos_rate policy/response_length"
    history = [dict.fromkeys(others.split(), 1.0) | row for row in logged]
    settings: Any = SimpleNamespace(batch_size=1)
    assert key not in summarize(history[:1], settings)
    assert summarize(history, settings)[key] == pytest.approx(1 / 2)


def test_special_tokens_that_no_summary_shows_are_counted(tokenizer_folder):
    """A policy ended all with <|im_end|> and then its EOS: score up, gold score down."""
    tokenizer = load_tokenizer(tokenizer_folder)
    learner: Any = SimpleNamespace(accelerator=Accelerator(cpu=True))
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    responses = torch.tensor([[5, 6, eos], [5, eos, pad], [5, 6, 7]])
    rollout: Any = SimpleNamespace(responses=responses)
    assert describe_special(learner, rollout, tokenizer) == {}  # it has no others
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    assert describe_special(learner, rollout, tokenizer) == {"text/special_tokens": 0.0}
    responses[0, 1] = tokenizer.convert_tokens_to_ids("<|im_end|>")
    shown = describe_special(learner, rollout, tokenizer)
    assert shown == {"text/special_tokens": pytest.approx(1 / 3)}
    # The same of held-out summaries, and of 0.33 the page warns.
    posts: Any = SimpleNamespace(rows=[{"id": 1, "query": QUERY, "reference": "cat"}] * 3)
    texts = {"ppo": responses.tolist(), "reference": [[5]] * 3}
    rows = make_rows(posts, texts, dict.fromkeys(texts, [0.0] * 3), "ppo", tokenizer)
    assert [row["special_tokens"] for row in rows] == [1, 0, 0]
    assert "im_end" not in rows[0]["summary"]
    share = describe([row | {"kl": 0.0} for row in rows])["special_tokens"]
    (line,) = unshown({"policies": ["sft", "ppo"], "ppo/special_tokens": share})
    assert line.startswith("33.3% of PPO's summaries hold special tokens beside the EOS")


def test_copied_words_are_those_of_the_title():
    query = "SUBREDDIT: r/x\n\nTITLE: My dog, my CAT\n\nPOST: the dog ran\n\nTL;DR:"
    assert copied_title_words(query, "a dog and my hamster ran") == pytest.approx(2 / 3)
    assert copied_title_words("no title here", "title") is None


def test_distinct_n_grams_are_counted_over_all_texts():
    assert distinct(["a b a", "b a"], 1) == pytest.approx(2 / 5)
    assert distinct(["a b a", "b a"], 2) == pytest.approx(2 / 3)
    assert distinct([""], 2) == 0
