"""What a server sends back: replies, as rows of the cache; refusals; and when to ask again.

A refusal is about one post (too long, filtered: it is left unjudged, and nothing else changes), or
passes by itself, or stops the judge.
"""

import json
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from threading import Event, Lock
from typing import Any

from eval.judges.prompt import own_words
from eval.judges.protocol import CONTENT_FILTER, FILTERED, TOO_LONG, Row
from stages.config.checks import UserError
from stages.config.judge import JudgeSettings
from stages.config.judge_models import is_model

# Where servers put what a model thought: vLLM and transformers, Ollama and OpenRouter.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# By words of OpenAI and Azure, vLLM, llama.cpp, Anthropic, Google and TGI; `code` or `message`.
LENGTH = re.compile(
    r"context_length_exceeded|exceed_context_size|string_above_max_length"
    r"|context[ _](?:length|size|window)|maximum model length|max_model_len"
    r"|(?:prompt|input|request)\b[^.]{0,60}\btoo (?:long|large)|input token count"
    r"|too many (?:input )?tokens|max_tokens must be at least 1, got -"
    r"|`inputs`[^.]{0,60}must be <=",
    re.IGNORECASE,
)
# Bedrock calls a rate limit "Too many tokens, please wait before trying again."
WAIT = re.compile(r"\bwait\b|\btry(?:ing)? again\b", re.IGNORECASE)
FILTER = re.compile(r"content[_ ](?:filter|management|policy)|invalid_prompt", re.IGNORECASE)
# Worth another try: a request timeout, a conflict, a rate limit; and all server errors.
PASSING = (408, 409, 425, 429)
NO_CREDIT = re.compile(r"insufficient_quota|credit balance is too low")
# A limit by the day. Google's words for it are those for one by the minute, too.
LONG_QUOTA = re.compile(r"(?:per|by)[ _-]?(?:day|month)|\bdaily\b|\b[RT]PD\b", re.IGNORECASE)
QUOTA, MINUTE = "exceeded your current quota", re.compile(r"(?:per|by)[ _-]?min", re.IGNORECASE)
HINTS = {
    400: "check judge.model, judge.temperature and judge.max_tokens",
    401: "check OPENAI_API_KEY",
    402: "the account of OPENAI_API_KEY has no credit: replies are kept, run it again with some",
    403: "OPENAI_API_KEY has no access to this model",
    404: "check judge.model and judge.base_url",
    429: "this quota is used up: replies are kept, run it again when there is a new one",
}
# How a reply ends that the filter has cut off or emptied, by words of OpenAI and of Google.
FILTER_ENDS = re.compile(
    r"content_filter|(?:safety|recitation|blocklist|prohibited_content|spii)\b", re.IGNORECASE
)
# A refusal with one of these is about the key, the account or the model, never about a post: but
# OpenRouter says 403 of a post that a provider's moderation has flagged.
NOT_ABOUT_A_POST = (401, 402, 403, 404)
FLAGGED = re.compile(r"input was flagged|flagged_input", re.IGNORECASE)
# The first wait is 0.5 s, and waits double up to 32 s unless the server names one: together they
# outlast a rate limit by the minute.
FIRST_WAIT = 0.5
LONGEST_WAIT = 32.0
# A server that asks for more has a quota by the hour or the day: better to stop and say so.
LONGEST_RETRY_AFTER = 600.0
SHORTEST_KEY = 8  # characters
# The words of a refusal that blame a parameter. In place of the first, max_completion_tokens is
# sent; the others can be left out.
BLAMED = {
    "max_tokens": re.compile(r"max_completion_tokens"),
    "temperature": re.compile(r"temperature", re.IGNORECASE),
    "reasoning_effort": re.compile(r"reasoning|thinking|effort", re.IGNORECASE),
    "response_format": re.compile(r"response_format|schema|structured|grammar|json", re.IGNORECASE),
}


class NoReplyError(Exception):
    """A try that brought no reply; `usd` is what it cost, None where that is unknown."""

    def __init__(self, what: str, usd: float | None = 0, retry_after: float | None = None) -> None:
        super().__init__(what)
        self.usd, self.retry_after = usd, retry_after


class PassingError(NoReplyError):
    """It may be repeated."""


class OtherModelError(PassingError):
    """A whole reply of a model that is neither the one asked nor one accepted for it."""


class ParameterError(NoReplyError):
    """The server refused a parameter, which is left out from now on."""


class PostError(NoReplyError):
    """The server will not judge this one post, whatever else it takes."""


