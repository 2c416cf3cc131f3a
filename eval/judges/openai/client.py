"""One question to a server that speaks the OpenAI chat protocol, until a whole reply is kept.

Passing errors are tried again: rate limits, server errors, timeouts, lost connections, bodies that
are no reply of the model that was asked. Lasting errors (a bad key, no credit, no such model) stop
everything with one line. An outage must stop the evaluation: if it counted as unjudged, it would
look like a result. A refusal of one post, such as one that is too long, leaves that post unjudged.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from eval.judges.openai.budget import Bill, Budget, Price, is_to_reason
from eval.judges.openai.cache import ReplyCache
from eval.judges.openai.replies import (
    HINTS,
    OtherModelError,
    Pace,
    PassingError,
    about_a_post,
    hider,
    is_accepted,
    mend_of,
    read_reply,
    reasoned,
    retry_after_of,
)
from eval.judges.openai.request import ChatRequest, Dialect, request_for
from eval.judges.protocol import Comparison, Row, within
from stages.settings.checks import UserError
from stages.settings.judge import JudgeSettings, check_address, key_of_environment

# A server that has answered in the right name may stumble. As many wrong names in a row are no
# stumble; a server that has never answered in the right name is stopped by its first.
MOST_OTHER_NAMES = 4
# A server that has never said a word is stopped after as many questions.
MOST_SILENT_QUESTIONS = 3


@dataclass
class Try:
    """One request, as the ledger has it: at its worst price until it is known how it ended."""

    number: int
    usd: float
    outcome: str = "lost"
    reply: Row | None = None
    raw: str = ""


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
        self.dialect = Dialect(structured=judge.structured != "off")
        self.confirmed: Dialect | None = None
        """The last dialect in which the server has answered."""
        self.reasons = is_to_reason(judge)
        self.other_names = 0
        """Replies in another model's name, in a row."""
        self.silent: set[str] = set()
        """Questions with an empty reply, by the key of the request."""
        self.unanswerable: dict[str, str] = {}
        """Why the server will not judge a post, by the key of the request."""
        self.narrow: set[str] = set()
        """Requests that leave no room for reasoning, because with it they were too long."""

    def request(self, comparison: Comparison) -> ChatRequest:
        """The request that a comparison makes, in the dialect that the server is known to take."""
        return request_for(comparison, self.settings, self.url, self.dialect)

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

    def worst(self, request: ChatRequest, limit: int) -> float:
        """USD that a reply of at most `limit` tokens cannot exceed; 0 where no price is known."""
        return self.price.at_worst(request.body(limit), limit) if self.price else 0.0

    def cost(self, row: Row) -> float | None:
        """USD that a reply cost; 0 where the price is unknown, None where its tokens are."""
        if self.price is None:
            return 0.0
        if not row["prompt_tokens"] or (row["text"] and not row["completion_tokens"]):
            return None  # nothing is read or written for no tokens
        return self.price.of_row(row)

    def ask(self, request: ChatRequest, max_tokens: int) -> None:
        """Ask until a whole reply is in the cache.

        Raises UserError where the server refuses, does not answer after all tries, or the cap on
        the cost is too low; every other thread then gets the same error at its next try. Raises
        DialectError where the request must be made anew, and PostError where the server will not
        judge this post.
        """
        try:
            self._ask(request, max_tokens)
        except UserError as error:
            self.stop(error)
            raise

    def _ask(self, request: ChatRequest, max_tokens: int) -> None:
        tries = self.settings.max_retries + 1
        for number in range(1, tries + 1):
            self.pace.wait_for_turn()
            if self.stopped:
                raise self.stopped
            if request.dialect != self.dialect:
                raise DialectError("another thread has found out more")
            try:
                self._try(request, max_tokens)
                return
            except PassingError as error:
                fault = error
            if isinstance(fault, OtherModelError) and self._is_for_good():
                raise UserError(f"{self._who()}{fault}")
            if number < tries:
                self.pace.back_off(number, fault.retry_after)
        raise UserError(f"{self._who()}{fault}; replies are kept: run it again to go on")

    def _is_for_good(self) -> bool:
        """Whether the server answers in another name than the one asked, and not by a slip."""
        return self.confirmed is None or self.other_names >= MOST_OTHER_NAMES

    def stop(self, error: UserError) -> None:
        """Let every thread end with this error at its next try, and wake those that wait."""
        self.stopped = self.stopped or error
        self.pace.stop()
        self.budget.wake()

    def _try(self, request: ChatRequest, max_tokens: int) -> None:
        # Computed once: another thread may find out meanwhile that the judge reasons.
        limit = self.limit(request, max_tokens)
        worst = self.worst(request, limit)
        self.budget.reserve(worst)
        entry = Try(self.cache.begin(request.key, worst), worst)
        try:
            exchange = partial(self._exchange, request, limit, entry)
            within(self.settings.request_seconds, exchange)
        except TimeoutError:
            self.cache.settle(entry.number, worst, str(self._silence()))
            raise self._silence() from None
        finally:
            self.budget.settle(worst, entry.usd)
        assert entry.reply is not None  # without one the exchange has raised
        self._learn(request, entry.reply, entry.usd)

    def _exchange(self, request: ChatRequest, limit: int, entry: Try) -> None:
        """Send a request, keep its reply and enter how it ended, all in the thread that hears it.

        Until another thread were awake, a kill could lose the reply.
        """
        worst = entry.usd
        try:
            entry.raw = self._post(request.body(limit), request.dialect)
            row = self._read(request, limit, entry.raw)
            entry.usd, entry.outcome, entry.reply = at_worst(self.cost(row), worst), "reply", row
        except PassingError as fault:
            entry.usd, entry.outcome = at_worst(fault.usd, worst), str(fault)
            raise
        except (UserError, DialectError, PostError) as error:
            entry.usd, entry.outcome = 0.0, str(error)
            raise
        finally:
            self.cache.settle(**vars(entry))

    def _learn(self, request: ChatRequest, row: Row, usd: float) -> None:
        """Bill a reply that was kept, and note what it shows of its server."""
        self.bill.add(row, usd)
        if row["text"].strip() or row["finish_reason"] != "stop" or reasoned(row):
            self.confirmed, self.other_names = request.dialect, 0
            self.reasons = self.reasons or reasoned(row)
            return
        self.silent.add(request.key)
        if self.confirmed is None and len(self.silent) >= MOST_SILENT_QUESTIONS:
            replies = f"the replies to the first {MOST_SILENT_QUESTIONS} questions are all empty"
            raise UserError(f"{self._who()}{replies}: check judge.model, or what its server logs")

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
        """Raise DialectError where the refused request leaves something to leave out."""
        keep = ("structured",) if self.settings.structured == "on" else ()
        if self.settings.reasoning_effort == "default":
            keep = (*keep, "effort")
        changed = sent.after(complaint, keep)
        if changed is None or sent == self.confirmed:
            return  # it has taken this dialect before: the fault lies with the request
        if self.dialect == sent:  # else another thread has changed it already
            self.dialect = changed
        raise DialectError(f"refused: {complaint[:200]}")

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


def at_worst(usd: float | None, worst: float) -> float:
    """What to count for a try: its cost, or where that is unknown the most that it can be."""
    return worst if usd is None else usd
