"""How the settings and inputs of a stage differ from those that an earlier attempt recorded."""

import json
from collections.abc import Mapping
from typing import Any

from stages.config.config import Config
from stages.config.identity import is_same_setting, settings_of
from stages.runs.code import is_comparable
from stages.runs.inputs import DATA, FOLDERS, REWARD_FUNCTION, current_inputs
from stages.runs.manifest import read_manifest, stage_folder


def differing_settings(
    config: Config, stage: str, recorded: Mapping[str, Any], verb: str
) -> list[str]:
    """Return the settings of a stage that differ from a record: `ppo.lam: ran with 0.9, now 1.0`.

    `recorded` is what `settings_of` returned then, and `verb` what the stage did with it. A setting
    that the record lacks had its default. One that this version does not know is not a difference:
    see `unknown_settings`.
    """
    before = by_full_name(recorded)
    # Recorded values have passed through JSON, which turns tuples into lists.
    now = by_full_name(json.loads(json.dumps(settings_of(config, stage))))
    differences = []
    for name in before | now:
        if name in now:
            is_equal = is_same_setting(name, before.get(name), now[name])
        elif has_setting(config, name):
            # This stage no longer depends on it. It had no effect if it had its default.
            is_equal = is_same_setting(name, None, before[name])
        else:
            is_equal = True
        if not is_equal:
            old_value = before.get(name, "nothing")
            new_value = now.get(name, "nothing")
            differences.append(f"{name}: {verb} {old_value}, now {new_value}")
    return differences


def unknown_settings(config: Config, stage: str) -> list[str]:
    """Return the settings that a finished stage recorded and that this version does not know."""
    manifest = read_manifest(stage_folder(config, stage))
    if manifest is None:
        return []
    current = by_full_name(settings_of(config, stage))
    names = by_full_name(manifest["settings"])
    return [name for name in names if name not in current and not has_setting(config, name)]


def has_setting(config: Config, name: str) -> bool:
    """Return whether this version has a setting, such as `ppo.kl_coef` or `seed`."""
    value: Any = config
    for part in name.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def by_full_name(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings by names such as `ppo.kl_coef`; the seed keeps its name."""
    values = {}
    for name, section in sections.items():
        if isinstance(section, dict):
            for key, value in section.items():
                values[f"{name}.{key}"] = value
        else:
            values[name] = section
    return values


def differing_inputs(config: Config, stage: str, record: Mapping[str, Any]) -> list[str]:
    """Return how the inputs of a stage have changed, in phrases such as `with an earlier sft`.

    `record` is a manifest, or what an attempt recorded. An input that the stage no longer has is
    not a difference.
    """
    recorded = record["inputs"]
    current = current_inputs(config, stage)
    # An earlier version recorded the reward function for `rm` only.
    if REWARD_FUNCTION not in recorded and not is_comparable(record["code"]):
        current.pop(REWARD_FUNCTION, None)

    differences = []
    for name, identity in current.items():
        if recorded.get(name) == identity:
            continue
        if recorded.get(name) is None:
            differences.append(f"without {name}")
        elif identity is None:
            differences.append(f"with {name}, which is missing now")
        elif name == DATA:
            differences.append("with other data")
        elif name == REWARD_FUNCTION or name in FOLDERS:
            differences.append(f"with another version of {name}")
        else:
            differences.append(f"with an earlier {name}")
    if REWARD_FUNCTION in recorded and not config.reward.function:
        differences.append(f"with {REWARD_FUNCTION}, which is not set now")
    return differences
