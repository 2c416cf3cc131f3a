"""Every setting with its value and its description, as `make settings` prints them."""

import inspect
import textwrap

from stages.config.config import SECTIONS, Config
from stages.config.values import text_from_value

WIDTH = 80


def settings_lines(config: Config) -> list[str]:
    """Return every setting in the form that SET takes, with its description as a comment below.

    ppo.kl_coef=0.05
      # Weight of the KL penalty, reward units per nat.
    """
    lines = []
    for name, kind in SECTIONS.items():
        about = inspect.getdoc(kind) or ""
        lines += ["", *_comment(f"{name}: {about.splitlines()[0]}", indent="")]

        section = getattr(config, name)
        for field, info in kind.model_fields.items():
            value = text_from_value(getattr(section, field))
            lines.append(f"{name}.{field}={value}".rstrip())
            lines += _comment(info.description or "", indent="  ")
    return lines[1:]


def _comment(text: str, indent: str) -> list[str]:
    start = f"{indent}# "
    words = " ".join(text.split())
    return textwrap.wrap(words, WIDTH, initial_indent=start, subsequent_indent=start)
