"""Converts the user's own kinds of rows to the two schemas that `schemas.py` checks.

    pairs   prompt, chosen, rejected     or chosen, rejected: lists of messages that begin alike
    posts   prompt, completion           or post, summary     or messages, the last is the answer
    prompts prompt

A text may be a list of chat messages. Its turns become plain text, `User: ...`, `Assistant: ...`,
with a blank line between them and `Assistant:` at the end of a prompt. Such a prompt is whole: no
template is filled with it, and one that is too long loses its beginning. A post with a summary
becomes the prompt "<post>\n\nTL;DR:". A row without an id gets a hash of its prompt as its id.
"""

import hashlib
from collections.abc import Mapping, Sequence, Set
from typing import Any

from stages.config.sections import COMPARISONS, POSTS, PPO_TRAIN
from stages.data.bad_rows import BadRowError
from stages.data.schemas import chosen_text, info_of
from stages.data.tables import LocatedRow, Row

# Two fields of a converted post.
WHOLE = "whole"  # True: the post is the whole prompt (see `format_post`)
OTHER_FIELDS = "more"  # the user's fields that have no place in the schema

# Fields of the user's rows of posts that are converted. All others go to OTHER_FIELDS.
CONVERTED_FIELDS = ("prompt", "completion", "messages", "post", "summary", "id")
HELD_OUT_SHARE = 20  # one post in this many is held out if the data have no held-out split
ASSISTANT = "Assistant:"


def to_openai_schema(where: str, row: Row, split: str) -> Row:
    """The row in OpenAI's schema of posts or of comparisons; one that has it stays as it is.

    Raises BadRowError for a row of an unknown kind.
    """
    if split in COMPARISONS:
        if "info" in row or "summaries" in row:
            return row
        return _convert_pair(where, row, split)
    if "subreddit" in row or "title" in row:
        return row
    return _convert_post(where, row, split)


def training_split_of(row: Row) -> str:
    """The training split that a row of any kind belongs to: that of the pairs or of the posts."""
    is_post = "chosen" not in row and ("prompt" in row or "messages" in row or "post" in row)
    return POSTS[0] if is_post else COMPARISONS[0]


def _convert_pair(where: str, row: Row, split: str) -> Row:
    if "chosen" not in row or "rejected" not in row:
        raise _unknown_kind(where, row, "prompt, chosen, rejected")
    prompt = row.get("prompt")
    chosen = row["chosen"]
    rejected = row["rejected"]

    # Without a prompt, the messages with which both sides begin are the prompt.
    if prompt is None and isinstance(chosen, list) and isinstance(rejected, list):
        shared = _shared_turns(chosen, rejected)
        prompt = chosen[:shared]
        chosen = chosen[shared:]
        rejected = rejected[shared:]

    prompt_text = _prompt_text(where, prompt)
    post_id = str(row.get("id") or _hash(prompt_text))
    chosen_summary = {"text": _answer_text(where, chosen, "chosen"), "policy": "chosen"}
    rejected_summary = {"text": _answer_text(where, rejected, "rejected"), "policy": "rejected"}

    # A hash decides which one comes first, so that the place says nothing about the label.
    choice = int(_hash(f"{post_id} {[chosen, rejected]}"), 16) % 2
    if choice == 0:
        summaries = [chosen_summary, rejected_summary]
    else:
        summaries = [rejected_summary, chosen_summary]
    return {
        "info": {"id": post_id, "subreddit": "", "title": "", "post": prompt_text, WHOLE: True},
        "summaries": summaries,
        "choice": choice,
        "batch": "own",
        "split": split,
    }


