"""Kernels written in Triton's Gluon, for Triton's interpreter, which knows Triton's own language only.

`interpreted` makes a module anew with a stand-in for Gluon: layouts are nothing, shared memory is a list of
tensors, copies are done at once. It finds wrong indices, masks, orders and formulas, and says nothing about layouts,
barriers or what a copy overtakes.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels import ptx

__all__ = ["Language", "interpreted", "jit", "made_anew", "number", "tensor"]


class _Type(NamedTuple):
    shape: list[int]


class _Shared:
    """Shared memory, full of rubbish, or a part of it, maybe seen otherwise."""

    layout = None

    def __init__(self, dtype: Any, array: Any) -> None:
        self._dtype, self._array = dtype, array
        self.type = _Type(list(array.shape))

    @classmethod
    def allocated(cls, dtype: Any, shape: Any) -> _Shared:
        array = np.empty([number(n) for n in shape], interpreter._get_np_dtype(dtype))
        array.view(np.uint8)[...] = 0xFF if dtype.is_floating() else 0x7F  # NaN, of E4M3 too
        return cls(dtype, array)

    def index(self, at: Any) -> _Shared:
        return _Shared(self._dtype, self._array[number(at)])

    def permute(self, order: tuple[int, ...]) -> _Shared:
        return _Shared(self._dtype, self._array.transpose(order))

    def _reinterpret(self, dtype: Any, shape: Any, layout: Any) -> _Shared:
        assert dtype == self._dtype and self._array.flags.c_contiguous
        return _Shared(dtype, self._array.reshape([number(n) for n in shape]))

    def load(self, layout: Any) -> Any:
        return tensor(self._array.copy(), self._dtype)

    def store(self, x: Any) -> None:
        assert list(x.shape) == list(self._array.shape), (x.shape, self._array.shape)
        self._array[...] = x.handle.data


def tensor(x: Any, dtype: Any) -> Any:
    """An array as the interpreter has it."""
    return tl.tensor(interpreter.TensorHandle(x, dtype), tl.block_type(dtype, list(x.shape)) if x.ndim else dtype)


def number(x: Any) -> int:
    if hasattr(x, "handle"):
        return int(np.asarray(x.handle.data).reshape(-1)[0])
    return int(getattr(x, "value", x))


def _copy(target: _Shared, pointer: Any, mask: Any = None) -> None:
    target.store(tl.load(pointer))


class _Descriptor:
    """What Gluon's tensor descriptor is made of, and where its boxes lie in a tensor on the CPU."""

    def __init__(self, base: Any, shape: list[int], strides: list[int], block_shape: list[int], layout: Any) -> None:
        self._shape, self._box = shape, block_shape
        self._seen = torch.as_strided(base, shape, strides)

    def box(self, at: Any) -> Any:
        first = [number(x) for x in at]
        assert all(i >= 0 and i + n <= size for i, n, size in zip(first, self._box, self._shape, strict=True))
        return self._seen[tuple(slice(i, i + n) for i, n in zip(first, self._box, strict=True))]


def _fetch(rows: _Descriptor, at: Any, bar: Any, target: _Shared, pred: Any = True) -> None:
    if number(pred):
        target._array[...] = rows.box(at).numpy()


def _put(rows: _Descriptor, at: Any, source: _Shared) -> None:
    rows.box(at).copy_(torch.from_numpy(source._array))


