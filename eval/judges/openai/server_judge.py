"""The judge behind any server that speaks the OpenAI chat protocol.

Every reply is in the cache beside the runs before it is used, so an evaluation that was
interrupted, or is run again, asks only for what is missing.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from threading import Lock

from eval.judges.openai.budget import Bill, price_of, usd, usual_reply
from eval.judges.openai.cache import ReplyCache
from eval.judges.openai.client import Chat, DialectError, PostError, StoppedError
from eval.judges.openai.replies import is_accepted, reasoned
from eval.judges.openai.request import ChatRequest
from eval.judges.prompt import Question, parse_choice
from eval.judges.protocol import (
    CONTENT_FILTER,
    FILTERED,
    About,
    Choice,
    Comparison,
    Judge,
    Reply,
    Row,
    unjudged_line,
)
from stages.running.progress import folded, told
from stages.settings.judge import JudgeSettings
from stages.settings.judge_models import warning_of

CUT_BY_FILTER = f"{FILTERED}: the server's filter has cut the reply off"


class OpenAIJudge(Judge):
    """An LLM behind an OpenAI-compatible server."""

    def __init__(self, judge: JudgeSettings, cache: Path) -> None:
        """Raises UserError without a key."""
        self.settings, self.price = judge, price_of(judge)
        self.cache = ReplyCache(cache)
        self.chat = Chat(judge, self.cache, self.price)
        # Two policies may have written one summary: it is asked about once.
        self.locks: dict[str, Lock] = defaultdict(Lock)
        self.unjudged: dict[str, str] = {}
        """Why the server will not judge a post, by the post's id."""

    @property
    def about(self) -> About:
        """The model, and in which dialect of the protocol it was asked."""
        judge, dialect = self.settings, self.chat.dialect
        note = "LLM behind an OpenAI-compatible API"
        if self.chat.confirmed is None:
            note = f"{note}, all replies kept from before"
            return About(kind="openai", name=judge.label, is_llm=True, note=note)
        temperature = f"temperature {judge.temperature:g}"
        if not dialect.temperature:
            temperature = "its own temperature (it takes no other)"
        effort = f"reasoning effort {judge.reasoning_effort}"
        if not dialect.effort or judge.reasoning_effort == "default":
            effort = "no reasoning effort said"
        form = "by a JSON schema" if dialect.structured else "in plain text"
        note = f"{note}, {temperature}, {effort}, replies {form}"
        return About(kind="openai", name=judge.label, is_llm=True, note=note)

    def prepare(
        self, comparisons: Sequence[Comparison], same_cap: Iterable[Comparison] = ()
    ) -> None:
        """Print what the missing replies will cost, before the first is asked for.

        What `same_cap` has cost counts towards judge.max_cost too. The shortest question goes first
        and alone: it shows what the server takes, whether it answers in the name of the model that
        was asked, and whether that model reasons.
        """
        if warning := warning_of(self.settings.model):
            print("\n".join(folded(warning)), flush=True)
        self.chat.bill, self.unjudged = Bill(self.chat.bill.who), {}
        requests = {request.key: request for request in map(self.chat.request, comparisons)}
        account = chain(requests.values(), map(self.chat.request, same_cap))
        keys = {key for request in account for key in (request.key, *request.other_keys)}
        self.chat.budget.spent = self.cache.spent(keys)
        budgets = [(request, self.next_budget(request)) for request in requests.values()]
        todo = [(request, tokens) for request, tokens in budgets if tokens is not None]
        print(self._estimate(len(requests), todo), flush=True)
        if todo and self.chat.confirmed is None:
            self._ask_shortest(comparisons)

    def _ask_shortest(self, comparisons: Sequence[Comparison]) -> None:
        """Ask one missing question by itself: the shortest, which is too long for no model."""
        for comparison in sorted(comparisons, key=lambda texts: sum(map(len, texts[1:4]))):
            if self.next_budget(self.chat.request(comparison)) is not None:
                self.reply(comparison)
                return

    def reply(self, comparison: Comparison) -> Reply:
        """Ask; ask again with twice the budget where the reply is cut off or says nothing.

        Raises UserError where the judge cannot be asked.
        """
        while True:
            request = self.chat.request(comparison)
            try:
                self._see_through(request)
            except DialectError:
                continue
            reply = self._best(request)
            if request.key in self.chat.unanswerable:
                self.unjudged[comparison.post_id] = self.chat.unanswerable[request.key]
            elif reply.choice is None and reply.finish_reason == CONTENT_FILTER:
                self.unjudged[comparison.post_id] = CUT_BY_FILTER
            return reply

    def _see_through(self, request: ChatRequest) -> None:
        """Ask until a reply is usable or all asks are spent, while nobody else asks the same."""
        with self.locks[request.key]:
            while (max_tokens := self.next_budget(request)) is not None:
                try:
                    self.chat.ask(request, max_tokens)
                except PostError as error:
                    self.chat.refuse_post(request, str(error))

    def stop(self) -> None:
        """Send nothing more; replies under way are still kept."""
        self.chat.stop(StoppedError("the judge was stopped: replies are kept, run it again"))

    def finish(self) -> None:
        """Print what the replies cost beside the estimate, and which posts were not judged."""
        if lines := self.chat.bill.lines(self.chat.budget.spent):
            print(lines, flush=True)
        for kind in sorted({why.partition(":")[0] for why in self.unjudged.values()}):
            posts = sorted(post for post, why in self.unjudged.items() if why.startswith(kind))
            print(told(self.chat.bill.who, unjudged_line(posts, self.unjudged[posts[0]])))

    def _rows(self, request: ChatRequest) -> list[Row]:
        """Replies to a request that are its judge's; those to the very request come first."""
        rows = self.cache.replies(request.key, *request.other_keys)
        return [row for row in rows if is_accepted(self.settings, row["model"])]

    def next_budget(self, request: ChatRequest) -> int | None:
        """Tokens to ask for next, or None where a usable reply is known or all asks are spent.

        A reply that the server's filter has cut off is not asked for again: the filter stays.
        An unusable reply is not asked for again with the limit that it was asked for with. With a
        larger judge.max_tokens or judge.reasoning_tokens, only such replies are asked for again.
        """
        rows = self._rows(request)
        self.chat.reasons = self.chat.reasons or any(map(reasoned, rows))
        if request.key in self.chat.unanswerable:
            return None
        if any(choice_of(row, request.question) or _is_filtered(row) for row in rows):
            return None
        tried = max((row["max_tokens"] for row in rows if row["key"] == request.key), default=0)
        budgets = (self.settings.max_tokens * 2**k for k in range(self.settings.asks))
        return next((size for size in budgets if self.chat.limit(request, size) > tried), None)

    def _best(self, request: ChatRequest) -> Reply:
        """The first usable reply, else one that a filter cut off, else the last; if none, why."""
        rows = self._rows(request)
        if not rows:
            why = self.chat.unanswerable[request.key]
            return Reply(
                choice=None,
                text=f"[no reply] {why}",
                finish_reason=why.partition(":")[0],
                requested_model=self.settings.model,
                prompt_hash=request.question.hash,
            )
        usable = [row for row in rows if choice_of(row, request.question)]
        row = (usable or [row for row in rows if _is_filtered(row)] or rows[-1:])[0]
        names = {field.name for field in fields(Reply)} & set(row)
        choice = choice_of(row, request.question)
        return Reply(choice=choice, **{name: row[name] for name in names})

    def _estimate(self, known: int, todo: list[tuple[ChatRequest, int]]) -> str:
        """What stands before the first request; it sets what the bill is compared with."""
        who, price, chat = self.chat.bill.who, self.price, self.chat
        start = f"{len(todo):,} of {known:,} replies to ask for"
        if not todo or price is None:
            return told(who, start if not todo else f"{start}; price unknown (judge.input_price)")
        written = usual_reply(self.settings, chat.reasons)
        limits = [(request, chat.limit(request, tokens)) for request, tokens in todo]
        usual = sum(price.usually(request.body(limit), written) for request, limit in limits)
        worst = sum(chat.worst(request, limit) for request, limit in limits)
        chat.bill.estimate = usual
        lines = [
            f"{start}; ${usd(chat.budget.spent)} spent before",
            f"about ${usd(usual)}, at most ${usd(worst)} if each is asked once",
        ]
        if chat.reasons:
            lines.append(f"it reasons: {written} tokens a reply are assumed")
        return "\n".join(told(who, line) for line in lines)


def _is_filtered(row: Row) -> bool:
    return bool(row["finish_reason"] == CONTENT_FILTER)


def choice_of(row: Row, question: Question) -> Choice | None:
    """What a kept reply prefers; None where it was cut off at its budget."""
    if row["finish_reason"] == "length":
        return None
    return parse_choice(question.without_echo(row["text"]))
