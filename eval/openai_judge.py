"""The judge behind any server that speaks the OpenAI chat protocol."""

import hashlib
import json
import os
from pathlib import Path

from eval.prompt import PROMPT
from eval.reply_cache import ReplyLog
from eval.reply_parser import parse_choice
from eval.verdicts import About, Reply, Row
from stages.errors import UserError
from stages.judge_settings import Judge as JudgeSettings

# A client's default of 10 minutes for one request would hide a server that hangs.
REQUEST_SECONDS = 120.0
# Waits of 0.5 s doubling up to 8 s, unless the server names one: rides out a minute's rate limit.
MAX_RETRIES = 8

HINTS = {
    400: "check judge.model, judge.temperature and judge.max_tokens",
    401: "check OPENAI_API_KEY",
    402: "the account behind OPENAI_API_KEY has no credit",
    403: "OPENAI_API_KEY has no access to this model",
    404: "check judge.model and judge.base_url",
}


class OpenAIJudge:
    """An LLM behind any server that speaks the OpenAI chat protocol.

    Every reply goes to a log beside the runs before it is used, keyed by all that determines it,
    so an evaluation that was interrupted, or is run again, asks only for what is missing.
    """

    def __init__(self, judge: JudgeSettings, log: Path) -> None:
        if not os.environ.get("OPENAI_API_KEY"):
            raise UserError(
                "judge.kind=openai needs OPENAI_API_KEY in the environment (any word for a local "
                "server); without an LLM: --set judge.kind=reward_model --name NAME"
            )
        from openai import OpenAI

        self.settings, self.log = judge, ReplyLog(log)
        # The client itself retries rate limits, server errors and timeouts.
        self.client = OpenAI(
            base_url=judge.base_url or None, timeout=REQUEST_SECONDS, max_retries=MAX_RETRIES
        )
        note = f"LLM behind an OpenAI-compatible API, temperature {judge.temperature:g}"
        self.about = About(kind="openai", name=judge.model, is_llm=True, note=note)

    def compare(self, post_id: str, query: str, first: str, second: str) -> Reply:
        """Ask; ask once more with twice the budget where the reply is cut off or says nothing."""
        prompt = PROMPT.format(query=query, first=first, second=second)
        asked = (str(self.client.base_url), self.settings.model, self.settings.temperature, prompt)
        key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        reply = self._reply(key, prompt, self.settings.max_tokens)
        if reply.choice is None:
            reply = self._reply(key, prompt, 2 * self.settings.max_tokens)
        return reply

    def _reply(self, key: str, prompt: str, max_tokens: int) -> Reply:
        """The logged reply if it will do, else a new one.

        An unusable reply is not asked for again with a budget that it had already; more
        judge.max_tokens asks again for these alone.
        """
        row = self.log.rows.get(key)
        if row is None or (read_reply(row).choice is None and row["max_tokens"] < max_tokens):
            row = {"key": key, "max_tokens": max_tokens, **self._ask(prompt, max_tokens)}
            self.log.add(row)
        return read_reply(row)

    def _ask(self, prompt: str, max_tokens: int) -> Row:
        """One request. Raises UserError where the server refuses or, retried, stays away.

        An outage must stop the evaluation: scored as unjudged, it would look like a result.
        """
        from openai import OpenAIError
        from openai.types.chat import ChatCompletion

        try:
            completion = self.client.chat.completions.create(
                model=self.settings.model,
                messages=[{"role": "user", "content": prompt}],
                temperature=self.settings.temperature,
                max_tokens=max_tokens,
            )
        except OpenAIError as error:
            raise UserError(explain(error, self.settings.model)) from None
        # The client passes on what is not JSON, such as the front page of a web server.
        if not isinstance(completion, ChatCompletion) or not completion.choices:
            raise UserError(
                f"judge {self.settings.model}: no chat completion came back from "
                f"{self.client.base_url}: check judge.base_url (it often ends in /v1)"
            )
        answer = completion.choices[0]
        return {
            "text": answer.message.content or "",
            "model": completion.model,
            "finish_reason": answer.finish_reason or "",
        }


def explain(error: Exception, model: str) -> str:
    """One line on why the server gave no reply and what to do about it."""
    hint = HINTS.get(getattr(error, "status_code", 0), "replies are kept: run it again to go on")
    return f"judge {model}: {' '.join(str(error).split())[:200]}; {hint}"


def read_reply(row: Row) -> Reply:
    """A logged reply as a verdict; one cut off at its budget has not said its last word."""
    parts = {name: row[name] for name in ("text", "model", "finish_reason")}
    cut_off = row["finish_reason"] == "length"
    return Reply(choice=None if cut_off else parse_choice(row["text"]), **parts)
