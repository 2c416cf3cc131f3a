"""What the result of a stage depends on, and the hash of it that manifests record."""

import hashlib
import json
import os
from typing import Any

from stages.config.config import Config
from stages.config.paths import NO_FOLDERS, PLACES
from stages.config.sections import HUB, TOY, Memory
from stages.config.stages import row_of
from stages.config.values import DEFAULTS

# The memory fields that a result depends on: precision and threads change the rounding of every
# sum, and PPO amplifies it. The others only cut batches.
NUMERICS = ("mixed_precision", "cpu_threads")
POLICY_NUMERICS = (*NUMERICS, "frozen_dtype")  # of PPO and the other algorithms
CUT_BATCHES = tuple(name for name in Memory.model_fields if name not in POLICY_NUMERICS)


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
