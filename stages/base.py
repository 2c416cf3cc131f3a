"""Stage 0: what a preset starts from: tokenised posts, the tokenizer and the base checkpoint.

The checkpoint is a hub id or folder, or a randomly initialised GPT-NeoX (Pythia's architecture)
for presets that need no download. The tokenizer is the checkpoint's, a given folder, or a BPE
trained on the preset's own posts. Tokens are cached by content and shared between runs.
"""

import hashlib
import json
import os
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from stages.learning.heads import require_heads
from stages.learning.loop import stream_seed
from stages.learning.models import load_policy, load_tokenizer, save_model, with_dropout
from stages.posts.readers import SPLITS, Located, format_post, is_cnndm, read_source
from stages.posts.tokens import (
    CNNDM,
    CNNDM_LIMITS,
    Limits,
    length_report,
    load_split,
    save_split,
    tokenize_comparisons,
    tokenize_posts,
)
from stages.posts.world import fresh_folder, put_folder, world_folder
from stages.running.start import run_stage
from stages.runs import Run, open_stage
from stages.settings import config as settings
from stages.settings.config import RANDOM, TOY, TRAIN_TOKENIZER, Config, Data, UserError

EOS_TOKEN = "<|endoftext|>"
EMBEDDING_MULTIPLE = 64  # Pythia pads its vocabulary too: [PAD] fits without a resized embedding
CACHE_VERSION = 1


def make_base(config: Config) -> None:
    """Run the stage. Raises UserError for bad rows, a bad tokenizer or a missing checkpoint."""
    with open_stage(config, "base") as run:
        source = world_folder(config) if config.data.source == TOY else config.data.source
        located = drawn_rows(config.data, dict(read_source(config.data, str(source))))
        tokenizer = make_tokenizer(config, located["sft_train"])
        link_tokens(config, tokenizer, located, run.partial / "data")
        model = make_model(config, tokenizer)
        save_model(model, tokenizer, run.partial / "model")
        run.finish(describe(run, model, tokenizer))


def drawn_rows(data: Data, located: dict[str, list[Located]]) -> dict[str, list[Located]]:
    """The rows of each split that the settings use, in their order.

    The draw depends on the split alone, so that seeds and sizes are compared on the same rows.
    Raises UserError if a split has fewer rows than are asked for.
    """
    drawn = dict(located)
    for name, count in data.rows.items():
        there = len(located[name])
        if count > there:
            raise UserError(f"data.*: {count} rows of {name} are asked for, there are {there}")
        if count:
            places = sorted(random.Random(name).sample(range(there), count))
            drawn[name] = [located[name][place] for place in places]
    return drawn


def describe(
    run: Run, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The stage's results: sizes and lengths."""
    folder = run.partial / "data"
    names = sorted(path.stem for path in folder.glob("*.safetensors"))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": len(tokenizer),
        "source": run.config.data.source,
        "tokens": {name: length_report(load_split(folder, name)) for name in names},
    }


def make_tokenizer(config: Config, train: list[Located]) -> PreTrainedTokenizerBase:
    """The preset's tokenizer with [PAD] added."""
    if config.base.tokenizer != TRAIN_TOKENIZER:
        return load_tokenizer(config.base.tokenizer or config.base.checkpoint)
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.base.vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (format_post(row) + " " + row["summary"] for _, row in train)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN)
    fast.add_special_tokens({"pad_token": "[PAD]"})
    return fast


