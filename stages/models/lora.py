"""LoRA through `peft`: small matrices next to frozen weights, and the same model without them.

An adapter is put into a plain transformers model, which keeps its class. So the code that runs,
samples or saves models need not know about adapters. An adapter is merged before the model is
saved, so the models on disk are plain. With its adapter off, the policy is the SFT model: it serves
as PPO's ref_policy, and no second copy is needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.lora import ALL_LINEAR, Lora
from stages.models.heads import head_name, scalar_head
from stages.models.loading import load_policy, load_reward_model, save_model
from stages.models.policy import PolicyModel
from stages.training.random_streams import stream_seed
from stages.training.sharding import gathered, is_sharded


def adapt(model: PreTrainedModel, config: Config, stage: str, part: str = "") -> None:
    """Put a new adapter into a model if the settings say so for this stage; otherwise do nothing.

    Only the adapter learns; in a reward model or critic the head learns too, because it is a single
    row. All other weights are frozen. The model's outputs are as before, because one of an
    adapter's two matrices is 0. The other matrix depends on seed, stage and `part`, the network's
    name in the stage. Raises UserError as `check_target_modules` does.
    """
    if stage not in config.lora.adapted_stages:
        return
    import peft  # importing it takes a second

    head = head_name(model)
    adapter_config = peft.LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        target_modules=_target_modules(model, config.lora),
        exclude_modules=[head] if head else None,
    )

    # peft draws from the global generators, which must be as before afterwards.
    device = next(model.parameters()).device
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        torch.manual_seed(stream_seed(config.seed, f"{stage} adapter {part}"))
        peft.inject_adapter_in_model(adapter_config, model)
    if head:
        scalar_head(model).requires_grad_(True)


def check_target_modules(model: PreTrainedModel, lora: Lora) -> None:
    """Raise UserError if adapters are on and `lora.target_modules` names no layer of this model."""
    if lora.adapted_stages:
        _target_modules(model, lora)


def _target_modules(model: PreTrainedModel, lora: Lora) -> str | list[str]:
    """The layers that get adapters, as peft takes them: `all-linear`, or a list of full names.

    Every name of the setting must match a layer. peft itself ignores one that does not, as long as
    another one does.
    """
    if lora.target_names == (ALL_LINEAR,):
        return ALL_LINEAR

    layer_names = _adaptable_layers(model)
    targets = []
    for target in lora.target_names:
        matches = [name for name in layer_names if f".{name}".endswith(f".{target}")]
        if not matches:
            short_names = sorted({name.rpartition(".")[2] for name in layer_names})
            raise UserError(
                f"lora.target_modules: {model.config.model_type} has no linear layer {target!r}: "
                f"choose from {', '.join(short_names)}, or set {ALL_LINEAR}"
            )
        targets += matches
    return targets


def _adaptable_layers(model: PreTrainedModel) -> list[str]:
    """Full names of the linear layers, except for the scalar head and the output layer.

    An output layer may share its weights with the embedding: merging an adapter would change both.
    """
    excluded = {id(model.get_output_embeddings())}
    if head_name(model):
        excluded.add(id(scalar_head(model)))
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, Conv1D)) and id(layer) not in excluded
    ]


def merge(model: nn.Module) -> None:
    """Add the adapter's product to the weights next to it, and remove the adapter.

    The result is a plain model, whose outputs differ only by rounding. A model without an adapter
    does not change.
    """
    for name, layer in list(adapter_layers(model)):
        layer.merge(safe_merge=True)  # raises ValueError rather than writing a NaN
        model.set_submodule(name, layer.get_base_layer())


def keep_model(
    accelerator: Accelerator, network: Any, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> PreTrainedModel:
    """Merge adapters, write the plain model, and return it unsharded on this process's device.

    `network` is a reward model, a critic or a `PolicyModel`, as the accelerator has wrapped it. The
    main process writes. A sharded network cannot be used afterwards: the returned model is read
    from what was written. All processes must call this.
    """
    unwrapped = accelerator.unwrap_model(network)
    model = unwrapped.model if isinstance(unwrapped, PolicyModel) else unwrapped
    if not is_sharded(unwrapped):
        merge(model)
        if accelerator.is_main_process:
            save_model(model, tokenizer, folder)
        return model

    with gathered(unwrapped):
        merge(model)
        if accelerator.is_main_process:
            weights = {
                name: parameter.detach().to("cpu", copy=True)
                for name, parameter in model.named_parameters()
            }
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
        # Not isinstance, because importing peft takes a second, even in runs without adapters.
        if hasattr(layer, "lora_A"):
            yield name, layer
