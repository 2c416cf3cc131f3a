"""The presets, and the command line that changes them.

A preset says only how it differs from the paper's settings. Unknown keys and wrong types are
refused with one line, and an override needs a name of its own. Standard library only.

    python -m stages.ppo --preset tiny --seed 44413 --set ppo.kl_coef=0.1 --name tiny-kl0.1
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from stages import config as settings
from stages.config import (
    HUB,
    RANDOM,
    SECTIONS,
    SIDE_SECTIONS,
    STAGE_SECTIONS,
    TOY,
    TRAIN_TOKENIZER,
    Base,
    Config,
    Data,
    Dpo,
    Eval,
    Judge,
    Memory,
    Optimizer,
    Ppo,
    Rm,
    Sft,
    UserError,
    fail,
    settings_of,
)

# Another judge is another opinion of the same run; its checks and memory knobs change no result.
SAME_RUN = ("judge", "checks", "memory")


def paper(size: str, **memory: Any) -> Config:
    """The paper's run at one size: only the checkpoint and memory knobs differ between sizes."""
    name = f"pythia-{size}"
    base = Base(checkpoint=f"EleutherAI/{name}-deduped")
    return Config(preset=name, name=name, base=base, memory=Memory(**memory))


def tiny(name: str, hidden_size: int, num_layers: int) -> Config:
    """The built-in world at one size of the base model; nothing else differs between sizes."""
    base = Base(
        tokenizer=TRAIN_TOKENIZER, hidden_size=hidden_size, num_layers=num_layers, num_heads=4
    )
    return Config(
        preset=name,
        name=name,
        base=base,
        data=Data(
            source=TOY,
            max_query_tokens=112,
            max_summary_tokens=28,
            max_query_summary_tokens=140,
            max_comparison_tokens=48,
            max_query_comparison_tokens=160,
        ),
        # New weights, not pretrained ones: larger steps, and more of them. The posts are mostly
        # noise, so only the summary is learned.
        optimizer=Optimizer(warmup_fraction=0.05),
        sft=Sft(learning_rate=2e-3, batch_size=16, epochs=2, loss_on_query=False),
        rm=Rm(learning_rate=7e-4, batch_size=16),
        ppo=Ppo(learning_rate=1.5e-4, total_episodes=1920, batch_size=64, samples_every=10),
        dpo=Dpo(learning_rate=2e-4, batch_size=16),
        eval=Eval(dpo_summary_tokens=28),
        judge=Judge(kind="facts"),
        memory=Memory(microbatch_size=64, forward_batch_size=128, mixed_precision="no"),
    )


def posts() -> Config:
    """Real posts and the real tokenizer on a small model that was never pretrained."""
    return Config(
        preset="posts",
        name="posts",
        base=Base(tokenizer="", hidden_size=128, num_layers=4, num_heads=4),
        data=Data(source=""),
        # Rare words have small gradients: 1e-8 lets them through.
        optimizer=Optimizer(adam_eps=1e-8, warmup_fraction=0.05),
        sft=Sft(learning_rate=1e-3, batch_size=16, epochs=3, loss_on_query=False),
        rm=Rm(learning_rate=3e-4, batch_size=32),
        ppo=Ppo(learning_rate=1e-4, total_episodes=256, batch_size=32, samples_every=4),
        dpo=Dpo(learning_rate=1e-4, batch_size=32),
        judge=Judge(kind="reward_model"),
        memory=Memory(microbatch_size=8, forward_batch_size=32, mixed_precision="no"),
    )


PRESETS: dict[str, Callable[[], Config]] = {
    "tiny-s": lambda: tiny("tiny-s", hidden_size=64, num_layers=2),
    "tiny": lambda: tiny("tiny", hidden_size=128, num_layers=4),
    "tiny-l": lambda: tiny("tiny-l", hidden_size=192, num_layers=6),
    "posts": posts,
    "pythia-70m": lambda: paper("70m", microbatch_size=64, forward_batch_size=256),
    "pythia-160m": lambda: paper("160m", microbatch_size=64, forward_batch_size=256),
    "pythia-410m": lambda: paper("410m", microbatch_size=32, forward_batch_size=128),
    "pythia-1b": lambda: paper("1b", microbatch_size=16, forward_batch_size=64),
    "pythia-1.4b": lambda: paper("1.4b", microbatch_size=16, forward_batch_size=64),
    "pythia-2.8b": lambda: paper("2.8b", microbatch_size=4, forward_batch_size=32),
    "pythia-6.9b": lambda: paper(
        "6.9b", microbatch_size=2, forward_batch_size=16, gradient_checkpointing=True
    ),
}


