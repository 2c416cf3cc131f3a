"""Converts the user's own kinds of rows to the two schemas that `schemas.py` checks.

    pairs   prompt, chosen, rejected     or chosen, rejected: lists of messages that begin alike
    posts   prompt, completion           or post, summary     or messages, the last is the answer
    prompts prompt

A text may be a list of chat messages (`conversations.py`). Its turns become plain text,
`User: ...`, `Assistant: ...`, with a blank line between them and `Assistant:` at the end of a
prompt; with `data.chat_template` the model's own template formats them. Such a prompt is whole: it
is not filled into our template, and if it is too long, it loses its beginning. A post with a
summary becomes the prompt "<post>\n\nTL;DR:". A row without an id gets a hash of its prompt.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from stages.config.sections import COMPARISONS, FIELDS, POSTS, PPO_TRAIN
from stages.data.bad_rows import BadRowError, LeftOutError
from stages.data.conversations import ASSISTANT, Message, parse_text, plain_prompt, split_answer
from stages.data.schemas import COLUMNS, chosen_text, info_of
from stages.data.tables import LocatedRow, Row

# Fields of a converted post that no user's row can set.
WHOLE = "whole"  # True: the post is the whole prompt (see `format_post`)
MESSAGES = "messages"  # the prompt's messages, if it was given as messages
OUR_FIELDS = (WHOLE, MESSAGES, COLUMNS)

# The fields of the published schemas; other columns of such rows are the user's own.
POST_FIELDS = ("id", *FIELDS, "summary")
COMPARISON_FIELDS = ("info", "summaries", "choice", "worker", "batch", "split", "extra")
# Names of a column with a whole conversation.
CONVERSATION_FIELDS = ("messages", "conversations", "conversation")
# Labels, in lower case, of a completion that people did not want (as in KTO's data).
BAD_LABELS = ("false", "0", "0.0")
HELD_OUT_SHARE = 20  # one prompt in this many is held out if the data have no held-out split

# Changes to rows that are used, which are counted.
CUT_AFTER_ANSWER = "conversations are cut after the assistant's last turn"
WITHOUT_ID = "rows have no value in column id: a hash of the prompt is used"


def to_openai_schema(where: str, row: Row, split: str, changes: Counter[str] | None = None) -> Row:
    """The row in OpenAI's schema of posts or of comparisons, with the user's columns in COLUMNS.

    `changes` counts what is changed in rows that are used.
    Raises BadRowError for a row of an unknown kind, and LeftOutError for a bad completion.
    """
    if changes is None:
        changes = Counter()
    if split in COMPARISONS:
        if "chosen" not in row and ("info" in row or "summaries" in row):
            return _with_own_columns(row, COMPARISON_FIELDS)
        return _convert_pair(where, row, split, changes)
    is_published_kind = "subreddit" in row or "title" in row
    if is_published_kind and "prompt" not in row and _conversation_field(row) is None:
        return _with_own_columns(row, POST_FIELDS)
    return _convert_post(where, row, split, changes)


def _with_own_columns(row: Row, fields: Sequence[str]) -> Row:
    """A row of a published schema, with its other columns put into COLUMNS."""
    converted = {name: value for name, value in row.items() if name in fields}
    columns = {name: value for name, value in row.items() if name not in fields}
    info = row.get("info")
    if isinstance(info, dict):
        converted["info"] = {name: info[name] for name in info if name not in OUR_FIELDS}
        if columns:
            converted["info"][COLUMNS] = columns
    elif columns:
        converted[COLUMNS] = columns
    return converted


def training_split_of(row: Row) -> str:
    """The training split that a row of any kind belongs to: that of the pairs or of the posts."""
    has_prompt = "prompt" in row or "post" in row or _conversation_field(row) is not None
    if has_prompt and "chosen" not in row:
        return POSTS[0]
    return COMPARISONS[0]


def _conversation_field(row: Row) -> str | None:
    """The name of the column with a whole conversation, if there is one."""
    for name in CONVERSATION_FIELDS:
        if _has(row, name):
            return name
    return None


def _has(row: Row, name: str) -> bool:
    """Whether a row has a value in this column, other than null or an empty cell."""
    return row.get(name) not in (None, "")


# -- pairs -----------------------------------------------------------------------------------------


def _convert_pair(where: str, row: Row, split: str, changes: Counter[str]) -> Row:
    wanted = "prompt, chosen and rejected"
    for field in ("chosen", "rejected"):
        if row.get(field) is None:
            raise _missing(where, row, field, wanted)
    chosen = parse_text(where, "chosen", row["chosen"])
    rejected = parse_text(where, "rejected", row["rejected"])
    chosen_answer, chosen_before = _answer_of(where, "chosen", chosen, changes)
    rejected_answer, rejected_before = _answer_of(where, "rejected", rejected, changes)

    # Without a prompt, the messages with which both sides begin are the prompt.
    if _has(row, "prompt"):
        prompt = parse_text(where, "prompt", row["prompt"])
        _check_repeats_prompt(where, "chosen", chosen_before, prompt)
        _check_repeats_prompt(where, "rejected", rejected_before, prompt)
    elif chosen_before and chosen_before == rejected_before:
        prompt = chosen_before
    elif chosen_before or rejected_before:
        raise BadRowError(
            where, "chosen and rejected begin with different turns: both must answer one prompt"
        )
    else:
        raise _missing(where, row, "prompt", wanted)

    prompt_text = _prompt_text(where, "prompt", prompt)
    info = _describe_prompt(row, prompt, prompt_text, changes)
    chosen_summary = {"text": chosen_answer, "policy": "chosen"}
    rejected_summary = {"text": rejected_answer, "policy": "rejected"}

    # A hash decides which one comes first, so that the place says nothing about the label.
    choice = int(_hash(f"{info['id']} {[row['chosen'], row['rejected']]}"), 16) % 2
    if choice == 0:
        summaries = [chosen_summary, rejected_summary]
    else:
        summaries = [rejected_summary, chosen_summary]
    return {
        "info": info,
        "summaries": summaries,
        "choice": choice,
        "batch": "own",
        "split": split,
    }


def _answer_of(
    where: str, field: str, answer: str | list[Message], changes: Counter[str]
) -> tuple[str, list[Message]]:
    """The text of an answer, and the turns before it if it is a list of messages."""
    if isinstance(answer, str):
        return answer, []
    answered = split_answer(where, field, answer)
    if answered.is_cut:
        changes[CUT_AFTER_ANSWER] += 1
    return answered.answer, answered.prompt


def _check_repeats_prompt(
    where: str, field: str, before: Sequence[Message], prompt: str | list[Message]
) -> None:
    """Raise BadRowError if turns before an answer say something that the prompt does not say.

    Data sets often repeat the prompt in the answer's messages.
    """
    if not before:
        return
    if isinstance(prompt, str):
        repeats = before[-1]["content"] == prompt.strip()
    else:
        repeats = list(before) == prompt[-len(before) :]
    if not repeats:
        raise BadRowError(
            where,
            f"field {field} has turns before the answer that are not those of prompt: "
            "put them into prompt",
        )


# -- posts -----------------------------------------------------------------------------------------


def _convert_post(where: str, row: Row, split: str, changes: Counter[str]) -> Row:
    has_bad_answer = _has(row, "label") and str(row["label"]).strip().lower() in BAD_LABELS
    if has_bad_answer and split != PPO_TRAIN:
        raise LeftOutError(where, "their label marks the completion as bad")

    field = _conversation_field(row)
    prompt: str | list[Message]
    if field is not None:
        prompt, answer = _split_conversation(where, row, field, split, changes)
    else:
        field = _prompt_field(where, row, split)
        prompt = parse_text(where, field, row[field])
        if field == "post" and isinstance(prompt, str):
            prompt = f"{prompt}\n\nTL;DR:"
        answer = _completion(where, row, split, prompt, changes)

    prompt_text = _prompt_text(where, field, prompt)
    converted = _describe_prompt(row, prompt, prompt_text, changes)
    if answer is not None and not has_bad_answer:
        converted["summary"] = answer
    return converted


def _prompt_field(where: str, row: Row, split: str) -> str:
    """The column of the prompt, `prompt` or `post`."""
    has_prompt = _has(row, "prompt")
    has_post = _has(row, "post")
    if has_prompt and has_post:
        raise BadRowError(where, "prompt and post both give a prompt: drop or rename one")
    if not has_prompt and not has_post:
        field = "post" if "post" in row and "prompt" not in row else "prompt"
        raise _missing(where, row, field, "prompt" if split == PPO_TRAIN else "prompt, completion")
    return "prompt" if has_prompt else "post"


def _completion(
    where: str, row: Row, split: str, prompt: str | list[Message], changes: Counter[str]
) -> str | None:
    """The answer to a prompt; None if a post for PPO has none."""
    field = "completion" if _has(row, "prompt") else "summary"
    if row.get(field) is None:
        if split == PPO_TRAIN:
            return None
        wanted = f"{field} (rows with only a prompt belong in ppo_train.jsonl)"
        raise _missing(where, row, field, wanted)
    parsed = parse_text(where, field, row[field])
    answer, before = _answer_of(where, field, parsed, changes)
    _check_repeats_prompt(where, field, before, prompt)
    return answer


def _split_conversation(
    where: str, row: Row, field: str, split: str, changes: Counter[str]
) -> tuple[list[Message], str | None]:
    """The prompt and the answer of a conversation. Posts for PPO may end with the user."""
    messages = parse_text(where, field, row[field])
    if isinstance(messages, str):
        raise BadRowError(where, f"field {field} is a text: give a list of messages")
    answer: str | None
    if split == PPO_TRAIN and messages[-1]["role"] != ASSISTANT:
        prompt = messages
        answer = None
    else:
        answered = split_answer(where, field, messages)
        if answered.is_cut:
            changes[CUT_AFTER_ANSWER] += 1
        prompt = answered.prompt
        answer = answered.answer
    if not prompt:
        raise BadRowError(where, f"field {field} has no turn before the answer: add the prompt")

    # Other columns must not say something else.
    others = [name for name in (*CONVERSATION_FIELDS, "completion") if _has(row, name)]
    others.remove(field)
    if others:
        raise BadRowError(where, f"{field} and {others[0]} both give an answer: drop or rename one")
    if _has(row, "prompt"):
        given = parse_text(where, "prompt", row["prompt"])
        contents = [turn["content"] for turn in prompt]
        repeats = given.strip() in contents if isinstance(given, str) else given == prompt
        if not repeats:
            raise BadRowError(where, f"prompt and {field} both give a prompt: drop or rename one")
    return prompt, answer


# -- both ------------------------------------------------------------------------------------------


def _describe_prompt(
    row: Row, prompt: str | list[Message], prompt_text: str, changes: Counter[str]
) -> Row:
    """The fields of a converted row that are about its prompt."""
    has_id = _has(row, "id")
    if "id" in row and not has_id:
        changes[WITHOUT_ID] += 1
    described = {
        "id": str(row["id"]) if has_id else _hash(prompt_text),
        "subreddit": "",
        "title": "",
        "post": prompt_text,
        WHOLE: True,
        COLUMNS: dict(row),
    }
    if not isinstance(prompt, str):
        described[MESSAGES] = prompt
    return described


def _missing(where: str, row: Row, field: str, wanted: str) -> BadRowError:
    fields = ", ".join(str(name) for name in row)[:80]
    problem = f"field {field} is null or empty" if field in row else f"no field {field}"
    return BadRowError(where, f"{problem} (its fields: {fields}): give {wanted}")


def _prompt_text(where: str, field: str, prompt: str | list[Message]) -> str:
    if isinstance(prompt, list):
        return plain_prompt(prompt)
    if not prompt.strip():
        raise BadRowError(where, f"field {field} is empty: give text or messages")
    return prompt.strip()


def _hash(text: str) -> str:
    """16 hex digits of a text's SHA-256. The text may contain half a surrogate pair."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


