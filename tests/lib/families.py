"""Tiny models of several families, and folders as a hub would hold them."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from stages.models.heads import register_head_class
from stages.models.tokenizers import load_tokenizer

WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**WIDTH, "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gpt_neox": GPTNeoXConfig(**WIDTH, intermediate_size=64),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=512),
    "llama": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**GROUPED),
    "gemma": GemmaConfig(**GROUPED),
    # Without a token-classification class in transformers, and with sliding windows.
    "gemma3_text": Gemma3TextConfig(**GROUPED, sliding_window=16),
    # Without any class of a scalar head.
    "granite": GraniteConfig(**GROUPED),
}
SPARE = 3  # embeddings from [PAD] up, which are no tokens


def random_model(
    auto_class: Any,
    family: PreTrainedConfig,
    dtype: torch.dtype = torch.float64,
    vocabulary: int = 50,
    **options: Any,
) -> Any:
    """A model with random weights over a vocabulary; with one label if it has a head."""
    config = copy.deepcopy(family)
    config.vocab_size = vocabulary
    config.initializer_range = 0.3
    config.num_labels = 1
    register_head_class(config, "random")
    torch.manual_seed(5)
    return auto_class.from_config(config, dtype=dtype, **options).eval()


def save_checkpoint(family: str, tokenizer_folder: Path, folder: Path) -> Path:
    """A random checkpoint with a tokenizer that pads with a real token, as many are published."""
    their_tokenizer = copy_tokenizer(
        tokenizer_folder, folder.with_name(f"{folder.name}-tokenizer"), pad_token="!"
    )
    config = copy.deepcopy(CONFIGS[family])
    config.vocab_size = load_tokenizer(their_tokenizer).pad_token_id + SPARE
    config.eos_token_id = 0
    config.bos_token_id = 0
    config.initializer_range = 0.1
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for path in their_tokenizer.iterdir():
        shutil.copy(path, folder)
    return folder


def copy_tokenizer(tokenizer_folder: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a tokenizer with other entries in its tokenizer_config.json."""
    shutil.copytree(tokenizer_folder, folder)
    edit_json(folder / "tokenizer_config.json", **changes)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Change entries of a JSON file, which need not exist yet."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))
