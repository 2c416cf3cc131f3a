"""Every setting of a run in one frozen tree, and what each stage's result depends on."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import Field, create_model, model_validator
from typing_extensions import Self

from stages.config.errors import UserError, unknown
from stages.config.judge import Checks, Eval, JudgeSettings, Outputs, Released
from stages.config.lora import Lora
from stages.config.ppo import Ppo
from stages.config.section import Section, Settings
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

# Folders below runs/ that are not runs.
RESERVED = ("bench", "bench-check", "cache", "judge_cache", "models", "peers", "reports")
NO_RUN_NAME = f"names no run: give the name of a folder, and none of {', '.join(RESERVED)}"

RUNS = Path("runs")
# Settings that may name a folder of this machine, and their values when they do not.
PLACES = (
    "base.checkpoint",
    "base.tokenizer",
    "data.source",
    "released.policy",
    "released.reward_model",
    "outputs.file",
)
NO_FOLDERS = ("", TOY, HUB, RANDOM, TRAIN_TOKENIZER)


class FixedConfig(Settings):
    """All settings of one run."""

    preset: str
    """The preset that the settings started from: its name or its file."""
    name: str
    """The run's folder below runs/; the preset's name unless something was overridden."""
    seed: int = Field(default=44413, ge=0)
    """Seed of all randomness but the built-in world's."""
    upstream: str = ""
    """Run whose base, sft, rm and normalize stages this one starts from. Empty: its own."""
    own_from: str = ""
    """The first of these stages that an override changes: the run trains this stage and those after
    it itself. Empty: none."""
    overrides: tuple[str, ...] = ()
    """What --set changed, so that a `make` command can repeat it."""
    base: Base = Base()
    """Model and tokenizer to start from."""
    world: World = World()
    """The built-in world."""
    data: Data = Data()
    """Posts, comparisons and their length limits."""
    optimizer: Optimizer = Optimizer()
    """AdamW."""
    sft: Sft = Sft()
    """Supervised fine-tuning."""
    reward: Reward = Reward()
    """A reward function."""
    rm: Rm = Rm()
    """The reward model."""
    normalize: Normalize = Normalize()
    """Reward normalization."""
    ppo: Ppo = Ppo()
    """PPO."""
    dpo: Dpo = Dpo()
    """DPO."""
    lora: Lora = Lora()
    """Adapters."""
    released: Released = Released()
    """Models that others have trained."""
    outputs: Outputs = Outputs()
    """Existing summaries."""
    eval: Eval = Eval()
    """Summaries of held-out posts."""
    judge: JudgeSettings = JudgeSettings()
    """Who compares a summary with the reference."""
    checks: Checks = Checks()
    """Checks of the run and of its judge."""
    memory: Memory = Memory()
    """How the run fits its machine."""

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        if not is_run_name(self.name):
            raise ValueError(f"NAME={self.name} {NO_RUN_NAME}")
        if self.outputs.file and (self.released.policy or self.released.reward_model):
            raise ValueError(
                "outputs.file and released.* cannot be combined: give INPUT, or POLICY and"
                " REWARD_MODEL"
            )
        if self.reward.function and self.released.reward_model:
            raise ValueError(
                "reward.function and released.reward_model (REWARD_MODEL) cannot be combined:"
                " leave out one of them"
            )
        if self.reward.function and self.ppo.critic_init == "reward_model":
            raise ValueError(
                "ppo.critic_init must be sft or zero with reward.function, because a critic cannot"
                " start from a function"
            )
        if self.eval.best_of and self.kind != TRAINED:
            raise ValueError("eval.best_of must be empty in a run that trains no SFT model")
        return self

    @model_validator(mode="after")
    def _check_posts(self) -> Self:
        limits = {"data": self.data.validation_posts}
        if self.data.source == TOY:
            limits["world"] = self.world.validation_posts

        for section, posts in limits.items():
            if posts and self.eval.posts > posts and self.kind != OUTPUTS:
                raise ValueError(
                    f"eval.posts must be at most {posts}, the posts of {section}.validation_posts,"
                    f" not {self.eval.posts}"
                )
        return self

    def is_upstreams(self, stage: str) -> bool:
        """Whether the upstream supplies a stage."""
        return bool(self.upstream) and stage in shared_before(self.own_from)

    @property
    def needed_splits(self) -> tuple[str, ...]:
        """The splits that its data must have: no pairs where no reward model is trained."""
        return POSTS if self.has_external_reward else (*POSTS, *COMPARISONS)

    @property
    def has_external_reward(self) -> bool:
        """Whether a reward function or a released reward model replaces training one."""
        return bool(self.reward.function or self.released.reward_model)

    @property
    def kind(self) -> str:
        """Whether the run trains, judges a released policy, or judges summaries that exist."""
        if self.outputs.file:
            return OUTPUTS
        return RELEASED if self.released.policy else TRAINED