def make_config(
    preset: str,
    *,
    seed: int = 44413,
    name: str = "",
    data: str = "",
    tokenizer: str = "",
    upstream: str = "",
    overrides: tuple[str, ...] = (),
) -> Config:
    """The preset with what the command line changes; overrides are like `ppo.kl_coef=0.1`.

    Raises UserError for an unknown preset or key, a value of a wrong type or out of its range, a
    missing folder, an override without a name of its own, and one that has no effect.
    """
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}: choose one of {', '.join(PRESETS)}")
    config = PRESETS[preset]()
    asked = list(overrides)
    for key, value in (("data.source", data), ("base.tokenizer", tokenizer)):
        if value and _get(config, key):
            asked.append(f"{key}={value}")
        elif value:
            config = _set(config, key, value)
    changes: dict[str, dict[str, Any]] = {}
    for override in asked:
        section, field, value = override_of(override)
        changes.setdefault(section, {})[field] = value
        if upstream and section in ("base", "world", "data", "sft", "rm"):
            raise UserError(f"{override} has no effect: --upstream {upstream} supplies that stage")
    # A section changes at once: its numbers are checked together.
    changed = {one: replace(getattr(config, one), **values) for one, values in changes.items()}
    config = replace(config, **changed)
    for name in changes.get("ppo", {}).keys() & config.ppo.quirks:
        raise UserError(f"ppo.{name} has no effect: ppo.compat={config.ppo.compat} sets it")
    renaming = [override for override in asked if override.split(".")[0] not in SAME_RUN]
    if (renaming or upstream) and name in ("", *PRESETS):
        raise UserError("an override needs a run name of its own: add --name (make: NAME=...)")
    if name in PRESETS and name != preset:
        raise UserError(f"--name {name} is the folder of preset {name}: choose another")
    _check_given(config)
    return replace(
        config, seed=seed, name=name or config.name, upstream=upstream, overrides=overrides
    )


def _check_given(config: Config) -> None:
    if not config.data.source:
        raise UserError(f"preset {config.preset} needs a folder of posts: add --data (make: DATA=)")
    if config.base.checkpoint == RANDOM and not config.base.tokenizer:
        raise UserError(
            f"preset {config.preset} needs a tokenizer folder: add --tokenizer (make: TOKENIZER=)"
        )
    if config.data.source not in (TOY, HUB) and not Path(config.data.source).is_dir():
        raise UserError(
            f"data.source: no folder {config.data.source}: correct --data (make: DATA=)"
        )


def override_of(override: str) -> tuple[str, str, Any]:
    """Section, field and value of `section.key=value`. Raises UserError where there is no such."""
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"--set takes section.key=value, not {override!r}")
    section, _, name = key.partition(".")
    known = {one.name: one.type for one in fields(SECTIONS[section])} if section in SECTIONS else {}
    if name not in known:
        options = ", ".join(f"{section}.{one}" for one in known) or ", ".join(SECTIONS)
        raise UserError(f"unknown setting {key!r}: known are {options}")
    return section, name, _parse(key, text, known[name])


def _parse(key: str, text: str, kind: Any) -> bool | int | float | str:
    booleans = {"true": True, "false": False}
    try:
        value: bool | int | float | str = booleans[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise UserError(f"{key} takes a value of type {kind.__name__}, not {text!r}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key} takes a finite number, not {text}")
    return value


def _get(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _set(config: Config, key: str, value: Any) -> Config:
    section, name = key.split(".")
    return replace(config, **{section: replace(getattr(config, section), **{name: value})})


def write_stamps(config: Config) -> None:
    """Write each stage's settings where they changed: make rebuilds what is older than these."""
    folder = settings.RUNS / config.name / f"seed{config.seed}" / "settings"
    folder.mkdir(parents=True, exist_ok=True)
    for stage in STAGE_SECTIONS | SIDE_SECTIONS:
        path = folder / f"{stage}.json"
        text = json.dumps(settings_of(config, stage), indent=1, sort_keys=True) + "\n"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def config_from_arguments(argv: list[str] | None, description: str) -> Config:
    """The config that a stage's command line asks for. Raises UserError as `make_config` does."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--seed", type=int, default=44413)
    parser.add_argument("--name", default="", help="the run's folder below runs/")
    parser.add_argument("--data", default="", help="folder with posts and comparisons")
    parser.add_argument("--tokenizer", default="", help="tokenizer folder or hub id")
    parser.add_argument("--upstream", default="", help="run to take sft and reward model from")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="overrides")
    args = parser.parse_args(argv)
    return make_config(**{**vars(args), "overrides": tuple(args.overrides)})


def main(argv: list[str] | None = None) -> None:
    """Write the settings stamps of a run, for make; refuses bad settings with one line."""
    try:
        write_stamps(config_from_arguments(argv, "write the settings stamps of a run"))
    except UserError as error:
        fail(error)


if __name__ == "__main__":
    main()
