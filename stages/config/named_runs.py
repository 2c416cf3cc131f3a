"""The recorded settings of a run: given only NAME, a command uses them.

If the run's preset is a built-in one, its name and the recorded overrides suffice. If it is a file,
which may have changed or moved, the recorded values replace it.
"""

import sys
from collections.abc import Collection, Iterable
from dataclasses import replace

from stages.config import paths
from stages.config.command_line import Request
from stages.config.config import SECTIONS, Config
from stages.config.errors import UserError, first_few
from stages.config.paths import FOLDER_SETTINGS, NO_FOLDERS
from stages.config.presets import PRESETS, preset_config
from stages.config.public import PRIVATE_SETTINGS
from stages.config.recorded import recorded_config
from stages.config.stages import SHARED_SECTIONS, STAGES, TRAINED, stage_row
from stages.config.values import (
    AUTO_SETTINGS,
    DEFAULTS,
    TYPES,
    key_of,
    parse_overrides,
    section_of,
    text_from_value,
    value_of,
    with_changes,
)

# Where the preset has 0, a command chooses: MAX_COST, or a batch size that fits in memory (`auto`).
# The run records the choice.
CHOSEN_IF_0 = ("judge.max_cost", *AUTO_SETTINGS)

Records = dict[str, Config]
"""Stage -> the config that it recorded, in the order of the stages. Not empty."""
Overrides = dict[str, str]
"""Key -> override: `ppo.lam` -> `ppo.lam=0.9`."""


def as_recorded(request: Request) -> Request:
    """Return the request with the preset, data and settings that the named run recorded.

    If this seed has no records, another seed's are used; without any, the request is unchanged.
    Settings of the request take precedence over the recorded ones, and a judge that it sets
    replaces the recorded judge entirely.

    A preset that is a file, or no longer exists, is replaced by the values that the run recorded.
    One line on stderr says if the file has changed or cannot be read.
    """
    records = _records_of_run(request.name, request.seed)
    if not records:
        return request
    last = _last(records)
    recorded = _recorded_overrides(records)
    replaced = _replaced_keys(recorded, request.overrides)
    kept = [text for key, text in recorded.items() if key not in replaced]

    data = _place_or_empty(last.data.source)
    tokenizer = _place_or_empty(last.base.tokenizer)
    values: tuple[str, ...] = ()
    if last.preset in PRESETS:
        # The preset supplies what equals its own.
        preset = preset_config(last.preset)
        if last.data.source == preset.data.source:
            data = ""
        if last.base.tokenizer == preset.base.tokenizer:
            tokenizer = ""
    else:
        config = _without_max_cost(_joined(records), recorded.values())
        _say_if_preset_changed(config, recorded.values())
        values = _as_overrides(config, leave_out={*replaced, *PRIVATE_SETTINGS})

    return replace(
        request,
        preset=last.preset,
        upstream=last.upstream,
        data=data,
        tokenizer=tokenizer,
        recorded=values,
        overrides=(*kept, *request.overrides),
    )


# -- records ---------------------------------------------------------------------------------------


def _records_of_run(name: str, seed: int) -> Records:
    """Return the records of a run's seed, or else of its first seed that has some; may be empty."""
    run = paths.RUNS / name
    for folder in (run / f"seed{seed}", *sorted(run.glob("seed*"))):
        records = {}
        for stage, row in STAGES.items():
            if row.per_judge:
                continue
            config = recorded_config(folder / stage)
            if config is None:  # A half-finished stage has recorded its settings, too.
                config = recorded_config(folder / f"{stage}.partial")
            if config is not None:
                records[stage] = config
        if records:
            return records
    return {}


def _last(records: Records) -> Config:
    """Return what the last stage recorded."""
    return list(records.values())[-1]


def _last_readers(records: Records) -> dict[str, str]:
    """Return section -> the last stage that reads it. What other stages recorded may be older."""
    kind = _last(records).kind
    readers: dict[str, str] = {}
    for stage in records:
        for section in stage_row(stage, kind).sections:
            readers[section] = stage
    return readers


