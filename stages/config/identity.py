"""What a stage's result depends on: the settings that its manifest records, and their hash.

A stage is stale if its settings differ from the recorded ones. So a setting that changes nothing
must not be among them, or a user would wait hours for the same result.
"""

import hashlib
import json
import os
from typing import Any

from stages.config.config import Config
from stages.config.paths import FOLDER_SETTINGS, NO_FOLDERS
from stages.config.sections import HUB, TOY, Memory
from stages.config.stages import stage_row
from stages.config.values import DEFAULTS

# The fields of `memory` that a result depends on: precision and threads change the rounding of
# every sum, and PPO amplifies it.
NUMERICS = ("mixed_precision", "cpu_threads")
# PPO and the other algorithms also run a frozen policy and reward model.
POLICY_NUMERICS = (*NUMERICS, "frozen_dtype")
NEUTRAL_MEMORY_FIELDS = tuple(name for name in Memory.model_fields if name not in POLICY_NUMERICS)
"""The fields of `memory` that change no result beyond rounding."""


def settings_of(config: Config, stage: str) -> dict[str, Any]:
    """Return what a stage's result depends on in addition to its inputs: sections and the seed.

    Its manifest records it. If you add a setting, its default must mean what happened before it
    existed, because `is_same_setting` takes a setting that a record lacks for its default.
    """
    row = stage_row(stage, config.kind)
    sections = {name: getattr(config, name).model_dump() for name in row.sections}

    # Verdicts depend on the question and the model, not on price, pace or spending limit.
    if "judge" in sections:
        sections["judge"] = config.judge.identity

    # `checks.start` and `checks.updates` watch training. The stages that read `checks` only judge.
    if "checks" in sections:
        del sections["checks"]["start"]
        del sections["checks"]["updates"]

    # The section `world` describes the built-in posts, and the names of data sets are for the hub.
    if row.reads_data and config.data.source != TOY:
        del sections["world"]
    if row.reads_data and config.data.source != HUB:
        del sections["data"]["sft_dataset"]
        del sections["data"]["comparisons_dataset"]

    # Reward models trained before external rewards existed recorded neither of these sections.
    if stage == "rm":
        for name in ("reward", "released"):
            if not any(sections[name].values()):
                del sections[name]

    # DPO trains on the pairs, and in the order, that the reward model's settings choose. It depends
    # on no other setting of the reward model.
    if "dpo" in sections:
        sections["rm"] = {"pairs": config.rm.pairs, "by_post": config.rm.by_post}

    # Only stages that train adapters depend on their settings, and on none of the other stages that
    # do so.
    if stage in config.lora.adapted_stages:
        del sections["lora"]["stages"]
    else:
        sections.pop("lora", None)

    # A stage that runs a model depends on its precision. Splitting a batch changes only rounding,
    # unless the loss is a mean of the microbatches' means, which depends on their size.
    if row.computes:
        fields = POLICY_NUMERICS if row.policy_gradient else NUMERICS
        if row.policy_gradient and getattr(config, stage).loss_mean == "microbatches":
            fields = (*fields, "microbatch_size")
        sections["memory"] = {name: getattr(config.memory, name) for name in fields}
    return {"seed": config.seed, **sections}


def settings_hash(config: Config, stage: str) -> str:
    """Return the hash of `settings_of`, which manifests record."""
    return hash_of(settings_of(config, stage))


def is_same_setting(name: str, recorded: Any, requested: Any) -> bool:
    """Return whether a stage that recorded one value of a setting fits a request for another.

    `name` is, for example, `data.source`. None stands for a value that is absent:

    - A setting that the record lacks is newer than the record. It had no effect then, which is what
      its default means, so the request must be for the default.
    - A recorded setting that this version does not have is ignored.

    Folders are the same if their absolute paths are.
    """
    if recorded == requested:
        return True
    if recorded is None:
        return name in DEFAULTS and requested == DEFAULTS[name]
    if requested is None:
        # The judge's identity has parts that are not settings, such as the prompt's wording.
        section, dot, _ = name.partition(".")
        return bool(dot) and section != "judge" and name not in DEFAULTS
    if name not in FOLDER_SETTINGS or recorded in NO_FOLDERS or requested in NO_FOLDERS:
        return False
    return os.path.abspath(recorded) == os.path.abspath(requested)


def hash_of(value: Any) -> str:
    """Return sixteen hex digits that identify a value of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
