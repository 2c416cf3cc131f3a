"""The `make` command that runs a stage, for messages that say how to fix a problem."""

import shlex

from stages.config.config import Config, is_recorded
from stages.config.sections import HUB, TOY, TRAIN_TOKENIZER
from stages.config.stages import STAGES

# Settings with their own make variable.
VARIABLE_OF_SETTING = {
    "released.policy": "POLICY",
    "released.reward_model": "REWARD_MODEL",
    "outputs.file": "INPUT",
}


def make_command(config: Config, stage: str) -> str:
    """Return the `make` command that runs a stage of this run, or of its upstream."""
    is_upstreams = config.is_upstreams(stage)
    name = config.upstream if is_upstreams else config.name
    variables: dict[str, str] = {}
    if is_upstreams and name != config.preset and is_recorded(name):
        # The upstream's record supplies its settings.
        variables = {"SEED": str(config.seed), "NAME": name}
        return _command(STAGES[stage].target, variables)

    variables = {"PRESET": config.preset, "SEED": str(config.seed)}
    if name != config.preset:
        variables["NAME"] = name
    if not is_upstreams:
        variables["UPSTREAM"] = config.upstream
        variables |= _override_variables(config)
    if "judge" in STAGES[stage].sections and config.judge.max_cost:
        variables["MAX_COST"] = f"{config.judge.max_cost:.15g}"
    if config.data.source not in (TOY, HUB):
        variables["DATA"] = config.data.source
    if config.base.tokenizer != TRAIN_TOKENIZER:
        variables["TOKENIZER"] = config.base.tokenizer
    return _command(STAGES[stage].target, variables)


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
