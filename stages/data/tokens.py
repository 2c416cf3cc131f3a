"""Tokenizes the splits that stages read: queries with the responses to them.

Source: Huang et al. 2024, details 2 to 4.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from stages.config.errors import UserError
from stages.config.sections import PPO_TRAIN
from stages.data.bad_rows import BadRowError, BadRows
from stages.data.chat import ChatFormat
from stages.data.lengths import Limits, check_lengths
from stages.data.prompt import Encode, Prompt, fit_query, keep_end, plain_encoder, prompt_for
from stages.data.ragged import TokenizedSplit, make_ragged
from stages.data.schemas import COLUMNS, chosen_text, label_strength, post_text, rejected_text
from stages.data.tables import LocatedRow, Row
from stages.data.text_metrics import first_ids
from stages.runs.progress import progress

ENCODE_BATCH = 1000  # queries encoded together


def tokenize_posts(
    located_rows: list[LocatedRow],
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    split: str,
    bad_rows: BadRows | None = None,
) -> TokenizedSplit:
    """The queries and summaries of a split, each summary with a leading space and EOS.

    With `data.chat_template`, the tokenizer's chat template formats both (`chat.py`), and the text
    that `rows` keep of a query is the conversation without the template.
    The split `ppo_train` gets only queries, because its rows need no summary. `rows` keep the id,
    title, query and reference as text, and under `columns` the user's own columns. `bad_rows`
    collects the rows that are skipped.
    Raises UserError for a post that cannot be cut to fit, for a summary far over its limit and for
    more tokens than the model has positions, unless such rows are skipped.
    """
    bad_rows = bad_rows or BadRows("stop")
    texts_of: dict[str, Callable[[Row], str]] = {}
    if split != PPO_TRAIN:
        texts_of["summaries"] = _summary_text
    encoded = _encode_rows(located_rows, texts_of, tokenizer, limits, split, bad_rows)
    kept = _rows_that_fit(encoded.located_rows, encoded.columns, limits, split, bad_rows)

    if limits.chat_template:
        texts = [encoded.query_texts[number] for number in kept]
    else:
        # The text of a query omits the tokens that begin every query.
        queries = encoded.columns["queries"]
        texts = tokenizer.batch_decode([queries[number][len(limits.first) :] for number in kept])
    rows = []
    for number, query in zip(kept, texts, strict=True):
        _, row = encoded.located_rows[number]
        facts: dict[str, Any] = {"id": row["id"], "title": row["title"], "query": query}
        if row.get(COLUMNS):
            facts[COLUMNS] = row[COLUMNS]
        if row.get("summary"):
            facts["reference"] = row["summary"].strip()
        rows.append(facts)
    return _to_split(encoded.columns, kept, rows)


def _summary_text(row: Row) -> str:
    return str(row["summary"])


def tokenize_comparisons(
    located_rows: list[LocatedRow],
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    split: str,
    bad_rows: BadRows | None = None,
) -> TokenizedSplit:
    """The queries and both summaries (`chosen`, `rejected`) of a split.

    `rows` keep the groups by which accuracy is reported. Where an earlier row has the same post
    under another id, they also keep that id as `post`.
    Raises UserError as `tokenize_posts` does.
    """
    bad_rows = bad_rows or BadRows("stop")
    texts_of = {"chosen": chosen_text, "rejected": rejected_text}
    encoded = _encode_rows(located_rows, texts_of, tokenizer, limits, split, bad_rows)
    kept = _rows_that_fit(encoded.located_rows, encoded.columns, limits, split, bad_rows)

    kept_rows = [encoded.located_rows[number][1] for number in kept]
    first_id_of_post = first_ids((row["info"]["id"], post_text(row)) for row in kept_rows)
    rows = []
    for number, row, first_id in zip(kept, kept_rows, first_id_of_post, strict=True):
        facts = _comparison_facts(row, first_id)
        # Without a chat template, a reward function gets the text of a query from its tokens.
        if limits.chat_template:
            facts["query"] = encoded.query_texts[number]
        rows.append(facts)
    return _to_split(encoded.columns, kept, rows)


def _comparison_facts(row: Row, first_id: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"id": row["info"]["id"]}
    if first_id != row["info"]["id"]:
        facts["post"] = first_id
    if row["info"].get(COLUMNS):
        facts[COLUMNS] = row["info"][COLUMNS]
    policies = sorted(summary["policy"] for summary in row["summaries"])
    return facts | {
        "split": row["split"],
        "batch": row["batch"],
        "strength": label_strength(row),
        "policies": "--".join(policies),
    }


def _to_split(
    columns: dict[str, list[list[int]]], kept: Sequence[int], rows: list[dict[str, Any]]
) -> TokenizedSplit:
    """The split with only the `kept` rows of each column."""
    ragged = {
        name: make_ragged(sequences[number] for number in kept)
        for name, sequences in columns.items()
    }
    return TokenizedSplit(columns=ragged, rows=rows)


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """The rows whose query can be cut to fit, and their tokens."""

    located_rows: list[LocatedRow]
    columns: dict[str, list[list[int]]]
    """`queries`, and the columns of responses."""
    query_texts: list[str]
    """The conversations as plain text; empty without a chat template."""


def _encode_rows(
    located_rows: list[LocatedRow],
    texts_of: Mapping[str, Callable[[Row], str]],
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    split: str,
    bad_rows: BadRows,
) -> _Encoded:
    """Encode queries and each column of responses. `texts_of`: column -> a row's text."""
    if limits.chat_template:
        chat = ChatFormat(tokenizer, limits.first)
        return _encode_chats(located_rows, texts_of, chat, limits, split, bad_rows)
    fitting, queries = _encode_queries(located_rows, tokenizer, limits, split, bad_rows)
    columns = {"queries": queries}
    for column, text_of in texts_of.items():
        columns[column] = _encode_responses([text_of(row) for _, row in fitting], tokenizer)
    return _Encoded(located_rows=fitting, columns=columns, query_texts=[])


