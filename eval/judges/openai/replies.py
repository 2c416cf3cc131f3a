"""What a server sends: a completion, or an error, in whatever place it puts one.

Servers of the OpenAI protocol agree on the shape of a completion. They do not agree on errors: the
status of the response, an object in the body of a 200, or the reason why the completion ended.
Here each becomes a status and a kind, by its code and by its words.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from eval.judges.prompt import END_OF_THOUGHT
from eval.judges.protocol import CONTENT_FILTER
from stages.config.judge import JudgeSettings
from stages.config.judge_models import is_model

# Where servers put what a model thought: vLLM, DeepSeek and llama.cpp; OpenRouter; Ollama.
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")

# How a completion ends (`finish_reason`), in lower case. TGI says `eos_token`, some proxies use
# Anthropic's words, some servers say nothing.
FINISHED = ("stop", "eos", "eos_token", "end_turn", "stop_sequence", "")
CUT_OFF = ("length", "max_tokens", "model_length")
# OpenAI's word and Google's.
FILTERED_END = re.compile(
    r"content_filter|safety|recitation|blocklist|prohibited_content|spii|refusal", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a server replied, and the tokens that it counts."""

    text: str
    finish_reason: str
    """`stop`, `length` or CONTENT_FILTER; another word means that the server failed."""
    model: str
    has_thought: bool
    """Whether the model has reasoned: it shows or counts it, or was cut off before a word."""
    prompt_tokens: int
    completion_tokens: int
    """All that were written, including the reasoning."""
    cached_tokens: int
    cache_write_tokens: int
    prompt_hash: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether this is a whole answer, which is worth keeping."""
        return self.finish_reason == "stop" and bool(self.text.strip())

    @property
    def is_only_thought(self) -> bool:
        """Whether a thought came and no answer."""
        return self.has_thought and not self.text.strip()


def read_completion(body: Any) -> Completion | None:
    """The completion in a response's JSON, or None if it has none."""
    try:
        choice = body["choices"][0]
        message = choice.get("message") or {}  # Google sends none if its filter refuses
        usage = body.get("usage") or {}
        text = joined_text(message.get("content") or message.get("refusal"))
        prompt_details = usage.get("prompt_tokens_details") or {}
        prompt_tokens = count(usage.get("prompt_tokens"))
        written = count(usage.get("completion_tokens"))
        # Google and xAI count the reasoning only in the total. Without the two other counts the
        # reply is billed at its worst price, whatever the total says.
        counted_elsewhere = 0
        if prompt_tokens and (written or not text):
            counted_elsewhere = max(0, count(usage.get("total_tokens")) - prompt_tokens - written)
        finish_reason = end_of(choice.get("finish_reason"))
        written_details = usage.get("completion_tokens_details") or {}
        signs_of_thought = [
            END_OF_THOUGHT.search(text),
            *[message.get(field) for field in THOUGHT_FIELDS],
            count(written_details.get("reasoning_tokens")),
            counted_elsewhere,
            finish_reason == "length" and not text.strip(),
        ]
        return Completion(
            text=text,
            finish_reason=finish_reason,
            model=clean(body.get("model") or ""),
            has_thought=any(signs_of_thought),
            prompt_tokens=prompt_tokens,
            completion_tokens=written + counted_elsewhere,
            cached_tokens=count(prompt_details.get("cached_tokens")),
            cache_write_tokens=count(prompt_details.get("cache_write_tokens")),
        )
    except (LookupError, TypeError, AttributeError):
        return None


def accepts_model(judge: JudgeSettings, name: str) -> bool:
    """Whether a reply in this model's name is the judge's: the model asked, or one accepted."""
    patterns = [pattern.strip() for pattern in judge.accept_model.split(",")]
    return is_model(judge.model, name) or any(
        fnmatchcase(name, pattern) for pattern in patterns if pattern
    )


def joined_text(content: Any) -> str:
    """A message's content as one text. Raises TypeError if it is none.

    Some servers send a list of parts, of which those of type `text` are the answer.
    """
    if isinstance(content, list):
        texts = [part["text"] for part in content if part.get("type") in ("text", "output_text")]
        return clean("".join(texts))
    return clean(content or "")


def clean(text: Any) -> str:
    """A text that any file can hold: half a surrogate pair becomes a question mark.

    Raises TypeError for anything else than a text.
    """
    if not isinstance(text, str):
        raise TypeError(type(text).__name__)
    return text.encode(errors="replace").decode()


