"""A pretended GPU: tensors of device cuda that hold CPU tensors and refuse to be mixed with them.

It finds what a real GPU would refuse, tensors of two devices in one operation or numpy on a tensor
on the GPU, and it runs the code that only a GPU reaches (cuda's autocast, its sizes of chunks).
It refuses memory to passes of more rows than PRETENDED_ROWS. It says nothing about speed, kernels,
several GPUs or the threads of backward. `prepare` compiles hooks that tell the C++ part of torch
that there is a GPU. A Python with that folder in PYTHONPATH has it.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NAME = "Pretended GPU"
# Streams and events that do nothing, and hooks that say yes.
HOOKS = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
constexpr auto CUDA = DeviceType::CUDA;
Stream only() { return Stream(Stream::DEFAULT, Device(CUDA, 0)); }
struct Guard : NoOpDeviceGuardImpl<CUDA> {
  Device getDevice() const override { return Device(CUDA, 0); }
  Device exchangeDevice(Device) const override { return Device(CUDA, 0); }
  Stream getStream(Device) const noexcept override { return only(); }
  Stream getDefaultStream(Device) const override { return only(); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}
namespace at {
struct CUDAHooks : CUDAHooksInterface {  // torch looks for hooks of this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}
"""
# Python runs this before anything else. The hooks must be there before torch first asks for them.
BEFORE_TORCH = """
import ctypes, importlib.util, sys
class Finder:
    is_looking = False
    def find_spec(name, path, target=None):
        if name != "torch" or Finder.is_looking:
            return None
        Finder.is_looking = True  # who only looks for torch, as a check does, meets it again
        spec = importlib.util.find_spec("torch")
        Finder.is_looking = False
        execute = spec.loader.exec_module
        def with_gpu(module):
            sys.meta_path.remove(Finder)
            ctypes.CDLL({library!r})
            execute(module)
            made = importlib.util.spec_from_file_location("pretend_gpu", {this!r})
            gpu = sys.modules["pretend_gpu"] = importlib.util.module_from_spec(made)
            made.loader.exec_module(gpu)
            gpu.install()
        spec.loader.exec_module = with_gpu
        return spec
sys.meta_path.insert(0, Finder)
"""
# A real GPU accepts tensors of the CPU in these.
MIXING = {
    "aten::copy_",
    "aten::_foreach_copy_",
    "aten::index",
    "aten::_to_copy",
    "aten::set_",
    "aten::index_put_",
    "aten::index_put",
    "aten::_index_put_impl_",
}
TENSOR: Any = torch.Tensor  # what torch lets a subclass do, its stubs do not


def prepare(folder: Path) -> None:
    """Compile the hooks, and write what Python runs first, into `folder`."""
    place = Path(torch.__file__).parent
    source = folder / "gpu.cpp"
    library = folder / "gpu.so"
    source.write_text(HOOKS)
    headers = [f"-I{place / 'include'}", f"-I{place / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{place / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{place / 'lib'}"]
    options = ["-std=c++20", "-shared", "-fPIC", *headers, str(source), "-o", str(library)]
    subprocess.run(["g++", *options, *libraries], check=True)
    text = BEFORE_TORCH.format(library=str(library), this=str(Path(__file__)))
    (folder / "sitecustomize.py").write_text(text)


def install() -> None:
    """Torch has the GPU from now on, in this process and those that it forks."""
    pretend()
    # torch.tensor(..., device="cuda") then comes by here; a module's tied weights stay tied.
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_swap_module_params_on_conversion(True)
    # The GPU's tensors are Python's. A thread of backward's own may still hold one when the
    # interpreter ends, and aborts the process then.
    torch.autograd.set_multithreading_enabled(False)
    Mode().__enter__()


class GpuTensor(TENSOR):
    """A tensor on the pretended GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "GpuTensor":
        made = TENSOR._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="cuda:0",
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})

    def __deepcopy__(self, memo):
        with torch.no_grad():
            memo[id(self)] = GpuTensor(self.inner.clone()).requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return self.detach().cpu().__reduce_ex__(protocol)

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def storage(self):
        return self.inner.storage()

    def data_ptr(self):
        return self.inner.data_ptr()

    def tolist(self):
        return self.detach().cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any):
        raise TypeError("pretended GPU: a tensor on the GPU has no numpy")

    __array__ = numpy


def computed(function: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives, on the CPU's tensors inside. Raises RuntimeError for two devices."""
    name = function.name().split(".")[0]
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    on_gpu = [x for x in tensors if isinstance(x, GpuTensor)]
    if name == "aten::_fused_sdp_choice" and on_gpu:
        return 0  # the formula: each fused kernel is of one kind of device
    if name == "aten::is_pinned":
        return False
    if name == "aten::mm" and on_gpu and len(args[0]) >= 4096:
        # Such a product only measures how fast a GPU is. A CPU without AVX takes minutes for it.
        return GpuTensor(torch.zeros_like(args[0].inner))
    if name == "aten::embedding" and len(args[1]) > int(os.environ.get("PRETENDED_ROWS", "1000")):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if on_gpu and name not in MIXING:
        # A number may come from anywhere.
        strange = [x for x in tensors if not isinstance(x, GpuTensor) and x.dim() > 0]
        if strange:
            shapes = ", ".join(f"{x.device.type} {tuple(x.shape)}" for x in tensors)
            raise RuntimeError(f"pretended GPU: {name} has tensors of two devices: {shapes}")
    # Where the result goes: to the device that was asked for, or to that of the arguments.
    device = ""
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"]).type
    is_on_gpu = bool(on_gpu) if device == "" else device == "cuda"
    if name in ("aten::copy_", "aten::index"):
        is_on_gpu = isinstance(tensors[0], GpuTensor)

    # The operation itself is computed on the CPU's tensors.
    if device == "cuda":
        kwargs = kwargs | {"device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}
    args, kwargs = tree_map(inner_tensor, (tuple(args), kwargs))
    result = function(*args, **kwargs)

    wrappers = {id(x.inner): x for x in on_gpu}

    def place(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) in wrappers:  # an argument that was changed in place
            return wrappers[id(x)]
        return GpuTensor(x) if is_on_gpu else x

    return tree_map(place, result)


def inner_tensor(x: Any) -> Any:
    """The CPU's tensor inside one on the GPU; anything else as it is."""
    return x.inner if isinstance(x, GpuTensor) else x


class Mode(TorchDispatchMode):
    """What makes tensors out of none comes by here."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


def pretend() -> None:
    """Replace the functions of torch.cuda that ask for a GPU."""
    no_random_numbers = torch.zeros(16, dtype=torch.uint8)
    memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    quiet = {"set_device", "_lazy_init", "synchronize", "empty_cache", "reset_peak_memory_stats"}
    quiet |= {"manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all"}
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "is_initialized": True,
        "is_bf16_supported": True,
        "get_device_name": NAME,
        "get_device_capability": (8, 0),
        "mem_get_info": (50 << 30, 80 << 30),
        "memory_stats": {},
        "get_rng_state": no_random_numbers,
        "get_rng_state_all": [no_random_numbers],
        **dict.fromkeys(memory, 1 << 20),
        **dict.fromkeys(quiet),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    torch.accelerator.is_available = torch.cuda.is_available
    torch.accelerator.device_count = torch.cuda.device_count
    torch.accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cuda")
    TENSOR.cuda = lambda self, *args, **kwargs: self.to("cuda")
    TENSOR.pin_memory = lambda self, *args, **kwargs: self
