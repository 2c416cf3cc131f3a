"""What a run was made with: code, commit, libraries, device, memory. Does not load torch.

A stage's code is recorded as hashes of the files that its module reaches by import statements. The
statements are read from the source, anywhere in a file; only modules of this project count. Changed
code makes no stage stale: the records serve to warn which finished stage ran with other code.
"""

import ast
import ctypes
import hashlib
import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from stages.config.checks import UserError
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
ROOT = Path(__file__).parents[2]
PACKAGES = ("stages", "eval", "reports")
CODE_FORMAT = "sha256 of files"
"""Names the kind of hashes in a code record. Records without it hold hashes of syntax trees, which
an earlier version wrote; they cannot be compared with the files of now."""
MOST_NAMED = 3
Record = dict[str, Any]


def code_version() -> str:
    """The git commit that runs, with `-dirty` if files differ from it; `unknown` without git.

    Published pages and Markdown files may differ, because no run reads them.
    """
    describe_command = ["git", "describe", "--always", "--abbrev=10"]
    try:
        described = subprocess.run(describe_command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    if described.returncode != 0:
        return "unknown"

    ignored = [":(exclude)reports/generated", ":(exclude)*.md"]
    diff_command = ["git", "diff", "--quiet", "HEAD", "--", ".", *ignored]
    diff = subprocess.run(diff_command, capture_output=True, check=False)
    suffix = "-dirty" if diff.returncode != 0 else ""
    return described.stdout.strip() + suffix


def library_versions() -> dict[str, str]:
    """Python and the libraries whose version can change a number."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def device_name() -> str:
    """The number and name of the GPUs, or `CPU` with the number of cores and of torch's threads."""
    torch = sys.modules.get("torch")
    if torch is None:
        return f"CPU, {os.cpu_count()} cores"
    if torch.cuda.is_available() and not is_on("ACCELERATE_USE_CPU"):
        return f"{os.environ.get('WORLD_SIZE', '1')} x {torch.cuda.get_device_name()}"
    return f"CPU, {os.cpu_count()} cores, threads: {torch.get_num_threads()}"


def processor() -> dict[str, str]:
    """The processor's model and, if torch is loaded, the instruction set that torch uses."""
    names = {"model": cpu_model()}
    torch = sys.modules.get("torch")
    if torch is not None:
        names["instructions"] = torch.backends.cpu.get_cpu_capability()
    return names


def environment() -> dict[str, str]:
    """The environment variables that may have changed a number, with their values."""
    return {name: os.environ[name] for name in NUMERIC_VARIABLES if name in os.environ}


def check_threads(threads: int) -> None:
    """Raise UserError for more threads than this machine has cores; two are always allowed."""
    cores = max(2, os.cpu_count() or 2)
    if threads > cores:
        raise UserError(
            f"memory.cpu_threads is {threads} but this machine has {cores} cores: "
            f"set at most {cores}"
        )


def peak_memory_gib() -> float:
    """Peak memory of this process: resident on the host, plus allocated on its GPU."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return round(host + peak_gpu_gib(), 2)


def peak_gpu_gib() -> float:
    """Peak memory that torch has allocated on this process's GPU; 0 on a CPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return 0
    return round(torch.cuda.max_memory_allocated() / 2**30, 3)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, or its architecture if the system does not name it."""
    with suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def keep_freed_memory(most: int = 2**28, trim: int = -1) -> None:
    """Make this process keep freed blocks smaller than `most` bytes, if the C library is glibc.

    By default glibc returns a large block to the system at once, and the top of its heap as soon as
    `trim` bytes are free there (-1: never). The next allocation is then zeroed page by page, which
    took a fifth of an update's time at pythia-14m's shape. At SmolLM2-135M's shape an update took
    21 seconds with trimming and 17 without. Two small numbers return all freed memory instead.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, most)
        libc.mallopt(TRIM_THRESHOLD, trim)
        libc.malloc_trim(0)


# -- code ------------------------------------------------------------------------------------------


def code_record(module: str, resumed: Record | None = None, resumed_version: str = "") -> Record:
    """What a manifest says about a stage's code: its module, and the hash of each file.

    If the stage resumes an attempt (`resumed`: its record, `resumed_version`: its commit), then
    `earlier` has the hashes of the files that were different then: each version trained a part.
    """
    files = code_of(module)
    record: Record = {"format": CODE_FORMAT, "module": module, "files": files, "earlier": []}
    if resumed is None:
        return record
    record["earlier"] += resumed.get("earlier", [])

    if resumed.get("format") != CODE_FORMAT:
        record["earlier"].append({"code_version": "unknown", "files": {}})
        return record

    before = resumed["files"]
    differing = {name: before.get(name) for name in differing_keys(before, files)}
    if differing:
        record["earlier"].append({"code_version": resumed_version, "files": differing})
    return record


def changed_files(record: Record) -> list[str]:
    """The files whose code now differs from that of a record, or of a part of its stage.

    Empty for a record of an earlier version of this project, whose hashes are of another kind.
    """
    if not is_comparable(record):
        return []
    names = set(differing_keys(record["files"], code_of(record["module"])))
    for attempt in record["earlier"]:
        names.update(attempt["files"])
    return sorted(names)


def is_comparable(record: Mapping[str, Any]) -> bool:
    """Whether a code record holds hashes that can be compared with the files of now."""
    return record.get("format") == CODE_FORMAT


def differing_keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The keys that only one of two mappings has, or whose values differ."""
    return sorted(key for key in {*first, *second} if first.get(key) != second.get(key))


def other_code(changed: Mapping[str, Iterable[str]]) -> str:
    """`ppo ran with other code (stages/functional.py)`; empty if no stage has changed files.

    `changed` maps each stage to its changed files.
    """
    stages = [stage for stage, files in changed.items() if files]
    if not stages:
        return ""
    files = sorted({name for names in changed.values() for name in names})
    return f"{', '.join(stages)} ran with other code ({first_of(files)})"


def first_of(files: list[str]) -> str:
    """The first few file names, and how many follow."""
    text = ", ".join(files[:MOST_NAMED])
    if len(files) > MOST_NAMED:
        text += f" and {len(files) - MOST_NAMED} more"
    return text


def code_of(module: str) -> dict[str, str]:
    """File -> hash, for a module and all modules of this project that it reaches by imports."""
    hashes: dict[str, str] = {}
    remaining = [module]
    while remaining:
        name = f"{remaining.pop().replace('.', '/')}.py"
        if name in hashes or not (ROOT / name).is_file():
            continue
        hashes[name], imported = _hash_and_imports(ROOT / name)
        remaining += imported
    return dict(sorted(hashes.items()))


@cache  # A file that is edited while this process runs was loaded as it was before.
def _hash_and_imports(path: Path) -> tuple[str, list[str]]:
    """The hash of a file, and the modules of this project that it imports."""
    source = path.read_bytes()
    names = [name for name in imported_names(source) if name.split(".")[0] in PACKAGES]
    return hashlib.sha256(source).hexdigest()[:12], names


def imported_names(source: bytes) -> list[str]:
    """The names of modules, and of what may be modules, in a file's import statements.

    Raises SyntaxError for a file that is not Python.
    """
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names
