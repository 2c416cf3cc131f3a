"""From a command line to a config: a preset, its overrides, and an upstream.

make ppo PRESET=tiny SEED=44413 SET=ppo.kl_coef=0.1 NAME=tiny-kl0.1

Which function makes a config:

config_of               from a `Request`; every command ends here
make_config             the same from keywords, `make_config("tiny", seed=2)`: for tests and `own`
config_from_arguments   the same from the words of a command line (options.py)
preset_config           of an unchanged preset (presets.py)
recorded_config         as a stage recorded it in its folder (recorded.py)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.judge import at_server
from stages.config.paths import NO_RUN_NAME, is_run_name
from stages.config.presets import EXISTING_SUMMARIES, PRESETS, preset_config
from stages.config.sections import HUB, RANDOM, TOY
from stages.config.stages import (
    GIVEN_BY,
    OUTPUTS,
    RELEASED,
    SAME_RUN_SECTIONS,
    TRAINED,
    TRAINING_SECTIONS,
)
from stages.config.upstream import recorded_sections, shared_sections, with_upstream
from stages.config.values import Changes, parse_overrides, section_of, value_of, with_changes


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command line asks for; `config_of` turns it into a config."""

    preset: str = "tiny"
    """The name of a preset, or a file."""
    seed: int = 44413
    name: str = ""
    """The run's folder below runs/. Empty: the preset's name, or the file's without its ending."""
    data: str = ""
    tokenizer: str = ""
    upstream: str = ""
    """Run that supplies those stages before PPO whose settings no override changes. Empty: none."""
    recorded: tuple[str, ...] = ()
    """Recorded settings that replace the preset, for a run whose preset is a file or no longer
    exists. Empty: the preset is used."""
    overrides: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """The same, as words of a stage's command line."""
        words = []
        for option in ("preset", "seed", "name", "data", "tokenizer", "upstream"):
            value = getattr(self, option)
            if value != "":
                words.append(f"--{option}={value}")  # in one word: a value may begin with a dash
        if self.recorded:
            words += ["--recorded", *self.recorded]
        if self.overrides:
            words += ["--set", *self.overrides]
        return words


def make_config(preset: str, **changes: Any) -> Config:
    """Return the config of a preset, changed by the other fields of `Request`."""
    return config_of(Request(preset=preset, **changes))


def config_of(
    request: Request, upstream_config: Config | None = None, require_data: bool = True
) -> Config:
    """Return the config that a request describes: its preset, changed by everything else in it.

    With an upstream, `base` to `normalize` have the upstream's recorded settings, or those of
    `upstream_config`, which is for an upstream that has not run yet. With `require_data=False` the
    data may be missing, for example to show a preset's settings.

    Raises UserError for an unknown preset or key, a bad value, missing data, an override in a run
    without its own name, and an override that has no effect.
    """
    for word in request.arguments:  # surrogates stand for bytes that are not text
        if not word.isprintable():
            raise UserError(
                f"{ascii(word)[:80]} contains a control character or is not UTF-8: remove it"
            )

    # 1. The preset, or what the run recorded.
    start = _settings_before_overrides(request)

    # 2. DATA and TOKENIZER. Where the preset has data or a tokenizer itself, they are overrides.
    config = start
    overrides = list(request.overrides)
    for key, value in (("data.source", request.data), ("base.tokenizer", request.tokenizer)):
        if not value:
            continue
        if value_of(config, key):
            overrides.append(f"{key}={value}")
        else:
            config = with_changes(config, parse_overrides([f"{key}={value}"]))

    # 3. The overrides. A preset's best-of-n samples the SFT model, which a released policy lacks.
    changes = parse_overrides(overrides)
    if changes.get("released", {}).get("policy"):
        config = with_changes(config, {"eval": {"best_of": ""}})
    config = with_changes(config, changes)

    # 4. Overrides that have no effect, and the base checkpoint, which is the policy that is judged.
    if config.kind != TRAINED:
        _check_without_training(config, request, changes)
    if config.kind == RELEASED:
        base = config.base.changed(checkpoint=config.released.policy, tokenizer=request.tokenizer)
        config = config.changed(base=base)
    useless = sorted(name for name in changes.get("ppo", {}) if name in config.ppo.quirks)
    if useless:
        compat = config.ppo.compat
        raise UserError(f"ppo.{useless[0]} has no effect: ppo.compat={compat} sets it")
    config.judge.check_used_by_kind(changes.get("judge", {}))

    # 5. The name of the run.
    name = request.name or _default_name(config)
    _check_names(request, name, overrides)

    # 6. The sections of an upstream, before its data are looked for.
    if request.upstream:
        if upstream_config is None:
            sections = recorded_sections(request.upstream, request.seed, start)
        else:
            sections = shared_sections(upstream_config)
        config = with_upstream(config, request.upstream, sections, changes)
    if require_data:
        _check_data(config)
    return config.changed(
        seed=request.seed,
        name=name,
        upstream=request.upstream,
        overrides=request.overrides,
        judge=at_server(config.judge),
    )