def _recorded_overrides(records: Records) -> Overrides:
    """Return the overrides of a run, each as the last stage that reads its section recorded it."""
    readers = _last_readers(records)
    overrides: Overrides = {}
    for stage, config in records.items():
        for text in config.overrides:
            key = key_of(text)
            if key not in TYPES:  # of another version of this project
                continue
            if readers.get(section_of(key), stage) == stage:
                overrides[key] = text
    return overrides


def _joined(records: Records) -> Config:
    """Return a run's settings, each section as the last stage that reads it recorded it."""
    last = _last(records)
    readers = _last_readers(records)
    sections = {}
    for name in SECTIONS:
        config = records[readers[name]] if name in readers else last
        sections[name] = getattr(config, name)
    return last.changed(**sections)


def _replaced_keys(recorded: Overrides, typed: Iterable[str]) -> set[str]:
    """Return the recorded overrides that others replace: a judge entirely, or single settings."""
    typed_keys = {key_of(text) for text in typed}
    has_other_judge = any(section_of(key) == "judge" for key in typed_keys)
    replaced = set()
    for key in recorded:
        if key in typed_keys or (has_other_judge and section_of(key) == "judge"):
            replaced.add(key)
    return replaced


# -- recorded values in place of a preset ----------------------------------------------------------


def _place_or_empty(value: str) -> str:
    """Return the value of a setting if it names a folder or a hub id; else an empty text."""
    return "" if value in NO_FOLDERS else value


def _as_overrides(config: Config, leave_out: Collection[str]) -> tuple[str, ...]:
    """Return the settings that differ from the defaults.

    DATA and TOKENIZER give those that name a folder or a hub id.
    """
    texts = []
    for key, default in DEFAULTS.items():
        value = value_of(config, key)
        has_variable = key in ("data.source", "base.tokenizer") and bool(_place_or_empty(value))
        if value != default and not has_variable and key not in leave_out:
            texts.append(f"{key}={text_from_value(value)}")
    return tuple(texts)


def _without_max_cost(config: Config, overrides: Iterable[str]) -> Config:
    """Return a recorded config without MAX_COST of one command, which is not for the next one.

    A limit in the run's preset stays. So does the recorded one if the preset cannot be read.
    """
    try:
        preset = with_changes(preset_config(config.preset), parse_overrides(overrides))
    except UserError:
        return config
    return config.changed(judge=config.judge.changed(max_cost=preset.judge.max_cost))


def preset_differences(config: Config, overrides: Iterable[str]) -> dict[str, str]:
    """Return how a run's settings differ from its preset with these overrides: key -> phrase.

    Raises UserError if the preset cannot be read.
    """
    preset = preset_config(config.preset)
    if config.kind != TRAINED:  # settings of training do not count
        return {}
    now = with_changes(preset, parse_overrides(overrides))

    # Folders are given in addition to the preset, and an upstream supplies the shared sections.
    from_upstream = SHARED_SECTIONS if config.upstream else ()
    differences = {}
    for key in TYPES:
        if key in (*FOLDER_SETTINGS, *PRIVATE_SETTINGS) or section_of(key) in from_upstream:
            continue
        value = value_of(config, key)
        value_now = value_of(now, key)
        is_chosen = key in CHOSEN_IF_0 and value_now == 0
        if value != value_now and not is_chosen:
            differences[key] = f"{key}: {value}, now {value_now}"
    return differences


def _say_if_preset_changed(config: Config, overrides: Iterable[str]) -> None:
    """Print one line if a run's preset cannot be read, or if its settings differ from the run's."""
    run = f"run {config.name} keeps the settings that it recorded"
    try:
        changed = list(preset_differences(config, overrides).values())
    except UserError as error:
        reason = f"its preset cannot be read: {error}"
        print(f"warning: {run}, because {reason}", file=sys.stderr, flush=True)
        return

    if changed:
        print(
            f"warning: {config.preset} has changed ({first_few(changed, '; ')}):"
            f" {run}. PRESET={config.preset} with another NAME uses the file",
            file=sys.stderr,
            flush=True,
        )