def make_model(config: Config, tokenizer: PreTrainedTokenizerBase) -> torch.nn.Module:
    """The base checkpoint, or a GPT-NeoX with new weights drawn from the run's seed.

    Raises UserError if the tokenizer has ids that the model's embedding lacks.
    """
    base = config.base
    if base.checkpoint != RANDOM:
        model = load_policy(base.checkpoint)
        require_heads(model.config, base.checkpoint)
        if tokenizer.pad_token_id > model.config.vocab_size:
            raise UserError(
                f"tokenizer has {tokenizer.pad_token_id} tokens, {base.checkpoint} only "
                f"{model.config.vocab_size} embeddings: give the checkpoint's own tokenizer"
            )
        return model
    longest = max(config.data.max_query_tokens + config.data.max_summary_tokens, 2048)
    torch.manual_seed(stream_seed(config.seed, "base"))
    return GPTNeoXForCausalLM(
        with_dropout(
            GPTNeoXConfig(
                vocab_size=-(-len(tokenizer) // EMBEDDING_MULTIPLE) * EMBEDDING_MULTIPLE,
                hidden_size=base.hidden_size,
                num_hidden_layers=base.num_layers,
                num_attention_heads=base.num_heads,
                intermediate_size=4 * base.hidden_size,
                max_position_embeddings=longest,
                # GPT-NeoX's 0.02 suits wide models; in a narrow one signals fade, and learning to
                # copy takes three times as many updates.
                initializer_range=base.hidden_size**-0.5,
                # Pythia rotates a quarter of a head's dimensions. A quarter of these narrow heads
                # is too little to find a word by its place: with all of them the model learns to
                # copy about twice as fast.
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 1.0,
                },
                bos_token_id=tokenizer.eos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            ),
            probability=0.0,
        )
    )


def link_tokens(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    located: dict[str, list[Located]],
    target: Path,
) -> None:
    """Put the tokenised splits into `target`; they are tokenised only if no earlier run did so."""
    cache = settings.RUNS / "cache" / f"tokens-{_tokens_key(config, tokenizer, located)}"
    if not cache.exists():
        partial = fresh_folder(cache)
        _tokenize_all(config, tokenizer, located, partial)
        put_folder(partial, cache)
    shutil.rmtree(target, ignore_errors=True)  # of an attempt that was interrupted
    target.mkdir()
    for path in cache.iterdir():
        try:
            os.link(path, target / path.name)
        except OSError:  # another file system
            shutil.copy(path, target / path.name)


def _tokenize_all(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    located: dict[str, list[Located]],
    folder: Path,
) -> None:
    data = config.data
    posts = Limits(
        query=data.max_query_tokens,
        response=data.max_summary_tokens,
        query_response=data.max_query_summary_tokens,
    )
    pairs = Limits(
        query=data.max_query_tokens,
        response=data.max_comparison_tokens,
        query_response=data.max_query_comparison_tokens,
    )
    for name in SPLITS:
        if name.startswith("sft"):
            split = tokenize_posts(located[name], tokenizer, posts, name)
        else:
            about_posts = [one for one in located[name] if not is_cnndm(one[1])]
            if not about_posts:
                raise UserError(f"{name} is about news articles alone: add comparisons of posts")
            split = tokenize_comparisons(about_posts, tokenizer, pairs, name)
        save_split(split, folder, name)
    # News articles occur among the validation comparisons only (Huang et al. 2024, detail 1).
    articles = [one for one in located["comparisons_validation"] if is_cnndm(one[1])]
    if articles:
        save_split(tokenize_comparisons(articles, tokenizer, CNNDM_LIMITS, CNNDM), folder, CNNDM)


def _tokens_key(
    config: Config, tokenizer: PreTrainedTokenizerBase, located: dict[str, list[Located]]
) -> str:
    digest = hashlib.sha256(f"{CACHE_VERSION}{tokenizer.backend_tokenizer.to_str()}".encode())
    limits = {key: value for key, value in asdict(config.data).items() if key.startswith("max_")}
    digest.update(json.dumps(limits, sort_keys=True).encode())
    for name in SPLITS:
        digest.update(name.encode())
        for _, row in located[name]:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def main(argv: list[str] | None = None) -> None:
    """Command line of the stage."""
    run_stage("base", make_base, argv, "stage 0: base checkpoint, tokenizer, tokens")


if __name__ == "__main__":
    main()
