"""Every setting of a run in one frozen tree, and what each stage's result depends on.

Standard library only, so that `make` can read the settings before anything is installed.
"""

# mypy: implicit-reexport
# Other packages import settings from here.

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.config.checks import UserError, require, unknown
from stages.config.judge import Checks, Eval, JudgeSettings, Outputs, Released
from stages.config.lora import Lora
from stages.config.ppo import Ppo
from stages.config.sections import (
    COMPARISONS,
    HUB,
    POSTS,
    RANDOM,
    TOY,
    TRAIN_TOKENIZER,
    Base,
    Data,
    Dpo,
    Memory,
    Normalize,
    Optimizer,
    Reward,
    Rm,
    Sft,
    World,
)
from stages.config.stages import OUTPUTS, RELEASED, STAGES, TRAINED, row_of, shared_before
from stages.rl.algorithms import ALGORITHMS

# Folders below runs/ that hold no run.
RESERVED = tuple("bench bench-check cache judge_cache models peers reports".split())
MUST_BE_A_RUN_NAME = f"be the name of a folder, and none of {', '.join(RESERVED)}"

RUNS = Path("runs")
# Settings that may name a folder of this machine, and what they hold where they name none.
PLACES = tuple(
    "base.checkpoint base.tokenizer data.source released.policy released.reward_model"
    " outputs.file".split()
)
NO_FOLDERS = ("", TOY, HUB, RANDOM, TRAIN_TOKENIZER)


@dataclass(frozen=True, kw_only=True)
class FixedConfig:
    """All settings of one run."""

    preset: str
    """The preset that the settings started from."""
    name: str
    """The run's folder; the preset's name unless something was overridden."""
    seed: int = 44413
    """Seed of all randomness but the built-in world's."""
    upstream: str = ""
    """Run whose base, sft, rm and normalize stages this one starts from; empty: its own."""
    own_from: str = ""
    """The first of these stages that an override changes: the run makes it and those after it
    itself. Empty: none."""
    overrides: tuple[str, ...] = ()
    """What --set changed, so that a `make` command can repeat it."""
    base: Base = field(default_factory=Base)
    world: World = field(default_factory=World)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    sft: Sft = field(default_factory=Sft)
    reward: Reward = field(default_factory=Reward)
    rm: Rm = field(default_factory=Rm)
    normalize: Normalize = field(default_factory=Normalize)
    ppo: Ppo = field(default_factory=Ppo)
    dpo: Dpo = field(default_factory=Dpo)
    lora: Lora = field(default_factory=Lora)
    released: Released = field(default_factory=Released)
    outputs: Outputs = field(default_factory=Outputs)
    eval: Eval = field(default_factory=Eval)
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    checks: Checks = field(default_factory=Checks)
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        require(self.seed >= 0, "seed", "be at least 0")
        require(is_run_name(self.name), "name", MUST_BE_A_RUN_NAME)
        several = bool(self.outputs.file and any(vars(self.released).values()))
        require(not several, "outputs.file", "stand without released.* (POLICY, REWARD_MODEL)")
        several = bool(self.reward.function and self.released.reward_model)
        require(not several, "reward.function", "stand without released.reward_model")
        for name in ("data", "world") if self.data.source == TOY else ("data",):
            most = getattr(self, name).validation_posts
            fits = self.kind == OUTPUTS or not most or self.eval.posts <= most
            there = f"be at most {most}, the posts of {name}.validation_posts"
            require(fits, "eval.posts", f"{there}, not {self.eval.posts}")
        starts = not self.reward.function or self.ppo.critic_init != "reward_model"
        mend = "be sft or zero with reward.function, which is no model to start from"
        require(starts, "ppo.critic_init", mend)
        alone = self.kind == TRAINED or not self.eval.best_of
        require(alone, "eval.best_of", "be empty where no SFT is trained")

    def is_upstreams(self, stage: str) -> bool:
        """Whether the upstream supplies a stage."""
        return bool(self.upstream) and stage in shared_before(self.own_from)

    @property
    def needed_splits(self) -> tuple[str, ...]:
        """The splits that its data must have: no pairs where no reward model is trained."""
        is_taken = self.reward.function or self.released.reward_model
        return POSTS if is_taken else (*POSTS, *COMPARISONS)

    @property
    def kind(self) -> str:
        """Whether the run trains, judges a released policy, or judges summaries that exist."""
        if self.outputs.file:
            return OUTPUTS
        return RELEASED if self.released.policy else TRAINED


# A config has one more section for each algorithm of the table.
if TYPE_CHECKING:
    Config = FixedConfig
else:
    Config = make_dataclass(
        "Config",
        [
            (name, algorithm.settings, field(default_factory=algorithm.settings))
            for name, algorithm in ALGORITHMS.items()
            if name != "ppo"
        ],
        bases=(FixedConfig,),
        namespace={"__doc__": FixedConfig.__doc__, "__module__": __name__},
        frozen=True,
        kw_only=True,
    )


def is_run_name(name: str) -> bool:
    """Whether a run may be called so: one folder, which nothing else uses."""
    is_text = name.isprintable() and name == name.strip()  # without control characters
    return is_text and "/" not in name and name not in ("", ".", "..", *RESERVED)


