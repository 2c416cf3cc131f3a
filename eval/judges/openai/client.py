"""One question to a server that speaks the OpenAI chat protocol, until a whole reply is kept.

Passing errors are tried again: rate limits, server errors, timeouts, lost connections, bodies that
are no reply of the model that was asked. Lasting errors (a bad key, no credit, no such model) stop
everything with one line. An outage must stop the evaluation: if it counted as unjudged, it would
look like a result.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from eval.judges.openai.budget import Budget, Price, is_model
from eval.judges.openai.cache import ReplyCache
from eval.judges.openai.pace import Pace, retry_after_of
from eval.judges.prompt import LINES, OBJECT, RESPONSE_FORMAT, Question, make_question
from eval.judges.protocol import Comparison, Row
from stages.settings.checks import UserError
from stages.settings.judge import Judge as JudgeSettings

HINTS = {
    400: "check judge.model, judge.temperature and judge.max_tokens",
    401: "check OPENAI_API_KEY",
    402: "the account behind OPENAI_API_KEY has no credit",
    403: "OPENAI_API_KEY has no access to this model",
    404: "check judge.model and judge.base_url",
}
BAD_REQUESTS = (400, 422)
# Worth another try: a request timeout, a conflict, a rate limit; and all server errors.
PASSING = (408, 409, 425, 429)
NO_CREDIT = "insufficient_quota"


@dataclass(frozen=True)
class Dialect:
    """Which parts of the protocol a model accepts; its refusals show it."""

    structured: bool
    temperature: bool = True
    tokens: str = "max_tokens"

    def after(self, complaint: str, structured: str) -> "Dialect | None":
        """The dialect to try after a refusal, or None where it says nothing about the dialect."""
        if "max_completion_tokens" in complaint and self.tokens == "max_tokens":
            return replace(self, tokens="max_completion_tokens")
        if "temperature" in complaint and self.temperature:
            return replace(self, temperature=False)
        if self.structured and structured == "auto":
            return replace(self, structured=False)
        return None


class Request(NamedTuple):
    """A question as it is sent, without the budget of its reply."""

    key: str
    question: Question
    dialect: Dialect


class PassingError(Exception):
    """A try that failed and may be repeated."""

    def __init__(self, what: str, retry_after: float | None = None, usd: float | None = 0) -> None:
        super().__init__(what)
        self.retry_after, self.usd = retry_after, usd
        """`usd`: what it cost; None where that is unknown."""


class DialectError(Exception):
    """The server refused a part of the protocol: ask again without it."""


class Chat:
    """A model behind a server; may be asked from many threads."""

    def __init__(self, judge: JudgeSettings, cache: ReplyCache, price: Price | None) -> None:
        from openai import OpenAI

        self.settings, self.cache, self.price = judge, cache, price
        # The client never retries broken replies, and the ledger would not see its other retries.
        self.client = OpenAI(
            base_url=judge.base_url or None, timeout=judge.request_seconds, max_retries=0
        )
        self.url = str(self.client.base_url)
        self.pace = Pace(judge.requests_per_minute)
        self.budget = Budget(judge.max_cost)
        self.note = f"dialect {self.url} {judge.model}"
        self.dialect = Dialect(structured=judge.structured != "off")
        known = cache.note(self.note)
        self.confirmed = Dialect(**json.loads(known)) if known else None
        if self.confirmed and judge.structured == "auto":
            self.dialect = self.confirmed
        elif self.confirmed:
            self.dialect = replace(self.confirmed, structured=self.dialect.structured)
        self.stopped: UserError | None = None

    def request(self, one: Comparison) -> Request:
        """The request that a comparison makes, in the dialect that the server is known to take."""
        dialect = self.dialect
        question = make_question(
            one.query,
            one.first,
            one.second,
            OBJECT if dialect.structured else LINES,
            self.settings.axis,
        )
        body = self.body(Request("", question, dialect), max_tokens=0)
        del body[dialect.tokens]  # the budget is no part of the key: the cache keeps it apart
        asked = json.dumps((self.url, body), sort_keys=True)
        return Request(hashlib.sha256(asked.encode()).hexdigest(), question, dialect)

    def body(self, request: Request, max_tokens: int) -> dict[str, Any]:
        """The request as the protocol spells it."""
        body: dict[str, Any] = {
            "model": self.settings.model,
            "messages": [{"role": "user", "content": request.question.prompt}],
            request.dialect.tokens: max_tokens,
        }
        if request.dialect.temperature:
            body["temperature"] = self.settings.temperature
        if request.dialect.structured:
            body["response_format"] = RESPONSE_FORMAT
        return body

    def ask(self, request: Request, max_tokens: int) -> None:
        """Ask until a whole reply is in the cache.

        Raises UserError where the server refuses, does not answer after all tries, or the cap on
        the cost is too low; every other thread then gets the same error at its next try. Raises
        DialectError where the request must be made anew.
        """
        try:
            for failures in range(1, self.settings.max_retries + 2):
                self.pace.wait_for_turn()
                if self.stopped:
                    raise self.stopped
                try:
                    self._try(request, max_tokens, last=failures > self.settings.max_retries)
                    return
                except PassingError as fault:
                    what = fault
                if failures <= self.settings.max_retries:
                    self.pace.back_off(failures, what.retry_after)
            raise UserError(f"{self._who()}{what}; replies are kept: run it again to go on")
        except UserError as error:
            self.stopped = self.stopped or error
            self.pace.stop()
            raise

    def worst(self, request: Request, max_tokens: int) -> float:
        """USD that a reply cannot exceed; 0 where the price is unknown."""
        if self.price is None:
            return 0.0
        return self.price.at_worst(self.body(request, max_tokens), max_tokens)

    def cost(self, row: Row) -> float | None:
        """USD that a reply cost; 0 where the price is unknown, None where its tokens are."""
        if self.price is None:
            return 0.0
        if not row["prompt_tokens"] or (row["text"] and not row["completion_tokens"]):
            return None  # nothing is read or written for no tokens
        return self.price.of(row["prompt_tokens"], row["completion_tokens"])

    def _try(self, request: Request, max_tokens: int, last: bool) -> None:
        worst = self.worst(request, max_tokens)
        self.budget.reserve(worst)
        number = self.cache.begin(request.key, worst)
        usd, outcome, row, raw = worst, "lost", None, ""
        try:
            raw = self._post(self.body(request, max_tokens))
            row = self.read(request.key, request.question.hash, max_tokens, raw)
            if not row["text"].strip() and row["finish_reason"] == "stop" and not last:
                cost, row = self.cost(row), None
                raise PassingError("the reply is empty", usd=cost)
            usd, outcome = at_worst(self.cost(row), worst), "reply"
        except PassingError as fault:
            usd, outcome = at_worst(fault.usd, worst), str(fault)
            raise
        except (UserError, DialectError) as error:
            usd, outcome = 0.0, str(error)
            raise
        finally:
            self.cache.settle(number, usd, outcome, row, raw)
            self.budget.settle(worst, usd)
        self._confirm(request.dialect)

    def _post(self, body: dict[str, Any]) -> str:
        """The raw body of a reply; raises one of three errors where none came."""
        import openai

        try:
            reply = self.client.chat.completions.with_raw_response.create(**body)
        except openai.APITimeoutError:
            seconds = self.settings.request_seconds
            raise PassingError(f"no reply within {seconds:g} s", usd=None) from None
        except openai.APIConnectionError as error:
            raise PassingError(f"{error} {error.__cause__ or ''}".strip(), usd=None) from None
        except openai.APIStatusError as error:
            self._refuse(error.status_code, error.response, body)
        return reply.http_response.text

    def _refuse(self, status: int, response: Any, body: dict[str, Any]) -> None:
        """Sort an error status into what passes and what stays; always raises."""
        if (status in PASSING or status >= 500) and NO_CREDIT not in response.text:
            what = f"Error code: {status} - {' '.join(response.text.split())[:200]}"
            raise PassingError(what, retry_after_of(response.headers))
        if status in BAD_REQUESTS:
            self._change_dialect(response.text, body)
        raise UserError(self.refusal(status, response.text))

    def refusal(self, status: int, text: str) -> str:
        """One line on an error status that stays: what the server says and what to do."""
        said = f"Error code: {status} - {' '.join(text.split())[:200]}"
        known = 402 if NO_CREDIT in text else 400 if status in BAD_REQUESTS else status
        return f"{self._who()}{said}; {HINTS.get(known, 'replies are kept: run it again to go on')}"

    def _change_dialect(self, complaint: str, body: dict[str, Any]) -> None:
        """Raise DialectError where the refused body leaves something to leave out."""
        sent = Dialect(
            structured="response_format" in body,
            temperature="temperature" in body,
            tokens="max_tokens" if "max_tokens" in body else "max_completion_tokens",
        )
        changed = sent.after(complaint, self.settings.structured)
        if changed is None or sent == self.confirmed:
            return  # it has taken this dialect before: the fault lies with the request
        if self.dialect == sent:  # else another thread has changed it already
            self.dialect = changed
        raise DialectError(f"refused: {complaint[:200]}")

    def _confirm(self, dialect: Dialect) -> None:
        """Remember the dialect of a request that was answered, for the next run."""
        if self.confirmed != dialect:
            self.confirmed = dialect
            self.cache.set_note(self.note, json.dumps(asdict(dialect)))

    def read(self, key: str, prompt_hash: str, max_tokens: int, raw: str) -> Row:
        """A raw body as a row of the cache.

        Raises PassingError where it is no chat completion, or another model's, whose verdict
        must not enter the results.
        """
        try:
            completion = json.loads(raw)
            answer, usage = completion["choices"][0], completion.get("usage") or {}
            text = answer["message"].get("content") or answer["message"].get("refusal")
            row: Row = {
                "key": key,
                "max_tokens": max_tokens,
                "prompt_hash": prompt_hash,
                "requested_model": self.settings.model,
                "model": plain(completion.get("model")),
                "finish_reason": plain(answer.get("finish_reason")),
                "text": plain(text),
                "prompt_tokens": count(usage.get("prompt_tokens")),
                "completion_tokens": count(usage.get("completion_tokens")),
                "raw": raw,
            }
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            raise PassingError(
                f"no chat completion came back from {self.url}, but {raw[:60]!r}: check "
                "judge.base_url (it often ends in /v1)",
                usd=None,
            ) from None
        if not is_model(self.settings.model, row["model"]):
            raise PassingError(
                f"the reply is {row['model'] or 'nobody'}'s: if that is the judge you want, set "
                f"judge.model={row['model']}",
                usd=self.cost(row),
            )
        return row

    def _who(self) -> str:
        return f"judge {self.settings.model}: "


def at_worst(usd: float | None, worst: float) -> float:
    """What to count for a try: its cost, or where that is unknown the most that it can be."""
    return worst if usd is None else usd


def plain(value: Any) -> str:
    """A server's word as text that any file takes: half a surrogate pair becomes a mark."""
    return str(value or "").encode(errors="replace").decode()


def count(value: Any) -> int:
    """A server's number of tokens; 0 where it is none."""
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0
