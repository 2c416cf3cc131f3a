"""Several processes: who starts them, and networks that are cut into one part for each (FSDP2).

Under ENGINE=ddp every process holds all networks whole, and accelerate wraps what learns. Under
ENGINE=fsdp2 torch's `fully_shard` cuts every weight, gradient and moment, and a layer's weights
are gathered just before they are used. accelerate's own FSDP2 takes one model with its optimizer,
casts weights to the autocast type and ignores CPUs; here policy and critic learn beside frozen
networks, master weights are float32, and the same code runs on CPUs, where tests see it.

A forward pass of a sharded network is a collective call: all processes must make as many. Where
their work differs (sampling, evaluation), the network is `gathered` first, and then runs alone.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    is_triton_available,
    patch_environment,
)
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from stages.models.policy import PolicyModel
from stages.settings.checks import (
    UserError,
    first_line,
    forget_variables,
    is_on,
    is_out_of_memory,
    launched_processes,
    say_error,
)

SHARDS = "shards"
# What is read below of what `accelerate launch` tells its processes, and a wish for the CPU.
KEPT_VARIABLES = (
    *("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"),
    *("ACCELERATE_USE_CPU", "FSDP_VERSION", "FSDP_OFFLOAD_PARAMS"),
)

# Others wait while one process reads and writes a checkpoint: 165 GB at 6.9B. NCCL gives up after
# ten minutes otherwise.
LONGEST_WAIT = timedelta(hours=2)
# What has started them starts all at once: they differ by the time that it takes to load libraries.
MEETING_WAIT = timedelta(minutes=1)


def started_engine() -> str:
    """The engine that `accelerate launch` was configured for, as it tells its processes.

    Raises UserError for an engine that nobody has seen train these stages. Under some of them each
    microbatch would silently take an optimizer step of its own.
    """
    known = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
    started = {name for name in known if is_on(f"ACCELERATE_USE_{name}")}
    unseen = started - {"FSDP"}
    if started == {"FSDP"}:
        version = os.environ.get("FSDP_VERSION", "1")
        if version == "2" and not is_on("FSDP_OFFLOAD_PARAMS"):
            return "fsdp2"
        unseen = {f"FSDP version {version}" if version != "2" else "FSDP with offloaded weights"}
    if unseen:
        raise UserError(
            f"the environment starts {', '.join(sorted(unseen))}, which nobody has seen train "
            "these stages: take GPUS=.. with ENGINE=ddp or ENGINE=fsdp2, and lora.rank or memory.* "
            "where memory is short"
        )
    return "ddp"


def new_accelerator(mixed_precision: str, takes_turns: bool = False) -> Accelerator:
    """The accelerator of this process. On a machine without a device, processes meet through gloo.

    `takes_turns` as in `make_accelerator`. Raises UserError if there are fewer devices than
    processes, or if the processes do not meet.
    """
    forget_variables(keep=KEPT_VARIABLES)
    started_engine()
    processes = launched_processes()
    no_device = is_on("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    on_cpu = processes > 1 and no_device
    local, cards = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if cards and local > cards and not is_on("ACCELERATE_USE_CPU"):
        raise UserError(f"GPUS={local}, but this machine shows {cards}: start as many as there are")
    if processes > 1:
        meet(on_cpu)
    # Networks are sharded here, so accelerate must not do it too.
    with patch_environment(ACCELERATE_USE_FSDP="false"):
        ddp = DistributedDataParallelKwargs(find_unused_parameters=takes_turns)
        accelerator = Accelerator(
            mixed_precision=mixed_precision, cpu=on_cpu, kwargs_handlers=[ddp]
        )
    # With a mask the gradient of cuDNN's attention, which torch 2.11 prefers on an H100, may be NaN
    # where scores are far below 0 (pytorch issue 196678), as for padding, which sees nothing.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("highest")  # whatever TORCH_ALLOW_TF32_CUBLAS_OVERRIDE says
    if accelerator.num_processes != processes:
        raise UserError(
            f"{processes} processes were started, but each of them is alone: start them by GPUS=.."
        )
    return accelerator


def meet(on_cpu: bool) -> None:
    """Form the group of this launch's processes, unless it is there.

    Raises UserError if the others do not come soon.
    """
    if distributed.is_initialized():
        return
    device = "cpu" if on_cpu else torch.accelerator.current_accelerator() or "cpu"
    try:
        store, rank, processes = next(iter(rendezvous("env://", timeout=MEETING_WAIT)))
    except distributed.DistError:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"{os.environ['WORLD_SIZE']} processes did not meet at {where} (MASTER_ADDR,"
            f" MASTER_PORT) within {MEETING_WAIT.seconds} s: start all of them, or unset RANK,"
            " WORLD_SIZE and LOCAL_RANK"
        ) from None
    store.set_timeout(LONGEST_WAIT)
    distributed.init_process_group(
        distributed.get_default_backend_for_device(device),
        timeout=LONGEST_WAIT,
        world_size=processes,
        rank=rank,
        store=store,
    )


class Compiling:
    """Where and by what torch compiles, and whether it does in this process."""

    devices: tuple[str, ...] = ("cuda",)
    backend: Any = "inductor"
    is_on = False


def prepare(
    accelerator: Accelerator, network: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, Any]:
    """A network that learns and its optimizer, ready for several processes and mixed precision.

    The optimizer must be new: what it holds for a weight would be lost.
    """
    # Autocast's cache holds bf16 copies of all weights until a forward pass ends. Autograd keeps
    # them too, but not with gradient checkpointing, nor what is whole for a moment.
    usual = accelerator.autocast_handler
    keeps = not recomputes(network) and not _shards(accelerator)
    accelerator.autocast_handler = AutocastKwargs(cache_enabled=keeps)
    compile_layers(accelerator, network)
    try:
        return _prepare(accelerator, network, optimizer)
    finally:
        accelerator.autocast_handler = usual


def _prepare(
    accelerator: Accelerator, network: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, Any]:
    if not _shards(accelerator):
        return accelerator.prepare(network, optimizer)
    names = {parameter: name for name, parameter in network.named_parameters()}
    _shard(accelerator, network)
    parts = dict(network.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parts[names[whole]] for whole in group["params"]]
    # Without a wrapper for several processes: autocast, and outputs in float32.
    return accelerator.prepare_model(network, False, evaluation_mode=True), optimizer


def place(accelerator: Accelerator, frozen: nn.Module) -> nn.Module:
    """A network that never learns, on this process's device, or this process's part of it."""
    if _shards(accelerator):
        _shard(accelerator, frozen)
        return frozen
    compile_layers(accelerator, frozen)
    return frozen.to(accelerator.device)


def compile_layers(accelerator: Accelerator, network: nn.Module) -> None:
    """Let torch compile decoder layers, for passes without a cache, on a card that has triton.

    One graph serves all layers and lengths; names of weights stay. A failure is told once, and all
    layers run uncompiled from then on. TORCH_COMPILE_DISABLE=1, torch's own, turns it off.
    """
    able = accelerator.device.type in Compiling.devices and is_triton_available()
    if not able or recomputes(network) or _shards(accelerator):
        return
    Compiling.is_on = True
    # A layer has a graph for what learns, each type, mask or none, one row or several.
    torch._dynamo.config.recompile_limit = 64
    # What cannot be compiled of a backward pass fails in the forward pass, where it is caught.
    if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):  # a new switch
        torch._functorch.config.force_non_lazy_backward_lowering = True
    for layer in decoder_layers(network):
        layer.forward = _compiled(layer.forward)


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    graph = torch.compile(forward, dynamic=True, backend=Compiling.backend)

    def run(*args: Any, **kwargs: Any) -> Any:
        samples = any(isinstance(part, Cache) for part in (*args, *kwargs.values()))
        if not Compiling.is_on or samples:
            return forward(*args, **kwargs)
        try:
            return graph(*args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            output = forward(*args, **kwargs)  # an error of its own is raised here
            Compiling.devices, Compiling.is_on = (), False
            say_error(f"layers run uncompiled, for torch.compile failed: {first_line(error)}")
            return output

    return run


def _shards(accelerator: Accelerator) -> bool:
    return accelerator.num_processes > 1 and started_engine() == "fsdp2"


def _shard(accelerator: Accelerator, network: nn.Module) -> None:
    """Cut each policy, reward model or critic in a module: layer by layer, then what is left of it.

    What is called must be what is cut last, or its weights would not be gathered: of a policy, that
    is the `PolicyModel`, not the model inside.
    """
    # torch says of scalar heads that an operation in place on their output would be wrong; none is.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view")
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    is_one = isinstance(network, PolicyModel | PreTrainedModel)
    whole = [network] if is_one else list(network.children())
    for model in whole:
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh)
        # torch would keep the root's weights whole from a forward pass to the backward pass.
        # Without one they would stay whole, and code that reads the shards next would fail.
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        if isinstance(model, PolicyModel):
            register_fsdp_forward_method(model, "logits")
            register_fsdp_forward_method(model, "next_logits")


def recomputes(network: nn.Module) -> bool:
    """Whether gradient checkpointing is on."""
    return any(getattr(module, "gradient_checkpointing", False) for module in network.modules())


def decoder_layers(network: nn.Module) -> list[nn.Module]:
    """The layers of the pretrained models in a module."""
    models = [module for module in network.modules() if isinstance(module, PreTrainedModel)]
    names = {name for model in models for name in model._no_split_modules or ()}
    return [module for module in network.modules() if type(module).__name__ in names]


def is_sharded(network: nn.Module) -> bool:
    """Whether a module is or holds a sharded network."""
    return any(_sharded_modules(network))


def _sharded_modules(network: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in network.modules() if isinstance(module, FSDPModule))


@contextmanager
def gathered(network: nn.Module) -> Iterator[None]:
    """While this lasts, a network is whole in every process, which runs it without the others.

    All processes must enter and leave. A network that is not sharded stays as it is.
    """
    modules = list(_sharded_modules(network))
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(True, recurse=False)


def whole(x: Tensor) -> Tensor:
    """A tensor from all of its parts; one that is not cut is returned as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def save_parts(network: nn.Module, optimizer: Any, folder: Path) -> None:
    """Write every process's part of the weights and of what the optimizer holds.

    Raises OSError in all processes if one cannot write.
    """
    weights, held = get_state_dict(network, optimizer)
    try:
        save({"weights": weights, "optimizer": held}, checkpoint_id=folder / SHARDS)
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise OSError(str(first)) from None


def load_parts(network: nn.Module, optimizer: Any, folder: Path) -> None:
    """Read what `save_parts` wrote.

    The optimizer holds nothing of weights that had not learned when it was saved.
    """
    weights, held = get_state_dict(network, optimizer)  # makes moments for every weight
    state: dict[str, Any] = {"weights": weights, "optimizer": held}
    there = FileSystemReader(folder / SHARDS).read_metadata().state_dict_metadata
    waiting = [name for name in held["state"] if f"optimizer.state.{name}.step" not in there]
    planner = DefaultLoadPlanner(allow_partial_load=bool(waiting))
    load(state, checkpoint_id=folder / SHARDS, planner=planner)
    set_state_dict(
        network, optimizer, model_state_dict=state["weights"], optim_state_dict=state["optimizer"]
    )
    for name in waiting:
        del optimizer.state[network.get_parameter(str(name))]
