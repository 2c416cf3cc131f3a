"""Limits on lengths in tokens: which rows are refused, which are kept and counted.

Source: Huang et al. 2024, detail 4.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stages.config.sections import PROMPT
from stages.data.bad_rows import BadRowError
from stages.data.ragged import TokenizedSplit

FAR_OVER = 2  # another tokenizer may need a third more tokens for a text, but not twice as many
# Column of responses -> the field of the row that it comes from, for messages.
RESPONSE_FIELDS = {
    "summaries": "summary",
    "chosen": "summaries[].text",
    "rejected": "summaries[].text",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The longest query, response, and both together, in tokens, and what they depend on.

    A longer query is cut. The paper's data meet the other limits, as counted by its tokenizer; with
    today's, 27 of 1,945 real rows are 1 to 4 tokens longer. So a row over these limits is kept and
    counted, unless its response is more than FAR_OVER times as long as its limit.
    """

    query: int
    response: int
    query_response: int
    setting: str = ""
    """The setting of `response`, for messages; empty for articles, whose limits are constants."""
    sampled: int = 0
    """Number of tokens that a policy will sample after the query."""
    positions: int = sys.maxsize
    """Number of positions of the model."""
    first: tuple[int, ...] = ()
    """The tokens that begin each query and count toward its length: see `first_tokens`."""
    prompt: str = PROMPT
    """The template of a post's query."""
    chat_template: bool = False
    """Whether the tokenizer's chat template formats queries and responses."""


CNNDM_LIMITS = Limits(query=1919, response=155, query_response=2021)


def check_lengths(where: str, lengths: Mapping[str, int], limits: Limits) -> None:
    """Raise BadRowError for a response far over its limit, and for a row too long for the model.

    `lengths` maps `queries` and each column of responses to the row's number of tokens.
    """
    longest_response = limits.sampled
    for column, field in RESPONSE_FIELDS.items():
        if column not in lengths:
            continue
        length = lengths[column]
        longest_response = max(longest_response, length)
        if length > FAR_OVER * limits.response:
            limit = f"{limits.response} ({limits.setting or 'of news articles'})"
            fix = "shorten it, drop the row or raise the limit"
            if not limits.setting:
                fix = "shorten it or drop the row"
            raise BadRowError(
                where,
                f"field {field} has {length} tokens with EOS, more than {FAR_OVER} times the limit "
                f"{limit}: {fix}",
            )

    if lengths["queries"] + longest_response > limits.positions:
        raise BadRowError(
            where,
            f"the query has {lengths['queries']} tokens and its summary up to {longest_response}, "
            f"but the model has {limits.positions} positions: shorten or drop the row, or lower "
            "data.max_*",
        )


def length_report(split: TokenizedSplit) -> dict[str, int]:
    """The number of rows and the longest sequences of a split, for the manifest and the report."""
    queries = split.columns["queries"].lengths()  # [rows]
    report = {"rows": len(split), "longest_query": int(queries.max())}
    for column in RESPONSE_FIELDS:
        if column in split.columns:
            responses = split.columns[column].lengths()  # [rows]
            name = "summary" if column == "summaries" else column
            report[f"longest_{name}"] = int(responses.max())
            report[f"longest_query_{name}"] = int((queries + responses).max())
    return report


def count_over_limit(split: TokenizedSplit, limits: Limits) -> dict[str, int]:
    """`over_limit`: the number of rows over a limit; `most_over`: by how many tokens at most."""
    queries = split.columns["queries"].lengths()  # [rows]
    excess = torch.zeros(len(split), dtype=torch.long)
    for column in RESPONSE_FIELDS:
        if column in split.columns:
            responses = split.columns[column].lengths()  # [rows]
            excess = torch.maximum(excess, responses - limits.response)
            excess = torch.maximum(excess, queries + responses - limits.query_response)
    return {"over_limit": int((excess > 0).sum()), "most_over": int(excess.max())}
