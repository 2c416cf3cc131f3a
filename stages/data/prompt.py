"""The prompt: how a policy sees a post, and how a prompt that is too long is cut.

Source: Huang et al. 2024, detail 2; the truncation is a port of OpenAI's task code.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from stages.config.errors import UserError
from stages.config.sections import FIELDS
from stages.data.conversations import Message
from stages.data.formats import MESSAGES, WHOLE
from stages.data.schemas import info_of, is_cnndm
from stages.data.tables import Row

ARTICLE_TEMPLATE = "Article:\n{article}\n\nTL;DR:\n"
LONG_WORD = 32  # characters; few tokens are longer

Encode = Callable[[list[str]], list[list[int]]]
"""Texts -> the tokens of each."""


# -- encoding --------------------------------------------------------------------------------------


def first_tokens(
    tokenizer: PreTrainedTokenizerBase, bos: str, chat_template: bool = False
) -> tuple[int, ...]:
    """The tokens that begin each query: BOS or nothing, by the setting `base.bos`.

    With `auto` they are what the tokenizer, or its chat template, adds by default.
    Raises UserError for `always` if the tokenizer has no BOS token.
    """
    bos_id = tokenizer.bos_token_id
    if bos == "never":
        return ()
    if bos_id is None:
        if bos == "always":
            raise UserError("base.bos=always: the tokenizer has no BOS token: set base.bos=auto")
        return ()
    if chat_template:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        adds_bos = str(text).startswith(str(tokenizer.bos_token))
    else:
        adds_bos = tokenizer("a").input_ids[:1] == [bos_id]
    if bos == "always" or adds_bos:
        return (bos_id,)
    return ()


def plain_encoder(tokenizer: PreTrainedTokenizerBase, first: Sequence[int] = ()) -> Encode:
    """A function that encodes texts as plain text, each after the tokens `first`.

    A post that contains the letters `<|endoftext|>` or `[PAD]` gets no special token for them.
    """
    backend = tokenizer.backend_tokenizer
    # A tokenizer remembers how it last truncated and padded texts, even when it is saved.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True

    def encode(texts: list[str]) -> list[list[int]]:
        encodings = backend.encode_batch(texts, add_special_tokens=False)
        return [[*first, *encoding.ids] for encoding in encodings]

    return encode


# -- prompts ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A row's prompt: a template and what fills it."""

    template: str
    fields: dict[str, str]
    messages: Sequence[Message] = ()
    """The conversation, if the row has one: what a chat template formats."""
    shortened_field: str = ""
    """The field that is shortened if the prompt is too long.

    Empty for a whole prompt, which loses its beginning instead.
    """

    @property
    def text(self) -> str:
        """The filled template, without truncation."""
        return self.template.format(**self.fields)


def prompt_for(row: Row, template: str) -> Prompt:
    """The prompt of a post or comparison; `template` is the one for posts of the TL;DR schema."""
    info = info_of(row)
    is_comparison = "info" in row
    if is_comparison and is_cnndm(row):
        return Prompt(
            template=ARTICLE_TEMPLATE,
            fields={"article": info["article"]},
            shortened_field="article",
        )
    if info.get(WHOLE):
        return Prompt(
            template="{post}",
            fields={"post": info["post"]},
            messages=info.get(MESSAGES, ()),
        )
    return Prompt(
        template=template,
        fields={name: info[name] for name in FIELDS},
        shortened_field="post",
    )


# -- truncation ------------------------------------------------------------------------------------


def fit_query(
    encode: Callable[[str], list[int]],
    template: str,
    fields: dict[str, str],
    shortened_field: str,
    limit: int,
) -> tuple[str, list[int]]:
    """The filled template and its tokens, after shortening one field to at most `limit` tokens.

    The field is cut at its last newline at which the prompt fits. If there is none, its first line
    is cut after the last character at which the prompt fits. Title and subreddit are never cut.
    Raises ValueError if even the empty field leaves too many tokens.
    Source: Huang et al. 2024, detail 2, a port of OpenAI's task code.
    differs: the place is found by bisection instead of removing one line or character at a time.
    """
    text = fields[shortened_field]

    def fill(length: int) -> tuple[str, list[int]]:
        filled = template.format(**{**fields, shortened_field: text[:length]})
        return filled, encode(filled)

    def fits(length: int) -> bool:
        _, tokens = fill(length)
        return len(tokens) <= limit

    if fits(len(text)):
        return fill(len(text))
    newlines = [newline.start() for newline in re.finditer("\n", text)]
    length = longest_fitting(newlines, fits)
    if length is None:
        first_line_length = newlines[0] if newlines else len(text)
        length = longest_fitting(range(first_line_length), fits)
    if length is None:
        _, tokens = fill(0)
        raise ValueError(
            f"{len(tokens)} tokens remain with an empty {shortened_field}; the limit is {limit}"
        )
    return fill(length)


def keep_end(tokens: Sequence[int], first: Sequence[int], limit: int) -> list[int]:
    """The last tokens of a whole prompt, after `first`: the request is at the end of a prompt.

    Raises ValueError if `first` leaves no room.
    """
    room = limit - len(first)
    if room < 1:
        raise ValueError(f"BOS leaves no room for a prompt in {limit} token")
    return [*first, *tokens[-room:]]


def longest_fitting(lengths: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of these ascending lengths that fits, found by bisection; None if none fits."""
    fitting = bisect_left(lengths, True, key=lambda length: not fits(length))

    # Bisection assumes that a longer text has at least as many tokens. But one more letter can
    # complete a token that replaces several, so lengths up to a long word beyond are tried, too.
    for length in reversed(lengths[fitting : fitting + LONG_WORD]):
        if fits(length):
            return length
    if fitting == 0:
        return None
    return lengths[fitting - 1]
