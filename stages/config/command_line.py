"""From a command line to a config: a preset, its overrides, an upstream, what a run recorded.

make ppo PRESET=tiny SEED=44413 SET=ppo.kl_coef=0.1 NAME=tiny-kl0.1
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from stages.config import paths
from stages.config.config import SECTIONS, Config
from stages.config.error_messages import Parser
from stages.config.errors import RESTORE, UserError, first_few
from stages.config.identity import is_same
from stages.config.judge import at_server
from stages.config.paths import NO_FOLDERS, NO_RUN_NAME, PLACES, is_run_name
from stages.config.presets import EXISTING_SUMMARIES, PRESETS, Changes, preset_config
from stages.config.public import SERVERS
from stages.config.recorded import recorded_config
from stages.config.sections import HUB, RANDOM, TOY, Base
from stages.config.stages import (
    GIVEN_BY,
    OUTPUTS,
    RELEASED,
    SHARED_SECTIONS,
    SHARED_STAGES,
    STAGES,
    TRAINED,
    first_changed,
    row_of,
)
from stages.config.values import (
    DEFAULTS,
    TYPES,
    changes_of,
    text_from_value,
    value_of,
    with_changes,
)
from stages.rl.algorithms import ALGORITHMS

# An override of these needs no name of its own: another judge is another opinion of the same run.
SAME_RUN = ("judge", "checks", "memory")
# Settings in one word are separated where white space precedes `section.key=`, because a value may
# contain spaces.
NEXT_OVERRIDE = re.compile(r"\s+(?=[A-Za-z_]\w*\.\w+=)")
# Sections that have no effect on a run that trains nothing.
TRAINING_SECTIONS = {"base", "optimizer", "sft", "rm", "normalize", "dpo", "lora", *ALGORITHMS}


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
    """The preset, changed by the other fields of `Request`."""
    return config_of(Request(preset=preset, **changes))


def config_of(
    request: Request, upstream_config: Config | None = None, require_data: bool = True
) -> Config:
    """Return the preset with what the command line changes; overrides are like `ppo.kl_coef=0.1`.

    If the run has an upstream, the sections of the shared stages are those of the upstream's record
    on disk, or of `upstream_config` if it has not run yet, with the overrides.
    With `require_data=False` a preset's folder of posts may be missing, for example to show its
    settings. Raises UserError for an unknown preset or key, a bad value, a missing folder, an
    override in a run without its own name, and an override that has no effect.
    """
    for word in request.arguments:  # surrogates stand for bytes that are not text
        if not word.isprintable():
            raise UserError(
                f"{ascii(word)[:80]} contains a control character or is not UTF-8: remove it"
            )

    # 1. The preset, or what the run recorded.
    config = _settings_before_overrides(request)

    # 2. DATA and TOKENIZER. Where the preset has data or a tokenizer itself, they are overrides.
    overrides = list(request.overrides)
    for key, value in (("data.source", request.data), ("base.tokenizer", request.tokenizer)):
        if not value:
            continue
        if value_of(config, key):
            overrides.append(f"{key}={value}")
        else:
            config = with_changes(config, changes_of([f"{key}={value}"]))

    # 3. The overrides.
    changes = changes_of(overrides)
    # A preset's best-of-n samples the SFT model, which a released policy lacks.
    if changes.get("released", {}).get("policy"):
        changes.setdefault("eval", {}).setdefault("best_of", "")
    config = with_changes(config, changes)

    # 4. Settings that follow from others, and overrides that have no effect.
    config = _use_released_policy(config, request, changes)
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
        config = _take_shared_sections(config, request, changes, upstream_config)
    if require_data:
        _check_data(config)
    return config.changed(
        seed=request.seed,
        name=name,
        upstream=request.upstream,
        overrides=request.overrides,
        judge=at_server(config.judge),
    )


def _default_name(config: Config) -> str:
    """Return the folder of a run that is not named."""
    if config.kind == RELEASED:
        return config.released.run_name
    if config.kind == OUTPUTS:
        return config.outputs.run_name
    return config.name


def _settings_before_overrides(request: Request) -> Config:
    """Return what the overrides change: the preset, or what a run recorded."""
    if not request.recorded:
        return preset_config(request.preset)
    defaults = Config(preset=request.preset, name=request.name)
    return with_changes(defaults, changes_of(request.recorded))


def _use_released_policy(config: Config, request: Request, changes: Changes) -> Config:
    """Return the config with a released policy, if there is one, in place of the base checkpoint.

    Raises UserError for settings that have no effect, or that need a model which only training
    provides.
    """
    if config.kind == TRAINED:
        return config
    variable = GIVEN_BY[config.kind]
    if request.upstream:
        raise UserError(f"{variable} is judged without training: leave out UPSTREAM=")
    # A released policy reads TOKENIZER, which is no setting of training there.
    ineffective = changes_of(request.overrides) if config.kind == RELEASED else changes
    useless = sorted(TRAINING_SECTIONS & ineffective.keys())
    if useless:
        raise UserError(f"{useless[0]}.* has no effect: {variable} is judged without training")

    has_model = config.judge.gold or config.released.reward_model
    if config.judge.kind == "reward_model" and not has_model:
        fix = "add REWARD_MODEL=" if config.kind == RELEASED else "set judge.model"
        raise UserError(
            f"judge.kind=reward_model needs a reward model: {fix}, or choose another judge,"
            " such as SET=judge.kind=openai"
        )
    if config.kind == OUTPUTS:
        return config
    base = config.base.changed(checkpoint=config.released.policy, tokenizer=request.tokenizer)
    return config.changed(base=base)


def _check_names(request: Request, name: str, overrides: Sequence[str]) -> None:
    if request.upstream and not is_run_name(request.upstream):
        raise UserError(f"UPSTREAM={request.upstream} {NO_RUN_NAME}")

    # A preset's own folder may only contain the unchanged preset.
    changed = [text for text in overrides if text.split(".")[0] not in SAME_RUN]
    if request.upstream:
        changed.append(f"UPSTREAM={request.upstream}")
    if changed and name in PRESETS:
        raise UserError(f"{changed[0]} changes preset {name}: name the run with NAME=...")
    if name in PRESETS and name != request.preset:
        raise UserError(f"NAME={name} is the folder of preset {name}: choose another name")


# -- upstream --------------------------------------------------------------------------------------


def _take_shared_sections(
    config: Config, request: Request, changes: Changes, upstream_config: Config | None
) -> Config:
    """The config with the shared sections as the upstream has them, and then as overrides say."""
    recorded = {} if upstream_config else recorded_sections(request)
    start = upstream_config or _settings_before_overrides(request)
    sections = {name: recorded.get(name, getattr(start, name)) for name in SHARED_SECTIONS}

    # Settings of shared stages that this run changes, and their values in the upstream.
    differing: dict[str, Any] = {}
    for name, section in sections.items():
        for field, value in changes.get(name, {}).items():
            key = f"{name}.{field}"
            value_in_upstream = getattr(section, field)
            if not is_same(key, value_in_upstream, value):
                differing[key] = value_in_upstream
    first = first_changed({key.split(".")[0] for key in differing})
    if first == SHARED_STAGES[0]:
        key, value = next(iter(differing.items()))
        raise UserError(
            f"{key} changes stage {first}, which UPSTREAM={request.upstream} supplies"
            f" (with {value}): leave out one of the two"
        )
    shared = {name: section.changed(**changes.get(name, {})) for name, section in sections.items()}
    return config.changed(own_from=first, **shared)


def recorded_sections(request: Request) -> dict[str, Any]:
    """The shared sections as the finished stages of `request.upstream` recorded them.

    Raises UserError if there is no such run, or if it has an upstream too.
    """
    folder = paths.RUNS / request.upstream / f"seed{request.seed}"
    if not folder.is_dir():
        raise UserError(
            f"upstream {request.upstream} has no seed {request.seed}: run `make rm "
            f"PRESET={request.preset} SEED={request.seed} NAME={request.upstream}` to make it"
        )
    base = _settings_before_overrides(request).base
    sections: dict[str, Any] = {}
    for stage in SHARED_STAGES:
        config = recorded_config(folder / stage)
        if config is None:
            path = folder / stage / "config.json"
            if path.exists():
                raise UserError(f"{path} is not the config of a run: {RESTORE}")
            continue
        if _base_of_preset(config) != base:
            raise UserError(
                f"upstream {request.upstream} is of preset {config.preset}, whose base model is not"
                f" that of {request.preset}: add PRESET={config.preset}"
            )
        shared = set(STAGES[stage].sections) & set(SHARED_SECTIONS)
        sections |= {name: getattr(config, name) for name in shared}

    if "base" not in sections:
        for path in folder.iterdir():
            config = recorded_config(path)
            if config and config.upstream:
                raise UserError(
                    f"{request.upstream} starts from {config.upstream}: give"
                    f" UPSTREAM={config.upstream}"
                )
    return sections


def _base_of_preset(config: Config) -> Base:
    """The base model of a run's preset; what the run recorded if its preset cannot be read."""
    try:
        return preset_config(config.preset).base
    except UserError:
        return config.base


