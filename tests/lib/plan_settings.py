"""What `make plan` counts for: a preset on some devices, with other memory settings."""

from typing import Any

from stages.config.command_line import make_config
from stages.planning.memory import Setting, setting_of


def setting(preset: str = "pythia-1b", devices: int = 1, **memory: Any) -> Setting:
    """The setting of a preset on this many devices; `memory` replaces entries of its section."""
    config = make_config(preset)
    config = config.changed(memory=config.memory.changed(**memory))
    return setting_of(config, devices=devices)
