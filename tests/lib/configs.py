"""Configs of a run called `mine`, with overrides."""

from stages.config.command_line import make_config
from stages.config.config import Config


def override(*texts: str, preset: str = "tiny", upstream: str = "") -> Config:
    """The preset's config with overrides, such as `ppo.kl_coef=0.1`."""
    return make_config(preset, name="mine", overrides=texts, upstream=upstream)
