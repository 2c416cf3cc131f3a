"""The question that an LLM judge is asked, and the verdict in its reply.

Posts and summaries can contain anything. Each is put between tags that no text can close, because
the tags contain a number that is computed from the texts and occurs in none of them. Whatever a
chat server could take for one of its control tokens is broken up.
"""

import hashlib
import json
import re
from dataclasses import dataclass

from eval.judges.protocol import Choice
from stages.config.judge_prompt import REPLY_AS_JSON, REPLY_AS_LINES, PromptTemplate

# <|im_start|>, </s>, <start_of_turn>, <<SYS>> and our own tags all open like this, and so do
# Mistral's [INST] and the like. "<3" does not.
OPENING = re.compile(r"<(?=[^\s\d<])|\[(?=/?[A-Z_]+\])")
TAG_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt, and the texts in it that other people wrote."""

    prompt: str
    tag: str
    """The number in the tags around each text."""
    texts: tuple[str, str, str]
    """The post and the two summaries, as the prompt shows them."""

    @property
    def hash(self) -> str:
        """Identifies the prompt in rows and in the cache."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]

    def is_echo(self, reply: str) -> bool:
        """Whether a reply only repeats a part of the post or of a summary."""
        return any(reply.strip() in text for text in self.texts)


def make_question(
    template: PromptTemplate, *, query: str, first: str, second: str, as_json: bool
) -> Question:
    """The question about two summaries of a post; the form of the reply is at its end."""
    post = disarm(query)
    summary_a = disarm(first)
    summary_b = disarm(second)
    texts = (post, summary_a, summary_b)
    tag = make_tag(texts)
    filled = template.fill(
        {
            "post": tagged("post", tag, post),
            "summary_a": tagged("summary-A", tag, summary_a),
            "summary_b": tagged("summary-B", tag, summary_b),
        }
    )
    reply_form = REPLY_AS_JSON if as_json else REPLY_AS_LINES
    return Question(prompt=f"{filled}\n\n{reply_form}", tag=tag, texts=texts)


def tagged(name: str, tag: str, text: str) -> str:
    """A text between its tags, which are on lines of their own."""
    return f"<{name}-{tag}>\n{text}\n</{name}-{tag}>"


def disarm(text: str) -> str:
    """The text with a space after whatever opens like a tag or a control token.

    Half a surrogate pair, which no request can carry, becomes a question mark.
    """
    sendable = text.encode(errors="replace").decode()
    return OPENING.sub(lambda opening: f"{opening[0]} ", sendable)


def make_tag(texts: tuple[str, str, str]) -> str:
    """A number that occurs in none of the texts; the same in both orders of the summaries."""
    post, *summaries = texts
    digest = "\0".join([post, *sorted(summaries)])
    while True:
        digest = hashlib.sha256(digest.encode()).hexdigest()[:TAG_DIGITS]
        if not any(digest in text for text in texts):
            return digest


# -- the verdict -----------------------------------------------------------------------------------

# A reasoning model's thoughts are not its answer. These marks are used by DeepSeek, Qwen and Seed,
# Mistral, Kimi, Cohere, OpenThinker, Apertus, Gemma and gpt-oss.
THOUGHT = r"[\w:.-]*(?:think|thought|reason)[\w:.-]*"
END_OF_THOUGHT = re.compile(
    rf"</{THOUGHT}>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>|<\|end_of_thought\|>"
    r"|<\|inner_suffix\|>|<channel\|>|<\|channel\|>final.*?<\|message\|>|assistantfinal",
    re.IGNORECASE,
)
START_OF_THOUGHT = re.compile(
    rf"<{THOUGHT}(?: [^<>]*)?>|\[THINK\]|◁think▷|<\|START_THINKING\|>|<\|begin_of_thought\|>"
    r"|<\|inner_prefix\|>|<\|channel>|<\|channel\|>",
    re.IGNORECASE,
)
VERDICT_LINES: dict[str, Choice] = {
    "Preferred: A": "A",
    "Preferred: B": "B",
    "Preferred: tie": "tie",
}
# A JSON object in a Markdown code block.
FENCED = re.compile(r"```(?:json)?\s*(\{.*\})\s*```", re.DOTALL)


def parse_choice(reply: str) -> Choice | None:
    """What a reply prefers, or None if it does not have the requested form.

    The form is the JSON object, or lines of which the last one, and no other, says `Preferred:`.
    """
    answer = END_OF_THOUGHT.split(reply)[-1].strip()
    has_unfinished_thought = START_OF_THOUGHT.search(answer) is not None
    if has_unfinished_thought:
        return None

    fenced = FENCED.fullmatch(answer)
    if fenced:
        answer = fenced[1]
    if answer.startswith("{"):
        return _choice_of_object(answer)
    return _choice_of_lines(answer)


def _choice_of_lines(answer: str) -> Choice | None:
    """The verdict in the last line, if no other line gives one."""
    # Without the marks of Markdown: **Preferred:** **A**
    plain = re.sub("[*_`]", "", answer)
    lines = [" ".join(line.split()) for line in plain.splitlines() if line.strip()]
    verdict_lines = [
        line for line in lines if line.lstrip("#>-+ ").lower().startswith("preferred:")
    ]
    if len(verdict_lines) != 1:
        return None
    return VERDICT_LINES.get(lines[-1])


def _choice_of_object(text: str) -> Choice | None:
    """The verdict in a JSON object that has exactly the two requested keys, each once."""
    try:
        # As a list of pairs, which shows a key that occurs twice.
        pairs = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return None
    if sorted(key for key, _ in pairs) != ["comparison", "preferred"]:
        return None
    preferred = dict(pairs)["preferred"]
    if not isinstance(preferred, str):
        return None
    return VERDICT_LINES.get(f"Preferred: {preferred}")
