"""Triton's interpreter at three times its speed: a plugin of pytest for processes with TRITON_INTERPRET=1.

What a kernel computes is untouched. At every call of a device function the interpreter looks through its whole language
for what it has to replace, of which nothing is left after the first one of a launch: here once a launch. A table of
dtypes is kept. And additions and products of integers are not done twice, the second time in 64 bits to see that they
do not overflow: indices of these cases are small, and LATTN_COMPILE_ALL=1 looks at them all the same.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from typing import Any

import triton.language as tl

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


interpreter._patch_lang, interpreter._get_np_dtype = _patch_lang, _get_np_dtype
interpreter.GridExecutor.__call__ = _call
if "LATTN_COMPILE_ALL" not in os.environ:
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
