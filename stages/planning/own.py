"""What the preset `own` chooses: lengths and batches from the data, rates from the model's size.

The command line calls `with_choices` before the first stage, and each choice becomes a part of SET.
So it is a setting like any other: your own settings take precedence, and a run that has started
keeps its choices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from stages.base import make_tokenizer, read_rows
from stages.config import config as settings
from stages.config.command_line import NEXT_OVERRIDE, Request, make_config
from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.recorded import recorded_config
from stages.config.sections import COMPARISONS, POSTS
from stages.data.lengths import Limits
from stages.data.prompt import first_tokens
from stages.data.ragged import TokenizedSplit
from stages.data.tokens import tokenize_comparisons, tokenize_posts
from stages.pipeline.targets import VARIABLES
from stages.pipeline.variables import whole_number
from stages.planning.plan import gpus_for
from stages.rl.algorithms import ALGORITHMS
from stages.runs.hub import fetch_tokenizer, model_source

PRESET = "own"

# Lengths: the limit is this quantile of the first rows of a split.
SAMPLED_ROWS = 2000
QUANTILE = 0.99
UNLIMITED = 2**30  # tokens; no row is longer

# Batches: a power of two, and at most this share of the rows (1 / ROWS_PER_BATCH).
SMALLEST_BATCH = 4
LARGEST_BATCH = 64  # of SFT, reward model and DPO
ROWS_PER_BATCH = 20
# Updates and largest batch of PPO and the other algorithms.
GPU_UPDATES = 200
GPU_BATCH = 256
CPU_UPDATES = 20
CPU_BATCH = 32
CPU_EVAL_POSTS = 128
NORMALIZE_POSTS = 1000

# Learning rates: those of `smollm2-full` (PPO's is that of our GPU run) for a model of 135 million
# parameters, and the paper's for one of a billion.
SMALL_MODEL = 135e6
LARGE_MODEL = 1e9
SMALL_MODEL_RATES = {"sft": 5e-5, "rm": 2e-5, "dpo": 1e-5, **dict.fromkeys(ALGORITHMS, 1e-5)}
LARGE_MODEL_RATE = 3e-6


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The value of a setting, and why."""

    value: Any
    reason: str


# -- the command line ------------------------------------------------------------------------------


def with_choices(variables: Mapping[str, str]) -> dict[str, str]:
    """The make variables of PRESET=own, with NAME, and with every choice in SET.

    Raises UserError if model or data are not given, or cannot be read.
    """
    typed = [word for word in NEXT_OVERRIDE.split(variables.get("SET", "").strip()) if word]
    typed_values = dict(word.partition("=")[::2] for word in typed)
    config = _typed_config(variables, typed, typed_values.get("base.checkpoint", ""))

    # POLICY or REWARD_MODEL is a setting, too, which the command line adds to SET later.
    keys_of_variables = {
        variable.setting
        for name, variable in VARIABLES.items()
        if variable.setting and variables.get(name)
    }
    chosen = recorded_choices(config, typed_keys={*typed_values, *keys_of_variables})
    if chosen is None:
        choices = choices_for(config, variables.get("GPU", ""))
        choices = {key: choice for key, choice in choices.items() if key not in typed_values}
        print("own chooses these settings, unless you set them:")
        for key, choice in choices.items():
            print(f"{key:33}{choice.value!s:>8}  {choice.reason}")
        chosen = [f"{key}={choice.value}" for key, choice in choices.items()]
    return {**variables, "NAME": config.name, "SET": " ".join([*typed, *chosen])}


def _typed_config(variables: Mapping[str, str], typed: Sequence[str], checkpoint: str) -> Config:
    """The settings before any choice is made."""
    if not checkpoint:
        raise UserError("PRESET=own needs a model: add SET=base.checkpoint=folder_or_hub_id")
    seed = whole_number("SEED", variables.get("SEED") or str(Request.seed))

    overrides = list(typed)
    if variables.get("REWARD_MODEL"):
        overrides.append(f"released.reward_model={variables['REWARD_MODEL']}")
    return make_config(
        PRESET,
        name=variables.get("NAME") or f"{PRESET}-{Path(checkpoint.partition('@')[0]).name}",
        seed=seed,
        data=variables.get("DATA", ""),
        tokenizer=variables.get("TOKENIZER", ""),
        overrides=tuple(overrides),
    )


def recorded_choices(config: Config, typed_keys: set[str]) -> list[str] | None:
    """The choices made when the run began, such as `sft.batch_size=64`; None for a new run."""
    base = settings.RUNS / config.name / f"seed{config.seed}" / "base"
    begun = recorded_config(base)
    if begun is None or begun.base != config.base or begun.data.source != config.data.source:
        return None
    return [text for text in begun.overrides if text.partition("=")[0] not in typed_keys]


# -- choices ---------------------------------------------------------------------------------------


def choices_for(config: Config, gpu: str) -> dict[str, Choice]:
    """Every setting that depends on model, data or device, with its choice.

    `gpu`: the GPU to plan for, by its name in `make plan`; empty: the devices of this machine.
    Raises UserError for an unknown GPU, and for a checkpoint without a language model.
    """
    gpus_for(PRESET, gpu)  # raises for an unknown GPU
    folder = fetch_tokenizer(model_source("base.checkpoint", config.base.checkpoint)).folder
    try:
        model_config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        with torch.device("meta"):
            parameters = AutoModelForCausalLM.from_config(model_config).num_parameters()
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0][:60]
        raise UserError(f"base.checkpoint: {folder} is not a language model: {reason}") from None
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)

    located_rows = read_rows(config).splits
    rows = {split: len(of_split) for split, of_split in located_rows.items()}
    has_gpu = bool(gpu) or torch.cuda.is_available()
    return {
        **length_choices(config, located_rows, positions or UNLIMITED),
        **count_choices(rows, has_gpu),
        **rate_choices(parameters),
    }


