"""A chat server that misbehaves at random, and keeps the books of what it was paid for.

A request gets a fault with a probability of 30 %. The right verdict is in the question: the better
summary says "good". What counts as paid is a whole and right reply.
"""

import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.lib.chat_server import chat

FAULT_SHARE = 0.3
SLOW_SECONDS = 2.0  # longer than the judge of the test waits


class FaultServer:
    """The books: requests by kind, whole replies by prompt, and replies without a verdict."""

    def __init__(self, seed: int) -> None:
        self.random, self.lock = random.Random(seed), threading.Lock()
        self.kinds: Counter[str] = Counter()
        self.paid: Counter[str] = Counter()
        self.unusable: Counter[str] = Counter()

    def answer(self, _: int, body: dict[str, Any]) -> Any:
        """Status, body and headers for a request."""
        prompt = body["messages"][0]["content"]
        with self.lock:
            faulty = self.random.random() < FAULT_SHARE
            kind = self.random.choice(list(FAULTS)) if faulty else "good"
            self.kinds[kind] += 1
            if kind == "good":
                self.paid[prompt] += 1
            if kind in UNUSABLE:
                self.unusable[prompt] += 1
        time.sleep(SLOW_SECONDS if kind == "time-out" else 0.005)
        letter = verdict(prompt)
        good = json.dumps({"comparison": "One is better.", "preferred": letter})
        return FAULTS[kind](good, letter) if faulty else (200, completion(good))


def verdict(prompt: str) -> str:
    """The letter of the summary that says so itself."""
    shown = re.search(r"<summary-A-\w+>\n(.*?)\n</summary-A", prompt, re.DOTALL)
    assert shown
    return "A" if shown[1].startswith("good") else "B"


def completion(text: str, finish_reason: str = "stop", model: str = "judge") -> str:
    return json.dumps(chat(text, finish_reason, model=model)[1])


def other(letter: str) -> str:
    return "B" if letter == "A" else "A"


UNUSABLE = ("empty text", "truncated", "wrong letter")
FAULTS: dict[str, Callable[[str, str], Any]] = {
    "rate limit": lambda good, letter: (429, "{}", {"Retry-After": "0.1"}),
    "server error": lambda good, letter: (500, '{"error": {"message": "down"}}', {}),
    "time-out": lambda good, letter: (200, completion(good)),
    "empty body": lambda good, letter: (200, ""),
    "empty text": lambda good, letter: (200, completion("")),
    "truncated": lambda good, letter: (200, completion(good[:-3], "length")),
    "malformed": lambda good, letter: (200, completion(good)[:-9]),
    "wrong letter": lambda good, letter: (200, completion(good.replace(f'"{letter}"', '"C"'))),
    "wrong model": lambda good, letter: (
        200,
        completion(good.replace(f'"{letter}"', f'"{other(letter)}"'), model="other"),
    ),
}
