"""Stage 0: what a preset starts from: tokenised posts, the tokenizer and the base checkpoint.

The checkpoint is a folder, a hub id, or a randomly initialised GPT-NeoX (Pythia's architecture) for
presets that need no download. The tokenizer is the checkpoint's, a given one, or a BPE trained on
the preset's own posts. Tokens are cached by content and code, and shared between runs. This is the
only stage of training that asks the hub for anything.
"""

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from stages.data import tokens
from stages.data.bad_rows import SKIPPED_FILE, BadRows, in_half
from stages.data.builtin import world_folder
from stages.data.formats import learned, recognised
from stages.data.ragged import load_split, save_split
from stages.data.readers import (
    Located,
    beside_known,
    differences,
    fetch_rows,
    is_cnndm,
    kept_odd_rows,
    read_source,
    sources_of,
    subsample,
)
from stages.models import loading
from stages.running.files import HASHES, cached_folder, read_lines, write_json
from stages.running.hub import Fetched, fetch_model, fetch_tokenizer
from stages.running.inputs import Source, model_source
from stages.running.machine import code_of
from stages.running.progress import folded
from stages.runs import Run, open_stage
from stages.settings import config as settings
from stages.settings.config import HUB, RANDOM, TOY, TRAIN_TOKENIZER, Config, Data, UserError
from stages.settings.presets import SMOLLM2
from stages.settings.sections import (
    CNNDM,
    COMPARISONS,
    EMBEDDING_MULTIPLE,
    EOS_TOKEN,
    POSTS,
    PPO_TRAIN,
    format_post,
)
from stages.training.checkpoints import refuse_adapter
from stages.training.random_streams import stream_seed

# Whose code makes the tokens, beside that of the libraries.
TOKENISES = ("stages/data/", "stages/settings/sections")


def make_base(config: Config) -> None:
    """Run the stage. Raises UserError for bad rows, a bad tokenizer or a missing checkpoint."""
    with open_stage(config, "base") as run:
        fetched = fetch_all(config)
        rows = read_rows(config)
        tokenizer = make_tokenizer(config, rows.located["sft_train"])
        model = make_model(config, tokenizer)
        first = tokens.first_tokens(tokenizer, config.base.bos)
        limits = split_limits(config.data, loading.positions_of(model), first)
        copy_tokens(tokenizer, rows, limits, run.partial / "data")
        # Policies sample as many tokens: another number is another input, though no post differs.
        sampled = {"max_summary_tokens": config.data.max_summary_tokens}
        write_json(run.partial / "data" / "sampled.json", sampled)
        loading.save_model(model, tokenizer, run.partial / "model")
        results = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "vocabulary": len(tokenizer),
            "positions": loading.positions_of(model),
            **describe(run, rows, limits),
            **({"hub": [source.record for source in fetched]} if fetched else {}),
        }
        lines = remarks(results, run.folder / "data" / SKIPPED_FILE)
        for line in [*eos_remarks(tokenizer, model), *lines]:
            print(*folded(line), sep="\n", file=sys.stderr, flush=True)
        run.finish(results)


def fetch_all(config: Config) -> list[Fetched]:
    """Fetch everything that the stage takes from the hub, and say what and how much.

    Raises UserError for what the hub or its cache does not give.
    """
    base = config.base
    sources = dict.fromkeys(sources_of(config.data)) if config.data.source == HUB else ()
    todo: list[tuple[Callable[[Source], Fetched], Source]] = [(fetch_rows, x) for x in sources]
    if base.tokenizer not in ("", TRAIN_TOKENIZER):
        todo.append((fetch_tokenizer, model_source("base.tokenizer", base.tokenizer)))
    if base.checkpoint != RANDOM:
        todo.append((fetch_model, _checkpoint(config)))
    fetched = []
    for fetch, source in todo:
        if source.is_folder:
            continue
        started = time.monotonic()
        print(f"fetch {source.label}", flush=True)
        fetched.append(fetch(source))
        print(f"  {fetched[-1].size}, {time.monotonic() - started:.0f} s", flush=True)
    return fetched


@dataclass(frozen=True, kw_only=True)
class SourceRows:
    """What was read, before it is tokenised."""

    located: dict[str, list[Located]]
    """By the name of the tokenised split; pairs about news articles are a split of their own."""
    bad: BadRows
    published: dict[str, Any]
    """Rows beside the known number of rows, for published data sets."""


