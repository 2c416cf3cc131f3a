"""The presets and ablations, and your own presets. All are YAML files.

    description: What it is for, in one line.
    extends: pythia-1b           a preset, or another file, from this one's folder
    policy_gradient:             for PPO and every other algorithm, before its own section
      total_episodes: 51200
    ppo:
      kl_coef: 0.1

A preset lists how it differs from the defaults, which are the paper's settings, or from the preset
that it extends. Values are written as in SET.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from stages.config.config import SECTIONS, TYPES, Config, value_from_text, with_changes
from stages.config.errors import UserError, unknown
from stages.config.ppo import PolicyGradient
from stages.config.stages import POLICY_GRADIENT_STAGES
from stages.config.yaml_files import read_yaml

FOLDER = Path(__file__).parent
ENDINGS = (".yaml", ".yml")  # of a preset that is a file
# In the order in which they are listed. A new one also needs a line in `PRESET_HELP`
# (pipeline/targets.py) unless its family has one.
PRESETS = (
    "tiny-xs",
    "tiny-s",
    "tiny",
    "tiny-l",
    "tiny-xl",
    "posts",
    "smollm2",
    "smollm2-full",
    "pythia-14m",
    "pythia-70m",
    "pythia-160m",
    "pythia-410m",
    "pythia-1b",
    "pythia-1.4b",
    "pythia-2.8b",
    "pythia-6.9b",
    "pythia-1b-24gb",
    "pythia-2.8b-lora",
    "pythia-6.9b-lora",
    "own",
    "outputs",
)
EXISTING_SUMMARIES = "outputs"
"""The preset of `make judge`, which judges summaries in files."""
# `python -m tests.lib.offline_models smollm2` writes it.
SMOLLM2 = "runs/models/smollm2-135m-instruct"

Changes = dict[str, dict[str, Any]]
"""Section -> field -> value."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The contents of a preset file, combined with those of every file that it extends."""

    name: str
    """Its name, or the file's path as it was given."""
    description: str
    changes: Changes
    """How it differs from the defaults."""

    @property
    def config(self) -> Config:
        """The preset's settings. Raises UserError, with the file, for a wrong value."""
        try:
            config = Config(preset=self.name, name=run_name(self.name))
            return with_changes(config, self.changes)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None


def is_file(preset: str) -> bool:
    """Whether a preset is a file of the user rather than a name."""
    return preset.endswith(ENDINGS)


def run_name(preset: str) -> str:
    """The run's name if none is given: the preset's name, or the file's without its ending."""
    return Path(preset).stem if is_file(preset) else preset


def preset_config(name: str) -> Config:
    """The settings of a preset, which is a name or a file.

    Raises UserError, with the file and the key, for an unknown preset or setting, a wrong value, a
    file that is not YAML, and files that extend each other in a circle.
    """
    return read_preset(name).config


def read_preset(name: str) -> Preset:
    """A preset, combined with all that it extends. Raises UserError as `preset_config` does."""
    if name in PRESETS:
        return _built_in(name)
    if not is_file(name):
        raise unknown("preset", name, PRESETS)
    return _read_file(name, Path(name), extended_by=())


@cache
def _built_in(name: str) -> Preset:
    return _read_file(name, FOLDER / "presets" / f"{name}.yaml", extended_by=())


def _read_file(name: str, path: Path, extended_by: tuple[Path, ...]) -> Preset:
    """Read a preset file after the one that it extends. Messages call it `name`."""
    if path.resolve() in extended_by:
        raise UserError(f"{name} extends itself through other files: change one `extends`")

    document = read_yaml(path, name)
    description = document.pop("description", "")
    parent = document.pop("extends", "")
    if not isinstance(description, str):
        raise UserError(f"{name}: description must be a text")
    if not isinstance(parent, str):
        raise UserError(f"{name}: extends must be a text")

    changes: Changes = {}
    if parent:
        parent_path = path.parent / parent
        if not is_file(parent):
            parent_path = FOLDER / "presets" / f"{parent}.yaml"
            if not parent_path.is_file():
                raise UserError(f"{name}: extends: {unknown('preset', parent, PRESETS)}")
        extended = _read_file(
            name=str(parent_path) if is_file(parent) else parent,
            path=parent_path,
            extended_by=(*extended_by, path.resolve()),
        )
        changes = {section: dict(values) for section, values in extended.changes.items()}

    # An algorithm's own section overrides what is the same for all algorithms.
    common = _read_section(name, "policy_gradient", document.pop("policy_gradient", {}))
    for algorithm in POLICY_GRADIENT_STAGES:
        changes.setdefault(algorithm, {}).update(common)
    for section, values in document.items():
        if section not in SECTIONS:
            raise UserError(f"{name}: {unknown('section', section, SECTIONS)}")
        changes.setdefault(section, {}).update(_read_section(name, section, values))
    return Preset(name=name, description=description, changes=changes)


def _read_section(name: str, section: str, texts: Any) -> dict[str, Any]:
    """The values of a section of a file."""
    if not isinstance(texts, dict):
        raise UserError(f"{name}: {section} must contain settings, such as `batch_size: 64`")
    # `policy_gradient` is not a section of a config: its fields have the same types in `ppo`.
    type_section = "ppo" if section == "policy_gradient" else section
    fields = (PolicyGradient if section == "policy_gradient" else SECTIONS[section]).model_fields

    values = {}
    for field, text in texts.items():
        key = f"{section}.{field}"
        if field not in fields:
            near = [f"{section}.{other}" for other in fields]
            raise UserError(f"{name}: {unknown('setting', key, [*near, *TYPES])}")
        if not isinstance(text, str):
            raise UserError(f"{name}: {key} takes one value, not a list or a mapping")
        try:
            values[field] = value_from_text(f"{type_section}.{field}", text)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    return values


# -- ablations -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """One change to a run, and the detail of the paper that it is about."""

    title: str
    """Its name on pages."""
    what: str
    settings: tuple[str, ...]
    """The overrides, such as `ppo.dropout=0.1`."""


ABLATIONS_FILE = read_yaml(FOLDER / "ablations.yaml", "ablations.yaml")
ABLATIONS = {
    name: Ablation(
        title=ablation["title"],
        what=ablation["what"],
        settings=tuple(f"{key}={value}" for key, value in ablation["settings"].items()),
    )
    for name, ablation in ABLATIONS_FILE["ablations"].items()
}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ablations that answer one question together, on a page of their own."""

    title: str
    """Of the page."""
    about: str = ""
    """A paragraph of the page."""
    ablations: Sequence[str]
    algorithms: Sequence[str] = ()
    """Other algorithms that the page compares with PPO, if the run has trained them."""


GROUPS = {name: Group(**group) for name, group in ABLATIONS_FILE["groups"].items()}


def ablations_named(names: Sequence[str]) -> list[str]:
    """The ablations of these names, some of which may be names of groups."""
    members: list[str] = []
    for name in names:
        members += GROUPS[name].ablations if name in GROUPS else [name]
    return list(dict.fromkeys(members))


def settings_of_ablation(name: str) -> tuple[str, ...]:
    """The overrides of one ablation. Raises UserError, with the nearest name, if it is unknown."""
    if name not in ABLATIONS:
        raise unknown("ablation", name, [*ABLATIONS, *GROUPS])
    return ABLATIONS[name].settings
