"""What the models that judge cost, who made them, and when they end. Standard library only.

A study that was judged by a model that has ended cannot be repeated, so its end stands beside its
price, and is said before the first request.
"""

import re
from datetime import date, timedelta
from typing import NamedTuple

from stages.settings.checks import UserError
from stages.settings.config import TOY, Config
from stages.settings.judge import key_of_environment, without_price
from stages.settings.stages import OUTPUTS, RELEASED

AS_OF = date(2026, 11, 24)
"""The day on which the table was checked; models that are about to end were priced earlier."""
NEAR = timedelta(days=90)
"""A model that ends within this time is warned of."""


class Known(NamedTuple):
    """A model's list price in USD per million tokens (standard tier) and its end."""

    read: float | None = None
    """None: the model has ended, and no price of it can be backed."""
    written: float | None = None
    """Reasoning is written too."""
    cached: float | None = None
    """What was read before, as the server counts it; None: costs what is read."""
    cache_written: float | None = None
    """What the server keeps for later; None: costs what is read."""
    end: date | None = None
    """The first day without it; None: no end is known."""


JANUARY, DECEMBER, ENDED = date(2027, 1, 14), date(2026, 12, 11), date(2026, 10, 23)
NO_MORE = "gpt-3.5-turbo gpt-4 gpt-4-turbo gpt-4o-2024-05-13 gpt-4.1-nano o4-mini"
# List prices of the makers, and their pages of deprecations. A dated snapshot is what the undated
# name is, unless it has a line of its own. Batches cost half. Prompts above 100,000 tokens cost
# more: no question here is so long.
MODELS = {
    "gpt-6-luna": Known(0.10, 0.50, cached=0.01, cache_written=0.125),
    "gpt-6.1-sol": Known(2.00, 10.00, cached=0.10, cache_written=2.50),
    "claude-haiku-5-5": Known(0.10, 0.50, cached=0.01, cache_written=0.125),
    # What it costs from 2027-01-01 on, as announced; half until then. A cap takes the dearer.
    "gemini-3.8-flash": Known(1.50, 7.50, cached=0.15),
    "gpt-4o": Known(2.50, 10.00, end=JANUARY),
    "gpt-4o-mini": Known(0.15, 0.60, end=JANUARY),
    "gpt-4.1": Known(2.00, 8.00, end=JANUARY),
    "gpt-4.1-mini": Known(0.40, 1.60, end=JANUARY),
    "gpt-5": Known(1.25, 10.00, end=DECEMBER),
    "gpt-5-mini": Known(0.25, 2.00, end=DECEMBER),
    "gpt-5-nano": Known(0.05, 0.40, end=DECEMBER),
    "o3": Known(2.00, 8.00, end=DECEMBER),
    **dict.fromkeys(NO_MORE.split(), Known(end=ENDED)),
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
    """The line of the table for a model's name, which may be that of a snapshot; None without."""
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


def warning_of(name: str, today: date | None = None) -> str:
    """One line about a model that has ended or will soon; empty where there is nothing to say.

    `today` is this day unless it is given.
    """
    today = today or date.today()
    line = known_model(name)
    if line is None or line.end is None or today + NEAR < line.end:
        return ""
    return (
        f"warning: judge {name} ends on {line.end}, and what it judged cannot be repeated from then"
        " on: choose another judge.model, best one with open weights (eval/README.md)"
    )


def check_asking(config: Config, capped: bool = False) -> None:
    """Raise UserError where a judge could not be asked: no key, a cap without a price, posts of no
    built-in world. `capped`: whether a cap is given beside the settings.
    """
    judge = config.judge
    if judge.kind == "facts" and config.kind != OUTPUTS and config.data.source != TOY:
        others = f"choose another judge: {_without_a_server(config)}"
        raise UserError(f"judge.kind=facts knows only the built-in world: {others}")
    if judge.kind != "openai":
        return
    try:
        key_of_environment()
    except UserError as error:
        raise UserError(f"{error}; without a server: {_without_a_server(config)}") from None
    known = known_model(judge.model) or Known()
    prices = ((judge.input_price, known.read), (judge.output_price, known.written))
    has_price = all(own >= 0 or listed is not None for own, listed in prices)
    if (capped or judge.max_cost) and not has_price:
        raise without_price(judge.model)


def _without_a_server(config: Config) -> str:
    """The settings of a judge that needs no server, for what this run judges."""
    own = "SET=judge.kind=reward_model"
    if config.kind == OUTPUTS or (config.kind == RELEASED and not config.released.reward_model):
        own = 'SET="judge.kind=reward_model judge.model=..." (a run or folder with a reward model)'
    return own
