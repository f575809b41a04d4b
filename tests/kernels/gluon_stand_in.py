"""Kernels written in Triton's Gluon, for Triton's interpreter, which knows Triton's own language only.

`interpreted` makes a module anew with a stand-in for Gluon: layouts are nothing, shared memory is a list of
tensors, copies are done at once. It finds wrong indices, masks, orders and formulas, and says nothing about layouts,
barriers or what a copy overtakes.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

__all__ = ["interpreted"]


class _Shared:
    """Shared memory: places of tensors, or one tensor, maybe seen transposed."""

    def __init__(self, places: list[Any], at: int | None = None, flipped: bool = False) -> None:
        self._places, self._at, self._flipped = places, at, flipped

    def index(self, at: Any) -> _Shared:
        return _Shared(self._places, _number(at))

    def permute(self, order: tuple[int, int]) -> _Shared:
        assert tuple(order) == (1, 0)
        return _Shared(self._places, self._at, not self._flipped)

    def load(self, layout: Any) -> Any:
        assert self._at is not None
        x = self._places[self._at]
        return tl.trans(x) if self._flipped else x

    def store(self, x: Any) -> None:
        assert self._at is not None
        self._places[self._at] = x


def _number(x: Any) -> int:
    return int(x.handle.data.reshape(-1)[0]) if hasattr(x, "handle") else int(x)


def _copy(target: _Shared, pointer: Any, mask: Any = None) -> None:
    target.store(tl.load(pointer))


class _Layout:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Language(types.ModuleType):
    constexpr = tl.constexpr
    NVMMADistributedLayout = DotOperandLayout = SliceLayout = SwizzledSharedLayout = BlockedLayout = _Layout

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
    def allocate_shared_memory(dtype: Any, shape: Any, layout: Any) -> _Shared:
        return _Shared([None] * int(shape[0]))

    @staticmethod
    def num_warps() -> int:
        return 8

    @staticmethod
    def thread_barrier() -> None:
        pass


def _jit(fn: Any = None, **options: Any) -> Any:
    return triton.jit(fn, **options) if fn is not None else lambda fn: triton.jit(fn, **options)


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    return module


def interpreted(module: types.ModuleType, folder: Path) -> types.ModuleType:
    """The module with the stand-in in the place of Gluon, from a copy of its source in `folder`."""
    language = _Language("triton.experimental.gluon.language")
    gluon = _module("triton.experimental.gluon", language=language, jit=_jit)
    copies = _module(
        "async_copy", async_copy_global_to_shared=_copy, commit_group=lambda: None, wait_group=lambda n: None
    )
    ampere = _module("ampere", async_copy=copies, mma_v2=lambda a, b, acc: tl.dot(a, b, acc))
    found = {
        "triton.experimental": _module("triton.experimental", gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": language,
        "triton.experimental.gluon.language.nvidia": _module("nvidia", ampere=ampere),
        "triton.experimental.gluon.language.nvidia.ampere": ampere,
    }
    # The interpreter knows a constant by how Triton's own language spells it.
    assert module.__file__ is not None
    source = Path(module.__file__).read_text().replace("gl.constexpr", "tl.constexpr")
    first = "from triton.experimental import gluon\n"
    source = source.replace(first, "import triton.language as tl\n" + first)
    path = folder / Path(module.__file__).name
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"interpreted_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    kept = {name: sys.modules.get(name) for name in found}
    sys.modules.update(found)
    try:
        spec.loader.exec_module(made)
    finally:
        for name, before in kept.items():
            sys.modules.pop(name, None)
            if before is not None:
                sys.modules[name] = before
    return made
