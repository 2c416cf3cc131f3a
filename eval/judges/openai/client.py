"""One question to a server that speaks the OpenAI chat protocol, until a whole reply is kept.

Passing errors are tried again: rate limits, server errors, timeouts, lost connections, bodies that
are no reply of the model that was asked. Lasting errors (a bad key, no credit, no such model) stop
everything with one line. An outage must stop the evaluation: if it counted as unjudged, it would
look like a result. A refusal of one post, such as one that is too long, leaves that post unjudged.

The first question of a process goes alone. It shows which parts of the protocol the server takes,
whether it answers in the name of the model that was asked, and whether that model reasons.
"""

import hashlib
import json
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from eval.judges.openai.budget import Bill, Budget, Price, is_to_reason
from eval.judges.openai.cache import ReplyCache
from eval.judges.openai.replies import (
    HINTS,
    Dialect,
    OtherModelError,
    Pace,
    PassingError,
    about_a_post,
    hider,
    is_accepted,
    mend_of,
    noted_dialect,
    read_reply,
    reasoned,
    refusal_of,
    retry_after_of,
    status_within,
)
from eval.judges.prompt import LINES, OBJECT, RESPONSE_FORMAT, Question, make_question
from eval.judges.protocol import Comparison, Row, within
from stages.settings.checks import UserError
from stages.settings.judge import JudgeSettings, check_address, key_of_environment

# A server that has answered in the right name may stumble. As many wrong names in a row are no
# stumble; a server that has never answered in the right name is stopped by its first.
MOST_OTHER_NAMES = 4
# An empty reply may be a stumble, and as many of one question are none. A server that has never
# said a word is stopped after as many questions.
MOST_EMPTY_REPLIES = 3
MOST_SILENT_QUESTIONS = 3


class ChatRequest(NamedTuple):
    """A question as it is sent, without the budget of its reply."""

    key: str
    """Names the question and what was set, not what the server takes: see `Chat.request`."""
    other_keys: tuple[str, ...]
    """Under which a reply to it may lie too."""
    question: Question
    dialect: Dialect


class DialectError(Exception):
    """The server refused a part of the protocol: ask again without it."""


class PostError(Exception):
    """The server will not judge this one post, whatever else it takes."""


class StoppedError(UserError):
    """Somebody has stopped the judge; what was answered is kept."""


