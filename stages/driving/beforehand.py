"""What a later stage would refuse, before the first one begins. Standard library only.

A run takes hours, and its last stages are asked for in the same command. So the pipeline looks at
the settings of all of them first, and at the rows as soon as the base stage has counted them.
"""

from collections.abc import Sequence
from typing import Any

from stages.finished import (
    GOLD,
    gold_inputs,
    identity,
    is_gold_of,
    no_gold,
    own_gold,
    read_manifest,
    stage_folder,
)
from stages.settings.checks import check_dealt, check_filled, check_room
from stages.settings.config import Config, UserError
from stages.settings.judge_models import check_asking
from stages.settings.sections import COMPARISONS, POSTS
from stages.settings.stages import STAGES

LEARNED = {"sft": POSTS[0], "rm": COMPARISONS[0], "dpo": COMPARISONS[0]}  # stage -> its split


def check_settings(config: Config, stages: Sequence[str], processes: int, capped: bool) -> None:
    """Raise UserError where one of some stages cannot be made, or not in so many processes.

    `capped`: whether a cap on the judge's cost is given beside the settings.
    """
    if any("judge" in STAGES[stage].sections for stage in stages):
        check_asking(config, capped)
        gold = gold_inputs(config, "judge").get(GOLD, "")
        if gold is None:
            raise no_gold(config)
        own = gold == identity(config, "normalize", "judge")
        if gold and (own or is_gold_of(config, config)):
            raise own_gold(config)
    for stage in stages:
        section: Any = getattr(config, stage, None)
        if hasattr(section, "batch_size"):
            minibatches = getattr(section, "num_minibatches", 1)
            samples = getattr(section, "samples_per_query", 1)
            check_dealt(stage, section.batch_size, processes, minibatches, samples)


def check_rows(config: Config, stages: Sequence[str]) -> None:
    """Raise UserError where the base stage has too few rows for one of some stages, or its model
    too few positions for DPO's summaries.
    """
    manifest = read_manifest(stage_folder(config, "base"))
    results = manifest["results"] if manifest else {}
    rows = {split: counts["rows"] for split, counts in results.get("rows", {}).items()}
    half = results.get("halves", {}).get(config.rm.pairs)
    for stage in stages:
        split = LEARNED.get(stage, "")
        size = getattr(getattr(config, stage, None), "batch_size", 0)
        if split == COMPARISONS[0] and half is not None:
            check_filled(stage, size, half, f" of rm.pairs={config.rm.pairs}")
        elif split in rows:
            check_filled(stage, size, rows[split])
    if "summaries" in stages and config.eval.posts > rows.get(POSTS[1], config.eval.posts):
        check = f"eval.posts is {config.eval.posts} but the validation split has {rows[POSTS[1]]}"
        raise UserError(f"{check} posts: lower it, or 0 for all")
    if "dpo" in stages and "positions" in results:
        query, longest = results["tokens"][POSTS[1]]["longest_query"], "eval.dpo_summary_tokens"
        check_room(results["positions"], query, config.eval.dpo_summary_tokens, longest)
