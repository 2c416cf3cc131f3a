"""Rows over a limit are kept and counted; those far over it, or too long for the model, are not."""

from dataclasses import replace
from typing import Any

import pytest

from stages.config.sections import format_post
from stages.data.lengths import CNNDM_LIMITS, Limits, count_over_limit, length_report
from stages.data.prompt import plain_encoder
from stages.data.tokens import tokenize_comparisons, tokenize_posts
from tests.lib.asserts import refusal_of
from tests.lib.rows import ARTICLE, LIMITS, PAIR, POST, edited

SHORT_POST = POST | {"summary": "y"}
POSTS = [("f:1", SHORT_POST), ("f:2", POST)]


def limits(**changed: Any) -> Limits:
    return replace(LIMITS, **changed)


@pytest.fixture
def split(tokenizer):
    """POSTS in tokens."""
    return tokenize_posts(POSTS, tokenizer, LIMITS, "posts")


@pytest.fixture
def summary_length(tokenizer) -> int:
    """The tokens of the longest summary of POSTS, with its leading space and EOS."""
    return len(plain_encoder(tokenizer)([" " + POST["summary"]])[0]) + 1


@pytest.fixture
def query_length(tokenizer) -> int:
    return len(plain_encoder(tokenizer)([format_post(POST)])[0])


# -- counting --------------------------------------------------------------------------------------


def test_lengths_count_the_eos(split, query_length, summary_length):
    assert length_report(split) == {
        "rows": 2,
        "longest_query": query_length,
        "longest_summary": summary_length,
        "longest_query_summary": query_length + summary_length,
    }


def test_rows_at_a_limit_are_not_over_it(split, query_length, summary_length):
    exact = limits(response=summary_length, query_response=query_length + summary_length)
    assert count_over_limit(split, exact) == {"over_limit": 0, "most_over": 0}


def test_a_summary_over_its_limit_is_kept_and_counted(tokenizer, summary_length):
    small = limits(response=summary_length - 2)
    split = tokenize_posts(POSTS, tokenizer, small, "posts")
    assert len(split) == 2
    assert count_over_limit(split, small) == {"over_limit": 1, "most_over": 2}


def test_query_and_summary_over_their_limit_are_kept_and_counted(
    tokenizer, query_length, summary_length
):
    small = limits(query_response=query_length + summary_length - 2)
    split = tokenize_posts(POSTS, tokenizer, small, "posts")
    assert len(split) == 2
    assert count_over_limit(split, small) == {"over_limit": 1, "most_over": 2}


def test_both_compared_summaries_count(tokenizer):
    split = tokenize_comparisons([("f:9", PAIR)], tokenizer, LIMITS, "pairs")
    longest = length_report(split)["longest_rejected"]  # " one is better" is longer than " two"
    counts = count_over_limit(split, limits(response=longest - 1))
    assert counts == {"over_limit": 1, "most_over": 1}


def test_a_query_over_its_limit_is_cut(tokenizer, query_length):
    small = limits(query=query_length - 1)
    split = tokenize_posts([("f:2", POST)], tokenizer, small, "posts")
    assert split.rows[0]["query"] == format_post(POST | {"post": "First part."})


# -- articles --------------------------------------------------------------------------------------


def test_articles_have_the_papers_limits():
    assert Limits(query=1919, response=155, query_response=2021) == CNNDM_LIMITS


LINES = "line\n" * 50
LONG_ARTICLE = [("f:1", edited(ARTICLE, "info.article", LINES))]


def test_the_newline_after_an_article_counts_toward_the_query(source_tokenizer):
    encode = plain_encoder(source_tokenizer)
    [query, query_with_newline] = encode(
        [f"Article:\n{LINES}\n\nTL;DR:", f"Article:\n{LINES}\n\nTL;DR:\n"]
    )
    assert len(query_with_newline) == len(query) + 1

    exact = replace(CNNDM_LIMITS, query=len(query_with_newline))
    split = tokenize_comparisons(LONG_ARTICLE, source_tokenizer, exact, "news")
    assert split.columns["queries"][0].tolist() == query

    shorter = replace(CNNDM_LIMITS, query=len(query))
    split = tokenize_comparisons(LONG_ARTICLE, source_tokenizer, shorter, "news")
    assert len(split.columns["queries"][0]) < len(query)


def test_the_newline_after_an_article_does_not_count_toward_both_together(source_tokenizer):
    """Huang et al. 2024 cut the whole template, and measure 2021 on query.strip() + response."""
    encode = plain_encoder(source_tokenizer)
    [query, response] = encode([f"Article:\n{LINES}\n\nTL;DR:", " one is better"])
    both = len(query) + len(response) + 1  # with EOS

    split = tokenize_comparisons(LONG_ARTICLE, source_tokenizer, CNNDM_LIMITS, "news")

    exact = replace(CNNDM_LIMITS, query_response=both)
    assert count_over_limit(split, exact)["over_limit"] == 0
    shorter = replace(CNNDM_LIMITS, query_response=both - 1)
    assert count_over_limit(split, shorter)["most_over"] == 1


# -- rows that cannot be used ----------------------------------------------------------------------


def refusal(tokenizer, small: Limits) -> str:
    line = refusal_of(tokenize_posts, POSTS, tokenizer, small, "posts")
    assert "data.on_bad_row=skip" in line
    return line


def test_a_post_that_cannot_be_cut_to_fit_is_refused(tokenizer):
    line = refusal(tokenizer, limits(query=5))
    assert line.startswith("f:1: field post cannot be cut to fit")


def test_a_summary_over_twice_its_limit_is_refused_with_the_setting(tokenizer, summary_length):
    half = (summary_length - 1) // 2
    line = refusal(tokenizer, limits(response=half, setting="data.max_summary_tokens"))
    assert line.startswith(
        f"f:2: field summary has {summary_length} tokens with EOS, more than 2 times the limit "
        f"{half} (data.max_summary_tokens)"
    )


def test_a_compared_summary_over_twice_its_limit_is_refused(tokenizer):
    pairs = [("f:9", PAIR)]
    line = refusal_of(tokenize_comparisons, pairs, tokenizer, limits(response=1), "pairs")
    assert "f:9: field summaries[].text has" in line


def test_rows_must_fit_into_the_models_positions(tokenizer, query_length, summary_length):
    both = query_length + summary_length
    assert len(tokenize_posts(POSTS, tokenizer, limits(positions=both), "posts")) == 2

    line = refusal(tokenizer, limits(positions=both - 1))
    assert line.startswith("f:2: ")
    assert f"the model has {both - 1} positions" in line


def test_sampled_tokens_must_fit_into_the_models_positions(tokenizer, query_length):
    exact = limits(positions=query_length + 90, sampled=90)
    assert len(tokenize_posts(POSTS, tokenizer, exact, "posts")) == 2

    line = refusal(tokenizer, limits(positions=query_length + 89, sampled=90))
    assert f"up to 90, but the model has {query_length + 89} positions" in line
