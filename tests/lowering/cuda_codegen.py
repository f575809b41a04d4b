"""What Inductor would write for a GPU, on a machine that has none.

`generated` compiles a function of fake CUDA tensors, up to where Inductor would build and load what it has
written. `kernels_in` reads the kernels out of that.

Private interfaces of torch and Triton throughout, as of torch 2.11 with Triton 3.6, built for CUDA, and torch 2.13 with
Triton 3.7, built for CPUs.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._dynamo import device_interface
from torch._inductor import config, graph, scheduler
from torch._inductor.runtime import hints, triton_heuristics
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tests.kernels.offline import Launch

__all__ = ["Stopped", "Written", "fake_cuda", "generated", "kernels_in", "written"]

TARGET = GPUTarget("cuda", 90, 32)

_PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=150 << 30,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=227 * 1024,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


class _Driver:
    """As much of a driver as kernels are written with."""

    utils = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": 227 * 1024})

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@functools.cache
def _guard_of_cuda() -> None:
    """Lets the dispatcher of a build without CUDA switch to the device: the guard of meta tensors does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 16).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    if guards[cuda] is None:
        guards[cuda] = guards[meta]


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Inside, torch and Triton find a Hopper GPU on which nothing can be run; fake tensors may be on it."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    interface = device_interface.CudaInterface
    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: _PROPERTIES,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
    }
    own = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: _PROPERTIES,
        "get_compute_capability": lambda device=None: 90,
        "is_bf16_supported": lambda including_emulation=False: True,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
    }
    _guard_of_cuda()
    before = driver._active
    driver.set_active(_Driver())
    hints.DeviceProperties.create.cache_clear()
    with contextlib.ExitStack() as stack:
        for name, function in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        for name, function in own.items():
            stack.enter_context(mock.patch.object(interface, name, staticmethod(function)))
        stack.enter_context(
            mock.patch.object(interface.Worker, "get_device_properties", lambda device=None: _PROPERTIES)
        )
        stack.enter_context(mock.patch.object(scheduler, "has_triton", lambda *args: True, create=True))
        stack.enter_context(mock.patch("torch.utils._triton.has_triton", lambda *args: True))
        stack.enter_context(mock.patch("torch._inductor.utils.has_triton", lambda *args: True, create=True))
        stack.enter_context(mock.patch("torch._inductor.fx_passes.fuse_attention._sfdp_init", lambda device=None: None))
        lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # as a fake mode does where it finds no GPU
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        stack.enter_context(mock.patch("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None))
        mode = stack.enter_context(FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True))
        try:
            yield mode
        finally:
            driver._active = before
            hints.DeviceProperties.create.cache_clear()


class Stopped(Exception):
    """What was compiled has been called, and cannot run."""


@contextlib.contextmanager
def written() -> Iterator[list[str]]:
    """Collects the modules that Inductor writes meanwhile, in order; to call one of them raises `Stopped`."""
    sources: list[str] = []

    def stop(self: Any) -> Any:
        code, _ = self.codegen_with_cpp_wrapper() if self.cpp_wrapper else self.codegen()
        sources.append(code.value)
        return SimpleNamespace(call=_stopped, __file__="", key="", recursively_apply_fns=None)

    with (
        mock.patch.object(graph.GraphLowering, "compile_to_module", stop),
        mock.patch("torch._functorch.config.force_non_lazy_backward_lowering", True),
        config.patch(force_disable_caches=True, compile_threads=1, joint_graph_constant_folding=False),
    ):
        yield sources


def _stopped(args: Any) -> None:
    raise Stopped


def generated(function: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """The modules that Inductor writes for `function(*args)` compiled by this backend: forward, then backward."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="lattn_compile", fullgraph=True, options=options)
    with written() as sources, contextlib.suppress(Stopped):
        compiled(*args)
    return sources


@dataclass
class Written:
    """A kernel in a generated module, and the arguments of the module's launches of it."""

    name: str
    source: str
    launches: list[str]

    @property
    def is_ours(self) -> bool:
        return "user_autotune" in self.source

    def launch(self) -> Launch:
        """As Inductor's launcher would compile it."""
        found: dict[str, Any] = {}

        def autotune(**options: Any) -> Callable[[Any], Any]:
            found.update(options)
            return lambda kernel: kernel

        path = Path(tempfile.mkdtemp()) / f"{self.name}.py"
        path.write_text(self.source)
        scope: dict[str, Any] = {"__file__": str(path), "__name__": self.name}
        with mock.patch.object(triton_heuristics, "user_autotune", autotune):
            exec(compile(self.source, str(path), "exec"), scope)
        kernel = scope[re.sub(r"_\d+$", "", self.name)]
        meta = found["triton_meta"]
        options = {k: x for c in found["configs"] for k, x in c.items() if k in ("num_warps", "num_stages")}
        options["enable_fp_fusion"] = meta["enable_fp_fusion"]
        aligned = [kernel.arg_names[at] for (at,) in meta["configs"][0]]
        return Launch(kernel, meta["signature"], meta["constants"], aligned, options)


def kernels_in(module: str) -> list[Written]:
    """The kernels of a module, as it would read them: every one is code."""
    found = []
    for node in ast.walk(ast.parse(module)):
        if not isinstance(node, ast.Assign) or not ast.unparse(node.value).startswith("async_compile.triton("):
            continue
        assert isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call)
        name, source = node.targets[0].id, ast.literal_eval(node.value.args[1])
        compile(source, name, "exec")
        found.append(Written(name, source, re.findall(rf"^ +{name}\.run\((.*)\)$", module, re.MULTILINE)))
    return found
