"""The cost of requests: prices, and a spending limit."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from eval.judges.openai.replies import Completion
from stages.config.errors import UserError
from stages.config.judge import JudgeSettings
from stages.config.judge_models import ListPrice, list_price, without_price

CHARACTERS_PER_TOKEN = 4  # OpenAI's own rule of thumb for English text
TEMPLATE_TOKENS = 16  # what a chat template adds to a message


@dataclass(frozen=True, kw_only=True)
class Price:
    """USD per million input and output tokens; reasoning counts as output."""

    read: float
    written: float
    # For tokens read from the server's own cache or written into it, in place of `read`.
    cached: float
    cache_written: float

    def cost(self, reply: Completion) -> float | None:
        """Return the USD for a reply; None if its server does not report token counts."""
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

    def maximum_cost(self, body: dict[str, Any], max_tokens: int) -> float:
        """Return the USD that the reply to a request cannot exceed.

        A text never has more tokens than bytes, and the schema of a reply counts as input, too.
        """
        read_tokens = len(json.dumps(body).encode()) + TEMPLATE_TOKENS
        highest_price = max(self.read, self.cache_written)
        return (highest_price * read_tokens + self.written * max_tokens) / 1e6

    def typical_cost(self, body: dict[str, Any], written_tokens: float) -> float:
        """Return an estimate of the USD for a reply of this length."""
        read_tokens = len(json.dumps(body)) / CHARACTERS_PER_TOKEN + TEMPLATE_TOKENS
        return (self.read * read_tokens + self.written * written_tokens) / 1e6


def price_of(judge: JudgeSettings) -> Price | None:
    """Return the price of the judge's model; None if neither the settings nor the table has it.

    Raises UserError for a cost cap that cannot be enforced without a price.
    """
    listed = list_price(judge.model) or ListPrice()
    read = judge.input_price if judge.input_price >= 0 else listed.read
    written = judge.output_price if judge.output_price >= 0 else listed.written
    if read is None or written is None:
        if judge.max_cost:
            raise without_price(judge.model)
        return None

    # A price from the settings says nothing about the server's cache.
    cached = None
    cache_written = None
    if read == listed.read:
        cached = listed.cached
        cache_written = listed.cache_written
    return Price(
        read=read,
        written=written,
        cached=read if cached is None else cached,
        cache_written=read if cache_written is None else cache_written,
    )


class Budget:
    """Money for requests: the most that a request can cost is reserved before it is sent.

    After the reply the real cost is entered. So the cap holds, whatever the replies turn out to be
    and however many requests are under way. Used on one event loop only.
    """

    def __init__(self, cap: float) -> None:
        self.cap = cap
        """USD. 0: no limit."""
        self.spent = 0.0
        self.reserved: list[float] = []
        """The reservations of the requests that are under way."""
        self.changed = asyncio.Condition()

    async def reserve(self, usd: float) -> None:
        """Reserve money; wait while pending requests may still release part of their reservations.

        Raises UserError if the cap would be exceeded even so.
        """
        async with self.changed:
            await self.changed.wait_for(lambda: self._fits(usd) or not self.reserved)
            if not self._fits(usd):
                raise UserError(
                    f"the next request could bring the cost to ${self.spent + usd:.4f}, above "
                    f"judge.max_cost={self.cap:g}: raise it to continue (all replies are kept)"
                )
            self.reserved.append(usd)

    async def settle(self, reserved: float, usd: float) -> None:
        """Replace a request's reservation by its actual cost."""
        async with self.changed:
            self.reserved.remove(reserved)
            self.spent += usd
            self.changed.notify_all()

    def _fits(self, usd: float) -> bool:
        return not self.cap or self.spent + sum(self.reserved) + usd <= self.cap
