"""What a run was made with: code, commit, libraries, device, memory. It does not load torch.

The code that makes a stage is known by hashes of the files that its module imports. A hash leaves
out comments, docstrings and layout. The imports are read from the source, anywhere in a file; only
modules of this project count. A manifest records the hashes, so that `make` can say which finished
stage was made with other code, and which files differ.
"""

import ast
import ctypes
import hashlib
import importlib.metadata
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from stages.config.checks import UserError, is_on

LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy", "peft")
# Variables that choose how torch and what lies below it compute: most change the rounding of sums.
OF_ARITHMETIC = re.compile(
    "(ACCELERATE|ATEN|BLIS|CUBLAS|CUBLASLT|CUDA|CUDNN|DNNL|FBGEMM|FLASH_ATTENTION|FSDP|GLOO|GOMP"
    "|HIP|KMP|MKL|MKLDNN|NCCL|NPY|NVIDIA_TF32|OMP|ONEDNN|OPENBLAS|PYTORCH|ROCBLAS|TORCH"
    "|TORCHINDUCTOR|TRANSFORMERS|USE_HUB|XLA)_(?!WAIT_POLICY)"
)
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # what glibc's mallopt calls them
ROOT = Path(__file__).parents[2]
PACKAGES = ("stages", "eval", "reports")
SEVERAL = "several"  # in place of a hash: the file changed between two attempts at a stage
MOST_NAMED = 3
Record = dict[str, Any]


def code_version() -> str:
    """The commit that runs, with `-dirty` if files differ from it; `unknown` where git tells none.

    Published pages and Markdown files may differ: no run reads them.
    """
    describe = ["git", "describe", "--always", "--abbrev=10"]
    try:
        described = subprocess.run(describe, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
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
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def start_of(pid: int) -> str:
    """When a process began, in the kernel's ticks, for numbers are used again; empty where that
    cannot be read, and for a zombie.
    """
    with suppress(OSError, IndexError):
        # The name of the program, in brackets, may hold anything.
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else numbers[18]
    return ""


def device_name() -> str:
    """The GPU's name with the number used, or `CPU` with those of cores and of torch's threads."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and not is_on("ACCELERATE_USE_CPU"):
        return f"{os.environ.get('WORLD_SIZE', '1')} x {torch.cuda.get_device_name()}"
    threads = f", threads: {torch.get_num_threads()}" if torch is not None else ""
    return f"CPU, {os.cpu_count()} cores{threads}"


def processor() -> dict[str, str]:
    """The processor's model and, where torch is loaded, the instructions that torch takes."""
    torch = sys.modules.get("torch")
    taken = {"instructions": torch.backends.cpu.get_cpu_capability()} if torch else {}
    return {"model": cpu_model(), **taken}


def environment() -> dict[str, str]:
    """The variables of the environment that may have changed a number, with their values."""
    return {name: value for name, value in os.environ.items() if OF_ARITHMETIC.match(name)}


def check_threads(threads: int) -> None:
    """Raise UserError for more threads than this machine has cores; two run on any machine."""
    cores = max(2, os.cpu_count() or 2)
    if threads > cores:
        mend = f"this machine has {cores} cores: set at most {cores}"
        raise UserError(f"memory.cpu_threads is {threads} but {mend}")


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
    with suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def keep_freed_memory(most: int = 2**28, trim: int = -1) -> None:
    """Have this process keep freed blocks below so many bytes, where the C library is glibc.

    glibc gives a large block back to the system at once, and the top of its heap once `trim` bytes
    are free there (-1: never); what comes next is zeroed page by page. A fifth of the seconds of an
    update were the system's, at pythia-14m's shape and, by the heap's top alone, at SmolLM2-135M's
    (21 seconds with it, 17 without). With two small numbers everything goes back.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, most)
        libc.mallopt(TRIM_THRESHOLD, trim)
        libc.malloc_trim(0)


def code_record(module: str, begun_with: Record | None) -> Record:
    """What a manifest says of the code of a stage: its module, and the hash of each file.

    `begun_with` is the record of an attempt that this one goes on from. A file that has changed
    since then is marked, because a part of the stage was made with each version.
    """
    now = code_of(module)
    before = begun_with["files"] if begun_with else now
    files = {
        name: now[name] if now.get(name) == before.get(name) else SEVERAL
        for name in sorted(before | now)
    }
    return {"module": module, "files": files}


def changed_files(record: Record) -> list[str]:
    """The files in which the code now differs from a record."""
    files, now = record["files"], code_of(record["module"])
    return sorted(name for name in files | now if files.get(name) != now.get(name))


def other_code(changed: Mapping[str, Iterable[str]]) -> str:
    """`ppo was made with other code (stages/functional.py)`; empty if no stage has changed files.

    `changed` holds the changed files of each stage.
    """
    stages = [stage for stage, files in changed.items() if files]
    files = sorted({name for names in changed.values() for name in names})
    were = "was" if len(stages) == 1 else "were"
    return f"{', '.join(stages)} {were} made with other code ({first_of(files)})" if stages else ""


def first_of(files: list[str]) -> str:
    """A few file names, and how many more there are."""
    more = len(files) - MOST_NAMED
    return ", ".join(files[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def code_of(module: str) -> dict[str, str]:
    """File -> hash of its code, for a module and all modules that it leads to by imports."""
    hashes: dict[str, str] = {}
    todo = [module]
    while todo:
        name = f"{todo.pop().replace('.', '/')}.py"
        if name not in hashes and (ROOT / name).is_file():
            hashes[name], imported = _parsed(ROOT / name)
            todo += imported
    return dict(sorted(hashes.items()))


@cache
def _parsed(path: Path) -> tuple[str, list[str]]:
    """The hash of a file's code, and the names in our packages that it imports."""
    tree = ast.parse(path.read_bytes())
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    own_modules = [name for name in names if name.split(".")[0] in PACKAGES]
    return _short_hash(repr(_plain(tree))), own_modules


def _plain(node: Any) -> Any:
    """A syntax tree as lists, without bare texts and empty fields: Python's versions differ there.

    A bare text is a statement that is nothing but a string, as docstrings are.
    """
    if isinstance(node, list):
        return [_plain(part) for part in node if not _is_bare_text(part)]
    if not isinstance(node, ast.AST):
        return node
    fields = ((name, _plain(value)) for name, value in ast.iter_fields(node))
    return [type(node).__name__, *(field for field in fields if field[1] not in (None, []))]


def _is_bare_text(node: Any) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]
