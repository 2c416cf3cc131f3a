"""GPUs, and how many a preset is made for. Standard library only."""

from typing import NamedTuple

from stages.settings.checks import UserError, unknown

GIB = 2**30
# What the CUDA context, cuBLAS and NCCL take, and what the allocator cannot use between blocks.
# An assumption; `make rehearse` measures what is left.
CONTEXT_GIB = 1.0
USABLE = 0.94


class Gpu(NamedTuple):
    """One accelerator."""

    memory_gib: float
    """As `nvidia-smi` shows it."""
    teraflops: float
    """Peak of dense bf16 matrix products, 10^12 operations per second."""
    bandwidth: float
    """Of its memory, 10^9 bytes per second."""

    @property
    def usable(self) -> float:
        """Bytes for tensors."""
        return (self.memory_gib * USABLE - CONTEXT_GIB) * GIB


# The makers' data sheets: dense bf16 with fp32 accumulation (no sparsity). Memory as the driver
# reports it.
GPUS = {
    "h200-141gb": Gpu(140.4, 989.0, 4800.0),
    "h100-80gb": Gpu(79.6, 989.0, 3350.0),
    "a100-80gb": Gpu(80.0, 312.0, 2039.0),
    "a100-40gb": Gpu(40.0, 312.0, 1555.0),
    "l40s-48gb": Gpu(45.0, 362.0, 864.0),
    "rtx4090-24gb": Gpu(23.99, 165.2, 1008.0),
    "rtx3090-24gb": Gpu(24.0, 71.0, 936.0),
    "a10-24gb": Gpu(22.5, 125.0, 600.0),
    "l4-24gb": Gpu(22.5, 121.0, 300.0),
}
# The GPUs that a preset is made for, and how many.
MADE_FOR = {
    "pythia-1b-24gb": ("rtx4090-24gb", 1),
    "pythia-2.8b": ("h200-141gb", 1),
    "pythia-6.9b": ("h100-80gb", 8),
    "pythia-6.9b-lora": ("h100-80gb", 8),
}
USUAL = ("h100-80gb", 1)
# Presets whose networks one GPU cannot hold: several share them.
SHARDED = ("pythia-6.9b",)


def gpus_for(preset: str, gpu: str = "", gpus: int = 0) -> tuple[str, int]:
    """Name and number of the GPUs to plan for: as asked, or else those of the preset.

    Raises UserError for an unknown GPU, with the nearest name, or a negative number.
    """
    name, number = MADE_FOR.get(preset, USUAL)
    if gpu and gpu not in GPUS:
        raise unknown("GPU", gpu, GPUS)
    if gpus < 0:
        raise UserError(f"GPUS={gpus}: give the number of cards, at least 1")
    return gpu or name, gpus or number
