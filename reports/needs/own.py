"""What the preset `own` chooses: lengths and batches from the data, rates from the model's size,
memory from the plan.

The door calls this before the first stage and adds each choice to SET, so that it is a setting as
any other: what is typed stays, and a run that has begun keeps what it began with.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from reports.needs.memory import GIB, Setting
from reports.needs.plan import GPUS, part_bytes, usable_bytes
from reports.needs.shapes import read_shape
from stages.base import make_tokenizer, read_rows
from stages.posts.tokens import Limits, first_tokens, tokenize_comparisons, tokenize_posts
from stages.running.hub import fetch_tokenizer
from stages.running.inputs import model_source
from stages.settings import config as settings
from stages.settings.checks import UserError, unknown
from stages.settings.command_line import NEXT, Request, config_of, recorded_config
from stages.settings.config import Config, changes_of, with_changes

PRESET = "own"
SAMPLE = 2000  # rows of a split whose tokens are counted
QUANTILE = 0.99
ANY = 2**30  # tokens; no row is longer
SMALL, LARGE = 135e6, 1e9  # parameters of the models whose rates are known
# Stage -> the rate of `smollm2-full`, and the paper's for one billion parameters.
RATES = {"sft": (5e-5, 3e-6), "rm": (2e-5, 3e-6), "dpo": (1e-5, 3e-6), "ppo": (1e-5, 3e-6)}
RIVALS = ("ppo", "rloo", "grpo")
MICROBATCHES = (64, 32, 16, 8, 4, 2, 1)
UNKNOWN = 4  # the microbatch of a model whose memory has no plan
OF_MACHINE, OF_CARD = 0.6, 0.9  # shares of their memory that a run may take


class Choice(NamedTuple):
    """A setting's value, and why."""

    value: Any
    why: str


Choices = dict[str, Choice]


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
    request = Request(
        preset=PRESET,
        seed=int(values.get("SEED") or Request.seed),
        name=name,
        data=values.get("DATA", ""),
        tokenizer=values.get("TOKENIZER", ""),
        overrides=tuple(typed),
    )
    config = config_of(request)
    begun = recorded_config(settings.RUNS / name / f"seed{request.seed}" / "base")
    if begun and (begun.base, begun.data.source) == (config.base, config.data.source):
        chosen = [text for text in begun.overrides if text.partition("=")[0] not in keys]
    else:
        choices = choices_of(config, values.get("GPU", ""), {*keys})
        print("own chooses, where nothing is typed:")
        for key, choice in choices.items():
            print(f"{key:33}{choice.value!s:>8}  {choice.why}"[:80])
        chosen = [f"{key}={choice.value}" for key, choice in choices.items()]
    return {**values, "NAME": name, "SET": " ".join([*typed, *chosen])}


def choices_of(config: Config, gpu: str, typed: set[str]) -> Choices:
    """What is chosen: every setting below that is not typed. `gpu` is a kind of card to plan for;
    empty: what is there.
    """
    if gpu and gpu not in GPUS:
        raise unknown("GPU", gpu, GPUS)
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
    choices = {key: choice for key, choice in choices.items() if key not in typed}
    texts = [f"{key}={choice.value}" for key, choice in choices.items()]
    changed = with_changes(config, changes_of(texts))
    memory = _of_memory(changed, folder / "config.json", gpu)
    return choices | {key: choice for key, choice in memory.items() if key not in typed}