# -- missing splits --------------------------------------------------------------------------------


def derive_missing_splits(
    given_splits: Mapping[str, list[LocatedRow]],
) -> dict[str, list[LocatedRow]]:
    """The given splits, and missing ones derived from those whose rows have whole prompts.

    Posts are the pairs' prompts with the chosen text, each prompt once. If there is no held-out
    split, one prompt in HELD_OUT_SHARE is held out, and at least one: in all splits or in none of
    them.
    """
    splits = dict(given_splits)

    # Posts from pairs.
    for posts, comparisons in zip(POSTS, COMPARISONS, strict=True):
        if posts not in splits and _has_whole_prompts(splits.get(comparisons, [])):
            splits[posts] = [
                (where, row["info"] | {"summary": chosen_text(row)})
                for where, row in splits[comparisons]
            ]

    # Held-out rows from training rows. Prompts are chosen for all splits at once, so that what the
    # reward model learned about a prompt is not judged on that prompt.
    to_divide = [
        (train, held_out)
        for train, held_out in (POSTS, COMPARISONS)
        if held_out not in splits and _has_whole_prompts(splits.get(train, []))
    ]
    prompts = {_prompt_key(row) for train, _ in to_divide for _, row in splits[train]}
    held_out_prompts = _choose_held_out(prompts)
    for train, held_out in to_divide:
        rows = splits[train]
        splits[train] = []
        splits[held_out] = []
        for where, row in rows:
            is_held_out = _prompt_key(row) in held_out_prompts
            splits[held_out if is_held_out else train].append((where, row))

    # Several pairs may have one prompt, and a chosen text may be empty. Posts must not.
    for posts in POSTS:
        if posts in splits and posts not in given_splits:
            distinct = _first_of_each_prompt(splits[posts])
            splits[posts] = [(where, row) for where, row in distinct if row["summary"].strip()]
    return splits


