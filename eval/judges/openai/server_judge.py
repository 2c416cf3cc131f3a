"""An LLM as judge. Every reply is cached before it is used, so only missing ones are requested."""

import asyncio
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future
from itertools import chain
from pathlib import Path

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
from stages.config.judge import JudgeSettings
from stages.runs.text import labeled

# Finish reasons that a second attempt would not change.
FINAL_REASONS = (TOO_LONG, FILTERED, CONTENT_FILTER)
USUAL_REPLY_TOKENS = 60  # one sentence and a verdict
ASSUMED_REASONING_TOKENS = 500  # how long a judge reasons about two summaries: an assumption


class OpenAIJudge(Judge):
    """An LLM behind an OpenAI-compatible server."""

    def __init__(self, judge: JudgeSettings, cache: Path) -> None:
        """Raises UserError without a key, and for a prompt that cannot be used."""
        self.settings = judge
        self.price = price_of(judge)
        self.chat = Chat(judge, ReplyCache(cache), self.price)
        # Two policies may have written the same summary: then the judge is asked only once.
        self.answers: dict[Comparison, Future[Reply]] = {}
        self.error: Exception | None = None
        """The first error, which has stopped all questions."""

    @property
    def about(self) -> About:
        """The judge's name, with the parameters that were used."""
        judge = self.settings
        left_out = self.chat.left_out
        if not self.chat.has_answered:
            note = "all replies from the cache"
        else:
            temperature = f"temperature {judge.temperature:g}"
            if "temperature" in left_out:
                temperature = "its own temperature (it takes no other)"
            effort = f"reasoning effort {judge.reasoning_effort}"
            if "reasoning_effort" in left_out or judge.reasoning_effort == "default":
                effort = "no reasoning effort given"
            form = "by a JSON schema" if self.chat.uses_schema else "in plain text"
            note = f"{temperature}, {effort}, replies {form}"
        return About(
            kind="openai",
            name=judge.label,
            is_llm=True,
            note=f"LLM behind an OpenAI-compatible API, {note}",
        )

    # -- all questions -----------------------------------------------------------------------------

    def prepare(
        self, comparisons: Sequence[Comparison], earlier: Iterable[Comparison] = ()
    ) -> None:
        """Print what the missing replies will cost, before the first one is requested.

        The shortest question is asked first, and others if it has no answer, to learn which
        parameters the server accepts and which model answers.
        """
        keys: set[str] = set()
        for comparison in chain(comparisons, earlier):
            keys |= self.chat.keys(comparison)
        self.chat.budget.spent = self.chat.cache.spent(keys)
        self.chat.reply_count = 0

        different = dict.fromkeys(map(anonymous, comparisons))
        missing: dict[Comparison, int] = {}
        for comparison in different:
            attempt = next_attempt(self._kept_replies(comparison))
            if attempt is not None:
                missing[comparison] = attempt
        print(self._estimate(len(different), missing), flush=True)

        for comparison in sorted(missing, key=question_length):
            if self.chat.has_answered and not self.chat.replies_without_answer:
                break
            self.reply(comparison)

    def reply(self, comparison: Comparison) -> Reply:
        """Return the reply to one comparison, from the cache or from the server."""
        (reply,) = self.replies([comparison], concurrency=1)
        return reply

    def replies(
        self, comparisons: Sequence[Comparison], concurrency: int
    ) -> Generator[Reply, None, None]:
        """Yield the replies in the order of the comparisons, with `concurrency` requests at once.

        The first error stops all questions, after the replies to sent requests have been kept.
        """
        slots = asyncio.Semaphore(concurrency)
        for comparison in map(anonymous, comparisons):
            if comparison not in self.answers:
                judging = self._judge(comparison, slots)
                self.answers[comparison] = asyncio.run_coroutine_threadsafe(judging, self.chat.loop)
        try:
            for comparison in comparisons:
                yield self.answers[anonymous(comparison)].result()
        except Exception as error:
            finishing = self.chat.finish_requests()
            asyncio.run_coroutine_threadsafe(finishing, self.chat.loop).result()
            raise self.error or error from None
        finally:
            self._cancel_questions()

    def _cancel_questions(self) -> None:
        """Stop all questions that have no reply yet."""
        for answer in list(self.answers.values()):
            answer.cancel()

    def finish(self) -> None:
        """Print what the replies have cost."""
        if self.chat.reply_count:
            bill = f"; ${usd(self.chat.budget.spent)} spent in all" if self.price else ""
            text = f"{self.chat.reply_count:,} replies{bill}"
            print(labeled(f"judge {self.settings.model}", text))

    # -- one question ------------------------------------------------------------------------------

    async def _judge(self, comparison: Comparison, slots: asyncio.Semaphore) -> Reply:
        """Return the reply to a comparison. An error stops the other questions, too."""
        async with slots:
            if self.error is not None:
                raise self.error
            try:
                return await self._ask(comparison)
            except Exception as error:
                self.error = self.error or error
                self._cancel_questions()
                raise

    async def _ask(self, comparison: Comparison) -> Reply:
        """Ask, and ask again if the reply has no verdict; without one, the last reply counts."""
        replies = self._kept_replies(comparison)
        attempt = next_attempt(replies)
        while attempt is not None:
            reply = await self._new_reply(comparison, attempt)
            if reply.finish_reason in FINAL_REASONS:
                return reply
            replies[attempt] = reply
            attempt = next_attempt(replies)

        verdicts = [reply for reply in replies.values() if reply.choice]
        return verdicts[0] if verdicts else replies[max(replies)]

    def _kept_replies(self, comparison: Comparison) -> dict[int, Reply]:
        """Return the replies in the cache, by their attempt."""
        replies = {}
        for attempt in ATTEMPTS:
            completion = self.chat.find_reply(comparison, attempt)
            if completion is not None:
                replies[attempt] = self._as_reply(comparison, completion)
        return replies

    async def _new_reply(self, comparison: Comparison, attempt: int) -> Reply:
        """Return the server's reply, or the reason why there is none."""
        try:
            completion = await self.chat.ask(comparison, attempt)
        except PostError as error:
            return Reply(
                choice=None,
                text=f"[no reply] {error}",
                finish_reason=error.reason,
                requested_model=self.settings.model,
                prompt_hash=self.chat.question(comparison, self.chat.uses_schema).hash,
            )
        return self._as_reply(comparison, completion)

    def _as_reply(self, comparison: Comparison, completion: Completion) -> Reply:
        """Return a completion as a reply. It has a verdict only if finished and not an echo."""
        question = self.chat.question(comparison, self.chat.uses_schema)
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

    def _estimate(self, total: int, missing: dict[Comparison, int]) -> str:
        """Return the lines that are printed before the first request."""
        who = f"judge {self.settings.model}"
        start = f"{len(missing):,} of {total:,} replies to ask for"
        if not missing:
            return labeled(who, start)
        if self.price is None:
            return labeled(who, f"{start}; price unknown")

        tokens = min(self.settings.max_tokens, USUAL_REPLY_TOKENS)
        if self.chat.is_reasoning:
            tokens += min(self.settings.reasoning_tokens, ASSUMED_REASONING_TOKENS)
        requests = [
            self.chat.request(comparison, attempt) for comparison, attempt in missing.items()
        ]
        typical = sum(self.price.typical_cost(request.body, tokens) for request in requests)
        maximum = sum(self.chat.maximum_cost(request) for request in requests)
        before = labeled(who, f"{start}; ${usd(self.chat.budget.spent)} spent before")
        after = f"about ${usd(typical)}, at most ${usd(maximum)} if each is asked once"
        return f"{before}\n{labeled(who, after)}"


def question_length(comparison: Comparison) -> int:
    """Return the number of characters of a question's texts."""
    return len(comparison.query) + len(comparison.first) + len(comparison.second)


def next_attempt(replies: dict[int, Reply]) -> int | None:
    """Return the attempt that has to be asked for; None if the question is settled."""
    if any(reply.choice for reply in replies.values()):
        return None
    attempt = max(replies, default=0) + 1
    return attempt if attempt in ATTEMPTS else None


def anonymous(comparison: Comparison) -> Comparison:
    """Return a comparison without its post's id, which the judge is not told."""
    return comparison._replace(post_id="")


def usd(amount: float) -> str:
    """Format dollars: with cents from ten dollars on, with more digits below."""
    return f"{amount:,.2f}" if amount >= 10 else f"{amount:.4f}"
