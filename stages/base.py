"""Stage 0: tokenized posts, the tokenizer and the base checkpoint, from which a run starts.

The checkpoint is a folder, a hub id, or a randomly initialized GPT-NeoX (Pythia's architecture) for
presets that need no download. The tokenizer is the checkpoint's, a given one, or a BPE trained on
the preset's own posts. Tokens are cached by content and code, and shared between runs. No later
training stage downloads anything from the hub.
"""

import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
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

from stages.config import paths
from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.presets import SMOLLM2
from stages.config.sections import (
    CNNDM,
    COMPARISONS,
    EMBEDDING_MULTIPLE,
    EOS_TOKEN,
    HUB,
    POSTS,
    PPO_TRAIN,
    RANDOM,
    TOY,
    TRAIN_TOKENIZER,
    Data,
    format_post,
)
from stages.data.bad_rows import SKIPPED_FILE, BadRows
from stages.data.builtin import world_folder
from stages.data.chat import end_answers_as_the_template
from stages.data.formats import describe_whole_prompts
from stages.data.halves import in_half
from stages.data.lengths import CNNDM_LIMITS, FAR_OVER, Limits, count_over_limit, length_report
from stages.data.prompt import first_tokens
from stages.data.ragged import load_split, save_split
from stages.data.readers import (
    describe_unread,
    fetch_rows,
    hub_sources,
    read_source,
    subsample,
)
from stages.data.row_counts import (
    compare_with_published,
    count_odd_comparisons,
    count_repeated_rows,
    describe_differences,
)
from stages.data.schemas import is_cnndm
from stages.data.tables import LocatedRow
from stages.data.tokens import tokenize_comparisons, tokenize_posts
from stages.models import loading
from stages.models.heads import register_head_class
from stages.models.lora import check_target_modules
from stages.models.tokenizers import load_tokenizer
from stages.models.weights import check_no_adapter
from stages.runs.code import code_of
from stages.runs.files import HASHES, cached_folder, read_lines, write_json
from stages.runs.hub import Fetched, Source, fetch_model, fetch_tokenizer, model_source
from stages.runs.run import Run, open_stage
from stages.runs.text import folded
from stages.training.random_streams import stream_seed

# Of the files that the tokenizing module imports, those whose code decides the tokens.
TOKENIZING_MODULE = "stages.data.tokens"
TOKENIZING_CODE = ("stages/data/", "stages/config/sections")


def make_base(config: Config) -> None:
    """Run the stage. Raises UserError for bad rows, a bad tokenizer or a missing checkpoint."""
    with open_stage(config, "base") as run:
        fetched = fetch_all(config)

        # The data, the tokenizer and the model.
        source_rows = read_rows(config)
        tokenizer = make_tokenizer(config, source_rows.splits["sft_train"])
        model = make_model(config, tokenizer)
        check_target_modules(model, config.lora)  # before any stage trains

        # The tokens.
        positions = loading.max_positions(model)
        first = first_tokens(tokenizer, config.base.bos, config.data.chat_template)
        limits = split_limits(config.data, positions, first)
        copy_tokens(tokenizer, source_rows, limits, run.partial / "data")
        # Policies sample this many tokens. Recorded here, because another number is another input
        # for later stages even if it changes no post.
        sampled = {"max_summary_tokens": config.data.max_summary_tokens}
        write_json(run.partial / "data" / "sampled.json", sampled)
        if config.data.chat_template and model.generation_config is not None:
            model.generation_config.eos_token_id = tokenizer.eos_token_id
        loading.save_model(model, tokenizer, run.partial / "model")

        results = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "vocabulary": len(tokenizer),
            "positions": positions,
            **describe(run, source_rows, limits),
        }
        if fetched:
            results["hub"] = [source.record for source in fetched]
        for remark in [
            *eos_remarks(tokenizer, model, config.data.chat_template),
            *remarks(results, run.folder / "data" / SKIPPED_FILE),
        ]:
            print(*folded(remark), sep="\n", file=sys.stderr, flush=True)
        run.finish(results)


