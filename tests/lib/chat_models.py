"""Tokenizers and tiny models of two chat families, with the templates that their families use."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.models.tokenizers import load_tokenizer
from tests.lib.families import CONFIGS, SPARE

# As in SmolLM2 and Qwen: no BOS, and the base model's EOS does not end a turn.
CHATML = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# As in Gemma: BOS, other names of the roles, no system message, and turns that alternate.
GEMMA = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant') }}
{%- endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\n' + (message['content'] | trim) + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
TEMPLATES = {"chatml": CHATML, "gemma": GEMMA}
CONTROL_TOKENS = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "gemma": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
}
END_OF_TURN = {"chatml": "<|im_end|>", "gemma": "<end_of_turn>"}


def save_chat_tokenizer(tokenizer_folder: Path, folder: Path, family: str) -> Path:
    """A copy of a tokenizer with the control tokens and the chat template of a family."""
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL_TOKENS[family]})
    if family == "gemma":
        tokenizer.bos_token = "<bos>"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A",
            pair="<bos> $A $B",
            special_tokens=[("<bos>", tokenizer.bos_token_id)],
        )
    tokenizer.chat_template = TEMPLATES[family]
    tokenizer.save_pretrained(folder)
    return folder


def save_chat_checkpoint(tokenizer_folder: Path, folder: Path, family: str) -> Path:
    """A random chat model of a family with its tokenizer."""
    model_type = {"chatml": "llama", "gemma": "gemma"}[family]
    saved = save_chat_tokenizer(tokenizer_folder, folder.with_name(f"{folder.name}-t"), family)
    config = copy.deepcopy(CONFIGS[model_type])
    config.vocab_size = load_tokenizer(saved).pad_token_id + SPARE
    config.eos_token_id = 0
    config.bos_token_id = 0
    config.initializer_range = 0.1
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for path in saved.iterdir():
        shutil.copy(path, folder)
    return folder


def write_chats(path: Path, count: int) -> Path:
    """A file of pairs whose prompts are conversations."""
    rows = []
    for number in range(count):
        question = {"role": "user", "content": f"My boss sold bike {number}."}
        rows.append(
            {
                "prompt": [question],
                "chosen": [{"role": "assistant", "content": "boss sold bike."}],
                "rejected": [{"role": "assistant", "content": f"he did {number}"}],
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
