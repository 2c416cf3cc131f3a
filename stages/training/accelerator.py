"""Starting accelerate in this process, and putting networks on its device.

Under ENGINE=ddp every process holds complete networks, and accelerate wraps the one that learns.
Under ENGINE=fsdp2 they are sharded here, without accelerate (`stages/training/sharding.py`).
"""

import os
import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs, patch_environment
from torch import distributed, nn
from torch.distributed.rendezvous import rendezvous
from transformers import PreTrainedModel

from stages.config.config import Config
from stages.config.environment import forget_variables, is_on, launched_processes
from stages.config.errors import UserError
from stages.runs.machine import keep_freed_memory
from stages.training.compiling import compile_layers, recomputes_activations
from stages.training.random_streams import stream_seed
from stages.training.sharding import shard, shard_with_optimizer

# With these variables, `accelerate launch` tells its processes about the engine (`started_engine`),
# or a user asks for the CPU.
KEPT_VARIABLES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_CPU",
    "FSDP_VERSION",
    "FSDP_OFFLOAD_PARAMS",
)

# The others wait while one process reads or writes a checkpoint, which is 165 GB at 6.9B. By
# default, NCCL gives up after ten minutes.
LONGEST_WAIT = timedelta(hours=2)
# A launcher starts all processes at once: they differ only in the time they take to load libraries.
MEETING_WAIT = timedelta(minutes=1)


def check_threads(threads: int) -> None:
    """Raise UserError for more threads than this machine has cores; two are always allowed."""
    cores = max(2, os.cpu_count() or 2)
    if threads > cores:
        raise UserError(
            f"memory.cpu_threads is {threads} but this machine has {cores} cores: "
            f"set at most {cores}"
        )


def started_engine() -> str:
    """Return the engine that `accelerate launch` was configured for: "ddp" or "fsdp2".

    Raises UserError for any other engine. Other engines have not been tested with these stages, and
    under some of them each microbatch would silently take an optimizer step.
    """
    engines = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
    started = {name for name in engines if is_on(f"ACCELERATE_USE_{name}")}
    if not started:
        return "ddp"

    untested = started - {"FSDP"}
    if not untested:
        version = os.environ.get("FSDP_VERSION", "1")
        if version != "2":
            untested = {f"FSDP version {version}"}
        elif is_on("FSDP_OFFLOAD_PARAMS"):
            untested = {"FSDP with offloaded weights"}
        else:
            return "fsdp2"
    raise UserError(
        f"the environment asks for {', '.join(sorted(untested))}, which is untested with these"
        " stages: use GPUS= with ENGINE=ddp or ENGINE=fsdp2, and lora.rank or memory.* if memory"
        " is short"
    )


def shards_networks(accelerator: Accelerator) -> bool:
    """Return whether this launch shards its networks."""
    return accelerator.num_processes > 1 and started_engine() == "fsdp2"


def make_accelerator(config: Config, find_unused_parameters: bool = False) -> Accelerator:
    """Return the accelerator of this process, with seeds and threads set.

    `find_unused_parameters`: a forward pass of the trained module uses only some of its weights,
    for example if policy and critic run one after the other. Raises UserError as `new_accelerator`
    does, and for more threads than the machine has cores.
    """
    check_threads(config.memory.cpu_threads)
    if config.memory.cpu_threads:
        torch.set_num_threads(config.memory.cpu_threads)

    seed = stream_seed(config.seed, "global")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)

    keep_freed_memory()
    return new_accelerator(config.memory.mixed_precision, find_unused_parameters)


def new_accelerator(mixed_precision: str, find_unused_parameters: bool = False) -> Accelerator:
    """Return the accelerator of this process. Without a GPU, processes communicate through gloo.

    Raises UserError if there are fewer devices than processes, or if the processes do not find each
    other.
    """
    forget_variables(keep=KEPT_VARIABLES)
    started_engine()  # raises UserError for an engine that is untested

    processes = launched_processes()
    wants_cpu = is_on("ACCELERATE_USE_CPU")
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if gpus and local_processes > gpus and not wants_cpu:
        raise UserError(
            f"GPUS={local_processes}, but this machine shows {gpus}: start at most {gpus}"
        )

    several_on_cpu = processes > 1 and (wants_cpu or not torch.accelerator.is_available())
    if processes > 1:
        meet(several_on_cpu)

    # Networks are sharded by our own code, so accelerate must not shard them too.
    with patch_environment(ACCELERATE_USE_FSDP="false"):
        accelerator = Accelerator(
            mixed_precision=mixed_precision,
            cpu=several_on_cpu,
            kwargs_handlers=[
                DistributedDataParallelKwargs(find_unused_parameters=find_unused_parameters)
            ],
        )
    if accelerator.num_processes != processes:
        raise UserError(
            f"{processes} processes were started, but they do not see each other: start them with"
            " GPUS="
        )

    # With a mask, the gradient of cuDNN's attention, which torch 2.11 prefers on an H100, may be
    # NaN where scores are far below 0 (pytorch issue 196678), as for padding, which sees nothing.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("highest")  # regardless of TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    return accelerator


def meet(on_cpu: bool) -> None:
    """Form the process group of this launch, unless it exists.

    Raises UserError if the other processes do not join in time.
    """
    if distributed.is_initialized():
        return
    try:
        store, rank, processes = next(iter(rendezvous("env://", timeout=MEETING_WAIT)))
    except distributed.DistError:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"{os.environ['WORLD_SIZE']} processes did not meet at {address} (MASTER_ADDR,"
            f" MASTER_PORT) within {MEETING_WAIT.seconds} s: start all of them, or unset RANK,"
            " WORLD_SIZE and LOCAL_RANK"
        ) from None
    store.set_timeout(LONGEST_WAIT)

    device = "cpu" if on_cpu else torch.accelerator.current_accelerator() or "cpu"
    distributed.init_process_group(
        distributed.get_default_backend_for_device(device),
        timeout=LONGEST_WAIT,
        world_size=processes,
        rank=rank,
        store=store,
    )


def prepare(
    accelerator: Accelerator, network: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, Any]:
    """Return a network that learns, and its optimizer, ready for processes and mixed precision.

    The optimizer must be new: any state that it holds for a weight would be lost.
    """
    is_to_be_sharded = shards_networks(accelerator)
    if not is_to_be_sharded:
        compile_layers(network, accelerator.device)

    # Autocast's cache holds bf16 copies of all weights until a forward pass ends. Autograd keeps
    # these copies as well, so the cache costs nothing: except with gradient checkpointing, and for
    # sharded weights, which are whole only for a moment.
    keeps_cache = not recomputes_activations(network) and not is_to_be_sharded
    usual_handler = accelerator.autocast_handler
    accelerator.autocast_handler = AutocastKwargs(cache_enabled=keeps_cache)
    try:
        if not is_to_be_sharded:
            return accelerator.prepare(network, optimizer)
        shard_with_optimizer(accelerator, network, optimizer)
        # This adds only autocast and float32 outputs, without a wrapper for several processes.
        prepared = accelerator.prepare_model(network, device_placement=False, evaluation_mode=True)
        return prepared, optimizer
    finally:
        accelerator.autocast_handler = usual_handler


def place(accelerator: Accelerator, frozen: PreTrainedModel) -> PreTrainedModel:
    """Put a network that never learns on this process's device, or this process's part of it."""
    if shards_networks(accelerator):
        shard(accelerator, frozen)
        return frozen
    compile_layers(frozen, accelerator.device)
    return frozen.to(accelerator.device)