def fetch_all(config: Config) -> list[Fetched]:
    """Fetch everything that the stage takes from the hub, and print what and how much.

    Raises UserError for what the hub or its cache does not have.
    """
    downloads: list[tuple[Callable[[Source], Fetched], Source]] = []
    if config.data.source == HUB:
        for source in dict.fromkeys(hub_sources(config.data)):  # both may be the same
            downloads.append((fetch_rows, source))
    if config.base.tokenizer not in ("", TRAIN_TOKENIZER):
        downloads.append((fetch_tokenizer, model_source("base.tokenizer", config.base.tokenizer)))
    if config.base.checkpoint != RANDOM:
        downloads.append((fetch_model, _checkpoint(config)))

    fetched = []
    for fetch, source in downloads:
        if source.is_folder:
            continue
        started = time.monotonic()
        print(f"fetch {source.label}", flush=True)
        result = fetch(source)
        print(f"  {result.size}, {time.monotonic() - started:.0f} s", flush=True)
        fetched.append(result)
    return fetched


# -- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SourceRows:
    """The rows that were read, before they are tokenized."""

    splits: dict[str, list[LocatedRow]]
    """By the name of the tokenized split: pairs about news articles are a split of their own."""
    bad_rows: BadRows
    published: dict[str, dict[str, int]]
    """For splits of published data sets: the number of rows read, and the published number."""


def read_rows(config: Config) -> SourceRows:
    """The rows that the settings use, checked."""
    is_builtin = config.data.source == TOY
    source = str(world_folder(config)) if is_builtin else config.data.source
    bad_rows = BadRows(config.data.on_bad_row)
    all_splits = read_source(config.data, source, bad_rows, config.needed_splits)
    notes = describe_whole_prompts(all_splits)
    if not is_builtin:
        notes = describe_unread(source) + notes
    for line in notes:
        print(line, flush=True)
    published = compare_with_published(config.data, all_splits)
    splits = subsample(config.data, all_splits)

    # News articles occur only among the validation comparisons (Huang et al. 2024, detail 1).
    validation_pairs = splits.get(COMPARISONS[1], [])
    articles = [(where, row) for where, row in validation_pairs if is_cnndm(row)]
    for name in COMPARISONS:
        if name in splits:
            splits[name] = [(where, row) for where, row in splits[name] if not is_cnndm(row)]
            if not splits[name]:
                raise UserError(f"{name} contains only news articles: add comparisons of posts")
    if articles:
        splits[CNNDM] = articles
    return SourceRows(splits=splits, bad_rows=bad_rows, published=published)


def split_limits(data: Data, positions: int, first: tuple[int, ...]) -> dict[str, Limits]:
    """The length limits of each tokenized split; the tokens `first` begin every query."""
    of_posts = Limits(
        query=data.max_query_tokens,
        response=data.max_summary_tokens,
        query_response=data.max_query_summary_tokens,
        setting="data.max_summary_tokens",
        sampled=data.max_summary_tokens,
        positions=positions,
        first=first,
        prompt=data.prompt,
        chat_template=data.chat_template,
    )
    of_comparisons = replace(
        of_posts,
        response=data.max_comparison_tokens,
        query_response=data.max_query_comparison_tokens,
        setting="data.max_comparison_tokens",
        sampled=0,
    )
    of_articles = replace(
        CNNDM_LIMITS, positions=positions, first=first, chat_template=data.chat_template
    )

    limits = dict.fromkeys((*POSTS, PPO_TRAIN), of_posts)
    limits |= dict.fromkeys(COMPARISONS, of_comparisons)
    limits[CNNDM] = of_articles
    return limits


def describe(run: Run, source_rows: SourceRows, limits: dict[str, Limits]) -> dict[str, Any]:
    """The part of the results that is about data: lengths, and rows kept and skipped by kind."""
    folder = run.partial / "data"
    skipped_rows = []
    if (folder / SKIPPED_FILE).exists():
        skipped_rows = read_lines(folder / SKIPPED_FILE)
    skipped_places = {row["where"] for row in skipped_rows}

    lengths = {}
    counts = {}
    halves = {}
    kept = {}
    for name, located_rows in source_rows.splits.items():
        split = load_split(folder, name)
        kept[name] = [row for where, row in located_rows if where not in skipped_places]
        lengths[name] = length_report(split)
        counts[name] = {
            "rows": len(split),
            "skipped": sum(row["split"] == name for row in skipped_rows),
            **count_over_limit(split, limits[name]),
        }
        if "chosen" in split.columns:
            counts[name] |= count_odd_comparisons(kept[name])
        # The reward model may be trained on only one half of the training pairs (`rm.pairs`).
        if name == COMPARISONS[0]:
            for half in ("even", "odd"):
                halves[half] = sum(in_half(row["id"], half) for row in split.rows)
    return {
        "tokens": lengths,
        "rows": counts,
        "halves": halves,
        "learned": count_repeated_rows(kept),
        "published": source_rows.published,
        "changed": dict(source_rows.bad_rows.changes),
    }


