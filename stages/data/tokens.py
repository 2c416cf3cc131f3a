"""Text in, tokens out: the prompt, truncation and the splits that stages read.

Source: Huang et al. 2024, details 2 to 5; the truncation is OpenAI's.
"""

import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from stages.data.bad_rows import BadRowError, BadRows
from stages.data.formats import MORE, WHOLE, post_text
from stages.data.ragged import Ragged, TokenizedSplit, make_ragged
from stages.data.readers import Located, is_cnndm, label_strength
from stages.data.text_metrics import first_ids
from stages.running.progress import progress
from stages.settings.checks import UserError
from stages.settings.sections import FIELDS, PPO_TRAIN, PROMPT

ARTICLE_TEMPLATE = "Article:\n{article}\n\nTL;DR:\n"
ENCODE_BATCH = 1000
TEXTS = {"summaries": "summary", "chosen": "summaries[].text", "rejected": "summaries[].text"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Longest query, response and both together, in tokens.

    A longer query is cut. The others are what the paper's data hold as its tokenizer counted them:
    27 of 1,945 real rows are 1 to 4 tokens longer now. So a row over them is kept and counted, but
    for a response of more than FAR_OVER times its limit.
    """

    query: int
    response: int
    query_response: int
    setting: str = ""
    """The setting of `response`, for messages; empty for articles, whose limits are constants."""
    sampled: int = 0
    """Tokens that a policy will sample after the query."""
    positions: int = sys.maxsize
    """Tokens that the model can take."""
    first: tuple[int, ...] = ()
    """What begins each query, and counts for its length: see `first_tokens`."""
    prompt: str = PROMPT
    """The template of a post's query."""


CNNDM_LIMITS = Limits(query=1919, response=155, query_response=2021)
LONG_WORD = 32  # characters; few tokens are longer
FAR_OVER = 2  # another tokenizer may need a third more tokens for the same text, not twice as many


# -- prompt and truncation -------------------------------------------------------------------------


def fit_query(
    encode: Callable[[str], list[int]], template: str, fields: dict[str, str], cut: str, limit: int
) -> tuple[str, list[int]]:
    """The filled template and its tokens; the field `cut` is shortened until they are at most
    `limit`.

    The field is cut at its last newline after which it fits, or else after its last such character.
    Title and subreddit are never cut. Raises ValueError where even the empty field leaves too many
    tokens. Source: Huang et al. 2024, detail 2, a port of OpenAI's task code.
    differs: that place is found by halving (`_longest`), not by taking off one at a time.
    """
    text = fields[cut]

    def fill(length: int) -> tuple[str, list[int]]:
        filled = template.format(**{**fields, cut: text[:length]})
        return filled, encode(filled)

    def fits(length: int) -> bool:
        return len(fill(length)[1]) <= limit

    length: int | None = len(text)
    if not fits(len(text)):
        newlines = [newline.start() for newline in re.finditer("\n", text)]
        length = _longest(newlines, fits)
        if length is None:
            length = _longest(range(newlines[0] if newlines else len(text)), fits)
    if length is None:
        left = len(fill(0)[1])
        raise ValueError(f"{left} tokens remain with an empty {cut}; the limit is {limit}")
    return fill(length)


def _longest(lengths: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The last of some rising lengths that fits, found by halving; None if none does.

    One letter more can be a token less, so the lengths up to a long word beyond are tried too.
    """
    first = bisect_left(lengths, True, key=lambda length: not fits(length))
    longer = reversed(lengths[first : first + LONG_WORD])
    best = next((length for length in longer if fits(length)), None)
    return lengths[first - 1] if best is None and first else best


def first_tokens(tokenizer: PreTrainedTokenizerBase, bos: str) -> tuple[int, ...]:
    """BOS, where the setting `base.bos` or, by `auto`, the tokenizer's own default adds it.

    Raises UserError where it is asked for and the tokenizer has none.
    """
    token = tokenizer.bos_token_id
    if bos == "always" and token is None:
        raise UserError("base.bos=always: the tokenizer has no BOS token: leave it out")
    adds = token is not None and tokenizer("a").input_ids[:1] == [token]
    return (token,) if bos == "always" or (bos == "auto" and adds) else ()


def plain_encoder(
    tokenizer: PreTrainedTokenizerBase, first: Sequence[int] = ()
) -> Callable[[list[str]], list[list[int]]]:
    """Encodes texts as plain text: `<|endoftext|>` or `[PAD]` written in a post is no token.

    Each begins with the tokens `first`. A tokenizer keeps how it last cut and padded texts, also
    when it is saved. Here it does neither.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True

    def encode(texts: list[str]) -> list[list[int]]:
        encodings = backend.encode_batch(texts, add_special_tokens=False)
        return [[*first, *encoding.ids] for encoding in encodings]

    return encode


# -- tokenising ------------------------------------------------------------------------------------


def tokenize_posts(
    located: list[Located],
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    label: str,
    bad: BadRows | None = None,
) -> TokenizedSplit:
    """Queries and summaries of one split, each summary with a leading space and EOS.

    Rows keep id, title, query and reference text. Where the rows have no summary (split
    `ppo_train`), queries alone. `bad` notes the rows that are skipped. Raises UserError for a post
    that cannot be cut to fit, for a summary far over its limit and for more tokens than the model
    has positions, unless such rows are skipped.
    """
    bad = bad or BadRows("stop")
    encode = plain_encoder(tokenizer)
    located, queries = _encode_queries(located, tokenizer, limits, label, bad)
    columns = {"queries": queries}
    if label != PPO_TRAIN:
        texts = [_with_leading_space(row["summary"]) for _, row in located]
        columns["summaries"] = [[*tokens, tokenizer.eos_token_id] for tokens in encode(texts)]
    kept, ragged = _fitting(located, columns, limits, label, bad)
    decoded = tokenizer.batch_decode([queries[index][len(limits.first) :] for index in kept])
    rows = [_post_facts(located[index][1], text) for index, text in zip(kept, decoded, strict=True)]
    return TokenizedSplit(columns=ragged, rows=rows)


def tokenize_comparisons(
    located: list[Located],
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    label: str,
    bad: BadRows | None = None,
) -> TokenizedSplit:
    """Queries and both summaries (chosen, rejected) of one split.

    Rows keep the groups by which accuracy is reported, and as `post` the first id with their post
    if that is another one than theirs. Raises UserError as `tokenize_posts` does.
    """
    bad = bad or BadRows("stop")
    encode = plain_encoder(tokenizer)
    located, queries = _encode_queries(located, tokenizer, limits, label, bad)
    columns = {"queries": queries}
    for name, flip in (("chosen", 0), ("rejected", 1)):
        texts = [row["summaries"][row["choice"] ^ flip]["text"] for _, row in located]
        texts = [_with_leading_space(text) for text in texts]
        columns[name] = [[*tokens, tokenizer.eos_token_id] for tokens in encode(texts)]
    kept, ragged = _fitting(located, columns, limits, label, bad)
    rows = [located[index][1] for index in kept]
    posts = first_ids((row["info"]["id"], post_text(row)) for row in rows)
    about = [_comparison_facts(row, post) for row, post in zip(rows, posts, strict=True)]
    return TokenizedSplit(columns=ragged, rows=about)


def _with_leading_space(text: str) -> str:
    """A summary as the real compared ones are written: they begin with a space.

    An empty text stays empty, so that its response is EOS alone. Huang et al. 2024 add EOS to the
    text as it is (detail 3), and a policy that samples EOS first gives the same tokens.
    """
    return text if not text or text.startswith(" ") else " " + text


def _post_facts(row: dict[str, Any], query: str) -> dict[str, Any]:
    facts = {"id": row["id"], "title": row["title"], "query": query, **row.get(MORE, {})}
    return facts | ({"reference": row["summary"].strip()} if row.get("summary") else {})


def _comparison_facts(row: dict[str, Any], post: str) -> dict[str, Any]:
    policies = sorted(summary["policy"] for summary in row["summaries"])
    return {
        "id": row["info"]["id"],
        **({} if row["info"]["id"] == post else {"post": post}),
        "split": row["split"],
        "batch": row["batch"],
        "strength": label_strength(row),
        "policies": "--".join(policies),
    }


def _encode_queries(
    located: list[Located],
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    label: str,
    bad: BadRows,
) -> tuple[list[Located], list[list[int]]]:
    """The rows whose query can be cut to fit, and its tokens."""
    encode = plain_encoder(tokenizer, limits.first)
    fitting, queries = [], []
    chunks = [located[i : i + ENCODE_BATCH] for i in range(0, len(located), ENCODE_BATCH)]
    for chunk in progress(chunks, f"tokenise {label}", len(chunks)):
        parts = [_template_of(row, limits.prompt) for _, row in chunk]
        filled = [template.format(**fields) for template, fields, _ in parts]
        every = zip(chunk, parts, filled, encode(filled), strict=True)
        for (where, row), part, text, tokens in every:
            with bad.of(label):
                if len(tokens) > limits.query:
                    text, tokens = _cut(where, part, encode, limits)
                # What is scored is `query.strip() + response` (Huang et al. 2024): the template of
                # an article ends in a newline, which counts for the limit of the query alone.
                queries.append(encode([text.strip()])[0] if text.endswith("\n") else tokens)
                fitting.append((where, row))
    return fitting, queries


def _cut(
    where: str,
    part: tuple[str, dict[str, str], str],
    encode: Callable[[list[str]], list[list[int]]],
    limits: Limits,
) -> tuple[str, list[int]]:
    template, fields, cut = part
    if cut == WHOLE:  # its end says what is asked for
        room = limits.query - len(limits.first)
        return "", [*limits.first, *encode([fields["post"]])[0][-room:]]
    try:
        return fit_query(lambda text: encode([text])[0], template, fields, cut, limits.query)
    except ValueError as error:
        mend = "drop the row, or shorten its title (data.max_query_tokens)"
        raise BadRowError(where, f"field {cut} cannot be cut to fit: {error}: {mend}") from None


def _template_of(row: dict[str, Any], prompt: str) -> tuple[str, dict[str, str], str]:
    """The template of a row's query, what fills it, and the field that is cut."""
    info = row.get("info", row)
    if "info" in row and is_cnndm(row):
        return ARTICLE_TEMPLATE, {"article": info["article"]}, "article"
    if info.get(WHOLE):
        return "{post}", {"post": info["post"]}, WHOLE
    return prompt, {name: info[name] for name in FIELDS}, "post"


def _fitting(
    located: list[Located],
    columns: dict[str, list[list[int]]],
    limits: Limits,
    label: str,
    bad: BadRows,
) -> tuple[list[int], dict[str, Ragged]]:
    """The rows that are not far over the limit of a response and that the model can take, and their
    columns.
    """
    kept = []
    for index, (where, _) in enumerate(located):
        with bad.of(label):
            lengths = {name: len(column[index]) for name, column in columns.items()}
            _check_lengths(where, lengths, limits)
            kept.append(index)
    if not kept:
        first = f", the first: {bad.skipped[0]['reason']}" if bad.skipped else ""
        raise UserError(f"split {label}: no row is left that can be used{first}")
    ragged = {name: make_ragged(rows[row] for row in kept) for name, rows in columns.items()}
    return kept, ragged


def _check_lengths(where: str, lengths: dict[str, int], limits: Limits) -> None:
    responses = {name: length for name, length in lengths.items() if name != "queries"}
    for name, length in responses.items():
        if length > FAR_OVER * limits.response:
            limit = f"{limits.response} ({limits.setting or 'of news articles'})"
            far = f"has {length} tokens with EOS, more than {FAR_OVER} times the limit {limit}"
            mend = ", drop the row or raise the limit" if limits.setting else " or drop the row"
            raise BadRowError(where, f"field {TEXTS[name]} {far}: shorten it{mend}")
    longest = max(limits.sampled, *responses.values(), 0)
    if lengths["queries"] + longest > limits.positions:
        raise BadRowError(
            where,
            f"the query has {lengths['queries']} tokens and its summary up to {longest}, the model "
            f"has {limits.positions} positions: shorten or drop the row, or lower data.max_*",
        )


def length_report(split: TokenizedSplit) -> dict[str, int]:
    """Rows and longest sequences of a split, in tokens, for the manifest and the report."""
    queries = split.columns["queries"].lengths()
    report = {"rows": len(split), "longest_query": int(queries.max())}
    for name in TEXTS:
        if name in split.columns:
            responses = split.columns[name].lengths()
            label = "summary" if name == "summaries" else name
            report[f"longest_{label}"] = int(responses.max())
            report[f"longest_query_{label}"] = int((queries + responses).max())
    return report


def over_limit(split: TokenizedSplit, limits: Limits) -> dict[str, int]:
    """How many rows are over a limit, and by how many tokens at most."""
    queries = split.columns["queries"].lengths()
    over = torch.zeros(len(split), dtype=torch.long)
    for name in TEXTS:
        if name in split.columns:
            responses = split.columns[name].lengths()
            over = torch.maximum(over, responses - limits.response)
            over = torch.maximum(over, queries + responses - limits.query_response)
    return {"over_limit": int((over > 0).sum()), "most_over": int(over.max())}
