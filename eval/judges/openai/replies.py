"""What a server sends: a completion or an error, wherever the server reports it.

OpenAI-compatible servers agree on the shape of a completion, but not on errors: these may be in the
status of the response, in the body of a 200, or in the reason why the completion ended.
`find_error` turns each of them into a `Failure`, which says what the client does next.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import quote

from eval.judges.prompt import END_OF_THOUGHT
from eval.judges.protocol import CONTENT_FILTER, FILTERED, TOO_LONG
from stages.config.judge import JudgeSettings
from stages.config.judge_models import is_model

# Where servers put a model's reasoning: vLLM, DeepSeek and llama.cpp; OpenRouter; Ollama.
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")

# How a completion ends (`finish_reason`), in lower case. TGI sends `eos_token`, some proxies use
# Anthropic's words, some servers send nothing.
FINISHED = ("stop", "eos", "eos_token", "end_turn", "stop_sequence", "")
CUT_OFF = ("length", "max_tokens", "model_length")
# OpenAI's word and Google's.
FILTERED_END = re.compile(
    r"content_filter|safety|recitation|blocklist|prohibited_content|spii|refusal", re.IGNORECASE
)


# -- completions -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a server replied, and the tokens that it counts."""

    text: str
    finish_reason: str
    """`stop`, `length` or CONTENT_FILTER; any other word means that the server failed."""
    model: str
    has_thought: bool
    """Whether the model has reasoned: it shows or counts it, or was cut off before a word."""
    prompt_tokens: int
    completion_tokens: int
    """All output tokens, including the reasoning."""
    cached_tokens: int
    cache_write_tokens: int
    prompt_hash: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether this is a complete answer, which is worth keeping."""
        return self.finish_reason == "stop" and bool(self.text.strip())

    @property
    def is_only_thought(self) -> bool:
        """Whether the model reasoned and did not answer."""
        return self.has_thought and not self.text.strip()


def read_completion(body: Any) -> Completion | None:
    """Return the completion in a response's JSON, or None if it has none."""
    try:
        choice = body["choices"][0]
        message = choice.get("message") or {}  # Google sends none if its filter refuses a request
        usage = body.get("usage") or {}
        prompt_details = usage.get("prompt_tokens_details") or {}
        completion_details = usage.get("completion_tokens_details") or {}

        text = joined_text(message.get("content") or message.get("refusal"))
        finish_reason = normal_finish_reason(choice.get("finish_reason"))
        prompt_tokens = count(usage.get("prompt_tokens"))
        completion_tokens = count(usage.get("completion_tokens"))

        # Google and xAI count the reasoning only in the total. Without the two other counts the
        # reply is billed at its worst price, whatever the total says.
        uncounted = 0
        if prompt_tokens and (completion_tokens or not text):
            total = count(usage.get("total_tokens"))
            uncounted = max(0, total - prompt_tokens - completion_tokens)

        shows_thought = any(message.get(field) for field in THOUGHT_FIELDS)
        shows_thought = shows_thought or END_OF_THOUGHT.search(text) is not None
        counts_thought = uncounted > 0 or count(completion_details.get("reasoning_tokens")) > 0
        is_cut_off_before_a_word = finish_reason == "length" and not text.strip()

        return Completion(
            text=text,
            finish_reason=finish_reason,
            model=clean(body.get("model") or ""),
            has_thought=shows_thought or counts_thought or is_cut_off_before_a_word,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens + uncounted,
            cached_tokens=count(prompt_details.get("cached_tokens")),
            cache_write_tokens=count(prompt_details.get("cache_write_tokens")),
        )
    except (LookupError, TypeError, AttributeError):
        return None


def joined_text(content: Any) -> str:
    """Return a message's content as one text. Raises TypeError if it is not text.

    Some servers send a list of parts, of which those of type `text` are the answer.
    """
    if isinstance(content, list):
        texts = [part["text"] for part in content if part.get("type") in ("text", "output_text")]
        return clean("".join(texts))
    return clean(content or "")


def clean(text: Any) -> str:
    """Return text that any file can store: an unpaired surrogate becomes a question mark.

    Raises TypeError if it is not text.
    """
    if not isinstance(text, str):
        raise TypeError(type(text).__name__)
    return text.encode(errors="replace").decode()


def normal_finish_reason(finish_reason: Any) -> str:
    """Return why a completion ended, with one word for the different names that servers use."""
    reason = str(finish_reason or "")
    if reason.lower() in FINISHED:
        return "stop"
    if reason.lower() in CUT_OFF:
        return "length"
    if FILTERED_END.match(reason):
        return CONTENT_FILTER
    return reason


def count(value: Any) -> int:
    """Return a server's number of tokens; 0 if it is not one."""
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0


def accepts_model(judge: JudgeSettings, name: str) -> bool:
    """Return whether a reply from this model counts: it is the requested model, or accepted."""
    patterns = [pattern.strip() for pattern in judge.accept_model.split(",")]
    return is_model(judge.model, name) or any(
        fnmatchcase(name, pattern) for pattern in patterns if pattern
    )


# -- errors ----------------------------------------------------------------------------------------


class Action(Enum):
    """What the client does about an error."""

    RETRY = "wait and ask again; stop the judge if that does not help"
    TOO_LONG = TOO_LONG
    """Leave this post unjudged: it is too long for the judge."""
    FILTERED = FILTERED
    """Leave this post unjudged: a filter of the server refuses it."""
    STOP = "stop the judge"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a request brought no reply, and what to do about it."""

    action: Action
    message: str
    """One line."""
    hint: str
    """How the user can fix it if it stops the judge."""
    status: int = 0
    """0 if the server reported no error."""
    text: str = ""
    """The server's complete message."""
    retry_after: float | None = None
    """The wait that the server asks for, in seconds."""
    is_free: bool = False
    """Whether it is certain that the request cost nothing."""


