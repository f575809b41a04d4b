"""Triton's interpreter at six times its speed: a plugin of pytest for processes with TRITON_INTERPRET=1.

What a kernel computes is untouched. At every call of a device function the interpreter looks through its whole language
for what it has to replace, of which nothing is left after the first one of a launch: here once a launch. A reduction by
a function of the kernel's own goes through its elements one by one: here all of a slice go at once, slice after slice,
which is the same order. Dtypes, and what a tensor says of its shape, are looked up. And additions and products of
integers are not done twice, the second time in 64 bits to see that they do not overflow: indices of these cases are
small, and LATTN_COMPILE_ALL=1 looks at them all the same.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape

interpreter: Any = importlib.import_module("triton.runtime.interpreter")

_whole, _launch, _table = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype
_numpy_dtype = functools.cache(_table)
_replaced: set[int] | None = None
"""Languages that are replaced for the launch that is running; None outside of one."""


@functools.cache
def _languages(fn: Any) -> set[int]:
    return {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}


def _patch_lang(fn: Any) -> Any:
    global _replaced
    found = _languages(fn)
    if _replaced is not None and found and found <= _replaced:
        return interpreter._LangPatchScope()
    scope = _whole(fn)
    if _replaced is not None:
        _replaced |= found
    return scope


def _call(self: Any, *args: Any, **kwargs: Any) -> None:
    global _replaced
    _replaced = set()
    try:
        _launch(self, *args, **kwargs)
    finally:
        _replaced = None


def _get_np_dtype(dtype: Any) -> Any:
    return _numpy_dtype(dtype.scalar) if type(dtype.scalar) is tl.dtype else _table(dtype)


def _generic_reduce(self: Any, given: tuple[Any, ...]) -> list[Any]:
    """Of tensors and a function of as many pairs of elements: the function has no branches, so slices go through it."""
    parts, axis = self.unravel(given, self.axis)

    def slices(i: int) -> list[Any]:
        return [self.to_tensor(x.handle.data.take(i, axis), x.dtype) for x in parts]

    found = slices(0)
    for i in range(1, parts[0].handle.data.shape[axis]):
        combined = self.combine_fn.fn(*found, *slices(i))
        combined = combined if isinstance(combined, tuple) else (combined,)
        found = [self.to_tensor(_numbers(y, x), x.dtype) for x, y in zip(found, combined, strict=True)]
    numbers = [_numbers(x, x) for x in found]
    if self.keep_dims:
        axes = axis if self.axis is not None else tuple(range(given[0].handle.data.ndim))
        numbers = [np.expand_dims(x, axes) for x in numbers]
    return [self.to_tensor(x, part.dtype) for x, part in zip(numbers, parts, strict=True)]


def _numbers(x: Any, like: Any) -> Any:
    """What `to_tensor` takes: an array, or one number of it for a scalar."""
    data = np.broadcast_to(x.handle.data if isinstance(x, tl.core.tensor) else x, like.handle.data.shape)
    return data if like.type.is_block() else data.item()


@functools.cache
def _block(element: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """What a type of blocks and its tensors say of a shape."""
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    shape, numel = tl.core.tuple(list(sizes)), validate_block_shape(sizes)
    of_tensors = {"shape": tl.core.tuple([tl.constexpr(n) for n in sizes]), "numel": tl.constexpr(numel)}
    return {"sizes": sizes, "shape": shape, "numel": numel, "name": f"<{shape}, {element}>", "of_tensors": of_tensors}


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = getattr(shape, "values", shape)
    sizes = tuple([n.value if isinstance(n, tl.constexpr) else n for n in sizes])
    self.__dict__.update(_block(element_ty.name, sizes), element_ty=element_ty)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.__dict__.update(type.of_tensors if type.is_block() else _SCALAR)


_SCALAR = {"shape": tl.core.tuple([]), "numel": tl.constexpr(1)}


def _equal(self: Any, other: Any) -> bool:
    return self is other or _types_equal(self, other)


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    a, b = getattr(lhs.type, "sizes", None), getattr(rhs.type, "sizes", None)
    if a == b:
        return lhs, rhs
    if a is None or b is None or len(a) != len(b) or any(m != n and m != 1 != n for m, n in zip(a, b, strict=True)):
        return _broadcast_all(self, lhs, rhs)
    sizes = [max(m, n) for m, n in zip(a, b, strict=True)]
    return tuple(x if own == sizes else _spread(x, sizes) for x, own in ((lhs, list(a)), (rhs, list(b))))


def _spread(x: Any, sizes: list[int]) -> Any:
    handle = interpreter.TensorHandle(np.broadcast_to(x.handle.data, sizes), x.handle.dtype.scalar)
    return tl.core.tensor(handle, tl.core.block_type(x.dtype, sizes))


def _operands(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Two tensors of one dtype, pointers and offsets, and a tensor and a number of its kind: nothing to promote."""
    if isinstance(rhs, tl.core.tensor) and rhs.dtype.name in _PLAIN:
        if isinstance(lhs, tl.core.tensor):
            if lhs.dtype is rhs.dtype or (lhs.dtype.is_ptr() and rhs.dtype.is_int() and True in args[:1]):
                return _broadcast(self, lhs, rhs)
        elif type(lhs) in _PLAIN[rhs.dtype.name] and abs(lhs) < 1 << 31:
            return _filled(lhs, rhs), rhs
    elif isinstance(lhs, tl.core.tensor) and type(rhs) in _PLAIN.get(lhs.dtype.name, ()) and abs(rhs) < 1 << 31:
        return lhs, _filled(rhs, lhs)
    return _all_operands(self, lhs, rhs, *args, **kwargs)


_PLAIN = {"fp32": (float, int), "fp64": (float, int), "int32": (int,), "int64": (int,)}


def _filled(number: float, like: Any) -> Any:
    data = np.full(like.handle.data.shape, number or 0, dtype=_get_np_dtype(like.dtype))  # no -0.0, as it has it
    return tl.core.tensor(interpreter.TensorHandle(data, like.dtype), like.type)


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    def called(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return member.__wrapped__(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

    scope.set_attr(obj, name, called)


_semantic = type(interpreter.interpreter_semantic)
_types_equal, _broadcast_all = tl.core.dtype.__eq__, _semantic.broadcast_impl_value
_all_operands = _semantic.binary_op_type_checking_impl


interpreter._patch_lang, interpreter._get_np_dtype = _patch_lang, _get_np_dtype
interpreter.GridExecutor.__call__ = _call
interpreter.ReduceOps.generic_reduce = _generic_reduce
interpreter._patch_attr = _patch_attr
tl.core.block_type.__init__, tl.core.tensor.__init__ = _init_block_type, _init_tensor
tl.core.dtype.__eq__ = _equal
_semantic.broadcast_impl_value, _semantic.binary_op_type_checking_impl = _broadcast, _operands
if "LATTN_COMPILE_ALL" not in os.environ:
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
