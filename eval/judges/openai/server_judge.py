"""An LLM as judge. Every reply is cached before it is used, so only what is missing is asked."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from threading import Lock

from eval.judges.openai.budget import price_of
from eval.judges.openai.cache import ReplyCache
from eval.judges.openai.client import Chat, ChatRequest
from eval.judges.openai.replies import PostError, is_accepted, reasoned
from eval.judges.prompt import Question, parse_choice
from eval.judges.protocol import CONTENT_FILTER, About, Choice, Comparison, Judge, Reply, Row
from stages.config.checks import UserError
from stages.config.judge import JudgeSettings
from stages.runs.progress import told

USUAL_REPLY_TOKENS = 60  # one sentence and a verdict
ASSUMED_REASONING_TOKENS = 500  # how long a judge reasons about two summaries: an assumption


class OpenAIJudge(Judge):
    """An LLM behind an OpenAI-compatible server."""

    def __init__(self, judge: JudgeSettings, cache: Path) -> None:
        """Raises UserError without a key."""
        self.settings, self.price = judge, price_of(judge)
        self.cache = ReplyCache(cache)
        self.chat = Chat(judge, self.cache, self.price)
        # Two policies may have written one summary: it is asked about once.
        self.locks: dict[Comparison, Lock] = defaultdict(Lock)
        self.refused: dict[Comparison, str] = {}
        """Why the server would not judge some texts; the comparison's id is left out."""

    @property
    def about(self) -> About:
        """The model, and with which parameters of the protocol it was asked."""
        judge, left_out = self.settings, self.chat.left_out
        note = "LLM behind an OpenAI-compatible API"
        if self.chat.confirmed is None:
            note = f"{note}, all replies kept from before"
            return About(kind="openai", name=judge.label, is_llm=True, note=note)
        temperature = f"temperature {judge.temperature:g}"
        if "temperature" in left_out:
            temperature = "its own temperature (it takes no other)"
        effort = f"reasoning effort {judge.reasoning_effort}"
        if "reasoning_effort" in left_out or judge.reasoning_effort == "default":
            effort = "no reasoning effort said"
        is_plain = judge.structured == "off" or "response_format" in left_out
        form = "in plain text" if is_plain else "by a JSON schema"
        note = f"{note}, {temperature}, {effort}, replies {form}"
        return About(kind="openai", name=judge.label, is_llm=True, note=note)

    def prepare(
        self, comparisons: Sequence[Comparison], same_cap: Iterable[Comparison] = ()
    ) -> None:
        """Print what the missing replies will cost, before the first is asked for.

        The shortest question goes first and alone: it shows what the server takes, in whose name it
        answers, and whether that model reasons.
        """
        requests = {request.key: request for request in map(self.chat.request, comparisons)}
        account = chain(requests.values(), map(self.chat.request, same_cap))
        keys = {key for request in account for key in (request.key, *request.other_keys)}
        self.chat.budget.spent = self.cache.spent(keys)
        self.chat.replies = 0
        todo = [
            (request, tokens)
            for request in requests.values()
            if (tokens := self.next_budget(request)) is not None
        ]
        print(self._estimate(len(requests), todo), flush=True)
        if todo and self.chat.confirmed is None:
            missing = {request.key for request, _ in todo}
            shortest = sorted(comparisons, key=lambda texts: sum(map(len, texts[1:])))
            self.reply(next(pair for pair in shortest if self.chat.request(pair).key in missing))

    def reply(self, comparison: Comparison) -> Reply:
        """Ask, with twice the budget each time, until the question is settled or asks are spent."""
        texts = comparison._replace(post_id="")
        with self.locks[texts]:
            while texts not in self.refused:
                tokens = self.next_budget(self.chat.request(texts))
                if tokens is None:
                    break
                try:
                    self.chat.ask(texts, tokens)
                except PostError as error:
                    self.refused[texts] = str(error)
        return self._best(texts)

    def stop(self) -> None:
        """Send nothing more; replies under way are still kept."""
        self.chat.stop(UserError("the judge was stopped: replies are kept, run it again"))

    def finish(self) -> None:
        """Print what the replies have cost."""
        if self.chat.replies:
            bill = f"; ${usd(self.chat.budget.spent)} spent in all" if self.price else ""
            print(told(self.chat.who, f"{self.chat.replies:,} replies{bill}"), flush=True)

    def _rows(self, request: ChatRequest) -> list[Row]:
        """Replies to a request that are its judge's; those to the very request come first."""
        rows = self.cache.replies(request.key, *request.other_keys)
        return [row for row in rows if is_accepted(self.settings, row["model"])]

    def next_budget(self, request: ChatRequest) -> int | None:
        """Tokens to ask for next, or None where the question is settled or all asks are spent.

        An unusable reply is asked for again only with a larger limit than all before.
        """
        rows = self._rows(request)
        self.chat.reasons = self.chat.reasons or any(map(reasoned, rows))
        if usable(rows, request.question):
            return None
        tried = max((row["max_tokens"] for row in rows if row["key"] == request.key), default=0)
        budgets = (self.settings.max_tokens * 2**k for k in range(self.settings.asks))
        return next((size for size in budgets if self.chat.limit(size) > tried), None)

    def _best(self, texts: Comparison) -> Reply:
        """The first usable reply, else the last; if there is none, why."""
        request = self.chat.request(texts)
        rows, question = self._rows(request), request.question
        if not rows:
            why = self.refused[texts]
            return Reply(
                choice=None,
                text=f"[no reply] {why}",
                finish_reason=why.partition(":")[0],
                requested_model=self.settings.model,
                prompt_hash=question.hash,
            )
        row = (usable(rows, question) or rows[-1:])[0]
        names = {field.name for field in fields(Reply)} & set(row)
        return Reply(choice=choice_of(row, question), **{name: row[name] for name in names})

    def _estimate(self, known: int, todo: list[tuple[ChatRequest, int]]) -> str:
        """What stands before the first request."""
        price, chat, judge = self.price, self.chat, self.settings
        start = f"{len(todo):,} of {known:,} replies to ask for"
        if not todo or price is None:
            return told(self.chat.who, start if not todo else f"{start}; price unknown")
        written = min(judge.max_tokens, USUAL_REPLY_TOKENS)
        if chat.reasons:
            written += min(judge.reasoning_tokens, ASSUMED_REASONING_TOKENS)
        limits = [(request, chat.limit(tokens)) for request, tokens in todo]
        usual = sum(price.usually(request.body(limit), written) for request, limit in limits)
        worst = sum(chat.worst(request, limit) for request, limit in limits)
        before = told(self.chat.who, f"{start}; ${usd(chat.budget.spent)} spent before")
        most = f"about ${usd(usual)}, at most ${usd(worst)} if each is asked once"
        return f"{before}\n{told(self.chat.who, most)}"


def usable(rows: Sequence[Row], question: Question) -> list[Row]:
    """The replies that settle a question: those that prefer something, then those of a filter."""
    filtered = [row for row in rows if row["finish_reason"] == CONTENT_FILTER]
    return [row for row in rows if choice_of(row, question)] or filtered


def choice_of(row: Row, question: Question) -> Choice | None:
    """What a kept reply prefers; None where it was cut off at its budget."""
    if row["finish_reason"] == "length":
        return None
    return parse_choice(question.without_echo(row["text"]))


def usd(amount: float) -> str:
    """Dollars as lines show them: cents from ten dollars on, and more digits below."""
    return f"{amount:,.2f}" if amount >= 10 else f"{amount:.4f}"
