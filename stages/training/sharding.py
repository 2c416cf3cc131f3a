"""Networks that are cut into one part for each process (ENGINE=fsdp2).

torch's `fully_shard` splits every weight, gradient and moment, and gathers a layer's weights just
before they are used. accelerate's own FSDP2 takes one model with its optimizer, casts weights to
the autocast dtype and ignores CPUs. Here policy and critic learn next to frozen networks, master
weights are float32, and the same code also runs on CPUs, where it can be tested.

A forward pass of a sharded network is a collective call: all processes must make the same number of
passes. Where their work differs (sampling, evaluation), the network is `gathered` first, and then
each process runs it without the others.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from stages.models.policy import PolicyModel

SHARDS = "shards"
"""The folder of a checkpoint that has the parts of all processes."""


def shard(accelerator: Accelerator, network: nn.Module) -> None:
    """Shard each policy, reward model or critic in a module: layer by layer, then the rest of it.

    The module that is called must be sharded last, or its weights would not be gathered. For a
    policy, that is the `PolicyModel`, not the model inside.
    """
    # torch warns about in-place operations on a scalar head's output, but there are none here.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view")
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    is_single = isinstance(network, PolicyModel | PreTrainedModel)
    models = [network] if is_single else list(network.children())
    for model in models:
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh)
        # By default, torch keeps the root's weights whole from a forward pass to its backward pass.
        # Without a backward pass they would stay whole, and code that reads the shards would fail.
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        if isinstance(model, PolicyModel):
            register_fsdp_forward_method(model, "logits")
            register_fsdp_forward_method(model, "next_logits")


def shard_with_optimizer(
    accelerator: Accelerator, network: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Shard a network, and let its optimizer train the parts instead of the whole weights."""
    name_of_weight = {weight: name for name, weight in network.named_parameters()}
    shard(accelerator, network)
    parts = dict(network.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parts[name_of_weight[weight]] for weight in group["params"]]


def decoder_layers(network: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of the pretrained models in a module."""
    names: set[str] = set()
    for module in network.modules():
        if isinstance(module, PreTrainedModel):
            names.update(module._no_split_modules or ())
    return [module for module in network.modules() if type(module).__name__ in names]


def sharded_modules(network: nn.Module) -> list[FSDPModule]:
    """Return the modules in a network that hold sharded weights."""
    return [module for module in network.modules() if isinstance(module, FSDPModule)]


def is_sharded(network: nn.Module) -> bool:
    """Return whether a module is, or contains, a sharded network."""
    return bool(sharded_modules(network))


@contextmanager
def gathered(network: nn.Module) -> Iterator[None]:
    """Gather the whole network in every process, so that each can run it without the others.

    All processes must enter and leave. A network that is not sharded stays as it is.
    """
    modules = sharded_modules(network)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(True, recurse=False)


def full_tensor(x: Tensor) -> Tensor:
    """Return a tensor put together from all processes; one that is not sharded stays as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def save_parts(network: nn.Module, optimizer: Any, folder: Path) -> None:
    """Write every process's part of the weights and of the optimizer's state.

    Raises OSError in all processes if one of them cannot write.
    """
    weights, optimizer_state = get_state_dict(network, optimizer)
    state = {"weights": weights, "optimizer": optimizer_state}
    try:
        save(state, checkpoint_id=folder / SHARDS)
    except CheckpointException as error:
        first_failure, _ = next(iter(error.failures.values()))
        raise OSError(str(first_failure)) from None


def load_parts(network: nn.Module, optimizer: Any, folder: Path) -> None:
    """Read what `save_parts` wrote.

    Weights that had not been trained when they were saved have no optimizer state, and get none.
    """
    weights, optimizer_state = get_state_dict(network, optimizer)  # adds moments for every weight
    state: dict[str, Any] = {"weights": weights, "optimizer": optimizer_state}

    saved_keys = FileSystemReader(folder / SHARDS).read_metadata().state_dict_metadata
    without_state = [
        name
        for name in optimizer_state["state"]
        if f"optimizer.state.{name}.step" not in saved_keys
    ]
    planner = DefaultLoadPlanner(allow_partial_load=bool(without_state))
    load(state, checkpoint_id=folder / SHARDS, planner=planner)
    set_state_dict(
        network,
        optimizer,
        model_state_dict=state["weights"],
        optim_state_dict=state["optimizer"],
    )
    for name in without_state:
        del optimizer.state[network.get_parameter(str(name))]
