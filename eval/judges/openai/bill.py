"""What the replies of one process cost and held, beside what was estimated."""

from dataclasses import dataclass, field
from threading import Lock

from eval.judges.protocol import Row
from stages.system.terminal import told

MEASURED_AFTER = 20
"""Replies after which the estimate is checked by what they cost."""
WORTH_SAYING = 0.25
"""A new estimate is printed if it differs from the first by a larger share."""


@dataclass
class Bill:
    """Counts replies as they are kept; may be used from many threads."""

    who: str
    expected: int = 0
    """Replies still to ask for when the estimate was made."""
    estimate: float | None = None
    """USD for these; None where the price is unknown."""
    replies: int = 0
    usd: float = 0.0
    read: int = 0
    written: int = 0
    reasoning: int = 0
    cut_off: int = 0
    """Tokens of replies that were cut off at their budget, and so written for nothing."""
    lock: Lock = field(default_factory=Lock)

    def add(self, row: Row, usd: float) -> None:
        """Count a reply that was kept, and say if the estimate turns out to be far off."""
        with self.lock:
            self.replies += 1
            self.usd += usd
            self.read += row["prompt_tokens"]
            self.written += row["completion_tokens"]
            self.reasoning += row["reasoning_tokens"]
            self.cut_off += row["completion_tokens"] * (row["finish_reason"] == "length")
            if self.replies == MEASURED_AFTER and self.estimate:
                self._say_new_estimate(self.estimate)

    def _say_new_estimate(self, first: float) -> None:
        new = self.usd / self.replies * max(self.expected, self.replies)
        if abs(new - first) > WORTH_SAYING * first:
            tokens, reasoning = self.written / self.replies, self.reasoning / self.replies
            took = f"the first {self.replies} replies took {tokens:.0f} tokens each"
            mended = f"about ${usd(new)} in all, not ${usd(first)}"
            lines = (took, f"{reasoning:.0f} of them reasoning: {mended}")
            print("\n".join(told(self.who, one) for one in lines), flush=True)

    def lines(self) -> str:
        """The bill in lines of 80 columns; empty where nothing was asked."""
        if not self.replies:
            return ""
        cost = ""
        if self.estimate is not None:
            cost = f" cost ${usd(self.usd)}, estimated ${usd(self.estimate)}"
        lines = (
            f"{self.replies:,} replies{cost}",
            f"{self.read:,} tokens read, {self.written:,} written",
            f"of these {self.reasoning:,} reasoning, {self.cut_off:,} in replies cut off",
        )
        return "\n".join(told(self.who, one) for one in lines)


def usd(amount: float) -> str:
    """Dollars as pages and lines show them: cents from ten dollars on, and more digits below."""
    return f"{amount:,.2f}" if amount >= 10 else f"{amount:.4f}"
