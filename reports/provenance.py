"""What a page was made from: settings, code, libraries, devices, files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.results import OUTPUTS, Json, RunResult
from stages.config import paths
from stages.config.errors import first_few
from stages.config.identity import POLICY_NUMERICS
from stages.config.presets import PRESETS, preset_config
from stages.config.public import public_value
from stages.config.sections import TOY
from stages.config.stages import STAGES
from stages.config.values import DEFAULTS
from stages.runs.code import changed_files, code_version
from stages.runs.files import file_hash
from stages.runs.manifest import read_manifest

JUDGED_STAGES = ("judge", "calibration")  # stages with a folder for each judge
# Memory settings that change rounding; the others only cut batches.
NUMERIC_SETTINGS = tuple(f"memory.{name}" for name in POLICY_NUMERICS)
# Settings with variables of their own on the command line. They name places, not values.
PLACES = ("data.source", "base.tokenizer")


@dataclass(frozen=True)
class SettingRow:
    """One setting: its name, its value in the run, the preset's value, and the default."""

    name: str
    value: str
    preset: str
    default: str


@dataclass(frozen=True, kw_only=True)
class SettingsTable:
    """The settings of a run: those worth reading, and all others."""

    preset: str
    is_built_in: bool
    """Whether the preset is one of ours, which can be compared with; a file may have changed."""
    set_by_hand: tuple[str, ...]
    is_trained: bool
    different: tuple[SettingRow, ...]
    others: tuple[SettingRow, ...]


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """Time, memory and origin of one stage."""

    run: str
    """Its run and seed."""
    name: str
    seconds: float
    peak_gib: float
    code: str
    settings_hash: str
    manifest_hash: str
    inputs: tuple[str, ...]
    finished: str


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Everything that names the code, libraries, machines and files behind some runs."""

    stages: tuple[StageRow, ...]
    seconds: float
    stages_by_code: Mapping[str, tuple[str, ...]]
    """Version of the code -> the stages that ran with it."""
    changed_code: str
    """What has changed in the code since the stages ran; empty if nothing."""
    devices: tuple[str, ...]
    threads: tuple[str, ...]
    precisions: tuple[str, ...]
    versions: Mapping[str, str]

    @property
    def uncommitted(self) -> int:
        """The number of code versions with uncommitted changes."""
        return sum(version.endswith("-dirty") for version in self.stages_by_code)


def shown(name: str, value: Any) -> str:
    """Return a setting as a page may show it: folders by their last name, servers not at all."""
    value = public_value(name, value)
    if isinstance(value, str):
        return value or "(empty)"
    return json.dumps(value)


def settings_table(run: RunResult) -> SettingsTable:
    """Return the settings of a run, beside those of its preset and the defaults."""
    built_in = preset_config(run.preset) if run.preset in PRESETS else None
    different = []
    others = []
    set_by_hand = []
    for section, values in run.settings.items():
        for key, value in values.items():
            name = f"{section}.{key}"
            if name not in DEFAULTS:  # a setting of another version
                continue
            default = DEFAULTS[name]
            preset_value = value if built_in is None else getattr(getattr(built_in, section), key)
            row = SettingRow(
                name=name,
                value=shown(name, value),
                preset=shown(name, preset_value),
                default=shown(name, default),
            )
            is_set_by_hand = value != preset_value and name not in PLACES
            if is_set_by_hand:
                set_by_hand.append(f"{name}={row.value}")
            has_effect = section != "world" or run.settings["data"]["source"] == TOY
            differs = value != default and has_effect and section != "memory"
            if name in NUMERIC_SETTINGS or is_set_by_hand or differs:
                different.append(row)
            else:
                others.append(row)
    return SettingsTable(
        preset=run.preset,
        is_built_in=built_in is not None,
        set_by_hand=tuple(set_by_hand),
        is_trained=OUTPUTS not in run.settings,
        different=tuple(different),
        others=tuple(others),
    )


def provenance(runs: Sequence[RunResult]) -> Provenance:
    """Return what some runs were computed with."""
    stage_rows = []
    by_code: dict[str, dict[str, None]] = {}
    devices: set[str] = set()
    versions: dict[str, set[str]] = {}
    threads: set[str] = set()
    precisions: set[str] = set()
    folders: set[Path] = set()
    for run in runs:
        for name, stage in run.stages.items():
            if stage.folder in folders:  # several runs can share a stage
                continue
            folders.add(stage.folder)
            manifest = stage.manifest
            by_code.setdefault(manifest["code_version"], {})[name] = None
            if STAGES[name].computes:
                devices.add(device_of(manifest))
            for library, version in manifest["versions"].items():
                versions.setdefault(library, set()).add(version)
            stage_rows.append(stage_row(_title(run), name, stage.folder, manifest))
        memory = run.settings.get("memory", {})
        if "cpu_threads" in memory:
            threads.add(str(memory["cpu_threads"]))
        if "mixed_precision" in memory:
            precisions.add(str(memory["mixed_precision"]))
    changed = {
        name: changed_files(stage.manifest["code"])
        for run in runs
        for name, stage in run.stages.items()
    }
    return Provenance(
        stages=tuple(stage_rows),
        seconds=sum(row.seconds for row in stage_rows),
        stages_by_code={version: tuple(by_code[version]) for version in sorted(by_code)},
        changed_code=other_code(changed),
        devices=tuple(sorted(devices)),
        threads=tuple(sorted(threads)),
        precisions=tuple(sorted(precisions)),
        versions={name: ", ".join(sorted(used)) for name, used in sorted(versions.items())},
    )


def other_code(changed: Mapping[str, Iterable[str]]) -> str:
    """Return `ppo ran with different code (stages/functional.py)`; empty if no file has changed.

    `changed` maps each stage to its changed files.
    """
    stages = [stage for stage, files in changed.items() if files]
    if not stages:
        return ""
    files = sorted({name for names in changed.values() for name in names})
    return f"{', '.join(stages)} ran with different code ({first_few(files)})"


def _title(run: RunResult) -> str:
    return f"{run.name}, seed {run.seed}"


def stage_row(run: str, name: str, folder: Path, manifest: Json) -> StageRow:
    """Return time, memory and origin of one stage. `run` names its run and seed."""
    return StageRow(
        run=run,
        name=name,
        seconds=manifest["seconds"],
        peak_gib=manifest["peak_memory_gib"],
        code=manifest["code_version"],
        settings_hash=manifest["settings_hash"],
        manifest_hash=file_hash(folder / "manifest.json")[:12],
        inputs=tuple(manifest["inputs"]),
        finished=manifest["finished"],
    )


def device_of(manifest: Json) -> str:
    """Return the device of a stage, with the processor and its instructions if they are known."""
    processor = ", ".join(manifest["processor"].values())
    return f"{manifest['device']} ({processor})" if processor else str(manifest["device"])


def made_from(kind: str, names: Sequence[str], folders: Iterable[Path]) -> dict[str, Any]:
    """Return what a page was made from, for the JSON next to it.

    `names` are the runs that the page is about, `folders` those of the stages that it shows.
    """
    manifests = {folder: read_manifest(folder) or {} for folder in folders}
    # Of the stages that ran models, or of all stages if none did.
    computing = [row for row in manifests.values() if STAGES[row["stage"]].computes]
    versions: dict[str, set[str]] = {}
    for manifest in manifests.values():
        for library, version in manifest["versions"].items():
            versions.setdefault(library, set()).add(version)
    judges = {folder.name for folder in manifests if folder.parent.name in JUDGED_STAGES}
    codes = {manifest["code_version"] for manifest in manifests.values()}
    return {
        "kind": kind,
        "names": list(names),
        "judges": sorted(judges),
        "code_versions": sorted({code_version(), *codes}),
        "finished": max(manifest["finished"] for manifest in manifests.values()),
        "devices": sorted({device_of(row) for row in computing or manifests.values()}),
        "versions": {name: ", ".join(sorted(used)) for name, used in sorted(versions.items())},
        "stages": {
            str(folder.relative_to(paths.RUNS)): file_hash(folder / "manifest.json")
            for folder in manifests
        },
    }


def folders_of(runs: Sequence[RunResult]) -> list[Path]:
    """Return the folders of all stages of some runs."""
    return [stage.folder for run in runs for stage in run.stages.values()]