def end_of(finish_reason: Any) -> str:
    """Why a completion ended, in one word for what servers call differently."""
    reason = str(finish_reason or "")
    if reason.lower() in FINISHED:
        return "stop"
    if reason.lower() in CUT_OFF:
        return "length"
    if FILTERED_END.match(reason):
        return CONTENT_FILTER
    return reason


def count(value: Any) -> int:
    """A server's number of tokens; 0 if it is not one."""
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0


# -- errors ----------------------------------------------------------------------------------------


class Kind(Enum):
    """What an error is about, and what to do about it if it stops the judge."""

    KEY = "check OPENAI_API_KEY"
    ACCOUNT = (
        "the account of OPENAI_API_KEY has no credit or quota left: top it up or raise its limit,"
        " or choose another judge.model; finished replies are kept"
    )
    ACCESS = "OPENAI_API_KEY has no access to this"
    MODEL = "check judge.model and judge.base_url"
    REQUEST = "check judge.model, judge.temperature and judge.max_tokens"
    OUTAGE = "finished replies are kept: run the same command again later"
    TOO_LONG = "this post is too long for the judge"
    FILTERED = "the server's content filter refuses this post"


# The status by which the client's library sorts a kind: it repeats 408, 409, 429 and 5xx only.
STATUS = {
    Kind.KEY: 401,
    Kind.ACCOUNT: 402,
    Kind.ACCESS: 403,
    Kind.MODEL: 404,
    Kind.TOO_LONG: 413,
    Kind.FILTERED: 451,
}
REPEATED = (408, 409, 429)

