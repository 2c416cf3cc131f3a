"""Text in, tokens out: the prompt, truncation, tokenised splits, padding.

Tokens are kept ragged and padded only when a batch is made, so no result depends on padding.
Source: Huang et al. 2024, details 2 to 5 and appendix on data; the truncation is OpenAI's.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages.posts.readers import POST_TEMPLATE, Located, is_cnndm
from stages.settings.config import UserError
from stages.system.files import read_lines
from stages.system.progress import progress

CNNDM = "comparisons_cnndm"
ARTICLE_TEMPLATE = "Article:\n{article}\n\nTL;DR:\n"
ENCODE_BATCH = 1000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Longest query, response and both together, in tokens."""

    query: int
    response: int
    query_response: int


CNNDM_LIMITS = Limits(query=1919, response=155, query_response=2021)


@dataclass(frozen=True)
class Ragged:
    """Token sequences of different lengths, laid end to end."""

    tokens: Tensor
    """[sum of lengths] int32."""
    offsets: Tensor
    """[sequences + 1] int64; sequence i is tokens[offsets[i]:offsets[i + 1]]."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].long()

    def lengths(self) -> Tensor:
        """Tokens of each sequence, [sequences] int64."""
        return self.offsets.diff()


@dataclass(frozen=True, kw_only=True)
class TokenizedSplit:
    """One split: token columns of equal length, and what is known of each row beside tokens."""

    columns: dict[str, Ragged]
    rows: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.rows)


# -- prompt and truncation -------------------------------------------------------------------------


def query_tokens(
    encode: Callable[[str], list[int]], template: str, fields: dict[str, str], cut: str, limit: int
) -> list[int]:
    """Tokens of the filled template; its field `cut` is shortened until they are at most `limit`.

    The field is cut at its last newline, or loses one character where it has none; then everything
    is encoded again. Title and subreddit are never cut. Raises ValueError where even the empty
    field leaves too many tokens. Source: Huang et al. 2024, detail 2, a port of OpenAI's task code.
    """
    fields = dict(fields)
    tokens = encode(template.format(**fields))
    while len(tokens) > limit:
        text = fields[cut]
        if not text:
            raise ValueError(
                f"{len(tokens)} tokens remain with an empty {cut}; the limit is {limit}"
            )
        newline = text.rfind("\n")
        fields[cut] = text[:newline] if newline >= 0 else text[:-1]
        tokens = encode(template.format(**fields))
    return tokens


def plain_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[str]], list[list[int]]]:
    """Encodes texts as plain text: `<|endoftext|>` or `[PAD]` written in a post is no token."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True

    def encode(texts: list[str]) -> list[list[int]]:
        return [one.ids for one in backend.encode_batch(texts, add_special_tokens=False)]

    return encode


# -- tokenising ------------------------------------------------------------------------------------


def tokenize_posts(
    located: list[Located], tokenizer: PreTrainedTokenizerBase, limits: Limits, label: str
) -> TokenizedSplit:
    """Queries and " " + summary + EOS of one split; rows keep id, title, query and reference text.

    Raises UserError for a post that cannot be cut to fit and for a summary over its limit.
    """
    encode = plain_encoder(tokenizer)
    queries = _encode_queries(located, encode, limits, label)
    texts = [" " + row["summary"] for _, row in located]
    summaries = _encode_responses(texts, located, encode, tokenizer.eos_token_id, limits, "summary")
    _check_joint(located, queries, summaries, limits, "summary")
    rows = [
        {"id": row["id"], "title": row["title"], "query": text, "reference": row["summary"].strip()}
        for (_, row), text in zip(located, tokenizer.batch_decode(queries), strict=True)
    ]
    columns = {"queries": make_ragged(queries), "summaries": make_ragged(summaries)}
    return TokenizedSplit(columns=columns, rows=rows)


def tokenize_comparisons(
    located: list[Located], tokenizer: PreTrainedTokenizerBase, limits: Limits, label: str
) -> TokenizedSplit:
    """Queries and both summaries (chosen, rejected) of one split.

    Rows keep the groups by which accuracy is reported. Raises UserError as `tokenize_posts` does.
    """
    encode = plain_encoder(tokenizer)
    queries = _encode_queries(located, encode, limits, label)
    columns = {"queries": make_ragged(queries)}
    for name, flip in (("chosen", 0), ("rejected", 1)):
        texts = [row["summaries"][row["choice"] ^ flip]["text"] for _, row in located]
        texts = [_with_leading_space(text) for text in texts]
        field = "summaries[].text"
        found = _encode_responses(texts, located, encode, tokenizer.eos_token_id, limits, field)
        _check_joint(located, queries, found, limits, field)
        columns[name] = make_ragged(found)
    rows = [_comparison_facts(row) for _, row in located]
    return TokenizedSplit(columns=columns, rows=rows)


def _with_leading_space(text: str) -> str:
    """A compared text as the real ones are written: they begin with a space.

    An empty text stays empty, so that its response is EOS alone. Huang et al. 2024 add EOS to the
    text as it is (detail 3), and a policy that samples EOS first gives the same tokens.
    """
    return text if not text or text.startswith(" ") else " " + text


