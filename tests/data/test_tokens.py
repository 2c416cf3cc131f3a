"""Posts and comparisons become tokens: queries, summaries with EOS, and the facts of each row."""

import pytest

from stages.config.errors import UserError
from stages.config.sections import format_post
from stages.data.bad_rows import BadRows
from stages.data.lengths import CNNDM_LIMITS
from stages.data.tokens import tokenize_comparisons, tokenize_posts
from tests.lib.rows import ARTICLE, EMPTY_PAIR, LIMITS, PAIR, POST, edited, without

# -- posts -----------------------------------------------------------------------------------------


def test_summaries_get_one_leading_space_and_one_eos(tokenizer):
    split = tokenize_posts([("x:1", POST)], tokenizer, LIMITS, "posts")
    assert tokenizer.decode(split.columns["queries"][0]) == format_post(POST)
    summary = split.columns["summaries"][0].tolist()
    assert tokenizer.decode(summary) == " My boss sold my bike.<|endoftext|>"
    assert summary.count(tokenizer.eos_token_id) == 1


def test_a_summary_with_a_leading_space_gets_no_second_one(tokenizer):
    spaced = POST | {"summary": " " + POST["summary"]}
    split = tokenize_posts([("f:1", POST), ("f:2", spaced)], tokenizer, LIMITS, "posts")
    summaries = split.columns["summaries"]
    assert summaries[0].tolist() == summaries[1].tolist()


def test_rows_of_posts_keep_id_title_and_texts(tokenizer):
    split = tokenize_posts([("x:1", POST)], tokenizer, LIMITS, "posts")
    assert split.rows == [
        {"id": "a1", "title": "my bike", "query": format_post(POST), "reference": POST["summary"]}
    ]


def test_ppo_train_has_only_queries(tokenizer):
    rows = [("x:1", without(POST, "summary"))]
    split = tokenize_posts(rows, tokenizer, LIMITS, "ppo_train")
    assert set(split.columns) == {"queries"}
    assert split.rows == [{"id": "a1", "title": "my bike", "query": format_post(POST)}]


def test_special_tokens_written_in_a_post_are_text(tokenizer):
    text = "a<|endoftext|>b [PAD]"
    post = POST | {"post": text, "summary": text}

    split = tokenize_posts([("x:1", post)], tokenizer, LIMITS, "posts")

    query = split.columns["queries"][0].tolist()
    summary = split.columns["summaries"][0].tolist()
    assert tokenizer.eos_token_id not in query
    assert tokenizer.pad_token_id not in query
    assert summary.index(tokenizer.eos_token_id) == len(summary) - 1
    assert split.rows[0]["query"] == format_post(POST | {"post": text})


# -- comparisons -----------------------------------------------------------------------------------


def decoded(tokenizer, column):
    return [tokenizer.decode(column[row]) for row in range(len(column))]


def test_chosen_is_the_summary_that_choice_names(tokenizer):
    first_chosen = edited(PAIR | {"choice": 0}, "summaries.0.text", "one is better")
    rows = [("x:1", PAIR), ("x:2", first_chosen)]
    split = tokenize_comparisons(rows, tokenizer, LIMITS, "pairs")
    assert decoded(tokenizer, split.columns["chosen"]) == [
        " two<|endoftext|>",
        " one is better<|endoftext|>",
    ]
    assert decoded(tokenizer, split.columns["rejected"]) == [
        " one is better<|endoftext|>",
        " two<|endoftext|>",
    ]


def test_rows_of_comparisons_keep_the_groups_of_the_accuracy(tokenizer):
    split = tokenize_comparisons([("x:1", PAIR)], tokenizer, LIMITS, "pairs")
    assert split.rows == [
        {
            "id": "a1",
            "split": "valid2",
            "batch": "batch3",
            "strength": 3,
            "policies": "ref--sup1",
        }
    ]


def test_an_empty_compared_summary_becomes_eos_alone(tokenizer):
    split = tokenize_comparisons([("x:1", EMPTY_PAIR)], tokenizer, LIMITS, "pairs")
    assert split.columns["chosen"][0].tolist() == [tokenizer.eos_token_id]
    assert decoded(tokenizer, split.columns["rejected"]) == [" one is better<|endoftext|>"]


def test_a_compared_summary_of_one_space_stays_as_it_is(tokenizer):
    blank = edited(PAIR, "summaries.1.text", " ")
    split = tokenize_comparisons([("x:1", blank)], tokenizer, LIMITS, "pairs")
    assert decoded(tokenizer, split.columns["chosen"]) == [" <|endoftext|>"]


def test_news_articles_have_their_own_prompt(tokenizer):
    split = tokenize_comparisons([("x:1", ARTICLE)], tokenizer, CNNDM_LIMITS, "news")
    # The template ends in a newline; what is scored is the stripped query and the summary.
    assert decoded(tokenizer, split.columns["queries"]) == ["Article:\nNews.\nMore.\n\nTL;DR:"]


# -- rows that cannot be used ----------------------------------------------------------------------


def test_a_split_without_a_usable_row_is_refused(tokenizer):
    too_long = POST | {"title": "x " * 400}
    with pytest.raises(UserError, match="has no usable row, the first: field post"):
        tokenize_posts([("f:1", too_long)], tokenizer, LIMITS, "posts", BadRows("skip"))
