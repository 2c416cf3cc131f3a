"""One question to a server that speaks the OpenAI chat protocol, until a whole reply is kept.

Passing errors are tried again, lasting ones stop everything with one line. An outage must stop the
evaluation: if it counted as unjudged, it would look like a result.
"""

import hashlib
import json
import time
from collections.abc import Container
from typing import Any, NamedTuple, NoReturn

from eval.judges.openai.budget import Budget, Price
from eval.judges.openai.cache import ReplyCache
from eval.judges.openai.replies import (
    HINTS,
    NoReplyError,
    OtherModelError,
    Pace,
    ParameterError,
    PassingError,
    PostError,
    about_a_post,
    blamed_by,
    hider,
    is_accepted,
    mend_of,
    read_reply,
    reasoned,
    retry_after_of,
)
from eval.judges.prompt import LINES, OBJECT, RESPONSE_FORMAT, Question, make_question
from eval.judges.protocol import Comparison, Row
from stages.config.checks import UserError
from stages.config.judge import JudgeSettings, check_address
from stages.config.judge_models import key_of_environment


class ChatRequest(NamedTuple):
    """A question as it is sent, without the budget of its reply."""

    key: str
    other_keys: tuple[str, ...]
    """Under which a reply to it may lie too."""
    question: Question
    left_out: frozenset[str]
    fields: dict[str, Any]

    def body(self, limit: int) -> dict[str, Any]:
        """What is sent, for a reply of at most `limit` tokens."""
        name = "max_completion_tokens" if "max_tokens" in self.left_out else "max_tokens"
        return self.fields | {name: limit}


def request_for(
    comparison: Comparison, judge: JudgeSettings, url: str, left_out: frozenset[str]
) -> ChatRequest:
    """The request that a comparison makes, without the parameters that the server refuses.

    Its key is made of what was set, so that a reply is found whatever the server takes by then.
    With judge.structured=auto a reply in either form counts.
    """
    forms = {"on": (True,), "off": (False,)}.get(judge.structured, (True, False))
    own_form = judge.structured != "off" and "response_format" not in left_out
    _, query, first, second = comparison
    questions, keys = {}, {}
    for form in forms:
        question = make_question(query, first, second, OBJECT if form else LINES, judge.axis)
        fields = fields_of(judge, question, () if form else ("response_format",))
        keys[form] = hashlib.sha256(json.dumps((url, fields), sort_keys=True).encode()).hexdigest()
        questions[form] = question
    own, question = keys.pop(own_form), questions[own_form]
    fields = fields_of(judge, question, left_out if own_form else {*left_out, "response_format"})
    return ChatRequest(own, tuple(keys.values()), question, left_out, fields)


def fields_of(judge: JudgeSettings, question: Question, left_out: Container[str]) -> dict[str, Any]:
    """The request as the protocol spells it, without its budget."""
    fields: dict[str, Any] = {
        "model": judge.model,
        "messages": [{"role": "user", "content": question.prompt}],
        "temperature": judge.temperature,
        "response_format": RESPONSE_FORMAT,
        "reasoning_effort": judge.reasoning_effort,
    }
    if judge.reasoning_effort == "default":
        del fields["reasoning_effort"]
    return {name: value for name, value in fields.items() if name not in left_out}