class Chat:
    """A model behind a server; may be asked from many threads."""

    def __init__(self, judge: JudgeSettings, cache: ReplyCache, price: Price | None) -> None:
        from openai import OpenAI

        self.settings, self.cache, self.price = judge, cache, price
        # The client never retries broken replies, and the ledger would not see its other retries.
        self.client = OpenAI(
            api_key=key_of_environment(),
            base_url=judge.base_url or None,
            timeout=judge.request_seconds,
            max_retries=0,
        )
        self.url = str(self.client.base_url)
        check_address(self.url, judge.model)
        self.hide = hider(self.client.api_key)
        self.pace = Pace(judge.requests_per_minute)
        self.stopped: UserError | None = None
        self.budget = Budget(judge.max_cost, lambda: self.stopped is not None)
        self.bill = Bill(f"judge {judge.model}")
        self.first, self.answered, self.other_names = Lock(), False, 0
        self.unanswerable: dict[str, str] = {}
        """Why the server will not judge a post, by the key of the request."""
        self.narrow: set[str] = set()
        """Requests that leave no room for reasoning, because with it they were too long."""
        self.empty: Counter[str] = Counter()
        """Empty replies, by the key of the request."""
        self._recall()

    def _recall(self) -> None:
        """What an earlier process has found out about this server and model."""
        judge = self.settings
        # Whether a temperature is taken depends on the effort.
        self.note = f"takes {self.url} {judge.model} {judge.reasoning_effort}"
        known, reasons = noted_dialect(self.cache.note(self.note))
        self.reasons = reasons or is_to_reason(judge)
        self.dialect = known or Dialect(structured=True)
        if judge.structured != "auto":
            self.dialect = replace(self.dialect, structured=judge.structured == "on")
        self.confirmed = self.dialect if known else None

    def request(self, comparison: Comparison) -> ChatRequest:
        """The request that a comparison makes, in the dialect that the server is known to take.

        Its key is made of what was set, so that a reply is found whatever the server takes by then.
        With judge.structured=auto a reply in either form counts.
        """
        forms = {"on": (True,), "off": (False,)}.get(self.settings.structured, (True, False))
        _, query, first, second, repeat = comparison
        questions = {
            form: make_question(query, first, second, OBJECT if form else LINES, self.settings.axis)
            for form in forms
        }
        keys = {form: self._key(questions[form], form, repeat) for form in forms}
        own = keys.pop(self.dialect.structured)
        question = questions[self.dialect.structured]
        return ChatRequest(own, tuple(keys.values()), question, self.dialect)

    def _key(self, question: Question, structured: bool, repeat: int) -> str:
        """The hash of a question with all that was set. The budget is kept beside the key."""
        body = self._body(question, Dialect(structured=structured))
        whole = (self.url, body, repeat) if repeat else (self.url, body)
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()

    def _body(self, question: Question, dialect: Dialect) -> dict[str, Any]:
        """The request as the protocol spells it, without its budget."""
        judge = self.settings
        body: dict[str, Any] = {
            "model": judge.model,
            "messages": [{"role": "user", "content": question.prompt}],
        }
        if dialect.temperature:
            body["temperature"] = judge.temperature
        if dialect.structured:
            body["response_format"] = RESPONSE_FORMAT
        if dialect.effort and judge.reasoning_effort != "default":
            body["reasoning_effort"] = judge.reasoning_effort
        return body

    def body(self, request: ChatRequest, max_tokens: int) -> dict[str, Any]:
        """The request as the protocol spells it; a judge that reasons gets room for it."""
        return self._limited(request, self.limit(request, max_tokens))

    def _limited(self, request: ChatRequest, limit: int) -> dict[str, Any]:
        return self._body(request.question, request.dialect) | {request.dialect.tokens: limit}

    def limit(self, request: ChatRequest, max_tokens: int) -> int:
        """The most tokens a reply may take: its budget, and room for reasoning that grows with it.

        A judge that reasons spends its tokens on that first, and says nothing if they run out.
        """
        judge = self.settings
        if not self.reasons or request.key in self.narrow:
            return max_tokens
        return max_tokens + judge.reasoning_tokens * max_tokens // judge.max_tokens

    def refuse_post(self, request: ChatRequest, why: str) -> None:
        """Note that the server will not judge a post, unless it may without room for reasoning."""
        if self.reasons and request.key not in self.narrow:
            self.narrow.add(request.key)
        else:
            self.unanswerable[request.key] = why

    def ask(self, request: ChatRequest, max_tokens: int) -> None:
        """Ask until a whole reply is in the cache; the first question of a process goes alone.

        Raises UserError where the server refuses, does not answer after all tries, or the cap on
        the cost is too low; every other thread then gets the same error at its next try. Raises
        DialectError where the request must be made anew, and PostError where the server will not
        judge this post.
        """
        with self.first:
            if not self.answered:
                self._ask(request, max_tokens)
                return
        self._ask(request, max_tokens)

    def _ask(self, request: ChatRequest, max_tokens: int) -> None:
        try:
            for failures in range(1, self.settings.max_retries + 2):
                self.pace.wait_for_turn()
                if self.stopped:
                    raise self.stopped
                if request.dialect != self.dialect:
                    raise DialectError("another thread has found out more")
                try:
                    self._try(request, max_tokens, last=failures > self.settings.max_retries)
                    return
                except PassingError as fault:
                    what = fault
                    if isinstance(fault, OtherModelError) and self._is_for_good():
                        raise UserError(f"{self._who()}{fault}") from None
                if failures <= self.settings.max_retries:
                    self.pace.back_off(failures, what.retry_after)
            raise UserError(f"{self._who()}{what}; replies are kept: run it again to go on")
        except UserError as error:
            self.stop(error)
            raise

    def stop(self, error: UserError) -> None:
        """Let every thread end with this error at its next try, and wake those that wait."""
        self.stopped = self.stopped or error
        self.pace.stop()
        self.budget.wake()

    def _is_for_good(self) -> bool:
        """Whether the server answers in another name than the one asked, and not by a slip."""
        return self.confirmed is None or self.other_names >= MOST_OTHER_NAMES

    def worst(self, request: ChatRequest, max_tokens: int) -> float:
        """USD that a reply cannot exceed; 0 where the price is unknown."""
        return self._worst(request, self.limit(request, max_tokens))

    def _worst(self, request: ChatRequest, limit: int) -> float:
        return self.price.at_worst(self._limited(request, limit), limit) if self.price else 0.0

    def cost(self, row: Row) -> float | None:
        """USD that a reply cost; 0 where the price is unknown, None where its tokens are."""
        if self.price is None:
            return 0.0
        if not row["prompt_tokens"] or (row["text"] and not row["completion_tokens"]):
            return None  # nothing is read or written for no tokens
        return self.price.of_row(row)

    def _try(self, request: ChatRequest, max_tokens: int, last: bool) -> None:
        # Computed once: another thread may find out meanwhile that the judge reasons.
        limit = self.limit(request, max_tokens)
        worst = self._worst(request, limit)
        self.budget.reserve(worst)
        # In the ledger it stands at its worst price until it is known how it ended.
        number = self.cache.begin(request.key, worst)
        end: dict[str, Any] = {"number": number, "usd": worst, "outcome": "lost"}
        exchange = partial(self._exchange, request, limit, last, end)
        try:
            within(self.settings.request_seconds, exchange)
        except TimeoutError:
            self.cache.settle(number, worst, str(self._silence()))
            raise self._silence() from None
        finally:
            self.budget.settle(worst, end["usd"])
        self._learn(request.dialect, end["reply"], end["usd"])

    def _exchange(self, request: ChatRequest, limit: int, last: bool, end: dict[str, Any]) -> None:
        """Send a request, keep its reply and enter it in `end`, all in the thread that hears it.

        Until another thread were awake, a kill could lose the reply.
        """
        worst = end["usd"]
        try:
            end["raw"] = self._post(self._limited(request, limit), request.dialect)
            row = self._read(request, limit, end["raw"])
            if is_empty(row):
                self.empty[request.key] += 1
                if not last and self.empty[request.key] <= MOST_EMPTY_REPLIES:
                    raise PassingError("the reply is empty", usd=self.cost(row))
            end |= {"usd": at_worst(self.cost(row), worst), "outcome": "reply", "reply": row}
        except PassingError as fault:
            end |= {"usd": at_worst(fault.usd, worst), "outcome": str(fault)}
            raise
        except (UserError, DialectError, PostError) as error:
            end |= {"usd": 0.0, "outcome": str(error)}
            raise
        finally:
            self.cache.settle(**end)

    def _learn(self, dialect: Dialect, row: Row, usd: float) -> None:
        """Bill a reply that was kept, and note what it shows of its server."""
        self.bill.add(row, usd)
        if not is_empty(row) or reasoned(row):
            self._confirm(dialect, row)
        elif self.confirmed is None and len(self.empty) >= MOST_SILENT_QUESTIONS:
            first = f"the replies to the first {MOST_SILENT_QUESTIONS} questions are all empty"
            raise UserError(f"{self._who()}{first}: check judge.model, or what its server logs")

    def _post(self, body: dict[str, Any], dialect: Dialect) -> str:
        """The raw body of a reply; raises one of four errors where none came."""
        import openai

        try:
            reply = self.client.chat.completions.with_raw_response.create(**body)
        except openai.APITimeoutError:  # of one part of a reply, of which there may be many
            raise self._silence() from None
        except openai.APIConnectionError as error:
            what = f"{error} {error.__cause__ or ''}".strip()
            raise PassingError(self.hide(what), usd=None) from None
        except openai.APIStatusError as error:
            self._refuse(error.status_code, error.response, dialect)
        except Exception as error:  # a defect, whose text may hold what was sent
            if self.hide(str(error)) == str(error):
                raise
            raise RuntimeError(self.hide(f"{type(error).__name__}: {error}")) from None
        if status := status_within(reply.http_response.text):
            self._refuse(status, reply.http_response, dialect)
        return self.hide(reply.http_response.text)

    def _refuse(self, status: int, response: Any, dialect: Dialect) -> None:
        """Sort an error status into what passes, what stays and what one post met; raises."""
        text = self.hide(response.text)
        words = " ".join(text.split())[:200]
        if kind := about_a_post(status, text):
            raise PostError(f"{kind}: {words}")
        error, mend = f"Error code: {status} - {words}", mend_of(status, text)
        if not mend:
            raise PassingError(error, retry_after_of(response.headers))
        if mend == HINTS[400]:
            self._change_dialect(text, dialect)
        raise UserError(f"{self._who()}{error}; {mend}")

    def _change_dialect(self, complaint: str, sent: Dialect) -> None:
        """Raise DialectError where the refused request leaves something to leave out.

        What a server took in an earlier process it may refuse by now, so it is learned anew.
        """
        keep = ("structured",) if self.settings.structured == "on" else ()
        if self.settings.reasoning_effort == "default":
            keep = (*keep, "effort")
        changed = sent.after(refusal_of(complaint), keep)
        if changed is None or (sent == self.confirmed and self.answered):
            return  # it has taken this dialect just now: the fault lies with the request
        if self.dialect == sent:  # else another thread has changed it already
            self.dialect = changed
        raise DialectError(f"refused: {complaint[:200]}")

    def _confirm(self, dialect: Dialect, row: Row) -> None:
        """Remember what a server took that answered, for the next run."""
        self.answered, self.other_names = True, 0
        reasons = self.reasons or reasoned(row)
        if self.confirmed == dialect and self.reasons == reasons:
            return
        self.confirmed, self.reasons = dialect, reasons
        # Whether a schema is taken is not known where none was wanted.
        taken = replace(dialect, structured=dialect.structured or self.settings.structured == "off")
        self.cache.set_note(self.note, json.dumps({**asdict(taken), "reasons": reasons}))

    def _read(self, request: ChatRequest, limit: int, raw: str) -> Row:
        """A raw body as a row of the cache, with the limit that was sent as its `max_tokens`.

        Raises PassingError where it is no chat completion or another model's, whose verdict must
        not enter the results.
        """
        row = read_reply(raw) | {
            "key": request.key,
            "max_tokens": limit,
            "prompt_hash": request.question.hash,
            "requested_model": self.settings.model,
        }
        if is_accepted(self.settings, row["model"]):
            return row
        self.other_names += 1
        name, paid = row["model"], self.cost(row)
        what = (
            f"the reply is {name}'s: if that is the judge you want, set "
            f"judge.model={name}, or judge.accept_model={name} to ask it as {self.settings.model}"
        )
        if not name:
            what = "the reply names no model: to take it all the same, set judge.accept_model='*'"
        raise OtherModelError(what, usd=paid)

    def _silence(self) -> PassingError:
        """The error for a server that has not sent a whole reply in time."""
        mend = "raise judge.request_seconds if the server needs longer"
        return PassingError(
            f"no reply within {self.settings.request_seconds:g} s: {mend}", usd=None
        )

    def _who(self) -> str:
        return f"judge {self.settings.model}: "


def is_empty(row: Row) -> bool:
    """Whether a reply has ended without a word."""
    return bool(row["finish_reason"] == "stop" and not row["text"].strip())


def at_worst(usd: float | None, worst: float) -> float:
    """What to count for a try: its cost, or where that is unknown the most that it can be."""
    return worst if usd is None else usd
