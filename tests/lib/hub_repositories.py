"""Repositories with the layouts of the real ones, small: posts, comparisons, a Pythia."""

import io
import json
from pathlib import Path
from typing import Any

import torch

from tests.lib.hub_server import Files, Hub, Repository

POSTS = "vwxyzjn/summarize_from_feedback_tldr_3_filtered"
COMPARISONS = "openai/summarize_from_feedback"
CONVERTED = "refs/convert/parquet"
PYTHIA = "EleutherAI/pythia-14m-deduped"
Rows = list[dict[str, Any]]


def parquet(rows: Rows, features: Any = None) -> bytes:
    """Rows as `datasets` writes them, with its features in the file's metadata."""
    from datasets import Dataset

    target = io.BytesIO()
    Dataset.from_list(rows, features=features).to_parquet(target)
    return target.getvalue()


def comparison_features() -> Any:
    """The columns that the real loading script declares: a split may contain only nulls."""
    from datasets import Features, Value

    text = Value("string")
    number = Value("int32")
    return Features(
        {
            "info": {
                "id": text,
                "post": text,
                "title": text,
                "subreddit": text,
                "site": text,
                "article": text,
            },
            "summaries": [{"text": text, "policy": text, "note": text}],
            "choice": number,
            "worker": text,
            "batch": text,
            "split": text,
            "extra": {"confidence": number},
        }
    )


def add_posts(hub: Hub, train: Rows, validation: Rows, test: Rows) -> Repository:
    """tldr_3_filtered: a card, and three splits as Parquet below `data/`."""
    card = (
        "---\n"
        "configs:\n"
        "- config_name: default\n"
        "  data_files:\n"
        "  - split: train\n"
        "    path: data/train-*\n"
        "  - split: validation\n"
        "    path: data/validation-*\n"
        "  - split: test\n"
        "    path: data/test-*\n"
        "---\n"
        "# TL;DR\n"
    )
    repository = hub.add("datasets", POSTS)
    repository.commit(
        {
            ".gitattributes": b"",
            "README.md": card.encode(),
            "data/train-00000-of-00001.parquet": parquet(train),
            "data/validation-00000-of-00001.parquet": parquet(validation),
            "data/test-00000-of-00001.parquet": parquet(test),
        }
    )
    return repository


def converted(train: Rows, validation: Rows) -> Files:
    """The branch that the hub's bot writes: a folder for each configuration, and no card."""
    axis = parquet([{"info": {"id": "x"}, "summary": {"text": "y"}}])
    columns = comparison_features()
    return {
        ".gitattributes": b"*.parquet filter=lfs\n",
        "axis/test/0000.parquet": axis,
        "axis/validation/0000.parquet": axis,
        "comparisons/train/0000.parquet": parquet(train, columns),
        "comparisons/validation/0000.parquet": parquet(validation, columns),
    }


def add_comparisons(hub: Hub, train: Rows, validation: Rows) -> Repository:
    """summarize_from_feedback: a loading script on main, its rows on refs/convert/parquet."""
    repository = hub.add("datasets", COMPARISONS)
    script = b"raise RuntimeError('a loading script was run')\n"
    repository.commit({"README.md": b"# Card\n", "summarize_from_feedback.py": script})
    repository.commit(converted(train, validation), CONVERTED)
    return repository


def old_buffers(layers: int, head: int, positions: int) -> dict[str, torch.Tensor]:
    """What checkpoints of 2023 contain next to weights: causal masks and rotary frequencies."""
    mask = torch.ones(positions, positions, dtype=torch.bool).tril()[None, None]
    rotated = head // 4
    frequencies = 1.0 / 10000 ** (torch.arange(0, rotated, 2).float() / rotated)
    buffers = {}
    for layer in range(layers):
        name = f"gpt_neox.layers.{layer}.attention"
        buffers[f"{name}.bias"] = mask.clone()
        buffers[f"{name}.masked_bias"] = torch.tensor(-1e9)
        buffers[f"{name}.rotary_emb.inv_freq"] = frequencies.clone()
    return buffers


def pythia_files(seed: int = 1) -> Files:
    """A small GPT-NeoX like Pythia: float16, with old buffers, as `.bin` and `.safetensors`."""
    from safetensors.torch import save
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    fields = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 512,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(seed)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**fields, bos_token_id=0, eos_token_id=0)).half()
    head = fields["hidden_size"] // fields["num_attention_heads"]
    buffers = old_buffers(fields["num_hidden_layers"], head, fields["max_position_embeddings"])
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()} | buffers
    pickled = io.BytesIO()
    torch.save(weights, pickled)
    config = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu",
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-5,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.24.0",
        "use_cache": True,
        "use_parallel_residual": True,
        **fields,
    }
    return {
        "config.json": json.dumps(config).encode(),
        "pytorch_model.bin": pickled.getvalue(),
        "model.safetensors": save(weights, metadata={"format": "pt"}),
    }


def add_pythia(hub: Hub, tokenizer: Files, files: Files) -> Repository:
    """A model repository of weights and tokenizer files."""
    repository = hub.add("models", PYTHIA)
    repository.commit({".gitattributes": b"", "README.md": b"# Pythia\n", **tokenizer, **files})
    return repository


def small_tokenizer(rows: Rows, folder: Path) -> Files:
    """A tokenizer of at most 500 tokens with GPT-NeoX's special ones: EOS is 0, padding is 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([row["post"] for row in rows], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}