# A config has one more section for each algorithm of the table, which may grow. mypy sees only
# those of FixedConfig.
if TYPE_CHECKING:
    Config = FixedConfig
else:
    Config = create_model(
        "Config",
        __base__=FixedConfig,
        __doc__=FixedConfig.__doc__,
        __module__=__name__,
        **{
            name: (algorithm.settings, Field(algorithm.settings(), description=algorithm.summary))
            for name, algorithm in ALGORITHMS.items()
            if name != "ppo"
        },
    )


def is_run_name(name: str) -> bool:
    """Whether this may be the name of a run: a single folder that nothing else uses."""
    is_text = name.isprintable() and name == name.strip()  # without control characters
    return is_text and "/" not in name and name not in ("", ".", "..", *RESERVED)


def _sections() -> dict[str, type[Section]]:
    kinds = {name: field.annotation for name, field in Config.model_fields.items()}
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, Section)
    }


def _plain_type(annotation: Any) -> type:
    """The type of a field's values: `str` for a choice of texts."""
    return type(get_args(annotation)[0]) if get_origin(annotation) is Literal else annotation


# Types and defaults of all settings, by names such as `ppo.kl_coef`.
IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}
LINE_BREAK = "\\n"  # of a prompt, as two characters: a command line cannot contain a line break
SECTIONS = _sections()
TYPES = {
    f"{section}.{name}": _plain_type(field.annotation)
    for section, kind in SECTIONS.items()
    for name, field in kind.model_fields.items()
}
DEFAULTS: dict[str, Any] = {
    f"{section}.{name}": field.default
    for section, kind in SECTIONS.items()
    for name, field in kind.model_fields.items()
}

# The memory fields that a result depends on: precision and threads change the rounding of every
# sum, and PPO amplifies it. The others only cut batches.
NUMERICS = ("mixed_precision", "cpu_threads")
POLICY_NUMERICS = (*NUMERICS, "frozen_dtype")  # of PPO and the other algorithms
SIZES = ("memory.microbatch_size", "memory.forward_batch_size")
CUT_BATCHES = tuple(name for name in Memory.model_fields if name not in POLICY_NUMERICS)

# What others may see.
SERVERS = ("judge.base_url",)  # settings that no page shows
FILES = ("data.source", "outputs.file")  # no ids of the hub
NOT_SHOWN = "set (not shown)"


def is_recorded(name: str) -> bool:
    """Whether a stage of a run has recorded the settings it ran with."""
    return any(path.parent.name in STAGES for path in (RUNS / name).glob("seed*/*/config.json"))


