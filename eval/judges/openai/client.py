"""Asks an OpenAI-compatible server one question, until it has a reply or the judge stops.

`Chat.ask` is the loop: it sends a request, waits and repeats it after a temporary error, leaves out
parameters that the server refuses, and raises an error for everything else. The openai library
sends each request once. Importing this module imports openai.
"""

import asyncio
import hashlib
import json
import random
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import openai

from eval.judges.openai.budget import Budget, Price
from eval.judges.openai.cache import ReplyCache
from eval.judges.openai.replies import (
    RETRY_HINT,
    Action,
    Completion,
    Failure,
    accepts_model,
    blamed_parameter,
    find_error,
    hide_key,
    read_completion,
)
from eval.judges.prompt import Question, make_question
from eval.judges.protocol import CONTENT_FILTER, Comparison
from stages.config.errors import UserError
from stages.config.judge import JudgeSettings, check_address
from stages.config.judge_models import key_of_environment
from stages.config.judge_prompt import RESPONSE_FORMAT, read_prompt

# A reply of a thousand tokens takes 10 KB, with log-probabilities 1 MB.
MAX_REPLY_BYTES = 4_000_000
# This many replies in a row with reasoning but no answer indicate a misconfigured server.
MAX_ONLY_THOUGHT = 3
ATTEMPTS = (1, 2)
# Seconds between two tries, unless the server names a time: doubled each time, up to a limit.
FIRST_WAIT = 0.5
LONGEST_WAIT = 8.0
# A server that asks for a longer wait stops the judge.
LONGEST_RETRY_AFTER = 120.0
# Errors of the client before it has sent anything, so that the request cost nothing.
NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)


class PostError(Exception):
    """The server refuses to judge this one post, but accepts others."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A question as it is sent, and the cache key of its reply."""

    key: str
    question: Question
    body: dict[str, Any]
    limit: int
    """Maximum number of tokens in the reply."""


