"""The judge behind any server that speaks the OpenAI chat protocol.

Every reply is in the cache beside the runs before it is used, so an evaluation that was
interrupted, or is run again, asks only for what is missing.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from threading import Lock

from eval.judges.openai.batch_api import Batches
from eval.judges.openai.budget import BATCH_DISCOUNT, price_of
from eval.judges.openai.cache import ReplyCache
from eval.judges.openai.client import Chat, DialectError, Request
from eval.judges.prompt import Question
from eval.judges.protocol import About, Choice, Comparison, Reply, Row
from eval.judges.reply_parser import parse_choice
from stages.settings.checks import UserError
from stages.settings.judge import Judge as JudgeSettings


class OpenAIJudge:
    """An LLM behind an OpenAI-compatible server."""

    def __init__(self, judge: JudgeSettings, cache: Path) -> None:
        if not os.environ.get("OPENAI_API_KEY"):
            raise UserError(
                "judge.kind=openai needs OPENAI_API_KEY in the environment (any word for a local "
                "server); without an LLM: --set judge.kind=reward_model --name NAME"
            )
        self.settings, self.price = judge, price_of(judge)
        self.cache = ReplyCache(cache)
        self.chat = Chat(judge, self.cache, self.price)
        # Two policies may have written one summary: it is asked about once.
        self.locks: dict[str, Lock] = defaultdict(Lock)

    @property
    def about(self) -> About:
        """The model, and in which dialect of the protocol it was asked."""
        temperature = f"temperature {self.settings.temperature:g}"
        if not self.chat.dialect.temperature:
            temperature = "its own temperature (it takes no other)"
        form = "by a JSON schema" if self.chat.dialect.structured else "in plain text"
        note = f"LLM behind an OpenAI-compatible API, {temperature}, replies {form}"
        return About(kind="openai", name=self.settings.label, is_llm=True, note=note)

    def prepare(self, comparisons: Sequence[Comparison], beside: Sequence[Comparison] = ()) -> None:
        """Print what the missing replies will cost, before the first is asked for.

        What `beside` has cost counts towards judge.max_cost too.
        """
        batches = Batches(self.chat)
        batches.collect_open(wait=self.settings.batch)
        requests = {one.key: one for one in map(self.chat.request, comparisons)}
        account = {self.chat.request(one).key for one in beside} | requests.keys()
        self.chat.budget.spent = self.cache.spent(account)
        todo = self._missing(comparisons)
        print(self._estimate(len(requests), todo), flush=True)
        if self.settings.batch and todo:
            if self.cache.note(self.chat.note) is None:
                self._ask_one(comparisons)
            while todo := self._missing(comparisons):
                batches.ask(todo)

    def _missing(self, comparisons: Sequence[Comparison]) -> list[tuple[Request, int]]:
        """The requests to send next, each once, with their budgets."""
        requests = {one.key: one for one in map(self.chat.request, comparisons)}
        found = [(one, self.next_budget(one)) for one in requests.values()]
        return [(one, tokens) for one, tokens in found if tokens is not None]

    def _ask_one(self, comparisons: Sequence[Comparison]) -> None:
        """Ask one missing question by itself, to find out what the server accepts.

        If the server refused every line of a batch, it could take a day to say so.
        """
        for one in comparisons:
            if self.next_budget(self.chat.request(one)) is not None:
                self.compare(*one)
                return

    def compare(self, post_id: str, query: str, first: str, second: str) -> Reply:
        """Ask; ask again with twice the budget where the reply is cut off or says nothing.

        Raises UserError where the judge cannot be asked.
        """
        comparison = Comparison(post_id, query, first, second)
        while True:
            request = self.chat.request(comparison)
            try:
                with self.locks[request.key]:
                    while (max_tokens := self.next_budget(request)) is not None:
                        self.chat.ask(request, max_tokens)
            except DialectError:
                continue
            return self._best(request)

    def next_budget(self, request: Request) -> int | None:
        """Tokens to ask for next, or None where a usable reply is known or all asks are spent.

        An unusable reply is not asked for again with the same budget. With a larger
        judge.max_tokens, only such replies are asked for again.
        """
        rows = self.cache.replies(request.key)
        if any(choice_of(row, request.question) for row in rows):
            return None
        tried = max((row["max_tokens"] for row in rows), default=0)
        budgets = (self.settings.max_tokens * 2**k for k in range(self.settings.asks))
        return next((budget for budget in budgets if budget > tried), None)

    def _best(self, request: Request) -> Reply:
        """The first usable reply, else the last."""
        rows = self.cache.replies(request.key)
        usable = [row for row in rows if choice_of(row, request.question)]
        row = usable[0] if usable else rows[-1]
        names = {one.name for one in fields(Reply)} & set(row)
        choice = choice_of(row, request.question)
        return Reply(choice=choice, **{name: row[name] for name in names})

    def _estimate(self, known: int, todo: list[tuple[Request, int]]) -> str:
        start = f"judge {self.settings.model}: {len(todo):,} of {known:,} replies to ask for"
        if not todo or self.price is None:
            return start if not todo else f"{start}; price unknown (judge.input_price)"
        share = BATCH_DISCOUNT if self.settings.batch else 1.0
        asked = [(self.chat.body(one, tokens), tokens) for one, tokens in todo]
        usual = share * sum(self.price.usually(*one) for one in asked)
        worst = share * sum(self.price.at_worst(*one) for one in asked)
        line = f"{start}, about ${usual:.2f}, at most ${worst:.2f} if each is asked once"
        return f"{line}; ${self.chat.budget.spent:.2f} spent before"


def choice_of(row: Row, question: Question) -> Choice | None:
    """What a kept reply prefers; None where it was cut off at its budget."""
    if row["finish_reason"] == "length":
        return None
    return parse_choice(question.without_echo(row["text"]))
