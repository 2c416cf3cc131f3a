"""One question to a server of the OpenAI chat protocol, until it has a reply or a reason for none.

The openai library repeats what passes by itself. Below it, `Delivery` sees each try: it bounds the
time and the size of a reply, keeps account of the money, and gives an error in the body of a 200
the status that it should have had. Importing this module imports openai.
"""

import asyncio
import hashlib
import json
import os
import threading
import time
import urllib.request
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import openai

from eval.judges.openai.budget import Budget, Price
from eval.judges.openai.cache import ReplyCache
from eval.judges.openai.replies import (
    Completion,
    Kind,
    ServerError,
    accepts_model,
    blamed_by,
    find_error,
    hider,
    read_completion,
)
from eval.judges.prompt import Question, make_question
from eval.judges.protocol import CONTENT_FILTER, FILTERED, TOO_LONG, Comparison
from stages.config.checks import UserError
from stages.config.judge import JudgeSettings, check_address
from stages.config.judge_models import key_of_environment
from stages.config.judge_prompt import RESPONSE_FORMAT, read_prompt

# A reply of a thousand tokens takes 10 KB, with log-probabilities 1 MB.
MOST_BYTES = 4_000_000
# This many replies in a row that contain a thought and no answer are no accident.
MOST_ONLY_THOUGHT = 3
ATTEMPTS = (1, 2)
PROXY_VARIABLES = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY")