RETRIED = (408, 409, 425, 429)  # and all server errors
RETRY_HINT = "finished replies are kept: run the same command again later"
KEY_HINT = "check OPENAI_API_KEY and the credit of its account (finished replies are kept)"
HINTS = {
    401: KEY_HINT,
    402: KEY_HINT,
    403: KEY_HINT,
    404: "check judge.model and judge.base_url",
    429: f"{RETRY_HINT}, or raise the account's quota if it is used up",
}
OTHER_HINT = "check judge.model, judge.temperature and judge.max_tokens, and OPENAI_API_KEY"

# OpenAI and Azure, vLLM, llama.cpp, Ollama, Anthropic, Google, Qwen and TGI.
LENGTH = re.compile(
    r"context_length_exceeded|exceed_context_size|string_above_max_length"
    r"|context[ _](?:length|size|window)|max(?:imum)? (?:model|prompt|context|input) length"
    r"|max_model_len|(?:prompt|input|request)\b[^.]{0,60}\btoo (?:long|large)|input token count"
    r"|range of input length|too many input tokens|max_tokens must be at least 1, got -"
    r"|`inputs`[^.]{0,60}must be <=",
    re.IGNORECASE,
)
# OpenAI and Azure, Qwen, DeepSeek, xAI, OpenRouter.
FILTER = re.compile(
    r"content[_ ](?:filter|management|policy)|invalid_prompt|usage (?:policy|guidelines)"
    r"|data_?inspection_?failed|inappropriate content|content exists risk"
    r"|(?:input|prompt) was flagged|flagged_input",
    re.IGNORECASE,
)


def find_error(status: int, text: str, body: Any) -> Failure | None:
    """Return the error in a response; None if it is a completion."""
    if status >= 400:
        return failure_of(status, text)

    first = body[0] if isinstance(body, list) and body else body  # Google sends a list
    if not isinstance(first, dict):
        return None
    error = first.get("error")
    choices = first.get("choices")
    if not error and isinstance(choices, list) and choices and isinstance(choices[0], dict):
        error = choices[0].get("error")  # OpenRouter puts an error next to an unfinished reply
    is_error_itself = "choices" not in first and {"message", "detail", "code"} & first.keys()
    if error is None and is_error_itself:  # vLLM's older versions, FastAPI, Qwen
        error = first
    if not error:
        return None
    return failure_of(status_in_body(error, first), json.dumps(first))


def status_in_body(error: Any, body: dict[str, Any]) -> int:
    """Return the status of an error in the body of a 200.

    Without a number it is 400 if the server blames the request, and otherwise that of an outage.
    """
    places = [error, body] if isinstance(error, dict) else [body]
    for place in places:
        for field in ("code", "status", "status_code", "http_code"):
            number = str(place.get(field) or "")
            if re.fullmatch("[45][0-9]{2}", number):
                return int(number)
    blames_request = any(place.get("type") == "invalid_request_error" for place in places)
    return 400 if blames_request else 503


def failure_of(status: int, text: str) -> Failure:
    """Return the failure for an error status and its text."""
    action = action_for(status, text)
    return Failure(
        action=action,
        message=f"error {status}: {' '.join(text.split())[:200]}",
        hint=HINTS.get(status, RETRY_HINT if action is Action.RETRY else OTHER_HINT),
        status=status,
        text=text,
        is_free=True,
    )


def action_for(status: int, text: str) -> Action:
    """Return what to do about an error, by its status and, for a single post, by its words."""
    if status == 413:
        return Action.TOO_LONG
    if status == 451:
        return Action.FILTERED
    if status in (401, 402, 404):
        return Action.STOP
    # llama.cpp may report it as a server error, OpenAI as a rate limit that waiting does not fix.
    if LENGTH.search(text):
        return Action.TOO_LONG
    if status in RETRIED or status >= 500:
        return Action.RETRY
    return Action.FILTERED if FILTER.search(text) else Action.STOP


# -- parameters ------------------------------------------------------------------------------------

# Parameters that a refusal may name. In place of the first, max_completion_tokens is sent; the
# others can be left out.
BLAMED = {
    "max_tokens": re.compile("max_completion_tokens"),
    "temperature": re.compile("temperature", re.IGNORECASE),
    "reasoning_effort": re.compile("reasoning|thinking|effort", re.IGNORECASE),
    "response_format": re.compile("response_format|schema|structured|grammar|json", re.IGNORECASE),
}


def blamed_parameter(refusal: str, sent: Iterable[str]) -> str | None:
    """Return which of the parameters that were sent a refusal names; None if it names none."""
    parameters = [name for name in BLAMED if name in sent]
    field = re.search(r'"param": ?"([^"]*)"', refusal)
    for words in (field[1] if field else "", refusal):
        for name in parameters:
            if BLAMED[name].search(words):
                return name
    return None


# -- the key ---------------------------------------------------------------------------------------

SHORTEST_KEY = 8  # characters


def hide_key(text: str, key: str) -> str:
    """Return the text with [key] in place of the key, also in its URL encoding.

    A plain word, which local servers accept as a key, is not a secret and may occur in a reply.
    """
    if len(key) < SHORTEST_KEY or key.isalpha():
        return text
    return text.replace(key, "[key]").replace(quote(key, safe=""), "[key]")