def _check_data(config: Config) -> None:
    """Raise UserError for data, a tokenizer or a reward function that is not there."""
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
    module = config.reward.module
    if module and not module.exists():  # checked here, hours before it is called
        raise UserError(f"reward.function: no file {module} in this folder: correct the name")


# -- options ---------------------------------------------------------------------------------------


class SplitOverrides(argparse.Action):
    """Splits words that hold several overrides."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Called by argparse with the words of one option."""
        overrides: list[str] = []
        for word in values:
            parts = NEXT_OVERRIDE.split(word.strip())
            keys = [part.split("=")[0] for part in parts]
            twice = [key for key in keys if keys.count(key) > 1]
            if twice:
                raise UserError(f"{twice[0]} is set twice: leave one out")
            overrides += parts
        setattr(namespace, self.dest, overrides)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """The option `--set` of a command line, stored as `overrides`."""
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        nargs="*",
        default=[],
        action=SplitOverrides,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every stage takes."""
    parser.add_argument("--preset", default="", help="a preset or a file; default: tiny")
    parser.add_argument("--seed", type=int, default=44413)
    parser.add_argument("--name", default="", help="the run's folder below runs/")
    parser.add_argument("--data", default="", help="folder with posts and comparisons")
    parser.add_argument("--tokenizer", default="", help="tokenizer folder or hub id")
    parser.add_argument(
        "--upstream", default="", help="run that supplies stages with equal settings"
    )
    parser.add_argument("--recorded", nargs="*", default=[], help=argparse.SUPPRESS)
    add_overrides(parser)


def request_of(args: argparse.Namespace) -> Request:
    """What parsed options ask for. Given only a name, the run's recorded settings are used."""
    values = {option.name: getattr(args, option.name) for option in fields(Request)}
    values["preset"] = args.preset or Request.preset
    values["recorded"] = tuple(args.recorded)
    values["overrides"] = tuple(args.overrides)
    request = Request(**values)

    # `make judge` gives the preset `outputs` if no preset is named; it needs a file.
    has_preset = args.preset not in ("", EXISTING_SUMMARIES)
    changes_run = any(text.split(".")[0] not in SAME_RUN for text in request.overrides)
    has_sources = bool(request.data or request.tokenizer or request.upstream)
    is_named_only = bool(request.name) and not (has_preset or changes_run or has_sources)
    return as_recorded(request) if is_named_only else request


