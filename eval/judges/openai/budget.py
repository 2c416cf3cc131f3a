"""What asking costs: prices, and a cap that holds."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from eval.judges.openai.replies import Completion
from stages.config.checks import UserError
from stages.config.judge import JudgeSettings
from stages.config.judge_models import Known, known_model, without_price

CHARACTERS_PER_TOKEN = 4  # OpenAI's own rule of thumb for English text
TEMPLATE_TOKENS = 16  # what a chat template adds to a message


@dataclass(frozen=True, kw_only=True)
class Price:
    """USD per million tokens, read and written; reasoning is written too."""

    read: float
    written: float
    # Read from the server's own cache or put into it, in place of `read`.
    cached: float
    cache_written: float

    def of(self, reply: Completion) -> float | None:
        """USD for a reply as its server counts it; None where it hides its tokens."""
        if not reply.prompt_tokens or (reply.text and not reply.completion_tokens):
            return None
        special = reply.cached_tokens + reply.cache_write_tokens
        usd = (
            self.read * max(0, reply.prompt_tokens - special)
            + self.cached * reply.cached_tokens
            + self.cache_written * reply.cache_write_tokens
            + self.written * reply.completion_tokens
        )
        return usd / 1e6

    def at_worst(self, body: dict[str, Any], max_tokens: int) -> float:
        """USD that the reply to a request cannot exceed.

        No tokenizer makes more tokens than there are bytes, and the schema of a reply is read too.
        """
        size = len(json.dumps(body).encode())
        dearest = max(self.read, self.cache_written)
        return (dearest * (size + TEMPLATE_TOKENS) + self.written * max_tokens) / 1e6

    def usually(self, body: dict[str, Any], written_tokens: float) -> float:
        """An estimate of the USD for a reply of this length."""
        read_tokens = len(json.dumps(body)) / CHARACTERS_PER_TOKEN + TEMPLATE_TOKENS
        return (self.read * read_tokens + self.written * written_tokens) / 1e6


def price_of(judge: JudgeSettings) -> Price | None:
    """The price of the judge's model, or None if neither the settings nor the table have it.

    Raises UserError for a cap that cannot be kept without a price.
    """
    listed = known_model(judge.model) or Known()
    read = judge.input_price if judge.input_price >= 0 else listed.read
    written = judge.output_price if judge.output_price >= 0 else listed.written
    if read is None or written is None:
        if judge.max_cost:
            raise without_price(judge.model)
        return None
    # A price from the settings says nothing about the server's cache.
    is_listed = read == listed.read
    cached = listed.cached if is_listed and listed.cached is not None else read
    kept = listed.cache_written if is_listed and listed.cache_written is not None else read
    return Price(read=read, written=written, cached=cached, cache_written=kept)


class Budget:
    """Money for requests: the most that a request can cost is reserved before it is sent.

    After the reply the real cost is booked. So the cap holds, whatever the replies turn out to be
    and however many requests are under way. Used on one event loop only.
    """

    def __init__(self, cap: float) -> None:
        self.cap = cap
        self.spent = 0.0
        self.reserved = 0.0
        self.requests = 0  # under way
        self.changed = asyncio.Condition()

    async def reserve(self, usd: float) -> None:
        """Set money aside; waits while requests under way may still give back enough of theirs.

        Raises UserError if the cap would be crossed even so.
        """
        async with self.changed:
            await self.changed.wait_for(lambda: self._fits(usd) or not self.requests)
            if not self._fits(usd):
                raise UserError(
                    f"the next request could bring the cost to ${self.spent + usd:.4f}, above "
                    f"judge.max_cost={self.cap:g}: all replies are kept; raise it to continue"
                )
            self.reserved += usd
            self.requests += 1

    async def settle(self, reserved: float, usd: float) -> None:
        """Give back what was reserved, less what was spent."""
        async with self.changed:
            self.requests -= 1
            self.reserved = self.reserved - reserved if self.requests else 0.0
            self.spent += usd
            self.changed.notify_all()

    def _fits(self, usd: float) -> bool:
        return not self.cap or self.spent + self.reserved + usd <= self.cap
