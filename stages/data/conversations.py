"""Chat messages: who says what, which turn is the answer, and the plain text of a conversation.

A message is `{"role": ..., "content": ...}`, or `{"from": ..., "value": ...}` as in ShareGPT. A CSV
cell may contain a list of messages as JSON or as printed by Python. Standard library only.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.data.bad_rows import BadRowError

Message = dict[str, str]
"""`role` and `content`. Roles are USER, ASSISTANT, `system`, or another name in lower case."""

USER = "user"
ASSISTANT = "assistant"
# Names of each side in published data sets, in lower case.
ASSISTANT_NAMES = frozenset(
    {"assistant", "model", "gpt", "bot", "ai", "chatgpt", "chatbot", "llm", "claude", "gemini"}
)
USER_NAMES = frozenset({"user", "human", "prompter", "customer", "instruction", "input"})
OTHER_NAMES = frozenset(
    {"system", "developer", "tool", "function", "observation", "ipython", "environment"}
)
ANSWER_LABEL = "Assistant:"
"""Ends the plain text of a prompt."""
# A text that begins like this is a printed message or list of messages.
PRINTED_MESSAGES = re.compile(
    r"\s*(?:array\(\s*)?\[?\s*\{\s*[\"'](?:role|content|from|value)[\"']\s*:"
)

# A text that begins like this may be another printed Python structure, such as SQuAD's answers.
PRINTED_DICT = re.compile(r"\s*\[?\s*\{'")


def parse_text(where: str, field: str, value: Any) -> str | list[Message]:
    """A field with a text, a message or a list of messages, which may be printed as text.

    Raises BadRowError for anything else, and for an empty text.
    """
    if isinstance(value, str):
        if not PRINTED_MESSAGES.match(value):
            if PRINTED_DICT.match(value) and _is_literal(value):
                raise BadRowError(where, f"field {field} is a printed dict or list: give its text")
            return value
        value = _parse_printed(where, field, value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise BadRowError(where, f"field {field} is not text: give text or messages")
    if not value:
        raise BadRowError(where, f"field {field} is an empty list: give text or messages")
    return [_parse_message(where, field, message) for message in value]


def _is_literal(text: str) -> bool:
    """Whether a text is a Python value from its beginning to its end."""
    try:
        ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


def _parse_printed(where: str, field: str, text: str) -> Any:
    """The value of a printed list of messages. Raises BadRowError if it cannot be read back."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise BadRowError(
            where,
            f"field {field} is a printed list of messages that cannot be read back: "
            "write it as JSON (json.dumps), or use JSON Lines",
        ) from None


def _parse_message(where: str, field: str, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise BadRowError(where, f"field {field} has a message without text in content: add it")
    content = message.get("content", message.get("value"))
    role = message.get("role", message.get("from"))
    if not isinstance(content, str):
        raise BadRowError(where, f"field {field} has a message without text in content: add it")
    if not isinstance(role, str) or not role.strip():
        raise BadRowError(where, f"field {field} has a message without a role: add it")
    return {"role": normalize_role(role), "content": content.strip()}


def normalize_role(role: str) -> str:
    """USER or ASSISTANT for the names that data sets give them; other names in lower case."""
    name = role.strip().lower()
    if name in ASSISTANT_NAMES:
        return ASSISTANT
    if name in USER_NAMES:
        return USER
    return name


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A conversation that ends with the assistant's answer."""

    prompt: list[Message]
    """All turns before the answer."""
    answer: str
    is_cut: bool
    """Whether turns after the answer were left out."""


def split_answer(where: str, field: str, messages: Sequence[Message]) -> Answered:
    """The assistant's last turn, and what comes before it.

    Raises BadRowError if no turn is the assistant's, or if one of an unknown role may be the
    answer.
    """
    places = [place for place, turn in enumerate(messages) if turn["role"] == ASSISTANT]
    last = places[-1] if places else -1
    for turn in messages[last + 1 :]:
        if turn["role"] != USER and turn["role"] not in OTHER_NAMES:
            raise BadRowError(
                where,
                f"field {field} has a turn by {turn['role']!r}: name the side that answers "
                f"{ASSISTANT!r}, and the other side {USER!r}",
            )
    if last < 0:
        raise BadRowError(where, f"field {field} has no turn of the assistant: add an answer")
    return Answered(
        prompt=list(messages[:last]),
        answer=messages[last]["content"],
        is_cut=last + 1 < len(messages),
    )


def plain_prompt(messages: Sequence[Message]) -> str:
    """A conversation as plain text, `User: ...`, with `Assistant:` at its end."""
    turns = [f"{turn['role'].capitalize()}: {turn['content']}" for turn in messages]
    return "\n\n".join([*turns, ANSWER_LABEL])
