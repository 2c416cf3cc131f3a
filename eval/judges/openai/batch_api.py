"""Questions through OpenAI's batch API: half the price, within a day, resumed after a kill.

A batch is noted in the cache, with what its lines ask, before anything waits for it. So any later
process can collect its replies. A reply from a batch is read as any other reply is.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from eval.judges.openai.budget import BATCH_DISCOUNT
from eval.judges.openai.client import Chat, Request
from eval.judges.openai.dialect import about_a_post
from eval.judges.openai.replies import PassingError
from eval.judges.protocol import Row
from stages.settings.checks import UserError

POLL_SECONDS = 30.0
# OpenAI takes 50,000 requests and 200 MB in a file, other servers half of that.
MOST_REQUESTS = 50_000
MOST_BYTES = 100_000_000
ENDED = ("completed", "failed", "expired", "cancelled")
NOTE = "batch "

Todo = Sequence[tuple[Request, int]]


class Line(NamedTuple):
    """A line of a batch's file."""

    custom_id: str
    request: Request
    max_tokens: int
    text: str


class Batches:
    """The batches of one model at one server."""

    def __init__(self, chat: Chat) -> None:
        self.chat, self.cache = chat, chat.cache
        self.prefix = f"{NOTE}{chat.url} {chat.settings.model} "
        # Uploads and polls may be repeated. Creating a batch may not: two batches cost twice.
        self.error = ""
        self.patient = chat.client.with_options(max_retries=chat.settings.max_retries)

    def collect_open(self, wait: bool) -> None:
        """Keep the replies of the batches that an earlier process has left.

        With `wait`, batches under way are waited for; without it they are named. Raises UserError
        as `ask` does.
        """
        for name, value in self.cache.notes(self.prefix).items():
            note = json.loads(value)
            if wait or self._has_ended(note["batch"]):
                self._finish(name, note)

    def _has_ended(self, batch_id: str | None) -> bool:
        if batch_id is None:
            return False  # uploaded, and as far as is known not begun
        if self._call(lambda: self.patient.batches.retrieve(batch_id)).status in ENDED:
            return True
        print(
            f"batch {batch_id} is under way and will be paid for too: judge.batch=true waits for it"
        )
        return False

    def ask(self, todo: Todo) -> int:
        """Ask all at once and wait for the replies; returns how many came.

        Raises UserError where the cap on the cost is too low, the server refuses, or no reply came.
        """
        replies = sum([self._submit(lines) for lines in self._files(todo)])
        if not replies and not self.chat.unanswerable.keys() & {one.key for one, _ in todo}:
            what = " ".join(self.error.split())[:200]
            raise UserError(f"no request of the last batch was answered: {what or 'no reason'}")
        return replies

    def _files(self, todo: Todo) -> Iterator[list[Line]]:
        """The requests as lines, in as many files as the server's limits ask for."""
        lines: list[Line] = []
        size = 0
        for request, max_tokens in todo:
            custom_id = f"{request.key[:40]}-{max_tokens}"
            body = self.chat.body(request, max_tokens)
            whole = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions"}
            text = json.dumps({**whole, "body": body}) + "\n"
            if len(lines) == MOST_REQUESTS or size + len(text) > MOST_BYTES:
                yield lines
                lines, size = [], 0
            lines.append(Line(custom_id, request, max_tokens, text))
            size += len(text)
        if lines:
            yield lines

    def _submit(self, lines: list[Line]) -> int:
        """Upload and note a file, then see it through; returns how many replies came."""
        worst = sum(BATCH_DISCOUNT * self.chat.worst(one.request, one.max_tokens) for one in lines)
        self.chat.budget.reserve(worst)
        content = "".join(one.text for one in lines).encode()
        file = self._call(
            lambda: self.patient.files.create(file=("judge.jsonl", content), purpose="batch")
        )
        asked = {
            one.custom_id: (
                *(one.request.key, one.request.question.hash, one.max_tokens),
                BATCH_DISCOUNT * self.chat.worst(one.request, one.max_tokens),
            )
            for one in lines
        }
        name, note = self.prefix + file.id, {"file": file.id, "batch": None, "asked": asked}
        self.cache.set_note(name, json.dumps(note))
        spent, replies = self._finish(name, note)
        self.chat.budget.settle(worst, spent)
        return replies

    def _finish(self, name: str, note: Row) -> tuple[float, int]:
        """Wait for a noted batch and keep its replies; returns USD spent and how many came."""
        if note["batch"] is None:
            note["batch"] = self._batch_of(note["file"])
            self.cache.set_note(name, json.dumps(note))
        batch = self._wait(note["batch"])
        spent, replies = 0.0, 0
        for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
            text = self._call(partial(self.patient.files.content, file_id)).text
            for line in filter(str.strip, text.split("\n")):
                usd, reply = self._keep(_row_of(line), note["asked"])
                spent, replies = spent + usd, replies + reply
        self.cache.set_note(name, None)
        if batch.status == "failed" and not replies:
            errors = batch.errors.data if batch.errors else None
            self.error = errors[0].message or "" if errors else "the batch failed"
        return spent, replies

    def _batch_of(self, file_id: str) -> str:
        """The batch that reads a file; one that a killed process has created is found again."""
        for batch in self._call(lambda: list(self.patient.batches.list(limit=100))):
            if batch.input_file_id == file_id:
                return str(batch.id)
        return str(
            self._call(
                lambda: self.chat.client.batches.create(
                    input_file_id=file_id,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                )
            ).id
        )

    def _wait(self, batch_id: str) -> Any:
        print(f"batch {batch_id}: under way; stop this at will, it goes on", flush=True)
        while True:
            batch = self._call(lambda: self.patient.batches.retrieve(batch_id))
            if batch.status in ENDED:
                return batch
            time.sleep(POLL_SECONDS)

    def _keep(self, line: Row, asked: dict[str, tuple[str, str, int, float]]) -> tuple[float, bool]:
        """Keep one line of a result; returns USD spent, and whether it is a reply."""
        if line.get("custom_id") not in asked:
            return 0.0, False
        key, prompt_hash, max_tokens, worst = asked[line["custom_id"]]
        if any(row["max_tokens"] == max_tokens for row in self.cache.replies(key)):
            return 0.0, False  # kept before a kill
        response = line.get("response") or {}
        if response.get("status_code") != 200:
            self.error = json.dumps(line.get("error") or response.get("body"))
            if why := about_a_post(response.get("status_code") or 400, self.error):
                self.chat.unanswerable[key] = f"{why}: {self.error[:200]}"
            return 0.0, False
        raw = json.dumps(response.get("body"))
        try:
            row = self.chat.read(key, prompt_hash, max_tokens, raw)
        except PassingError as error:
            usd = _half(error.usd, worst)
            self.error = str(error)
            self.cache.enter(key, usd, self.error, raw=raw)
            return usd, False
        usd = _half(self.chat.cost(row), worst)
        self.cache.enter(key, usd, "reply", row)
        self.chat.bill.add(row, usd)
        return usd, True

    def _call(self, call: Callable[[], Any]) -> Any:
        """The result of a call to the client; its errors, after its own retries, as UserError."""
        import openai

        try:
            return call()
        except openai.APIStatusError as error:
            raise UserError(self.chat.refusal(error.status_code, error.response.text)) from None
        except openai.APIConnectionError as error:
            raise UserError(f"{error} The batch is noted: run it again to go on") from None


def _row_of(line: str) -> Row:
    """A line of a result; an empty row where it is broken, so that the other lines are kept."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _half(usd: float | None, worst: float) -> float:
    """USD for a line: half of what it costs by itself; `worst` where that is unknown."""
    return worst if usd is None else BATCH_DISCOUNT * usd