def _of_data(config: Config, positions: int, on_card: bool) -> Choices:
    """Lengths by QUANTILE of the rows' tokens; batches of at most a twentieth of the rows."""
    located = read_rows(config).located
    tokenizer = make_tokenizer(config, located["sft_train"])
    first = first_tokens(tokenizer, config.base.bos)
    every = Limits(
        query=ANY, response=ANY, query_response=ANY, prompt=config.data.prompt, first=first
    )
    some = {split: located[split][:SAMPLE] for split in ("sft_train", "comparisons_train")}
    posts = tokenize_posts(some["sft_train"], tokenizer, every, "posts").columns
    pairs = tokenize_comparisons(some["comparisons_train"], tokenizer, every, "pairs").columns
    room = positions // 4
    summary = _length(posts["summaries"].lengths(), room)
    answer = _length(torch.cat([pairs[side].lengths() for side in ("chosen", "rejected")]), room)
    query = _length(torch.cat([x["queries"].lengths() for x in (posts, pairs)]), 2 * room)
    begins = tokenizer.convert_ids_to_tokens(list(first))
    choices = {
        "base.bos": Choice(config.base.bos, f"queries begin with {begins[0] if first else 'none'}"),
        "data.max_query_tokens": query,
        "data.max_summary_tokens": summary,
        "data.max_query_summary_tokens": Choice(query.value + summary.value, "both"),
        "data.max_comparison_tokens": answer,
        "data.max_query_comparison_tokens": Choice(query.value + answer.value, "both"),
        "eval.dpo_summary_tokens": Choice(summary.value, "as PPO's"),
    }
    rows = {split: len(of_split) for split, of_split in located.items()}
    for name, split, most in (
        ("normalize.posts", "sft_train", 1000),
        ("eval.posts", "sft_validation", rows["sft_validation"] if on_card else 128),
    ):
        choices[name] = Choice(min(most, rows[split]), f"of {rows[split]:,}")
    updates, most = (200, 256) if on_card else (20, 32)
    for stage, split in (
        ("sft", "sft_train"),
        *dict.fromkeys(("rm", "dpo"), "comparisons_train").items(),
    ):
        choices[f"{stage}.batch_size"] = _power(
            64, rows[split] // 20, f"a twentieth of {rows[split]:,}"
        )
    for stage in RIVALS:
        choices[f"{stage}.batch_size"] = _power(
            most, rows["sft_train"], f"{rows['sft_train']:,} posts"
        )
        episodes = updates * choices[f"{stage}.batch_size"].value
        choices[f"{stage}.total_episodes"] = Choice(episodes, f"{updates} updates")
    return choices


def _power(most: int, bound: int, of: str) -> Choice:
    size = 2 ** int(math.log2(max(4, min(most, bound))))
    return Choice(size, f"a power of 2, at most {most} and {of}")


def _length(lengths: Tensor, most: int) -> Choice:
    limit = min(most, int(torch.quantile(lengths.double(), QUANTILE, interpolation="higher")))
    longer = (lengths > limit).double().mean().item()
    return Choice(limit, f"{longer:.1%} are longer, the longest has {int(lengths.max())}")


def _of_size(count: int) -> Choices:
    """Rates between those of two models, by the logarithm of the parameters."""
    share = math.log(count / SMALL) / math.log(LARGE / SMALL)
    share = min(1.0, max(0.0, share))
    choices = {}
    for stage in RATES | dict.fromkeys(RIVALS):
        small, large = RATES.get(stage, RATES["ppo"])
        rate = float(f"{small ** (1 - share) * large**share:.1e}")
        why = f"{count / 1e6:,.0f} M; {small:.0e} to 135 M, {large:.0e} from 1 B"
        choices[f"{stage}.learning_rate"] = Choice(rate, why)
    return choices


def _of_memory(config: Config, path: Path, gpu: str) -> Choices:
    """The largest microbatch of which the plan says that every part fits; no result depends on it.

    Without a card more than 8 rows at once gain nothing.
    """
    on_card = bool(gpu) or torch.cuda.is_available()
    if gpu:
        usable, where = usable_bytes(gpu), "a card"
    elif on_card:
        usable, where = OF_CARD * torch.cuda.mem_get_info()[0], "free"
    else:
        usable = OF_MACHINE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        where = "here"
    sizes = [size for size in MICROBATCHES if on_card or size <= 8]
    size, why = UNKNOWN, f"no plan for {config.base.checkpoint}"
    try:
        shape = read_shape(path)
    except UserError:
        sizes = []
    for size in sizes:
        memory = replace(config.memory, microbatch_size=size, forward_batch_size=4 * size)
        tried = replace(config, memory=memory)
        setting = Setting(config=tried, shape=shape, on_gpu=on_card)
        most = max(part.total for part in part_bytes(setting).values())
        why = f"needs {most / GIB:.1f} of {usable / GIB:.0f} GiB {where}"
        if most <= usable:
            break
        why = f"TOO LARGE, add lora.rank=16: {why}"
    names = ("memory.microbatch_size", "memory.forward_batch_size")
    return {name: Choice(value, why) for name, value in zip(names, (size, 4 * size), strict=True)}