def read_rows(config: Config) -> SourceRows:
    """The rows that the settings use, checked."""
    source = world_folder(config) if config.data.source == TOY else config.data.source
    bad = BadRows(config.data.on_bad_row)
    located = read_source(config.data, str(source), bad, config.needed_splits)
    for line in recognised(located):
        print(line, flush=True)
    published = beside_known(config.data, located)
    located = subsample(config.data, located)
    # News articles occur among the validation comparisons only (Huang et al. 2024, detail 1).
    articles = [row for row in located.get(COMPARISONS[1], ()) if is_cnndm(row[1])]
    for name in located.keys() & {*COMPARISONS}:
        located[name] = [row for row in located[name] if not is_cnndm(row[1])]
        if not located[name]:
            raise UserError(f"{name} is about news articles alone: add comparisons of posts")
    if articles:
        located[CNNDM] = articles
    return SourceRows(located=located, bad=bad, published=published)


def split_limits(data: Data, positions: int, first: tuple[int, ...]) -> dict[str, tokens.Limits]:
    """The limits of each tokenised split; `first` begins every query."""
    posts = tokens.Limits(
        query=data.max_query_tokens,
        response=data.max_summary_tokens,
        query_response=data.max_query_summary_tokens,
        setting="data.max_summary_tokens",
        sampled=data.max_summary_tokens,
        positions=positions,
        first=first,
        prompt=data.prompt,
    )
    pairs = replace(
        posts,
        response=data.max_comparison_tokens,
        query_response=data.max_query_comparison_tokens,
        setting="data.max_comparison_tokens",
        sampled=0,
    )
    return {
        **dict.fromkeys((*POSTS, PPO_TRAIN), posts),
        **dict.fromkeys(COMPARISONS, pairs),
        CNNDM: replace(tokens.CNNDM_LIMITS, positions=positions, first=first),
    }


def describe(run: Run, rows: SourceRows, limits: dict[str, tokens.Limits]) -> dict[str, Any]:
    """The part of the results that is about data: lengths, and rows kept and skipped by kind."""
    folder, lengths, counts, halves = run.partial / "data", {}, {}, {}
    listed = read_lines(folder / SKIPPED_FILE) if (folder / SKIPPED_FILE).exists() else []
    left_out = {row["where"] for row in listed}
    kept = {
        name: [row for where, row in located if where not in left_out]
        for name, located in rows.located.items()
    }
    for name, of_split in kept.items():
        split = load_split(folder, name)
        lengths[name] = tokens.length_report(split)
        skipped = sum(row["split"] == name for row in listed)
        over = tokens.over_limit(split, limits[name])
        counts[name] = {"rows": len(split), "skipped": skipped, **over}
        if "chosen" in split.columns:
            counts[name] |= kept_odd_rows(of_split)
        if name == COMPARISONS[0]:  # of which rm.pairs may name one
            for half in ("even", "odd"):
                halves[half] = sum(in_half(row["id"], half) for row in split.rows)
    return {
        "tokens": lengths,
        "rows": counts,
        "halves": halves,
        "learned": learned(kept),
        "published": rows.published,
    }


def remarks(results: dict[str, Any], listed: Path) -> list[str]:
    """What a user should know of the rows, one line each; `listed` is where skipped ones stand."""
    lines, rows = list[str](), results["rows"].values()
    if longer := sum(counts["over_limit"] for counts in rows):
        most = max(counts["most_over"] for counts in rows)
        over = f"{longer:,} rows are up to {most:,} tokens over data.max_*"
        lines.append(f"{over}: they are used whole, as meant")
    counted = results["learned"]
    lines += [
        f"held-out {what}: {counted[what]:,} of {counted[f'of_{what}']:,} stand in the training "
        "data too, by their text: what is learned there is judged here"
        for what in ("posts", "pairs")
        if counted[what]
    ]
    if skipped := sum(counts["skipped"] for counts in rows):
        lines.append(f"{skipped:,} bad rows were skipped, with the reasons in {listed}")
    return [*lines, *filter(None, [differences(results["published"])])]


def eos_remarks(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> list[str]:
    """A line where the checkpoint's own config ends texts with another token than its tokenizer.

    Every stage takes the tokenizer's, so the model would have to learn an end that it never saw.
    """
    ends = model.config.get_text_config().eos_token_id
    known = ends if isinstance(ends, list) else [ends]
    if ends is None or tokenizer.eos_token_id in known:
        return []
    names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(known)))
    return [
        f"summaries end with the tokenizer's EOS {tokenizer.eos_token}, the checkpoint's config "
        f"names {names}: if that is meant, set eos_token in tokenizer_config.json"
    ]


