"""What gpt-6-luna would answer, and its bill, for a server of the tests.

It reasons unless the effort is `none`, hides its reasoning, and refuses a temperature while it
reasons. Reasoning comes out of the budget of the reply: one that is too small leaves no word.
"""

import json
import random
from collections import Counter
from typing import Any

from tests.fault_server import verdict

READ, WRITTEN = 0.10, 0.50  # USD per million tokens
SENTENCE = (
    "Summary A says that the poster asked about the car and was left out of the trip, whereas"
    " summary B repeats the title and leaves out how the story ended."
)


def tokens_of(text: str) -> int:
    """About as a tokenizer of English counts: 4.4 characters a token."""
    return round(len(text) / 4.4) + 8


class Luna:
    """The books of one server: what it charged, and what it was asked."""

    def __init__(self, model: str = "gpt-6-luna", seed: int = 1) -> None:
        self.model, self.random = model, random.Random(seed)
        self.usd = 0.0
        self.replies: Counter[str] = Counter()
        self.refusals: list[str] = []
        self.written = Counter[str]()

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body for a request."""
        refused = self.refusal(body)
        if refused:
            self.refusals.append(refused["param"])
            return 400, {"error": {**refused, "type": "invalid_request_error"}}
        prompt = body["messages"][0]["content"]
        effort = body.get("reasoning_effort", "medium")
        reasoning = 0 if effort == "none" else round(self.random.lognormvariate(6.0, 0.6))
        text = json.dumps({"comparison": SENTENCE, "preferred": verdict(prompt)})
        return 200, self.charge(body, prompt, text, reasoning)

    def refusal(self, body: dict[str, Any]) -> dict[str, str] | None:
        """The error of a parameter that it does not take, in OpenAI's words."""
        if "max_tokens" in body:
            words = "Unsupported parameter: 'max_tokens' is not supported with this model. Use"
            return {"message": f"{words} 'max_completion_tokens' instead.", "param": "max_tokens"}
        if "temperature" in body and body.get("reasoning_effort", "medium") != "none":
            words = "Unsupported value: 'temperature' does not support 0 with this model. Only the"
            return {"message": f"{words} default (1) value is supported.", "param": "temperature"}
        return None

    def charge(self, body: dict[str, Any], prompt: str, text: str, reasoning: int) -> Any:
        """A completion within its budget, entered in the books."""
        most, wanted = body["max_completion_tokens"], tokens_of(text)
        thought = min(reasoning, most)
        said = wanted if thought + wanted <= most else 0
        read = tokens_of(json.dumps(body))
        self.usd += (READ * read + WRITTEN * (thought + said)) / 1e6
        self.replies[prompt] += 1
        self.written.update(thought=thought, said=said, lost=0 if said else thought)
        details = {"completion_tokens_details": {"reasoning_tokens": thought}}
        usage = {"prompt_tokens": read, "completion_tokens": thought + said, **details}
        message = {"role": "assistant", "content": text if said else ""}
        choice = {"index": 0, "message": message, "finish_reason": "stop" if said else "length"}
        whole = {"id": "1", "object": "chat.completion", "created": 0, "model": self.model}
        return {**whole, "choices": [choice], "usage": usage}
