"""The machine and the libraries of a run: versions, device, memory. Does not load torch."""

import ctypes
import importlib.metadata
import os
import platform
import resource
import sys
from contextlib import suppress
from pathlib import Path

from stages.config.environment import is_on

LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "numpy",
    "peft",
)
# Environment variables that change the rounding of sums, or the precision of a product.
NUMERIC_VARIABLES = (
    "ACCELERATE_MIXED_PRECISION",
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_NUM_THREADS",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
# Parameters of glibc's mallopt.
MMAP_THRESHOLD = -3
TRIM_THRESHOLD = -1


def library_versions() -> dict[str, str]:
    """Return the versions of Python and the libraries whose version can change a number."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def device_name() -> str:
    """Return number and name of the GPUs, or `CPU` with the number of cores and threads."""
    torch = sys.modules.get("torch")
    if torch is None:
        return f"CPU, {os.cpu_count()} cores"
    if torch.cuda.is_available() and not is_on("ACCELERATE_USE_CPU"):
        return f"{os.environ.get('WORLD_SIZE', '1')} x {torch.cuda.get_device_name()}"
    return f"CPU, {os.cpu_count()} cores, threads: {torch.get_num_threads()}"


def processor() -> dict[str, str]:
    """Return the processor's model and, if torch is loaded, the instruction set that torch uses."""
    names = {"model": cpu_model()}
    torch = sys.modules.get("torch")
    if torch is not None:
        names["instructions"] = torch.backends.cpu.get_cpu_capability()
    return names


def environment() -> dict[str, str]:
    """Return the environment variables that may have changed a number, with their values."""
    return {name: os.environ[name] for name in NUMERIC_VARIABLES if name in os.environ}


def peak_memory_gib() -> float:
    """Return the peak memory of this process: resident on the host, plus allocated on its GPU."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return round(host + peak_gpu_gib(), 2)


def peak_gpu_gib() -> float:
    """Return the peak memory that torch has allocated on this process's GPU; 0 on a CPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return 0
    return round(torch.cuda.max_memory_allocated() / 2**30, 3)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name, or its architecture if the system does not name it."""
    with suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def keep_freed_memory(largest_kept_block: int = 2**28, trim: int = -1) -> None:
    """Make this process keep freed blocks smaller than `largest_kept_block` bytes (glibc only).

    By default glibc returns a large block to the system at once, and the top of its heap as soon as
    `trim` bytes are free there (-1: never). The next allocation is then zeroed page by page, which
    took a fifth of an update's time at pythia-14m's shape. At SmolLM2-135M's shape an update took
    21 seconds with trimming and 17 without. With two small numbers, freed memory is returned.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, largest_kept_block)
        libc.mallopt(TRIM_THRESHOLD, trim)
        libc.malloc_trim(0)
