"""Decoder layers compiled by torch: on a GPU with triton, for passes without a cache.

One graph serves all layers and lengths, and the names of weights do not change. If a compilation
fails, one line says so, and all layers run uncompiled from then on. torch's own variable
TORCH_COMPILE_DISABLE=1 turns compilation off.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import is_triton_available
from torch import nn
from transformers.cache_utils import Cache

from stages.config.errors import first_line, say_error
from stages.config.out_of_memory import is_out_of_memory
from stages.training.sharding import decoder_layers


@dataclass
class CompilerState:
    """The state of compilation. It is global to a process, as torch's compiler is."""

    devices: tuple[str, ...] = ("cuda",)
    """Device types for which layers are compiled; none after a failure."""
    backend: Any = "inductor"
    is_on: bool = False
    """Whether compiled layers are in use."""


COMPILER = CompilerState()


def recomputes_activations(network: nn.Module) -> bool:
    """Return whether gradient checkpointing is on."""
    return any(getattr(module, "gradient_checkpointing", False) for module in network.modules())


def compile_layers(network: nn.Module, device: torch.device) -> None:
    """Compile the decoder layers of a network, where torch can, for its later forward passes.

    Networks with gradient checkpointing stay uncompiled. Sharded ones must not be passed.
    """
    can_compile = device.type in COMPILER.devices and is_triton_available()
    if not can_compile or recomputes_activations(network):
        return

    COMPILER.is_on = True
    # A layer has one graph for each combination of: learning or not, dtype, with or without a mask,
    # one row or several.
    torch._dynamo.config.recompile_limit = 64
    # Compile the backward pass together with the forward pass, where a failure is caught.
    if hasattr(
        torch._functorch.config, "force_non_lazy_backward_lowering"
    ):  # a recent option of torch
        torch._functorch.config.force_non_lazy_backward_lowering = True
    for layer in decoder_layers(network):
        layer.forward = _with_fallback(layer.forward)


def _with_fallback(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled forward function, which falls back to the original one."""
    compiled = torch.compile(forward, dynamic=True, backend=COMPILER.backend)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Sampling passes a cache; its steps are not compiled.
        has_cache = any(isinstance(value, Cache) for value in (*args, *kwargs.values()))
        if has_cache or not COMPILER.is_on:
            return forward(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # If the layer itself is at fault, this raises its error.
            output = forward(*args, **kwargs)
            COMPILER.devices = ()
            COMPILER.is_on = False
            say_error(f"layers run uncompiled, because torch.compile failed: {first_line(error)}")
            return output

    return run