def remarks(results: dict[str, Any], skipped_file: Path) -> list[str]:
    """What a user should know about the rows, one line each."""
    lines = []
    counts = results["rows"].values()

    over_limit = sum(split["over_limit"] for split in counts)
    if over_limit:
        most_over = max(split["most_over"] for split in counts)
        lines.append(
            f"{over_limit:,} rows are up to {most_over:,} tokens over data.max_*: "
            "they are used whole, as intended"
        )

    repeated = results["learned"]
    for kind in ("posts", "pairs"):
        if repeated[kind]:
            lines.append(
                f"held-out {kind}: {repeated[kind]:,} of {repeated[f'of_{kind}']:,} are in the "
                "training data too, by their text: evaluation uses rows that were trained on"
            )

    for change, count in results["changed"].items():
        lines.append(f"{count:,} {change}")

    skipped = sum(split["skipped"] for split in counts)
    if skipped:
        lines.append(f"{skipped:,} bad rows were skipped; the reasons are in {skipped_file}")

    differences = describe_differences(results["published"])
    if differences:
        lines.append(differences)
    return lines


def eos_remarks(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, chat_template: bool = False
) -> list[str]:
    """A line if the EOS in the checkpoint's config differs from its tokenizer's.

    Every stage uses the tokenizer's, so the model would have to learn an EOS that it never saw.
    With a chat template, the line says which token ends an answer.
    """
    if chat_template:
        return [f"answers end with {tokenizer.eos_token}, as in the tokenizer's chat template"]
    eos_ids = model.config.get_text_config().eos_token_id
    if eos_ids is None:
        return []
    if not isinstance(eos_ids, list):
        eos_ids = [eos_ids]
    if tokenizer.eos_token_id in eos_ids:
        return []
    names = ", ".join(str(name) for name in tokenizer.convert_ids_to_tokens(eos_ids))
    return [
        f"summaries end with the tokenizer's EOS {tokenizer.eos_token}, but the checkpoint's "
        f"config names {names}: to use that, set eos_token in tokenizer_config.json"
    ]


# -- tokenizer and model ---------------------------------------------------------------------------


def make_tokenizer(config: Config, train_posts: Sequence[LocatedRow]) -> PreTrainedTokenizerBase:
    """The preset's tokenizer with [PAD] added. With a chat template, EOS ends the answer's turn."""
    tokenizer = _plain_tokenizer(config, train_posts)
    if config.data.chat_template:
        end_answers_as_the_template(tokenizer)
    return tokenizer


def _plain_tokenizer(config: Config, train_posts: Sequence[LocatedRow]) -> PreTrainedTokenizerBase:
    if not config.base.tokenizer:
        return load_tokenizer(_checkpoint_folder(config))
    if config.base.tokenizer != TRAIN_TOKENIZER:
        source = model_source("base.tokenizer", config.base.tokenizer)
        return load_tokenizer(fetch_tokenizer(source).folder)

    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.base.vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f"{format_post(row, config.data.prompt)} {row['summary']}" for _, row in train_posts)
    tokenizer.train_from_iterator(texts, trainer)
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN)
    fast_tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return fast_tokenizer


