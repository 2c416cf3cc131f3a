"""The `make` command that runs a stage, for messages that say how to fix a problem."""

import shlex

from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.named_runs import preset_differences
from stages.config.presets import PRESETS
from stages.config.recorded import is_recorded
from stages.config.sections import HUB, TOY, TRAIN_TOKENIZER
from stages.config.stages import SAME_RUN_SECTIONS, STAGES
from stages.config.values import section_of

# Settings with their own make variable.
VARIABLE_OF_SETTING = {
    "released.policy": "POLICY",
    "released.reward_model": "REWARD_MODEL",
    "outputs.file": "INPUT",
}


def make_command(config: Config, stage: str) -> str:
    """Return the `make` command that runs a stage of this run, or of its upstream."""
    is_from_upstream = config.is_from_upstream(stage)
    name = config.upstream if is_from_upstream else config.name
    variables: dict[str, str] = {}
    if is_from_upstream and name != config.preset and is_recorded(name):
        # The upstream's record supplies its settings.
        variables = {"SEED": str(config.seed), "NAME": name}
        return _command(STAGES[stage].target, variables)

    if not is_from_upstream and _has_other_preset_now(config):
        # Only the run's record still has its settings, and NAME without PRESET reads the record.
        added = [text for text in config.overrides if section_of(text) in SAME_RUN_SECTIONS]
        variables = {"SEED": str(config.seed), "NAME": name, "SET": " ".join(added)}
        return _command(STAGES[stage].target, variables | _cost_variable(config, stage))

    variables = {"PRESET": config.preset, "SEED": str(config.seed)}
    if name != config.preset:
        variables["NAME"] = name
    if not is_from_upstream:
        variables["UPSTREAM"] = config.upstream
        variables |= _override_variables(config)
    variables |= _cost_variable(config, stage)
    if config.data.source not in (TOY, HUB):
        variables["DATA"] = config.data.source
    if config.base.tokenizer != TRAIN_TOKENIZER:
        variables["TOKENIZER"] = config.base.tokenizer
    return _command(STAGES[stage].target, variables)


def _has_other_preset_now(config: Config) -> bool:
    """Return whether a run's preset file has changed, or cannot be read, since the run began."""
    if config.preset in PRESETS or not is_recorded(config.name):
        return False
    try:
        return bool(preset_differences(config, config.overrides))
    except UserError:
        return True


def _cost_variable(config: Config, stage: str) -> dict[str, str]:
    """Return MAX_COST if a stage asks a judge whose cost has a limit."""
    if "judge" not in STAGES[stage].sections or not config.judge.max_cost:
        return {}
    return {"MAX_COST": f"{config.judge.max_cost:.15g}"}


def _override_variables(config: Config) -> dict[str, str]:
    """Return the variables that repeat the run's overrides: SET, and those of single settings."""
    values = dict(override.split("=", 1) for override in config.overrides)
    words = [f"{key}={value}" for key, value in values.items() if key not in VARIABLE_OF_SETTING]
    variables = {"SET": " ".join(words)}
    for key, variable in VARIABLE_OF_SETTING.items():
        variables[variable] = values.get(key, "")
    return variables


def _command(target: str, variables: dict[str, str]) -> str:
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items() if value]
    return " ".join(["make", target, *words])
