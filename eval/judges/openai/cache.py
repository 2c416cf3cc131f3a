"""Replies that were paid for, on disk before anyone uses them: one SQLite file for all judges.

A reply is found again by its budget and its key, the hash of all else that determines it.

Beside the replies stands a ledger. Every try is entered at the most that it can cost before it is
sent, and settled afterwards: after a kill the ledger says no less than was spent.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from threading import RLock
from typing import Any

from eval.judges.openai.replies import PassingError, read_reply
from eval.judges.protocol import Row
from stages.config.checks import UserError

SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (
    key TEXT NOT NULL, max_tokens INTEGER NOT NULL, prompt_hash TEXT NOT NULL,
    requested_model TEXT NOT NULL, model TEXT NOT NULL, finish_reason TEXT NOT NULL,
    text TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    raw TEXT NOT NULL, time TEXT NOT NULL, PRIMARY KEY (key, max_tokens)
);
CREATE TABLE IF NOT EXISTS tries (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL, usd REAL NOT NULL, outcome TEXT NOT NULL,
    time TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS tries_by_key ON tries (key);
"""
COLUMNS = (
    *("key", "max_tokens", "prompt_hash", "requested_model", "model", "finish_reason"),
    *("text", "prompt_tokens", "completion_tokens", "raw", "time"),
)
READ = ("key", "max_tokens", "prompt_hash", "requested_model", "raw")
"""What is read again. The other columns are for people: `raw` says the same, and decides."""
UNDER_WAY = "under way"
SECONDS_TO_WAIT = 60.0  # where another process is writing


class ReplyCache:
    """The cache file; may be used from many threads, and by several processes at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.lock = path, RLock()
        with self._named():
            self.connection = sqlite3.connect(path, SECONDS_TO_WAIT, check_same_thread=False)
            self.connection.row_factory = sqlite3.Row
            self.connection.executescript(SCHEMA)

    def replies(self, *keys: str) -> list[Row]:
        """All replies under these keys, by the order of the keys and then the smallest budget."""
        query = f"SELECT {', '.join(READ)} FROM replies WHERE key = ? ORDER BY max_tokens"
        rows = [dict(row) for key in keys for row in self._read(query, (key,))]
        if any(tuple(map(type, row.values())) != (str, int, str, str, str) for row in rows):
            raise self._damaged("a value in it is of a wrong type")
        try:
            return [row | read_reply(row["raw"]) for row in rows]
        except PassingError:
            raise self._damaged("a reply's raw is no chat completion") from None

    def begin(self, key: str, usd: float) -> int:
        """Enter a try that is about to be sent, at its worst price; returns its number."""
        query = "INSERT INTO tries (key, usd, outcome, time) VALUES (?, ?, ?, ?)"
        with self.lock, self._named(), self.connection:
            return self.connection.execute(query, (key, usd, UNDER_WAY, now())).lastrowid or 0

    def settle(self, number: int, usd: float, outcome: str, reply: Row | None = None) -> None:
        """Enter how a try ended and what it cost, with its reply in the same transaction.

        A reply that another process has stored already is kept, unless another model gave it.
        """
        with self.lock, self._named(), self.connection:
            if reply is not None:
                self._keep(reply)
            self.connection.execute(
                "UPDATE tries SET usd = ?, outcome = ? WHERE id = ?", (usd, outcome, number)
            )

    def _keep(self, reply: Row) -> None:
        changed = ", ".join(f"{name} = excluded.{name}" for name in COLUMNS)
        self.connection.execute(
            f"INSERT INTO replies ({', '.join(COLUMNS)}) VALUES (:{', :'.join(COLUMNS)})"
            f" ON CONFLICT DO UPDATE SET {changed} WHERE model != excluded.model",
            reply | {"time": now()},
        )

    def spent(self, keys: Iterable[str]) -> float:
        """USD that these questions have cost so far; a try that was lost counts at its worst."""
        query = (
            "SELECT SUM(usd), SUM(typeof(usd) != 'real' OR usd < 0) FROM tries"
            " WHERE key IN (SELECT value FROM json_each(?))"
        )
        ((usd, wrong),) = self._read(query, (json.dumps(sorted(set(keys))),))
        if wrong:
            raise self._damaged("what a try has cost is no sum of money")
        return usd or 0.0

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What SQLite refuses is a UserError that names the file."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter from a damaged file
            raise self._damaged(str(error)) from None

    def _damaged(self, what: str) -> UserError:
        mend = "make room, or move it away: the replies in it are then asked for again"
        return UserError(f"{self.path}: the cache of replies fails ({what}): {mend}")

    def _read(self, query: str, values: tuple[Any, ...]) -> list[sqlite3.Row]:
        with self.lock, self._named(), closing(self.connection.execute(query, values)) as cursor:
            return cursor.fetchall()


def now() -> str:
    """The time, UTC, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