class _Layout:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class Language(types.ModuleType):
    constexpr = tl.constexpr
    NVMMADistributedLayout = DotOperandLayout = SliceLayout = SwizzledSharedLayout = BlockedLayout = _Layout
    DistributedLinearLayout = NVMMASharedLayout = _Layout

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)

    @staticmethod
    def arange(begin: int, end: int, layout: Any = None) -> Any:
        return tl.arange(begin, end)

    @staticmethod
    def zeros(shape: Any, dtype: Any, layout: Any = None) -> Any:
        return tl.zeros(shape, dtype)

    @staticmethod
    def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
        return tl.full(shape, value, dtype)

    @staticmethod
    def convert_layout(x: Any, layout: Any, assert_trivial: bool = False) -> Any:
        return x

    @staticmethod
    def fma(x: Any, y: Any, z: Any) -> Any:
        """Rounded once, almost always; Triton's interpreter rounds twice."""
        wide = [tl.cast(a, tl.float64) if hasattr(a, "handle") else a for a in (x, y, z)]
        return tl.cast(wide[0] * wide[1] + wide[2], tl.float32)

    @staticmethod
    def reduce(x: Any, axis: int, combine: Any) -> Any:
        """One place of the axis after the other, as a thread does, but all others at once."""
        many = isinstance(x, tuple | tl.tuple)
        arrays = [y.handle.data for y in x] if many else [x.handle.data]
        dtypes = [y.dtype for y in x] if many else [x.dtype]

        def places(i: int) -> list[Any]:
            taken = [np.take(y, i, axis) for y in arrays]
            pairs = zip(taken, dtypes, strict=True)
            return [tensor(np.asarray(y), d) for y, d in pairs]

        total: Any = places(0)
        for i in range(1, arrays[0].shape[axis]):
            total = combine(*total, *places(i))
            total = list(total) if many else [total]
        return tuple(total) if many else total[0]

    @staticmethod
    def inline_asm_elementwise(asm: Any, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
        many = isinstance(dtype, tuple | tl.tuple)
        dtypes = list(dtype) if many else [dtype]
        arrays = np.broadcast_arrays(*(x.handle.data for x in args))
        registers = ptx.run(str(getattr(asm, "value", asm)), [x.copy() for x in arrays], len(dtypes))
        found = [tensor(x.view(interpreter._get_np_dtype(d)), d) for x, d in zip(registers, dtypes, strict=True)]
        return tuple(found) if many else found[0]

    @staticmethod
    def allocate_shared_memory(dtype: Any, shape: Any, layout: Any) -> _Shared:
        return _Shared.allocated(dtype, shape)

    @staticmethod
    def num_warps() -> int:
        return 8

    @staticmethod
    def thread_barrier() -> None:
        pass


def jit(fn: Any = None, **options: Any) -> Any:
    return triton.jit(fn, **options) if fn is not None else lambda fn: triton.jit(fn, **options)


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    return module


def interpreted(module: types.ModuleType, folder: Path) -> types.ModuleType:
    """The module with the stand-in in the place of Gluon, from a copy of its source in `folder`."""
    language = Language("triton.experimental.gluon.language")
    gluon = _module("triton.experimental.gluon", language=language, jit=jit, constexpr_function=lambda fn: fn)
    copies = _module(
        "async_copy", async_copy_global_to_shared=_copy, commit_group=lambda: None, wait_group=lambda n: None
    )
    ampere = _module("ampere", async_copy=copies, mma_v2=lambda a, b, acc: tl.dot(a, b, acc))
    nothing = lambda *args, **kwargs: None  # noqa: E731
    hopper = _module(
        "hopper",
        fence_async_shared=nothing,
        mbarrier=_module("mbarrier", MBarrierLayout=_Layout, init=nothing, expect=nothing, wait=nothing),
        tma=_module("tma", async_copy_global_to_shared=_fetch, async_copy_shared_to_global=_put, store_wait=nothing),
    )
    found = {
        "triton.experimental": _module("triton.experimental", gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": language,
        "triton.experimental.gluon.language.nvidia": _module("nvidia", ampere=ampere),
        "triton.experimental.gluon.language.nvidia.ampere": ampere,
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.nvidia": _module("nvidia"),
        "triton.experimental.gluon.nvidia.hopper": _module("hopper", TensorDescriptor=_Descriptor),
    }
    return made_anew((module,), found, folder)


def made_anew(
    modules: Sequence[types.ModuleType], found: dict[str, types.ModuleType], folder: Path
) -> types.ModuleType:
    """The last of `modules`, each made from a copy of its source in `folder` where imports find `found` and, in a later
    one, those before it."""
    kept = {name: sys.modules.get(name) for name in (*found, *(module.__name__ for module in modules))}
    made = modules[-1]
    sys.modules.update(found)
    try:
        for module in modules:
            # The interpreter knows a constant by how Triton's own language spells it.
            assert module.__file__ is not None
            source = Path(module.__file__).read_text().replace("gl.constexpr", "tl.constexpr")
            first = "from triton.experimental import gluon\n"
            path = folder / Path(module.__file__).name
            path.write_text(source.replace(first, "import triton.language as tl\n" + first))
            spec = importlib.util.spec_from_file_location(module.__name__, path)
            assert spec is not None and spec.loader is not None
            made = importlib.util.module_from_spec(spec)
            sys.modules[module.__name__] = made
            spec.loader.exec_module(made)
    finally:
        for name, before in kept.items():
            sys.modules.pop(name, None)
            if before is not None:
                sys.modules[name] = before
    return made