def _checkpoint(config: Config) -> Source:
    checkpoint = config.base.checkpoint
    if checkpoint == SMOLLM2 and not Path(checkpoint).is_dir():
        raise UserError(
            f"base.checkpoint: there is no {checkpoint}: run"
            " `.venv/bin/python -m tests.lib.offline_models smollm2`, or name a hub id,"
            " SET=base.checkpoint=HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    return model_source("base.checkpoint", checkpoint)


def _checkpoint_folder(config: Config) -> Path:
    """The checkpoint's folder. An adapter is refused here, before its tokenizer is missed."""
    folder = fetch_model(_checkpoint(config)).folder
    check_no_adapter(folder)
    return folder


def make_model(config: Config, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The base checkpoint, or a GPT-NeoX with new weights drawn from the run's seed.

    Raises UserError if the tokenizer has ids that the model's embedding lacks.
    """
    base = config.base
    if base.checkpoint != RANDOM:
        model = loading.load_policy(_checkpoint_folder(config))
        register_head_class(model.config, base.checkpoint)
        if tokenizer.pad_token_id > model.config.vocab_size:
            raise UserError(
                f"tokenizer has {tokenizer.pad_token_id} tokens, but {base.checkpoint} has only "
                f"{model.config.vocab_size} embeddings: use the checkpoint's own tokenizer"
            )
        return model

    # Enough positions for every accepted row, and at least as many as Pythia has.
    data = config.data
    longest_response = FAR_OVER * max(data.max_summary_tokens, data.max_comparison_tokens)
    positions = max(data.max_query_tokens + longest_response, 2048)
    embeddings = EMBEDDING_MULTIPLE * math.ceil(len(tokenizer) / EMBEDDING_MULTIPLE)
    shape = GPTNeoXConfig(
        vocab_size=embeddings,
        hidden_size=base.hidden_size,
        num_hidden_layers=base.num_layers,
        num_attention_heads=base.num_heads,
        intermediate_size=4 * base.hidden_size,
        max_position_embeddings=positions,
        # GPT-NeoX's 0.02 suits wide models; in a narrow one signals fade, and learning to copy
        # takes three times as many updates.
        initializer_range=base.hidden_size**-0.5,
        # Pythia rotates a quarter of a head's dimensions. A quarter of these narrow heads is too
        # little to find a word by its place: with all of them the model learns to copy about twice
        # as fast.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(stream_seed(config.seed, "base"))
    return GPTNeoXForCausalLM(loading.with_dropout(shape, probability=0.0))


# -- tokens ----------------------------------------------------------------------------------------


def copy_tokens(
    tokenizer: PreTrainedTokenizerBase,
    source_rows: SourceRows,
    limits: dict[str, Limits],
    target: Path,
) -> None:
    """Put the tokenized splits into `target`; they are tokenized only if no earlier run did so."""

    def tokenize_all(folder: Path) -> None:
        for name, located_rows in source_rows.splits.items():
            is_comparisons = name in (*COMPARISONS, CNNDM)
            tokenize = tokenize_comparisons if is_comparisons else tokenize_posts
            split = tokenize(located_rows, tokenizer, limits[name], name, source_rows.bad_rows)
            save_split(split, folder, name)
        source_rows.bad_rows.write(folder)

    name = f"tokens-{_tokens_key(tokenizer, source_rows, limits)}"
    cache = cached_folder(paths.RUNS / "cache" / name, tokenize_all)
    shutil.rmtree(target, ignore_errors=True)  # of an interrupted attempt
    # Copied, not linked: a change to one run's files must not change another run's.
    shutil.copytree(cache, target, ignore=shutil.ignore_patterns(HASHES))


def _tokens_key(
    tokenizer: PreTrainedTokenizerBase, source_rows: SourceRows, limits: dict[str, Limits]
) -> str:
    """16 hex digits that change if anything changes on which the tokens depend."""
    hashes = code_of(TOKENIZING_MODULE)
    code = {file: hashes[file] for file in hashes if file.startswith(TOKENIZING_CODE)}
    digest = hashlib.sha256(f"{code}{tokenizer.backend_tokenizer.to_str()}".encode())
    digest.update(f"EOS {tokenizer.eos_token_id}".encode())  # the backend does not know it
    if any(limit.chat_template for limit in limits.values()):
        digest.update(str(tokenizer.chat_template).encode())
    for name, located_rows in source_rows.splits.items():
        digest.update(f"{name}{limits[name]}".encode())
        for where, row in located_rows:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
            if source_rows.bad_rows.should_skip:  # the list of skipped rows is cached, too
                digest.update(where.encode())
    digest.update(json.dumps(source_rows.bad_rows.skipped).encode())
    return digest.hexdigest()[:16]
