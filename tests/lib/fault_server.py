"""A chat server that fails at random, and counts the replies that it was paid for.

A request fails with a probability of 30%. The right verdict is in the question: the better summary
begins with "good". A reply counts as paid for if it is complete and right.
"""

import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.lib.chat_server import chat, prompt_of

FAULT_SHARE = 0.3
NO_FAULT = "no fault"
SLOW_SECONDS = 2.0  # longer than the judge of the test waits


class FaultServer:
    """Counts of its requests by fault, and of paid and unusable replies by prompt."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.faults: Counter[str] = Counter()
        self.paid: Counter[str] = Counter()
        self.unusable: Counter[str] = Counter()

    def answer(self, _: int, body: dict[str, Any]) -> Any:
        """Status, body and headers for a request."""
        prompt = prompt_of(body)
        with self.lock:
            fault = NO_FAULT
            if self.random.random() < FAULT_SHARE:
                fault = self.random.choice(list(FAULTS))
            self.faults[fault] += 1
            if fault == NO_FAULT:
                self.paid[prompt] += 1
            if fault in UNUSABLE:
                self.unusable[prompt] += 1

        time.sleep(SLOW_SECONDS if fault == "time-out" else 0.005)
        letter = better_summary(prompt)
        if fault == NO_FAULT:
            return 200, completion(verdict_for(letter))
        return FAULTS[fault](letter)

    @property
    def requests(self) -> int:
        """Number of requests so far."""
        return self.faults.total()

    @property
    def fault_share(self) -> float:
        """Share of the requests that failed."""
        return 1 - self.faults[NO_FAULT] / self.requests


def better_summary(prompt: str) -> str:
    """The letter of the summary that calls itself good."""
    summary = re.search(r"<summary-A-\w+>\n(.*?)\n</summary-A", prompt, re.DOTALL)
    assert summary
    return "A" if summary[1].startswith("good") else "B"


def other(letter: str) -> str:
    return "B" if letter == "A" else "A"


def verdict_for(letter: str) -> str:
    return json.dumps({"comparison": "One is better.", "preferred": letter})


def completion(text: str, finish_reason: str = "stop", model: str = "judge") -> str:
    """The body of a completion."""
    _, body = chat(text, finish_reason, model=model)
    return json.dumps(body)


# -- faults: from the better summary's letter to status, body and perhaps headers ------------------


def rate_limit(letter: str) -> Any:
    return 429, "{}", {"Retry-After": "0.1"}


def server_error(letter: str) -> Any:
    return 500, '{"error": {"message": "down"}}', {}


def right_verdict(letter: str) -> Any:
    return 200, completion(verdict_for(letter))


def empty_body(letter: str) -> Any:
    return 200, ""


def empty_text(letter: str) -> Any:
    return 200, completion("")


def truncated_text(letter: str) -> Any:
    return 200, completion(verdict_for(letter)[:-3], finish_reason="length")


def malformed_body(letter: str) -> Any:
    return 200, completion(verdict_for(letter))[:-9]


def unknown_letter(letter: str) -> Any:
    return 200, completion(verdict_for("C"))


def wrong_verdict_of_another_model(letter: str) -> Any:
    return 200, completion(verdict_for(other(letter)), model="other")


FAULTS: dict[str, Callable[[str], Any]] = {
    "rate limit": rate_limit,
    "server error": server_error,
    "time-out": right_verdict,  # too late
    "empty body": empty_body,
    "empty text": empty_text,
    "truncated": truncated_text,
    "malformed": malformed_body,
    "unknown letter": unknown_letter,
    "another model": wrong_verdict_of_another_model,
}
# Complete replies without a verdict.
UNUSABLE = ("empty text", "truncated", "unknown letter")