BAD_KEY = re.compile(
    r"(?:incorrect|invalid|wrong|missing|no)[ _]api[ _-]?key|api[ _-]?key[ _](?:is )?(?:not valid"
    r"|invalid)|\bunauthorized\b|authentication[ _](?:error|fail)",
    re.IGNORECASE,
)
# OpenAI, Azure and Qwen; DeepSeek; Anthropic and OpenRouter; xAI; Qwen; Moonshot.
NO_CREDIT = re.compile(
    r"insufficient[_ ](?:\w+[_ ])?(?:quota|balance|credits?|funds)|exceeded.{0,20}current[_ ]quota"
    r"|credit balance|credits? (?:has|have|is|are) (?:been )?(?:exhausted|used)"
    r"|used all (?:of )?(?:its|your)? ?available credits|spending limit|billing[_ ]hard[_ ]limit"
    r"|quota (?:has been |is |was )?(?:exceeded|exhausted)|arrear|in good standing"
    r"|free[ _]?tier.{0,60}(?:exhausted|only)|\b(?:per|by)[ _-]?(?:day|month)|per(?:day|month)"
    r"|\bdaily\b|\b[RT]PD\b",
    re.IGNORECASE,
)
# Google calls a limit by the minute a quota, too. It passes.
PER_MINUTE = re.compile(r"per[ _-]?min|per[ _-]?sec|\b[RT]PM\b", re.IGNORECASE)
NO_MODEL = re.compile(
    r"model_not_found|(?:unknown|invalid|no such) model\b|\bmodels?\b.{0,80}?\b(?:not[ _]exist|not"
    r" found|not[ _]found)",
    re.IGNORECASE,
)
# OpenAI and Azure, vLLM, llama.cpp, Ollama, Anthropic, Google, Qwen and TGI.
LENGTH = re.compile(
    r"context_length_exceeded|exceed_context_size|string_above_max_length"
    r"|context[ _](?:length|size|window)|max(?:imum)? (?:model|prompt|context|input) length"
    r"|max_model_len|(?:prompt|input|request)\b[^.]{0,60}\btoo (?:long|large)|input token count"
    r"|range of input length|too many (?:input )?tokens|max_tokens must be at least 1, got -"
    r"|`inputs`[^.]{0,60}must be <=",
    re.IGNORECASE,
)
# Bedrock calls a rate limit "Too many tokens, please wait before trying again."
WAIT = re.compile(r"\bwait\b|\btry(?:ing)? again\b", re.IGNORECASE)
# OpenAI and Azure, Qwen, DeepSeek, xAI, OpenRouter.
FILTER = re.compile(
    r"content[_ ](?:filter|management|policy)|invalid_prompt|usage (?:policy|guidelines)"
    r"|data_?inspection_?failed|inappropriate content|content exists risk"
    r"|(?:input|prompt) was flagged|flagged_input",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ServerError:
    """An error of the server, whatever place it was found in."""

    status: int
    text: str
    """All that the server said."""

    @property
    def kind(self) -> Kind:
        """What it is about."""
        return kind_of(self.status, self.text)

    @property
    def library_status(self) -> int:
        """The status that makes the client's library repeat what passes and nothing else."""
        if self.kind in (Kind.ACCOUNT, Kind.REQUEST):
            return self.status
        if self.kind is not Kind.OUTAGE:
            return STATUS[self.kind]
        return self.status if self.status in REPEATED or self.status >= 500 else 503

    @property
    def summary(self) -> str:
        """One line of at most 200 characters."""
        return f"error {self.status}: {' '.join(self.text.split())[:200]}"


def find_error(status: int, text: str, body: Any) -> ServerError | None:
    """The error in a response; None if it is a completion."""
    if status >= 400:
        return ServerError(status, text)
    first = body[0] if isinstance(body, list) and body else body  # Google sends a list
    if not isinstance(first, dict):
        return None
    error = first.get("error") or error_in_choice(first)
    if error is None and "choices" not in first and {"message", "detail", "code"} & {*first}:
        error = first  # vLLM's older versions, FastAPI, Qwen
    if not error:
        return None
    return ServerError(status_of(error, first), json.dumps(first))


def error_in_choice(body: dict[str, Any]) -> Any:
    """The error that OpenRouter puts next to an unfinished reply."""
    match body:
        case {"choices": [{"error": error}, *_]}:
            return error
    return None


def status_of(error: Any, body: dict[str, Any]) -> int:
    """The status of an error in the body of a 200: its number, else what its words say, and
    otherwise that of an outage.
    """
    places = [error, body] if isinstance(error, dict) else [body]
    for place in places:
        for field in ("code", "status", "status_code", "http_code"):
            number = str(place.get(field) or "")
            if re.fullmatch("[45][0-9]{2}", number):
                return int(number)
    return STATUS.get(kind_of(400, json.dumps(body)), 503)


def kind_of(status: int, text: str) -> Kind:
    """What an error is about, by its status where that is clear and else by its words."""
    by_status = {401: Kind.KEY, 402: Kind.ACCOUNT, 413: Kind.TOO_LONG, 451: Kind.FILTERED}
    if status in by_status:
        return by_status[status]
    if status < 429 and BAD_KEY.search(text):
        return Kind.KEY
    if NO_CREDIT.search(text) and not PER_MINUTE.search(text):
        return Kind.ACCOUNT
    if status == 404 or (status < 429 and NO_MODEL.search(text)):
        return Kind.MODEL
    if status < 429 and FILTER.search(text):
        return Kind.FILTERED
    if status == 403:
        return Kind.ACCESS
    # llama.cpp says it as a server error at times, OpenAI as a rate limit that no waiting meets.
    if LENGTH.search(text) and not (status >= 429 and WAIT.search(text)):
        return Kind.TOO_LONG
    if status in (408, 409, 425) or status >= 429:
        return Kind.OUTAGE
    return Kind.REQUEST


# -- parameters ------------------------------------------------------------------------------------

# The words of a refusal that blame a parameter. In place of the first, max_completion_tokens is
# sent; the others can be left out.
BLAMED = {
    "max_tokens": re.compile("max_completion_tokens"),
    "temperature": re.compile("temperature", re.IGNORECASE),
    "reasoning_effort": re.compile("reasoning|thinking|effort", re.IGNORECASE),
    "response_format": re.compile("response_format|schema|structured|grammar|json", re.IGNORECASE),
}


def blamed_by(refusal: str, sent: Iterable[str]) -> str | None:
    """Which of the parameters that were sent a refusal is about; None if it can be none of them.

    A refusal that names none is put down to the effort first and then to the schema, which not all
    servers know.
    """
    parameters = [name for name in BLAMED if name in sent]
    field = re.search(r'"param": ?"([^"]*)"', refusal)
    for words in (field[1] if field else "", refusal):
        for name in parameters:
            if BLAMED[name].search(words):
                return name
    for name in ("reasoning_effort", "response_format"):
        if name in parameters:
            return name
    return None


# -- the key ---------------------------------------------------------------------------------------

SHORTEST_KEY = 8  # characters


def hider(key: str) -> Callable[[str], str]:
    """A function that replaces a key in a text, however JSON or a URL spells its letters.

    A word, as local servers take one for a key, is no secret and may occur in a reply.
    """
    if len(key) < SHORTEST_KEY or key.isalpha():
        return str
    letters = (rf"(?:\\?{re.escape(letter)}|(?i:(?:\\u00|%){ord(letter):02x}))" for letter in key)
    pattern = re.compile("".join(letters))
    return lambda text: pattern.sub("[key]", text)
