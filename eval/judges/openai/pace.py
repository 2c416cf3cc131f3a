"""When to send the next request: a limit by the minute, backoff, and what the server asks for."""

import random
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from threading import Event, Lock

from stages.settings.checks import UserError

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