def config_from_arguments(
    argv: Sequence[str] | None, description: str = "", require_data: bool = True
) -> Config:
    """Return the config that a command line asks for. Raises UserError as `config_of` does."""
    parser = Parser(description=description)
    add_arguments(parser)
    return config_of(request_of(parser.parse_args(argv)), require_data=require_data)


# -- the recorded settings of a named run ----------------------------------------------------------


def as_recorded(request: Request) -> Request:
    """Return the request with the preset, data and settings that the named run recorded.

    If this seed has no records, another seed's are used; without any, the request is unchanged.
    Settings of the request take precedence over the recorded ones, and a judge that it sets
    replaces the recorded judge entirely.

    A preset that is a file, or no longer exists, is replaced by the values that the run recorded.
    One line on stderr says if the file has changed or cannot be read.
    """
    configs = _configs_of_run(request)
    if not configs:
        return request
    *_, last = configs.values()

    # The last stage that reads a section has its settings; what others recorded may be older.
    readers: dict[str, str] = {}
    for stage in configs:
        for section in row_of(stage, last.kind).sections:
            readers[section] = stage
    overrides: dict[str, str] = {}
    for stage, config in configs.items():
        for text in config.overrides:
            key = text.partition("=")[0]
            if key in TYPES and readers.get(key.split(".")[0], stage) == stage:
                overrides[key] = text

    # Another judge replaces the recorded one entirely; other settings replace only themselves.
    typed_keys = {text.partition("=")[0] for text in request.overrides}
    has_other_judge = any(key.startswith("judge.") for key in typed_keys)
    kept = {}
    for key, text in overrides.items():
        is_of_old_judge = has_other_judge and key.startswith("judge.")
        if key not in typed_keys and not is_of_old_judge:
            kept[key] = text

    request = replace(
        request,
        preset=last.preset,
        upstream=last.upstream,
        data=_place_or_empty(last.data.source),
        tokenizer=_place_or_empty(last.base.tokenizer),
        overrides=(*kept.values(), *request.overrides),
    )
    if last.preset in PRESETS:
        # Values that equal the preset's need not be repeated.
        preset = preset_config(last.preset)
        return replace(
            request,
            data="" if last.data.source == preset.data.source else request.data,
            tokenizer="" if last.base.tokenizer == preset.base.tokenizer else request.tokenizer,
        )

    sections = {
        name: getattr(configs[readers[name]] if name in readers else last, name)
        for name in SECTIONS
    }
    recorded = last.changed(**sections)
    _say_if_preset_changed(recorded, overrides)
    gone = overrides.keys() - kept.keys()
    return replace(request, recorded=_as_overrides(recorded, leave_out={*gone, *SERVERS}))