def _settings_before_overrides(request: Request) -> Config:
    """Return what the overrides change: the preset, or what a run recorded."""
    if not request.recorded:
        return preset_config(request.preset)
    defaults = Config(preset=request.preset, name=request.name)
    return with_changes(defaults, parse_overrides(request.recorded))


def _default_name(config: Config) -> str:
    """Return the folder of a run that is not named."""
    if config.kind == RELEASED:
        return config.released.run_name
    if config.kind == OUTPUTS:
        return config.outputs.run_name
    return config.name


def _check_without_training(config: Config, request: Request, changes: Changes) -> None:
    """Raise UserError for settings of training in a run that only judges a policy or summaries."""
    variable = GIVEN_BY[config.kind]
    if request.upstream:
        raise UserError(f"{variable} is judged without training: leave out UPSTREAM=")

    # A released policy reads TOKENIZER, which is not a setting of training there.
    if config.kind == RELEASED:
        changes = parse_overrides(request.overrides)
    useless = sorted(section for section in changes if section in TRAINING_SECTIONS)
    if useless:
        raise UserError(f"{useless[0]}.* has no effect: {variable} is judged without training")

    has_model = config.judge.gold or config.released.reward_model
    if config.judge.kind == "reward_model" and not has_model:
        fix = "add REWARD_MODEL=" if config.kind == RELEASED else "set judge.model"
        raise UserError(
            f"judge.kind=reward_model needs a reward model: {fix}, or choose another judge,"
            " such as SET=judge.kind=openai"
        )


def _check_names(request: Request, name: str, overrides: Sequence[str]) -> None:
    """Raise UserError for a bad name, and for a changed preset in the preset's own folder."""
    if request.upstream and not is_run_name(request.upstream):
        raise UserError(f"UPSTREAM={request.upstream} {NO_RUN_NAME}")
    if name not in PRESETS:
        return

    fix = f"changes preset {name}: name the run with NAME=..."
    for override in overrides:
        if section_of(override) not in SAME_RUN_SECTIONS:
            raise UserError(f"{override} {fix}")
    if request.upstream:
        raise UserError(f"UPSTREAM={request.upstream} {fix}")
    if name != request.preset:
        raise UserError(f"NAME={name} is the folder of preset {name}: choose another name")


def _check_data(config: Config) -> None:
    """Raise UserError if data, a tokenizer or a reward function is missing."""
    if config.kind == OUTPUTS:
        return
    source = config.data.source
    if config.preset == EXISTING_SUMMARIES:
        raise UserError("preset outputs needs a file of summaries: add INPUT=outputs.jsonl")
    if not source:
        raise UserError(f"preset {config.preset} needs posts: add DATA=folder")
    if config.base.checkpoint == RANDOM and not config.base.tokenizer:
        raise UserError(f"preset {config.preset} needs a tokenizer: add TOKENIZER=folder")
    if source not in (TOY, HUB) and not Path(source).exists():
        raise UserError(f"data.source: {source} is not a file, folder or hub id: correct DATA=")

    # Without this check, a missing file would be noticed hours later, when it is first called.
    module = config.reward.module
    if module and not module.exists():
        raise UserError(f"reward.function: no file {module} in this folder: correct the name")
