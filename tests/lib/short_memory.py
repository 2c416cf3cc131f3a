"""Devices that run out of memory, and a run that is small enough to try them on."""

from typing import Any

import pytest
import torch
from transformers import GPTNeoXModel

ARGUMENTS = """
    --preset tiny --name small --set base.hidden_size=32 base.num_layers=2 sft.epochs=1
    memory.cpu_threads=1
    world.train_posts=64 world.validation_posts=4 world.train_comparisons=8
    world.validation_comparisons=4 sft.batch_size=32 memory.save_minutes=0 memory.microbatch_size=8
""".split()
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


def limit_training_pass(
    network: torch.nn.Module, sequences: int = 10**6, tokens: int = 10**6
) -> None:
    """Have a network run out of memory in passes with gradients that are larger than this."""

    def check(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        ids = args[0] if args else inputs["input_ids"]
        if torch.is_grad_enabled() and (len(ids) > sequences or ids.numel() > tokens):
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    # The backbone, because a `PolicyModel` does not call the causal LM around it.
    (backbone,) = [module for module in network.modules() if isinstance(module, GPTNeoXModel)]
    backbone.register_forward_pre_hook(check, with_kwargs=True)


def limit_every_pass(patch: pytest.MonkeyPatch, rows: int, failures: int = 10**6) -> list[int]:
    """Have GPT-NeoX run out of memory in passes of more rows than this, the first `failures` times.

    Returns a list that will contain the rows of each failed pass.
    """
    forward = GPTNeoXModel.forward
    failed: list[int] = []

    def check(model: Any, *args: Any, **inputs: Any) -> Any:
        ids = args[0] if args else inputs["input_ids"]
        if len(ids) > rows and len(failed) < failures:
            failed.append(len(ids))
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return forward(model, *args, **inputs)

    patch.setattr(GPTNeoXModel, "forward", check)
    return failed
