"""What asking costs: prices, and a cap that holds."""

import json
from collections.abc import Callable
from threading import Condition
from typing import NamedTuple

from eval.judges.protocol import Row
from stages.config.checks import UserError
from stages.config.judge import JudgeSettings
from stages.config.judge_models import Known, known_model, without_price

CHARACTERS_PER_TOKEN = 4  # OpenAI's own rule of thumb for English text
TEMPLATE_TOKENS = 16  # what a chat template adds to a message


class Price(NamedTuple):
    """USD per million tokens, read and written; reasoning is written too."""

    read: float
    written: float
    # Read from the server's own cache or put into it, in place of `read`.
    cached: float
    cache_written: float

    def of_row(self, row: Row) -> float:
        """USD for a reply as its server counts it."""
        cached, kept = row["cached_tokens"], row["cache_write_tokens"]
        plain = max(0, row["prompt_tokens"] - cached - kept)
        read = self.read * plain + self.cached * cached + self.cache_written * kept
        return (read + self.written * row["completion_tokens"]) / 1e6

    def at_worst(self, body: Row, max_tokens: int) -> float:
        """USD that the reply to a request cannot exceed.

        No tokenizer makes more tokens than there are bytes, and the schema of a reply is read too.
        """
        size = len(json.dumps(body).encode())
        dearest = max(self.read, self.cache_written)
        return (dearest * (size + TEMPLATE_TOKENS) + self.written * max_tokens) / 1e6

    def usually(self, body: Row, written: float) -> float:
        """USD that a reply of so many tokens will cost, about."""
        read = len(json.dumps(body)) / CHARACTERS_PER_TOKEN + TEMPLATE_TOKENS
        return (self.read * read + self.written * written) / 1e6


def price_of(judge: JudgeSettings) -> Price | None:
    """The price of the judge's model, or None where neither settings nor table know it.

    Raises UserError where a cap was asked for that cannot be kept without a price.
    """
    line = known_model(judge.model) or Known()
    read = judge.input_price if judge.input_price >= 0 else line.read
    written = judge.output_price if judge.output_price >= 0 else line.written
    if read is None or written is None:
        if judge.max_cost:
            raise without_price(judge.model)
        return None
    listed = read == line.read  # a price of one's own says nothing of what is cached
    cached = line.cached if listed and line.cached is not None else read
    kept = line.cache_written if listed and line.cache_written is not None else read
    return Price(read, written, cached, kept)


class Budget:
    """Money for requests: the most that a request can cost is reserved before it is sent.

    After the reply the real cost is booked. So the cap holds, whatever the replies turn out to be
    and however many requests are under way.
    """

    def __init__(self, cap: float, stopped: Callable[[], bool]) -> None:
        """`stopped` says whether nobody needs to wait for money any more."""
        self.cap, self.spent, self.reserved = cap, 0.0, 0.0
        self.stopped, self.changed = stopped, Condition()

    def reserve(self, usd: float) -> None:
        """Set money aside; waits while requests under way may still give back enough of theirs.

        Raises UserError where the cap would be crossed even so.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._fits(usd) or not self.reserved or self.stopped())
            if not self._fits(usd):
                raise UserError(
                    f"the next request could bring the cost to ${self.spent + usd:.4f}, above "
                    f"judge.max_cost={self.cap:g}: all replies are kept; raise it to go on"
                )
            self.reserved += usd

    def settle(self, reserved: float, usd: float) -> None:
        """Give back what was reserved, less what was spent."""
        with self.changed:
            self.reserved = max(0.0, self.reserved - reserved)
            if self.reserved < 1e-12:  # rounding
                self.reserved = 0.0
            self.spent += usd
            self.changed.notify_all()

    def _fits(self, usd: float) -> bool:
        return not self.cap or self.spent + self.reserved + usd <= self.cap