def _prompt_key(row: Row) -> str:
    """A hash of the prompt. An id may name several prompts, or a prompt may have several ids."""
    return _hash(info_of(row)["post"])


def _choose_held_out(prompts: Set[str]) -> Set[str]:
    """One prompt in HELD_OUT_SHARE, by its hash, and at least one if there are any."""
    digests = {key: int(_hash(key), 16) for key in prompts}
    held_out = {key for key, digest in digests.items() if digest % HELD_OUT_SHARE == 0}
    if digests and not held_out:
        held_out = {min(digests, key=lambda key: digests[key])}
    return held_out


def _first_of_each_prompt(posts: Iterable[LocatedRow]) -> list[LocatedRow]:
    """The first post of each prompt, in the order of the last ones."""
    first_posts: dict[str, LocatedRow] = {}
    for where, row in posts:
        # Removed and added again, so that the first post takes the place of the last one.
        key = _prompt_key(row)
        first_posts[key] = first_posts.pop(key, (where, row))
    return list(first_posts.values())


def _has_whole_prompts(rows: Sequence[LocatedRow]) -> bool:
    """Whether there are rows, and all of them have a whole prompt instead of a post."""
    return bool(rows) and all(info_of(row).get(WHOLE) for _, row in rows)


def describe_whole_prompts(splits: Mapping[str, Sequence[LocatedRow]]) -> list[str]:
    """One line for each split whose rows have whole prompts, for the user to check."""
    return [
        f"{split}: {len(rows):,} rows, each with a whole prompt"
        for split, rows in splits.items()
        if _has_whole_prompts(rows)
    ]


def check_ids(rows: Sequence[LocatedRow]) -> None:
    """Raise UserError if an id names two prompts, such as the row numbers of several shards."""
    first_rows: dict[str, tuple[str, Any]] = {}
    for where, row in rows:
        info = info_of(row)
        first_where, first_post = first_rows.setdefault(info["id"], (where, info["post"]))
        if info.get(WHOLE) and first_post != info["post"]:
            raise BadRowError(
                where,
                f"id {info['id'][:60]!r} names another prompt at {first_where}: "
                "give each prompt its own id, or drop the column id",
            )