def read_reply(raw: str) -> Row:
    """What a raw body says, as columns of the cache, with tokens by kind beside what it keeps.

    `completion_tokens` are all that were written, with the reasoning, wherever a server counts it.
    Raises PassingError where the body is no chat completion.
    """
    try:
        completion = json.loads(raw)
        answer, usage = completion["choices"][0], completion.get("usage") or {}
        message = answer.get("message") or {}  # Google sends none where its filter refuses
        text = plain(message.get("content") or message.get("refusal"))
        reason = plain(answer.get("finish_reason"))
        read, written = (
            usage.get(f"{kind}_tokens_details") or {} for kind in ("prompt", "completion")
        )
        beyond = tokens_beyond(usage, text)
        return {
            "model": plain(completion.get("model")),
            "finish_reason": CONTENT_FILTER if FILTER_ENDS.match(reason) else reason,
            "text": text,
            "prompt_tokens": count(usage.get("prompt_tokens")),
            "completion_tokens": count(usage.get("completion_tokens")) + beyond,
            "raw": raw,
            "cached_tokens": count(read.get("cached_tokens")),
            "cache_write_tokens": count(read.get("cache_write_tokens")),
            "reasoning_tokens": max(count(written.get("reasoning_tokens")), beyond),
            "thought": any(message.get(key) for key in THOUGHTS) or own_words(text) != text,
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise PassingError(
            f"no chat completion came back, but {raw[:60]!r}: check judge.base_url (it often ends"
            " in /v1)",
            usd=None,
        ) from None


def tokens_beyond(usage: Row, text: str) -> int:
    """Tokens that the total alone counts: the reasoning of Google's and xAI's models.

    0 where a count is missing: such a reply counts at its worst price.
    """
    read, written = (count(usage.get(f"{kind}_tokens")) for kind in ("prompt", "completion"))
    if not read or (text and not written):
        return 0
    return max(0, count(usage.get("total_tokens")) - read - written)


def is_accepted(judge: JudgeSettings, returned: str) -> bool:
    """Whether a reply under this name is the judge's: the model asked, or a name accepted."""
    patterns = [name.strip() for name in judge.accept_model.split(",") if name.strip()]
    return is_model(judge.model, returned) or any(fnmatchcase(returned, p) for p in patterns)


def reasoned(row: Row) -> bool:
    """Whether a reply shows that its model reasons: it says so, or was cut off before a word."""
    cut_off = row["finish_reason"] == "length" and not row["text"].strip()
    return bool(row["reasoning_tokens"] or row["thought"] or cut_off)


def plain(value: Any) -> str:
    """A server's word as text that any file takes: half a surrogate pair becomes a mark.

    Raises TypeError for what is no text.
    """
    if not isinstance(value, str | None):
        raise TypeError(type(value).__name__)
    return (value or "").encode(errors="replace").decode()


def hider(key: str) -> Callable[[str], str]:
    """Replaces a key in what a server or a client says, however JSON or a URL spells its letters.

    A word, as local servers take one for a key, is no secret, and may stand in a reply.
    """
    if len(key) < SHORTEST_KEY or key.isalpha():
        return str
    letters = (rf"(?:\\?{re.escape(letter)}|(?i:(?:\\u00|%){ord(letter):02x}))" for letter in key)
    pattern = re.compile("".join(letters))
    return lambda text: pattern.sub("[key]", text)


def count(value: Any) -> int:
    """A server's number of tokens; 0 where it is none."""
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0


def about_a_post(status: int, text: str) -> str:
    """Why a server will not judge this one post (`too long`, `filtered`); empty if it is not that.

    llama.cpp sends it as a server error at times, OpenAI as a rate limit that no waiting satisfies.
    """
    if status in NOT_ABOUT_A_POST:
        return FILTERED if status == 403 and FLAGGED.search(text) else ""
    if LENGTH.search(text) and not (status >= 429 and WAIT.search(text)):
        return TOO_LONG
    return FILTERED if status < 429 and FILTER.search(text) else ""


def mend_of(status: int, text: str) -> str:
    """What mends a refusal that no waiting of minutes does; empty where that may."""
    if NO_CREDIT.search(text):
        return HINTS[402]
    is_long = LONG_QUOTA.search(text) or (QUOTA in text and not MINUTE.search(text))
    if (status in PASSING or status >= 500) and not (status == 429 and is_long):
        return ""
    return HINTS.get(400 if status == 422 else status, "replies are kept: run it again to go on")


def blamed_by(refusal: str, parameters: Iterable[str]) -> str | None:
    """Which of the parameters an error body refuses; None where it can be none of them.

    A refusal that names none costs the effort first and then the schema.
    """
    try:
        body: Any = json.loads(refusal)
        body = body[0] if isinstance(body, list) else body  # as Google sends it
        parameter = str(body["error"]["param"] or "")
    except (ValueError, LookupError, TypeError):
        parameter = ""
    sent = [name for name in BLAMED if name in parameters]
    for words in (parameter, refusal):
        for name in sent:
            if BLAMED[name].search(words):
                return name
    return next((name for name in ("reasoning_effort", "response_format") if name in sent), None)


class Pace:
    """Spaces the requests of all threads; whoever waits is woken when the judge stops."""

    def __init__(self, requests_per_minute: float) -> None:
        self.gap = 60 / requests_per_minute if requests_per_minute else 0.0
        self.next = time.monotonic()
        self.lock, self.stopped = Lock(), Event()

    def wait_for_turn(self) -> None:
        """Return when the next request may be sent."""
        with self.lock:
            turn = max(self.next, time.monotonic())
            self.next = turn + self.gap
        self.stopped.wait(max(0.0, turn - time.monotonic()))

    def back_off(self, failures: int, retry_after: float | None) -> None:
        """Wait after the k-th failure of a request in a row, k from 1.

        No thread begins a request while one waits as the server asks. The jitter keeps threads that
        failed together from trying again together.
        """
        jitter = random.uniform(0.75, 1.0) * min(LONGEST_WAIT, FIRST_WAIT * 2 ** (failures - 1))
        if retry_after is not None:
            with self.lock:
                self.next = max(self.next, time.monotonic() + retry_after)
            jitter *= FIRST_WAIT
        self.stopped.wait((retry_after or 0.0) + jitter)


def retry_after_of(headers: Mapping[str, str]) -> float | None:
    """Seconds that a response asks to wait, from its headers; None where it does not.

    Source: RFC 9110 section 10.2.3 (of dates, nothing is read); OpenAI's retry-after-ms is finer.
    Raises UserError where it asks for a wait that is too long to sit through.
    """
    for name, parts in (("retry-after-ms", 1000), ("retry-after", 1)):
        with suppress(KeyError, ValueError):
            seconds = float(headers[name]) / parts
            if seconds > LONGEST_RETRY_AFTER:
                wait = f"the server asks to wait {seconds:.0f} s"
                raise UserError(f"{wait}: replies are kept, run it again after that")
            return max(0.0, seconds)
    return None
