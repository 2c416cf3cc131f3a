"""A question as it is sent: its body, the key of its reply, and what a server refused of it.

Servers that speak the OpenAI protocol differ in what they take: a budget's name, a temperature, a
reasoning effort, a JSON schema. What one refuses is left out.
"""

import hashlib
import json
import re
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

from eval.judges.prompt import LINES, OBJECT, RESPONSE_FORMAT, Question, make_question
from eval.judges.protocol import Comparison
from stages.settings.judge import JudgeSettings

# The words of a refusal that blame a parameter. In place of the first, max_completion_tokens is
# sent; the others can be left out.
BLAMED = {
    "max_tokens": re.compile(r"max_completion_tokens"),
    "temperature": re.compile(r"temperature", re.IGNORECASE),
    "reasoning_effort": re.compile(r"reasoning|thinking|effort", re.IGNORECASE),
    "response_format": re.compile(r"response_format|schema|structured|grammar|json", re.IGNORECASE),
}


def blamed_by(refusal: str, parameters: Iterable[str]) -> str | None:
    """Which of the parameters an error body refuses; None where it can be none of them.

    A refusal that names none costs the effort first and then the schema.
    """
    sent = [name for name in BLAMED if name in parameters]
    for words in (_parameter_of(refusal), refusal):
        for name in sent:
            if BLAMED[name].search(words):
                return name
    return next((name for name in ("reasoning_effort", "response_format") if name in sent), None)


def _parameter_of(refusal: str) -> str:
    """The parameter that an error body names by itself; empty where it names none."""
    try:
        body: Any = json.loads(refusal)
        body = body[0] if isinstance(body, list) else body  # as Google sends it
        return str(body["error"]["param"] or "")
    except (ValueError, LookupError, TypeError):
        return ""


class ChatRequest(NamedTuple):
    """A question as it is sent, without the budget of its reply."""

    key: str
    """Names the question and what was set, not what the server takes: see `request_for`."""
    other_keys: tuple[str, ...]
    """Under which a reply to it may lie too."""
    question: Question
    left_out: frozenset[str]
    fields: dict[str, Any]
    """As the protocol spells it."""

    def body(self, limit: int) -> dict[str, Any]:
        """What is sent, for a reply of at most `limit` tokens."""
        name = "max_completion_tokens" if "max_tokens" in self.left_out else "max_tokens"
        return self.fields | {name: limit}


def request_for(
    comparison: Comparison, judge: JudgeSettings, url: str, left_out: frozenset[str]
) -> ChatRequest:
    """The request that a comparison makes, without the parameters that the server refuses.

    Its key is made of what was set, so that a reply is found whatever the server takes by then.
    With judge.structured=auto a reply in either form counts.
    """
    forms = {"on": (True,), "off": (False,)}.get(judge.structured, (True, False))
    own_form = judge.structured != "off" and "response_format" not in left_out
    _, query, first, second = comparison
    questions, keys = {}, {}
    for form in forms:
        question = make_question(query, first, second, OBJECT if form else LINES, judge.axis)
        fields = fields_of(judge, question, () if form else ("response_format",))
        keys[form] = hashlib.sha256(json.dumps((url, fields), sort_keys=True).encode()).hexdigest()
        questions[form] = question
    own, question = keys.pop(own_form), questions[own_form]
    fields = fields_of(judge, question, left_out if own_form else {*left_out, "response_format"})
    return ChatRequest(own, tuple(keys.values()), question, left_out, fields)


def fields_of(judge: JudgeSettings, question: Question, left_out: Container[str]) -> dict[str, Any]:
    """The request as the protocol spells it, without its budget."""
    fields: dict[str, Any] = {
        "model": judge.model,
        "messages": [{"role": "user", "content": question.prompt}],
        "temperature": judge.temperature,
        "response_format": RESPONSE_FORMAT,
        "reasoning_effort": judge.reasoning_effort,
    }
    if judge.reasoning_effort == "default":
        del fields["reasoning_effort"]
    return {name: value for name, value in fields.items() if name not in left_out}
