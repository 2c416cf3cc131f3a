"""What a server's refusals say: which parts of the protocol it takes, and which posts it does not.

Servers that speak the OpenAI protocol differ in what they take: a budget's name, a temperature, a
reasoning effort, a JSON schema. What one refuses is left out. A post that is too long for the model
is another matter: it is left unjudged, and nothing else changes.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from eval.judges.protocol import TOO_LONG

# By words of OpenAI and Azure, vLLM, llama.cpp, Anthropic, Google and TGI; `code` or `message`.
LENGTH = re.compile(
    r"context_length_exceeded|exceed_context_size|string_above_max_length"
    r"|context[ _](?:length|size|window)|maximum model length|max_model_len"
    r"|(?:prompt|input|request)\b[^.]{0,60}\btoo (?:long|large)|input token count"
    r"|too many (?:input )?tokens|max_tokens must be at least 1, got -"
    r"|`inputs`[^.]{0,60}must be <=",
    re.IGNORECASE,
)
FILTERED = re.compile(r"content[_ ](?:filter|management|policy)|invalid_prompt", re.IGNORECASE)
# A refusal with one of these is about the key, the account or the model, never about a post.
NOT_ABOUT_A_POST = (401, 402, 403, 404)
BLAMED = {
    "temperature": re.compile(r"temperature", re.IGNORECASE),
    "effort": re.compile(r"reasoning|thinking|effort", re.IGNORECASE),
    "structured": re.compile(r"response_format|schema|structured|grammar|json", re.IGNORECASE),
}


class Refusal(NamedTuple):
    """What an error body says."""

    words: str
    """All of it, on one line."""
    parameter: str = ""
    """The parameter that it names by itself, if it does."""


def refusal_of(text: str) -> Refusal:
    """The refusal in an error body. Google sends a list with one error; others send plain text."""
    words = " ".join(text.split())
    try:
        body: Any = json.loads(text)
        body = body[0] if isinstance(body, list) else body
        parameter = body["error"]["param"]
    except (ValueError, LookupError, TypeError):
        parameter = None
    return Refusal(words, parameter if isinstance(parameter, str) else "")


def about_a_post(status: int, text: str) -> str:
    """Why a server will not judge this one post (`too long`, `filtered`); empty if it is not that.

    llama.cpp sends it as a server error at times, OpenAI as a rate limit that no waiting satisfies.
    """
    if status in NOT_ABOUT_A_POST:
        return ""
    if LENGTH.search(text):
        return TOO_LONG
    return "filtered" if status < 429 and FILTERED.search(text) else ""


@dataclass(frozen=True)
class Dialect:
    """Which parts of the protocol a model accepts; its refusals show it."""

    structured: bool
    temperature: bool = True
    tokens: str = "max_tokens"
    effort: bool = True

    def after(self, refusal: Refusal, keep: tuple[str, ...] = ()) -> "Dialect | None":
        """The dialect to try after a refusal, or None where nothing is left to leave out.

        `keep` are parts that are not sent, or that were insisted on. A refusal that blames no part
        costs the effort first and then the schema.
        """
        if self.tokens == "max_tokens" and "max_completion_tokens" in refusal.words:
            return replace(self, tokens="max_completion_tokens")
        parts = [part for part in BLAMED if getattr(self, part) and part not in keep]
        for said in (refusal.parameter, refusal.words):
            blamed = [part for part in parts if BLAMED[part].search(said)]
            if blamed:
                return self.without(blamed[0])
        unsaid = [part for part in ("effort", "structured") if part in parts]
        return self.without(unsaid[0]) if unsaid else None

    def without(self, part: str) -> "Dialect":
        """The dialect that leaves out `temperature`, `effort` or `structured`."""
        return Dialect(
            structured=self.structured and part != "structured",
            temperature=self.temperature and part != "temperature",
            effort=self.effort and part != "effort",
            tokens=self.tokens,
        )
