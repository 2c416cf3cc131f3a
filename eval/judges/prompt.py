"""The prompt of an LLM judge, and the verdict in its reply.

Posts and summaries are untrusted text. Each is put between tags that a text cannot close, because
the tags contain a number that is computed from the texts and occurs in none of them. Anything that
a chat server could take for one of its control tokens is broken up.
"""

import hashlib
import json
import re
from dataclasses import dataclass

from eval.judges.protocol import Choice
from stages.config.judge_prompt import REPLY_AS_JSON, REPLY_AS_LINES, PromptTemplate

# <|im_start|>, </s>, <start_of_turn>, <<SYS>> and our own tags all open like this, as do Mistral's
# [INST] and its kin. "<3" does not.
OPENING = re.compile(r"<(?=[^\s\d<])|\[(?=/?[A-Z_]+\])")


@dataclass(frozen=True)
class Question:
    """A prompt, and the texts in it that other people wrote."""

    prompt: str
    tag: str
    texts: tuple[str, str, str]

    @property
    def hash(self) -> str:
        """Hash that identifies the prompt in rows and in the cache."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]

    def is_echo(self, reply: str) -> bool:
        """Return whether a reply only repeats a part of the post or of a summary."""
        return any(reply.strip() in text for text in self.texts)


def make_question(
    template: PromptTemplate, *, query: str, first: str, second: str, as_json: bool
) -> Question:
    """The question about two summaries of a post, with the form of the reply at its end."""
    texts = (disarm(query), disarm(first), disarm(second))
    tag = make_tag(texts)
    shown = {
        "post": tagged("post", tag, texts[0]),
        "summary_a": tagged("summary-A", tag, texts[1]),
        "summary_b": tagged("summary-B", tag, texts[2]),
    }
    reply_form = REPLY_AS_JSON if as_json else REPLY_AS_LINES
    return Question(f"{template.fill(shown)}\n\n{reply_form}", tag, texts)


def tagged(name: str, tag: str, text: str) -> str:
    """A text between its tags, each on a line of its own."""
    return f"<{name}-{tag}>\n{text}\n</{name}-{tag}>"


def disarm(text: str) -> str:
    """The text with a space in everything that begins like a tag or a control token.

    An unpaired surrogate, which a request cannot contain, becomes a question mark.
    """
    sendable = text.encode(errors="replace").decode()
    return OPENING.sub(lambda opening: f"{opening[0]} ", sendable)


def make_tag(texts: tuple[str, str, str]) -> str:
    """A number that occurs in none of the texts; the same in both orders."""
    tag = "\0".join((texts[0], *sorted(texts[1:])))
    while True:
        tag = hashlib.sha256(tag.encode()).hexdigest()[:16]
        if not any(tag in text for text in texts):
            return tag


# -- the verdict -----------------------------------------------------------------------------------

# A model's reasoning is not its answer: <think>...</think> and the like, and Mistral's [THINK].
# Other models mark it with control tokens (<|...|>). A server with a reasoning parser (`vllm serve
# --reasoning-parser ...`) removes them; a reply that contains one is not a verdict.
THOUGHT = r"[\w:.-]*(?:think|thought|reason)[\w:.-]*"
END_OF_THOUGHT = re.compile(rf"</{THOUGHT}>|\[/THINK\]", re.IGNORECASE)
START_OF_THOUGHT = re.compile(rf"<{THOUGHT}(?: [^<>]*)?>|\[THINK\]|<\|", re.IGNORECASE)
CHOICES: tuple[Choice, ...] = ("A", "B", "tie")
# A JSON object in a Markdown block.
FENCED = re.compile(r"```(?:json)?\s*(\{.*\})\s*```", re.DOTALL)


def parse_choice(reply: str) -> Choice | None:
    """Return what a reply prefers, or None if it does not have the requested form.

    The form is the JSON object, or lines of which only the last one says `Preferred:`.
    """
    answer = END_OF_THOUGHT.split(reply)[-1].strip()
    if START_OF_THOUGHT.search(answer):
        return None  # reasoning that has not ended
    fenced = FENCED.fullmatch(answer)
    if fenced:
        answer = fenced[1]
    return choice_of_object(answer) if answer.startswith("{") else choice_of_lines(answer)


def choice_of_lines(answer: str) -> Choice | None:
    """Return the verdict in the last line, if no other line gives one."""
    # Without the marks of Markdown: **Preferred:** **A**
    lines = [" ".join(re.sub("[*_`]", "", line).split()) for line in answer.splitlines()]
    lines = [line for line in lines if line]
    # A list or a quotation may contain another verdict, and as the last line it has the wrong form.
    verdicts = [line for line in lines if line.lstrip("#>-+ ").lower().startswith("preferred:")]
    if len(verdicts) != 1:
        return None
    for choice in CHOICES:
        if lines[-1] == f"Preferred: {choice}":
            return choice
    return None


def choice_of_object(answer: str) -> Choice | None:
    """Return the verdict in a JSON object that has the two keys of the form, each once."""
    try:
        pairs = json.loads(answer, object_pairs_hook=list)  # a dict would hide a doubled key
    except (ValueError, RecursionError):
        return None
    if sorted(key for key, _ in pairs) != ["comparison", "preferred"]:
        return None
    preferred = dict(pairs)["preferred"]
    for choice in CHOICES:
        if preferred == choice:
            return choice
    return None