def _shared_turns(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """The number of messages with which both begin. At least one turn is left for the answers."""
    longest_prompt = min(len(chosen), len(rejected)) - 1
    for number in range(longest_prompt):
        if chosen[number] != rejected[number]:
            return number
    return max(0, longest_prompt)


def _convert_post(where: str, row: Row, split: str) -> Row:
    prompt = row.get("prompt")
    completion = row.get("completion")
    messages = row.get("messages")
    if isinstance(messages, list):
        prompt = messages[:-1]
        completion = messages[-1:] or [None]
    elif "post" in row and "prompt" not in row:
        prompt = f"{row['post']}\n\nTL;DR:"
        completion = row.get("summary")

    if split == PPO_TRAIN:
        if prompt is None:
            raise _unknown_kind(where, row, "prompt")
    elif prompt is None or completion is None:
        wanted = "prompt, completion (rows with only a prompt belong in ppo_train.jsonl)"
        raise _unknown_kind(where, row, wanted)

    prompt_text = _prompt_text(where, prompt)
    post_id = str(row.get("id") or _hash(prompt_text))
    converted: Row = {"id": post_id, "subreddit": "", "title": "", "post": prompt_text}
    if completion is not None:
        converted["summary"] = _answer_text(where, completion, "completion")
    converted[WHOLE] = True
    converted[OTHER_FIELDS] = {
        name: value for name, value in row.items() if name not in CONVERTED_FIELDS
    }
    return converted


def _unknown_kind(where: str, row: Row, wanted: str) -> BadRowError:
    fields = ", ".join(str(name) for name in row)[:80]
    return BadRowError(where, f"a row of unknown kind (its fields: {fields}): give {wanted}")


def _prompt_text(where: str, prompt: Any) -> str:
    if isinstance(prompt, list):
        return "\n\n".join([*_turns(where, prompt, "prompt"), ASSISTANT])
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadRowError(where, "field prompt is empty or not a text: give text or messages")
    return prompt.strip()


def _answer_text(where: str, answer: Any, field: str) -> str:
    """The text of an answer; if it is a list of messages, that of the last turn."""
    if isinstance(answer, list) and answer:
        return _turns(where, answer, field)[-1].removeprefix(ASSISTANT).strip()
    if not isinstance(answer, str):
        raise BadRowError(where, f"field {field} is not a text: give text or messages")
    return answer


def _turns(where: str, messages: Sequence[Any], field: str) -> list[str]:
    """Each message as `Role: content`."""
    turns = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str):
            raise BadRowError(where, f"field {field} has a message without a text in content")
        role = str(message.get("role", "user")).capitalize()
        turns.append(f"{role}: {content.strip()}")
    return turns


def _hash(text: str) -> str:
    """16 hex digits of a text's SHA-256. The text may contain half a surrogate pair."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


# -- missing splits --------------------------------------------------------------------------------


def derive_missing_splits(
    given_splits: Mapping[str, list[LocatedRow]],
) -> dict[str, list[LocatedRow]]:
    """The given splits, and missing ones derived from those whose rows have whole prompts.

    Posts are the pairs' prompts with the chosen text, each prompt once. If there is no held-out
    split, one post in HELD_OUT_SHARE is held out by its id, and at least one: in all splits or in
    none of them.
    """
    splits = dict(given_splits)

    # Posts from pairs.
    for posts, comparisons in zip(POSTS, COMPARISONS, strict=True):
        if posts not in splits and _has_whole_prompts(splits.get(comparisons, [])):
            splits[posts] = [
                (where, row["info"] | {"summary": chosen_text(row)})
                for where, row in splits[comparisons]
            ]

    # Held-out rows from training rows. The ids are chosen for all splits at once, so that what the
    # reward model learned about a post is not judged on that post.
    to_divide = [
        (train, held_out)
        for train, held_out in (POSTS, COMPARISONS)
        if held_out not in splits and _has_whole_prompts(splits.get(train, []))
    ]
    ids = {info_of(row)["id"] for train, _ in to_divide for _, row in splits[train]}
    held_out_ids = _choose_held_out(ids)
    for train, held_out in to_divide:
        rows = splits[train]
        splits[train] = []
        splits[held_out] = []
        for where, row in rows:
            is_held_out = info_of(row)["id"] in held_out_ids
            splits[held_out if is_held_out else train].append((where, row))

    # Several pairs may have one prompt, and a chosen text may be empty. Posts must not.
    for posts in POSTS:
        if posts in splits and posts not in given_splits:
            distinct = _first_of_each_id(splits[posts])
            splits[posts] = [(where, row) for where, row in distinct if row["summary"].strip()]
    return splits


def _choose_held_out(ids: Set[str]) -> Set[str]:
    """One id in HELD_OUT_SHARE, by its hash, and at least one if there are any."""
    digests = {name: int(_hash(name), 16) for name in ids}
    held_out = {name for name, digest in digests.items() if digest % HELD_OUT_SHARE == 0}
    if digests and not held_out:
        held_out = {min(digests, key=lambda name: digests[name])}
    return held_out


def _first_of_each_id(posts: Sequence[LocatedRow]) -> list[LocatedRow]:
    """The first post of each id, in the order of the last ones."""
    first_posts: dict[str, LocatedRow] = {}
    for where, row in posts:
        # Removed and added again, so that the first post takes the place of the last one.
        first_posts[row["id"]] = first_posts.pop(row["id"], (where, row))
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
