"""Rows as people have them, as rows of the two schemas that `readers.py` checks.

    pairs   prompt, chosen, rejected     or chosen, rejected: lists of messages that begin alike
    posts   prompt, completion           or post, summary     or messages, of which the last counts
    prompts prompt

A text may be a list of chat messages. Its turns become plain text: `User: ...`, `Assistant: ...`,
a blank line between them, and `Assistant:` at the end of a prompt. A prompt is whole: no template
is filled with it, and of one that is too long the beginning is left out. A post with a summary
alone becomes the prompt "<post>\n\nTL;DR:". A row without an id gets one by its prompt.
Rows that say the same are known by their texts, whatever their ids.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from stages.data.bad_rows import BadRowError
from stages.data.text_metrics import squeezed
from stages.settings.sections import COMPARISONS, POSTS, PPO_TRAIN

# Fields of a row: whether its post is the whole prompt, and all that it had beside what is used.
WHOLE, MORE = "whole", "more"
HELD_OUT_SHARE = 20  # one post in so many is held out where the user has not done so
ASSISTANT = "Assistant:"
Row = dict[str, Any]


def as_known(where: str, row: Row, split: str) -> Row:
    """The row in OpenAI's schema of posts or of comparisons; one that is in it stays as it is.

    Raises BadRowError for a row of no known kind.
    """
    if split in COMPARISONS:
        return row if "info" in row or "summaries" in row else _pair(where, row, split)
    return row if "subreddit" in row or "title" in row else _post(where, row, split)


def split_of(row: Row) -> str:
    """The training split that a row of any kind belongs to, of pairs or of posts."""
    is_pair = "chosen" in row or not row.keys() & {"prompt", "messages", "post"}
    return COMPARISONS[0] if is_pair else POSTS[0]


def _pair(where: str, row: Row, split: str) -> Row:
    if not {"chosen", "rejected"} <= row.keys():
        raise _unknown(where, row, "prompt, chosen, rejected")
    sides = [row["chosen"], row["rejected"]]
    prompt = row.get("prompt")
    if prompt is None and all(isinstance(side, list) for side in sides):
        pairs = list(zip(*sides, strict=False))[:-1]  # an answer has one turn at least
        alike = next((n for n, (left, right) in enumerate(pairs) if left != right), len(pairs))
        prompt, sides = sides[0][:alike], [side[alike:] for side in sides]
    text = _prompt(where, prompt, "prompt")
    name = str(row.get("id") or _hash(text))
    first = int(_hash(f"{name} {sides}"), 16) % 2  # so that the chosen one is not always the first
    summaries = [
        {"text": _answer(where, side, field), "policy": field}
        for side, field in zip(sides, ("chosen", "rejected"), strict=True)
    ]
    return {
        "info": {"id": name, "subreddit": "", "title": "", "post": text, WHOLE: True},
        "summaries": summaries[:: 1 - 2 * first],
        "choice": first,
        "batch": "own",
        "split": split,
    }


def _post(where: str, row: Row, split: str) -> Row:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(row.get("messages"), list):
        *prompt, last = row["messages"] or [None]
        completion = [last]
    elif "post" in row and "prompt" not in row:
        prompt, completion = f"{row['post']}\n\nTL;DR:", row.get("summary")
    if prompt is None or (completion is None and split != PPO_TRAIN):
        both = "prompt, completion (prompts alone: ppo_train.jsonl)"
        raise _unknown(where, row, "prompt" if split == PPO_TRAIN else both)
    text = _prompt(where, prompt, "prompt")
    used = ("prompt", "completion", "messages", "post", "summary", "id")
    more = {name: value for name, value in row.items() if name not in used}
    name = str(row.get("id") or _hash(text))
    known: Row = {"id": name, "subreddit": "", "title": "", "post": text}
    if completion is not None:
        known["summary"] = _answer(where, completion, "completion")
    return known | {WHOLE: True, MORE: more}


def _unknown(where: str, row: Row, wanted: str) -> BadRowError:
    fields = ", ".join(map(str, row))[:80]
    return BadRowError(where, f"a row of no known kind (its fields: {fields}): give {wanted}")


def _prompt(where: str, prompt: Any, field: str) -> str:
    if isinstance(prompt, list):
        return "\n\n".join([*_turns(where, prompt, field), ASSISTANT])
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadRowError(where, f"field {field} is empty or no text: give text or messages")
    return prompt.strip()


def _answer(where: str, text: Any, field: str) -> str:
    """The text of an answer; of messages that of the last turn."""
    if isinstance(text, list) and text:
        return _turns(where, text, field)[-1].removeprefix(ASSISTANT).strip()
    if not isinstance(text, str):
        raise BadRowError(where, f"field {field} is no text: give text or messages")
    return text


def _turns(where: str, messages: Sequence[Any], field: str) -> list[str]:
    turns = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str):
            raise BadRowError(where, f"field {field} has a message without a text in content")
        turns.append(f"{str(message.get('role', 'user')).capitalize()}: {content.strip()}")
    return turns


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def derive(located: dict[str, list[tuple[str, Row]]]) -> dict[str, list[tuple[str, Row]]]:
    """The splits that are not there, from those that are, where their rows are the user's own kind.

    Posts are the pairs' prompts with the chosen text, each prompt once. Without held-out rows one
    post in HELD_OUT_SHARE is held out, at least one, by its id: in all splits or in none.
    """
    every = dict(located)
    for posts, pairs in zip(POSTS, COMPARISONS, strict=True):
        if posts not in every and _are_whole(every.get(pairs, [])):
            every[posts] = [
                (where, row["info"] | {"summary": row["summaries"][row["choice"]]["text"]})
                for where, row in every[pairs]
            ]
    splits = [each for each in (POSTS, COMPARISONS) if each[1] not in every]
    splits = [each for each in splits if _are_whole(every.get(each[0], []))]
    digests = [_digest(row) for train, _ in splits for _, row in every[train]]
    held = {digest for digest in digests if digest % HELD_OUT_SHARE == 0} or {*sorted(digests)[:1]}
    for train, held_out in splits:
        parts: list[list[tuple[str, Row]]] = [[], []]
        for where, row in every[train]:
            parts[_digest(row) in held].append((where, row))
        every[train], every[held_out] = parts
    for posts in {*POSTS} - {*located} & {*every}:
        first = {row["id"]: (where, row) for where, row in reversed(every[posts])}
        every[posts] = [each for each in reversed(first.values()) if each[1]["summary"].strip()]
    return every


def _digest(row: Row) -> int:
    return int(_hash(row.get("info", row)["id"]), 16)


def _are_whole(located: Sequence[tuple[str, Row]]) -> bool:
    return bool(located) and all(row.get("info", row).get(WHOLE) for _, row in located)


def recognised(located: Mapping[str, Sequence[tuple[str, Row]]]) -> list[str]:
    """A line for each split with rows of the user's own kind."""
    whole = {split: len(rows) for split, rows in located.items() if _are_whole(rows)}
    return [f"{split}: {rows:,} rows, each with a whole prompt" for split, rows in whole.items()]