class Chat:
    """A model behind a server.

    Its coroutines run on `loop`, in a separate thread: a signal raises an exception in the main
    thread, where asyncio would swallow it.
    """

    def __init__(self, judge: JudgeSettings, cache: ReplyCache, price: Price | None) -> None:
        self.settings = judge
        self.cache = cache
        self.price = price
        self.template = read_prompt(judge.prompt, judge.axis)
        self.client = make_client(judge)
        self.url = str(self.client.base_url)
        check_address(self.url, judge.model)
        self.budget = Budget(judge.max_cost)

        # What the replies have shown about the server. It refuses the parameters in `left_out`;
        # after its first answer, no other parameter is blamed for an error.
        self.left_out: set[str] = set()
        self.has_answered = False
        self.is_reasoning = judge.reasoning_effort not in ("none", "default")
        self.replies_without_answer = 0  # replies in a row
        self.reply_count = 0

        self.next_turn = time.monotonic()
        self.under_way: set[asyncio.Task[Completion | Failure]] = set()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="judge", daemon=True).start()

    # -- what is sent ------------------------------------------------------------------------------

    @property
    def forms(self) -> tuple[bool, ...]:
        """The forms in which a reply may be requested: by a JSON schema (True), or as lines."""
        by_setting = {"on": (True,), "off": (False,), "auto": (True, False)}
        return by_setting[self.settings.structured]

    @property
    def uses_schema(self) -> bool:
        """Whether the next reply is requested with a JSON schema."""
        return self.forms[0] and "response_format" not in self.left_out

    def limit(self, attempt: int) -> int:
        """Return the maximum tokens of a reply, twice as many for the second attempt.

        A judge that reasons spends its tokens on that first, and does not answer if they run out.
        """
        room = self.settings.reasoning_tokens if self.is_reasoning else 0
        return attempt * (self.settings.max_tokens + room)

    def question(self, comparison: Comparison, as_json: bool) -> Question:
        """Return the question about a comparison."""
        return make_question(
            self.template,
            query=comparison.query,
            first=comparison.first,
            second=comparison.second,
            as_json=as_json,
        )

    def key(self, question: Question, *, as_json: bool, attempt: int) -> str:
        """Return a hash of everything that a reply depends on.

        It uses the settings as configured, before unsupported parameters are dropped.
        """
        judge = self.settings
        parts = {
            "base_url": self.url,
            "model": judge.model,
            "messages": messages(question),
            "temperature": judge.temperature,
            "max_tokens": judge.max_tokens,
            "reasoning_tokens": judge.reasoning_tokens,
            "reasoning_effort": judge.reasoning_effort,
            "structured": as_json,
            "attempt": attempt,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def keys(self, comparison: Comparison) -> set[str]:
        """Return all keys under which replies to a comparison may be kept."""
        return {
            self.key(self.question(comparison, as_json), as_json=as_json, attempt=attempt)
            for as_json in self.forms
            for attempt in ATTEMPTS
        }

    def request(self, comparison: Comparison, attempt: int) -> ChatRequest:
        """Return the body of a request, without the parameters that the server refuses."""
        judge = self.settings
        as_json = self.uses_schema
        question = self.question(comparison, as_json)
        limit = self.limit(attempt)
        body: dict[str, Any] = {
            "model": judge.model,
            "messages": messages(question),
            "max_tokens": limit,
            "temperature": judge.temperature,
        }
        if judge.reasoning_effort != "default":
            body["reasoning_effort"] = judge.reasoning_effort
        if as_json:
            body["response_format"] = RESPONSE_FORMAT

        for name in self.left_out & body.keys():
            del body[name]
        if "max_tokens" in self.left_out:
            body["max_completion_tokens"] = limit
        key = self.key(question, as_json=as_json, attempt=attempt)
        return ChatRequest(key=key, question=question, body=body, limit=limit)

    def maximum_cost(self, request: ChatRequest) -> float:
        """Return the USD that one try of a request cannot exceed; 0 if no price is known."""
        return self.price.maximum_cost(request.body, request.limit) if self.price else 0.0

    # -- asking ------------------------------------------------------------------------------------

    def find_reply(self, comparison: Comparison, attempt: int) -> Completion | None:
        """Return a finished reply from the cache, whichever form was requested."""
        for as_json in self.forms:
            key = self.key(self.question(comparison, as_json), as_json=as_json, attempt=attempt)
            for reply in self.cache.replies(key):
                if accepts_model(self.settings, reply.model):
                    return reply
        return None

    async def ask(self, comparison: Comparison, attempt: int) -> Completion:
        """Return the server's reply to a comparison, which is in the cache if it is finished.

        Raises PostError if the server refuses this post, and UserError if the judge has to stop. It
        may be canceled at any time: the reply to a request that was sent is still received and
        kept.
        """
        retries = 0
        while True:
            await self._wait_for_turn()
            request = self.request(comparison, attempt)
            reply = await self._send_once(request)

            if isinstance(reply, Completion):
                self._check_thought(reply, attempt)
                return reply
            if reply.action in (Action.TOO_LONG, Action.FILTERED):
                raise PostError(reply.action.value, reply.message)
            if self._leave_out_parameter(reply, request):
                continue  # which is no retry
            if reply.action is Action.STOP or retries == self.settings.max_retries:
                raise self._error(f"{reply.message}; {reply.hint}")

            seconds = reply.retry_after or backoff(retries)
            if seconds > LONGEST_RETRY_AFTER:
                asks = f"the server asks for a wait of {seconds:g} s"
                raise self._error(f"{reply.message}; {asks}; {reply.hint}")
            await asyncio.sleep(seconds)
            retries += 1

    async def _wait_for_turn(self) -> None:
        """Wait until `judge.requests_per_minute` allows another request."""
        if self.settings.requests_per_minute:
            now = time.monotonic()
            turn = max(now, self.next_turn)
            self.next_turn = turn + 60 / self.settings.requests_per_minute
            await asyncio.sleep(turn - now)

    def _leave_out_parameter(self, failure: Failure, request: ChatRequest) -> bool:
        """Return whether a refusal names a parameter that the next request can leave out."""
        if failure.action is not Action.STOP or failure.status not in (400, 422):
            return False
        if self.has_answered:
            return False
        needed = {"response_format"} if self.settings.structured == "on" else set()
        blamed = blamed_parameter(failure.text, request.body.keys() - needed)
        if blamed is None:
            return False
        self.left_out.add(blamed)
        return True

    def _check_thought(self, reply: Completion, attempt: int) -> None:
        """Raise UserError if the server keeps sending reasoning without an answer."""
        self.is_reasoning = self.is_reasoning or reply.has_thought
        if reply.text.strip():
            self.replies_without_answer = 0
            return

        # A first reply that was cut off while reasoning gets more tokens in the second attempt.
        gets_more_room = reply.finish_reason == "length" and attempt < ATTEMPTS[-1]
        if reply.is_only_thought and not gets_more_room:
            self.replies_without_answer += 1
        if self.replies_without_answer >= MAX_ONLY_THOUGHT:
            raise self._error(
                f"{MAX_ONLY_THOUGHT} replies in a row have reasoning_content but no answer:"
                " start the server without its reasoning parser, raise judge.max_tokens and"
                " judge.reasoning_tokens, or change judge.reasoning_effort"
            )

    def _error(self, message: str) -> UserError:
        return UserError(self._hide(f"judge {self.settings.model}: {message}"))

    def _hide(self, text: str) -> str:
        return hide_key(text, self.client.api_key)

    # -- one request -------------------------------------------------------------------------------

    async def _send_once(self, request: ChatRequest) -> Completion | Failure:
        """Send a request, within the cost cap. A request that was sent is not canceled."""
        reserved = self.maximum_cost(request)
        await self.budget.reserve(reserved)
        task = asyncio.create_task(self._send_and_keep(request, reserved))
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        return await asyncio.shield(task)

    async def finish_requests(self) -> None:
        """Wait until the replies to all sent requests are in the cache."""
        await asyncio.gather(*self.under_way, return_exceptions=True)

    async def _send_and_keep(self, request: ChatRequest, reserved: float) -> Completion | Failure:
        """Send a request, enter its cost, and keep its reply if it is finished."""
        number = self.cache.begin(request.key, request.question.hash, reserved)
        reply = await self._receive(request)

        usd = reserved  # unless the real cost is known
        outcome = "lost"
        finished = None
        if isinstance(reply, Completion):
            reply = replace(reply, prompt_hash=request.question.hash)
            self.has_answered = True
            self.reply_count += 1
            outcome = "reply"
            finished = reply if reply.is_finished else None
            cost = self.price.cost(reply) if self.price else 0.0
            if cost is not None:
                usd = cost
        elif reply.is_free:
            usd = 0.0
            outcome = reply.message

        self.cache.settle(number, usd=usd, outcome=outcome, reply=finished)
        await self.budget.settle(reserved, usd)
        return reply

    async def _receive(self, request: ChatRequest) -> Completion | Failure:
        """Send a request; return the outcome, within `judge.request_seconds`."""
        seconds = self.settings.request_seconds
        try:
            # The client's own timeout restarts with each byte.
            status, headers, content = await asyncio.wait_for(self._post(request.body), seconds)
        except (asyncio.TimeoutError, openai.APITimeoutError, httpx2.TimeoutException) as error:
            hint = "raise judge.request_seconds if the server needs longer"
            is_free = isinstance(error.__cause__, NEVER_SENT)
            return lost(f"no reply within {seconds:g} s: {hint}", is_free=is_free)
        except (openai.APIConnectionError, httpx2.HTTPError) as error:
            cause = error.__cause__ or error  # openai wraps what httpx2 raises
            message = self._hide(f"{self.url}: {str(cause) or type(cause).__name__}")
            if isinstance(cause, NEVER_SENT):
                message += ": check judge.base_url and HTTP_PROXY, HTTPS_PROXY, ALL_PROXY"
            return lost(message, is_free=isinstance(cause, NEVER_SENT))
        except Exception as error:  # a bug, whose text may contain the request
            if self._hide(str(error)) == str(error):
                raise
            raise RuntimeError(self._hide(f"{type(error).__name__}: {error}")) from None

        reply = self._read(status, content.decode(errors="replace"))
        if isinstance(reply, Failure):
            return replace(reply, retry_after=retry_after(headers))
        return reply

    async def _post(self, body: dict[str, Any]) -> tuple[int, httpx2.Headers, bytes]:
        """Send a request; return the response's status, headers and body."""
        create = self.client.chat.completions.with_streaming_response.create
        content = bytearray()
        try:
            async with create(**body) as response:
                async for part in response.iter_bytes():
                    content += part
                    if len(content) > MAX_REPLY_BYTES:
                        raise httpx2.ReadError(f"a reply has more than {MAX_REPLY_BYTES:,} bytes")
                return response.status_code, response.headers, bytes(content)
        except openai.APIStatusError as error:
            return error.status_code, error.response.headers, error.response.content

    def _read(self, status: int, text: str) -> Completion | Failure:
        """Return the reply in a response, or the failure if it is not a complete reply."""
        try:
            # The key is removed from the decoded values, because JSON has several ways to spell it.
            text = self._hide(json.dumps(json.loads(text), ensure_ascii=False))
            body = json.loads(text)
        except (ValueError, RecursionError):
            text = self._hide(text)
            body = None

        failure = find_error(status, text, body)
        if failure is not None:
            return failure
        completion = read_completion(body)
        if completion is None:
            hint = "check judge.base_url (it often ends in /v1)"
            return lost(f"the response is not a chat completion, but {text[:60]!r}: {hint}")
        if completion.finish_reason not in ("stop", "length", CONTENT_FILTER):
            reason = completion.finish_reason[:40]
            return lost(f"the server broke off a reply (finish_reason {reason!r})")
        if not accepts_model(self.settings, completion.model):
            # In the first reply the setting is probably wrong; a later one may be an accident.
            action = Action.RETRY if self.has_answered else Action.STOP
            return other_model(self.settings.model, completion.model, action)
        return completion


def messages(question: Question) -> list[dict[str, str]]:
    """Return a question as the protocol sends it."""
    return [{"role": "user", "content": question.prompt}]


def make_client(judge: JudgeSettings) -> openai.AsyncOpenAI:
    """Return the openai library's client, which sends each request once.

    Raises UserError for a proxy or certificates in the environment that it cannot use.
    """
    proxy = "the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY"
    try:
        return openai.AsyncOpenAI(
            api_key=key_of_environment(),
            base_url=judge.base_url or None,
            timeout=judge.request_seconds,
            max_retries=0,
        )
    except ImportError as error:
        raise UserError(f"{proxy} needs a package: {error} Or unset the variable.") from None
    except (ValueError, httpx2.InvalidURL):  # the error's text may contain a password
        raise UserError(f"{proxy} is not the address of a proxy: correct or unset it") from None
    except OSError as error:
        raise UserError(
            f"the certificates of SSL_CERT_FILE or SSL_CERT_DIR cannot be read ({error}): correct"
            " or unset the variable"
        ) from None


def lost(message: str, is_free: bool = False) -> Failure:
    """Return the failure of a request whose reply was not received completely."""
    return Failure(action=Action.RETRY, message=message, hint=RETRY_HINT, is_free=is_free)


def other_model(requested: str, name: str, action: Action) -> Failure:
    """Return the failure of a request that a different model has answered."""
    if not name:
        message = "the reply names no model"
        hint = "to accept it anyway, set judge.accept_model='*'"
    else:
        message = f"the reply is {name}'s"
        hint = (
            f"if that is the judge you want, set judge.model={name}, or judge.accept_model={name}"
            f" to ask it as {requested}"
        )
    return Failure(action=action, message=message, hint=hint)


def retry_after(headers: httpx2.Headers) -> float | None:
    """Return the seconds that a server asks to wait; None if it does not say."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        if seconds > 0:  # false for NaN
            return seconds
    return None


def backoff(retries: int) -> float:
    """Return the seconds before another try: twice as many each time, up to a limit."""
    seconds = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(retries, 10))
    return seconds * random.uniform(0.75, 1.0)  # so that requests do not arrive all at once