class PostError(Exception):
    """The server will not judge this one post, whatever else it takes."""

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(f"{reason}: {what}")
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A question as it is sent, and the name under which its reply is kept."""

    key: str
    question: Question
    body: dict[str, Any]
    limit: int
    """The most tokens that the reply may have."""


class Chat:
    """A model behind a server. Its coroutines run on an event loop of their own, in a thread."""

    def __init__(self, judge: JudgeSettings, cache: ReplyCache, price: Price | None) -> None:
        self.settings = judge
        self.cache = cache
        self.price = price
        self.template = read_prompt(judge.prompt, judge.axis)
        self.http = make_http_client(judge.request_seconds)
        self.client = openai.AsyncOpenAI(
            api_key=key_of_environment(),
            base_url=judge.base_url or None,
            timeout=judge.request_seconds,
            max_retries=judge.max_retries,
            http_client=self.http,
        )
        self.url = str(self.client.base_url)
        check_address(self.url, judge.model)
        self.hide = hider(self.client.api_key)
        self.budget = Budget(judge.max_cost)
        self.replies = 0
        self.only_thought = 0  # in a row
        # As it is asked to, or as its replies show.
        self.reasons = judge.reasoning_effort not in ("none", "default")
        # Parameters that the server refuses. Nothing is blamed after it has answered without them.
        self.left_out: set[str] = set()
        self.has_answered = False
        self.stopped: UserError | None = None
        self.next_turn = time.monotonic()
        # Tasks that wait for their turn, for money, or to try again.
        self.waiting: set[asyncio.Task[Any]] = set()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="judge", daemon=True).start()

    # -- what is sent ------------------------------------------------------------------------------

    @property
    def forms(self) -> tuple[bool, ...]:
        """The forms in which a reply may be asked for: by a JSON schema (True), and in lines."""
        by_setting = {"on": (True,), "off": (False,), "auto": (True, False)}
        return by_setting[self.settings.structured]

    @property
    def uses_schema(self) -> bool:
        """Whether the next reply is asked for by a JSON schema."""
        return self.forms[0] and "response_format" not in self.left_out

    def limit(self, attempt: int) -> int:
        """The most tokens of a reply, twice as many for the second attempt.

        A judge that reasons spends its tokens on that first, and says nothing if they run out.
        """
        room = self.settings.reasoning_tokens if self.reasons else 0
        return attempt * (self.settings.max_tokens + room)

    def question(self, texts: Comparison, as_json: bool) -> Question:
        """The question that a comparison makes."""
        return make_question(
            self.template,
            query=texts.query,
            first=texts.first,
            second=texts.second,
            as_json=as_json,
        )

    def key(self, question: Question, *, as_json: bool, attempt: int) -> str:
        """A hash of all that a reply depends on, as it was set and not as the server takes it."""
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

    def keys(self, texts: Comparison) -> set[str]:
        """All keys under which replies to a comparison may be kept."""
        return {
            self.key(self.question(texts, as_json), as_json=as_json, attempt=attempt)
            for as_json in self.forms
            for attempt in ATTEMPTS
        }

    def request(self, texts: Comparison, attempt: int) -> ChatRequest:
        """What is sent for a comparison, without the parameters that the server refuses."""
        judge = self.settings
        as_json = self.uses_schema
        question = self.question(texts, as_json)
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

    def worst(self, request: ChatRequest) -> float:
        """USD that one try of a request cannot exceed; 0 where no price is known."""
        return self.price.at_worst(request.body, request.limit) if self.price else 0.0

    # -- asking ------------------------------------------------------------------------------------

    def kept(self, texts: Comparison, attempt: int) -> Completion | None:
        """A finished reply from before, in either form."""
        for as_json in self.forms:
            key = self.key(self.question(texts, as_json), as_json=as_json, attempt=attempt)
            for reply in self.cache.replies(key):
                if accepts_model(self.settings, reply.model):
                    return reply
        return None

    async def ask(self, texts: Comparison, attempt: int) -> Completion:
        """The reply to a comparison, in the cache if it is finished.

        Raises PostError if the server will not judge this post, and UserError if it cannot be asked
        or the cap on the cost is too low.
        """
        task = asyncio.current_task()
        assert task is not None
        self.waiting.add(task)
        try:
            while True:
                request = self.request(texts, attempt)
                delivery = Delivery(self, request, task)
                error = await self._create(request, delivery)
                if error is None:
                    return self._checked(delivery.completion, attempt)
                self._leave_out(error, request)
        finally:
            self.waiting.discard(task)

    async def _create(self, request: ChatRequest, delivery: "Delivery") -> ServerError | None:
        """Let the library ask, again and again if need be; returns the refusal of a parameter."""
        client = self.client.with_options(http_client=httpx2.AsyncClient(transport=delivery))
        try:
            await client.chat.completions.with_raw_response.create(**request.body)
        except openai.APIStatusError as error:
            refused = delivery.error or ServerError(error.status_code, error.response.text)
            if refused.kind is Kind.REQUEST:
                return refused
            raise self._sorted(refused, error.response.headers) from None
        except openai.APITimeoutError:
            seconds = f"no reply within {self.settings.request_seconds:g} s"
            hint = "raise judge.request_seconds if the server needs longer"
            raise self._stop_with(f"{seconds}: {hint}") from None
        except openai.APIConnectionError as error:
            what = str(error.__cause__ or error) or type(error.__cause__).__name__
            proxy = through_proxy(self.client.base_url)
            raise self._stop_with(f"{what}{proxy}; {Kind.OUTAGE.value}") from None
        except UserError:
            raise
        except Exception as error:  # a defect, whose text may contain what was sent
            if self.hide(str(error)) == str(error):
                raise
            raise RuntimeError(self.hide(f"{type(error).__name__}: {error}")) from None
        return None

    def _sorted(self, error: ServerError, headers: Any) -> Exception:
        """The exception for an error status that no repetition has removed."""
        if error.kind is Kind.TOO_LONG:
            return PostError(TOO_LONG, error.summary)
        if error.kind is Kind.FILTERED:
            return PostError(FILTERED, error.summary)
        hint = error.kind.value
        if error.kind is Kind.OUTAGE and "retry-after" in headers:
            hint = f"the server asks to wait {headers['retry-after']} s; {hint}"
        return self._stop_with(f"{error.summary}; {hint}")

    def _leave_out(self, error: ServerError, request: ChatRequest) -> None:
        """Leave out the parameter that a refusal is about; raises UserError if it is about none."""
        insisted = {"response_format"} if self.settings.structured == "on" else set()
        blamed = blamed_by(error.text, request.body.keys() - insisted)
        if self.has_answered or blamed is None:
            raise self._stop_with(f"{error.summary}; {error.kind.value}")
        self.left_out.add(blamed)

    def _checked(self, reply: Completion | None, attempt: int) -> Completion:
        """The reply, unless the server keeps on sending thoughts without an answer."""
        assert reply is not None
        self.reasons = self.reasons or reply.has_thought
        # A first reply that was cut off while thinking gets more room.
        is_first_try = reply.finish_reason == "length" and attempt < ATTEMPTS[-1]
        if reply.is_only_thought and not is_first_try:
            self.only_thought += 1
        elif reply.text.strip():
            self.only_thought = 0
        if self.only_thought >= MOST_ONLY_THOUGHT:
            raise self._stop_with(
                f"{MOST_ONLY_THOUGHT} replies have a thought (reasoning_content) and no answer:"
                " start the server without its reasoning parser, raise judge.max_tokens and"
                " judge.reasoning_tokens, or change judge.reasoning_effort"
            )
        return reply

    def _stop_with(self, what: str) -> UserError:
        return UserError(self.hide(f"judge {self.settings.model}: {what}"))

    def stop(self, error: UserError) -> None:
        """Send nothing more. Replies that are under way are still kept."""
        self.stopped = self.stopped or error
        self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for task in self.waiting:
            task.cancel()

    async def turn(self) -> None:
        """Wait until `judge.requests_per_minute` allows another request."""
        if self.settings.requests_per_minute:
            now = time.monotonic()
            turn = max(now, self.next_turn)
            self.next_turn = turn + 60 / self.settings.requests_per_minute
            await asyncio.sleep(turn - now)


class Delivery(httpx2.AsyncBaseTransport):
    """Carries one question to the server, each try within its time, its size and its money."""

    def __init__(self, chat: Chat, request: ChatRequest, task: "asyncio.Task[Any]") -> None:
        self.chat = chat
        self.request = request
        self.task = task
        self.completion: Completion | None = None
        self.error: ServerError | None = None
        """The last error of the server, as it was before it got a status for the library."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """One try: the response, with the status that tells the library what to do."""
        chat = self.chat
        await chat.turn()
        if chat.stopped:
            raise chat.stopped
        worst = chat.worst(self.request)
        await chat.budget.reserve(worst)

        question = self.request.question
        number = chat.cache.begin(self.request.key, question.hash, worst)
        chat.waiting.discard(self.task)
        self.completion = None
        self.error = None
        usd = worst  # unless the end of the try is seen
        outcome = "lost"
        try:
            status, headers, text = await self._send(request)
            response = self._read(status, headers, text)
            usd = self._cost(worst)
            outcome = self.error.summary if self.error else "reply"
            if self.error and chat.stopped:
                raise chat.stopped  # instead of a wait
            return response
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError):
            usd = 0.0  # it was never sent
            raise
        finally:
            kept = self.completion if self.completion and self.completion.is_finished else None
            chat.cache.settle(number, usd=usd, outcome=outcome, reply=kept)
            await chat.budget.settle(worst, usd)
            chat.waiting.add(self.task)

    async def _send(self, request: httpx2.Request) -> tuple[int, httpx2.Headers, str]:
        """Status, headers and body of the response, without the key, if the server repeats it."""
        seconds = self.chat.settings.request_seconds
        try:
            # The client's own timeout starts again at each byte.
            return await asyncio.wait_for(self._receive(request), seconds)
        except asyncio.TimeoutError:
            raise httpx2.ReadTimeout(f"no reply within {seconds:g} s", request=request) from None

    async def _receive(self, request: httpx2.Request) -> tuple[int, httpx2.Headers, str]:
        response = await self.chat.http.send(request, stream=True)
        body = bytearray()
        try:
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MOST_BYTES:
                    raise httpx2.ReadError(f"a reply has more than {MOST_BYTES:,} bytes")
        finally:
            await response.aclose()
        text = self.chat.hide(body.decode(errors="replace"))
        return response.status_code, response.headers, text

    def _read(self, status: int, headers: httpx2.Headers, text: str) -> httpx2.Response:
        """What a response says, as `completion` or `error`, with a status for the library.

        Raises httpx2.ReadError, after which the library tries again, for what is neither.
        """
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            body = None
        completion = read_completion(body)
        self.error = find_error(status, text, body)
        if self.error is None:
            self.completion = self._accepted(completion, text)
            status = 200
        else:
            status = self.error.library_status
        repeat = ("retry-after", "retry-after-ms", "x-should-retry")
        kept = {name: headers[name] for name in repeat if name in headers}
        return httpx2.Response(status, headers=kept, text=text)

    def _accepted(self, completion: Completion | None, text: str) -> Completion:
        """The completion if it is the judge's and whole.

        Raises httpx2.ReadError if it is not, and UserError if the first one is another model's.
        """
        chat = self.chat
        if completion is None:
            raise httpx2.ReadError(
                f"no chat completion came back, but {text[:60]!r}: check judge.base_url (it often"
                " ends in /v1)"
            )
        if completion.finish_reason not in ("stop", "length", CONTENT_FILTER):
            raise httpx2.ReadError(
                f"the server broke off a reply (finish_reason {completion.finish_reason[:40]!r})"
            )
        if not accepts_model(chat.settings, completion.model):
            message = other_model(chat.settings.model, completion.model)
            if not chat.has_answered:
                raise UserError(f"judge {chat.settings.model}: {message}")
            raise httpx2.ReadError(message)
        chat.has_answered = True
        chat.replies += 1
        return replace(completion, prompt_hash=self.request.question.hash)

    def _cost(self, worst: float) -> float:
        """USD that this try cost; the worst where the server does not count its tokens."""
        if self.completion is None or self.chat.price is None:
            return 0.0
        usd = self.chat.price.of(self.completion)
        return worst if usd is None else usd


def messages(question: Question) -> list[dict[str, str]]:
    """A question as the protocol sends it."""
    return [{"role": "user", "content": question.prompt}]


def other_model(asked: str, name: str) -> str:
    """What to do about a reply in another model's name."""
    if not name:
        return "the reply names no model: to take it all the same, set judge.accept_model='*'"
    return (
        f"the reply is {name}'s: if that is the judge you want, set judge.model={name}, or"
        f" judge.accept_model={name} to ask it as {asked}"
    )


