"""An LLM as judge. Every reply is cached before it is used, so only what is missing is asked."""

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from itertools import chain
from pathlib import Path
from threading import Lock

from eval.judges.openai.budget import price_of
from eval.judges.openai.cache import ReplyCache
from eval.judges.openai.client import ATTEMPTS, Chat, PostError
from eval.judges.openai.replies import Completion
from eval.judges.prompt import parse_choice
from eval.judges.protocol import (
    CONTENT_FILTER,
    FILTERED,
    TOO_LONG,
    About,
    Comparison,
    Judge,
    Reply,
)
from stages.config.checks import UserError
from stages.config.judge import JudgeSettings
from stages.runs.text import told

# Of a post that will be refused again.
REFUSED = (TOO_LONG, FILTERED, CONTENT_FILTER)
USUAL_REPLY_TOKENS = 60  # one sentence and a verdict
ASSUMED_REASONING_TOKENS = 500  # how long a judge reasons about two summaries: an assumption


class OpenAIJudge(Judge):
    """An LLM behind an OpenAI-compatible server."""

    def __init__(self, judge: JudgeSettings, cache: Path) -> None:
        """Raises UserError without a key, and for a prompt that cannot be used."""
        self.settings = judge
        self.price = price_of(judge)
        self.chat = Chat(judge, ReplyCache(cache), self.price)
        # Two policies may have written one summary: it is asked about once.
        self.lock = Lock()
        self.answers: dict[Comparison, Future[Reply]] = {}

    @property
    def about(self) -> About:
        """The model, and with which parameters of the protocol it was asked."""
        judge = self.settings
        left_out = self.chat.left_out
        if not self.chat.has_answered:
            note = "all replies kept from before"
        else:
            temperature = f"temperature {judge.temperature:g}"
            if "temperature" in left_out:
                temperature = "its own temperature (it takes no other)"
            effort = f"reasoning effort {judge.reasoning_effort}"
            if "reasoning_effort" in left_out or judge.reasoning_effort == "default":
                effort = "no reasoning effort said"
            form = "by a JSON schema" if self.chat.uses_schema else "in plain text"
            note = f"{temperature}, {effort}, replies {form}"
        return About(
            kind="openai",
            name=judge.label,
            is_llm=True,
            note=f"LLM behind an OpenAI-compatible API, {note}",
        )

    def prepare(
        self, comparisons: Sequence[Comparison], same_cap: Iterable[Comparison] = ()
    ) -> None:
        """Print what the missing replies will cost, before the first is asked for.

        The shortest question goes first and alone, and more if they bring no answer: they show what
        the server takes and in whose name it answers.
        """
        different = dict.fromkeys(map(anonymous, comparisons))
        keys = {key for each in chain(comparisons, same_cap) for key in self.chat.keys(each)}
        self.chat.budget.spent = self.chat.cache.spent(keys)
        self.chat.replies = 0

        attempts = {texts: next_attempt(self._kept(texts)) for texts in different}
        missing = {texts: attempt for texts, attempt in attempts.items() if attempt is not None}
        print(self._estimate(len(different), missing), flush=True)
        shortest_first = sorted(missing, key=lambda texts: sum(map(len, texts[1:])))
        for texts in shortest_first:
            if self.chat.has_answered and not self.chat.only_thought:
                break
            self.reply(texts)

    def reply(self, comparison: Comparison) -> Reply:
        """The reply to a comparison, kept or new."""
        texts = anonymous(comparison)
        with self.lock:
            if texts not in self.answers:
                answer = asyncio.run_coroutine_threadsafe(self._judge(texts), self.chat.loop)
                self.answers[texts] = answer
        try:
            return self.answers[texts].result()
        except CancelledError:
            raise self.chat.stopped or UserError("the judge was stopped") from None

    def stop(self) -> None:
        """Send nothing more; replies under way are still kept."""
        self.chat.stop(UserError("the judge was stopped: replies are kept, run it again"))

    def finish(self) -> None:
        """Print what the replies have cost."""
        if self.chat.replies:
            bill = f"; ${usd(self.chat.budget.spent)} spent in all" if self.price else ""
            print(told(f"judge {self.settings.model}", f"{self.chat.replies:,} replies{bill}"))

    async def _judge(self, texts: Comparison) -> Reply:
        """The reply to a comparison. An error ends the other questions too."""
        try:
            return await self._ask(texts)
        except UserError as error:
            self.chat.stop(error)
            raise

    async def _ask(self, texts: Comparison) -> Reply:
        """Ask, and once more if the reply is no verdict; without one the last reply counts."""
        replies = self._kept(texts)
        attempt = next_attempt(replies)
        while attempt is not None:
            reply = await self._new(texts, attempt)
            if reply.finish_reason in REFUSED:
                return reply
            replies[attempt] = reply
            attempt = next_attempt(replies)
        verdicts = [reply for reply in replies.values() if reply.choice]
        return verdicts[0] if verdicts else replies[max(replies)]

    def _kept(self, texts: Comparison) -> dict[int, Reply]:
        """The replies from before, by their attempt."""
        kept = {attempt: self.chat.kept(texts, attempt) for attempt in ATTEMPTS}
        return {
            attempt: self._as_reply(texts, completion)
            for attempt, completion in kept.items()
            if completion is not None
        }

    async def _new(self, texts: Comparison, attempt: int) -> Reply:
        """The reply of the server, or its reason for none."""
        try:
            completion = await self.chat.ask(texts, attempt)
        except PostError as error:
            return Reply(
                choice=None,
                text=f"[no reply] {error}",
                finish_reason=error.reason,
                requested_model=self.settings.model,
                prompt_hash=self.chat.question(texts, self.chat.uses_schema).hash,
            )
        return self._as_reply(texts, completion)

    def _as_reply(self, texts: Comparison, completion: Completion) -> Reply:
        """A completion with its verdict, if it is finished and the judge's own words."""
        question = self.chat.question(texts, self.chat.uses_schema)
        is_own = completion.is_finished and not question.is_echo(completion.text)
        return Reply(
            choice=parse_choice(completion.text) if is_own else None,
            text=completion.text,
            requested_model=self.settings.model,
            model=completion.model,
            finish_reason=completion.finish_reason,
            prompt_hash=completion.prompt_hash,
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
        )

    def _estimate(self, known: int, missing: dict[Comparison, int]) -> str:
        """The lines before the first request."""
        who = f"judge {self.settings.model}"
        start = f"{len(missing):,} of {known:,} replies to ask for"
        if not missing or self.price is None:
            return told(who, start if not missing else f"{start}; price unknown")
        written = min(self.settings.max_tokens, USUAL_REPLY_TOKENS)
        if self.chat.reasons:
            written += min(self.settings.reasoning_tokens, ASSUMED_REASONING_TOKENS)
        requests = [self.chat.request(texts, attempt) for texts, attempt in missing.items()]
        usual = sum(self.price.usually(request.body, written) for request in requests)
        worst = sum(self.chat.worst(request) for request in requests)
        before = told(who, f"{start}; ${usd(self.chat.budget.spent)} spent before")
        most = f"about ${usd(usual)}, at most ${usd(worst)} if each is asked once"
        return f"{before}\n{told(who, most)}"


def next_attempt(replies: dict[int, Reply]) -> int | None:
    """The attempt that has to be asked for; None where the question is settled."""
    if any(reply.choice for reply in replies.values()):
        return None
    attempt = max(replies, default=0) + 1
    return attempt if attempt in ATTEMPTS else None


def anonymous(comparison: Comparison) -> Comparison:
    """A comparison without its post's id, which the judge is not told."""
    return comparison._replace(post_id="")


def usd(amount: float) -> str:
    """Dollars as lines show them: cents from ten dollars on, and more digits below."""
    return f"{amount:,.2f}" if amount >= 10 else f"{amount:.4f}"