def length_choices(
    config: Config, located_rows: Mapping[str, Any], positions: int
) -> dict[str, Choice]:
    """Length limits that 99% of the rows meet, for a model with this many positions."""
    tokenizer = make_tokenizer(config, located_rows[POSTS[0]])
    first = first_tokens(tokenizer, config.base.bos, config.data.chat_template)
    limits = Limits(
        query=UNLIMITED,
        response=UNLIMITED,
        query_response=UNLIMITED,
        prompt=config.data.prompt,
        first=first,
        chat_template=config.data.chat_template,
    )
    sample = located_rows[POSTS[0]][:SAMPLED_ROWS]
    posts = tokenize_posts(sample, tokenizer, limits, "posts")
    pairs: TokenizedSplit | None = None
    if located_rows.get(COMPARISONS[0]):
        sample = located_rows[COMPARISONS[0]][:SAMPLED_ROWS]
        pairs = tokenize_comparisons(sample, tokenizer, limits, "pairs")

    # A response takes at most a quarter of the positions, a query twice as much.
    quarter = positions // 4
    splits = [posts] if pairs is None else [posts, pairs]
    query_lengths = torch.cat([split.columns["queries"].lengths() for split in splits])
    query = _length(query_lengths, most=2 * quarter)
    summary = _length(posts.columns["summaries"].lengths(), most=quarter)
    begins = tokenizer.convert_ids_to_tokens(list(first)) or ["no BOS"]
    choices = {
        "base.bos": Choice(value=config.base.bos, reason=f"queries begin with {begins[0]}"),
        "data.max_query_tokens": query,
        "data.max_summary_tokens": summary,
        "data.max_query_summary_tokens": Choice(value=query.value + summary.value, reason="both"),
        "eval.dpo_summary_tokens": Choice(value=summary.value, reason="the same as PPO's"),
    }
    if pairs is not None:
        sides = [pairs.columns[side].lengths() for side in ("chosen", "rejected")]
        answer = _length(torch.cat(sides), most=quarter)
        both = Choice(value=query.value + answer.value, reason="both")
        choices["data.max_comparison_tokens"] = answer
        choices["data.max_query_comparison_tokens"] = both
    return choices


def _length(lengths: Tensor, most: int) -> Choice:
    quantile = torch.quantile(lengths.double(), QUANTILE, interpolation="higher")
    limit = min(most, int(quantile))
    longer = (lengths > limit).double().mean().item()
    reason = f"{longer:.1%} are longer, the longest has {int(lengths.max())}"
    return Choice(value=limit, reason=reason)


def count_choices(rows: Mapping[str, int], has_gpu: bool) -> dict[str, Choice]:
    """Batch sizes, updates and numbers of posts. `rows`: split -> the number of its rows."""
    posts = rows[POSTS[0]]
    pairs = rows.get(COMPARISONS[0], 0)
    held_out = rows[POSTS[1]]
    eval_posts = held_out if has_gpu else min(held_out, CPU_EVAL_POSTS)
    choices = {
        "eval.posts": Choice(value=eval_posts, reason=f"of {held_out:,}"),
        "normalize.posts": Choice(value=min(posts, NORMALIZE_POSTS), reason=f"of {posts:,}"),
    }

    choices["sft.batch_size"] = _batch(posts, ROWS_PER_BATCH, LARGEST_BATCH)
    if pairs:
        for stage in ("rm", "dpo"):
            choices[f"{stage}.batch_size"] = _batch(pairs, ROWS_PER_BATCH, LARGEST_BATCH)

    updates = GPU_UPDATES if has_gpu else CPU_UPDATES
    for stage in ALGORITHMS:
        batch = _batch(posts, rows_per_batch=1, largest=GPU_BATCH if has_gpu else CPU_BATCH)
        episodes = Choice(value=updates * batch.value, reason=f"{updates} updates")
        choices[f"{stage}.batch_size"] = batch
        choices[f"{stage}.total_episodes"] = episodes
    return choices


def _batch(rows: int, rows_per_batch: int, largest: int) -> Choice:
    """The largest power of two that leaves `rows_per_batch` rows for each row of a batch."""
    most = max(SMALLEST_BATCH, min(largest, rows // rows_per_batch))
    reason = f"{rows:,} rows; {SMALLEST_BATCH} to {largest}, a power of 2"
    return Choice(value=2 ** int(math.log2(most)), reason=reason)


def rate_choices(parameters: int) -> dict[str, Choice]:
    """Learning rates between those of two models, by the logarithm of the parameters."""
    share = math.log(parameters / SMALL_MODEL) / math.log(LARGE_MODEL / SMALL_MODEL)
    share = min(1.0, max(0.0, share))
    size = f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"
    choices = {}
    for stage, small_rate in SMALL_MODEL_RATES.items():
        rate = float(f"{small_rate ** (1 - share) * LARGE_MODEL_RATE**share:.1e}")
        reason = f"{size}; {small_rate:.0e} to 135 M, {LARGE_MODEL_RATE:.0e} from 1 B"
        choices[f"{stage}.learning_rate"] = Choice(value=rate, reason=reason)
    return choices