def make_http_client(seconds: float) -> httpx2.AsyncClient:
    """The library's own HTTP client, which reads the environment's proxies.

    Raises UserError, which names the variable, for a proxy that it cannot use.
    """
    try:
        return openai.DefaultAsyncHttpxClient(timeout=seconds)
    except ImportError:
        names = " and ".join(proxies("socks")) or "a variable of the environment"
        raise UserError(
            f"{names} names a SOCKS proxy, for which Python needs the package socksio:"
            " `pip install socksio`, or unset it if the judge needs no proxy"
        ) from None
    except (ValueError, httpx2.InvalidURL):
        names = " or ".join(proxies()) or "a variable of the environment"
        raise UserError(f"{names} is not the address of a proxy: correct or unset it") from None


def proxies(scheme: str = "") -> list[str]:
    """The variables of the environment that name a proxy of this scheme."""
    spelled = [spelling for name in PROXY_VARIABLES for spelling in (name, name.lower())]
    return [
        name for name in spelled if os.environ.get(name) and os.environ[name].startswith(scheme)
    ]


def through_proxy(url: httpx2.URL) -> str:
    """Names the variables that send requests through a proxy, for a message; empty without."""
    variables = ("all_proxy", f"{url.scheme}_proxy")
    names = [name for name in proxies() if name.lower() in variables]
    if not names or urllib.request.proxy_bypass(url.host):
        return ""
    return f" (through the proxy in {', '.join(names)})"
