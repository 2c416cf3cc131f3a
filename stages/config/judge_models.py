"""What the models that judge cost, who made them, and the key."""

import os
import re
from typing import NamedTuple

from stages.config.checks import UserError
from stages.config.config import TOY, Config
from stages.config.judge_prompt import read_prompt
from stages.config.stages import OUTPUTS, RELEASED


class Known(NamedTuple):
    """A model's list price in USD per million tokens (standard tier); None: not known."""

    read: float | None = None
    written: float | None = None
    """Reasoning is written too."""
    cached: float | None = None
    """What was read before, as the server counts it; None: costs what is read."""
    cache_written: float | None = None
    """What the server keeps for later; None: costs what is read."""


# List prices of the makers, on 2026-11-24. A dated snapshot is what the undated name is. Prompts
# above 100,000 tokens cost more: no question here is so long.
MODELS = {
    "gpt-6-luna": Known(0.10, 0.50, cached=0.01, cache_written=0.125),
    "gpt-6.1-sol": Known(2.00, 10.00, cached=0.10, cache_written=2.50),
    "claude-haiku-5-5": Known(0.10, 0.50, cached=0.01, cache_written=0.125),
    # What it costs from 2027-01-01 on, as announced; half until then. A cap takes the dearer.
    "gemini-3.8-flash": Known(1.50, 7.50, cached=0.15),
    "gpt-4o": Known(2.50, 10.00),
    "gpt-4o-mini": Known(0.15, 0.60),
    "gpt-4.1": Known(2.00, 8.00),
    "gpt-4.1-mini": Known(0.40, 1.60),
    "gpt-5": Known(1.25, 10.00),
    "gpt-5-mini": Known(0.25, 2.00),
    "gpt-5-nano": Known(0.05, 0.40),
    "o3": Known(2.00, 8.00),
}
# What the names of models that one maker has trained begin with, after the last slash.
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


def known_model(name: str) -> Known | None:
    """The line of the table for a model or a snapshot of it; None without."""
    lines = [model for model in MODELS if is_model(model, name)]
    return MODELS[max(lines, key=len)] if lines else None


def family_of_model(name: str) -> str:
    """The maker of a model, by the last part of its name or folder; empty if it is not known."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return next((maker for maker, starts in FAMILIES.items() if last.startswith(starts)), "")


def is_model(requested: str, returned: str) -> bool:
    """Whether a returned model id is the requested one: itself, a dated snapshot, a revision."""
    dated = r"(?:-\d{4}-\d{2}-\d{2}|-\d{4,8}|@.+|:latest)?"
    return re.fullmatch(re.escape(requested) + dated, returned) is not None


def key_of_environment() -> str:
    """OPENAI_API_KEY without outer spaces; never part of a message. Raises UserError where it holds
    what a header cannot, which a client would print.
    """
    text = os.environ.get("OPENAI_API_KEY", "")
    if not text:
        where = "in the environment (any word for a local server)"
        raise UserError(f"judge.kind=openai needs OPENAI_API_KEY {where}")
    key = text.strip()
    if not key or not all("!" <= letter <= "~" for letter in key):
        odd = "is blank or holds a space, a line break or a letter that no key has"
        raise UserError(f"OPENAI_API_KEY {odd}: set it again")
    return key


def without_price(model: str) -> UserError:
    """The error for a cap on a cost that cannot be counted."""
    return UserError(
        f"judge.max_cost needs the price of {model}, which the table in"
        " stages/config/judge_models.py lacks: set judge.input_price and judge.output_price"
    )


def check_asking(config: Config, capped: bool = False) -> None:
    """Raise UserError where a judge could not be asked: no key, no readable prompt, a cap without a
    price, posts of no built-in world. `capped`: whether a cap is given beside the settings.
    """
    judge = config.judge
    if judge.kind == "facts" and config.kind != OUTPUTS and config.data.source != TOY:
        others = f"choose another judge: {_without_a_server(config)}"
        raise UserError(f"judge.kind=facts knows only the built-in world: {others}")
    if judge.kind != "openai":
        return
    read_prompt(judge.prompt, judge.axis)
    try:
        key_of_environment()
    except UserError as error:
        raise UserError(f"{error}; without a server: {_without_a_server(config)}") from None
    has_price = known_model(judge.model) or min(judge.input_price, judge.output_price) >= 0
    if (capped or judge.max_cost) and not has_price:
        raise without_price(judge.model)


def _without_a_server(config: Config) -> str:
    """The settings of a judge that needs no server, for what this run judges."""
    if config.kind == OUTPUTS or (config.kind == RELEASED and not config.released.reward_model):
        return 'SET="judge.kind=reward_model judge.model=..." (a run or folder with a reward model)'
    return "SET=judge.kind=reward_model"
