"""A question as it is sent: its body, the key of its reply, and what a server refused of it.

Servers that speak the OpenAI protocol differ in what they take: a budget's name, a temperature, a
reasoning effort, a JSON schema. What one refuses is left out.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from eval.judges.prompt import LINES, OBJECT, RESPONSE_FORMAT, Question, make_question
from eval.judges.protocol import Comparison
from stages.settings.judge import JudgeSettings

BLAMED = {
    "temperature": re.compile(r"temperature", re.IGNORECASE),
    "effort": re.compile(r"reasoning|thinking|effort", re.IGNORECASE),
    "structured": re.compile(r"response_format|schema|structured|grammar|json", re.IGNORECASE),
}


@dataclass(frozen=True)
class Dialect:
    """Which parts of the protocol a model accepts; its refusals show it."""

    structured: bool
    temperature: bool = True
    tokens: str = "max_tokens"
    effort: bool = True

    def after(self, refusal: str, keep: tuple[str, ...] = ()) -> "Dialect | None":
        """The dialect to try after the error body of a refusal; None if nothing can be left out.

        `keep` are parts that are not sent, or that were insisted on. A refusal that blames no part
        costs the effort first and then the schema.
        """
        if self.tokens == "max_tokens" and "max_completion_tokens" in refusal:
            return replace(self, tokens="max_completion_tokens")
        parts = [part for part in BLAMED if getattr(self, part) and part not in keep]
        for words in (parameter_of(refusal), refusal):
            blamed = [part for part in parts if BLAMED[part].search(words)]
            if blamed:
                return self.without(blamed[0])
        unsaid = [part for part in ("effort", "structured") if part in parts]
        return self.without(unsaid[0]) if unsaid else None

    def without(self, part: str) -> "Dialect":
        """The dialect that leaves out `temperature`, `effort` or `structured`."""
        return Dialect(**{**asdict(self), part: False})


def parameter_of(refusal: str) -> str:
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
    dialect: Dialect
    fields: dict[str, Any]
    """As the protocol spells it."""

    def body(self, limit: int) -> dict[str, Any]:
        """What is sent, for a reply of at most `limit` tokens."""
        return self.fields | {self.dialect.tokens: limit}


def request_for(
    comparison: Comparison, judge: JudgeSettings, url: str, dialect: Dialect
) -> ChatRequest:
    """The request that a comparison makes, in a dialect.

    Its key is made of what was set, so that a reply is found whatever the server takes by then.
    With judge.structured=auto a reply in either form counts.
    """
    forms = {"on": (True,), "off": (False,)}.get(judge.structured, (True, False))
    _, query, first, second = comparison
    questions = {
        form: make_question(query, first, second, OBJECT if form else LINES, judge.axis)
        for form in forms
    }
    keys = {}
    for form, question in questions.items():
        fields = fields_of(judge, question, Dialect(structured=form))
        keys[form] = hashlib.sha256(json.dumps((url, fields), sort_keys=True).encode()).hexdigest()
    own, question = keys.pop(dialect.structured), questions[dialect.structured]
    fields = fields_of(judge, question, dialect)
    return ChatRequest(own, tuple(keys.values()), question, dialect, fields)


def fields_of(judge: JudgeSettings, question: Question, dialect: Dialect) -> dict[str, Any]:
    """The request as the protocol spells it, without its budget."""
    fields: dict[str, Any] = {
        "model": judge.model,
        "messages": [{"role": "user", "content": question.prompt}],
    }
    if dialect.temperature:
        fields["temperature"] = judge.temperature
    if dialect.structured:
        fields["response_format"] = RESPONSE_FORMAT
    if dialect.effort and judge.reasoning_effort != "default":
        fields["reasoning_effort"] = judge.reasoning_effort
    return fields
