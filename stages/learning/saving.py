"""A network that has learned becomes a plain model on disk, which others load without our code."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stages.learning.heads import head_name
from stages.learning.lora import merge
from stages.learning.models import load_policy, load_reward_model, save_model
from stages.learning.sharding import gathered, is_sharded, whole_weights


def keep_model(
    accelerator: Accelerator, network: Any, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> PreTrainedModel:
    """Merge adapters, write the plain model, and return it whole on this process's device.

    The main process writes. A sharded network cannot be used afterwards: what is returned was read
    from what was written. All processes must call this.
    """
    model = accelerator.unwrap_model(network)
    if not is_sharded(model):
        merge(model)
        if accelerator.is_main_process:
            save_model(model, tokenizer, folder)
        return model
    with gathered(model):
        merge(model)
        weights = whole_weights(model, accelerator.is_main_process)
        if accelerator.is_main_process:
            save_model(model, tokenizer, folder, weights)
    accelerator.wait_for_everyone()
    load = load_reward_model if head_name(model) else load_policy
    return load(folder).to(accelerator.device)