LINE_BREAK = "\\n"  # of a prompt, as two characters: no command line holds a line break
SECTIONS = {part.name: part.type for part in fields(Config) if dataclasses.is_dataclass(part.type)}
TYPES: dict[str, Any] = {
    f"{part}.{knob.name}": knob.type for part in SECTIONS for knob in fields(SECTIONS[part])
}
DEFAULTS: dict[str, Any] = {
    f"{part}.{knob.name}": knob.default for part in SECTIONS for knob in fields(SECTIONS[part])
}
# The memory fields that a result depends on: precision and threads change the rounding of every
# sum, and PPO amplifies it. The others only cut batches.
NUMERICS = ("mixed_precision", "cpu_threads")
POLICY_NUMERICS = (*NUMERICS, "frozen_dtype")  # of PPO and its rivals
SIZES = ("memory.microbatch_size", "memory.forward_batch_size")
CUT_BATCHES = tuple(knob.name for knob in fields(Memory) if knob.name not in POLICY_NUMERICS)
SERVERS = ("judge.base_url",)  # settings that no page shows
FILES = ("data.source", "outputs.file")  # no ids of the hub
NOT_SHOWN = "set (not shown)"


def is_recorded(name: str) -> bool:
    """Whether a stage of a run has recorded the settings with which it was made."""
    return any(path.parent.name in STAGES for path in (RUNS / name).glob("seed*/*/config.json"))


def changes_of(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The values of some overrides, by section and field. Raises UserError as `override_of`."""
    changes: dict[str, dict[str, Any]] = {}
    for section, name, value in map(override_of, texts):
        changes.setdefault(section, {})[name] = value
    return changes


def with_changes(config: Config, changes: dict[str, dict[str, Any]]) -> Config:
    """The config with changes, a section's at once, because its numbers are checked together."""
    sections = {
        name: dataclasses.replace(getattr(config, name), **values)
        for name, values in changes.items()
    }
    return dataclasses.replace(config, **sections)


def override_of(override: str) -> tuple[str, str, Any]:
    """Section, field and value of `section.key=value`. Raises UserError for a bad key or value."""
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"--set takes section.key=value, not {override!r}")
    section, _, name = key.partition(".")
    if key not in TYPES:
        raise unknown("setting", key, TYPES, "`make settings` lists all of them")
    kind = TYPES[key]
    text = "0" if key in SIZES and text == "auto" else text
    if key == "data.prompt":
        text = text.replace(LINE_BREAK, "\n")
    try:
        value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise UserError(f"{key} takes a value of type {kind.__name__}, not {text!r}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key} takes a finite number, not {text}")
    return section, name, value


def settings_of(config: Config, stage: str) -> dict[str, Any]:
    """What the result of one stage depends on, beside its inputs: sections and the seed."""
    row = row_of(stage, config.kind)
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in row.sections}
    if "judge" in sections:
        sections["judge"] = config.judge.identity
    if "checks" in sections:  # those of training change no result
        del sections["checks"]["start"], sections["checks"]["updates"]
    if row.reads_data and config.data.source != TOY:
        sections.pop("world")
    if row.reads_data and config.data.source != HUB:
        del sections["data"]["sft_dataset"], sections["data"]["comparisons_dataset"]
    if stage == "rm":  # as in runs that were made before one could be taken
        for name in [name for name in ("reward", "released") if not any(sections[name].values())]:
            del sections[name]
    if "dpo" in sections:
        sections["rm"] = {"pairs": config.rm.pairs, "by_post": config.rm.by_post}
    if stage not in config.lora.adapted_stages:
        sections.pop("lora", None)
    else:
        del sections["lora"]["stages"]  # which other stages learn adapters changes nothing here
    if row.computes:
        numerics = POLICY_NUMERICS if row.policy_gradient else NUMERICS
        if row.policy_gradient and getattr(config, stage).loss_mean == "microbatches":
            numerics = (*numerics, "microbatch_size")
        sections["memory"] = {name: getattr(config.memory, name) for name in numerics}
    return {"seed": config.seed, **sections}


def settings_hash(config: Config, stage: str) -> str:
    """Short name of `settings_of`, as manifests record it."""
    return hash_of(settings_of(config, stage))


def is_same(name: str, recorded: Any, requested: Any) -> bool:
    """Whether the recorded value of a setting, such as `data.source`, is the requested one.

    None stands for a value that is absent. A setting that is absent from a record is newer than the
    record and had no effect then, which is what its default means. A folder may be written in
    several ways.
    """
    if recorded == requested:
        return True
    if recorded is None:
        return name in DEFAULTS and requested == DEFAULTS[name]
    if name not in PLACES or recorded in NO_FOLDERS or requested in NO_FOLDERS:
        return False
    return os.path.abspath(recorded) == os.path.abspath(requested)


def hash_of(value: Any) -> str:
    """Sixteen digits that name a value made of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


# -- what others may see: on pages, at wandb, on model cards ---------------------------------------


def public_value(name: str, value: Any) -> Any:
    """A setting, such as `data.source`, as others may see it: folders by their last name, addresses
    not at all, for they may hold a key. What lies below `runs/` has names of ours.
    """
    if name in SERVERS and value:
        return NOT_SHOWN
    if not isinstance(value, str):
        return value
    if "://" in value:
        return NOT_SHOWN
    is_place = is_path(value) or (name in FILES and "/" in value)
    is_ours = value.startswith(f"{RUNS.name}/")
    return f"folder {Path(value).name}" if is_place and not is_ours else value


def is_path(value: str) -> bool:
    """Whether a setting names a place on this machine, as opposed to an id of the hub."""
    looks_so = value.startswith(("/", ".", "~")) or "\\" in value
    return looks_so or ("/" in value and os.path.isdir(value))


def public_settings(config: Config) -> dict[str, Any]:
    """All settings of a config as others may see them, nested by section."""
    public = dataclasses.asdict(config)
    for name in SECTIONS:
        public[name] = {key: public_value(f"{name}.{key}", x) for key, x in public[name].items()}
    pairs = (text.partition("=") for text in config.overrides)
    overrides = [f"{key}{equals}{public_value(key, value)}" for key, equals, value in pairs]
    return {**public, "overrides": overrides}
