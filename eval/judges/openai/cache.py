"""Replies and what they cost: one SQLite file for all judges.

A row is one request. It is entered at its maximum cost before the request is sent, and completed
afterwards, so after a kill the file never understates what was spent. A reply is in its row before
it is used, and only if it is finished.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from threading import Lock

from eval.judges.openai.replies import Completion
from stages.config.errors import UserError

# Part of the file's name. Another version of the table is another file.
VERSION = 2
SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL, prompt_hash TEXT NOT NULL, time TEXT NOT NULL,
    usd REAL NOT NULL, outcome TEXT NOT NULL, reply TEXT
);
CREATE INDEX IF NOT EXISTS requests_by_key ON requests (key);
"""
UNDER_WAY = "under way"
SECONDS_TO_WAIT = 60.0  # while another process is writing


def cache_file(runs: Path) -> Path:
    """Return the file with the replies of all judges."""
    return runs / "judge_cache" / f"replies-{VERSION}.sqlite"


class ReplyCache:
    """The cache file, which several threads and processes may use at the same time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.lock = Lock()
        with self._locked():
            self.connection = sqlite3.connect(path, SECONDS_TO_WAIT, check_same_thread=False)
            self.connection.executescript(SCHEMA)

    def replies(self, key: str) -> list[Completion]:
        """Return the finished replies to a request, the oldest first."""
        query = "SELECT reply FROM requests WHERE key = ? AND reply IS NOT NULL ORDER BY id"
        with self._locked():
            rows = self.connection.execute(query, (key,)).fetchall()
        try:
            return [Completion(**json.loads(reply)) for (reply,) in rows]
        except (ValueError, TypeError):
            raise self._damaged("a row contains no reply") from None

    def begin(self, key: str, prompt_hash: str, usd: float) -> int:
        """Enter a request that is about to be sent, at its maximum cost; return its number."""
        query = "INSERT INTO requests (key, prompt_hash, time, usd, outcome) VALUES (?, ?, ?, ?, ?)"
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        with self._locked(), self.connection:
            cursor = self.connection.execute(query, (key, prompt_hash, time, usd, UNDER_WAY))
            return cursor.lastrowid or 0

    def settle(self, number: int, *, usd: float, outcome: str, reply: Completion | None) -> None:
        """Enter how a request ended, what it cost, and its reply if it is finished."""
        text = json.dumps(asdict(reply)) if reply else None
        query = "UPDATE requests SET usd = ?, outcome = ?, reply = ? WHERE id = ?"
        with self._locked(), self.connection:
            self.connection.execute(query, (usd, outcome, text, number))

    def spent(self, keys: Iterable[str]) -> float:
        """Return the cost of these requests in USD; a lost one counts at its maximum."""
        query = "SELECT SUM(usd) FROM requests WHERE key IN (SELECT value FROM json_each(?))"
        with self._locked():
            row = self.connection.execute(query, (json.dumps(sorted(set(keys))),)).fetchone()
        return float(row[0] or 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Allow one thread at a time, and turn SQLite's errors into a UserError with the file."""
        with self.lock:
            try:
                yield
            except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter from a damaged file
                raise self._damaged(str(error)) from None

    def _damaged(self, what: str) -> UserError:
        return UserError(
            f"{self.path}: the cache of replies fails ({what}): free some disk space, or move it"
            " away (then its replies are asked for again)"
        )
