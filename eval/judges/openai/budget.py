"""What asking costs: prices, an estimate before the first request, and a cap that holds."""

import json
import re
from threading import Condition
from typing import NamedTuple

from eval.judges.protocol import Row
from stages.settings.checks import UserError
from stages.settings.judge import PRICES
from stages.settings.judge import Judge as JudgeSettings

# OpenAI's own rule of thumb for English text.
CHARACTERS_PER_TOKEN = 4
# What a chat template adds to a message.
TEMPLATE_TOKENS = 16
# One sentence and a verdict.
USUAL_REPLY_TOKENS = 60
BATCH_DISCOUNT = 0.5


class Price(NamedTuple):
    """USD per million tokens, read and written."""

    read: float
    written: float

    def of(self, prompt_tokens: float, completion_tokens: float) -> float:
        """USD for so many tokens."""
        return (self.read * prompt_tokens + self.written * completion_tokens) / 1e6

    def at_worst(self, body: Row, max_tokens: int) -> float:
        """USD that the reply to a request cannot exceed.

        No tokenizer makes more tokens than there are bytes, and the schema of a reply is read too.
        """
        size = len(json.dumps(body).encode())
        return self.of(size + TEMPLATE_TOKENS, max_tokens)

    def usually(self, body: Row, max_tokens: int) -> float:
        """USD that the reply to a request will cost, about."""
        tokens = len(json.dumps(body)) / CHARACTERS_PER_TOKEN + TEMPLATE_TOKENS
        return self.of(tokens, min(max_tokens, USUAL_REPLY_TOKENS))


def price_of(judge: JudgeSettings) -> Price | None:
    """The price of the judge's model, or None where neither settings nor table know it.

    Raises UserError where a cap was asked for that cannot be kept without a price.
    """
    known = [name for name in PRICES if is_model(name, judge.model)]
    read, written = PRICES[max(known, key=len)] if known else (-1.0, -1.0)
    read = judge.input_price if judge.input_price >= 0 else read
    written = judge.output_price if judge.output_price >= 0 else written
    if read < 0 or written < 0:
        if judge.max_cost:
            raise UserError(
                f"judge.max_cost needs the price of {judge.model}, which the table in "
                "stages/settings/judge.py lacks: set judge.input_price and judge.output_price"
            )
        return None
    return Price(read, written)


def is_model(requested: str, returned: str) -> bool:
    """Whether a returned model id is the requested one: itself, a dated snapshot, a revision."""
    dated = r"(?:-\d{4}-\d{2}-\d{2}|-\d{4,8}|@.+|:latest)?"
    return re.fullmatch(re.escape(requested) + dated, returned) is not None


class Budget:
    """Money for requests: the most that a request can cost is reserved before it is sent.

    After the reply the real cost is booked. So the cap holds, whatever the replies turn out to be
    and however many requests are under way.
    """

    def __init__(self, cap: float, spent: float = 0.0) -> None:
        self.cap, self.spent, self.reserved = cap, spent, 0.0
        self.changed = Condition()

    def reserve(self, usd: float) -> None:
        """Set money aside; waits while requests under way may still give back enough of theirs.

        Raises UserError where the cap would be crossed even so.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._fits(usd) or not self.reserved)
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
