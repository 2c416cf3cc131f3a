"""LoRA through `peft`: small matrices beside frozen weights, and the same model without them.

An adapter is put into a plain transformers model, which keeps its class. So the code that runs,
samples or saves models need not know of adapters. An adapter is merged before the model is saved,
so that plain models lie on disk. With its adapter off, the policy is the SFT model: it serves as
PPO's ref_policy, and no second copy is held.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stages.models.loading import head_name, head_of, load_policy, load_reward_model, save_model
from stages.settings.config import Config
from stages.training.random_streams import stream_seed
from stages.training.sharding import gathered, is_sharded


def adapt(model: PreTrainedModel, config: Config, stage: str, part: str = "") -> None:
    """Put a new adapter into a model if the settings say so for this stage; else do nothing.

    Only the adapter learns; in a reward model or critic the head learns too, as it is a single row.
    All other weights are frozen. The model's outputs are as before, because one of an adapter's two
    matrices is 0. The other matrix depends on seed, stage and `part`, the network's name in the
    stage.
    """
    lora = config.lora
    if stage not in lora.adapted_stages:
        return
    import peft  # it takes a second to load

    head = head_name(model)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules="all-linear",
        exclude_modules=[head] if head else None,
    )
    place = next(model.parameters()).device
    with torch.random.fork_rng([] if place.type == "cpu" else [place]):
        torch.manual_seed(stream_seed(config.seed, f"{stage} adapter {part}"))
        peft.inject_adapter_in_model(settings, model)
    if head:
        head_of(model).requires_grad_(True)


def merge(model: nn.Module) -> None:
    """Add the adapter's product to the weights beside it, and remove the adapter.

    The model is a plain one again, and its outputs change by rounding only. A model without an
    adapter stays as it is.
    """
    for name, layer in list(adapter_layers(model)):
        layer.merge(safe_merge=True)  # raises ValueError rather than write a NaN
        model.set_submodule(name, layer.get_base_layer())


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
        if accelerator.is_main_process:
            parts = model.named_parameters()
            weights = {name: x.detach().to("cpu", copy=True) for name, x in parts}
            save_model(model, tokenizer, folder, weights)
    accelerator.wait_for_everyone()
    load = load_reward_model if head_name(model) else load_policy
    return load(folder).to(accelerator.device)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before it was adapted, for as long as this context lasts."""
    layers = [layer for _, layer in adapter_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and layer of every layer of a model that holds an adapter."""
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            yield name, layer
