"""List prices and makers of judge models, and the API key."""

import os
import re
from dataclasses import dataclass

from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.judge_prompt import read_prompt
from stages.config.sections import TOY
from stages.config.stages import OUTPUTS, RELEASED


@dataclass(frozen=True)
class ListPrice:
    """A model's list price in USD per million tokens (standard tier). None: unknown."""

    read: float | None = None
    written: float | None = None
    """Includes reasoning."""
    cached: float | None = None
    """Input tokens that the server found in its cache. None: the price of `read`."""
    cache_written: float | None = None
    """Input tokens that the server wrote into its cache. None: the price of `read`."""


# List prices of the makers, on 2026-11-24. A dated snapshot costs what the undated name costs.
# Prompts above 100,000 tokens cost more, but no prompt here is that long.
LIST_PRICES = {
    "gpt-6-luna": ListPrice(0.10, 0.50, cached=0.01, cache_written=0.125),
    "gpt-6.1-sol": ListPrice(2.00, 10.00, cached=0.10, cache_written=2.50),
    "claude-haiku-5-5": ListPrice(0.10, 0.50, cached=0.01, cache_written=0.125),
    # The announced price from 2027-01-01 on. It is half of that until then; a cap takes the higher.
    "gemini-3.8-flash": ListPrice(1.50, 7.50, cached=0.15),
    "gpt-4o": ListPrice(2.50, 10.00),
    "gpt-4o-mini": ListPrice(0.15, 0.60),
    "gpt-4.1": ListPrice(2.00, 8.00),
    "gpt-4.1-mini": ListPrice(0.40, 1.60),
    "gpt-5": ListPrice(1.25, 10.00),
    "gpt-5-mini": ListPrice(0.25, 2.00),
    "gpt-5-nano": ListPrice(0.05, 0.40),
    "o3": ListPrice(2.00, 8.00),
}
# Maker -> how the names of its models begin, after the last slash.
FAMILIES = {
    "OpenAI": ("gpt-3", "gpt-4", "gpt-5", "gpt-6", "gpt-oss", "gpt2", "o1", "o3", "o4", "chatgpt"),
    "EleutherAI": ("pythia", "gpt-neo", "gpt-j"),
    "Anthropic": ("claude",),
    "Google": ("gemini", "gemma"),
    "Meta": ("llama", "meta-llama", "opt-"),
    "Qwen": ("qwen", "qwq"),
    "Mistral": ("mistral", "mixtral", "ministral"),
    "Hugging Face": ("smollm", "zephyr"),
    "DeepSeek": ("deepseek",),
    "Ai2": ("olmo", "tulu"),
    "Microsoft": ("phi-",),
}


def list_price(name: str) -> ListPrice | None:
    """Return the prices of a model or of a snapshot of it; None if the table lacks it."""
    for model, price in LIST_PRICES.items():
        if is_model(model, name):
            return price
    return None


def family_of_model(name: str) -> str:
    """The maker of a model, by the last part of its name or folder; empty if it is not known."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    for maker, beginnings in FAMILIES.items():
        if last.startswith(beginnings):
            return maker
    return ""


def is_model(requested: str, returned: str) -> bool:
    """Whether a returned model id is the requested one: itself, a dated snapshot, a revision."""
    dated = r"(?:-\d{4}-\d{2}-\d{2}|-\d{4,8}|@.+|:latest)?"
    return re.fullmatch(re.escape(requested) + dated, returned) is not None


def key_of_environment() -> str:
    """OPENAI_API_KEY without outer spaces; it is never part of a message.

    Raises UserError for characters that a header cannot contain, because a client would print them.
    """
    text = os.environ.get("OPENAI_API_KEY", "")
    if not text:
        raise UserError(
            "judge.kind=openai needs OPENAI_API_KEY in the environment"
            " (any word for a local server)"
        )
    key = text.strip()
    if not key or not all("!" <= letter <= "~" for letter in key):
        raise UserError(
            "OPENAI_API_KEY is blank, or contains a space, a line break or a character that keys do"
            " not have: set it again"
        )
    return key


def without_price(model: str) -> UserError:
    """Return the error for a cost cap without known prices."""
    return UserError(
        f"judge.max_cost needs the price of {model}, which the table in"
        " stages/config/judge_models.py lacks: set judge.input_price and judge.output_price"
    )


def check_asking(config: Config) -> None:
    """Raise UserError if the judge cannot run.

    It may lack a key, a readable prompt, a price for its cost cap, or knowledge of the posts.
    """
    judge = config.judge
    if judge.kind == "facts" and config.kind != OUTPUTS and config.data.source != TOY:
        raise UserError(
            "judge.kind=facts knows only the built-in posts: choose another judge:"
            f" {_without_a_server(config)}"
        )
    if judge.kind != "openai":
        return
    read_prompt(judge.prompt, judge.axis)
    try:
        key_of_environment()
    except UserError as error:
        raise UserError(f"{error}; without a server: {_without_a_server(config)}") from None
    has_price = list_price(judge.model) or min(judge.input_price, judge.output_price) >= 0
    if judge.max_cost and not has_price:
        raise without_price(judge.model)


def _without_a_server(config: Config) -> str:
    """The settings of a judge that needs no server, for what this run judges."""
    if config.kind == OUTPUTS or (config.kind == RELEASED and not config.released.reward_model):
        return 'SET="judge.kind=reward_model judge.model=..." (a run or folder with a reward model)'
    return "SET=judge.kind=reward_model"