class Chat:
    """A model behind a server; may be asked from many threads."""

    def __init__(self, judge: JudgeSettings, cache: ReplyCache, price: Price | None) -> None:
        from openai import OpenAI

        self.settings, self.cache, self.price = judge, cache, price
        self.who = f"judge {judge.model}"
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
        self.replies = 0
        # The parameters that the server refuses, and those left out when it has last answered.
        self.left_out: frozenset[str] = frozenset()
        self.confirmed: frozenset[str] | None = None
        # As it is asked to, or as its replies show.
        self.reasons = judge.reasoning_effort not in ("none", "default")

    def request(self, comparison: Comparison) -> ChatRequest:
        """The request that a comparison makes, as far as the server is known to take it."""
        return request_for(comparison, self.settings, self.url, self.left_out)

    def limit(self, max_tokens: int) -> int:
        """The most tokens a reply may take: its budget, and room for reasoning that grows with it.

        A judge that reasons spends its tokens on that first, and says nothing if they run out.
        """
        room = self.settings.reasoning_tokens * max_tokens // self.settings.max_tokens
        return max_tokens + room if self.reasons else max_tokens

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

    def ask(self, comparison: Comparison, max_tokens: int) -> None:
        """Ask until a whole reply is in the cache.

        Raises UserError where no try brings one or the cap on the cost is too low, which ends every
        other thread too, and PostError where the server will not judge this post.
        """
        try:
            self._ask(comparison, max_tokens)
        except UserError as error:
            self.stop(error)
            raise

    def _ask(self, comparison: Comparison, max_tokens: int) -> None:
        failures = 0
        while failures <= self.settings.max_retries:
            self.pace.wait_for_turn()
            if self.stopped:
                raise self.stopped
            try:
                return self._try(self.request(comparison), self.limit(max_tokens))
            except ParameterError:
                continue
            except PassingError as error:
                fault = error
            if isinstance(fault, OtherModelError) and self.confirmed is None:
                raise UserError(f"{self.who}: {fault}")
            failures += 1
            if failures <= self.settings.max_retries:
                self.pace.back_off(failures, fault.retry_after)
        raise UserError(f"{self.who}: {fault}; replies are kept: run it again to go on")

    def stop(self, error: UserError) -> None:
        """Let every thread end with this error at its next try, and wake those that wait."""
        self.stopped = self.stopped or error
        self.pace.stopped.set()
        self.budget.settle(0.0, 0.0)  # which wakes them

    def _try(self, request: ChatRequest, limit: int) -> None:
        """Send a request once and keep its reply; the ledger has it at its worst until it ended."""
        worst = self.worst(request, limit)
        self.budget.reserve(worst)
        number = self.cache.begin(request.key, worst)
        usd: float | None = None
        outcome, row = "lost", None
        try:
            row = self._read(request, limit, self._post(request, limit))
            usd, outcome = self.cost(row), "reply"
        except (NoReplyError, UserError) as error:
            usd, outcome = getattr(error, "usd", 0.0), str(error)
            raise
        finally:
            usd = worst if usd is None else usd
            self.cache.settle(number, usd, outcome, row)
            self.budget.settle(worst, usd)
        with self.pace.lock:
            self.replies += 1
        self.confirmed, self.reasons = request.left_out, self.reasons or reasoned(row)

    def _post(self, request: ChatRequest, limit: int) -> str:
        """The raw body of a reply; raises NoReplyError or UserError where none came."""
        import openai

        end, parts = time.monotonic() + self.settings.request_seconds, []
        try:
            completions = self.client.chat.completions.with_streaming_response
            with completions.create(**request.body(limit)) as reply:
                for part in reply.iter_bytes():  # the client's timeout begins anew at each
                    parts.append(part)
                    if time.monotonic() > end:
                        raise openai.APITimeoutError(reply.http_request)
        except openai.APITimeoutError:
            seconds = f"no reply within {self.settings.request_seconds:g} s"
            mend = "raise judge.request_seconds if the server needs longer"
            raise PassingError(f"{seconds}: {mend}", usd=None) from None
        except openai.APIConnectionError as error:
            what = f"{error} {error.__cause__ or ''}".strip()
            raise PassingError(self.hide(what), usd=None) from None
        except openai.APIStatusError as error:
            self._refuse(error.status_code, error.response, request, limit)
        except Exception as error:  # a defect, whose text may hold what was sent
            if self.hide(str(error)) == str(error):
                raise
            raise RuntimeError(self.hide(f"{type(error).__name__}: {error}")) from None
        return self.hide(b"".join(parts).decode(errors="replace"))

    def _refuse(self, status: int, response: Any, request: ChatRequest, limit: int) -> NoReturn:
        """Sort an error status into what passes, what stays and what one post met; raises."""
        text = self.hide(response.text)
        words = " ".join(text.split())[:200]
        if kind := about_a_post(status, text):
            raise PostError(f"{kind}: {words}")
        error, mend = f"Error code: {status} - {words}", mend_of(status, text)
        if not mend:
            raise PassingError(error, retry_after=retry_after_of(response.headers))
        # What it has taken before is not to blame: the fault lies with the request.
        if mend == HINTS[400] and request.left_out != self.confirmed:
            insisted = {"response_format"} if self.settings.structured == "on" else set()
            if blamed := blamed_by(text, request.body(limit).keys() - insisted):
                self.left_out |= {blamed}
                raise ParameterError(f"refused: {words}")
        raise UserError(f"{self.who}: {error}; {mend}")

    def _read(self, request: ChatRequest, limit: int, raw: str) -> Row:
        """A raw body as a row of the cache, with the limit that was sent as its `max_tokens`.

        Raises PassingError where it is no chat completion or another model's.
        """
        row = read_reply(raw) | {
            "key": request.key,
            "max_tokens": limit,
            "prompt_hash": request.question.hash,
            "requested_model": self.settings.model,
        }
        name = row["model"]
        if is_accepted(self.settings, name):
            return row
        what = (
            f"the reply is {name}'s: if that is the judge you want, set "
            f"judge.model={name}, or judge.accept_model={name} to ask it as {self.settings.model}"
        )
        if not name:
            what = "the reply names no model: to take it all the same, set judge.accept_model='*'"
        raise OtherModelError(what, self.cost(row))