def _encode_chats(
    located_rows: list[LocatedRow],
    texts_of: Mapping[str, Callable[[Row], str]],
    chat: ChatFormat,
    limits: Limits,
    split: str,
    bad_rows: BadRows,
) -> _Encoded:
    fitting: list[LocatedRow] = []
    columns: dict[str, list[list[int]]] = {"queries": [], **{column: [] for column in texts_of}}
    query_texts: list[str] = []
    for where, row in progress(located_rows, f"tokenize {split}", len(located_rows)):
        with bad_rows.catch(split):
            try:
                query = chat.fit_prompt(prompt_for(row, limits.prompt), limits.query)
                responses = {
                    column: chat.response(text_of(row)) for column, text_of in texts_of.items()
                }
            except ValueError as error:
                raise BadRowError(
                    where, f"data.chat_template: {error}: correct or drop the row"
                ) from None
            fitting.append((where, row))
            query_texts.append(query.text)
            columns["queries"].append(query.tokens)
            for column, tokens in responses.items():
                columns[column].append(tokens)
    return _Encoded(located_rows=fitting, columns=columns, query_texts=query_texts)


def _encode_responses(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The tokens of summaries, with a leading space and EOS (detail 3).

    The compared summaries of the real data begin with a space; others get one. An empty text stays
    empty, so that its response is only EOS: Huang et al. 2024 add EOS to the text as it is, and a
    policy that samples EOS first gives the same tokens.
    """
    spaced = [text if not text or text.startswith(" ") else f" {text}" for text in texts]
    encode = plain_encoder(tokenizer)
    return [[*tokens, tokenizer.eos_token_id] for tokens in encode(spaced)]


def _encode_queries(
    located_rows: list[LocatedRow],
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    split: str,
    bad_rows: BadRows,
) -> tuple[list[LocatedRow], list[list[int]]]:
    """The rows whose query can be cut to fit, and the tokens of their queries."""
    encode = plain_encoder(tokenizer, limits.first)
    fitting: list[LocatedRow] = []
    queries: list[list[int]] = []
    chunks = [
        located_rows[start : start + ENCODE_BATCH]
        for start in range(0, len(located_rows), ENCODE_BATCH)
    ]
    for chunk in progress(chunks, f"tokenize {split}", len(chunks)):
        prompts = [prompt_for(row, limits.prompt) for _, row in chunk]
        encoded = encode([prompt.text for prompt in prompts])
        for (where, row), prompt, tokens in zip(chunk, prompts, encoded, strict=True):
            with bad_rows.catch(split):
                queries.append(_fit_prompt(where, prompt, tokens, encode, limits))
                fitting.append((where, row))
    return fitting, queries


def _fit_prompt(
    where: str, prompt: Prompt, tokens: list[int], encode: Encode, limits: Limits
) -> list[int]:
    """The tokens of a prompt, cut if it exceeds the limit. `tokens`: those of the whole prompt."""
    text = prompt.text
    if len(tokens) > limits.query:
        if not prompt.shortened_field:
            try:
                return keep_end(tokens, limits.first, limits.query)
            except ValueError as error:
                raise BadRowError(where, f"{error}: raise data.max_query_tokens") from None
        try:
            text, tokens = fit_query(
                lambda filled: encode([filled])[0],
                template=prompt.template,
                fields=prompt.fields,
                shortened_field=prompt.shortened_field,
                limit=limits.query,
            )
        except ValueError as error:
            raise BadRowError(
                where,
                f"field {prompt.shortened_field} cannot be cut to fit: {error}: drop the row, or "
                "shorten its title (data.max_query_tokens)",
            ) from None

    # The reward model scores `query.strip() + response` (Huang et al. 2024). The template of
    # articles ends in a newline, which counts only toward the limit of the query.
    if text.endswith("\n"):
        return encode([text.strip()])[0]
    return tokens


def _rows_that_fit(
    located_rows: list[LocatedRow],
    columns: dict[str, list[list[int]]],
    limits: Limits,
    split: str,
    bad_rows: BadRows,
) -> list[int]:
    """The numbers of the rows that `check_lengths` accepts. Raises UserError if there are none."""
    kept = []
    for number, (where, _) in enumerate(located_rows):
        with bad_rows.catch(split):
            lengths = {name: len(sequences[number]) for name, sequences in columns.items()}
            check_lengths(where, lengths, limits)
            kept.append(number)
    if not kept:
        first_reason = ""
        if bad_rows.skipped:
            first_reason = f", the first: {bad_rows.skipped[0]['reason']}"
        raise UserError(f"split {split} has no usable row{first_reason}: correct its rows")
    return kept