def _comparison_facts(row: dict[str, Any]) -> dict[str, Any]:
    policies = sorted(summary["policy"] for summary in row["summaries"])
    return {
        "id": row["info"]["id"],
        "split": row["split"],
        "batch": row["batch"],
        "confidence": (row.get("extra") or {}).get("confidence"),
        "policies": "--".join(policies),
    }


def _encode_queries(
    located: list[Located],
    encode: Callable[[list[str]], list[list[int]]],
    limits: Limits,
    label: str,
) -> list[list[int]]:
    queries = []
    chunks = [located[i : i + ENCODE_BATCH] for i in range(0, len(located), ENCODE_BATCH)]
    for chunk in progress(chunks, f"tokenise {label}", len(chunks)):
        filled = [_template_of(row) for _, row in chunk]
        whole = encode([template.format(**fields) for template, fields, _ in filled])
        for (where, _), (template, fields, cut), tokens in zip(chunk, filled, whole, strict=True):
            if len(tokens) > limits.query:
                try:
                    tokens = query_tokens(
                        lambda text: encode([text])[0], template, fields, cut, limits.query
                    )
                except ValueError as error:
                    raise UserError(
                        f"{where}: field {cut} cannot be cut to fit: {error} "
                        "(data.max_query_tokens): shorten the title or drop the row"
                    ) from None
            queries.append(tokens)
    return queries


def _template_of(row: dict[str, Any]) -> tuple[str, dict[str, str], str]:
    info = row.get("info", row)
    if "info" in row and is_cnndm(row):
        return ARTICLE_TEMPLATE, {"article": info["article"]}, "article"
    return POST_TEMPLATE, {name: info[name] for name in ("subreddit", "title", "post")}, "post"


def _encode_responses(
    texts: list[str],
    located: list[Located],
    encode: Callable[[list[str]], list[list[int]]],
    eos_id: int,
    limits: Limits,
    field: str,
) -> list[list[int]]:
    responses = [[*tokens, eos_id] for tokens in encode(texts)]
    for (where, _), tokens in zip(located, responses, strict=True):
        if len(tokens) > limits.response:
            raise UserError(
                f"{where}: field {field} has {len(tokens)} tokens with EOS, the limit is "
                f"{limits.response}: shorten it, drop the row, or raise the limit in data.max_*"
            )
    return responses


def _check_joint(
    located: list[Located],
    queries: list[list[int]],
    responses: list[list[int]],
    limits: Limits,
    field: str,
) -> None:
    for (where, _), query, response in zip(located, queries, responses, strict=True):
        if len(query) + len(response) > limits.query_response:
            raise UserError(
                f"{where}: post and {field} have {len(query) + len(response)} tokens together, the "
                f"limit is {limits.query_response}: drop the row or raise the limit in data.max_*"
            )


def length_report(split: TokenizedSplit) -> dict[str, int]:
    """Rows and longest sequences of a split, in tokens, for the manifest and the report."""
    queries = split.columns["queries"].lengths()
    report = {"rows": len(split), "longest_query": int(queries.max())}
    for name in ("summaries", "chosen", "rejected"):
        if name in split.columns:
            responses = split.columns[name].lengths()
            label = "summary" if name == "summaries" else name
            report[f"longest_{label}"] = int(responses.max())
            report[f"longest_query_{label}"] = int((queries + responses).max())
    return report


# -- keeping and batching --------------------------------------------------------------------------


def make_ragged(sequences: Iterable[list[int]]) -> Ragged:
    """Lay token lists end to end."""
    arrays = [np.asarray(sequence, dtype=np.int32) for sequence in sequences]
    offsets = np.cumsum([0, *map(len, arrays)])
    return Ragged(torch.from_numpy(np.concatenate(arrays)), torch.from_numpy(offsets))


def save_split(split: TokenizedSplit, folder: Path, name: str) -> None:
    """Write a split as `<name>.safetensors` and `<name>.jsonl`."""
    tensors = {f"{key}.tokens": one.tokens for key, one in split.columns.items()}
    tensors |= {f"{key}.offsets": one.offsets for key, one in split.columns.items()}
    save_file(tensors, folder / f"{name}.safetensors")
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in split.rows)


def load_split(folder: Path, name: str) -> TokenizedSplit:
    """Read a split that `save_split` wrote."""
    tensors = load_file(folder / f"{name}.safetensors")
    keys = {key.split(".")[0] for key in tensors}
    columns = {key: Ragged(tensors[f"{key}.tokens"], tensors[f"{key}.offsets"]) for key in keys}
    return TokenizedSplit(columns=columns, rows=read_lines(folder / f"{name}.jsonl"))


def pad_left(sequences: list[Tensor], pad_id: int, length: int = 0) -> Tensor:
    """Stack sequences so that they end together: [B, longest], or [B, length] if that is more."""
    longest = max(length, *(len(one) for one in sequences))
    padded = torch.full((len(sequences), longest), pad_id, dtype=torch.long)
    for row, one in zip(padded, sequences, strict=True):
        row[longest - len(one) :] = one
    return padded


def pad_right(sequences: list[Tensor], pad_id: int, length: int = 0) -> Tensor:
    """Stack sequences so that they begin together: [B, longest], or [B, length] if that is more."""
    longest = max(length, *(len(one) for one in sequences))
    padded = torch.full((len(sequences), longest), pad_id, dtype=torch.long)
    for row, one in zip(padded, sequences, strict=True):
        row[: len(one)] = one
    return padded