def _configs_of_run(request: Request) -> dict[str, Config]:
    """Stage -> its record, from the request's seed, or else from the first seed with records."""
    root = paths.RUNS / request.name
    for folder in (root / f"seed{request.seed}", *sorted(root.glob("seed*"))):
        configs = {}
        for stage in STAGES:
            if STAGES[stage].per_judge:
                continue
            config = recorded_config(folder / stage)
            if config is None:  # A half-finished stage has recorded its settings, too.
                config = recorded_config(folder / f"{stage}.partial")
            if config is not None:
                configs[stage] = config
        if configs:
            return configs
    return {}


def _place_or_empty(value: str) -> str:
    """The value of a setting if it names a folder or a hub id; else empty."""
    return "" if value in NO_FOLDERS else value


def _as_overrides(config: Config, leave_out: set[str]) -> tuple[str, ...]:
    """The settings that differ from the defaults. DATA and TOKENIZER give what they name."""
    texts = []
    for key, default in DEFAULTS.items():
        value = value_of(config, key)
        has_variable = key in ("data.source", "base.tokenizer") and bool(_place_or_empty(value))
        if value != default and not has_variable and key not in leave_out:
            texts.append(f"{key}={text_from_value(value)}")
    return tuple(texts)


def preset_differences(config: Config, overrides: Iterable[str]) -> dict[str, str]:
    """Return how a run's settings differ from its preset with these overrides: key -> phrase.

    Raises UserError if the preset cannot be read.
    """
    preset = preset_config(config.preset)
    if config.kind != TRAINED:  # settings of training do not count
        return {}
    now = with_changes(preset, changes_of(overrides))

    # Folders are given in addition to the preset, and an upstream supplies the shared sections.
    from_upstream = SHARED_SECTIONS if config.upstream else ()
    return {
        key: f"{key}: {value_of(config, key)}, now {value_of(now, key)}"
        for key in TYPES
        if value_of(config, key) != value_of(now, key)
        and key not in (*PLACES, *SERVERS)
        and key.split(".")[0] not in from_upstream
    }


def _say_if_preset_changed(recorded: Config, overrides: dict[str, str]) -> None:
    """Print one line if a run's preset cannot be read, or if its settings differ from the run's."""
    run = f"run {recorded.name} keeps the settings that it recorded"
    try:
        changed = list(preset_differences(recorded, overrides.values()).values())
    except UserError as error:
        reason = f"its preset cannot be read: {error}"
        print(f"warning: {run}, because {reason}", file=sys.stderr, flush=True)
        return

    if changed:
        print(
            f"warning: {recorded.preset} has changed ({first_few(changed, '; ')}):"
            f" {run}. PRESET={recorded.preset} with another NAME uses the file",
            file=sys.stderr,
            flush=True,
        )
