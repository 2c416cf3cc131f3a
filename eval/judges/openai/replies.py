"""What a server sends back, as a row of the cache: whose reply it is, and what it held."""

import json
from fnmatch import fnmatchcase
from typing import Any

from eval.judges.protocol import Row
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