def changes_of(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The values of some overrides, by section and field. Raises UserError as `override_of`."""
    changes: dict[str, dict[str, Any]] = {}
    for section, name, value in map(override_of, texts):
        changes.setdefault(section, {})[name] = value
    return changes


def with_changes(config: Config, changes: dict[str, dict[str, Any]]) -> Config:
    """The config with changes, all those of a section at once: they are validated together."""
    sections = {name: getattr(config, name).changed(**values) for name, values in changes.items()}
    return config.changed(**sections)


def override_of(override: str) -> tuple[str, str, Any]:
    """Section, field and value of `section.key=value`. Raises UserError for a bad key or value."""
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"--set takes section.key=value, not {override!r}")
    if key not in TYPES:
        raise unknown("setting", key, TYPES, "`make settings` lists all of them")
    section, _, name = key.partition(".")
    return section, name, value_from_text(key, text)


def value_from_text(key: str, text: str) -> Any:
    """Parse the value of a setting, such as `ppo.kl_coef`. Raises UserError if it is not one.

    `auto` stands for a batch size that the memory plan chooses.
    """
    if key in SIZES and text == "auto":
        return 0
    if key == "data.prompt":
        return text.replace(LINE_BREAK, "\n")

    kind = TYPES[key]
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        raise UserError(f"{key} must be {IN_WORDS[kind]}, not {text!r}") from None


def value_of(config: Config, key: str) -> Any:
    """Return the value of a setting, such as `ppo.kl_coef`."""
    section, _, field = key.partition(".")
    return getattr(getattr(config, section), field)


def text_from_value(value: Any) -> str:
    """A value as `value_from_text` reads it."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text.replace("\n", LINE_BREAK)


def settings_of(config: Config, stage: str) -> dict[str, Any]:
    """What the result of one stage depends on in addition to its inputs: sections and the seed.

    Manifests record it, and its hash. So an addition must keep what older runs have recorded.
    """
    row = row_of(stage, config.kind)
    sections = {name: getattr(config, name).model_dump() for name in row.sections}

    if "judge" in sections:
        sections["judge"] = config.judge.identity
    if "checks" in sections:  # checks of training change no result
        del sections["checks"]["start"]
        del sections["checks"]["updates"]

    if row.reads_data and config.data.source != TOY:
        del sections["world"]
    if row.reads_data and config.data.source != HUB:
        del sections["data"]["sft_dataset"]
        del sections["data"]["comparisons_dataset"]

    if stage == "rm":  # older versions had no external reward models, and recorded none
        for name in ("reward", "released"):
            if not any(sections[name].values()):
                del sections[name]
    if "dpo" in sections:
        sections["rm"] = {"pairs": config.rm.pairs, "by_post": config.rm.by_post}

    if stage in config.lora.adapted_stages:
        del sections["lora"]["stages"]  # which other stages train adapters changes nothing here
    else:
        sections.pop("lora", None)

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
    record and had no effect then, which is what its default means. A recorded setting that this
    version does not have is ignored. A folder may be written in several ways.
    """
    if recorded == requested:
        return True
    if recorded is None:
        return name in DEFAULTS and requested == DEFAULTS[name]
    if requested is None:
        # The judge's identity has parts that are not settings, such as the prompt's wording.
        section, dot, _ = name.partition(".")
        return bool(dot) and section != "judge" and name not in DEFAULTS
    if name not in PLACES or recorded in NO_FOLDERS or requested in NO_FOLDERS:
        return False
    return os.path.abspath(recorded) == os.path.abspath(requested)


def hash_of(value: Any) -> str:
    """Sixteen hex digits that identify a value of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


# -- what others may see: on pages, in wandb, on model cards ---------------------------------------


def public_value(name: str, value: Any) -> Any:
    """A setting, such as `data.source`, as others may see it.

    Folders are shown by their last component, except below `runs/`. Addresses are not shown,
    because they may contain a key.
    """
    if name in SERVERS and value:
        return NOT_SHOWN
    if not isinstance(value, str):
        return value
    if "://" in value:
        return NOT_SHOWN
    is_place = is_path(value) or (name in FILES and "/" in value)
    is_below_runs = value.startswith(f"{RUNS.name}/")
    return f"folder {Path(value).name}" if is_place and not is_below_runs else value


def is_path(value: str) -> bool:
    """Whether a setting names a place on this machine, as opposed to an id of the hub."""
    if value.startswith(("/", ".", "~")) or "\\" in value:
        return True
    return "/" in value and os.path.isdir(value)


def public_settings(config: Config) -> dict[str, Any]:
    """All settings of a config as others may see them, nested by section."""
    public = config.model_dump()
    public["preset"] = Path(config.preset).name  # of a file, without its folders
    for section in SECTIONS:
        for field, value in public[section].items():
            public[section][field] = public_value(f"{section}.{field}", value)

    overrides = []
    for text in config.overrides:
        key, _, value = text.partition("=")
        overrides.append(f"{key}={public_value(key, value)}")
    public["overrides"] = overrides
    return public
