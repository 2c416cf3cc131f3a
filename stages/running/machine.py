"""What a run was made with: commit, libraries, device, memory. It does not load torch."""

import ctypes
import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

from stages.settings.checks import UserError

LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy", "peft")
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # what glibc's mallopt calls them
KEPT_BLOCK = 2**28  # bytes


def code_version() -> str:
    """The commit that runs, with `-dirty` if files differ from it; `unknown` outside git.

    Published pages and Markdown files may differ: no run reads them.
    """
    describe = ["git", "describe", "--always", "--abbrev=10"]
    described = subprocess.run(describe, capture_output=True, text=True, check=False)
    if described.returncode:
        return "unknown"
    left_out = [":(exclude)reports/generated", ":(exclude)*.md"]
    differ = ["git", "diff", "--quiet", "HEAD", "--", ".", *left_out]
    changed = subprocess.run(differ, capture_output=True, check=False).returncode
    return described.stdout.strip() + ("-dirty" if changed else "")


def library_versions() -> dict[str, str]:
    """Python and the libraries whose version can change a number."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def device_name() -> str:
    """The GPU's name, or `CPU` with the numbers of cores and of torch's threads."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    threads = f", threads: {torch.get_num_threads()}" if torch is not None else ""
    return f"CPU, {os.cpu_count()} cores{threads}"


def processor() -> dict[str, str]:
    """The processor's model and, where torch is loaded, the instructions that torch takes.

    `ATEN_CPU_CAPABILITY` bounds these, whatever the processor has.
    """
    torch = sys.modules.get("torch")
    taken = {"instructions": torch.backends.cpu.get_cpu_capability()} if torch else {}
    return {"model": cpu_model(), **taken}


def check_threads(threads: int) -> None:
    """Raise UserError for more threads than this machine has cores; two run on any machine."""
    cores = max(2, os.cpu_count() or 2)
    if threads > cores:
        mend = f"this machine has {cores} cores: set at most {cores}"
        raise UserError(f"memory.cpu_threads is {threads} but {mend}")


def has_bf16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies bf16 numbers itself; True where the system does not say."""
    try:
        return "bf16" in cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True


def peak_memory_gib() -> float:
    """The most memory this process has held: resident on the host, plus allocated on a GPU."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return round(host + peak_gpu_gib(), 2)


def peak_gpu_gib() -> float:
    """The most that torch has allocated on this process's GPU; 0 on a CPU."""
    torch = sys.modules.get("torch")
    gpu = torch.cuda.max_memory_allocated() / 2**30 if torch and torch.cuda.is_available() else 0
    return round(gpu, 3)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, or its architecture where the system does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def keep_freed_memory(most: int = KEPT_BLOCK) -> None:
    """Have this process keep freed blocks below so many bytes, where the C library is glibc.

    glibc gives a large block back to the system at once, and the next one of its size is zeroed
    page by page: a fifth of the seconds of an update at pythia-14m's shape were the system's.
    Larger blocks go back as before. With a small number everything does.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, most)
        libc.mallopt(TRIM_THRESHOLD, most)
        libc.malloc_trim(0)
