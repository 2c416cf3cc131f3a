"""A run with an upstream: which settings it takes from there, and which stages it trains itself."""

from typing import Any

from stages.config import paths
from stages.config.config import Config
from stages.config.errors import RESTORE, UserError
from stages.config.identity import is_same_setting
from stages.config.presets import preset_config
from stages.config.recorded import recorded_config
from stages.config.sections import Base
from stages.config.stages import SHARED_SECTIONS, SHARED_STAGES, STAGES, first_changed
from stages.config.values import Changes, section_of

Sections = dict[str, Any]
"""Name of a section -> the section."""


def with_upstream(config: Config, upstream: str, sections: Sections, changes: Changes) -> Config:
    """Return a config with the shared sections of its upstream, in turn changed by its overrides.

    Raises UserError if an override changes the first shared stage, so that nothing is left to take.
    """
    # Settings of shared stages that this run changes -> their values in the upstream.
    differing: dict[str, Any] = {}
    for name, section in sections.items():
        for field, value in changes.get(name, {}).items():
            key = f"{name}.{field}"
            value_in_upstream = getattr(section, field)
            if not is_same_setting(key, value_in_upstream, value):
                differing[key] = value_in_upstream

    first = first_changed({section_of(key) for key in differing})
    if first == SHARED_STAGES[0]:
        key, value = next(iter(differing.items()))
        raise UserError(
            f"{key} changes stage {first}, which UPSTREAM={upstream} supplies (with {value}):"
            " leave out one of the two"
        )
    shared = {name: section.changed(**changes.get(name, {})) for name, section in sections.items()}
    return config.changed(own_from=first, **shared)


def shared_sections(config: Config) -> Sections:
    """Return the sections that a run with this upstream takes from it."""
    return {name: getattr(config, name) for name in SHARED_SECTIONS}


def recorded_sections(upstream: str, seed: int, start: Config) -> Sections:
    """Return the shared sections as the finished stages of an upstream recorded them.

    `start`: the preset of the run that has the upstream; it supplies sections that the upstream has
    not recorded. Raises UserError if there is no such upstream, or if it has an upstream too.
    """
    folder = paths.RUNS / upstream / f"seed{seed}"
    if not folder.is_dir():
        raise UserError(
            f"upstream {upstream} has no seed {seed}: run `make rm PRESET={start.preset}"
            f" SEED={seed} NAME={upstream}` to make it"
        )

    recorded: Sections = {}
    for stage in SHARED_STAGES:
        config = recorded_config(folder / stage)
        if config is None:
            path = folder / stage / "config.json"
            if path.exists():
                raise UserError(f"{path} is not the config of a run: {RESTORE}")
            continue
        if _base_of_preset(config) != start.base:
            raise UserError(
                f"upstream {upstream} is of preset {config.preset}, whose base model is not that of"
                f" {start.preset}: add PRESET={config.preset}"
            )
        for section in STAGES[stage].sections:
            if section in SHARED_SECTIONS:
                recorded[section] = getattr(config, section)

    # A run that has an upstream itself has no base stage.
    if "base" not in recorded:
        for path in folder.iterdir():
            config = recorded_config(path)
            if config and config.upstream:
                raise UserError(
                    f"{upstream} starts from {config.upstream}: give UPSTREAM={config.upstream}"
                )
    return shared_sections(start) | recorded


def _base_of_preset(config: Config) -> Base:
    """Return the base model of a run's preset; the recorded one if the preset cannot be read."""
    try:
        return preset_config(config.preset).base
    except UserError:
        return config.base
