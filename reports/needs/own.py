"""What the preset `own` chooses: lengths and batches from the data, rates from the model's size.

The door calls this before the first stage and adds each choice to SET, so that it is a setting as
any other: what is typed stays, and a run that has begun keeps what it began with.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from reports.needs.plan import gpus_for
from stages.base import make_tokenizer, read_rows
from stages.config import config as settings
from stages.config.checks import UserError
from stages.config.command_line import NEXT, Request, make_config, recorded_config
from stages.config.config import Config
from stages.data.lengths import Limits
from stages.data.prompt import first_tokens
from stages.data.tokens import tokenize_comparisons, tokenize_posts
from stages.rl.algorithms import ALGORITHMS
from stages.runs.hub import fetch_tokenizer, model_source

PRESET = "own"
SAMPLE = 2000  # rows of a split whose tokens are counted
QUANTILE = 0.99
ANY = 2**30  # tokens; no row is longer
SMALL, LARGE = 135e6, 1e9  # parameters
# Stage -> the rate of `smollm2-full` (PPO's is our GPU run's), and the paper's for one billion.
RATES = {
    "sft": (5e-5, 3e-6),
    "rm": (2e-5, 3e-6),
    **dict.fromkeys(("dpo", *ALGORITHMS), (1e-5, 3e-6)),
}

Choices = dict[str, tuple[Any, str]]
"""Setting -> its value, and why."""


def with_choices(values: Mapping[str, str]) -> dict[str, str]:
    """The make variables of PRESET=own, with NAME and with every choice in SET.

    Raises UserError where model or data are not named, or cannot be read.
    """
    typed = [word for word in NEXT.split(values.get("SET", "").strip()) if word]
    keys = dict(word.partition("=")[::2] for word in typed)
    checkpoint = keys.get("base.checkpoint", "")
    if not checkpoint:
        raise UserError("PRESET=own needs a model: add SET=base.checkpoint=folder_or_hub_id")
    name = values.get("NAME") or f"{PRESET}-{Path(checkpoint.partition('@')[0]).name}"
    seed = values.get("SEED") or str(Request.seed)
    if not seed.isdecimal():
        raise UserError(f"SEED={seed} must be a whole number")
    sources = {key: values.get(key.upper(), "") for key in ("data", "tokenizer")}
    model = [f"released.reward_model={x}" for x in (values.get("REWARD_MODEL"),) if x]
    config = make_config(PRESET, name=name, seed=int(seed), **sources, overrides=(*typed, *model))
    begun = recorded_config(settings.RUNS / name / f"seed{config.seed}" / "base")
    if begun and (begun.base, begun.data.source) == (config.base, config.data.source):
        chosen = [text for text in begun.overrides if text.partition("=")[0] not in keys]
    else:
        choices = choices_of(config, values.get("GPU", ""), {*keys})
        print("own chooses, where nothing is typed:")
        for key, (value, why) in choices.items():
            print(f"{key:33}{value!s:>8}  {why}"[:80])
        chosen = [f"{key}={value}" for key, (value, _) in choices.items()]
    return {**values, "NAME": name, "SET": " ".join([*typed, *chosen])}


def choices_of(config: Config, gpu: str, typed: set[str]) -> Choices:
    """What is chosen: every setting below that is not typed. `gpu` is a kind of card to plan for;
    empty: what is there.
    """
    gpus_for(PRESET, gpu)  # refuses one that is not known
    folder = fetch_tokenizer(model_source("base.checkpoint", config.base.checkpoint)).folder
    try:
        of_model = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        with torch.device("meta"):
            count = AutoModelForCausalLM.from_config(of_model).num_parameters()
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0][:60]
        raise UserError(f"base.checkpoint: no language model in {folder}: {reason}") from None
    positions = getattr(of_model.get_text_config(), "max_position_embeddings", None) or ANY
    on_card = bool(gpu) or torch.cuda.is_available()
    choices = _of_data(config, positions, on_card) | _of_size(count)
    return {key: choice for key, choice in choices.items() if key not in typed}


def _of_data(config: Config, positions: int, on_card: bool) -> Choices:
    """Lengths by QUANTILE of the rows' tokens; batches of at most a twentieth of the rows."""
    located, data = read_rows(config).splits, config.data
    tokenizer = make_tokenizer(config, located["sft_train"])
    first = first_tokens(tokenizer, config.base.bos, data.chat_template)
    every = Limits(
        query=ANY,
        response=ANY,
        query_response=ANY,
        prompt=data.prompt,
        first=first,
        chat_template=data.chat_template,
    )
    posts = tokenize_posts(located["sft_train"][:SAMPLE], tokenizer, every, "posts").columns
    sample = located.get("comparisons_train", [])[:SAMPLE]
    pairs = tokenize_comparisons(sample, tokenizer, every, "pairs").columns if sample else {}
    room = positions // 4
    summary = _length(posts["summaries"].lengths(), room)
    query = _length(torch.cat([x["queries"].lengths() for x in (posts, pairs) if x]), 2 * room)
    begins = tokenizer.convert_ids_to_tokens(list(first))
    choices = {
        "base.bos": (config.base.bos, f"queries begin with {[*begins, 'no BOS'][0]}"),
        "data.max_query_tokens": query,
        "data.max_summary_tokens": summary,
        "data.max_query_summary_tokens": (query[0] + summary[0], "both"),
        "eval.dpo_summary_tokens": (summary[0], "as PPO's"),
    }
    held_out, some = (len(located[split]) for split in ("sft_validation", "sft_train"))
    rows = {"sft": some // 20}
    if pairs:
        rows |= dict.fromkeys(("rm", "dpo"), len(located["comparisons_train"]) // 20)
        sides = (pairs[side].lengths() for side in ("chosen", "rejected"))
        answer = _length(torch.cat([*sides]), room)
        choices["data.max_comparison_tokens"] = answer
        choices["data.max_query_comparison_tokens"] = (query[0] + answer[0], "both")
    choices["eval.posts"] = (min(held_out, held_out if on_card else 128), f"of {held_out:,}")
    choices["normalize.posts"] = (min(some, 1000), f"of {some:,}")
    updates, largest = (200, 256) if on_card else (20, 32)
    for stage in (*rows, *ALGORITHMS):
        most = min(64, rows[stage]) if stage in rows else min(largest, some)
        size = 2 ** int(math.log2(max(4, most)))
        choices[f"{stage}.batch_size"] = (size, f"a power of 2 from 4, to {most} by the rows")
        if stage in ALGORITHMS:
            choices[f"{stage}.total_episodes"] = (updates * size, f"{updates} updates")
    return choices


def _length(lengths: Tensor, most: int) -> tuple[int, str]:
    limit = min(most, int(torch.quantile(lengths.double(), QUANTILE, interpolation="higher")))
    longer = (lengths > limit).double().mean().item()
    return (limit, f"{longer:.1%} are longer, the longest has {int(lengths.max())}")


def _of_size(count: int) -> Choices:
    """Rates between those of two models, by the logarithm of the parameters."""
    share = min(1.0, max(0.0, math.log(count / SMALL) / math.log(LARGE / SMALL)))
    choices = {}
    for stage, (small, large) in RATES.items():
        rate = float(f"{small ** (1 - share) * large**share:.1e}")
        why = f"{count / 1e6:,.0f} M; {small:.0e} to 135 M, {large:.0e} from 1 B"
        choices[f"{stage}.learning_rate"] = (rate, why)
    return choices
