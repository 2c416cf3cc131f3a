"""LoRA through `peft`: small matrices beside frozen weights, and the same model without them.

An adapter is put into a plain transformers model, which stays of its class: what runs, samples or
saves models needs to know nothing of it. Before it is saved it is merged, so that what lies on disk
is a plain model again. The adapted policy with its adapter off is the SFT model: PPO's ref_policy
is that, and no second copy is held.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from stages.learning.loop import stream_seed
from stages.settings.config import Config, Lora, UserError

HEAD = "classifier"
ALL_LINEAR = "all-linear"


def adapt(model: PreTrainedModel, config: Config, stage: str, part: str = "") -> None:
    """Put a fresh adapter into a model where the settings say so for this stage; else do nothing.

    Every weight is frozen but the adapter's and, in a reward model or critic, the head's: a head is
    a single row and learned whole. The model's outputs are as before, because one of an adapter's
    two matrices is 0. The other is a function of seed, stage and `part`, the network's name in it.
    Raises UserError where peft is missing or the model has no such modules.
    """
    lora = config.lora
    if stage not in lora.adapted_stages:
        return
    peft = _peft(lora)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=_targets(lora),
        exclude_modules=[HEAD] if hasattr(model, HEAD) else None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(stream_seed(config.seed, f"{stage} adapter {part}"))
        try:
            peft.inject_adapter_in_model(settings, model)
        except ValueError as error:
            first = str(error).splitlines()[0].split(". ")[0]
            raise UserError(f"lora.target_modules: {first}") from None
    if hasattr(model, HEAD):
        model.classifier.requires_grad_(True)


def merge(model: nn.Module) -> None:
    """Add the adapter's product to the weights that it stands beside, and take it out.

    The model is a plain one again, with the same outputs but for rounding; one without an adapter
    stays as it is.
    """
    for name, layer in list(adapter_layers(model)):
        layer.merge(safe_merge=True)  # raises ValueError rather than write a NaN
        model.set_submodule(name, layer.get_base_layer())


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


class WithoutAdapter(nn.Module):
    """A model with its adapter off, called like the model and made of its very weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model said before it was adapted; nothing is learned from it."""
        with torch.no_grad(), adapter_off(self.model):
            return self.model(*args, **kwargs)


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and layer of everything in a model that holds an adapter."""
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            yield name, layer


def _targets(lora: Lora) -> str | list[str]:
    if lora.target_modules == ALL_LINEAR:
        return ALL_LINEAR
    return [name.strip() for name in lora.target_modules.split(",")]


def _peft(lora: Lora) -> Any:
    try:
        import peft
    except ImportError:
        raise UserError(
            f"lora.rank is {lora.rank} but peft is missing: run `pip install peft`, or set "
            "lora.rank=0"
        ) from None
    return peft