def post_text(row: dict[str, Any]) -> str:
    """What a post or an article says, with its title; ids and subreddits are not part of it."""
    about = row.get("info", row)
    return squeezed(" ".join(str(about.get(key) or "") for key in ("title", "post", "article")))


def labels_of(rows: Sequence[dict[str, Any]]) -> dict[int, set[str]]:
    """Pair, by its texts -> the summaries of it that were chosen."""
    labels: dict[int, set[str]] = {}
    for row in rows:
        labels.setdefault(pair_of(row), set()).add(_chosen(row))
    return labels


def pair_of(row: dict[str, Any]) -> int:
    """A hash of the post and of both summaries, in any order."""
    return hash((post_text(row), frozenset(squeezed(text["text"]) for text in row["summaries"])))


def _chosen(row: dict[str, Any]) -> str:
    return squeezed(row["summaries"][row["choice"]]["text"])


def learned(rows: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Held-out posts and pairs that stand in the training data too, by text, whatever their ids.

    `in`: training split -> how many held-out posts it has; `posts`: those of the `of_posts` that
    any has. `pairs`: those of the `of_pairs` held-out comparisons whose two summaries of the post
    are compared in training; `against`: those of them whose label all training pairs contradict.
    """
    held_out = [post_text(row) for row in rows[POSTS[1]]]
    texts = {
        split: {*held_out}.intersection(map(post_text, rows[split]))
        for split in (POSTS[0], PPO_TRAIN, COMPARISONS[0])
        if split in rows
    }
    train, held_out_pairs = (rows.get(split, ()) for split in COMPARISONS)
    labels = labels_of(train)
    pairs = [row for row in held_out_pairs if pair_of(row) in labels]
    return {
        "in": {split: sum(text in own for text in held_out) for split, own in texts.items()},
        "posts": sum(any(text in own for own in texts.values()) for text in held_out),
        "of_posts": len(held_out),
        "pairs": len(pairs),
        "of_pairs": len(held_out_pairs),
        "against": sum(_chosen(row) not in labels[pair_of(row)] for row in pairs),
    }
