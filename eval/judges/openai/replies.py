"""What a server sends back, as a row of the cache: whose reply it is, and what it held."""

import json
import random
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from threading import Event, Lock
from typing import Any

from eval.judges.protocol import Row
from stages.settings.checks import UserError
from stages.settings.judge import Judge as JudgeSettings
from stages.settings.judge_models import is_model

# Where servers put what a model thought: vLLM and transformers, Ollama and OpenRouter.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class PassingError(Exception):
    """A try that failed and may be repeated."""

    def __init__(self, what: str, retry_after: float | None = None, usd: float | None = 0) -> None:
        super().__init__(what)
        self.retry_after, self.usd = retry_after, usd
        """`usd`: what it cost; None where that is unknown."""


class OtherModelError(PassingError):
    """A whole reply of a model that is neither the one asked nor one accepted for it."""


def read_reply(judge: JudgeSettings, key: str, prompt_hash: str, max_tokens: int, raw: str) -> Row:
    """A raw body as a row of the cache, with tokens by kind beside what the cache keeps.

    `max_tokens` is the budget without its room for reasoning. Raises PassingError where the body is
    no chat completion.
    """
    try:
        completion = json.loads(raw)
        answer, usage = completion["choices"][0], completion.get("usage") or {}
        message = answer["message"]
        text = message.get("content") or message.get("refusal")
        read, written = (
            usage.get(f"{one}_tokens_details") or {} for one in ("prompt", "completion")
        )
        return {
            "key": key,
            "max_tokens": max_tokens,
            "prompt_hash": prompt_hash,
            "requested_model": judge.model,
            "model": plain(completion.get("model")),
            "finish_reason": plain(answer.get("finish_reason")),
            "text": plain(text),
            "prompt_tokens": count(usage.get("prompt_tokens")),
            "completion_tokens": count(usage.get("completion_tokens")),
            "raw": raw,
            "cached_tokens": count(read.get("cached_tokens")),
            "cache_write_tokens": count(read.get("cache_write_tokens")),
            "reasoning_tokens": count(written.get("reasoning_tokens")),
            "thought": any(message.get(name) for name in THOUGHTS) or "<think>" in plain(text),
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise PassingError(
            f"no chat completion came back, but {raw[:60]!r}: check judge.base_url (it often ends"
            " in /v1)",
            usd=None,
        ) from None


def is_accepted(judge: JudgeSettings, returned: str) -> bool:
    """Whether a reply under this name is the judge's: the model asked, or a name accepted."""
    joined = judge.accept_model.split(",")
    names = [one.strip() for part in joined for one in (part, *part.split("+")) if one.strip()]
    return is_model(judge.model, returned) or any(fnmatchcase(returned, one) for one in names)


def reasoned(row: Row) -> bool:
    """Whether a reply shows that its model reasons: it says so, or was cut off before a word."""
    cut_off = row["finish_reason"] == "length" and not row["text"].strip()
    return bool(row["reasoning_tokens"] or row["thought"] or cut_off)


def plain(value: Any) -> str:
    """A server's word as text that any file takes: half a surrogate pair becomes a mark."""
    return str(value or "").encode(errors="replace").decode()


def count(value: Any) -> int:
    """A server's number of tokens; 0 where it is none."""
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0


# The first wait is 0.5 s, and waits double up to 8 s unless the server names one: together they
# outlast a rate limit by the minute.
FIRST_WAIT = 0.5
LONGEST_WAIT = 8.0
# A server that asks for more has a quota by the hour or the day: better to stop and say so.
LONGEST_RETRY_AFTER = 600.0


class Pace:
    """Spaces the requests of all threads; whoever waits is woken when the judge stops."""

    def __init__(self, requests_per_minute: float) -> None:
        self.gap = 60 / requests_per_minute if requests_per_minute else 0.0
        self.next = time.monotonic()
        self.lock = Lock()
        self.stopped = Event()

    def wait_for_turn(self) -> None:
        """Return when the next request may be sent."""
        while True:
            with self.lock:
                delay = self.next - time.monotonic()
                if delay <= 0:
                    self.next = time.monotonic() + self.gap
                    return
            if self.stopped.wait(delay):
                return

    def back_off(self, failures: int, retry_after: float | None) -> None:
        """Wait after the k-th failure of a request in a row, k from 1.

        A wait that the server asks for holds for all threads. The jitter keeps threads that failed
        together from trying again together.
        """
        longest = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (failures - 1))
        jitter = random.Random().uniform(0.5, 1.0) * longest
        if retry_after is not None:
            with self.lock:
                self.next = max(self.next, time.monotonic() + retry_after)
            jitter = retry_after + jitter * FIRST_WAIT
        self.stopped.wait(jitter)

    def stop(self) -> None:
        """Wake everyone who waits, for good."""
        self.stopped.set()


def retry_after_of(headers: Mapping[str, str]) -> float | None:
    """Seconds that a response asks to wait, from its headers; None where it does not.

    Source: RFC 9110 section 10.2.3, seconds or a date; OpenAI's retry-after-ms is finer.
    Raises UserError where it asks for a wait that is too long to sit through.
    """
    text, finer = headers.get("retry-after"), headers.get("retry-after-ms")
    try:
        if finer is not None:
            seconds = float(finer) / 1000
        elif text is None:
            return None
        elif text.strip().replace(".", "", 1).isdigit():
            seconds = float(text)
        else:
            seconds = (parsedate_to_datetime(text) - datetime.now(timezone.utc)).total_seconds()
    except (TypeError, ValueError):
        return None
    if seconds > LONGEST_RETRY_AFTER:
        raise UserError(
            f"the server asks to wait {seconds:.0f} s: replies are kept, run it again after that"
        )
    return max(0.0, seconds)