def make_tokenizer(config: Config, train: list[Located]) -> PreTrainedTokenizerBase:
    """The preset's tokenizer with [PAD] added."""
    if not config.base.tokenizer:
        return loading.load_tokenizer(_checkpoint_folder(config))
    if config.base.tokenizer != TRAIN_TOKENIZER:
        source = model_source("base.tokenizer", config.base.tokenizer)
        return loading.load_tokenizer(fetch_tokenizer(source).folder)
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.base.vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f"{format_post(row, config.data.prompt)} {row['summary']}" for _, row in train)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN)
    fast.add_special_tokens({"pad_token": "[PAD]"})
    return fast


def _checkpoint(config: Config) -> Source:
    checkpoint = config.base.checkpoint
    if checkpoint == SMOLLM2 and not Path(checkpoint).is_dir():
        raise UserError(f"base.checkpoint: {checkpoint} is not there: run `make smollm`")
    return model_source("base.checkpoint", checkpoint)


def _checkpoint_folder(config: Config) -> Path:
    """Where the checkpoint lies. An adapter is refused before a tokenizer is missed in it."""
    folder = fetch_model(_checkpoint(config)).folder
    refuse_adapter(folder)
    return folder


def make_model(config: Config, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The base checkpoint, or a GPT-NeoX with new weights drawn from the run's seed.

    Raises UserError if the tokenizer has ids that the model's embedding lacks.
    """
    base = config.base
    if base.checkpoint != RANDOM:
        model = loading.load_policy(_checkpoint_folder(config))
        loading.require_heads(model.config, base.checkpoint)
        if tokenizer.pad_token_id > model.config.vocab_size:
            raise UserError(
                f"tokenizer has {tokenizer.pad_token_id} tokens, {base.checkpoint} only "
                f"{model.config.vocab_size} embeddings: give the checkpoint's own tokenizer"
            )
        return model
    data = config.data
    longest_response = tokens.FAR_OVER * max(data.max_summary_tokens, data.max_comparison_tokens)
    longest = max(data.max_query_tokens + longest_response, 2048)
    torch.manual_seed(stream_seed(config.seed, "base"))
    # Pythia rotates a quarter of a head's dimensions. A quarter of these narrow heads is too little
    # to find a word by its place: with all of them the model learns to copy about twice as fast.
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    shape = GPTNeoXConfig(
        vocab_size=-(-len(tokenizer) // EMBEDDING_MULTIPLE) * EMBEDDING_MULTIPLE,
        hidden_size=base.hidden_size,
        num_hidden_layers=base.num_layers,
        num_attention_heads=base.num_heads,
        intermediate_size=4 * base.hidden_size,
        max_position_embeddings=longest,
        # GPT-NeoX's 0.02 suits wide models; in a narrow one signals fade, and learning to copy
        # takes three times as many updates.
        initializer_range=base.hidden_size**-0.5,
        rope_parameters=rope,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return GPTNeoXForCausalLM(loading.with_dropout(shape, probability=0.0))


def copy_tokens(
    tokenizer: PreTrainedTokenizerBase,
    rows: SourceRows,
    limits: dict[str, tokens.Limits],
    target: Path,
) -> None:
    """Put the tokenised splits into `target`; they are tokenised only if no earlier run did so."""

    def tokenize_all(folder: Path) -> None:
        for name, located in rows.located.items():
            is_pairs = "comparisons" in name
            tokenize = tokens.tokenize_comparisons if is_pairs else tokens.tokenize_posts
            save_split(tokenize(located, tokenizer, limits[name], name, rows.bad), folder, name)
        rows.bad.write(folder)

    code = {k: v for k, v in code_of("stages.data.tokens").items() if k.startswith(TOKENISES)}
    digest = hashlib.sha256(f"{code}{tokenizer.backend_tokenizer.to_str()}".encode())
    digest.update(f"EOS {tokenizer.eos_token_id}".encode())  # the backend does not know it
    for name, located in rows.located.items():
        digest.update(f"{name}{limits[name]}".encode())
        for where, row in located:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
            if rows.bad.skip:  # the list of skipped rows is part of what is cached
                digest.update(where.encode())
    digest.update(json.dumps(rows.bad.skipped).encode())
    name = f"tokens-{digest.hexdigest()[:16]}"
    cache = cached_folder(settings.RUNS / "cache" / name, tokenize_all)
    shutil.rmtree(target, ignore_errors=True)  # of an attempt that was interrupted
    # No links: what happens to a run's files must not happen to the next run's.
    shutil.copytree(cache, target, ignore=shutil.ignore_patterns(HASHES))
