"""Small configurations of model families, and random models of them."""

import copy
from typing import Any

import torch
from transformers import (
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from stages.models.loading import with_dropout

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


def random_model(auto_class: Any, family: PreTrainedConfig, vocabulary: int = 50) -> Any:
    """A model of a family with random weights, in float64 and without dropout."""
    config = with_dropout(copy.deepcopy(family), 0.0)
    config.vocab_size = vocabulary
    config.initializer_range = 0.3  # large, so that tokens and positions make a difference
    config.num_labels = 1
    torch.manual_seed(5)
    return auto_class.from_config(config, dtype=torch.float64).eval()
