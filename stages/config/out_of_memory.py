"""Out-of-memory errors, and what to do about them."""

import sys

LESS_MEMORY = (
    "free some, or try memory.gradient_checkpointing=true, lora.rank=16, "
    "memory.frozen_dtype=bf16, or GPUS= with ENGINE=fsdp2"
)
# Texts of out-of-memory errors: of the CPU's allocator, cuBLAS, CUDA and NCCL.
NO_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "Cuda failure 2",
)


def gpu_memory_usage() -> str:
    """Return who uses the memory of this process's GPU, for a message; empty on a CPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    ours = torch.cuda.memory_reserved()
    others = total - free - ours
    gib = 2**30
    return (
        f"GPU memory: this process {ours / gib:.1f} GiB, others {others / gib:.1f} GiB,"
        f" total {total / gib:.1f} GiB"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this is an out-of-memory error, of a GPU or of the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(part in str(error) for part in NO_MEMORY)
